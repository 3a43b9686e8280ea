"""Threads of one kind: daemons that keep what their work raises, so that whoever waits for them raises it.

They are daemons because work may hang, in a file system, a terminal or a library, and must not keep the process from
exiting. A wait for a worker takes a limit and handles signals soon; the futures of a pool are waited for as usual.

On Python 3.12, a thread that has ended its work waits for more of the same name. A C library gives each thread a heap
of its own, and a new thread any of these: in a process that trains again and again on new threads, every heap grows to
what one needs.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from contextvars import Context
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from concurrent.futures import Future

# Python may notice a signal that arrives as a wait begins only when that wait ends.
_LOOK_EVERY_S = 0.1
# Of a run on 64 cores: a thread for each core to read, to copy and to decode, and some twenty others.
_MOST_SPARE_THREADS = 256
# From Python 3.13 on, nothing but the end of a thread drops its `threading.local` values, such as a user's open files.
_KEEPS_THREADS = sys.version_info < (3, 13)
SPARE = "spare "
"""What precedes the name of a thread that waits for work."""


class Worker[T]:
    """One call of a function, on a thread that meanwhile does nothing else.

    Args:
        work: the function.
        name: of the thread, as in the reports of stalls.

    Attributes:
        failure: what the function raised, None if it did not.
    """

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self.failure: BaseException | None = None
        self._results: list[T] = []
        self._is_attended = True
        self._has_ended = threading.Event()
        self._name = name
        self._thread: threading.Thread | None = None
        # Only the thread refers to `work` once it has started: it may refer to what owns this object.
        self._run_once: Callable[[], None] | None = partial(self._run, work)

    def start(self, *, is_attended: bool = True) -> Self:
        """Have a thread make the call; call this once.

        Args:
            is_attended: whether `check` or `result` will be called; if not, Python reports what the function raises.

        Raises:
            RuntimeError: the system refuses to start another thread; this object then counts as never started.
        """
        self._is_attended = is_attended
        run, self._run_once = self._run_once, None
        assert run is not None, "a worker starts once"
        try:
            self._thread = _spare_threads().start(run, self._name)
        except RuntimeError:
            self._run_once = run
            raise
        return self

    @property
    def is_at_work(self) -> bool:
        """Whether the call has been started and not ended; false in a forked process, which has no such thread."""
        return not self._has_ended.is_set() and self._thread in threading.enumerate()

    def wait(self, limit_s: float = math.inf) -> bool:
        """Wait until the function has returned or raised, or a limit in seconds; return whether it is not at work."""
        if self._thread is threading.current_thread() and not self._has_ended.is_set():
            return False
        deadline = time.monotonic() + limit_s
        while self.is_at_work:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            self._has_ended.wait(min(left_s, _LOOK_EVERY_S))
        return True

    def check(self) -> None:
        """Raise what the function raised, with its traceback, if it did."""
        if self.failure is not None:
            raise self.failure

    def result(self, timeout: float = math.inf) -> T:
        """Wait for what the function returns, and return it.

        Raises:
            BaseException: what the function raised.
            TimeoutError: it is still at work after `timeout` seconds.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"the thread {self._name} is still at work after {timeout:g} s")
        self.check()
        return self._results[0]

    def _run(self, work: Callable[[], T]) -> None:
        thread = threading.current_thread()
        assert isinstance(thread, _SpareThread)
        self._thread = thread
        try:
            self._results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits, or reported
            self.failure = error
            if not self._is_attended:
                with suppress(BaseException):
                    report = type(error), error, error.__traceback__, thread
                    threading.excepthook(threading.ExceptHookArgs(report))
        finally:
            # Before anyone learns of the end: what the call left is gone, and the next of this name gets this thread.
            _forget_thread_locals()
            _spare_threads().give_back(thread)
            self._has_ended.set()


class _SpareThreads:
    """Threads that wait for a call. No lock: a signal's handler may start a worker while another is being started."""

    def __init__(self) -> None:
        self._waiting: list[_SpareThread] = []
        self._numbers = itertools.count()

    def start(self, run: Callable[[], None], name: str) -> threading.Thread:
        """Have the oldest thread that made calls of this name, or a new one, make one that ends with `give_back`.

        Raises:
            RuntimeError: the system refuses to start another thread.
        """
        # One that is kept never runs again once the interpreter ends; a new one is refused by Python.
        thread = None if sys.is_finalizing() else self._take(name)
        if thread is None:
            thread = _SpareThread(name, next(self._numbers))
            thread.start()
        thread.name = name
        thread.calls.put(run)
        return thread

    def _take(self, name: str) -> _SpareThread | None:
        for each in sorted((each for each in self._waiting if each.kind == name), key=lambda each: each.number):
            with suppress(ValueError):  # another call took it
                self._waiting.remove(each)
                return each
        return None

    def give_back(self, thread: _SpareThread) -> None:
        """Let a thread, which has made its call, wait for another, or end where too many wait."""
        thread.name = f"{SPARE}{thread.kind}"
        if _KEEPS_THREADS and len(self._waiting) < _MOST_SPARE_THREADS:
            self._waiting.append(thread)
        else:
            thread.calls.put(None)


