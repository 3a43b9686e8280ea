"""Records of losses and evaluations, the protocol of a sink, and a sink that prints plain lines.

A sink gets each record once, in order, on one thread. Does not depend on queues, jax or the loop.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np

from loopfeed.engine.crossing.pushed import PushedHistograms, PushedImages, PushedSnapshot
from loopfeed.engine.profile.table import Profile
from loopfeed.preprocess.quantities import quantity


@dataclass(frozen=True)
class LossRecord:
    """The loss of one update, with its learning rate, speed and waiting time.

    Attributes:
        step: updates done, from 1.
        loss: mean over the batch.
        lr: learning rate of the update.
        images_per_s: images of this step, or of all steps whose losses arrived together, divided by the seconds since
            the last loss; NaN if the clock was set back.
        wait_ms: milliseconds that the loop waited for the batch.
        time: seconds since the Unix epoch; losses that arrive together share the elapsed time evenly.
        metrics: values of the user's metrics by name, over the images of the update.
    """

    step: int
    loss: float
    lr: float
    images_per_s: float
    wait_ms: float
    time: float
    metrics: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the record as one line of JSON, without the newline; NaN and infinity become null."""
        return _line(asdict(self))


@dataclass(frozen=True)
class EvaluationRecord:
    """The result of one evaluation of a whole split.

    Attributes:
        step: updates done before the evaluation.
        num_images: number of images.
        top1, top5: fractions of the images whose class ranks first, or among the first five; NaN if the labels are not
            class numbers. `top5` is NaN also if the network has fewer than six classes, where it says nothing.
        loss: mean over the images. All three are NaN if there are none.
        time: seconds since the Unix epoch.
        metrics: values of the user's metrics by name, numbers or nested lists of numbers.
    """

    step: int
    num_images: int
    top1: float
    top5: float
    loss: float
    time: float
    metrics: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the record as one line of JSON, without the newline; NaN and infinity become null."""
        return _line(asdict(self))

    @cached_property
    def num_listed(self) -> int:
        """How many numbers the lists among the metrics have; counting a million takes 0.2 s."""
        return sum(_count_numbers(each) for each in self.metrics.values() if isinstance(each, list))

    def without_lists(self) -> "EvaluationRecord":
        """Return the record with only those metrics that are numbers."""
        return replace(self, metrics={name: each for name, each in self.metrics.items() if not isinstance(each, list)})


def _count_numbers(values: list[Any]) -> int:
    return sum(_count_numbers(each) if isinstance(each, list) else 1 for each in values)


@dataclass(frozen=True)
class EvaluationProgress:
    """The progress of an evaluation, counted in batches.

    Attributes:
        step: updates done before the evaluation whose losses have arrived; on a GPU the last losses may follow later.
        batch: the batch requested next, from 0; on a GPU the first of the next chunk.
        num_batches: number of batches in the split.
    """

    step: int
    batch: int
    num_batches: int


# Measurements on the host are rounded; counts and fractions are exact; the rest is float32 on the device.
_ROUNDED = {"images_per_s": 2, "wait_ms": 3, "time": 3}
_EXACT = {"step", "num_images", "top1", "top5"}


def _line(values: dict[str, Any]) -> str:
    metrics = values.pop("metrics", {})
    line = {name: _as_recorded(name, value) if math.isfinite(value) else None for name, value in values.items()}
    # Without metrics the line is the one that earlier releases wrote.
    return json.dumps(line | ({"metrics": _nested(metrics)} if metrics else {}))


def _nested(value: Any) -> Any:
    """Return metrics as they are recorded: each number as the shortest decimal that is the same float32."""
    if isinstance(value, Mapping):
        return {name: _nested(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_nested(each) for each in value]
    if isinstance(value, int):
        return value
    return _as_recorded("metric", value) if math.isfinite(value) else None


def _as_recorded(name: str, value: float) -> float:
    if name in _ROUNDED:
        return round(value, _ROUNDED[name])
    # The shortest decimal that is the same float32: 0.05, not 0.05000000074505806.
    return value if name in _EXACT else float(str(np.float32(value)))


class Sink(Protocol):
    """A receiver of the records of a run, such as a terminal or a file.

    A sink may have more methods: `write_progress`, for an `EvaluationProgress` while the sink does not lag behind;
    `write_histograms` and `write_images`, left out if it lags; `write_snapshot`; `write_profile`, for a `Profile`, at
    most once, after the last record. An exception in one of these acts as in `write`. `leave_out` gets a snapshot that
    is skipped because another one is queued, on the program's thread, and must not block. `describe_run` gets a
    `RunDescription` before `open`, and `finish` is called at the end of the run, to wait for a limited time for what
    is still at work after `close`.

    If it has an attribute `is_display` that is true, a failure of the sink, or a wait for it that has reached its
    limit, ends the sink alone, with a warning. If `needs_snapshots` is true, the program waits, for a limited time,
    before it leaves a snapshot out.

    Example:
        >>> class Losses:
        ...     def open(self):
        ...         self.losses = []
        ...     def write(self, record):
        ...         self.losses.append(record.loss)
        ...     def write_evaluation(self, record):
        ...         pass
        ...     def close(self):
        ...         pass
        >>> sink = Losses()
        >>> result = train(TrainConfig(data="data", steps=3, batch=4), model=model, sinks=[sink])
        >>> len(sink.losses), round(sink.losses[0], 4)
        (3, 0.6931)
    """

    def open(self) -> None:
        """Open the sink; called once, by the thread that launches the program."""
        ...

    def write(self, record: LossRecord) -> None:
        """Write one loss; an exception stops the run cleanly and is then raised to the caller of `train`."""
        ...

    def write_evaluation(self, record: EvaluationRecord) -> None:
        """Write one evaluation, keeping its order relative to the losses; an exception acts as in `write`."""
        ...

    def close(self) -> None:
        """Close the sink; called once if `open` succeeded, after the last record, on the thread that calls `write`."""
        ...


def writer_of(sink: Sink, kind: type) -> Callable[[Any], None] | None:
    """Return the method of a sink that takes records of a kind, a key of `WRITERS`; None if the sink takes none."""
    found: Callable[[Any], None] | None = getattr(sink, WRITERS[kind], None)
    return found


def is_display(sink: Sink) -> bool:
    """Return whether the result of the run does not depend on a sink."""
    return bool(getattr(sink, "is_display", False))


WRITERS: Mapping[type, str] = {
    LossRecord: "write",
    EvaluationRecord: "write_evaluation",
    EvaluationProgress: "write_progress",
    PushedSnapshot: "write_snapshot",
    PushedHistograms: "write_histograms",
    PushedImages: "write_images",
    Profile: "write_profile",
}
"""The method of a sink for each kind of record; all but the first two are optional."""


@dataclass(frozen=True)
class RunDescription:
    """What is known of a run before its first step.

    Attributes:
        settings: the settings by name, as JSON values.
        facts: what they resolved to, such as the name of the model, as JSON values.
        run_dir: the run folder, None without one.
        step: updates done before this launch; what an earlier launch logged of later steps is void.
        classes: readable names of the classes, None if there are none.
        notify: called with a line of text, such as a warning.
        epoch_at: returns how many epochs the run has seen after a step; None if there are no epochs.
    """

    settings: Mapping[str, Any]
    facts: Mapping[str, Any]
    run_dir: Path | None
    step: int
    classes: tuple[str, ...] | None
    notify: Callable[[str], None]
    epoch_at: Callable[[int], float] | None = None

    @property
    def resolved_settings(self) -> dict[str, Any]:
        """The settings as they were resolved, with what else is known, by name; without those that are None."""
        known = {name: value for name, value in self.facts.items() if value is not None}
        return {name: value for name, value in {**self.settings, **known}.items() if value is not None}


class LineChoice:
    """Which steps have a line of their own in plain output: the first, then one every so often, and the last.

    Args:
        every: steps between lines, which stand at its multiples; None shows one every `LINE_EVERY_S` seconds.
    """

    def __init__(self, every: int | None = None) -> None:
        self._every = every
        self._shown_s = -math.inf

    def takes(self, step: int, time_s: float) -> bool:
        """Return whether the next step has a line; `time_s` is when its loss arrived, in seconds since the epoch."""
        if self._every is not None:
            is_first, self._shown_s = self._shown_s == -math.inf, time_s
            return is_first or step % self._every == 0
        # A clock that was set back must not silence the lines.
        if self._shown_s <= time_s < self._shown_s + LINE_EVERY_S:
            return False
        self._shown_s = time_s
        return True


LINE_EVERY_S = 5.0
"""Seconds between the lines of plain output."""


class PlainSink:
    """A sink that prints plain lines and flushes each at once, for pipes and logs.

    Args:
        stream: where to print.
        steps: the number of steps of the whole run.
        every: steps between lines; None prints one every few seconds. The first and the last step always have one.
    """

    is_display = True

    def __init__(self, stream: TextIO, *, steps: int, every: int | None = 1) -> None:
        self._stream, self._steps = stream, steps
        self._epoch_at: Callable[[int], float] | None = None
        self._choice = LineChoice(every)
        self._left_out: LossRecord | None = None

    def describe_run(self, description: RunDescription) -> None:
        """Take what counts the epochs."""
        self._epoch_at = description.epoch_at

    def open(self) -> None:
        """Do nothing, because the stream is already open."""

    def write(self, record: LossRecord) -> None:
        """Print one line for a loss, if it is time for one."""
        if self._choice.takes(record.step, record.time):
            self._left_out = None
            self._print_loss(record)
        else:
            self._left_out = record

    def write_evaluation(self, record: EvaluationRecord) -> None:
        """Print one line for an evaluation."""
        self._print(evaluation_words(record))

    def _print(self, line: str) -> None:
        # One write, so that another thread's output cannot come between a line and its newline.
        self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Print the last step, if it has no line yet; the stream belongs to the caller."""
        if self._left_out is not None:
            self._print_loss(self._left_out)

    def _print_loss(self, record: LossRecord) -> None:
        fields = loss_fields(record, self._steps)
        if self._epoch_at is not None:
            fields.append(epoch_field(self._epoch_at, record.step, self._steps))
        self._print("  ".join(fields))


