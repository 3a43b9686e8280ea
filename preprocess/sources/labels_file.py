"""Reads a table of labels: one class, several classes, or numbers, for each image of a source.

Owns the rules of its rows, which `data/README.md` states, and their errors, each of which names the file and the line.
Does not know the images.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopfeed.preprocess.printable import composed, is_unicode, printable
from loopfeed.preprocess.quantities import number_remedy, parse_float, quantity
from loopfeed.preprocess.shards.classes import MAX_CLASSES, MAX_ID_CHARACTERS
from loopfeed.preprocess.shards.targets import TargetKind, TargetRows, pack_bits
from loopfeed.preprocess.sources.label_columns import (
    SEPARATOR,
    Columns,
    LabelOptions,
    choose_columns,
    describe_columns,
    describe_doubts,
    propose_class_column,
)
from loopfeed.preprocess.sources.selection import SPLIT_FOLDERS, SPLIT_ORDER
from loopfeed.preprocess.sources.table_file import OPEN_QUOTE, Cells, TableFile, open_table, repeated, shown
from loopfeed.preprocess.suggestions import describe_forms

NO_CLASS = -1
"""The class of a row that has none, which leaves its image out."""

_NO_OPTIONS = LabelOptions()
_BITS_AT_ONCE = 1 << 24
# The largest float32 is below this; larger numbers would become infinite.
_BEYOND_FLOAT32 = 3.4028235677973366e38
# What spreadsheets show for a formula that failed.
_FAILED_FORMULAS = frozenset({"#n/a", "#ref!", "#name?", "#value!", "#div/0!", "#null!", "#num!"})


@dataclass(frozen=True, eq=False)
class LabelTable:
    """The contents of a table of labels.

    Attributes:
        file: the file.
        digest: SHA-256 of its bytes, hexadecimal.
        kind: whether it has classes or numbers; None if each image has one class.
        names: the K classes, sorted by their bytes, or the K columns in their order.
        paths: the path or id of each row, as it is written.
        lines: int64 ``[n]``, the number of the line of each row, from 1.
        values: the rows as they are stored, uint32 ``[n, words]`` of bits or float32 ``[n, K]``; or, of one class each,
            its number among ``names``, int64 ``[n]``, `NO_CLASS` without one.
        splits: int64 ``[n]``, the number of the split of each row in `SPLIT_ORDER`; None if the table has no splits.
        groups: uint32 ``[n]``, the number of each row's group among their sorted names; None without groups.
        group_names: these names.
        weights: float32 ``[n]``, how often an image is drawn; None without weights.
        unlabelled: whether images without a label are an error, or left out (``skip``).
        notes: what the columns mean, and what else is remarkable, each in a line.
    """

    file: Path
    digest: str
    kind: TargetKind | None
    names: tuple[str, ...]
    paths: list[str]
    lines: NDArray[np.int64]
    values: TargetRows | NDArray[np.int64]
    splits: NDArray[np.int64] | None
    groups: NDArray[np.uint32] | None
    group_names: tuple[str, ...]
    weights: NDArray[np.float32] | None
    unlabelled: str
    notes: tuple[str, ...]

    def where(self, row: int) -> str:
        """Return the file and the line of a row, for messages."""
        return f"{printable(self.file)}, line {self.lines[row]}"

    def differing(self, row: int, other: int) -> str | None:
        """Return in what two rows for the same image differ, or None if one of them is enough."""
        if self.kind is not None:
            return "labels"
        columns = {"classes": self.values, "splits": self.splits, "groups": self.groups, "weights": self.weights}
        return next((name for name, each in columns.items() if each is not None and each[row] != each[other]), None)


def read_labels(path: str | Path, options: LabelOptions = _NO_OPTIONS) -> LabelTable:
    """Read a table of labels.

    Args:
        path: a file that ends with one of `table_file.SUFFIXES`.
        options: which columns to use.

    Raises:
        SourceError: the file cannot be read or breaks a rule; the message names the line.
    """
    table = open_table(path)
    columns = choose_columns(table, options)
    gathered = _Rows(table, columns, options)
    try:
        for line, cells in table.cells:
            gathered.add(line, cells)
    except RecursionError:
        table.fail(table.line, "its values are nested too deeply", "give a flat object")
    return gathered.finish()


class _Rows:
    """The rows of a table, gathered in compact arrays."""

    def __init__(self, table: TableFile, columns: Columns, options: LabelOptions) -> None:
        self._table, self._columns, self._options = table, columns, options
        self._rows: dict[str | tuple[str, int], int] = {}
        self._paths: list[str] = []
        self._lines, self._splits, self._weights, self._values = array("q"), array("q"), array("f"), array("q")
        self._groups, self._classes = _Names(), _Names()
        self._stops, self._numbers, self._num_numbers = array("q"), array("f"), len(columns.values)
        self._num_repeated = 0
        self._composed: dict[str, str] = {}
        self._add_values: Callable[[int, Cells], None] = {
            None: self._add_class,
            "classes": self._add_classes,
            "numbers": self._add_numbers,
        }[columns.kind]

    def add(self, line: int, cells: Cells) -> None:
        """Add the row of a line."""
        columns, table = self._columns, self._table
        path = self._text(line, cells, columns.path, "path").removeprefix("./")
        if not path.strip():
            table.fail(line, "the path is empty", "give the path of an image")
        split = -1 if columns.split is None else self._split(line, cells, columns.split)
        self._add_values(line, cells)
        if columns.group is not None:
            self._groups.add(self._name(line, cells, columns.group))
        if columns.weight is not None:
            self._weights.append(self._weight(line, cells, columns.weight))
        self._splits.append(split)
        self._lines.append(line)
        self._paths.append(path)
        key = path if split < 0 else (path, split)
        before = self._rows.setdefault(key, len(self._paths) - 1)
        if before < len(self._paths) - 1:
            self._repeat(line, before)

    def _repeat(self, line: int, before: int) -> None:
        """Take back the last row if it says the same as another one about its image."""
        path = self._paths.pop()
        columns: list[array[Any]] = [self._lines, self._splits]
        fault = f"{shown(path)} was on line {self._lines[before]} already"
        if self._columns.kind is not None:
            self._table.fail(line, fault, "give each image one line")
        named: tuple[tuple[str, array[Any]], ...]
        named = ("class", self._values), ("group", self._groups.numbers), ("weight", self._weights)
        for name, values in named:
            if values and values[before] != values[-1]:
                self._table.fail(line, f"{fault}, with another {name}", "give each image one line")
            columns += [values] if values else []
        for each in columns:
            each.pop()
        self._num_repeated += 1

    def _text(self, line: int, cells: Cells, place: int, what: str) -> str:
        """Return a cell as text; "" for an empty one. A whole number of JSON lines is text in decimal form."""
        value = cells[place]
        if type(value) is str and "\n" not in value:
            return value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if value is None:
            return ""
        if not isinstance(value, str):
            self._table.fail(line, f"{what} must be text, found {shown(json.dumps(value))}", "correct it")
        if "\n" in value and not self._table.is_json:
            self._table.fail(line, OPEN_QUOTE, "correct the line")
        return value

    def _name(self, line: int, cells: Cells, place: int) -> str:
        """Return the class or group in a cell."""
        column = shown(self._table.columns[place])
        name = self._text(line, cells, place, column).strip()
        if not name or name.lower() == "nan":
            self._table.fail(line, f"{column} is {name or 'empty'}", "fill it in, or remove the line")
        self._check_name(line, name, column)
        return name

    def _check_name(self, line: int, name: str, column: str) -> None:
        if name.startswith("=") or name.lower() in _FAILED_FORMULAS:
            self._table.fail(
                line, f"{shown(name)} in column {column} is a formula or its error", "write the value itself"
            )
        self._check_unicode(line, name)

    def _check_class(self, line: int, name: str, column: str) -> None:
        self._check_name(line, name, column)
        other = self._composed.setdefault(composed(name), name)
        if other != name:
            fault = f"the class {shown(name)} is on an earlier line in another Unicode form"
            self._table.fail(line, f"{fault} ({describe_forms(name, other)})", "write it in one form")

    def _check_unicode(self, line: int, name: str) -> None:
        if len(name) > MAX_ID_CHARACTERS:
            fault = f"{shown(name)} has {len(name):,} characters, more than the {MAX_ID_CHARACTERS:,} allowed"
            self._table.fail(line, fault, "shorten it")
        if not is_unicode(name):
            self._table.fail(line, f"the class {shown(name)} is not valid Unicode", "rename it")

    def _split(self, line: int, cells: Cells, place: int) -> int:
        name = self._text(line, cells, place, "split").strip()
        split = SPLIT_FOLDERS.get(name.lower())
        if split is None:
            self._table.fail(line, f"the split is {shown(name) or 'empty'}", f"name {', '.join(SPLIT_FOLDERS)}")
        return SPLIT_ORDER.index(split)

    def _weight(self, line: int, cells: Cells, place: int) -> float:
        weight = self._number(line, cells, place)
        if weight < 0:
            self._table.fail(line, f"the weight {weight!r} is negative", "give 0 or more")
        return weight

    def _add_class(self, line: int, cells: Cells) -> None:
        (place,) = self._columns.values
        column = shown(self._table.columns[place])
        name = self._text(line, cells, place, column).strip()
        if not name or name.lower() == "nan":  # as pandas writes a missing value
            if self._options.unlabelled == "fail":
                remedy = "name the class, or leave such images out with --unlabelled skip"
                self._table.fail(line, f"the class in column {column} is {name or 'empty'}", remedy)
            self._values.append(NO_CLASS)
            return
        self._values.append(self._number_of_class(line, name, partial(self._check_class, column=column)))

    def _add_classes(self, line: int, cells: Cells) -> None:
        value = cells[self._columns.values[0]]
        if self._table.is_json:
            if not isinstance(value, list) or not all(type(each) is str for each in value):
                self._fail_list(line, "classes", "strings", value)
            names = value
        else:
            text = self._text(line, cells, self._columns.values[0], "classes")
            names = [each.strip() for each in text.split(SEPARATOR)] if text.strip() else []
        if not all(map(str.strip, names)):
            self._table.fail(line, "the name of a class is empty", "name it, or give no class at all")
        if twice := repeated(names):
            self._table.fail(line, f"the class {shown(twice)} occurs twice", "give it once")
        self._values.extend([self._number_of_class(line, name, self._check_unicode) for name in names])
        self._stops.append(len(self._values))

    def _number_of_class(self, line: int, name: str, check: Callable[[int, str], None]) -> int:
        number = self._classes.found(name)
        if number is None:
            check(line, name)
            number = self._classes.number(name)
        if number >= MAX_CLASSES:
            self._table.fail(line, f"there are more than {MAX_CLASSES:,} classes", "use fewer classes")
        return number

    def _add_numbers(self, line: int, cells: Cells) -> None:
        places = self._columns.values
        if not self._columns.is_list:
            self._numbers.extend([self._number(line, cells, place) for place in places])
            return
        values = cells[places[0]]
        if not isinstance(values, list) or not all(type(each) in (int, float) for each in values):
            self._fail_list(line, "targets", "numbers", values)
        if not self._lines:
            self._num_numbers = len(values)
            if not 1 <= len(values) <= MAX_CLASSES:
                self._table.fail(line, f"there are {len(values):,} numbers", f"give 1 to {MAX_CLASSES:,}")
        if len(values) != self._num_numbers:
            fault = f"there {'is' if len(values) == 1 else 'are'} {quantity(len(values), 'number')}, but line "
            self._table.fail(
                line, f"{fault}{self._lines[0]} has {self._num_numbers:,}", "give the same count to all images"
            )
        self._numbers.extend([self._number(line, {places[0]: value}, places[0]) for value in values])

    def _fail_list(self, line: int, key: str, what: str, value: Any) -> None:
        found = "nothing" if value is None else shown(json.dumps(value))
        self._table.fail(line, f"{key} must be a list of {what}, found {found}", "correct it")

    def _number(self, line: int, cells: Cells | dict[int, Any], place: int) -> float:
        """Return the number in a cell, which fits into float32."""
        value = cells[place]
        try:
            if self._table.is_json and type(value) not in (int, float):
                raise ValueError("not a number")
            number = parse_float(value) if isinstance(value, str) else float(value)
        except OverflowError:
            number = math.inf
        except ValueError:
            column = shown(self._table.columns[place])
            text = value if isinstance(value, str) else "" if value is None else json.dumps(value)
            if not text.strip():
                self._table.fail(line, f"a number is missing in column {column}", "fill it in")
            is_first = not self._lines and place in self._columns.values and not self._columns.is_list
            hint = propose_class_column(self._table, self._columns.values, cells) if is_first else ""
            remedy = number_remedy(text, f"correct it{hint}")
            self._table.fail(line, f"{shown(text)} in column {column} is not a number", remedy)
        if not abs(number) < _BEYOND_FLOAT32:
            fault = f"{number!r} is not a finite number" if not math.isfinite(number) else f"{number!r} is too large"
            self._table.fail(line, fault, "give numbers that fit into float32")
        return number

    def finish(self) -> LabelTable:
        """Return the table with all its rows."""
        table, columns = self._table, self._columns
        if not self._paths:
            table.fail(None, "no image has a line", "give one line per image")
        names = tuple(map(str, range(self._num_numbers))) if columns.is_list else ()
        names = names or tuple(table.columns[place] for place in columns.values)
        values: TargetRows | NDArray[np.int64] = np.array(self._numbers, np.float32).reshape(-1, len(names))
        if columns.kind != "numbers":
            names, places = self._classes.in_order()
            if not names:
                table.fail(None, "no image has a class", "name the classes of the images")
            numbers = np.array(self._values, np.int64)
            values = classes = np.append(places, NO_CLASS)[numbers]
            if columns.kind == "classes":
                values = _bits(classes, np.array([0, *self._stops], np.int64), len(names))
        weights = None if columns.weight is None else np.array(self._weights, np.float32)
        if weights is not None and not weights.any():
            table.fail(None, f"all weights in column {shown(table.columns[columns.weight or 0])} are 0", "raise one")
        group_names, group_places = self._groups.in_order()
        notes = [describe_columns(table, columns)]
        if columns.kind is None:
            notes += describe_doubts(shown(table.columns[columns.values[0]]), names)
        if self._num_repeated:
            notes.append(f"{shown(table.file.name)}: {quantity(self._num_repeated, 'repeated line')} left out")
        return LabelTable(
            table.file,
            table.digest,
            columns.kind,
            names,
            self._paths,
            np.array(self._lines, np.int64),
            values,
            None if columns.split is None else np.array(self._splits, np.int64),
            None if columns.group is None else group_places[np.array(self._groups.numbers)].astype(np.uint32),
            group_names,
            weights,
            self._options.unlabelled,
            tuple(notes),
        )


class _Names:
    """Names by number, in the order in which they were first found."""

    def __init__(self) -> None:
        self._number_of: dict[str, int] = {}
        self.numbers = array("q")

    def found(self, name: str) -> int | None:
        """Return the number of a name, or None if it was not found before."""
        return self._number_of.get(name)

    def number(self, name: str) -> int:
        """Return the number of a name, which is new if it was not found before."""
        return self._number_of.setdefault(name, len(self._number_of))

    def add(self, name: str) -> None:
        """Append the number of a name."""
        self.numbers.append(self.number(name))

    def in_order(self) -> tuple[tuple[str, ...], NDArray[np.int64]]:
        """Return the names sorted by their bytes, and the place of each number among them, int64."""
        names = sorted(self._number_of, key=lambda each: each.encode("utf-8", "surrogateescape"))
        places = np.empty(len(names), np.int64)
        places[[self._number_of[name] for name in names]] = np.arange(len(names))
        return tuple(names), places


def _bits(classes: NDArray[np.int64], stops: NDArray[np.int64], num_classes: int) -> NDArray[np.uint32]:
    """Return the rows of bits whose classes are `classes[stops[row] : stops[row + 1]]`."""
    step = max(1, _BITS_AT_ONCE // num_classes)
    parts = []
    for start in range(0, len(stops) - 1, step):
        bounds = stops[start : start + step + 1]
        bits = np.zeros((len(bounds) - 1, num_classes), np.bool)
        bits[np.repeat(np.arange(len(bits)), np.diff(bounds)), classes[bounds[0] : bounds[-1]]] = True
        parts.append(pack_bits(bits))
    return np.concatenate(parts)
