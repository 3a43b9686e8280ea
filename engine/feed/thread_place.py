"""Where a thread stands, for messages about one that does not answer."""

import sys
import sysconfig
import traceback
from typing import NamedTuple

_MOST_SHOWN = 3


class Place(NamedTuple):
    """A line of a function that a thread has entered and not left: file, number of the line, name of the function."""

    file: str
    line: int
    function: str


def places_of(thread: int | None) -> list[Place]:
    """Return where the thread of this identifier stands, the innermost place first; empty if it has ended."""
    frame = None if thread is None else sys._current_frames().get(thread)
    stack = [] if frame is None else traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    return [Place(each.filename, each.lineno or 0, each.name) for each in stack]


def _is_in_library(place: Place) -> bool:
    return place.file.startswith((sysconfig.get_path("stdlib"), "<frozen ")) or "site-packages" in place.file


def describe_places(places: list[Place]) -> str:
    """Return a sentence about the innermost places and, if they are all in libraries, the first that is not."""
    shown = places[:_MOST_SHOWN]
    if all(map(_is_in_library, shown)):
        shown += [each for each in places[_MOST_SHOWN:] if not _is_in_library(each)][:1]
    return "Its thread is at " + ", called from ".join(f"{each.file}:{each.line} ({each.function})" for each in shown)
