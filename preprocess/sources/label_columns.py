"""Decides by the header of a table of labels which column means what. Knows no rows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.quantities import listed, parse_float
from loopfeed.preprocess.shards.classes import MAX_CLASSES
from loopfeed.preprocess.shards.targets import TargetKind
from loopfeed.preprocess.sources.table_file import Cells, TableFile, repeated, shown
from loopfeed.preprocess.suggestions import did_you_mean

# In each list, the names of the first line that occur count, and one of them may occur.
PATH_NAMES = (
    ("path", "file", "filename", "file_name", "filepath", "file_path", "image", "image_path", "image_name", "img"),
    ("id", "image_id", "imageid", "img_id"),
)
CLASS_NAMES = (("class", "label"), ("class_name", "label_name", "category"), ("class_id", "label_id", "category_id"))
CLASSES_NAME, SPLIT_NAME, TARGETS_NAME = "classes", "split", "targets"

SEPARATOR = "|"
"""Separates the classes of an image in CSV."""

_SHOWN_COLUMNS = 8
_DECIMAL = re.compile(r"[+-]?[0-9]*[.,]0*[1-9][0-9]*")


@dataclass(frozen=True)
class LabelOptions:
    """What a user says about a table of labels.

    Attributes:
        class_column: the column of the class of each image; None finds it by its name.
        group_by: the column of what must not be in two splits, such as a patient or a camera.
        weight_column: the column that says how often an image is drawn.
        unlabelled: whether images without a line, and lines without a class, are an error, or leave the images out.
    """

    class_column: str | None = None
    group_by: str | None = None
    weight_column: str | None = None
    unlabelled: Literal["fail", "skip"] = "fail"


@dataclass(frozen=True)
class Columns:
    """The places of the columns of a table.

    Attributes:
        path: the paths or ids of the images.
        kind: ``classes``, several a row, or ``numbers``; None if each image has one class.
        values: the class, the classes, or the numbers.
        is_list: whether the numbers of a row are one list, as in JSON lines.
        split: the name of the split.
        group: the group of the image.
        weight: how often it is drawn.
        unused: all other columns; none for numbers.
    """

    path: int
    kind: TargetKind | None
    values: tuple[int, ...]
    is_list: bool
    split: int | None
    group: int | None
    weight: int | None
    unused: tuple[int, ...]


def choose_columns(table: TableFile, options: LabelOptions) -> Columns:
    """Return which column of a table means what.

    Raises:
        SourceError: a column is missing, or two could be meant; the message names the columns that there are.
    """
    names = table.columns
    if twice := repeated([each for each in names if each]):
        table.fail(table.line, f"the column {shown(twice)} occurs twice", "rename one of the two")
    asked = {
        option: _find(table, option, name)
        for option, name in (
            ("--class-column", options.class_column),
            ("--group-by", options.group_by),
            ("--weight-column", options.weight_column),
        )
        if name is not None
    }
    path = _find_path(table, set(asked.values()))
    split = _named(names, SPLIT_NAME)
    kind, values, is_list = _find_values(table, asked.get("--class-column"), {path, split, *asked.values()})
    roles = {path, split, *values, *asked.values()}
    return Columns(
        path,
        kind,
        values,
        is_list,
        None if split in values else split,
        asked.get("--group-by"),
        asked.get("--weight-column"),
        tuple(each for each in range(len(names)) if each not in roles),
    )


def describe_columns(table: TableFile, columns: Columns) -> str:
    """Return in a line what a table says about each image, and by which columns."""
    names, count = table.columns, len(columns.values)
    where = f"column {shown(names[columns.values[0]])}"
    if columns.kind == "numbers" and count > 1:
        where = f"columns {_some(names[each] for each in columns.values)}"
    what = {None: "one class per image", "classes": "any number of classes per image", "numbers": "numbers to predict"}
    parts = [f"{what[columns.kind]} from {where}", f"paths from {shown(names[columns.path])}"]
    for meaning, place in (("splits", columns.split), ("groups", columns.group), ("weights", columns.weight)):
        if place is not None:
            parts.append(f"{meaning} from {shown(names[place])}")
    if columns.unused:
        parts.append(f"not used: {_some(names[each] or f'column {each + 1}' for each in columns.unused)}")
    return f"{printable(table.file.name)}: {', '.join(parts)}"


def describe_doubts(column: str, classes: Iterable[str]) -> list[str]:
    """Return a message if classes of a column look like numbers to predict, or like several classes each."""
    notes = []
    for what, is_so, remedy in (
        ("numbers", _DECIMAL.fullmatch, "to predict the numbers, give the column another name"),
        ("lists", lambda each: SEPARATOR in each, f"if images have several classes, name the column {CLASSES_NAME}"),
    ):
        if (example := next(filter(is_so, classes), None)) is not None:
            notes.append(f"warning: {column} has {what} such as {shown(example)}, each of which is a class; {remedy}")
    return notes


def propose_class_column(table: TableFile, places: tuple[int, ...], cells: Cells | dict[int, Any]) -> str:
    """Return what to add to a remedy: which of the columns with text in a row may be the class of the image."""
    names = [table.columns[place] for place in places if _is_text(cells[place])]
    if not names:  # such as a list in JSON
        return ""
    if len(names) > 1:
        return (
            f", or give --class-column with the one of {listed([*map(shown, names)])} that is the class of each image"
        )
    return (
        f", or give --class-column {shlex.quote(shown(names[0]))} if it is the class of each image, and name it "
        f"{CLASSES_NAME} if it has several, separated by {SEPARATOR}"
    )


def _is_text(value: Any) -> bool:
    try:
        parse_float(value if isinstance(value, str) and value.strip() else "0")
    except ValueError:
        return True
    return isinstance(value, bool)


def _find_path(table: TableFile, asked: set[int]) -> int:
    found = _first_of(table.columns, PATH_NAMES, asked)
    if len(found) > 1:
        _refuse_two(table, found, "the paths of the images", "rename all but one of them")
    if not found:
        table.fail(
            table.line,
            f"no column of the header names the images; found {_some(table.columns)}",
            "name the column of their paths path, file, filename, image or id",
        )
    return found[0]


def _find_values(
    table: TableFile, class_column: int | None, taken: set[int | None]
) -> tuple[TargetKind | None, tuple[int, ...], bool]:
    """Return the kind and the places of the labels, and whether a row has all its numbers in one list."""
    names = table.columns
    if class_column is not None:
        return None, (class_column,), False
    free = [place for place in range(len(names)) if place not in taken]
    several = [place for place in free if _folded(names[place]) == CLASSES_NAME]
    one = [place for place in _first_of(names, CLASS_NAMES, set()) if place in free]
    lists = [place for place in free if table.is_json and _folded(names[place]) == TARGETS_NAME]
    if len(several + one + lists) > 1:
        _refuse_two(
            table, several + one + lists, "the labels of the images", "give the one of the class with --class-column"
        )
    if one:
        return None, (one[0],), False
    if several:
        return "classes", (several[0],), False
    if lists:
        return "numbers", (lists[0],), True
    if not free:
        table.fail(
            table.line,
            f"no column has a label; found {_some(names)}",
            "add a column class for one class per image, classes for several, or columns of numbers",
        )
    if "" in (names[place] for place in free):
        table.fail(table.line, f"column {names.index('') + 1} of the header has no name", "name or remove it")
    if len(free) > MAX_CLASSES:
        table.fail(table.line, f"there are {len(free):,} columns, more than the {MAX_CLASSES:,} allowed", "remove some")
    return "numbers", tuple(free), False


def _find(table: TableFile, option: str, name: str) -> int:
    """Return the place of the column that an option names."""
    names = table.columns
    if name in names:
        return names.index(name)
    found = [place for place, each in enumerate(names) if _folded(each) == _folded(name)]
    if len(found) != 1:
        known = [each for each in names if each]
        table.fail(
            table.line,
            f"there is no column {shown(name)}{did_you_mean(name, known)}; found {_some(names)}",
            f"give {option} one of these",
        )
    return found[0]


def _refuse_two(table: TableFile, places: list[int], what: str, remedy: str) -> NoReturn:
    found = listed([shown(table.columns[each]) for each in places])
    table.fail(table.line, f"the columns {found} could all be {what}", remedy)


def _first_of(names: tuple[str, ...], lists: Iterable[tuple[str, ...]], asked: set[int]) -> list[int]:
    """Return the places of the columns that the first list with any of them names."""
    for each in lists:
        if found := [place for place, name in enumerate(names) if _folded(name) in each and place not in asked]:
            return found
    return []


def _named(names: tuple[str, ...], name: str) -> int | None:
    return next((place for place, each in enumerate(names) if _folded(each) == name), None)


def _folded(name: str) -> str:
    return name.strip().casefold().replace(" ", "_").replace("-", "_")


def _some(names: Iterable[str]) -> str:
    given = [shown(each) or '""' for each in names]
    more = f" and {len(given) - _SHOWN_COLUMNS} more" if len(given) > _SHOWN_COLUMNS else ""
    return ", ".join(given[:_SHOWN_COLUMNS]) + more
