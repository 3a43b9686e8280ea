"""`team.c` as a shared library: built once in the user's cache folder, where a C compiler is found, and loaded.

A home folder may be shared by different machines. So the name of the file says for which of them it was built, and
what is damaged or does not load is built again. A folder to which other users can write is not used: the library is
then built for this process alone.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

from jax import ffi

from loopfeed.models.trusted_folder import file_fault, folder_fault, make_private_folder, user_cache_folder

_SOURCE = Path(__file__).with_name("team.c")
_COMPILERS = ("cc", "gcc", "clang")
# The instructions are named: a compiler may have been set up for those of the machine on which it runs.
_OPTIONS = ("-O2", "-march=x86-64", "-std=c11", "-fPIC", "-shared", "-pthread")
_LIMIT_S = 60.0
_FOLDER = "kernels"
_MOST_BYTES = 1 << 24


def cache_fault() -> str | None:
    """Return why the library in the user's cache folder is not used, if there is such a folder; None if it may be."""
    cache = user_cache_folder()
    try:
        return folder_fault(cache / _FOLDER) if cache is not None and (cache / _FOLDER).is_dir() else None
    except OSError:
        return None


def load_team() -> ctypes.CDLL | None:
    """Return the library, which is built if there is none that loads; None if it cannot be built here."""
    if (cache := user_cache_folder()) is None:
        return None
    folder = cache / _FOLDER
    try:
        if folder_fault(folder) is not None:
            with tempfile.TemporaryDirectory(prefix="loopfeed-") as place:
                built = _build(Path(place))
                return None if built is None else ctypes.CDLL(str(built))
        if (built := _find(folder)) is not None:
            try:
                return ctypes.CDLL(str(built))
            except OSError:
                # It was built beside other libraries of the system.
                built.unlink(missing_ok=True)
        built = _build(folder)
        return None if built is None else ctypes.CDLL(str(built))
    except (OSError, subprocess.SubprocessError):
        # No right to write or to execute, no room, no header, or a compiler that fails.
        return None


def _find(folder: Path) -> Path | None:
    """Return the library if it has the content with which it was built; remove it if not."""
    if not folder.is_dir():
        return None
    _check_may_execute(folder)
    for path in sorted(folder.glob(f"{_stem()}-*.so")):
        is_loadable = file_fault(path, folder.stat(), most_bytes=_MOST_BYTES) is None
        # A loader that maps a damaged file can kill the process.
        if is_loadable and path.name == f"{_stem()}-{_digest(path.read_bytes())}.so":
            return path
        path.unlink(missing_ok=True)
    return None


def _stem() -> str:
    """Return the name of the library without the digest of its content: all that decides where it can be used."""
    libc = "".join(platform.libc_ver()) or "libc"
    return f"team-{platform.machine()}-{libc}-{_digest(_SOURCE.read_bytes(), version('jaxlib'), *_OPTIONS)}"


def _digest(*parts: bytes | str) -> str:
    data = b"\0".join(part.encode() if isinstance(part, str) else part for part in parts)
    return hashlib.sha256(data).hexdigest()[:16]


def _check_may_execute(folder: Path) -> None:
    """Raise PermissionError if the folder's file system executes nothing, where no library could be loaded."""
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise PermissionError(f"{folder} is on a file system that is mounted with noexec")


def _build(folder: Path) -> Path | None:
    """Build the library and return its path; None if there is no compiler."""
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        return None
    make_private_folder(folder)
    _check_may_execute(folder)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        made = Path(place) / "team.so"
        words = [compiler, *_OPTIONS, "-I", ffi.include_dir(), str(_SOURCE), "-o", str(made)]
        subprocess.run(words, check=True, capture_output=True, timeout=_LIMIT_S)
        with made.open("rb") as file:
            os.fsync(file.fileno())
            built = folder / f"{_stem()}-{_digest(file.read())}.so"
        made.replace(built)
    return built
