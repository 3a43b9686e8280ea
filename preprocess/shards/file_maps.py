"""Files of this machine as memory, read-only, and what becomes of a read when such a file is cut short.

Not Python's `mmap`: before 3.13 it keeps a descriptor open for every file, of which a process may have no more than
1,024 on many machines, and a data set has thousands of files.

A page of a mapped file that is cut short, or that its disk can no longer read, ends a process by SIGBUS. Here such a
fault is answered (Linux): zeros take the place of the file's memory, the instruction that read goes on, and the map
says that it `is_torn`. Whoever reads asks for that *after* each copy, and uses nothing of a torn map. libwayland does
the same for memory that another process shares with it (`wl_shm_buffer_begin_access`). A fault is raised by the very
instruction that reads, never at a random one, so that the handler may run Python. A read costs no more for it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import weakref
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
# Where `siginfo_t` has the cause and the address, on Linux of 64 bits. A cause above 0 is the system's own.
_CODE_AT, _ADDRESS_AT = 8, 16
_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _SigAction(ctypes.Structure):
    """`struct sigaction` of glibc and musl on 64 bits."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


@dataclass(slots=True)
class _Region:
    """Mapped memory, and whether zeros stand in the place of its file."""

    address: int
    size_bytes: int
    is_torn: bool = False


@dataclass(frozen=True, slots=True)
class FileMap:
    """A file as memory.

    Attributes:
        array: uint8 ``[n]``, read-only; the file stays mapped as long as this array, or a view of it, is there.
    """

    array: NDArray[np.uint8]
    _region: _Region

    @property
    def is_torn(self) -> bool:
        """Whether the file was cut short, or a page of it could not be read.

        What was copied from `array` at any time before this is asked may then be zeros.
        """
        return self._region.is_torn


def map_file(file: int, size_bytes: int) -> FileMap:
    """Map the first ``size_bytes`` ≥ 1 of an open file.

    Raises:
        OSError: it can't be mapped.
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
    """Answers SIGBUS of this process in the memory that it knows; every other fault has the handler of before.

    Attributes:
        regions: what `map_file` has mapped, by address. Changed without a lock: the thread that faults might hold it.
        folders: files below these are mapped by TensorStore: how many are watching each.
        num_torn: mappings that were torn, by folder.
    """

    def __init__(self) -> None:
        self.regions: dict[int, _Region] = {}
        self.folders: dict[str, int] = {}
        self.num_torn: dict[str, int] = {}
        self._handler = _HANDLER(self._answer)
        self._before = _SigAction()
        own = _SigAction(handler=ctypes.cast(self._handler, ctypes.c_void_p), flags=_SA_SIGINFO)
        if _LIBC.sigaction(signal.SIGBUS, ctypes.byref(own), ctypes.byref(self._before)):
            raise OSError(ctypes.get_errno(), "SIGBUS can't be handled")

    def _answer(self, number: int, info: int, _context: int) -> None:
        is_fault = ctypes.c_int.from_address(info + _CODE_AT).value > 0
        address = ctypes.c_uint64.from_address(info + _ADDRESS_AT).value
        try:
            if is_fault and (self._tear_region(address) or self._tear_stores_mapping(address)):
                return
        except BaseException:  # noqa: BLE001 - nothing can be said from here; the signal is then not this handler's
            pass
        # As if this handler had never been there: a fault is raised again by its instruction, another signal by hand.
        _LIBC.sigaction(number, ctypes.byref(self._before), None)
        if not is_fault:
            os.kill(os.getpid(), number)

    def _tear_region(self, address: int) -> bool:
        for region in list(self.regions.values()):
            if region.address <= address < region.address + region.size_bytes:
                # First: whoever copies a zero sees this afterwards.
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
    """Return the guard of this process, which is there from the first call on; None where there can be none.

    How a process answers a signal belongs to the whole process, and so does what is mapped into it.
    """
    if not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    return _Guard()


class WatchedFolder:
    """Counts the files that were torn while TensorStore had them mapped; those below a folder, for as long as this is.

    TensorStore maps a file for a moment, in threads of its own; what it hands out of a torn one may be zeros.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._guard = os.path.realpath(folder) + os.sep, _guard()
        if self._guard is not None:
            self._guard.folders[self._folder] = self._guard.folders.get(self._folder, 0) + 1
            weakref.finalize(self, _stop_watching, self._guard, self._folder).atexit = False

    @property
    def num_torn(self) -> int:
        """How many files of the folder were torn so far."""
        return 0 if self._guard is None else self._guard.num_torn.get(self._folder, 0)


def _stop_watching(guard: _Guard, folder: str) -> None:
    guard.folders[folder] -= 1
    if not guard.folders[folder]:
        del guard.folders[folder]
