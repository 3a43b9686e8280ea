"""Read `RUN/loss.jsonl` while it grows, and keep a summary of it whose size does not grow.

Owns: which bytes were read already, what counts as a readable line, what `config.json` and `result.json` say about
the run. Must not know: terminals, drawing, jax.
"""

import json
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.loss_chart import LossCurve

LOSS_LOG_NAME = "loss.jsonl"
CONFIG_NAME = "config.json"
RESULT_NAME = "result.json"

_MAX_STEP = 2**53  # above it a float64 step is no longer exact
_FINGERPRINT_BYTES = 128  # the first line carries its time, so two runs differ within this many bytes
_RATE_WINDOW_STEPS = 128

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LossRows:
    """Columns of n lines of the log, in file order; a number that a line lacks is NaN."""

    step: npt.NDArray[np.int64]  # [n], from 1
    loss: Floats  # [n], NaN or infinite where the training was
    learning_rate: Floats  # [n]
    images_per_s: Floats  # [n]
    wait_ms: Floats  # [n], what the device waited for the infeed
    time_s: Floats  # [n], unix seconds

    def __len__(self) -> int:
        return len(self.step)

    def tail(self, num_rows: int) -> "LossRows":
        """The last `num_rows` rows (all of them where there are fewer)."""
        return self.take(slice(max(0, len(self) - num_rows), None))

    def followed_by(self, rows: "LossRows") -> "LossRows":
        """These rows and then those."""
        return LossRows(*(np.concatenate(pair) for pair in zip(self._columns(), rows._columns(), strict=True)))

    def take(self, index: slice | npt.NDArray[np.bool_]) -> "LossRows":
        """The rows which a slice or a boolean mask [n] picks."""
        return LossRows(*(column[index] for column in self._columns()))

    def _columns(self) -> tuple[Any, ...]:
        return self.step, self.loss, self.learning_rate, self.images_per_s, self.wait_ms, self.time_s


@dataclass(frozen=True, eq=False)
class LossBatch:
    """What one `LossLog.read` found."""

    rows: LossRows
    restarted: bool = False  # the file began anew: what was read before belongs to another file
    num_unreadable: int = 0  # lines left out because they are no row
    last_unreadable_line: int = 0  # its number in the file, from 1; 0 where there is none
    more: bool = False  # the file held more than this read took: read again at once


