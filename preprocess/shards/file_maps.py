"""Read-only memory maps of local files. The process survives the truncation of a mapped file.

Python's `mmap` is not used: before 3.13 it keeps a descriptor open for every file. On many machines a process may have
no more than 1,024 of them, and a data set has thousands of files.

Reading a page of a mapped file that was truncated, or that its disk can no longer read, kills a process with SIGBUS.
Here the signal is handled (Linux): the file's memory is replaced by zeros, the reading instruction continues, and the
map is marked as `is_torn`. Readers check that *after* each copy, and discard everything from a torn map. libwayland
does the same for memory shared by another process (`wl_shm_buffer_begin_access`). The signal is raised by the reading
instruction itself, never at an arbitrary one, so the handler may run Python. Reads do not become slower.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import tempfile
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value

_ZEROS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
_SA_SIGINFO = 4
# Offsets of the cause and the address in `siginfo_t` on 64-bit Linux. A cause above 0 comes from the kernel.
_CODE_AT, _ADDRESS_AT = 8, 16
_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _SigAction(ctypes.Structure):
    """The `struct sigaction` of glibc and musl on 64-bit systems."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


@dataclass(slots=True)
class _Region:
    """A region of mapped memory, with a flag that tells whether it was replaced by zeros."""

    address: int
    size_bytes: int
    is_torn: bool = False


@dataclass(frozen=True, slots=True)
class FileMap:
    """A read-only memory map of a file.

    Attributes:
        array: uint8 ``[n]``, read-only; the file stays mapped as long as this array or a view of it exists.
    """

    array: NDArray[np.uint8]
    _region: _Region

    @property
    def is_torn(self) -> bool:
        """Whether the file was truncated or one of its pages could not be read.

        If so, anything copied from `array` before this check may be zeros.
        """
        return self._region.is_torn


def map_file(file: int, size_bytes: int) -> FileMap:
    """Map the first ``size_bytes`` bytes (at least 1) of an open file into memory.

    Raises:
        OSError: the file can't be mapped.
    """
    guard = _guard()
    address = _map(None, size_bytes, mmap.MAP_SHARED, file)
    region = _Region(address, size_bytes)
    memory = (ctypes.c_uint8 * size_bytes).from_address(address)
    weakref.finalize(memory, _unmap, region, guard).atexit = False
    if guard is not None:
        guard.regions[address] = region
    array = np.frombuffer(memory, np.uint8)
    array.flags.writeable = False
    return FileMap(array, region)


def can_map_files(folder: Path) -> bool:
    """Return whether a new file in a folder can be mapped; True if that is unknown, because no file can be made."""
    with suppress(OSError), tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        file.write(b"x")
        try:
            map_file(file.fileno(), 1)
        except OSError:
            return False
    return True


def _unmap(region: _Region, guard: _Guard | None) -> None:
    if guard is not None:
        guard.regions.pop(region.address, None)
    _LIBC.munmap(region.address, region.size_bytes)


def _map(address: int | None, size_bytes: int, flags: int, file: int) -> int:
    found = _LIBC.mmap(address, size_bytes, mmap.PROT_READ, flags, file, 0)
    if found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found)


class _Guard:
    """A SIGBUS handler for registered memory regions; any other fault is passed to the previous handler.

    Attributes:
        regions: the regions mapped by `map_file`, by address. Changed without a lock, which the faulting thread might
            hold.
        folders: number of watchers of each folder whose files TensorStore maps.
        num_torn: number of torn mappings, by folder.
    """

    def __init__(self) -> None:
        self.regions: dict[int, _Region] = {}
        self.folders: dict[str, int] = {}
        self.num_torn: dict[str, int] = {}
        self._handler = _HANDLER(self._handle)
        self._before = _SigAction()
        own = _SigAction(handler=ctypes.cast(self._handler, ctypes.c_void_p), flags=_SA_SIGINFO)
        if _LIBC.sigaction(signal.SIGBUS, ctypes.byref(own), ctypes.byref(self._before)):
            raise OSError(ctypes.get_errno(), "can't install a SIGBUS handler")

    def _handle(self, number: int, info: int, _context: int) -> None:
        is_fault = ctypes.c_int.from_address(info + _CODE_AT).value > 0
        address = ctypes.c_uint64.from_address(info + _ADDRESS_AT).value
        try:
            if is_fault and (self._tear_region(address) or self._tear_stores_mapping(address)):
                return
        except BaseException:  # noqa: BLE001 - no exception can leave a handler; the previous handler gets the signal
            pass
        # Restore the previous handler. The instruction raises a fault again; any other signal is sent again here, to
        # this thread: it is blocked here until the handler returns, and another thread would take it at any later time.
        _LIBC.sigaction(number, ctypes.byref(self._before), None)
        if not is_fault:
            signal.pthread_kill(threading.get_ident(), number)

    def _tear_region(self, address: int) -> bool:
        for region in list(self.regions.values()):
            if region.address <= address < region.address + region.size_bytes:
                # Set first, so that a reader that copies a zero sees it afterwards.
                region.is_torn = True
                _map(region.address, region.size_bytes, _ZEROS, -1)
                return True
        return False

    def _tear_stores_mapping(self, address: int) -> bool:
        for line in Path("/proc/self/maps").read_bytes().splitlines():
            # 7f00-7f10 r--s 00000000 fe:00 1234    /path
            bounds, _, rest = line.partition(b" ")
            start, stop = (int(bound, 16) for bound in bounds.split(b"-"))
            if start <= address < stop:
                path = os.fsdecode(rest.split(None, 4)[-1])
                watched = [folder for folder in list(self.folders) if path.startswith(folder)]
                if not watched:
                    return False
                for folder in watched:
                    self.num_torn[folder] = self.num_torn.get(folder, 0) + 1
                _map(start, stop - start, _ZEROS, -1)
                return True
        return False


@lru_cache(maxsize=1)
def _guard() -> _Guard | None:
    """Return this process's SIGBUS handler, installing it on the first call; return None on unsupported systems.

    There is one per process, because signal handlers and memory maps belong to the whole process.
    """
    if not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    return _Guard()


class WatchedFolder:
    """A counter that, while it exists, counts the mapped files under a folder that are truncated or become unreadable.

    Such a file is called torn. Files are mapped briefly by TensorStore, in its own threads; data that it returns from a
    torn file may be zeros.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._guard = os.path.realpath(folder) + os.sep, _guard()
        if self._guard is not None:
            self._guard.folders[self._folder] = self._guard.folders.get(self._folder, 0) + 1
            weakref.finalize(self, _stop_watching, self._guard, self._folder).atexit = False

    @property
    def num_torn(self) -> int:
        """Number of mapped files found to be truncated or unreadable so far."""
        return 0 if self._guard is None else self._guard.num_torn.get(self._folder, 0)


def _stop_watching(guard: _Guard, folder: str) -> None:
    guard.folders[folder] -= 1
    if not guard.folders[folder]:
        del guard.folders[folder]
