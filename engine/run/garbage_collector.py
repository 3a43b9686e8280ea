"""Keeps Python's cyclic garbage collector out of the way of a start, without jax.

Imports and tracing create hundreds of thousands of objects that live long. The collector would scan them again and
again: 0.4 s of the 6.6 s of processor time until the first loss of ResNet-50.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# The first collection after the trace takes tenths of a second, so it waits until the first loss is written.
_COLLECTING_PUSH = 2


@contextmanager
def without_collector() -> Iterator[None]:
    """Disable the collector inside the block."""
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def keeping_imports() -> Iterator[None]:
    """Import jax in the block without the collector, which afterwards never scans what exists then.

    For a command, because modules live as long as its process. Nothing changes if jax is already imported.
    """
    if "jax" in sys.modules:
        yield
        return
    with without_collector():
        yield
        gc.freeze()


class PausedCollector:
    """The collector, which is disabled by `pause` until the program's second push or `resume`."""

    def __init__(self) -> None:
        self._is_paused = False
        self._num_pushes = 0

    def pause(self) -> None:
        """Disable the collector, if it is enabled."""
        self._is_paused |= gc.isenabled()
        self._num_pushes = 0
        gc.disable()

    def resume(self) -> None:
        """Enable the collector if `pause` disabled it; calling this again has no effect."""
        was_paused, self._is_paused = self._is_paused, False
        if was_paused:
            gc.enable()

    def resuming[T](self, receive: Callable[[T], None]) -> Callable[[T], None]:
        """Return `receive`, which is called at each push of the program, as a function that also resumes in time."""

        def receive_and_resume(pushed: T) -> None:
            self._num_pushes += 1
            if self._num_pushes == _COLLECTING_PUSH:
                self.resume()
            receive(pushed)

        return receive_and_resume