class LossLog:
    """Reads a growing `loss.jsonl` from where the previous read ended; holds no file open between reads.

    A last line without its newline is left for the next read. A file that is missing gives no rows. A file that was
    replaced, shortened or rewritten is read from its start, and the batch says `restarted`.
    """

    def __init__(self, path: Path, chunk_bytes: int = 1 << 18) -> None:
        if chunk_bytes < 1:
            raise ValueError(f"chunk_bytes must be at least 1, got {chunk_bytes}; leave it out for 256 KiB")
        self._path = path
        self._chunk_bytes = chunk_bytes
        self._identity: tuple[int, int] | None = None
        self._fingerprint = b""
        self._offset = 0
        self._num_lines = 0

    def read(self) -> LossBatch:
        """Read up to `chunk_bytes` of whole lines that are new; raises OSError when the file can't be read."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return LossBatch(_NO_ROWS)
        with file:
            restarted = self._rewind_if_another_file(file)
            file.seek(self._offset)
            chunk = file.read(self._chunk_bytes)
        full = len(chunk) == self._chunk_bytes
        stop = chunk.rfind(b"\n") + 1
        if stop == 0 and full:
            # No newline in a whole chunk: no row is that long. Its pieces are left out, the last one at its newline.
            self._offset += len(chunk)
            return LossBatch(_NO_ROWS, restarted, 1, self._num_lines + 1, more=True)
        lines = chunk[:stop].split(b"\n")[:-1]
        rows, unreadable = _parse(lines)
        last_unreadable = self._num_lines + unreadable[-1] + 1 if unreadable else 0
        self._offset += stop
        # Bytes past the last whole line may still be taken back, where the disk is full.
        self._fingerprint = self._fingerprint[: self._offset]
        self._num_lines += len(lines)
        return LossBatch(rows, restarted, len(unreadable), last_unreadable, more=full)

    def _rewind_if_another_file(self, file: Any) -> bool:
        """Go back to the start when this is not the file of the previous read; True when rows had been read of that."""
        status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino)
        head = file.read(_FINGERPRINT_BYTES)
        same = identity == self._identity and status.st_size >= self._offset and head.startswith(self._fingerprint)
        restarted = not same and self._num_lines > 0
        if not same:
            self._identity, self._offset, self._num_lines = identity, 0, 0
        self._fingerprint = head
        return restarted


def _parse(lines: Sequence[bytes]) -> tuple[LossRows, list[int]]:
    """Rows of the readable lines, and the indices of those that are not; blank lines are neither."""
    indices = [index for index, line in enumerate(lines) if line.strip()]
    try:
        # One call for all lines: 2 to 3 times faster than a call a line.
        values = json.loads(b"[" + b",".join([lines[index] for index in indices]) + b"]")
        if len(values) == len(indices):
            return _columns(values), []
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        pass  # at least one line is no row: find out which, line by line
    rows: list[dict[str, Any]] = []
    unreadable: list[int] = []
    for index in indices:
        try:
            value = json.loads(lines[index])
            _columns([value])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            unreadable.append(index)
        else:
            rows.append(value)
    return _columns(rows), unreadable


def _columns(values: Sequence[Any]) -> LossRows:
    """Columns of decoded lines; raises ValueError, KeyError, TypeError or OverflowError when any is no row."""
    steps = [value["step"] for value in values]
    if not set(map(type, steps)) <= {int} or (steps and not (min(steps) >= 0 and max(steps) < _MAX_STEP)):
        raise ValueError("step must be a whole number from 0")
    losses = [value["loss"] for value in values]
    if not set(map(type, losses)) <= {float, int, type(None)}:
        raise ValueError("loss must be a number or null")
    optional = (_optional_column(values, name) for name in ("lr", "images_per_s", "wait_ms", "time"))
    return LossRows(np.array(steps, np.int64), np.array(losses, np.float64), *optional)


def _optional_column(values: Sequence[dict[str, Any]], name: str) -> Floats:
    numbers = [value.get(name) for value in values]
    if not set(map(type, numbers)) <= {float, int, type(None)}:
        numbers = [number if type(number) in (float, int) else None for number in numbers]
    return np.array(numbers, np.float64)  # numpy makes None NaN


_NO_ROWS = _columns([])


class _Bins:
    """Sums and extremes of the losses of `width` consecutive steps each; slot 0 is bin number `first`."""

    def __init__(self, num_bins: int, width: int = 1, first: int = 0) -> None:
        self.width = width
        self.first = first
        self.sums = np.zeros((4, num_bins))  # finite losses, losses not finite, steps, smoothed losses
        self.low = np.full(num_bins, np.inf)
        self.high = np.full(num_bins, -np.inf)

    @property
    def num_losses(self) -> Floats:
        """How many losses each bin holds, finite or not."""
        return self.sums[0] + self.sums[1]

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """The first step of each bin."""
        return (self.first + np.arange(len(self.low))) * self.width

    def add(self, slots: npt.NDArray[np.int64], sums: Floats, low: Floats, high: Floats) -> None:
        """Add entry i (`sums[:, i]`, `low[i]`, `high[i]`) to the bin at `slots[i]`; slots may repeat."""
        for total, part in zip(self.sums, sums, strict=True):
            np.add.at(total, slots, part)
        np.minimum.at(self.low, slots, low)
        np.maximum.at(self.high, slots, high)

    def select(self, keep: npt.NDArray[np.bool_], width: int, first: int) -> "_Bins":
        """The bins of the slots in `keep`, in bins `width` wide from number `first`; `width` is a multiple of ours."""
        selected = _Bins(len(self.low), width, first)
        selected.add(self.starts[keep] // width - first, self.sums[:, keep], self.low[keep], self.high[keep])
        return selected


class LossHistory:
    """Everything read so far, in a fixed number of bins, so that memory and redraw do not grow with the run.

    Smoothing is an exponential moving average without start-up bias: mean_t = (1 - s) Σ s^(t-i) loss_i / (1 - s^t),
    the bias correction of Adam (Kingma and Ba, 2015). A loss that is not finite is counted and left out of it.
    When steps start again lower (a run resumed from a snapshot), the newer rows replace the older.

    Args:
        smoothing: s, at least 0 (no smoothing) and below 1.
        last_steps: keep only this many steps before the newest; None keeps all. Exact up to the width of a bin,
            which is at most `2 * last_steps / num_bins` rounded up.
        num_bins: how many bins, even and at least 2. More than a chart has dot columns loses nothing to the eye.
    """

    def __init__(self, smoothing: float = 0.9, last_steps: int | None = None, num_bins: int = 4096) -> None:
        if not 0 <= smoothing < 1:
            raise ValueError(f"smoothing must be at least 0 and below 1, got {smoothing}; 0 turns it off")
        if last_steps is not None and last_steps < 1:
            raise ValueError(f"last_steps must be at least 1, got {last_steps}; leave it out to keep every step")
        if num_bins < 2 or num_bins % 2:
            raise ValueError(f"num_bins must be even and at least 2, got {num_bins}; the default is 4096")
        self._smoothing = smoothing
        self._last_steps = last_steps
        self._num_bins = num_bins
        self.clear()

    def clear(self) -> None:
        """Forget everything, as when the log began anew."""
        self._bins = _Bins(self._num_bins)
        self._mean = 0.0
        self._weight = 0.0
        self._recent: deque[tuple[int, float]] = deque(maxlen=_RATE_WINDOW_STEPS)
        self.newest: LossRows = _NO_ROWS

    @property
    def last_step(self) -> int | None:
        """The newest step, None before the first."""
        return int(self.newest.step[-1]) if len(self.newest) else None

    @property
    def smoothed(self) -> float:
        """The smoothed loss now; NaN before the first finite loss."""
        return self._mean / self._weight if self._weight else float("nan")

    @property
    def seconds_per_step(self) -> float:
        """Mean over the last steps by the times in the log; NaN where they do not tell."""
        if len(self._recent) < 2:
            return float("nan")
        (first_step, first_time), (last_step, last_time) = self._recent[0], self._recent[-1]
        seconds = (last_time - first_time) / (last_step - first_step)
        return seconds if seconds > 0 else float("nan")

    def add(self, rows: LossRows) -> None:
        """Take in the next rows of the log, in file order."""
        if not len(rows):
            return
        # A row counts unless a later one has the same or a lower step: then the run went back before it.
        lowest_later = np.minimum.accumulate(rows.step[::-1])[::-1]
        rows = rows.take(np.append(rows.step[:-1] < lowest_later[1:], True))
        self._forget_from(int(rows.step[0]))
        self.newest = rows.tail(1)
        tail = rows.tail(_RATE_WINDOW_STEPS)
        self._recent.extend((int(s), float(t)) for s, t in zip(tail.step, tail.time_s, strict=True) if np.isfinite(t))
        smoothed = self._smooth(rows.loss)
        self._make_room(int(rows.step[0]), int(rows.step[-1]))
        finite = np.isfinite(rows.loss)
        sums = np.stack((finite, ~finite, rows.step, np.where(finite, smoothed, 0.0)))
        low, high = np.where(finite, rows.loss, np.inf), np.where(finite, rows.loss, -np.inf)
        slots = rows.step // self._bins.width - self._bins.first
        inside = slots >= 0  # with last_steps, the start of a long batch may be too old to keep
        self._bins.add(slots[inside], sums[:, inside], low[inside], high[inside])

    def curve(self) -> LossCurve:
        """The points to draw, at most `num_bins`, by rising step."""
        bins = self._bins
        used = bins.num_losses > 0
        if self._last_steps is not None and self.last_step is not None:
            used &= bins.starts + bins.width > self.last_step - self._last_steps + 1
        num, num_broken, step_sum, smooth_sum = bins.sums[:, used]
        has_loss = num > 0
        return LossCurve(
            step=step_sum / (num + num_broken),
            low=np.where(has_loss, bins.low[used], np.nan),
            high=np.where(has_loss, bins.high[used], np.nan),
            smoothed=np.where(has_loss, smooth_sum / np.maximum(num, 1), np.nan),
            num_broken=num_broken.astype(np.int64),
        )

    def _smooth(self, losses: Floats) -> Floats:
        smoothing, mean, weight = self._smoothing, self._mean, self._weight
        smoothed = []
        for loss in losses.tolist():
            if loss - loss == 0.0:  # finite; a call to math.isfinite would double the time of this loop
                mean = smoothing * mean + (1 - smoothing) * loss
                weight = smoothing * weight + (1 - smoothing)
            smoothed.append(mean / weight if weight else loss)
        self._mean, self._weight = mean, weight
        return np.array(smoothed, np.float64)

    def _forget_from(self, step: int) -> None:
        """Drop the bins that begin at `step` or later: the run went back before them."""
        if self.last_step is None or step > self.last_step:
            return
        bins = self._bins
        keep = (bins.starts < step) & (bins.num_losses > 0)
        self._bins = bins.select(keep, bins.width, bins.first)
        while self._recent and self._recent[-1][0] >= step:
            self._recent.pop()
        if not keep.any():
            self._bins = _Bins(self._num_bins)
            self.newest = _NO_ROWS

    def _make_room(self, start: int, last: int) -> None:
        """Widen or shift the bins until `last` has a slot; `start` is the oldest step about to be added."""
        if not self._bins.num_losses.any():
            self._bins.first = start // self._bins.width
        while last // self._bins.width - self._bins.first >= self._num_bins:
            bins = self._bins
            used = bins.num_losses > 0
            if self._last_steps is not None and self._num_bins // 2 * bins.width >= self._last_steps:
                first = max(0, last - self._last_steps + 1) // bins.width
                self._bins = bins.select(used & (bins.starts >= first * bins.width), bins.width, first)
            else:
                self._bins = bins.select(used, bins.width * 2, bins.first // 2)


@dataclass(frozen=True)
class RunFacts:
    """What `config.json` says about a run, as far as a follower shows it; None where it does not say."""

    steps: int | None = None
    batch: int | None = None
    model: str | None = None


@dataclass(frozen=True)
class RunEnd:
    """What `result.json` says about a run that ended; None where it does not say."""

    steps_done: int | None = None
    stopped_by: str | None = None
    error: str | None = None


def read_run_facts(run: Path) -> RunFacts:
    """Facts from `RUN/config.json`; a file that is missing, half written or strange gives None for what it lacks."""
    recorded = _read_object(run / CONFIG_NAME) or {}
    settings, resolved = (_object(recorded.get(key)) for key in ("config", "resolved"))
    model = _text(resolved.get("model")) or _text(settings.get("model"))  # resolved says which one "auto" was
    return RunFacts(_count(settings.get("steps")), _count(settings.get("batch")), model)


def read_run_end(run: Path) -> RunEnd | None:
    """The end of the run from `RUN/result.json`; None while that is missing or half written."""
    result = _read_object(run / RESULT_NAME)
    if result is None:
        return None
    return RunEnd(_count(result.get("steps_done")), _text(result.get("stopped_by")), _text(result.get("error")))


def _read_object(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
