"""The transport for NVIDIA GPUs; it calls host functions when work is enqueued, not when the work is executed.

XLA calls a host function while it launches kernels, with the stream of the launch and the addresses of operands and
results; whatever the function enqueues on the stream is done in order. `call` waits for the stream, because its
function needs values; `emit` delivers values later, by a thread that waits for the event of their copy; `enqueue` only
adds work to the stream.
"""

import math
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.buffer_callback import buffer_callback
from numpy.typing import NDArray

from loopfeed.engine.crossing.cuda.arena import Arena
from loopfeed.engine.crossing.cuda.driver import CudaDriver
from loopfeed.engine.crossing.token import TOKEN_SHAPE, Token
from loopfeed.engine.crossing.transport import Array, Called, HostFunction, ThreadState
from loopfeed.preprocess.workers import Worker


class _Job(NamedTuple):
    event: int
    function: Callable[[], None]


class Collector:
    """A queue that calls functions in the order of submission, each after its event has completed.

    Args:
        driver: driver of the events.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._worker = Worker(self._work, "cuda-collector")

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the thread, after which nothing is called, or None."""
        return self._worker.failure

    def start(self) -> None:
        """Start the thread; call this method only once."""
        self._worker.start()

    def put(self, event: int, function: Callable[[], None]) -> None:
        """Have the thread call `function` once `event` has completed; the event must already be recorded."""
        self._jobs.put(_Job(event, function))

    def close(self, timeout_s: float) -> None:
        """Wait until every function has been called; safe to call repeatedly.

        Raises:
            TimeoutError: if that takes longer than `timeout_s` seconds; the thread is then abandoned.
        """
        self._jobs.put(None)
        if not self._worker.wait(timeout_s):
            raise TimeoutError(
                f"the program's records did not reach the host within {timeout_s:g} s of the program's end: check "
                "with nvidia-smi whether the GPU hangs, and check whether the terminal or disk to which the losses are "
                "written is blocked"
            )

    def _work(self) -> None:
        with self._driver.current():
            while (job := self._jobs.get()) is not None:
                self._driver.synchronize(job.event)
                job.function()
                # Otherwise the job would keep the launch alive until the next job.
                del job


type Handler = Callable[[int, Sequence[int], Sequence[int]], None]
"""(stream, addresses of operands, addresses of results) → None; enqueues work without waiting."""

# Most records of losses in flight to the host; if the host falls further behind, the program waits for it.
_MOST_SMALL_BLOCKS = 256
_SMALL_BYTES = 1 << 16
# Most snapshots in flight; each is as large as the state.
_MOST_LARGE_BLOCKS = 1
_BLOCK_TIMEOUT_S = 600.0
_LOOK_EVERY_S = 0.25
_CLOSE_TIMEOUT_S = 60.0
_ALIGNMENT = 16
_WORD_BYTES = 4
_NOT_OPEN = "the cuda transport must be open while its program runs, but is closed: run the program inside running()"


@dataclass(frozen=True)
class XlaBuffers:
    """Accessor for the stream and the addresses in the arguments that XLA passes to a host function."""

    def stream_of(self, context: Any) -> int:
        """Return the stream on which XLA enqueues work."""
        return int(context.stream)

    def address_of(self, buffer: Any) -> int:
        """Return the device address of an operand or a result."""
        return int(buffer.__cuda_array_interface__["data"][0])


