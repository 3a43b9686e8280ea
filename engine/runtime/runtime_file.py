"""Reads `runtime.json`, and converts the record of a run's launches to its content. Needs no jax."""

import json
import math
import os
import types
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from loopfeed.engine.records.limits import MOST_JSON_BYTES
from loopfeed.engine.records.run_folder import RUNTIME
from loopfeed.engine.runtime.record import FORMAT, RuntimeReport
from loopfeed.preprocess.regular_file import read_regular
from loopfeed.preprocess.system_errors import error_text, reading_remedy

# More digits than clocks and counters have.
_DIGITS = 6
# Larger numbers than clocks and counters have: sums of these stay finite.
_MOST = 1 << 62


def read_runtime(run: str | os.PathLike[str]) -> RuntimeReport | None:
    """Read `runtime.json` of a run folder; return None if there is none, as in runs of earlier releases.

    Raises:
        ValueError: the file cannot be read, or is not what a run writes.

    Example:
        >>> report = read_runtime(Path("run"))
        >>> len(report.launches)
        1
    """
    path = Path(run) / RUNTIME
    try:
        return decode_runtime(read_regular(path, max_bytes=MOST_JSON_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        if remedy := reading_remedy(error, ""):
            raise ValueError(f"{path} cannot be read ({error_text(error)}): {remedy}") from error
        raise ValueError(
            f"{path} is not a record of launches ({error_text(error)}): restore that file, or remove it"
        ) from error


def encode_runtime(report: RuntimeReport) -> bytes:
    """Return the content of `runtime.json`."""
    values = {"format": FORMAT, **_rounded(asdict(report))}
    return (json.dumps(values, separators=(",", ":"), allow_nan=False) + "\n").encode()


def decode_runtime(content: bytes) -> RuntimeReport:
    """Return the record in the content of `runtime.json`; keys that are not known are ignored.

    Raises:
        ValueError, KeyError or TypeError: it has another format.
    """
    values = json.loads(content)
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        found = values.get("format") if isinstance(values, dict) else type(values).__name__
        raise ValueError(f"its format must be {FORMAT}, got {found!r}")
    report: RuntimeReport = _decode(RuntimeReport, values, "runtime")
    if not report.launches:
        raise ValueError("it must have a launch, got none")
    return report


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        # JSON has no other numbers, and a monitor must not fail.
        return round(value, _DIGITS) if math.isfinite(value) else 0.0
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value


def _decode(kind: Any, value: Any, name: str) -> Any:
    """Return a JSON value as a value of a type that appears in the record; raise TypeError if it has another type."""
    if isinstance(kind, types.UnionType) or get_origin(kind) is Union:
        return None if value is None else _decode(get_args(kind)[0], value, name)
    if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        hints = get_type_hints(kind)
        known = {each.name for each in fields(kind)}
        return kind(**{key: _decode(hints[key], each, key) for key, each in value.items() if key in known})
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple and isinstance(value, list):
        return tuple(_decode(arguments[0], each, name) for each in value)
    if origin is dict and isinstance(value, dict):
        return {key: _decode(arguments[1], each, name) for key, each in value.items()}
    if hasattr(kind, "__value__"):
        return _decode(kind.__value__, value, name)
    if origin is Literal and value in arguments:
        return value
    if kind is float and type(value) in (int, float) and abs(value) < _MOST:
        return float(value)
    if kind in (bool, str) and type(value) is kind:
        return value
    if kind is int and type(value) is int and abs(value) < _MOST:
        return value
    raise TypeError(f"{name} has the value {repr(value)[:40]}")
