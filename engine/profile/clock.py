"""The host's clock of a launch: how long the program took between its calls to the host, in every step.

Divides the time of the loop into draws, batches and snapshots of training, draws and batches of evaluations, and the
rest. Needs as much memory for a million steps as for one. Does not know what happens inside the program.
"""

import math
import time
from collections.abc import Callable

from loopfeed.engine.crossing.pushed import Pushed, PushedEvaluation, PushedSnapshot


class Spread:
    """Number, sum, mean and standard deviation of durations, updated one by one (Welford, 1962)."""

    def __init__(self) -> None:
        self.count, self.total_s, self._squares = 0, 0.0, 0.0
        self._has_sums = False
        self.mean_s = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """Add `count` durations of which only the sum is known, in seconds."""
        self._has_sums |= count > 1
        each_s = seconds / count
        self.count += count
        self.total_s += seconds
        change_s = each_s - self.mean_s
        self.mean_s += change_s * count / self.count
        self._squares += change_s * (each_s - self.mean_s) * count

    @property
    def std_s(self) -> float | None:
        """The standard deviation (of the population), 0 without durations, None if only sums of them are known."""
        if self._has_sums:
            return None
        return math.sqrt(max(self._squares, 0.0) / self.count) if self.count else 0.0


class PhaseTimes:
    """The durations of one phase.

    Attributes:
        draws, batches, steps: of each batch: its draw, what follows until the next draw, and both together.
        stretches: of everything from a first draw until the next evaluation or stretch of training.
    """

    def __init__(self) -> None:
        self.draws, self.batches, self.steps, self.stretches = Spread(), Spread(), Spread(), Spread()

    @property
    def batch_mean_s(self) -> float:
        """The mean duration of a batch without its draw, also where only steps and draws were timed."""
        return self.batches.mean_s if self.batches.count else max(self.steps.mean_s - self.draws.mean_s, 0.0)

    @property
    def batch_std_s(self) -> float | None:
        """The standard deviation of the duration of a batch, of a step where only these were timed."""
        return self.batches.std_s if self.batches.count else self.steps.std_s


class HostClock:
    """The clock, which the observers of the infeeds and the outfeed set.

    Args:
        epoch_of: returns the epoch of a batch, None if there are no epochs.
        draws_on_device: whether the host runs ahead of the device, so that the time of a pull on the host is not that
            of the draw; the waits of `add_wait` are.
        now: returns the time in seconds.

    Attributes:
        train, valid: the durations of the two phases.
        snapshots, epochs: the durations of snapshots, and of epochs, those that are not complete included.
    """

    def __init__(
        self,
        epoch_of: Callable[[int], int | None] = lambda _: None,
        *,
        draws_on_device: bool = False,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._now, self._epoch_of, self._draws_on_device = now, epoch_of, draws_on_device
        self.train, self.valid = PhaseTimes(), PhaseTimes()
        self.snapshots, self.epochs = Spread(), Spread()
        self._epoch: int | None = None
        self._epoch_at = self._stretch_at = self._step_at = 0.0
        self._stretch: PhaseTimes | None = None
        # The phase of the step that has begun, None if none has; its batches, its draw, and the snapshots in it.
        self._open: PhaseTimes | None = None
        self._num_batches, self._draw_s, self._snapshot_s = 0, 0.0, 0.0

    def pull_began(self, phase: PhaseTimes, batch_index: int) -> None:
        """Note that the program asks for a batch of a phase."""
        now = self._now()
        self._close_step(now)
        if self._stretch is not phase:
            self._close_stretch(now)
            self._stretch, self._stretch_at = phase, now
        if phase is self.train:
            self._enter_epoch(self._epoch_of(batch_index), now)
        self._step_at = now

    def pull_ended(self, phase: PhaseTimes, num_batches: int) -> None:
        """Note that so many batches of a phase are given; a step begins unless there are none."""
        # Without any, the loop ends: this was no draw.
        if num_batches:
            self._open, self._num_batches = phase, num_batches
            self._draw_s, self._snapshot_s = self._now() - self._step_at, 0.0

    def pushed(self, pushed: Pushed | None, began: float, ended: float) -> None:
        """Note when a record was received: a snapshot is no part of the step, and the evaluation is over."""
        if isinstance(pushed, PushedSnapshot):
            self.snapshots.add(ended - began)
            # Where the host runs ahead, records arrive later, beside the loop.
            self._snapshot_s += 0.0 if self._draws_on_device else ended - began
        elif isinstance(pushed, PushedEvaluation) and not self._draws_on_device:
            self._close_step(ended)
            self._close_stretch(ended)

    def add_wait(self, seconds: float) -> None:
        """Add the wait for one batch of training, as the device measured it."""
        if self._draws_on_device:
            self.train.draws.add(seconds)

    def finish(self) -> None:
        """Note that the loop has ended."""
        now = self._now()
        self._close_step(now)
        self._close_stretch(now)
        self._enter_epoch(None, now)

    def _close_step(self, now: float) -> None:
        """Add the step that has begun, if one has."""
        phase, count, self._open = self._open, self._num_batches, None
        if phase is None:
            return
        step_s = now - self._step_at - self._snapshot_s
        phase.steps.add(step_s, count)
        if not self._draws_on_device:
            phase.draws.add(self._draw_s, count)
            phase.batches.add(step_s - self._draw_s, count)

    def _close_stretch(self, now: float) -> None:
        if self._stretch is not None:
            self._stretch.stretches.add(now - self._stretch_at)
            self._stretch = None

    def _enter_epoch(self, epoch: int | None, now: float) -> None:
        if epoch == self._epoch:
            return
        if self._epoch is not None:
            self.epochs.add(now - self._epoch_at)
        self._epoch, self._epoch_at = epoch, now
