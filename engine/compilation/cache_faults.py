"""Turns jax's warnings about its compilation cache into one notice, and removes what a full disk left in the cache."""

import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_PREFIX = "Error (reading|writing) persistent compilation cache entry for '(.*?)': (?:\\w+: )?(.*)"
# File systems round modification times, some of them to two seconds.
_ROUNDING_S = 2.0


@contextmanager
def reporting_cache_faults(folder: str, notify: Callable[[str], None]) -> Iterator[None]:
    """Replace jax's warnings about entries of the compilation cache by one notice at the first of them.

    jax warns once per program, in two lines. It leaves a part of an entry that it cannot write, and never replaces an
    entry that it cannot read, so each later launch would warn and compile again: both are removed here, for a program
    that cannot be read with all of its entries, because jax does not say which one it was.

    Args:
        folder: the cache folder, local or a URL.
        notify: called with the notice.
    """
    started, seen = time.time() - _ROUNDING_S, [False]
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message="Error (reading|writing) persistent compilation cache")
        show = warnings.showwarning

        def on_warning(message: Warning | str, *where: Any, **more: Any) -> None:
            found = re.match(_PREFIX, str(message), re.DOTALL)
            if found is None:
                show(message, *where, **more)
                return
            is_damaged = found[1] == "reading" and "[Errno" not in found[3]
            if found[1] == "writing" or is_damaged:
                _remove_newer(folder, found[2], 0.0 if is_damaged else started)
            if not seen[0]:
                seen[0] = True
                notify(_notice(folder, *found.groups()))

        warnings.showwarning = on_warning
        yield


def _notice(folder: str, action: str, program: str, reason: str) -> str:
    reason = " ".join(re.sub(r"^\[Errno \d+\] ", "", reason).split())
    if action == "writing":
        return (
            f"warning: the compilation cache {folder} cannot be written ({reason}), so the next launch compiles again: "
            "make room there, or give another folder with --compilation-cache"
        )
    return (
        f"warning: the compilation cache {folder} has entries that cannot be read, such as {program}-* ({reason}), "
        "which are compiled again, and replaced if they are damaged"
    )


def _remove_newer(folder: str, program: str, since: float) -> None:
    """Remove the entries of a program that were written after a time, in seconds since the epoch."""
    if "://" in folder:
        return
    for path in Path(folder).glob(f"{program}-*-cache"):
        with suppress(OSError):
            if path.stat().st_mtime >= since:
                path.unlink()
