"""The signals that ask a command to stop, and handlers for them that act in this process alone.

A process that is forked while a handler is installed, such as a worker of a pool, has the handlers from before: else a
signal that is to end it would do nothing there. Also tells a second signal from one that was sent twice.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

from loopfeed.preprocess.workers import Worker

_AFTER_FORK_S = 0.01  # the hooks of a fork take some microseconds

BURST_S = 0.5
"""For so long after a signal, another one is the same request."""

type Handle = Callable[[int, FrameType | None], object]
"""What is done about a signal, given its number."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask this process to stop: SIGINT, SIGTERM, and SIGHUP unless it is ignored (`nohup`)."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *(() if is_ignored else (signal.SIGHUP,)))


@dataclass(frozen=True, eq=False)
class _OwnHandler:
    """A handler of this process alone, and the handler that was there before it."""

    handle: Handle
    before: Any

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _FORKING.is_at_work:
            _FORKING.noted.append(number)  # in a hook of the fork, which drops what a handler raises
        else:
            self.handle(number, frame)


def install(number: int, handle: Handle) -> None:
    """Have a function called for a signal; call this on the main thread."""
    signal.signal(number, _OwnHandler(handle, signal.getsignal(number)))


def uninstall(number: int) -> None:
    """Restore the handler from before the last `install` for a signal; does nothing if another was set since."""
    if isinstance(found := signal.getsignal(number), _OwnHandler):
        # None is a handler that was not installed from Python, which Python cannot restore.
        signal.signal(number, signal.SIG_DFL if found.before is None else found.before)


class _Forking(threading.local):
    """The fork that a thread makes: the signals that it had blocked before, and those that came meanwhile."""

    def __init__(self) -> None:
        self.is_at_work = False
        self.blocked: set[signal.Signals | int] = set()
        self.noted: list[int] = []


_FORKING = _Forking()


def _hold_before_fork() -> None:
    """Block the signals with handlers of this process: one that is to end the child may come before its own handlers.

    Python would forget it, or call the handler of this process in the child, which a pool would then wait for in vain.
    """
    _FORKING.is_at_work = True
    handled = [number for number in signal.valid_signals() if isinstance(signal.getsignal(number), _OwnHandler)]
    _FORKING.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, handled)


def _release_in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _FORKING.blocked)
    noted, _FORKING.noted = _FORKING.noted, []
    _FORKING.is_at_work = False
    if noted:
        Worker(partial(_send_again, noted), "signals").start()


def _send_again(numbers: Iterable[int]) -> None:
    time.sleep(_AFTER_FORK_S)
    for number in numbers:
        os.kill(os.getpid(), number)


def _restore_in_child() -> None:
    for number in signal.valid_signals():
        while isinstance(signal.getsignal(number), _OwnHandler):
            uninstall(number)
    _FORKING.noted.clear()
    _FORKING.is_at_work = False
    signal.pthread_sigmask(signal.SIG_SETMASK, _FORKING.blocked)


os.register_at_fork(before=_hold_before_fork, after_in_parent=_release_in_parent, after_in_child=_restore_in_child)


@contextmanager
def stops_as_interrupts() -> Iterator[None]:
    """Inside the block, SIGTERM and SIGHUP raise KeyboardInterrupt as SIGINT does, once: the second acts as before.

    Does nothing off the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, _frame: FrameType | None) -> None:
        uninstall(number)
        raise KeyboardInterrupt

    numbers = [number for number in stop_signals() if signal.getsignal(number) is signal.SIG_DFL]
    for number in numbers:
        install(number, interrupt)
    try:
        yield
    finally:
        for number in numbers:
            uninstall(number)


class SignalBursts:
    """Counts the signals of a sender who may send each of them more than once."""

    def __init__(self) -> None:
        self._began_s = -BURST_S

    def is_new(self) -> bool:
        """Return whether a signal that comes now is a request of its own."""
        now_s = time.monotonic()
        is_new = now_s - self._began_s >= BURST_S
        if is_new:
            self._began_s = now_s
        return is_new
