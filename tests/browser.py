"""A headless Chromium for tests: the one that is installed, or the one that scripts/test --integrations unpacked."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
# Where scripts/test --integrations unpacks Debian's packages if no browser is installed.
_UNPACKED = Path(__file__).parents[1] / ".venv/chromium"
_FLAGS = (
    "--no-sandbox",  # the user namespaces that the sandbox needs are switched off in many containers
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_START_MS = 60_000.0


@contextmanager
def open_browser() -> Iterator["Browser"]:
    """Yield a browser; skip the test if there is none, or no Playwright to drive it."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra integrations)")
    program, environment = _find_program()
    if program is None:
        pytest.skip("Chromium is not installed, and scripts/test --integrations did not unpack it (Debian: chromium)")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=os.fspath(program), args=_FLAGS, env=environment, timeout=_START_MS
        )
        try:
            yield browser
        finally:
            browser.close()


def _find_program() -> tuple[Path | None, dict[str, str | float | bool]]:
    """Return the browser, None without one, and its environment."""
    environment: dict[str, str | float | bool] = dict(os.environ)
    for name in _NAMES:
        if (found := shutil.which(name)) is not None:
            return Path(found), environment
    program = _UNPACKED / "usr/lib/chromium/chromium"
    if not program.is_file():
        return None, environment
    libraries = sorted({os.fspath(path.parent) for path in _UNPACKED.rglob("*.so*")})
    return program, environment | {
        "LD_LIBRARY_PATH": ":".join(libraries),
        "FONTCONFIG_FILE": os.fspath(_UNPACKED / "fonts.conf"),
    }
