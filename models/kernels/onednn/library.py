"""oneDNN as a shared library: finding it, loading it once a process, and its functions with their types.

The library comes with the extra `kernels` (the wheel `onednn-cpu-gomp`, oneDNN 3.2 under Apache-2.0, C interface, no
compiler, no SYCL). It needs the GNU OpenMP runtime `libgomp.so.1` of the system.
"""

import ctypes
import os
import platform
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

from loopfeed.models.xla_threads import given_num_threads


class ForkSafeLock:
    """A lock for `with`, which is free in a forked child: there the thread that held it does not exist.

    The thread that holds it must not fork.
    """

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


DISTRIBUTION = "onednn-cpu-gomp"
"""The wheel that holds the library."""

_FILE = "libdnnl.so.3"
_SUCCESS = 0
_CPU = 1

_POINTER = ctypes.c_void_p


class MissingKernelsError(RuntimeError):
    """oneDNN cannot be used here; the message says why and what to do.

    Args:
        fault: why.
        remedy: what to do, such as a command; empty if nothing helps.
    """

    def __init__(self, fault: str, remedy: str = "") -> None:
        super().__init__(fault, remedy)
        self.remedy = remedy

    def __str__(self) -> str:
        return ": ".join(filter(None, self.args))


class Isa(IntEnum):
    """Instruction sets that oneDNN tells apart, as the bits of `dnnl_cpu_isa_t`; each includes the ones before."""

    AVX512 = 0x27
    AVX512_BF16 = 0xE7
    AMX = 0xFEF


_NEEDED = {"float32": Isa.AVX512, "bfloat16": Isa.AVX512_BF16}
_ISA_NAMES = {
    Isa.AVX512: "AVX-512",
    Isa.AVX512_BF16: "AVX-512, bfloat16",
    Isa.AMX: "AMX",
}


@dataclass(frozen=True)
class Library:
    """A loaded oneDNN with its engine and stream for this processor.

    Attributes:
        short: its functions, called without releasing Python's lock, since each returns at once.
        long: the same functions, called with the lock released.
        engine: its handle, which lives as long as the process.
        streams: one handle for each thread.
        threads: the OpenMP runtime, of which each of our threads uses one thread.
        num_threads: number of cores that this process may use.
        isa: the bits of the instruction sets that it uses here.
        version: such as "3.2.0".
    """

    short: Any
    long: Any
    engine: ctypes.c_void_p
    streams: tuple[ctypes.c_void_p, ...]
    threads: Any
    num_threads: int
    isa: int
    version: str

    def has(self, isa: Isa) -> bool:
        """Return whether the kernels may use these instruction sets."""
        return self.isa & isa == isa

    def describe(self) -> str:
        """Return its version and the newest instruction sets that it uses here, such as "oneDNN 3.2.0 (AVX-512)"."""
        names = [name for isa, name in _ISA_NAMES.items() if self.has(isa)]
        return f"oneDNN {self.version} ({names[-1]})"

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """Let the calling thread run and build primitives without a team of OpenMP threads inside the block.

        These wait for each other by spinning, some of them inside kernels, so that a neighbour who takes one core
        costs a multiple of that core (see docs/concepts/kernels.md). What a primitive computes depends on the number.
        """
        before = self.threads.omp_get_max_threads()
        self.threads.omp_set_num_threads(1)
        try:
            yield
        finally:
            self.threads.omp_set_num_threads(before)

    def supports(self, dtype: str) -> bool:
        """Return whether the kernels for arrays of this dtype, such as "bfloat16", are fast here."""
        return dtype in _NEEDED and self.has(_NEEDED[dtype])

    def check(self, status: int, what: str) -> None:
        """Raise RuntimeError if a function of the library did not succeed."""
        if status != _SUCCESS:
            raise RuntimeError(f"oneDNN {self.version} failed to {what} (status {status}, dnnl_status_t)")


_loading = ForkSafeLock()


def load_library() -> Library:
    """Load oneDNN once per process.

    Raises:
        MissingKernelsError: if it is not installed, cannot be loaded, or does not support this processor.
    """
    # A primitive of one engine does not run on a stream of another, so two threads must not load it twice.
    with _loading:
        return _load_library()


