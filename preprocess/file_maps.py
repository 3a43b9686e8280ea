"""Files of this machine as memory, read-only.

Not Python's `mmap`: before 3.13 it keeps a descriptor open for every file, of which a process may have no more than
1,024 on many machines, and a data set has thousands of files.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import numpy as np
from numpy.typing import NDArray

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


def map_file(file: int, size_bytes: int) -> NDArray[np.uint8]:
    """Maps the first `size_bytes` ≥ 1 of an open file; lasts as long as the array, or a view of it.

    Raises:
        OSError: it can't be mapped.
    """
    address = _LIBC.mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    memory = (ctypes.c_uint8 * size_bytes).from_address(address)
    weakref.finalize(memory, _LIBC.munmap, address, size_bytes).atexit = False
    array = np.frombuffer(memory, np.uint8)
    array.flags.writeable = False
    return array
