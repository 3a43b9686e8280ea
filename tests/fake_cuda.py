"""A fake of NVIDIA's driver, with the same C signatures, that uses the memory of this process.

Streams are queues whose work is done in an order drawn from a seed, as late as possible or as early as allowed, so that
a caller cannot rely on more than the driver guarantees. Every rule of the driver that a caller can break is checked.
"""
# ruff: noqa: N802 - the driver's own names

import ctypes
import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

from loopfeed.engine.crossing.cuda.driver import PROTOTYPES

NAMES = {
    1: "CUDA_ERROR_INVALID_VALUE",
    2: "CUDA_ERROR_OUT_OF_MEMORY",
    100: "CUDA_ERROR_NO_DEVICE",
    201: "CUDA_ERROR_INVALID_CONTEXT",
    400: "CUDA_ERROR_INVALID_HANDLE",
    700: "CUDA_ERROR_ILLEGAL_ADDRESS",
}
# Functions that work without a current context.
_FREE = {
    "cuInit",
    "cuDeviceGet",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuGetErrorName",
    "cuGetErrorString",
}
CONTEXT = 0xC0


@dataclass
class _Event:
    has_timing: bool
    recorded: int = 0
    passed: int = 0
    passed_at: float = 0.0


@dataclass
class _Stream:
    is_prompt: bool = False
    work: deque[tuple[str, Callable[[], bool], Callable[[], None]]] = field(default_factory=deque)


