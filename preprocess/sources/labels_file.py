"""Reads a file of labels, CSV or JSON lines: several classes, or numbers, for each image of a source.

Owns the rules of the file, which `data/README.md` states, and its errors, each of which names the file and the line.
Does not know the images.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from loopfeed.preprocess.file_kinds import HEAD_BYTES, JSON_TEXT, UNPACK, kind_of
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.quantities import parse_float
from loopfeed.preprocess.regular_file import read_regular
from loopfeed.preprocess.shards.classes import MAX_CLASSES
from loopfeed.preprocess.shards.targets import TargetKind, TargetRows, pack_bits
from loopfeed.preprocess.sources.listing import SourceError
from loopfeed.preprocess.system_errors import reading_remedy

SEPARATOR = "|"
"""Separates the classes of an image in CSV."""
CLASSES_COLUMN, PATH_COLUMN = "classes", "path"
SUFFIXES = (".csv", ".jsonl")

MAX_FILE_BYTES = 2**30
MAX_LINE_BYTES = 2**21
_BITS_AT_ONCE = 1 << 24
_SHOWN_CHARACTERS = 60

type _Entry = tuple[int, str, list[str] | list[float]]
"""Number of the line (from 1), path, and classes or numbers."""


@dataclass(frozen=True, eq=False)
class LabelTable:
    """The contents of a file of labels.

    Attributes:
        file: the file.
        digest: SHA-256 of its bytes, hexadecimal.
        kind: whether it has classes or numbers.
        names: the K classes, sorted by their bytes, or the K columns in their order.
        rows: path → index of its row.
        lines: int64 ``[n]``, the number of the line of each row, from 1.
        values: the rows as they are stored, uint32 ``[n, words]`` of bits or float32 ``[n, K]``.
    """

    file: Path
    digest: str
    kind: TargetKind
    names: tuple[str, ...]
    rows: dict[str, int]
    lines: NDArray[np.int64]
    values: TargetRows

    def where(self, row: int) -> str:
        """Return the file and the line of a row, for messages."""
        return f"{printable(self.file)}, line {self.lines[row]}"


def read_labels(path: str | Path) -> LabelTable:
    """Read a file of labels.

    Args:
        path: a file that ends with ``.csv`` or ``.jsonl``.

    Raises:
        SourceError: the file cannot be read or breaks a rule; the message names the line.
    """
    file = Path(path)
    suffix = file.suffix.lower()
    if suffix not in SUFFIXES:
        raise SourceError(f"the file of labels must end with {' or '.join(SUFFIXES)}, got {printable(file)}; rename it")
    reader = _Reader(file)
    content = _read(file)
    found = kind_of(content[:HEAD_BYTES])
    if found is not None and found != JSON_TEXT and (found.is_lost or found.remedy == UNPACK):
        reader.fail(None, f"it is {found.name}", found.remedy)
    try:
        lines = _lines_of(reader, content)
        kind, columns, entries = _read_csv(reader, lines) if suffix == ".csv" else _read_json(reader, lines)
        gathered = _Gathered(reader, kind)
        for entry in entries:
            gathered.add(*entry)
    except RecursionError:
        reader.fail(reader.line, "its values are nested too deeply", "give a flat object")
    names, values = gathered.finish(columns)
    numbers = np.array(gathered.lines, np.int64)
    return LabelTable(file, hashlib.sha256(content).hexdigest(), kind, names, gathered.rows, numbers, values)


@dataclass
class _Reader:
    """The place in a file that is being read, and the form of its errors."""

    file: Path
    line: int = 0

    def fail(self, line: int | None, fault: str, remedy: str) -> NoReturn:
        """Raise SourceError for a fault in a line, or in the whole file."""
        where = printable(self.file) + ("" if line is None else f", line {line}")
        raise SourceError(f"{where}: {fault}; {remedy}")


def _read(file: Path) -> bytes:
    try:
        return read_regular(file, max_bytes=MAX_FILE_BYTES)
    except OSError as error:
        raise SourceError(
            f"the file of labels {printable(file)} cannot be read: {error.strerror}; "
            f"{reading_remedy(error, 'check --labels')}"
        ) from error


def _lines_of(reader: _Reader, content: bytes) -> Iterator[str]:
    """Yield the lines of the file, each with its line break, and keep the number of the last one in ``reader``."""
    for number, line in enumerate(io.BytesIO(content), start=1):
        reader.line = number
        if len(line) > MAX_LINE_BYTES:
            reader.fail(
                number, f"the line has {len(line):,} bytes, more than the {MAX_LINE_BYTES:,} allowed", "shorten it"
            )
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            reader.fail(number, f"byte {error.start + 1} of the line is not UTF-8", "save the file as UTF-8")


def _read_csv(reader: _Reader, lines: Iterator[str]) -> tuple[TargetKind, tuple[str, ...], Iterator[_Entry]]:
    rows = _csv_rows(reader, lines)
    first = next(rows, None)
    if first is None:
        reader.fail(None, "the file is empty", "begin with the line path,classes or path,NAME,…")
    number, header = first
    expected = f"the header must be {PATH_COLUMN},{CLASSES_COLUMN}, or {PATH_COLUMN} and a name for each number"
    if header[0] != PATH_COLUMN or len(header) < 2:
        reader.fail(number, f"{expected}, found {_shown(','.join(header))}", "add or correct it")
    columns = tuple(header[1:])
    if columns == (CLASSES_COLUMN,):
        return "classes", (), _csv_classes(reader, rows)
    _check_columns(reader, number, columns)
    return "numbers", columns, _csv_numbers(reader, rows, len(columns))


def _csv_rows(reader: _Reader, lines: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the fields of each line that is not blank."""
    rows = csv.reader(lines, strict=True)
    while True:
        before = reader.line
        try:
            fields = next(rows, None)
        except csv.Error as error:
            is_open = "unexpected end" in str(error) or reader.line > before + 1
            fault = "a quoted field does not end on its line" if is_open else str(error)
            reader.fail(before + 1, fault, "correct the line")
        if fields is None:
            return
        if reader.line > before + 1:
            reader.fail(before + 1, "a quoted field does not end on its line", "correct the line")
        if fields:
            yield reader.line, fields


