"""Bindings to NVIDIA's driver: memory, streams, events and copies.

Owns the signatures of the called functions and converts their error codes to exceptions. The functions belong to the
CUDA Driver API in `libcuda.so.1`, which comes with the driver, so that no toolkit or compiler is needed. Does not
depend on batches or jax.
"""

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

LIBRARY = "libcuda.so.1"

# CUdeviceptr is an integer of the machine's word size; handles (context, stream, event) are pointers.
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
"""Argument types of every called function; each returns a CUresult, an int."""

# Functions that only enqueue are called with the GIL held: to get it back after releasing it for a microsecond, they
# would wait for the reader threads, nine times per batch. (With one busy thread, nine libc calls took 3 times as long.)
# If a stream is full, as with a large network, such a call holds the GIL until the device, which does not need it,
# reaches the next kernels.
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
"""Name of a function in `PROTOTYPES` → the function, which ctypes calls with converted arguments."""

_SUCCESS = 0
# Page-locked in every context of the process.
_PORTABLE = 0x01
# A stream that neither waits for nor blocks the default stream of the context.
_NON_BLOCKING = 0x01
# Waiting threads sleep; without this flag they spin, on a core that the reader threads need.
_BLOCKING_SYNC, _DISABLE_TIMING = 0x01, 0x02


class CudaError(RuntimeError):
    """Error raised when a call to NVIDIA's driver fails.

    Attributes:
        name: the driver's name of the error, such as "CUDA_ERROR_OUT_OF_MEMORY".
    """

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


def load_functions() -> Functions:
    """Load NVIDIA's driver library and return a callable that looks up its functions by name.

    Raises:
        CudaError: if the library cannot be opened; the lookup raises it for a function that an old driver lacks.
    """
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise CudaError(
            f"--transport cuda needs NVIDIA's driver, {LIBRARY}, which could not be opened ({error}): install the "
            "driver, or choose --transport callback",
            "CUDA_ERROR_NO_DRIVER",
        ) from None

    def function(name: str) -> Callable[..., int]:
        try:
            prototype = ctypes.PYFUNCTYPE if name in _BRIEF else ctypes.CFUNCTYPE
            return prototype(c_int, *PROTOTYPES[name])((name, library))
        except AttributeError:
            raise CudaError(
                f"NVIDIA's driver, {LIBRARY}, does not have the function {name}: install a newer driver",
                "CUDA_ERROR_OLD_DRIVER",
            ) from None

    return function


