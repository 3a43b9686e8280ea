"""The choice of snapshots that the settings leave open: when the next one is taken, and whether one is written.

A snapshot changes no bit of the training, so why it was taken need not be recorded. Must not know: the board, the
writer, the disk.
"""

import math
import time
from collections.abc import Callable, Iterable

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.control.event import ControlEvent

MINUTES_BETWEEN_SNAPSHOTS = 10
_INTERVAL_S = 60.0 * MINUTES_BETWEEN_SNAPSHOTS
_LARGEST_SHARE = 1 / 20  # of the time, for snapshots


class SnapshotChoice:
    """Chooses the snapshots of a launch beyond those at the steps that the settings give.

    Without steps between snapshots, the next one is due ten minutes after the one before, and after one that took t
    seconds not within 20 t seconds: snapshots take at most a twentieth of the time. With `keep_best` alone, the program
    pushes one after each evaluation too, and it is written if that evaluation is the best so far.

    Args:
        config: the settings.
        events: requests of earlier launches, which take effect again.
        is_best: whether a snapshot of a step would be the best of all.
        copied_s: the seconds that the program has spent on copies of its state so far.
        clock: returns seconds that never go back.
    """

    def __init__(
        self,
        config: TrainConfig,
        events: Iterable[ControlEvent],
        is_best: Callable[[int], bool],
        copied_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._is_best, self._copied_s, self._clock = config, is_best, copied_s, clock
        self._due_s, self._copied_before_s = math.inf, 0.0
        self._wanted_steps: set[int] = set()
        for event in events:
            self.note_event(event)

    def start(self) -> None:
        """Begin to count the time: the program is about to run."""
        self._due_s = self._clock() + _INTERVAL_S

    def is_due(self, step: int) -> bool:
        """Return whether the time has come for a snapshot, which will be of this step; then, none until one `ended`."""
        if self._config.snapshot_every_steps is not None or self._clock() < self._due_s:
            return False
        self._due_s = math.inf
        self._wanted_steps.add(step)
        return True

    def note_event(self, event: ControlEvent) -> None:
        """Note a request that takes effect."""
        if event.snapshot:
            self._wanted_steps.add(event.step)

    def is_written(self, step: int) -> bool:
        """Return whether the snapshot of this step, which the program has pushed, is to be written."""
        is_wanted = not self._config.keeps_best_evaluation or step in self._wanted_steps
        return is_wanted or self._is_best(step)

    def ended(self, write_s: float) -> None:
        """Note that the disk was busy with a snapshot for so long, successfully or not; may be called on any thread."""
        copied_s = self._copied_s()
        took_s, self._copied_before_s = write_s + copied_s - self._copied_before_s, copied_s
        self._due_s = self._clock() + max(_INTERVAL_S, took_s / _LARGEST_SHARE)