@cache
def _spare_threads() -> _SpareThreads:
    return _SpareThreads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_spare_threads.cache_clear)  # a forked process has none of the threads


class _SpareThread(threading.Thread):
    def __init__(self, kind: str, number: int) -> None:
        super().__init__(daemon=True)
        self.kind, self.number = kind, number
        self.calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def run(self) -> None:
        while (call := self.calls.get()) is not None:
            Context().run(call)  # as on a new thread, without the context variables of earlier calls
            del call  # what it refers to, such as the memory of a program


_address_of_thread_locals = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyThreadState_GetDict", ctypes.pythonapi))


def _forget_thread_locals() -> None:
    """Drop the values of all `threading.local` objects in this thread, as its end would: a user's may be open files."""
    if address := _address_of_thread_locals():
        ctypes.cast(address, ctypes.py_object).value.clear()


def wait_for(workers: Iterable[Worker[Any]], limit_s: float) -> bool:
    """Wait at most `limit_s` seconds for all of these workers together; return whether none is at work."""
    deadline = time.monotonic() + limit_s
    have_ended = True
    for each in workers:
        have_ended &= each.wait(max(0.0, deadline - time.monotonic()))
    return have_ended


def call_within(limit_s: float, function: Callable[[], object], name: str = "call") -> bool:
    """Call a function that may hang, on a thread of its own; return whether it ended within so many seconds.

    Raises:
        BaseException: what the function raised within this time.
    """
    call = Worker(function, name).start()
    has_ended = call.wait(limit_s)
    call.check()
    return has_ended


class Pool:
    """Threads that make calls, first in, first out; each starts when it is first needed.

    As a context manager, it waits at the end until all calls are made. Where the system refuses every thread, and after
    `close`, the caller makes its calls itself. Not `ThreadPoolExecutor`, whose threads keep the process from exiting.

    Args:
        num_threads: the largest number of threads.
        name: of the threads, followed by their numbers.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads, self._name = num_threads, name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._guard = threading.Lock()
        self._workers: list[Worker[None]] = []  # guarded by _guard, as is the following
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(math.inf)

    def start(self, num_wanted: int) -> int:
        """Start threads until there are `num_wanted`, or the system refuses; return how many there are."""
        with self._guard:
            # A forked process has none of the threads.
            self._workers = [each for each in self._workers if each.is_at_work]
            while len(self._workers) < min(num_wanted, self._num_threads) and not self._is_closed:
                try:
                    self._workers.append(Worker(self._work, f"{self._name}-{len(self._workers)}").start())
                except RuntimeError:
                    break
            return len(self._workers)

    def submit[T](self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Have a thread make a call, and return its future."""
        from concurrent.futures import Future  # imports logging, which the help of a command needs not wait for

        future: Future[T] = Future()
        call = partial(_call, future, function, *arguments)
        num_threads = self.start(len(self._workers) + 1)
        with self._guard:
            if num_threads and not self._is_closed:
                self._calls.put(call)
                return future
        call()
        return future

    def map[T](self, function: Callable[..., T], *iterables: Iterable[Any]) -> Iterator[T]:
        """Call a function with the elements of iterables of equal length; yield what it returns, in their order.

        Calls that have not begun when one of them raises, or when nobody takes more, are not made.
        """
        futures = [self.submit(function, *arguments) for arguments in zip(*iterables, strict=True)]

        def results() -> Iterator[T]:
            try:
                for future in futures:
                    yield future.result()
            finally:
                for future in futures:
                    future.cancel()

        return results()

    def close(self, limit_s: float = 0.0) -> bool:
        """Let the threads end once the calls so far are made; return whether they ended within so many seconds."""
        with self._guard:
            if not self._is_closed:
                self._is_closed = True
                for _ in self._workers:
                    self._calls.put(None)
        return wait_for(self._workers, limit_s)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # what it refers to, such as the memory of a program


def _call[T](future: Future[T], function: Callable[..., T], *arguments: Any) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(*arguments))
    except BaseException as error:  # noqa: BLE001 - raised by the future
        future.set_exception(error)
