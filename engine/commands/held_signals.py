"""SIGINT and SIGTERM at the places where they do no harm: what must be whole is not left in its midst."""

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class HeldSignals:
    """The signals that came while they were held back."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._is_let_in = False

    def handle(self, number: int, _frame: object) -> None:
        """Keeps the signal, or ends the command where `let_in` waits."""
        if not self._is_let_in:
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


@contextmanager
def signals_held() -> Iterator[HeldSignals]:
    """Lets SIGINT and SIGTERM wait until the block ends, and act then as they would have."""
    held = HeldSignals()
    before = {number: signal.signal(number, held.handle) for number in _NUMBERS}
    try:
        yield held
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for held_back in held.numbers:
            signal.raise_signal(held_back)
