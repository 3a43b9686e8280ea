"""Names of runs that are shown side by side: short, and different where the runs are."""

import os
from collections.abc import Sequence
from pathlib import PurePath

from loopfeed.preprocess.printable import printable_line

_ELLIPSIS = "~"
_ALIKE = 4  # names that share fewer characters do not begin alike


def distinct_names(runs: Sequence[str]) -> list[str]:
    """Return the shortest ends of the paths or URLs that differ from each other, such as their last parts."""
    parts = [PurePath(os.path.normpath(run) if run.strip("./") else os.path.abspath(run)).parts for run in runs]  # noqa: PTH100
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(set(parts)):
            break
    return [printable_line(name) for name in names]


def shorten_names(names: Sequence[str], width: int) -> list[str]:
    """Shorten names to at most `width` characters: first what they begin with like another name, then their middles."""
    if max(map(len, names)) <= width:
        return list(names)
    shared = [max((_num_shared(name, other) for other in names if other != name), default=0) for name in names]
    cut = []
    for name in names:
        # Of names that begin alike, the same is left out, and no more than needed.
        alike = [index for index, other in enumerate(names) if name[:_ALIKE] == other[:_ALIKE]]
        needed = max(len(names[index]) for index in alike) - (width - 1)
        most = min(shared[index] for index in alike)
        cut.append(next((count for count in range(max(needed, 0), most) if _begins_word(name, count)), most))
    shortened = [name if count < _ALIKE else _ELLIPSIS + name[count:] for name, count in zip(names, cut, strict=True)]
    return [without_middle(name, width) for name in shortened]


def _num_shared(name: str, other: str) -> int:
    """Return how many characters of `name` up to a whole word are those with which `other` begins."""
    pairs = enumerate(zip(name, other, strict=False))
    shared = next((index for index, (a, b) in pairs if a != b), min(len(name), len(other)))
    while shared and (shared == len(name) or not _begins_word(name, shared)):
        shared -= 1
    return shared


def _begins_word(name: str, start: int) -> bool:
    return start > 0 and not name[start - 1].isalnum() and name[start - 1] != "."


def without_middle(name: str, width: int) -> str:
    """Return a text of at most `width` characters: the text itself, or its beginning and end."""
    if len(name) <= width:
        return name
    kept = max(0, width - 1)
    tail = (kept + 1) // 2
    return name[: kept - tail] + _ELLIPSIS + name[len(name) - tail :] if kept else name[:width]
