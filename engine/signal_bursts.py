"""Telling a second signal from one that was sent twice, as `timeout` sends it: to its child, and to the whole group."""

import time

BURST_S = 0.5
"""For so long after a signal, another one is the same request."""


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
