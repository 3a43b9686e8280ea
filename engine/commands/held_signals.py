"""SIGINT and SIGTERM at the places where they do no harm: what must be whole is not left in its midst."""

import signal
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

_NUMBERS = (signal.SIGINT, signal.SIGTERM)
# Whoever asks so often means it: a write to a terminal that nobody reads would wait for ever.
_MOST_HELD = 2


class HeldSignals:
    """The signals that came while they were held back."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._num_seen = 0
        self._is_let_in = False

    def handle(self, number: int, _frame: object) -> None:
        """Keeps the signal, or ends the command where `let_in` waits, and with the third signal in any place."""
        self._num_seen += 1
        if not self._is_let_in and self._num_seen <= _MOST_HELD:
            self.numbers.append(number)
            return
        self._is_let_in = False  # the way out is not interrupted once more
        raise SystemExit(128 + number)

    def let_in[T](self, items: Iterable[T]) -> Iterator[T]:
        """Gives the items; a signal ends the wait for the next one, and never what is done with it.

        Raises:
            SystemExit: 128 + the signal's number, also for one that came before.
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
        """Has all that were kept act, each on its own; what the last one raises is raised."""
        with ExitStack() as stack:
            for number in reversed(self.numbers):
                stack.callback(signal.raise_signal, number)


@contextmanager
def signals_held() -> Iterator[HeldSignals]:
    """Lets SIGINT and SIGTERM wait until the block ends, and act then as they would have; those ignored stay so."""
    held = HeldSignals()
    # Whatever one of them raises, the others are called: handlers first, in the end what they are to handle.
    with ExitStack() as stack:
        stack.callback(held.deliver)
        for number in _NUMBERS:
            before = signal.getsignal(number)
            if before not in (signal.SIG_IGN, None):
                stack.callback(signal.signal, number, before)
                signal.signal(number, held.handle)
        yield held