def _check_columns(reader: _Reader, line: int, columns: tuple[str, ...]) -> None:
    if "" in columns:
        reader.fail(line, f"column {columns.index('') + 2} of the header has no name", "name it")
    if twice := _repeated(columns):
        reader.fail(line, f"the column {_shown(twice)} occurs twice", "rename one of the two")
    if len(columns) > MAX_CLASSES:
        reader.fail(line, f"there are {len(columns):,} columns, more than the {MAX_CLASSES:,} allowed", "remove some")


def _csv_classes(reader: _Reader, rows: Iterator[tuple[int, list[str]]]) -> Iterator[_Entry]:
    for number, fields in rows:
        if len(fields) != 2:
            reader.fail(
                number,
                f"there are {len(fields)} fields, not a path and its classes",
                f"separate classes by {SEPARATOR}, and quote fields that contain a comma",
            )
        path, text = fields
        yield number, path, [each.strip() for each in text.split(SEPARATOR)] if text.strip() else []


def _csv_numbers(reader: _Reader, rows: Iterator[tuple[int, list[str]]], count: int) -> Iterator[_Entry]:
    for number, (path, *texts) in rows:
        if len(texts) != count:
            reader.fail(
                number,
                f"{_numbers(len(texts))} where the header names {count}",
                "give one number for each column, and quote a path that contains a comma",
            )
        yield number, path, [_number(reader, number, text) for text in texts]


def _number(reader: _Reader, line: int, text: str) -> float:
    try:
        return parse_float(text)
    except ValueError:
        reader.fail(line, f"{_shown(text)} is not a number" if text.strip() else "a number is missing", "correct it")


def _read_json(reader: _Reader, lines: Iterator[str]) -> tuple[TargetKind, tuple[str, ...], Iterator[_Entry]]:
    parsed = _json_lines(reader, lines)
    first = next(parsed, None)
    if first is None:
        reader.fail(None, "the file is empty", 'give one line like {"path": "a.jpg", "classes": ["cat"]} per image')
    (first_line, _, values), kind = first
    columns = tuple(map(str, range(len(values)))) if kind == "numbers" else ()
    if kind == "numbers" and not 1 <= len(columns) <= MAX_CLASSES:
        reader.fail(first_line, f"{_numbers(len(columns))}", f"give 1 to {MAX_CLASSES:,}")

    def entries() -> Iterator[_Entry]:
        yield first[0]
        for entry, found in parsed:
            if found != kind:
                reader.fail(
                    entry[0], f"the line has {found}, but line {first_line} has {kind}", "give the same to all images"
                )
            if kind == "numbers" and len(entry[2]) != len(columns):
                fault = f"{_numbers(len(entry[2]))}, but line {first_line} has {len(columns)}"
                reader.fail(entry[0], fault, "give the same count to all images")
            yield entry

    return kind, columns, entries()


