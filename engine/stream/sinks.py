"""What becomes of losses and evaluations: lines in a file, lines on a pipe, a progress line on a terminal.

A sink gets each record once, in order, on one thread. Knows nothing of queues, jax or the loop.
"""

import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TextIO, runtime_checkable

import numpy as np

from engine.crossing.pushed import PushedSnapshot


@dataclass(frozen=True)
class LossRecord:
    """One line of the loss stream.

    Attributes:
        step: updates done, from 1.
        loss: mean over the batch.
        lr: learning rate of the update.
        images_per_s: images of this step, or of all whose losses came together, over the seconds since the last loss;
            NaN where the clock was set back.
        wait_ms: milliseconds that the loop waited for the batch.
        time: seconds since the epoch; losses that came together share the time that they took.
    """

    step: int
    loss: float
    lr: float
    images_per_s: float
    wait_ms: float
    time: float

    def to_json(self) -> str:
        """Gives the record as one line of JSON, without its end; what is no finite number is null."""
        return _line(asdict(self))


@dataclass(frozen=True)
class EvaluationRecord:
    """One evaluation of a whole split.

    Attributes:
        step: updates done before it.
        num_images: counted.
        top1, top5: fractions of them whose class is the first, or among the first five.
        loss: mean over the images.
        time: seconds since the epoch.
    """

    step: int
    num_images: int
    top1: float
    top5: float
    loss: float
    time: float

    def to_json(self) -> str:
        """Gives the record as one line of JSON, without its end; what is no finite number is null."""
        return _line(asdict(self))


@dataclass(frozen=True)
class EvaluationProgress:
    """How far an evaluation has come.

    Attributes:
        step: updates done before it, as far as their losses have come; on a card the last may follow.
        batch: that is asked for next, from 0; on a card the first of those that cross together.
        num_batches: of the split.
    """

    step: int
    batch: int
    num_batches: int


# What is measured on the host is rounded; counts and fractions are exact; the rest is float32 on the device.
_ROUNDED = {"images_per_s": 2, "wait_ms": 3, "time": 3}
_EXACT = {"step", "num_images", "top1", "top5"}


def _line(values: dict[str, Any]) -> str:
    return json.dumps(
        {name: _as_recorded(name, value) if math.isfinite(value) else None for name, value in values.items()}
    )


def _as_recorded(name: str, value: float) -> float:
    if name in _ROUNDED:
        return round(value, _ROUNDED[name])
    # The shortest decimal that reads back as the same float32: 0.05, not 0.05000000074505806.
    return value if name in _EXACT else float(str(np.float32(value)))


class Sink(Protocol):
    """Where records go."""

    def open(self) -> None:
        """Begins the stream; called once, by the thread that launches the program."""
        ...

    def write(self, record: LossRecord) -> None:
        """Takes one loss; may raise, which stops the run cleanly and is raised to the user."""
        ...

    def write_evaluation(self, record: EvaluationRecord) -> None:
        """Takes one evaluation, in its order among the losses; may raise likewise."""
        ...

    def close(self) -> None:
        """Ends the stream; called once, after the last record, on the thread of `write`, where `open` succeeded."""
        ...


@runtime_checkable
class ShowsProgress(Protocol):
    """What a sink may do as well: show an evaluation that is under way."""

    def write_progress(self, progress: EvaluationProgress) -> None:
        """Takes how far it has come; left out where the sink is behind."""
        ...


@runtime_checkable
class TakesSnapshots(Protocol):
    """What a sink may do as well: take the snapshots of the program's state."""

    def write_snapshot(self, snapshot: PushedSnapshot) -> None:
        """Take one, in its order among the losses; may raise likewise."""
        ...

    def leave_out(self, snapshot: PushedSnapshot) -> None:
        """Note that one will not come, as another still waits for its turn; on the program's thread, so at once."""
        ...


class PlainSink:
    """A plain line a step, flushed at once: for pipes and logs."""

    def __init__(self, stream: TextIO, *, steps: int) -> None:
        self._stream, self._steps = stream, steps

    def open(self) -> None:
        """Has nothing to begin."""

    def write(self, record: LossRecord) -> None:
        """Prints the record."""
        self._print("  ".join(loss_fields(record, self._steps)))

    def write_evaluation(self, record: EvaluationRecord) -> None:
        """Prints the evaluation."""
        self._print(evaluation_words(record))

    def _print(self, line: str) -> None:
        # In one piece: another thread that says something must not come between a line and its end.
        self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Leaves the stream, which belongs to the caller."""


def loss_fields(record: LossRecord, steps: int | None) -> list[str]:
    """Gives the parts of a loss's line for people, in order: step, loss, learning rate, images a second, wait.

    Whoever reads a record back from the loss log gives the same words: the numbers are taken as they are written there.

    Args:
        record: of the step; what is NaN is left out, but for the loss.
        steps: of the whole run, None where nobody knows.
    """
    step = f"step {record.step}" if steps is None else f"step {record.step}/{steps}"
    fields = [step, f"loss {loss_number(record.loss)}"]
    if not math.isnan(record.lr):
        fields.append(f"lr {_as_recorded('lr', record.lr):.3g}")
    if not math.isnan(record.images_per_s):
        rate = _as_recorded("images_per_s", record.images_per_s)
        fields.append(f"{rate:.1f} images/s" if rate >= 10 else f"{rate:.3g} images/s")
    if not math.isnan(record.wait_ms):
        fields.append(f"wait {_as_recorded('wait_ms', record.wait_ms):.2f} ms")
    return fields


def loss_number(loss: float) -> str:
    """Gives a loss in four decimals, or where these tell little (below 0.001, from 100,000), in four digits."""
    if not math.isfinite(loss):
        return str(loss)
    loss = _as_recorded("loss", loss)
    return f"{loss:.4f}" if loss == 0 or 1e-3 <= abs(loss) < 1e5 else f"{loss:.4g}"


def evaluation_words(record: EvaluationRecord) -> str:
    """Gives an evaluation as a line for people."""
    return (
        f"evaluation at step {record.step}: top-1 {100 * record.top1:.2f} %  top-5 {100 * record.top5:.2f} %  "
        f"loss {record.loss:.4f}  ({record.num_images:,} images)"
    )