def epoch_field(epoch_at: Callable[[int], float], step: int, steps: int) -> str:
    """Return the part of a line that says how many of all epochs a run has seen after a step."""
    epoch, epochs = epoch_at(step), epoch_at(steps)
    decimals = 1 if epochs < 100 else 0
    return f"epoch {epoch:.{decimals}f}/{epochs:.{decimals}f}"


def loss_fields(record: LossRecord, steps: int | None) -> list[str]:
    """Return the parts of a human-readable loss line: step, loss, learning rate, images per second, waiting time.

    Numbers are rounded as in the loss log, so that a record read back from it gives the same text.

    Args:
        record: the loss; NaN values other than the loss are left out.
        steps: steps of the whole run, None if unknown.
    """
    step = f"step {record.step}" if steps is None else f"step {record.step}/{steps}"
    fields = [step, f"loss {loss_number(record.loss)}"]
    if not math.isnan(record.lr):
        fields.append(f"lr {_as_recorded('lr', record.lr):z.3g}")
    if not math.isnan(record.images_per_s):
        rate = _as_recorded("images_per_s", record.images_per_s)
        fields.append(f"{rate:.1f} images/s" if rate >= 10 else f"{rate:.3g} images/s")
    if not math.isnan(record.wait_ms):
        fields.append(f"wait {_as_recorded('wait_ms', record.wait_ms):z.2f} ms")
    return fields + metric_fields(record.metrics)


