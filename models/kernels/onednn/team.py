"""The team of threads that runs sequences of primitives: in C where a compiler built `team.c`, else in Python.

One sequence runs at a time, whichever threads ask, since sequences share memory objects, the arena and the processor.
The tasks of a phase go to whichever thread is free: a thread that has to wait for its core takes fewer of them. In C
the threads are those of XLA's pool, in Python threads of its own, which sleep without work.
"""

import ctypes
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from loopfeed.models.kernels.onednn.library import Library
from loopfeed.models.kernels.onednn.primitives import Kind, Primitives, Task

_ALIGNED = 64
_BEGIN_LIMIT_S = 30.0


class PythonTeam:
    """A team of Python threads; each holds Python's lock between primitives, for some microseconds a task."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._start()
        # A child process has none of the threads, and a lock that was held would never be released.
        os.register_at_fork(after_in_child=self._start)

    def _start(self) -> None:
        self._one_sequence = threading.Lock()
        self._arena: Any = None
        self._arena_address, self._arena_bytes = 0, -1
        self._queue: list[_Phase] = []
        self._has_work = threading.Semaphore(0)
        self._num_workers = 0
        self._refusal = ""

    def run(self, primitives: Primitives, operands: Sequence[int], results: Sequence[int]) -> None:
        """Run a sequence on operands and results at these addresses.

        Raises:
            RuntimeError: if a primitive fails.
        """
        if threading.current_thread() is threading.main_thread():
            # There an interrupt would leave the other threads at work on buffers that XLA takes back.
            _off_the_main_thread(lambda: self._run(primitives, operands, results))
        else:
            self._run(primitives, operands, results)

    def refuse(self, reason: str) -> None:
        """Wait until the sequence that runs has ended, and let all later ones raise RuntimeError with this reason."""
        with self._one_sequence:
            self._refusal = reason

    def _run(self, primitives: Primitives, operands: Sequence[int], results: Sequence[int]) -> None:
        with self._one_sequence, self._library.one_thread():
            if self._refusal:
                raise RuntimeError(self._refusal)
            if primitives.arena_bytes > self._arena_bytes:
                self._grow(primitives.arena_bytes)
            for tasks in primitives.phases:
                phase = _Phase(self._library, tasks, operands, results, self._arena_address)
                helpers = min(len(tasks), self._library.num_threads) - 1
                self._ask(phase, helpers)
                phase.take_tasks(self._library.streams[0])
                phase.wait()

    def _ask(self, phase: "_Phase", num_helpers: int) -> None:
        """Let so many other threads take tasks of a phase."""
        while self._num_workers < num_helpers:
            self._num_workers += 1
            stream = self._library.streams[self._num_workers]
            threading.Thread(target=self._work, args=(stream,), name="kernels", daemon=True).start()
        for _ in range(num_helpers):
            self._queue.append(phase)
            self._has_work.release()

    def _work(self, stream: ctypes.c_void_p) -> None:
        self._library.threads.omp_set_num_threads(1)
        while True:
            self._has_work.acquire()
            self._queue.pop().take_tasks(stream)

    def _grow(self, num_bytes: int) -> None:
        """Allocate a larger arena; it never shrinks, so that a loop allocates only in its first turn."""
        self._arena = ctypes.create_string_buffer(num_bytes + _ALIGNED)
        self._arena_address = -(-ctypes.addressof(self._arena) // _ALIGNED) * _ALIGNED
        self._arena_bytes = num_bytes


def _off_the_main_thread(run: Callable[[], None]) -> None:
    """Call a function in a thread of its own and wait until it has ended, interrupts or not; raise what was raised.

    Raises:
        RuntimeError: if the thread does not begin within a time limit; it then never calls the function.
    """
    raised: list[BaseException] = []
    may_begin, has_begun, has_ended = threading.Lock(), threading.Event(), threading.Event()

    def catch() -> None:
        if not may_begin.acquire(blocking=False):
            return
        has_begun.set()
        try:
            run()
        except BaseException as error:  # noqa: BLE001 - raised below
            raised.append(error)
        finally:
            has_ended.set()

    def wait_for(event: threading.Event, limit_s: float | None = None) -> bool:
        while True:
            try:
                return event.wait(limit_s)
            except BaseException as error:  # noqa: BLE001 - raised below
                raised.append(error)

    try:
        threading.Thread(target=catch, name="kernels").start()
    except BaseException as error:  # noqa: BLE001 - raised below; an interrupted start may have started the thread
        raised.append(error)
    # Not `Thread.join`, which takes a thread for ended once it has been interrupted.
    if wait_for(has_begun, _BEGIN_LIMIT_S) or not may_begin.acquire(blocking=False):
        wait_for(has_ended)
    else:
        raised.append(RuntimeError(f"a thread for oneDNN's kernels did not begin within {_BEGIN_LIMIT_S:.0f} s"))
    if raised:
        raise raised[0]


class _Phase:
    """The tasks of one phase of a running sequence, for the threads that take them."""

    def __init__(
        self, library: Library, tasks: Sequence[Task], operands: Sequence[int], results: Sequence[int], arena: int
    ) -> None:
        self._library, self._tasks = library, tasks
        self._starts: dict[Kind, Callable[[int], int]] = {
            Kind.OPERAND: operands.__getitem__,
            Kind.RESULT: results.__getitem__,
            Kind.ARENA: lambda _: arena,
        }
        self._next = itertools.count()
        self._num_done = itertools.count(1)
        self._is_done = threading.Event()
        self._status = 0

    def take_tasks(self, stream: ctypes.c_void_p) -> None:
        """Run tasks until none is left."""
        while (number := next(self._next)) < len(self._tasks):
            self._status = self._run(self._tasks[number], stream) or self._status
            if next(self._num_done) == len(self._tasks):
                self._is_done.set()

    def wait(self) -> None:
        """Wait for the tasks that other threads took, which are running; raise RuntimeError if one failed."""
        self._is_done.wait()
        self._library.check(self._status, "run a primitive")

    def _run(self, task: Task, stream: ctypes.c_void_p) -> int:
        set_address = self._library.short.dnnl_memory_set_data_handle
        for memory, (kind, number, offset) in task.memories:
            set_address(memory, self._starts[kind](number) + offset)
        status: int = self._library.long.dnnl_primitive_execute(
            task.primitive, stream, len(task.arguments), task.arguments
        )
        return status