def _json_lines(reader: _Reader, lines: Iterator[str]) -> Iterator[tuple[_Entry, TargetKind]]:
    for line in lines:
        if not line.strip():
            continue
        number = reader.line
        try:
            document = json.loads(line, object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            reader.fail(number, f"not valid JSON ({_shown(str(error))})", "write one object per line")
        if not isinstance(document, dict) or document.keys() not in ({"path", "classes"}, {"path", "targets"}):
            found = ", ".join(map(_shown, document)) if isinstance(document, dict) else type(document).__name__
            reader.fail(
                number,
                f"a line must be an object with path and either classes or targets, found {found or 'none'}",
                "correct it",
            )
        path, values = document["path"], document.get("classes", document.get("targets"))
        kind: TargetKind = "classes" if "classes" in document else "numbers"
        if not isinstance(path, str):
            reader.fail(number, f"path must be a string, found {type(path).__name__}", "correct it")
        key, what, types = ("classes", "strings", [str]) if kind == "classes" else ("targets", "numbers", [int, float])
        if not isinstance(values, list) or not all(type(each) in types for each in values):
            reader.fail(number, f"{key} must be a list of {what}, found {_shown(json.dumps(values))}", "correct it")
        yield (number, path, values if kind == "classes" else [_as_float(each) for each in values]), kind


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if twice := _repeated([key for key, _ in pairs]):
        raise ValueError(f"the key {twice} occurs twice")
    return dict(pairs)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a finite number")


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


class _Gathered:
    """The rows of a file, gathered in compact arrays."""

    def __init__(self, reader: _Reader, kind: TargetKind) -> None:
        self._reader, self._kind = reader, kind
        self.rows: dict[str, int] = {}
        self.lines = array("q")
        self._class_numbers: dict[str, int] = {}
        self._classes, self._stops = array("q"), array("q")
        self._numbers = array("f")

    def add(self, line: int, path: str, values: Any) -> None:
        """Add the row of a line."""
        path = path.removeprefix("./")
        if not path:
            self._reader.fail(line, "the path is empty", "give the path of an image")
        row = self.rows.setdefault(path, len(self.lines))
        if row < len(self.lines):
            fault = f"{_shown(path)} was on line {self.lines[row]} already"
            self._reader.fail(line, fault, "give each image one line")
        self.lines.append(line)
        if self._kind == "numbers":
            self._add_numbers(line, values)
        else:
            self._add_classes(line, values)

    def _add_numbers(self, line: int, values: list[float]) -> None:
        for value in values:
            # The largest float32 is below this; larger numbers would become infinite.
            if not abs(value) < 3.4028235677973366e38:
                fault = f"{value!r} is not a finite number" if not math.isfinite(value) else f"{value!r} is too large"
                self._reader.fail(line, fault, "give numbers that fit into float32")
            self._numbers.append(value)

    def _add_classes(self, line: int, names: list[str]) -> None:
        if any(not name.strip() for name in names):
            self._reader.fail(line, "the name of a class is empty", "name it, or give no class at all")
        if twice := _repeated(names):
            self._reader.fail(line, f"the class {_shown(twice)} occurs twice", "give it once")
        for name in names:
            if name not in self._class_numbers and not _is_unicode(name):
                self._reader.fail(line, f"the class {_shown(name)} is not valid Unicode", "rename it")
            self._classes.append(self._class_numbers.setdefault(name, len(self._class_numbers)))
        if len(self._class_numbers) > MAX_CLASSES:
            self._reader.fail(line, f"there are more than {MAX_CLASSES:,} classes", "use fewer classes")
        self._stops.append(len(self._classes))

    def finish(self, columns: tuple[str, ...]) -> tuple[tuple[str, ...], TargetRows]:
        """Return the names of the targets and all rows as they are stored."""
        if not self.rows:
            self._reader.fail(None, "no image has a line", "give one line per image")
        if self._kind == "numbers":
            return columns, np.array(self._numbers, np.float32).reshape(-1, len(columns))
        if not self._class_numbers:
            self._reader.fail(None, "no image has a class", "name the classes of the images")
        names = sorted(self._class_numbers, key=str.encode)
        places = np.empty(len(names), np.int64)
        places[[self._class_numbers[name] for name in names]] = np.arange(len(names))
        classes, stops = places[np.array(self._classes, np.int64)], np.array([0, *self._stops], np.int64)
        step = max(1, _BITS_AT_ONCE // len(names))
        parts = []
        for start in range(0, len(self.rows), step):
            bounds = stops[start : start + step + 1]
            bits = np.zeros((len(bounds) - 1, len(names)), np.bool)
            bits[np.repeat(np.arange(len(bits)), np.diff(bounds)), classes[bounds[0] : bounds[-1]]] = True
            parts.append(pack_bits(bits))
        return tuple(names), np.concatenate(parts)


def _repeated(names: list[str] | tuple[str, ...]) -> str | None:
    """Return a name that occurs twice, or None."""
    if len(set(names)) == len(names):
        return None
    return next(name for name, following in pairwise(sorted(names)) if name == following)


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _numbers(count: int) -> str:
    return f"there {'is 1 number' if count == 1 else f'are {count:,} numbers'}"


def _shown(text: str) -> str:
    return printable(text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…")