class CudaDriver:
    """Access to one device through the driver; thread-safe.

    Every method must be called inside `current`. The caller releases memory, streams and events; the device is
    released with the last reference to this object. Addresses and handles are integers, sizes are in bytes.

    Args:
        device: number of the device, from 0, as jax numbers the devices of this process.
        functions: lookup of the driver's functions; None loads its library.

    Raises:
        CudaError: if there is no driver, or no such device.
    """

    def __init__(self, device: int = 0, functions: Functions | None = None) -> None:
        functions = functions or load_functions()
        self._functions = {name: functions(name) for name in PROTOTYPES}
        self._call("cuInit", 0)
        number = c_int()
        self._call("cuDeviceGet", ctypes.byref(number), device)
        self._device = number.value
        # XLA computes in the primary context, so its memory and streams are usable here.
        self._context = self._create("cuDevicePrimaryCtxRetain", self._device)
        release = self._functions["cuDevicePrimaryCtxRelease_v2"]
        weakref.finalize(self, release, self._device).atexit = False

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the device current on this thread for the duration of the `with` block."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(c_void_p()))

    def synchronize_device(self) -> None:
        """Wait until all work enqueued on any stream is done."""
        self._call("cuCtxSynchronize")

    def allocate_pinned(self, num_bytes: int) -> int:
        """Allocate page-locked host memory, which the device can copy to and from directly."""
        return self._create("cuMemHostAlloc", num_bytes, _PORTABLE)

    def free_pinned(self, address: int) -> None:
        """Free memory returned by `allocate_pinned`."""
        self._call("cuMemFreeHost", address)

    def allocate_device(self, num_bytes: int) -> int:
        """Allocate device memory, aligned to 256 bytes."""
        address = _DEVICE_POINTER()
        self._call("cuMemAlloc_v2", ctypes.byref(address), num_bytes)
        return address.value

    def free_device(self, address: int) -> None:
        """Free memory returned by `allocate_device`."""
        self._call("cuMemFree_v2", address)

    def copy_to_device(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Enqueue a copy from page-locked memory to the device; the source must not change until the copy is done."""
        self._call("cuMemcpyHtoDAsync_v2", target, source, num_bytes, stream)

    def copy_to_host(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Enqueue a copy from the device to page-locked memory."""
        self._call("cuMemcpyDtoHAsync_v2", target, source, num_bytes, stream)

    def copy_on_device(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Enqueue a copy within the device."""
        self._call("cuMemcpyDtoDAsync_v2", target, source, num_bytes, stream)

    def fill_words(self, target: int, word: int, num_words: int, stream: int) -> None:
        """Enqueue an operation that fills device memory with one uint32 value."""
        self._call("cuMemsetD32Async", target, word, num_words, stream)

    def create_stream(self) -> int:
        """Create a stream that synchronizes with other streams only through events."""
        return self._create("cuStreamCreate", _NON_BLOCKING)

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream; work already enqueued on it still completes."""
        self._call("cuStreamDestroy_v2", stream)

    def synchronize_stream(self, stream: int) -> None:
        """Wait until all work enqueued on the stream is done."""
        self._call("cuStreamSynchronize", stream)

    def wait_for(self, stream: int, event: int) -> None:
        """Make later work on the stream wait for the event's most recent recording, without blocking the caller."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def create_event(self, *, timing: bool = False) -> int:
        """Create an event, which counts as completed until it is first recorded; `timing` enables `elapsed_s`."""
        return self._create("cuEventCreate", _BLOCKING_SYNC | (0 if timing else _DISABLE_TIMING))

    def destroy_event(self, event: int) -> None:
        """Destroy an event."""
        self._call("cuEventDestroy_v2", event)

    def record(self, event: int, stream: int) -> None:
        """Record the event on the stream; it completes when all earlier work on the stream is done."""
        self._call("cuEventRecord", event, stream)

    def synchronize(self, event: int) -> None:
        """Wait until the event's most recent recording has completed."""
        self._call("cuEventSynchronize", event)

    def elapsed_s(self, before: int, after: int) -> float:
        """Return the time between two completed events in seconds, with a resolution of half a microsecond."""
        elapsed_ms = c_float()
        self._call("cuEventElapsedTime", ctypes.byref(elapsed_ms), before, after)
        return elapsed_ms.value * 1e-3

    def _create(self, name: str, *arguments: int) -> int:
        """Call a function that returns a handle or an address through its first argument."""
        created = c_void_p()
        self._call(name, ctypes.byref(created), *arguments)
        return created.value or 0

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._functions[name](*arguments)
        if code == _SUCCESS:
            return
        error, explanation = self._text("cuGetErrorName", code), self._text("cuGetErrorString", code)
        raise CudaError(f"NVIDIA's driver refused {name}: {error}, {explanation}{_remedy(name, error)}", error)

    def _text(self, name: str, code: int) -> str:
        text = c_char_p()
        if self._functions[name](code, ctypes.byref(text)) != _SUCCESS or text.value is None:
            return f"error {code}"
        return text.value.decode()


def _remedy(function: str, error: str) -> str:
    if error == "CUDA_ERROR_NO_DEVICE":
        return "; nvidia-smi must list a GPU, and CUDA_VISIBLE_DEVICES must not hide it"
    if error != "CUDA_ERROR_OUT_OF_MEMORY":
        return ""
    if function == "cuMemHostAlloc":
        return "; choose a smaller --prefetch or --batch to use less page-locked host memory"
    return (
        "; choose a smaller --batch to use less GPU memory, or set XLA_PYTHON_CLIENT_MEM_FRACTION=0.7 to leave more "
        "of it outside jax's own share"
    )
