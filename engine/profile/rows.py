"""The rows of a profile, from the host's clock and from the traced batches.

The host's clock knows every step, but not what the device does in it; the trace knows that of a few steps, which it
slows a little. So the duration of a batch is the clock's, and its division among the actions is the trace's.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from loopfeed.engine.profile.attribution import TracedBatch
from loopfeed.engine.profile.clock import HostClock, PhaseTimes, Spread
from loopfeed.engine.profile.table import BATCH, FIT, STEP, UNATTRIBUTED, Profile, ProfileRow, ScopeRow, TracedSteps
from loopfeed.engine.scopes import ACTIONS, DRAW, FORWARD, PREDICT, SNAPSHOT, TRAIN, VALID, Scope

# The actions whose scopes tell at which depth the scopes of a model differ.
_OF_MODEL = (FORWARD, PREDICT)
_MOST_DEPTH = 4
# Scopes without a name: operations directly in the action.
_NO_NAME = "-"


@dataclass(frozen=True)
class Measured:
    """What was measured of a launch.

    Attributes:
        clock: the host's clock, finished.
        fit_s: seconds from the launch to the end of the loop.
        traced: the traced batches, in order.
        first_traced: the number of the first traced batch of the launch, of each phase that was traced.
        samples: the mean number of images of a batch, over all devices, by phase.
        step_name: the name of one training batch with its draw.
    """

    clock: HostClock
    fit_s: float
    traced: Sequence[TracedBatch]
    first_traced: Mapping[str, int]
    samples: Mapping[str, float]
    step_name: str = STEP


def make_profile(measured: Measured, notes: Iterable[str] = ()) -> Profile:
    """Return the profile of a launch."""
    phases = [_Phase(measured, phase) for phase in (TRAIN, VALID)]
    phases = [phase for phase in phases if phase.times.steps.count]
    return Profile(
        rows=(*_fit_rows(measured), *(row for phase in phases for row in phase.rows())),
        scopes=tuple(row for phase in phases for row in phase.scope_rows()),
        traced=tuple(phase.traced_steps() for phase in phases if phase.batches),
        notes=tuple(notes),
    )


def _fit_rows(measured: Measured) -> Iterator[ProfileRow]:
    clock, fit_s = measured.clock, measured.fit_s
    stretches = {TRAIN: clock.train, VALID: clock.valid}
    num_images = {phase: times.steps.count * measured.samples[phase] for phase, times in stretches.items()}
    in_phases_s = sum(times.stretches.total_s for times in stretches.values())
    yield ProfileRow(FIT, FIT, fit_s, 0.0, 1, _rate(num_images[TRAIN], fit_s), fit_s, 100.0)
    rows = {"epoch": (clock.epochs, 0.0)} | {
        phase: (times.stretches, num_images[phase]) for phase, times in stretches.items()
    }
    for action, (spread, images) in rows.items():
        if spread.count:
            yield _row(FIT, action, spread, fit_s, images / spread.count or None)
    rest_s = max(fit_s - in_phases_s, 0.0)
    yield ProfileRow(FIT, UNATTRIBUTED, rest_s, 0.0, 1, None, rest_s, _percent(rest_s, fit_s))


class _Phase:
    """The rows of one phase.

    Args:
        measured: what was measured.
        phase: "train" or "valid".

    Attributes:
        times: the phase's durations by the host's clock.
        batches: its traced batches.
    """

    def __init__(self, measured: Measured, phase: str) -> None:
        self._measured, self._name = measured, phase
        clock = measured.clock
        self.times: PhaseTimes = clock.train if phase == TRAIN else clock.valid
        self.batches = [batch for batch in measured.traced if batch.phase == phase]
        self._samples = measured.samples[phase]
        # Seconds of each scope in each traced pull, which may have several batches; those of the draw and of snapshots
        # are the clock's.
        self._parts = [self._parts_of(batch) for batch in self.batches]
        traced_s = math.fsum(second for part in self._parts for second in part.values())
        mean_s = self.times.batch_mean_s
        self._num_traced = sum(batch.num_batches for batch in self.batches)
        self._scale = mean_s * self._num_traced / traced_s if traced_s else 0.0

    def rows(self) -> Iterator[ProfileRow]:
        """Yield the rows of the phase: the clock's, between them those of the traced actions, which add up to batch."""
        times, fit_s, samples = self.times, self._measured.fit_s, self._samples
        step_name = self._measured.step_name if self._name == TRAIN else STEP
        yield _row(self._name, step_name, times.steps, fit_s, samples)
        if times.draws.count:
            yield self._draw_row()
        batch_s, count = times.batch_mean_s, times.steps.count
        yield ProfileRow(
            self._name,
            BATCH,
            batch_s,
            times.batch_std_s,
            count,
            _rate(samples, batch_s),
            batch_s * count,
            _percent(batch_s * count, fit_s),
        )
        if self._parts:
            for action in (*ACTIONS[self._name], UNATTRIBUTED):
                seconds = [_sum(part, action) for part in self._parts]
                if any(seconds) or action == UNATTRIBUTED:
                    yield ProfileRow(self._name, action, *self._estimated(seconds), is_estimated=True)
        if self._name == TRAIN and self._measured.clock.snapshots.count:
            yield _row(TRAIN, SNAPSHOT, self._measured.clock.snapshots, fit_s, None)

    def scope_rows(self) -> Iterator[ScopeRow]:
        """Yield the rows of the scopes inside the actions that have any.

        They come in the order of the program, those of the backward pass in that of the forward pass.
        """
        seen = dict.fromkeys(scope for part in self._parts for scope in part)
        of_model = [scope.path for scope in seen if scope.action in _OF_MODEL]
        depth = _depth(of_model)
        order = dict.fromkeys(_shortened(path, depth) for path in of_model)
        for action in ACTIONS[self._name]:
            found = dict.fromkeys(_shortened(scope.path, depth) for scope in seen if scope.action == action)
            if set(found) <= {_NO_NAME}:
                continue
            for name in [*(each for each in order if each in found), *(each for each in found if each not in order)]:
                seconds = [
                    math.fsum(
                        second
                        for scope, second in part.items()
                        if scope.action == action and _shortened(scope.path, depth) == name
                    )
                    for part in self._parts
                ]
                yield ScopeRow(self._name, action, name, *self._estimated(seconds))

    def traced_steps(self) -> TracedSteps:
        """Return which batches were traced, and how much of their time belongs to an action."""
        count = self._num_traced
        nanoseconds = math.fsum(batch.duration_ns for batch in self.batches)
        lost = math.fsum(
            time for batch in self.batches for scope, time in batch.parts_ns.items() if scope.action is None
        )
        first = self._measured.first_traced[self._name]
        return TracedSteps(self._name, first, count, nanoseconds / count / 1e9, (nanoseconds - lost) / count / 1e9)

    def _parts_of(self, batch: TracedBatch) -> dict[Scope, float]:
        parts: dict[Scope, float] = {}
        for scope, nanoseconds in batch.parts_ns.items():
            if scope.action in (DRAW, SNAPSHOT):
                continue
            own = scope if scope.phase == self._name else Scope(self._name)
            parts[own] = parts.get(own, 0.0) + nanoseconds / 1e9
        return parts

    def _draw_row(self) -> ProfileRow:
        draws, batch_s = self.times.draws, self.times.batch_mean_s
        row = _row(self._name, DRAW, draws, self._measured.fit_s, None)
        with_draw, without = _rate(self._samples, draws.mean_s + batch_s), _rate(self._samples, batch_s)
        lost = None if with_draw is None or without is None else with_draw - without
        return replace(row, samples_per_s=lost)

    def _estimated(self, seconds: Sequence[float]) -> tuple[float, float | None, int, float | None, float, float]:
        """Return mean, deviation, calls, rate, total and percent of a part of the batch by its traced durations."""
        spread = Spread()
        for second, batch in zip(seconds, self.batches, strict=True):
            spread.add(second * self._scale, batch.num_batches)
        count = self.times.steps.count
        total_s = spread.mean_s * count
        rate = _rate(self._samples, spread.mean_s)
        return spread.mean_s, spread.std_s, count, rate, total_s, _percent(total_s, self._measured.fit_s)


def _row(phase: str, action: str, spread: Spread, fit_s: float, samples: float | None) -> ProfileRow:
    rate = None if samples is None else _rate(samples, spread.mean_s)
    share = _percent(spread.total_s, fit_s)
    return ProfileRow(phase, action, spread.mean_s, spread.std_s, spread.count, rate, spread.total_s, share)


def _sum(part: Mapping[Scope, float], action: str) -> float:
    wanted = None if action == UNATTRIBUTED else action
    return math.fsum(second for scope, second in part.items() if scope.action == wanted)


def _rate(samples: float, seconds: float) -> float | None:
    return samples / seconds if seconds > 0 and samples else None


def _percent(seconds: float, fit_s: float) -> float:
    return 100 * seconds / fit_s if fit_s > 0 else 0.0


def _depth(paths: Iterable[str]) -> int:
    """Return the least depth at which the scopes of a model differ, so that one around all of them does not matter."""
    split = [path.split("/") for path in paths if path]
    for depth in range(1, _MOST_DEPTH):
        if len({tuple(path[:depth]) for path in split}) > 1:
            return depth
    return 1


def _shortened(path: str, depth: int) -> str:
    return "/".join(path.split("/")[:depth]) or _NO_NAME
