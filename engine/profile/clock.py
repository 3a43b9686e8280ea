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


# What the program does, as indices of lists: in a fast program each microsecond of the clock counts.
_OTHER, _DRAW, _BATCH = range(3)


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
        self._at = self._stretch_at = self._epoch_at = now()
        self._epoch: int | None = None
        self._doing = _OTHER
        # The phase of the step that has begun, None if none has, and its number of batches.
        self._open: PhaseTimes | None = None
        self._num_batches = 0
        self._stretch: PhaseTimes | None = None
        self._spent = [0.0, 0.0, 0.0]

    def start(self) -> None:
        """Start the clock: the loop is launched."""
        self._at = self._now()

    def pull_began(self, phase: PhaseTimes, batch_index: int) -> None:
        """Note that the program asks for a batch of a phase."""
        self._turn(_DRAW, self._now())
        self._close_step()
        if self._stretch is not phase:
            self._close_stretch()
            self._stretch, self._stretch_at = phase, self._at
        if phase is self.train:
            self._enter_epoch(self._epoch_of(batch_index))

    def pull_ended(self, phase: PhaseTimes, num_batches: int) -> None:
        """Note that so many batches of a phase are given; a step begins unless there are none."""
        if num_batches == 0:
            # The loop ends: this was no draw.
            self._turn(_OTHER, self._now())
            return
        self._turn(_BATCH, self._now())
        self._open, self._num_batches = phase, num_batches

    def pushed(self, pushed: Pushed | None, began: float, ended: float) -> None:
        """Note when a record was received: a snapshot is no part of the step, and the evaluation is over."""
        if isinstance(pushed, PushedSnapshot):
            self.snapshots.add(ended - began)
        if self._draws_on_device:
            # Records arrive later, beside the loop.
            return
        if isinstance(pushed, PushedSnapshot):
            self._turn(self._doing, began)
            self._at = ended
        elif isinstance(pushed, PushedEvaluation):
            self._turn(_OTHER, ended)
            self._close_step()
            self._close_stretch()

    def add_wait(self, seconds: float) -> None:
        """Add the wait for one batch of training, as the device measured it."""
        if self._draws_on_device:
            self.train.draws.add(seconds)

    def finish(self) -> None:
        """Note that the loop has ended."""
        self._turn(_OTHER, self._now())
        self._close_step()
        self._close_stretch()
        self._enter_epoch(None)

    def _turn(self, doing: int, now: float) -> None:
        """Note that the program does something else from now on."""
        self._spent[self._doing] += now - self._at
        self._at, self._doing = now, doing

    def _close_step(self) -> None:
        """Add the step that has begun, if one has; the time of the next one starts anew."""
        (_, draw_s, batch_s), self._spent = self._spent, [0.0, 0.0, 0.0]
        phase, count, self._open = self._open, self._num_batches, None
        if phase is None:
            return
        phase.steps.add(draw_s + batch_s, count)
        if not self._draws_on_device:
            phase.draws.add(draw_s, count)
            phase.batches.add(batch_s, count)

    def _close_stretch(self) -> None:
        if self._stretch is not None:
            self._stretch.stretches.add(self._at - self._stretch_at)
            self._stretch = None

    def _enter_epoch(self, epoch: int | None) -> None:
        if epoch == self._epoch:
            return
        if self._epoch is not None:
            self.epochs.add(self._at - self._epoch_at)
        self._epoch, self._epoch_at = epoch, self._at