class _RefusedError(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class FakeCuda:
    """A fake card.

    Args:
        seed: seed of the order in which the streams work.
        eagerness: share of calls at which enqueued work is done, 0 (only work that is waited for) … 1.
        takes_any_address: whether unknown addresses count as the device's (those of XLA on a CPU).

    Attributes:
        violations: descriptions of the rules that were broken.
        calls: number of calls of each function.
        log: the work that was done on the device, in order: (stream, kind).
    """

    def __init__(self, seed: int = 0, eagerness: float = 1.0, *, takes_any_address: bool = False) -> None:
        self._random, self._eagerness, self._takes_any = random.Random(seed), eagerness, takes_any_address
        self._guard = threading.RLock()
        self._here = threading.local()
        self._memory: dict[int, tuple[str, int, ctypes.Array[ctypes.c_char]]] = {}
        self._streams: dict[int, _Stream] = {}
        self._events: dict[int, _Event] = {}
        self._next = 0x1000
        self._now = 0.0
        self._faults: dict[str, tuple[int, int]] = {}
        self._keep: list[object] = []
        self.num_retained = 0
        self.violations: list[str] = []
        self.calls: Counter[str] = Counter()
        self.log: list[tuple[int, str]] = []

    # The side of the tests.

    def functions(self, name: str) -> Callable[..., int]:
        """Return a function with the driver's C signature, which converts its arguments accordingly."""

        def call(*arguments: object) -> int:
            with self._guard:
                return self._called(name, arguments)

        function = ctypes.CFUNCTYPE(ctypes.c_int, *PROTOTYPES[name])(call)
        self._keep.append(function)
        return function

    def fail(self, name: str, code: int, *, after: int = 0) -> None:
        """Make a function fail after `after` further calls."""
        with self._guard:
            self._faults[name] = (self.calls[name] + after, code)

    def new_stream(self, *, is_prompt: bool = False) -> int:
        """Return a stream of XLA; a prompt one does its work before a call returns, as XLA on a CPU requires."""
        with self._guard:
            return self._register(self._streams, _Stream(is_prompt))

    def new_memory(self, num_bytes: int) -> int:
        """Return device memory that XLA has allocated."""
        with self._guard:
            return self._allocate("device", num_bytes)

    def peek(self, address: int, num_bytes: int) -> bytes:
        """Return the present content of memory."""
        return ctypes.string_at(address, num_bytes)

    def compute(self, stream: int, function: Callable[[], None]) -> None:
        """Enqueue work of XLA; `function` is called when it is done."""
        with self._guard:
            self._enqueue(stream, "compute", function)

    def work(self, stream: int) -> None:
        """Do the work enqueued on one stream, up to a wait for another stream."""
        with self._guard:
            work = self._streams[stream].work
            while work and work[0][1]():
                self._do_next(stream)

    def has_passed(self, event: int) -> bool:
        """Return whether the last record of an event has been reached."""
        return self._events[event].passed == self._events[event].recorded > 0

    def finish(self) -> None:
        """Do all enqueued work."""
        with self._guard:
            self._run_until(lambda: not any(stream.work for stream in self._streams.values()))

    @contextmanager
    def as_xla(self):
        """Make the context current on this thread, as it is when XLA calls the host."""
        self._stack().append(CONTEXT)
        try:
            yield
        finally:
            self._stack().pop()

    def left(self) -> list[str]:
        """Return what was allocated and not freed, without XLA's own."""
        kinds = [kind for kind, _, _ in self._memory.values() if kind == "pinned"]
        ours = [f"{len(kinds)} pinned"] * bool(kinds)
        ours += [f"event {event:#x}" for event in self._events]
        if self.num_retained:
            ours.append("the context")
        return ours

    @property
    def num_device_blocks(self) -> int:
        return sum(kind == "device" for kind, _, _ in self._memory.values())

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    # The side of the driver.

    def _called(self, name: str, arguments: tuple[object, ...]) -> int:
        self.calls[name] += 1
        after, code = self._faults.get(name, (None, 0))
        if after is not None and self.calls[name] > after:
            return code
        try:
            if name not in _FREE and CONTEXT not in self._stack()[-1:]:
                raise _RefusedError(201, f"{name} without a current context")
            if self._eagerness and self._random.random() < self._eagerness:
                self._run_some()
            getattr(self, f"_{name}")(*arguments)
        except _RefusedError as refused:
            self.violations.append(f"{name}: {refused}")
            return refused.code
        return 0

    def _stack(self) -> list[int]:
        if not hasattr(self._here, "stack"):
            self._here.stack = []
        return self._here.stack

    def _register[T](self, table: dict[int, T], thing: T) -> int:
        self._next += 0x10
        table[self._next] = thing
        return self._next

    def _allocate(self, kind: str, num_bytes: int) -> int:
        if num_bytes <= 0:
            raise _RefusedError(1, f"{num_bytes} bytes of {kind} memory")
        block = ctypes.create_string_buffer(num_bytes)
        # So that unwritten memory does not look like zeros.
        ctypes.memset(block, 0xA5, num_bytes)
        address = ctypes.addressof(block)
        self._memory[address] = (kind, num_bytes, block)
        return address

    def _free_memory(self, kind: str, address: int) -> None:
        if self._memory.get(address, ("", 0, None))[0] != kind:
            raise _RefusedError(1, f"{address:#x} is not {kind} memory")
        self._run_until(lambda: not any(stream.work for stream in self._streams.values()))
        _, num_bytes, block = self._memory.pop(address)
        ctypes.memset(block, 0x5A, num_bytes)
        self._keep.append(block)

    def _check_memory(self, kind: str, address: int, num_bytes: int) -> None:
        if address % 4:
            raise _RefusedError(1, f"{address:#x} is not aligned")
        for start, (found, size, _) in self._memory.items():
            if start <= address < start + size:
                if found != kind or address + num_bytes > start + size:
                    raise _RefusedError(1, f"{num_bytes} bytes at {address:#x} of {size} bytes of {found} memory")
                return
        if not (kind == "device" and self._takes_any):
            raise _RefusedError(1, f"no {kind} memory at {address:#x}")

    def _copy(self, target: tuple[str, int], source: tuple[str, int], num_bytes: int, stream: int) -> None:
        def check() -> None:
            self._check_memory(*target, num_bytes)
            self._check_memory(*source, num_bytes)

        def copy() -> None:
            check()
            ctypes.memmove(target[1], source[1], num_bytes)

        check()
        self._enqueue(stream, f"{source[0]} to {target[0]}", copy)

    def _enqueue(
        self, stream: int, kind: str, do: Callable[[], None], is_ready: Callable[[], bool] = lambda: True
    ) -> None:
        if stream not in self._streams:
            raise _RefusedError(400, f"no stream {stream!r}")
        there = self._streams[stream]
        there.work.append((kind, is_ready, do))
        if there.is_prompt:
            self._run_until(lambda: not there.work)

    def _run_one(self) -> bool:
        ready = [number for number, stream in self._streams.items() if stream.work and stream.work[0][1]()]
        if not ready:
            return False
        self._do_next(self._random.choice(ready))
        return True

    def _do_next(self, number: int) -> None:
        kind, _, do = self._streams[number].work.popleft()
        self._now += 1.0
        self.log.append((number, kind))
        try:
            do()
        except _RefusedError as refused:
            self.violations.append(f"on the device, {kind}: {refused}")

    def _run_some(self) -> None:
        for _ in range(self._random.randrange(1, 6)):
            if not self._run_one():
                return

    def _run_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            if not self._run_one():
                raise _RefusedError(1, "a wait that no enqueued work can end")

    def _event(self, event: int) -> _Event:
        if event not in self._events:
            raise _RefusedError(400, f"no event {event!r}")
        return self._events[event]

    # The functions of the driver, under their own names.

    def _cuInit(self, flags):
        if flags:
            raise _RefusedError(1, f"flags {flags}")

    def _cuDeviceGet(self, number, ordinal):
        if ordinal:
            raise _RefusedError(100, f"no device {ordinal}")
        number[0] = 7

    def _cuGetErrorName(self, code, text):
        text[0] = NAMES.get(code, "CUDA_ERROR_UNKNOWN").encode()

    def _cuGetErrorString(self, code, text):
        text[0] = f"words of error {code}".encode()

    def _cuDevicePrimaryCtxRetain(self, context, device):
        if device != 7:
            raise _RefusedError(1, f"device {device}")
        self.num_retained += 1
        context[0] = CONTEXT

    def _cuDevicePrimaryCtxRelease_v2(self, device):
        if device != 7 or not self.num_retained:
            raise _RefusedError(1, "a context that was not retained")
        self.num_retained -= 1

    def _cuCtxPushCurrent_v2(self, context):
        if context != CONTEXT or not self.num_retained:
            raise _RefusedError(201, f"{context} is not retained")
        self._stack().append(context)

    def _cuCtxPopCurrent_v2(self, context):
        if not self._stack():
            raise _RefusedError(201, "nothing to pop")
        context[0] = self._stack().pop()

    def _cuCtxSynchronize(self):
        self._run_until(lambda: not any(stream.work for stream in self._streams.values()))

    def _cuMemHostAlloc(self, address, num_bytes, flags):
        if flags != 1:
            raise _RefusedError(1, f"flags {flags}")
        address[0] = self._allocate("pinned", num_bytes)

    def _cuMemFreeHost(self, address):
        self._free_memory("pinned", address)

    def _cuMemAlloc_v2(self, address, num_bytes):
        address[0] = self._allocate("device", num_bytes)

    def _cuMemFree_v2(self, address):
        self._free_memory("device", address)

    def _cuMemcpyHtoDAsync_v2(self, target, source, num_bytes, stream):
        self._copy(("device", target), ("pinned", source), num_bytes, stream)

    def _cuMemcpyDtoHAsync_v2(self, target, source, num_bytes, stream):
        self._copy(("pinned", target), ("device", source), num_bytes, stream)

    def _cuMemcpyDtoDAsync_v2(self, target, source, num_bytes, stream):
        self._copy(("device", target), ("device", source), num_bytes, stream)

    def _cuMemsetD32Async(self, target, word, num_words, stream):
        def fill() -> None:
            self._check_memory("device", target, 4 * num_words)
            ctypes.memmove(target, word.to_bytes(4, "little") * num_words, 4 * num_words)

        self._check_memory("device", target, 4 * num_words)
        self._enqueue(stream, "fill", fill)

    def _cuStreamCreate(self, stream, flags):
        if flags != 1:
            raise _RefusedError(1, f"flags {flags}: it would wait for the default stream")
        stream[0] = self._register(self._streams, _Stream())

    def _cuStreamDestroy_v2(self, stream):
        if stream not in self._streams:
            raise _RefusedError(400, f"no stream {stream!r}")
        self._run_until(lambda: not self._streams[stream].work)
        del self._streams[stream]

    def _cuStreamSynchronize(self, stream):
        if stream not in self._streams:
            raise _RefusedError(400, f"no stream {stream!r}")
        self._run_until(lambda: not self._streams[stream].work)

    def _cuStreamWaitEvent(self, stream, event, flags):
        if flags:
            raise _RefusedError(1, f"flags {flags}")
        there = self._event(event)
        version = there.recorded
        self._enqueue(stream, "wait", lambda: None, lambda: there.passed >= version)

    def _cuEventCreate(self, event, flags):
        if not flags & 1:
            raise _RefusedError(1, "an event without blocking synchronisation")
        event[0] = self._register(self._events, _Event(has_timing=not flags & 2))

    def _cuEventDestroy_v2(self, event):
        self._event(event)
        del self._events[event]

    def _cuEventRecord(self, event, stream):
        there = self._event(event)
        there.recorded += 1
        version = there.recorded

        def set_passed() -> None:
            there.passed, there.passed_at = version, self._now

        self._enqueue(stream, "record", set_passed)

    def _cuEventSynchronize(self, event):
        there = self._event(event)
        version = there.recorded
        self._run_until(lambda: there.passed >= version)

    def _cuEventElapsedTime(self, elapsed_ms, before, after):
        first, last = self._event(before), self._event(after)
        if not (first.has_timing and last.has_timing):
            raise _RefusedError(1, "an event without timing")
        if first.passed < first.recorded or last.passed < last.recorded:
            raise _RefusedError(1, "an event that has not passed")
        elapsed_ms[0] = last.passed_at - first.passed_at
