"""Reads `RUN/eval.jsonl` while it grows.

Owns what counts as a readable evaluation. Must not know: terminals, jax, how an evaluation is computed.
"""

import json
from pathlib import Path
from typing import Any, TypeGuard

from engine.stream.sinks import EvaluationRecord
from preprocess.regular_file import read_regular

_MOST_BYTES = 1 << 26
_MAX_COUNT = 2**53  # above it a float64 is no longer exact


class EvaluationLog:
    """A reader of an `eval.jsonl` that may still grow; it keeps no file open between reads.

    A last line without its newline is left for a later read, and a line that is not an evaluation is skipped. When the
    file has changed, all of it is read again: it has one line for an evaluation of a whole split, and so stays small.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._state: tuple[int, int, int] | None = None
        self._records: tuple[EvaluationRecord, ...] = ()

    def read(self) -> tuple[EvaluationRecord, ...]:
        """Return all evaluations so far in file order, or `()` if there is no file; raise OSError if reading fails."""
        try:
            status = self._path.stat()
            state = status.st_ino, status.st_size, status.st_mtime_ns
            if state != self._state:
                content = read_regular(self._path, max_bytes=_MOST_BYTES)
                self._records = tuple(filter(None, map(_parse, content.split(b"\n")[:-1])))
                self._state = state
        except FileNotFoundError:
            self._state, self._records = None, ()
        return self._records


def _parse(line: bytes) -> EvaluationRecord | None:
    """Parse a line; return None if it is not an evaluation. A missing or null time or loss becomes NaN."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    step, num_images = value.get("step"), value.get("num_images")
    if not (_is_count(step) and _is_count(num_images)):
        return None
    top1, top5, loss, time_s = (_number(value.get(name)) for name in ("top1", "top5", "loss", "time"))
    is_ranked = value.get("top1") is not None or value.get("top5") is not None
    if is_ranked and not (0 <= top1 <= 1 and 0 <= top5 <= 1):
        return None
    metrics = value.get("metrics")
    return EvaluationRecord(
        step=step,
        num_images=num_images,
        top1=top1,
        top5=top5,
        loss=loss,
        time=time_s,
        metrics=metrics if isinstance(metrics, dict) else {},
    )


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < _MAX_COUNT


def _number(value: Any) -> float:
    return float(value) if type(value) is float or _is_count(value) else float("nan")
