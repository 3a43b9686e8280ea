"""Delaying SIGINT and SIGTERM until they do no harm, so that what must be completed is not interrupted."""

import signal
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

_NUMBERS = (signal.SIGINT, signal.SIGTERM)
# The third signal always takes effect: a write to a terminal that nothing reads would block for ever.
_MOST_HELD = 2


class HeldSignals:
    """The signals that arrived while they were held."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._num_seen = 0
        self._is_let_in = False

    def handle(self, number: int, _frame: object) -> None:
        """Hold the signal; exit the command if `let_in` is waiting, or at the third signal anywhere."""
        self._num_seen += 1
        if not self._is_let_in and self._num_seen <= _MOST_HELD:
            self.numbers.append(number)
            return
        self._is_let_in = False  # do not interrupt the exit
        raise SystemExit(128 + number)

    def let_in[T](self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items; a signal interrupts the wait for the next one, but never its processing.

        Raises:
            SystemExit: 128 + the signal's number, also for a signal held earlier.
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
        """Raise all held signals one by one, also if one raises an exception; the last exception is raised."""
        with ExitStack() as stack:
            for number in reversed(self.numbers):
                stack.callback(signal.raise_signal, number)


@contextmanager
def signals_held() -> Iterator[HeldSignals]:
    """Hold SIGINT and SIGTERM until the block ends, and raise them then; ignored signals stay ignored."""
    held = HeldSignals()
    # Every callback runs, even if one raises: first the handlers are restored, then the held signals are raised.
    with ExitStack() as stack:
        stack.callback(held.deliver)
        for number in _NUMBERS:
            before = signal.getsignal(number)
            if before not in (signal.SIG_IGN, None):
                stack.callback(signal.signal, number, before)
                signal.signal(number, held.handle)
        yield held