class CudaTransport:
    """An `loopfeed.engine.crossing.transport.Transport` for NVIDIA GPUs; its `enqueue` calls the host without waiting.

    If the driver refuses every call, so that not even zeros can be answered, the program ends with the driver's error.

    Args:
        driver: driver of the device on which the program runs.
        buffers: accessor for XLA's arguments.
    """

    name = "cuda"
    runs_ahead = True

    def __init__(self, driver: CudaDriver, buffers: XlaBuffers | None = None) -> None:
        self.driver, self._buffers = driver, buffers or XlaBuffers()
        self._thread_state = ThreadState()
        self._crossings = Called[Callable[..., None]]()
        self._is_called = False
        self._raised: BaseException | None = None  # into the program, which has ended
        self.failure: BaseException | None = None
        self._arena: Arena | None = None
        self._collector: Collector | None = None

    @property
    def arena(self) -> Arena:
        """Owner of the memory, streams and events of the launch; available only inside `running`."""
        if self._arena is None:
            raise RuntimeError(_NOT_OPEN)
        return self._arena

    @property
    def collector(self) -> Collector:
        """The thread that calls functions after events; available only inside `running`."""
        if self._collector is None:
            raise RuntimeError(_NOT_OPEN)
        return self._collector

    @contextmanager
    def running(self) -> Iterator[None]:
        """Open the transport for its only launch; on exit, wait until all emitted values have arrived.

        If some did not arrive, `failure` is set. After an interrupt (KeyboardInterrupt) the program is still running,
        so nothing is released.

        Raises:
            BaseException: the exception of a host function or the driver, instead of the program's own error.
        """
        self._arena, self._collector = arena, collector = Arena(self.driver), Collector(self.driver)
        collector.start()
        try:
            yield
        except BaseException as error:
            if self._is_called and not isinstance(error, Exception):
                raise
            # A failed program makes no more calls, or its calls are refused; a failed device refuses everything.
            self._arena = self._collector = None
            with suppress(Exception):
                self._end(collector, arena)
            cause = self._raised or self.failure or collector.failure
            if cause is None or not isinstance(error, Exception):
                raise
            raise cause from error
        self._end(collector, arena)

    def _end(self, collector: Collector, arena: Arena) -> None:
        try:
            collector.close(_CLOSE_TIMEOUT_S)
        except TimeoutError as error:
            # The collector's thread still waits for events and reads memory, so the arena stays open.
            self.failure = self.failure or error
            return
        self.failure = self.failure or collector.failure
        arena.close()

    def call(
        self, function: HostFunction, results: Sequence[jax.ShapeDtypeStruct], token: Token, *operands: jax.Array
    ) -> tuple[Token, tuple[jax.Array, ...]]:
        """Insert a call that first waits until the stream has computed the operands; see `Transport.call`."""
        given, wanted = _Layout(operands), _Layout(results)
        blocks: list[_Block] = []

        def handle(stream: int, sources: Sequence[int], targets: Sequence[int]) -> None:
            if not blocks:
                blocks.append(_Block(self.arena.pinned(given.num_bytes + wanted.num_bytes), self.arena.event()))
                self.arena.at_close(blocks.clear)
            # The results of the last call have been copied when this call, after waiting for the stream, writes again.
            operand_block, result_block = np.split(blocks[0].memory, [given.num_bytes])
            given.copy_to_host(self.driver, operand_block, sources, stream)
            # Waiting for an event sleeps; waiting for a stream spins, on a core that the reader threads need.
            self.driver.record(blocks[0].event, stream)
            self.driver.synchronize(blocks[0].event)
            function(given.arrays(operand_block), wanted.arrays(result_block))
            wanted.copy_to_device(self.driver, targets, result_block, stream)

        return self.enqueue(handle, results, token, *operands)

    def emit(self, function: Callable[[Sequence[Array]], None], token: Token, *operands: jax.Array) -> Token:
        """Insert a call that the collector's thread makes later, in the order of tokens; see `Transport.emit`."""
        layout = _Layout(operands)
        free = _Blocks(layout.num_bytes)

        def handle(stream: int, sources: Sequence[int], _: Sequence[int]) -> None:
            block = free.take(self.arena, self.collector)
            layout.copy_to_host(self.driver, block.memory, sources, stream)
            self.driver.record(block.event, stream)

            def arrived() -> None:
                function(layout.arrays(block.memory))
                free.give_back(block)

            self.collector.put(block.event, arrived)

        token, _ = self.enqueue(handle, (), token, *operands)
        return token

    def enqueue(
        self, handler: Handler, results: Sequence[jax.ShapeDtypeStruct], token: Token, *operands: jax.Array
    ) -> tuple[Token, tuple[jax.Array, ...]]:
        """Insert a call to `handler` into the program; called while tracing.

        XLA makes the call when it enqueues the kernels around it, so the tokens order what is enqueued.

        Args:
            handler: called with the stream and the addresses of operands and results.
            results: shapes and dtypes of the results, each of whole words of four bytes.
            token: the token of the crossing before.
            operands: traced arrays.

        Returns:
            The token for the next crossing, and one traced array for each of `results`.
        """
        buffers, driver = self._buffers, self.driver
        sizes = [math.prod(each.shape) * np.dtype(each.dtype).itemsize for each in results]

        def handle(context: Any, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
            self._thread_state.keep()
            if self._arena is None or self._collector is None:
                raise RuntimeError(_NOT_OPEN)
            self._is_called = True
            stream, targets = buffers.stream_of(context), [buffers.address_of(buffer) for buffer in outputs]
            self.failure = self.failure or self._collector.failure
            try:
                if self.failure is None:
                    with driver.current():
                        handler(stream, [buffers.address_of(buffer) for buffer in inputs], targets)
                    return
            except BaseException as error:  # noqa: BLE001 - raising through XLA would lose it: kept, raised by the host
                self.failure = error
            try:
                with driver.current():
                    for target, size in zip(targets, sizes, strict=True):
                        driver.fill_words(target, 0, size // _WORD_BYTES, stream)
            except BaseException:
                # There is no other way to end the program. XLA passes on only the text of the error.
                self._raised = self._raised or self.failure
                raise

        find = self._crossings.enter(handle)

        def cross(context: Any, outputs: Sequence[Any], _token: Any, *inputs: Any) -> None:
            find()(context, outputs[1:], inputs)

        called = buffer_callback(cross, (TOKEN_SHAPE, *results), has_side_effect=True)
        byte, *values = called(token.byte, *operands)
        return Token(byte), tuple(values)


class _Layout:
    """The layout of several arrays in one block of bytes, each array aligned."""

    def __init__(self, shapes: Sequence[Any]) -> None:
        self._shapes = [(tuple(each.shape), np.dtype(each.dtype)) for each in shapes]
        self._sizes = [int(np.prod(shape)) * dtype.itemsize for shape, dtype in self._shapes]
        self._starts = [0]
        for size in self._sizes:
            self._starts.append(self._starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        self.num_bytes = self._starts[-1]

    def arrays(self, block: NDArray[np.uint8]) -> list[Array]:
        """Return views of the arrays in a block."""
        return [
            block[start : start + size].view(dtype).reshape(shape)
            for start, size, (shape, dtype) in zip(self._starts, self._sizes, self._shapes, strict=False)
        ]

    def copy_to_host(self, driver: CudaDriver, block: NDArray[np.uint8], sources: Sequence[int], stream: int) -> None:
        """Enqueue copies of the arrays from their device addresses to a page-locked block."""
        for start, size, source in zip(self._starts, self._sizes, sources, strict=False):
            if size:
                driver.copy_to_host(block.ctypes.data + start, source, size, stream)

    def copy_to_device(self, driver: CudaDriver, targets: Sequence[int], block: NDArray[np.uint8], stream: int) -> None:
        """Enqueue copies of the arrays from a page-locked block to their device addresses."""
        for start, size, target in zip(self._starts, self._sizes, targets, strict=False):
            if size:
                driver.copy_to_device(target, block.ctypes.data + start, size, stream)


@dataclass(frozen=True)
class _Block:
    memory: NDArray[np.uint8]
    event: int


class _Blocks:
    """A pool of equal-sized page-locked blocks in one allocation; if all are in use, `take` waits until one is free."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._most = _MOST_SMALL_BLOCKS if num_bytes <= _SMALL_BYTES else _MOST_LARGE_BLOCKS
        self._slab: NDArray[np.uint8] | None = None
        self._num_created = 0
        self._free: queue.SimpleQueue[_Block] = queue.SimpleQueue()

    def take(self, arena: Arena, collector: Collector) -> _Block:
        """Return a free block, waiting for one if necessary; only one thread may call this at a time."""
        if self._slab is None:
            self._slab = arena.pinned(self._num_bytes * self._most)
            arena.at_close(self._forget)
        if self._free.empty() and self._num_created < self._most:
            start = self._num_created * self._num_bytes
            self._num_created += 1
            return _Block(self._slab[start : start + self._num_bytes], arena.event())
        return self._wait(collector)

    def give_back(self, block: _Block) -> None:
        """Return a block to the pool."""
        self._free.put(block)

    def _forget(self) -> None:
        self._free, self._num_created, self._slab = queue.SimpleQueue(), 0, None

    def _wait(self, collector: Collector) -> _Block:
        deadline = time.monotonic() + _BLOCK_TIMEOUT_S
        while True:
            try:
                return self._free.get(timeout=_LOOK_EVERY_S)
            except queue.Empty:
                if collector.failure is not None:
                    raise collector.failure from None
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"the host did not accept the program's records within {_BLOCK_TIMEOUT_S:g} s: check the "
                        "terminal or disk to which they are written"
                    ) from None