@cache
def _load_library() -> Library:
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "AMD64"):
        raise MissingKernelsError(
            f"oneDNN's kernels exist for x86-64 Linux only, and this is {sys.platform} on {machine}"
        )
    path = _library_path()
    try:
        # Already loaded by oneDNN, or by another library of this process.
        long, threads = ctypes.CDLL(str(path)), ctypes.PyDLL("libgomp.so.1")
    except OSError as error:
        remedy = "install libgomp (Debian: apt install libgomp1)" if "libgomp" in str(error) else ""
        raise MissingKernelsError(f"{path} could not be loaded ({error})", remedy) from error
    short = ctypes.PyDLL(str(path))
    _declare(short)
    _declare(long)
    version = short.dnnl_version().contents
    num_threads = _num_threads()
    engine, streams = _POINTER(), tuple(_POINTER() for _ in range(num_threads))
    found = Library(
        short,
        long,
        engine,
        streams,
        threads,
        num_threads,
        short.dnnl_get_effective_cpu_isa(),
        f"{version.major}.{version.minor}.{version.patch}",
    )
    if not found.has(Isa.AVX512):
        raise MissingKernelsError("the processor has no AVX-512, without which oneDNN's kernels were not measured")
    found.check(short.dnnl_engine_create(ctypes.byref(engine), _CPU, 0), "create an engine")
    for stream in streams:
        found.check(short.dnnl_stream_create(ctypes.byref(stream), engine, 1), "create a stream")
    return found


def _num_threads() -> int:
    """Return how many threads run primitives: those that XLA has, one per core of the scheduler's affinity or fewer."""
    return min(len(os.sched_getaffinity(0)), given_num_threads() or sys.maxsize)


def _library_path() -> Path:
    from importlib import metadata  # takes as long to import as the rest of this package

    try:
        files = metadata.distribution(DISTRIBUTION).files or ()
    except metadata.PackageNotFoundError:
        files = ()
    for file in files:
        if file.name == _FILE and (path := Path(str(file.locate()))).exists():
            return path
    raise MissingKernelsError(
        f"{DISTRIBUTION} is not installed", "pip install 'loopfeed[kernels]'" if _has_avx512() else ""
    )


def _has_avx512() -> bool:
    """Return whether the processor has AVX-512, with which the kernels are faster, as far as the system says."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
            return next((" avx512f " in line for line in lines if line.startswith("flags")), True)
    except OSError:
        return True


class _Version(ctypes.Structure):
    _fields_ = (("major", ctypes.c_int), ("minor", ctypes.c_int), ("patch", ctypes.c_int))


class Argument(ctypes.Structure):
    """One argument of a primitive (`dnnl_exec_arg_t`)."""

    _fields_ = (("number", ctypes.c_int), ("memory", _POINTER))


def _declare(library: Any) -> None:
    """Declare the types of the functions in use: ctypes would pass 64-bit values as 32 bits."""
    number, out = ctypes.c_int, ctypes.POINTER(_POINTER)
    sizes, size = ctypes.POINTER(ctypes.c_int64), ctypes.c_size_t
    windows = (sizes, sizes, sizes, sizes)
    types: dict[str, tuple[Any, ...]] = {
        "engine_create": (out, number, size),
        "stream_create": (out, _POINTER, ctypes.c_uint),
        "memory_desc_create_with_tag": (out, number, sizes, number, number),
        "memory_desc_create_submemory": (out, _POINTER, sizes, sizes),
        "memory_desc_create_with_strides": (out, number, sizes, number, sizes),
        "memory_desc_equal": (_POINTER, _POINTER),
        "memory_create": (out, _POINTER, _POINTER, _POINTER),
        "memory_set_data_handle": (_POINTER, _POINTER),
        "primitive_attr_create": (out,),
        "primitive_attr_set_scratchpad_mode": (_POINTER, number),
        "primitive_desc_query": (_POINTER, number, number, _POINTER),
        "primitive_create": (out, _POINTER),
        "primitive_execute": (_POINTER, _POINTER, number, ctypes.POINTER(Argument)),
        "reorder_primitive_desc_create": (out, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER),
        "convolution_forward_primitive_desc_create": (
            out,
            *(_POINTER, number, number, _POINTER, _POINTER, _POINTER, _POINTER),
            *(*windows, _POINTER),
        ),
        "convolution_backward_data_primitive_desc_create": (
            out,
            *(_POINTER, number, _POINTER, _POINTER, _POINTER),
            *(*windows, _POINTER, _POINTER),
        ),
        "convolution_backward_weights_primitive_desc_create": (
            out,
            *(_POINTER, number, _POINTER, _POINTER, _POINTER, _POINTER),
            *(*windows, _POINTER, _POINTER),
        ),
        "sum_primitive_desc_create": (
            out,
            *(_POINTER, _POINTER, number, ctypes.POINTER(ctypes.c_float), ctypes.POINTER(_POINTER), _POINTER),
        ),
        "matmul_primitive_desc_create": (out, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER),
    }
    for name, arguments in types.items():
        getattr(library, f"dnnl_{name}").argtypes = arguments
    library.dnnl_primitive_desc_query_md.argtypes = (_POINTER, number, number)
    library.dnnl_primitive_desc_query_md.restype = _POINTER
    library.dnnl_memory_desc_get_size.argtypes = (_POINTER,)
    library.dnnl_memory_desc_get_size.restype = size
    library.dnnl_version.restype = ctypes.POINTER(_Version)
