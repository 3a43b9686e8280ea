"""NVIDIA's driver by its own interface: memory, streams, events and copies.

Owns the signatures of the functions that are called (CUDA Driver API, `libcuda.so.1`, which comes with the driver: no
toolkit and nothing to compile) and turns their codes into errors. Knows nothing of batches or of jax.
"""

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

LIBRARY = "libcuda.so.1"

# CUdeviceptr is an integer of the machine's width, handles (context, stream, event) are pointers.
_DEVICE_POINTER, _HANDLE = c_uint64, c_void_p
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(_HANDLE), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (_HANDLE,),
    "cuCtxPopCurrent_v2": (POINTER(_HANDLE),),
    "cuCtxSynchronize": (),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemAlloc_v2": (POINTER(_DEVICE_POINTER), c_size_t),
    "cuMemFree_v2": (_DEVICE_POINTER,),
    "cuMemcpyHtoDAsync_v2": (_DEVICE_POINTER, c_void_p, c_size_t, _HANDLE),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _DEVICE_POINTER, c_size_t, _HANDLE),
    "cuMemcpyDtoDAsync_v2": (_DEVICE_POINTER, _DEVICE_POINTER, c_size_t, _HANDLE),
    "cuMemsetD32Async": (_DEVICE_POINTER, c_uint, c_size_t, _HANDLE),
    "cuStreamCreate": (POINTER(_HANDLE), c_uint),
    "cuStreamDestroy_v2": (_HANDLE,),
    "cuStreamSynchronize": (_HANDLE,),
    "cuStreamWaitEvent": (_HANDLE, _HANDLE, c_uint),
    "cuEventCreate": (POINTER(_HANDLE), c_uint),
    "cuEventDestroy_v2": (_HANDLE,),
    "cuEventRecord": (_HANDLE, _HANDLE),
    "cuEventSynchronize": (_HANDLE,),
    "cuEventElapsedTime": (POINTER(c_float), _HANDLE, _HANDLE),
}
"""The types of the arguments of every function that is called; each gives a CUresult, an int."""

# What only enqueues is called with the interpreter's lock held: to give the lock up for a microsecond is to wait for it
# behind the reader threads, nine times a batch. (Nine calls of libc took 3 times as long so, beside one busy thread.)
# Where a stream is full, as it may be behind a large network, such a call waits with it until the device, which needs
# nobody's lock, has come to the next kernels.
_BRIEF = frozenset(
    {
        "cuCtxPushCurrent_v2",
        "cuCtxPopCurrent_v2",
        "cuMemcpyHtoDAsync_v2",
        "cuMemcpyDtoHAsync_v2",
        "cuMemcpyDtoDAsync_v2",
        "cuMemsetD32Async",
        "cuStreamWaitEvent",
        "cuEventRecord",
        "cuEventElapsedTime",
    }
)

type Functions = Callable[[str], Callable[..., int]]
"""The name of a function of `PROTOTYPES` → the function, which takes what ctypes makes of its arguments."""

_SUCCESS = 0
# Page-locked for every context of the process.
_PORTABLE = 0x01
# A stream that does not wait for, nor hold up, the default stream of the context.
_NON_BLOCKING = 0x01
# Waiters sleep; without it they spin, on the core that the reader threads need.
_BLOCKING_SYNC, _DISABLE_TIMING = 0x01, 0x02


class CudaError(RuntimeError):
    """A call of NVIDIA's driver failed.

    Attributes:
        name: the driver's name of the error, as "CUDA_ERROR_OUT_OF_MEMORY".
    """

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


def load_functions() -> Functions:
    """Opens the driver's library.

    Raises:
        CudaError: it is not on this machine, or is older than the functions that are needed.
    """
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise CudaError(
            f"--transport cuda needs NVIDIA's driver, {LIBRARY}, which could not be opened ({error}): install the "
            "driver, or take --transport callback",
            "CUDA_ERROR_NO_DRIVER",
        ) from None

    def function(name: str) -> Callable[..., int]:
        try:
            prototype = ctypes.PYFUNCTYPE if name in _BRIEF else ctypes.CFUNCTYPE
            return prototype(c_int, *PROTOTYPES[name])((name, library))
        except AttributeError:
            raise CudaError(
                f"NVIDIA's driver, {LIBRARY}, must have {name} and has not: it is too old, install a newer one",
                "CUDA_ERROR_OLD_DRIVER",
            ) from None

    return function


