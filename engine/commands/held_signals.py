"""Delayed delivery of the stop signals, so that they do not interrupt code that must run to completion."""

import signal
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from loopfeed.preprocess.stop_signals import install, stop_signals, uninstall

# The third signal always takes effect: a write to a terminal that nothing reads would block forever.
_MOST_HELD = 2


class HeldSignals:
    """Signals held for later delivery, in order of arrival."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._num_seen = 0
        self._is_let_in = False

    def handle(self, number: int, _frame: object) -> None:
        """Hold the signal; if it is the third or if `let_in` is waiting for an item, exit the command instead."""
        self._num_seen += 1
        if not self._is_let_in and self._num_seen <= _MOST_HELD:
            self.numbers.append(number)
            return
        self._is_let_in = False  # do not interrupt the exit
        raise SystemExit(128 + number)

    def let_in[T](self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items; a signal interrupts the wait for the next item, but not the processing of an item.

        Raises:
            SystemExit: with 128 + the signal's number, also for a signal that was held earlier.
        """
        iterator = iter(items)
        while True:
            self._is_let_in = True
            try:
                if self.numbers:
                    raise SystemExit(128 + self.numbers.pop(0))
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self._is_let_in = False
            yield item

    def deliver(self) -> None:
        """Deliver all held signals one by one, even if a handler raises; re-raise the last exception at the end."""
        with ExitStack() as stack:
            for number in reversed(self.numbers):
                stack.callback(signal.raise_signal, number)


@contextmanager
def signals_held() -> Iterator[HeldSignals]:
    """Hold the stop signals while the block runs, then deliver them; signals that are ignored stay ignored."""
    held = HeldSignals()
    # Every callback runs, even if one raises: first the handlers are restored, then the held signals are raised.
    with ExitStack() as stack:
        stack.callback(held.deliver)
        for number in stop_signals():
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                install(number, held.handle)
                stack.callback(uninstall, number)
        yield held
