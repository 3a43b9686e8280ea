"""The result of a replay as an object and as text: what was compared, and the first difference of each kind.

Owns what counts as equal: the same bits. Must not know: the loop.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from loopfeed.engine.records.snapshot import match_state
from loopfeed.engine.replay.recorded_stretch import EVALUATION_NUMBERS, Numbers, RecordedStretch, flatten_metrics
from loopfeed.engine.stream.sinks import EvaluationRecord, LossRecord
from loopfeed.preprocess.quantities import listed, quantity

_MISSING = "nothing"
_METRIC = "metrics."


@dataclass(frozen=True)
class Difference:
    """The first difference of one kind, with the number of differences of that kind.

    Attributes:
        kind: "loss", "learning rate", "evaluation" or "array".
        where: the step and, for evaluations and arrays, the name of what differs.
        recorded, replayed: the values as text; "nothing" where there is no value.
        count: how many values of the kind differ.
        total: how many values of the kind were compared.
        largest: the largest difference between two numbers of the kind, relative to the recorded one; None for kinds
            that are not numbers, or if one of the differing values is not finite.
    """

    kind: str
    where: str
    recorded: str
    replayed: str
    count: int
    total: int
    largest: float | None = None

    def __str__(self) -> str:
        plural = "arrays" if self.kind == "array" else "losses" if self.kind == "loss" else f"{self.kind}s"
        return (
            f"{self.kind} of {self.where}: recorded {self.recorded}, replayed {self.replayed}; "
            f"{self.count:,} of {self.total:,} {plural} differ"
            + ("" if self.largest is None else f", by at most {self.largest:.1e} of their value")
        )


@dataclass(frozen=True)
class ReplayReport:
    """The result of a replay: how much was compared, and the differences.

    Attributes:
        from_step: the step that the replay started from.
        to_step: the last update that was compared.
        num_losses: the number of losses compared, each with its learning rate.
        num_evaluations: the number of evaluations compared.
        num_arrays: the number of arrays of the state at `to_step` compared with its snapshot; None without a snapshot.
        differences: the first difference of each kind.
        stopped_by: the signal that stopped the replay early, None if none did.
        file_faults: one line for each file that is not as the run wrote it.
        doubts: what is other here than where the run was recorded, by which the bits may differ.
    """

    from_step: int
    to_step: int
    num_losses: int
    num_evaluations: int
    num_arrays: int | None
    differences: tuple[Difference, ...]
    stopped_by: str | None = None
    file_faults: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()

    @property
    def is_same(self) -> bool:
        """Whether all compared values have the same bits, and no file has changed since it was written."""
        return not self.differences and not self.file_faults

    def __str__(self) -> str:
        if not self.is_same:
            faults = [f"not as written: {fault}" for fault in self.file_faults]
            reasons = [f"other than in the record: {listed(self.doubts)}"] if self.differences and self.doubts else []
            return "\n".join([*faults, *(f"differs: {difference}" for difference in self.differences), *reasons])
        counted = [quantity(self.num_losses, "loss"), quantity(self.num_evaluations, "evaluation")]
        if self.num_arrays is not None:
            counted.append(f"{quantity(self.num_arrays, 'array')} of the snapshot of step {self.to_step:,}")
        text = f"the same bits: {', '.join(counted)}"
        if self.stopped_by is not None:
            return f"{text}, up to step {self.to_step:,}, where {self.stopped_by} stopped the replay"
        return text if self.num_arrays is not None else f"{text}; step {self.to_step:,} has no snapshot to compare"


class Comparison:
    """A sink that compares a replay with the record, step by step.

    Args:
        stretch: the record.
    """

    def __init__(self, stretch: RecordedStretch) -> None:
        self._stretch = stretch
        self._last_step = stretch.start.step
        self._kinds = {name: _Kind(name) for name in ("loss", "learning rate", "metric", "evaluation", "array")}
        self._evaluated: set[int] = set()

    def open(self) -> None:
        """Do nothing, because a replay in pieces opens the sink repeatedly."""

    def write(self, record: LossRecord) -> None:
        """Compare a loss, its learning rate and its metrics."""
        replayed, recorded = _numbers_of(record), self._stretch.losses[record.step]
        self._last_step = record.step
        where = f"step {record.step:,}"
        self._kinds["loss"].compare(where, recorded["loss"], replayed["loss"])
        self._kinds["learning rate"].compare(where, recorded["lr"], replayed["lr"])
        for name in sorted(each for each in {*replayed, *recorded} if each.startswith(_METRIC)):
            numbers = recorded.get(name, math.nan), replayed.get(name, _MISSING)
            self._kinds["metric"].compare(f"{where}, {name.removeprefix(_METRIC)}", *numbers)

    def write_evaluation(self, record: EvaluationRecord) -> None:
        """Compare an evaluation."""
        self._evaluated.add(record.step)
        self._compare_evaluation(record.step, self._stretch.evaluations.read(record.step), _numbers_of(record))

    def close(self) -> None:
        """Do nothing."""

    def compare_state(self, state: Any) -> None:
        """Compare the state after the last update with the snapshot of that step, if there is one.

        Args:
            state: a pytree of NumPy arrays, PRNG keys as their key data.

        Raises:
            SnapshotError: if the snapshot does not fit the state.
        """
        if self._stretch.snapshot is None:
            return
        saved = jax.tree.leaves(match_state(self._stretch.snapshot.leaves, state))
        paths = jax.tree_util.tree_leaves_with_path(state)
        for recorded, (path, replayed) in zip(saved, paths, strict=True):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            self._kinds["array"].compare_array(f"step {self._stretch.to_step:,}, {name}", recorded, replayed)

    def report(self, stopped_by: str | None) -> ReplayReport:
        """Return the report; unless the replay was stopped, missing steps and evaluations count as differences."""
        if stopped_by is None:
            for step in range(self._last_step + 1, self._stretch.to_step + 1):
                self._kinds["loss"].compare(f"step {step:,}", self._stretch.losses[step]["loss"], _MISSING)
            for step in sorted(self._stretch.evaluations.places.keys() - self._evaluated):
                self._compare_evaluation(step, self._stretch.evaluations.read(step), None)
        return ReplayReport(
            from_step=self._stretch.start.step,
            to_step=self._last_step,
            num_losses=self._kinds["loss"].total,
            num_evaluations=self._kinds["evaluation"].total,
            num_arrays=self._kinds["array"].total or None,
            differences=tuple(found for kind in self._kinds.values() if (found := kind.difference()) is not None),
            stopped_by=stopped_by,
        )

    def _compare_evaluation(self, step: int, recorded: Numbers | None, replayed: Numbers | None) -> None:
        """Compare the numbers of an evaluation, of which the first that differs is named."""
        kind, where = self._kinds["evaluation"], f"step {step:,}"
        if recorded is None or replayed is None:
            kind.note(where, *(_MISSING if numbers is None else "one" for numbers in (recorded, replayed)))
            return
        names = [*EVALUATION_NUMBERS, *sorted(name for name in {*recorded, *replayed} if name.startswith(_METRIC))]
        if recorded.get("top5") == 1 and replayed.get("top5") is None:
            # Earlier versions recorded top-5 below six classes, too, where it is always 1.
            names.remove("top5")
        for name in names:
            before, now = recorded.get(name, _MISSING), replayed.get(name, _MISSING)
            if not _is_same(before, now):
                kind.note(f"{where}, {name.removeprefix(_METRIC)}", _text(before), _text(now))
                return
        kind.total += 1


class _Kind:
    """The counts and the first difference of one kind of comparison."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._first: tuple[str, str, str] | None = None
        self._relative: list[float] = []
        self.count = self.total = 0

    def compare(self, where: str, recorded: float | None, replayed: float | str | None) -> None:
        if _is_same(recorded, replayed):
            self.total += 1
            return
        self.note(where, _text(recorded), _text(replayed))
        if recorded and math.isfinite(recorded) and isinstance(replayed, int | float):
            self._relative.append(abs(replayed - recorded) / abs(recorded))

    def compare_array(self, where: str, recorded: NDArray[Any], replayed: NDArray[Any]) -> None:
        """Compare two arrays of the same shape and dtype."""
        # As bytes: NaN equals itself, and minus zero differs from zero.
        rows = [
            np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(array.size, array.itemsize)
            for array in (recorded, replayed)
        ]
        differing = np.flatnonzero((rows[0] != rows[1]).any(axis=1))
        if not len(differing):
            self.total += 1
            return
        first = int(differing[0])
        index = [int(each) for each in np.unravel_index(first, recorded.shape)]
        others = f", one of {quantity(len(differing), 'number')}" if len(differing) > 1 else ""
        at = f" at {index}{others}" if index else ""
        self.note(f"{where}{at}", str(recorded.reshape(-1)[first]), str(replayed.reshape(-1)[first]))

    def note(self, where: str, recorded: str, replayed: str) -> None:
        """Count a difference, and keep it if it is the first."""
        self.total += 1
        self.count += 1
        self._first = self._first or (where, recorded, replayed)

    def difference(self) -> Difference | None:
        if self._first is None:
            return None
        # Without a number for each difference, the largest is not known.
        largest = max(self._relative) if len(self._relative) == self.count else None
        return Difference(self._name, *self._first, self.count, self.total, largest)


def _numbers_of(record: LossRecord | EvaluationRecord) -> Numbers:
    """Return the numbers of a record as they stand in its line, those of its metrics by their names."""
    line = json.loads(record.to_json())
    return line | flatten_metrics(line)


def _is_same(recorded: float | str | None, replayed: float | str | None) -> bool:
    if isinstance(recorded, int | float) and isinstance(replayed, int | float):
        return recorded == replayed and math.copysign(1, recorded) == math.copysign(1, replayed)
    return recorded is None and replayed is None


def _text(number: float | str | None) -> str:
    return "NaN or infinite" if number is None else str(number)