class CudaDriver:
    """One device of the driver; for any number of threads.

    Every call is made inside `current`. Memory, streams and events are given back by whoever took them; the device is
    let go with the last reference to this. Addresses and handles are integers, sizes are bytes.

    Args:
        device: its number, from 0, as jax numbers those of this process.
        functions: the driver's; None opens its library.

    Raises:
        CudaError: there is no driver, or no such device.
    """

    def __init__(self, device: int = 0, functions: Functions | None = None) -> None:
        functions = functions or load_functions()
        self._functions = {name: functions(name) for name in PROTOTYPES}
        self._call("cuInit", 0)
        number = c_int()
        self._call("cuDeviceGet", ctypes.byref(number), device)
        self._device = number.value
        # The one that XLA computes in: its memory and streams are ours too.
        self._context = self._made("cuDevicePrimaryCtxRetain", self._device)
        release = self._functions["cuDevicePrimaryCtxRelease_v2"]
        weakref.finalize(self, release, self._device).atexit = False

    @contextmanager
    def current(self) -> Iterator[None]:
        """Makes the device that of this thread, inside the block."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(c_void_p()))

    def synchronize_device(self) -> None:
        """Waits until all that is enqueued on any stream is done."""
        self._call("cuCtxSynchronize")

    def allocate_pinned(self, num_bytes: int) -> int:
        """Gives page-locked memory of the host, which copies reach without another copy in between."""
        return self._made("cuMemHostAlloc", num_bytes, _PORTABLE)

    def free_pinned(self, address: int) -> None:
        """Gives back what `allocate_pinned` gave."""
        self._call("cuMemFreeHost", address)

    def allocate_device(self, num_bytes: int) -> int:
        """Gives memory of the device, aligned to 256 bytes."""
        address = _DEVICE_POINTER()
        self._call("cuMemAlloc_v2", ctypes.byref(address), num_bytes)
        return address.value

    def free_device(self, address: int) -> None:
        """Gives back what `allocate_device` gave."""
        self._call("cuMemFree_v2", address)

    def copy_to_device(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Enqueues a copy from page-locked memory, which must stay as it is until the copy is done."""
        self._call("cuMemcpyHtoDAsync_v2", target, source, num_bytes, stream)

    def copy_to_host(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Enqueues a copy to page-locked memory."""
        self._call("cuMemcpyDtoHAsync_v2", target, source, num_bytes, stream)

    def copy_on_device(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Enqueues a copy within the device."""
        self._call("cuMemcpyDtoDAsync_v2", target, source, num_bytes, stream)

    def fill_words(self, target: int, word: int, num_words: int, stream: int) -> None:
        """Enqueues the writing of one uint32 to every word of memory of the device."""
        self._call("cuMemsetD32Async", target, word, num_words, stream)

    def create_stream(self) -> int:
        """Gives a stream that is ordered with others by events alone."""
        return self._made("cuStreamCreate", _NON_BLOCKING)

    def destroy_stream(self, stream: int) -> None:
        """Gives back a stream; what is enqueued is done all the same."""
        self._call("cuStreamDestroy_v2", stream)

    def synchronize_stream(self, stream: int) -> None:
        """Waits until all that is enqueued is done."""
        self._call("cuStreamSynchronize", stream)

    def wait_for(self, stream: int, event: int) -> None:
        """Has what is enqueued from now on wait for the event's last record; the caller does not."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def create_event(self, *, timing: bool = False) -> int:
        """Gives an event, which has passed until it is recorded; `timing` makes it fit for `elapsed_s`."""
        return self._made("cuEventCreate", _BLOCKING_SYNC | (0 if timing else _DISABLE_TIMING))

    def destroy_event(self, event: int) -> None:
        """Gives back an event."""
        self._call("cuEventDestroy_v2", event)

    def record(self, event: int, stream: int) -> None:
        """Enqueues the event: it passes once all before it is done."""
        self._call("cuEventRecord", event, stream)

    def synchronize(self, event: int) -> None:
        """Waits until the event's last record is reached."""
        self._call("cuEventSynchronize", event)

    def elapsed_s(self, before: int, after: int) -> float:
        """Gives the seconds between two events that have passed, to half a microsecond."""
        elapsed_ms = c_float()
        self._call("cuEventElapsedTime", ctypes.byref(elapsed_ms), before, after)
        return elapsed_ms.value * 1e-3

    def _made(self, name: str, *arguments: int) -> int:
        """Calls a function that gives a handle or an address by its first argument."""
        made = c_void_p()
        self._call(name, ctypes.byref(made), *arguments)
        return made.value or 0

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._functions[name](*arguments)
        if code == _SUCCESS:
            return
        error, words = self._text("cuGetErrorName", code), self._text("cuGetErrorString", code)
        raise CudaError(f"NVIDIA's driver refused {name}: {error}, {words}{_remedy(name, error)}", error)

    def _text(self, name: str, code: int) -> str:
        text = c_char_p()
        if self._functions[name](code, ctypes.byref(text)) != _SUCCESS or text.value is None:
            return f"error {code}"
        return text.value.decode()


def _remedy(function: str, error: str) -> str:
    if error == "CUDA_ERROR_NO_DEVICE":
        return "; nvidia-smi must list a card, and CUDA_VISIBLE_DEVICES must not hide it"
    if error != "CUDA_ERROR_OUT_OF_MEMORY":
        return ""
    if function == "cuMemHostAlloc":
        return "; of the host's memory that can be page-locked, a smaller --prefetch or --batch needs less"
    return (
        "; a smaller --batch needs less, and XLA_PYTHON_CLIENT_MEM_FRACTION=0.7 leaves more of the card beside jax's "
        "own share"
    )
