"""What may watch the program's calls to the host: when each pull and each push began and ended on the host.

Calls come on the threads of XLA's runtime, one at a time and in the program's order. They must return at once, and must
never raise.
"""

from typing import Protocol

from loopfeed.engine.crossing.pushed import Pushed


class PullObserver(Protocol):
    """The observer of an infeed, of the pulls of its first device."""

    def pull_began(self, batch_index: int) -> None:
        """Note that the program asks for batches from this one on."""
        ...

    def pull_ended(self, num_batches: int) -> None:
        """Note that so many batches are given; 0 ends the loop."""
        ...


class PushObserver(Protocol):
    """The observer of an outfeed."""

    def push_began(self) -> None:
        """Note that the program emits a record."""
        ...

    def push_ended(self, pushed: Pushed | None) -> None:
        """Note that the record was received; None if it failed."""
        ...
