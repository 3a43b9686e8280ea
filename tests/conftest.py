"""What every test stands on: caches of its own, and no settings of the user."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _own_caches(tmp_path_factory):
    """Keeps the tests out of the user's cache, and the user's settings out of the tests."""
    before = dict(os.environ)
    os.environ["XDG_CACHE_HOME"] = os.fspath(tmp_path_factory.mktemp("cache"))
    for name in ("FEEDLOOP_DATA", "JAX_COMPILATION_CACHE_DIR"):
        os.environ.pop(name, None)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def cache_folder(_own_caches) -> Path:
    return Path(os.environ["XDG_CACHE_HOME"]) / "feedloop"


@pytest.fixture
def untraced_blocks():
    """Has residual blocks traced anew, for tests that put something else into them."""
    from models import resnet

    resnet._apply_block.clear_cache()  # type: ignore[attr-defined]
    yield
    resnet._apply_block.clear_cache()  # type: ignore[attr-defined]