SHOWN_MEAN_STEPS = 50
"""Of how many of the newest steps of a launch people are shown the mean loss, while it trains and at its end."""


def loss_number(loss: float) -> str:
    """Format a loss with four decimals, or with four significant digits if it is below 0.001 or at least 100,000."""
    if not math.isfinite(loss):
        return str(loss)
    loss = _as_recorded("loss", loss)
    return f"{loss:z.4f}" if loss == 0 or 1e-3 <= abs(loss) < 1e5 else f"{loss:.4g}"


def evaluation_words(record: EvaluationRecord, width: int | None = None) -> str:
    """Return a human-readable line with the step and the results of an evaluation.

    Args:
        record: the evaluation.
        width: leave out the number of images, and then the last results, if the line has more characters; None is no
            limit.
    """
    ranks = {"top-1": record.top1, "top-5": record.top5}
    fields = [f"{name} {100 * rank:.2f} %" for name, rank in ranks.items() if not math.isnan(rank)]
    fields += [f"loss {record.loss:z.4f}", *metric_fields(record.metrics)]
    fields.append(f"({quantity(record.num_images, 'image')})")
    beginning = f"evaluation at step {record.step}: "
    while width is not None and len(fields) > 1 and len(beginning + "  ".join(fields)) > width:
        fields.pop()
    return beginning + "  ".join(fields)


def metric_fields(metrics: Mapping[str, Any]) -> list[str]:
    """Return the metrics that are numbers as parts of a human-readable line; arrays are left out."""
    return [f"{name} {loss_number(value)}" for name, value in metrics.items() if isinstance(value, int | float)]
