"""Finds the image that each row of a table of labels means.

Owns the rule of paths, which `data/README.md` states: a row names the image with that path below the source, or
else the one image whose path ends with it, with or without its suffix.
"""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.sources.labels_file import LabelTable
from loopfeed.preprocess.sources.listing import Listing, SourceError
from loopfeed.preprocess.sources.selection import SPLIT_ORDER, is_image_name
from loopfeed.preprocess.suggestions import describe_forms, is_same_text

NO_ROW = -1
_SEARCHED = 10_000


def match_rows(files: Listing, table: LabelTable, root: Path, folders: dict[str, str]) -> NDArray[np.int64]:
    """Return the row of each file, `NO_ROW` for a file without one, int64 ``[len(files)]``.

    Args:
        files: the files, whose names are their paths below the source.
        table: the rows.
        root: the source.
        folders: the folder of each split, with a slash at its end.

    Raises:
        SourceError: a row has no image, or more than one; or two rows that differ have the same.
    """
    file_of = {files.name(index): index for index in range(len(files))}
    found = np.full(len(table.paths), NO_ROW, np.int64)
    for row, path in enumerate(table.paths):
        index = file_of.get(path)
        if index is None and table.splits is not None:
            index = file_of.get(folders.get(SPLIT_ORDER[table.splits[row]], "") + path)
        found[row] = NO_ROW if index is None else index
    lost = np.flatnonzero(found == NO_ROW).tolist()
    if lost:
        _match_ends(files, table, root, folders, lost, found)
    row_of = np.full(len(files), NO_ROW, np.int64)
    row_of[found[::-1]] = np.arange(len(found))[::-1]  # the first row of those with the same image
    for row in np.flatnonzero(row_of[found] != np.arange(len(found))).tolist():
        first = int(row_of[found[row]])
        if (difference := table.differing(first, row)) is not None:
            raise SourceError(
                f"{table.where(row)}: {printable(files.name(int(found[row])))} was on line {table.lines[first]} "
                f"already, with other {difference}; give each image one line"
            )
    return row_of


def _match_ends(
    files: Listing,
    table: LabelTable,
    root: Path,
    folders: dict[str, str],
    lost: list[int],
    found: NDArray[np.int64],
) -> None:
    """Find the images of rows that are no path below the source, and write their indices into `found`."""
    ends = dict(zip(lost, _plain_paths([table.paths[row] for row in lost], root, table), strict=True))
    indices_of = _files_with_ends(files, set(ends.values()))
    for row, end in ends.items():
        indices = indices_of.get(end, [])
        if len(indices) > 1:
            indices = _preferred(files, indices, folders, None if table.splits is None else table.splits[row])
        if len(indices) > 1:
            one, other = (printable(files.name(each)) for each in indices[:2])
            raise SourceError(
                f"{table.where(row)}: {printable(table.paths[row])} could be {one} or {other}; write more of its path"
            )
        if indices:
            found[row] = indices[0]
    if (found == NO_ROW).any():
        raise _no_image(files, table, root, found)


def _preferred(files: Listing, indices: list[int], folders: dict[str, str], split: int | None) -> list[int]:
    """Return those of the files that a row could mean which are in its split or, if it names none, not in `test/`.

    Competitions number the images of both, and publish no labels of the second.
    """
    folder = folders.get("test" if split is None else SPLIT_ORDER[split])
    if folder is None:
        return indices
    inside = [each for each in indices if files.name(each).startswith(folder) == (split is not None)]
    return inside or indices


def _files_with_ends(files: Listing, ends: set[str]) -> dict[str, list[int]]:
    """Return the files whose path ends with each of some texts or, without any, whose path without suffix does."""
    whole: dict[str, list[int]] = {}
    without_suffix: dict[str, list[int]] = {}
    depths = {end.count("/") + 1 for end in ends}
    deepest = max(depths)
    for index in range(len(files)):
        name = files.name(index)
        stop = name.rindex(".") if is_image_name(name) else 0
        start = len(name) + 1
        for depth in range(1, deepest + 1):
            start = name.rfind("/", 0, start - 1) + 1
            if depth in depths and (end := name[start:]) in ends:
                whole.setdefault(end, []).append(index)
            if depth in depths and stop and (end := name[start:stop]) in ends:
                without_suffix.setdefault(end, []).append(index)
            if start == 0:
                break
    return without_suffix | whole


def _plain_paths(paths: list[str], root: Path, table: LabelTable) -> Iterator[str]:
    """Yield paths as Linux writes them, without blanks around them and without the source before them.

    The source may be written in another way than in the table: with `..`, relative, or through a link.
    """
    beside = table.file.parent
    absolute, real = os.path.abspath(root), os.path.realpath(root)  # noqa: PTH100 - without `..`, but with links
    relative = (os.path.relpath(root, beside), os.path.relpath(real, os.path.realpath(beside)))
    bases = [f"{each}/" for each in dict.fromkeys((str(root.absolute()), absolute, real, *relative))]
    real_folder = cache(os.path.realpath)
    for path in paths:
        plain = path.strip().replace("\\", "/").removeprefix("./")
        base = next((base for base in bases if plain.startswith(base)), "")
        if not base and plain.startswith("/"):
            plain = os.path.normpath(plain)
            if not plain.startswith(f"{absolute}/"):
                folder, _, name = plain.rpartition("/")
                plain = f"{real_folder(folder or '/')}/{name}"
            base = next((base for base in bases if plain.startswith(base)), "")
        yield plain.removeprefix(base)


def _loosely(path: str) -> str:
    """Return the name of a file without its suffix, in small letters."""
    return path.rpartition("/")[2].rpartition(".")[0].casefold()


def _no_image(files: Listing, table: LabelTable, root: Path, found: NDArray[np.int64]) -> SourceError:
    row, with_row = int(np.argmin(found)), set(found.tolist())
    path = table.paths[row]
    base = path.replace("\\", "/").rpartition("/")[2]
    others = (index for index in range(len(files)) if index not in with_row)
    missing = [files.name(index) for index, _ in zip(others, range(_SEARCHED), strict=False)]
    near = next((each for each in missing if is_same_text(each, path)), None)
    near = near or next((each for each in missing if is_same_text(each.rpartition("/")[2], base)), None)
    near = near or next((each for each in missing if _loosely(each) == _loosely(base)), None)
    if near is None and len(files) and with_row == {NO_ROW} and len(found) > 1:
        return SourceError(
            f"{printable(table.file)}: none of its {quantity(len(found), 'line')} names an image of {printable(root)}: "
            f"line {table.lines[row]} has {printable(path)}, and the images are such as {printable(files.name(0))}; "
            "check that the table and the source belong together"
        )
    hint = "correct or remove the line" if near is None else f"did you mean {printable(near)}?"
    if near is not None and (forms := describe_forms(path, near)):
        hint = (
            f"the image has this name in another Unicode form ({forms}): write the paths in the form that the "
            "images' names have, or rename the images"
        )
    more = int((found == NO_ROW).sum()) - 1
    also = f" (and {quantity(more, 'more line')} without an image)" if more else ""
    return SourceError(f"{table.where(row)}: {printable(root)} has no image {printable(path)}{also}; {hint}")
