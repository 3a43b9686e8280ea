"""Meters the outfeed: how long pushes take on the host, and what the program did between them.

A push ends what the program did since the push before: steps, an evaluation, or the copying of a snapshot.
"""

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from numpy.typing import NDArray

from loopfeed.engine.crossing.pushed import Pushed, PushedEvaluation, PushedLosses, PushedSnapshot
from loopfeed.engine.durations import Durations


class PushMeter:
    """The pushes of one launch; changed only by the thread that pushes, but for `evaluation_pulled`.

    Args:
        step: number of updates before the launch.

    Attributes:
        times: how long each push took on the host.
        num_bytes: bytes of what was pushed.
        evaluation_s: seconds of evaluations from the push before each to the push of its result.
        snapshots_s: seconds since `start` that ended in the push of a snapshot, including the push.
        snapshot_push_s: seconds of the pushes of snapshots alone.
        pushing_since: when the current push began, by `time.perf_counter`; None between pushes.
        ended_at: when the last push ended, by the same clock.
        step: number of updates whose losses were pushed.
    """

    def __init__(self, step: int = 0) -> None:
        self.times, self.step, self.num_bytes = Durations(), step, 0
        self.evaluation_s = self.snapshots_s = self.snapshot_push_s = 0.0
        self.pushing_since: float | None = None
        self.ended_at = perf_counter()
        self._evaluating_since: float | None = None

    def start(self) -> None:
        """Start the clock: the program is launched."""
        self.ended_at = perf_counter()

    def evaluation_pulled(self) -> None:
        """Note that an evaluation asks for batches; called on the thread that answers."""
        if self._evaluating_since is None:
            self._evaluating_since = perf_counter()

    def evaluation_until(self, now: float) -> float:
        """Return the seconds of evaluations up to `now` by `time.perf_counter`, with the one that goes on."""
        since = self._evaluating_since
        return self.evaluation_s + (0.0 if since is None else max(0.0, now - since))

    def begin(self) -> None:
        """Begin a push."""
        self.pushing_since = perf_counter()

    def end(self, pushed: Pushed | None, operands: Sequence[NDArray[Any]]) -> None:
        """End a push of the values of `operands`; `pushed` is None if it failed."""
        now, began, before = perf_counter(), self.pushing_since, self.ended_at
        took = 0.0 if began is None else now - began
        self.ended_at, self.pushing_since = now, None
        self.times.add(took)
        if isinstance(pushed, PushedLosses):
            self.step = pushed.first_step + len(pushed.losses) - 1
            # A loss and a learning rate; counting the operands would double the price of a push.
            self.num_bytes += 8 * len(pushed.losses)
            return
        self.num_bytes += sum(each.nbytes for each in operands)
        if isinstance(pushed, PushedEvaluation):
            self.evaluation_s += now - before
            self._evaluating_since = None
        elif isinstance(pushed, PushedSnapshot):
            self.snapshots_s += now - before
            self.snapshot_push_s += took
