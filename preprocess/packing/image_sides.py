"""How large the images of a source are, from the headers of a few of them, and which size fits (`--size auto`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from loopfeed.preprocess.decoding.decode import MAX_PIXELS, identify
from loopfeed.preprocess.decoding.default_resize import AUTO, DEFAULT_SIZE, default_resize, fitting_size
from loopfeed.preprocess.decoding.formats import header_size
from loopfeed.preprocess.packing.split_state import existing_plan
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.sources.listing import SourceError
from loopfeed.preprocess.system_errors import error_text

if TYPE_CHECKING:
    from loopfeed.preprocess.packing.plan import PackSettings
    from loopfeed.preprocess.shards.location import Location
    from loopfeed.preprocess.sources.listing import SourceSplit

_NUM_IMAGES = 256
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Sides:
    """The sides of a few images of a source.

    Attributes:
        shorter: the shorter side of each in pixels, in ascending order.
        num_squares: how many of them are squares.
    """

    shorter: tuple[int, ...]
    num_squares: int

    @property
    def are_squares(self) -> bool:
        """Whether all of them are squares of one size."""
        return self.num_squares == len(self.shorter) and self.shorter[0] == self.shorter[-1]

    @property
    def median(self) -> int:
        """The median, the lower one of two."""
        return self.shorter[(len(self.shorter) - 1) // 2]

    def num_below(self, size: int) -> int:
        """Return how many of them are less than `size`."""
        return sum(each < size for each in self.shorter)


def read_sides(splits: Mapping[str, SourceSplit], most: int = _NUM_IMAGES) -> Sides:
    """Return the sides of the first 256 images in the pack order of `train`, or of the first split without it.

    That order is by the hashes of the keys, so they are a sample of all. After 30 s, those that have been read count.
    Faulty images are passed over.

    Args:
        splits: the splits of the source.
        most: how many images are read at most.

    Raises:
        SourceError: none of them can be read; it names the first and its fault.
        ItemError: the code of a data set in Python raised an exception.
    """
    split = splits.get("train") or next(iter(splits.values()))
    sides: list[tuple[int, int]] = []
    fault = ""
    stop = time.monotonic() + _TIMEOUT_S
    for index in range(min(len(split), most)):
        if sides and time.monotonic() > stop:
            break
        try:
            encoded = split.read(index)
            width, height = header_size(encoded, identify(encoded), max_pixels=MAX_PIXELS)
            sides.append((min(width, height), max(width, height)))
        except MemoryError:
            raise
        except _FAULTS as error:
            fault = fault or f"{printable(split.key(index))}: {error_text(error)}"
    if not sides:
        raise SourceError(
            f"the size of no image of {split.name} can be read. The first: {fault}. Correct the images, or give "
            f"--size, such as {DEFAULT_SIZE}"
        )
    return Sides(tuple(sorted(shorter for shorter, _ in sides)), sum(shorter == longer for shorter, longer in sides))


def fit_size(
    settings: PackSettings,
    given: int | str,
    splits: Mapping[str, SourceSplit],
    location: Location,
    *,
    resize: int | None,
    overwrite: bool,
    notify: Callable[[str], None],
) -> PackSettings:
    """Return settings whose size fits the images, or is that of the pack at `location`, if it was given as "auto".

    Args:
        settings: the settings for the given size, or for any size in the place of "auto".
        given: the size that was given.
        splits: the splits to pack.
        location: DEST.
        resize: the length of the shorter side that was given; None takes that of the size.
        overwrite: whether the pack at `location` is replaced.
        notify: called with a line that says which size it is, and why.

    Raises:
        SourceError: as `read_sides`.
    """
    if given != AUTO:
        return settings
    rule = settings.rule
    for name in () if overwrite else splits:
        found = (existing_plan(location.child(name)) or {}).get("resize_rule", {})
        if isinstance(size := found.get("size"), int) and isinstance(found.get("resize"), int):
            notify(f"Size {size} (--size auto), as of the pack in {location.display}.")
            return replace(settings, rule=replace(rule, size=size, resize=resize or found["resize"]))
    sides = read_sides(splits)
    size, fitted = fitting_size(sides.median, resize, are_squares=sides.are_squares)
    num_read, median = quantity(len(sides.shorter), "image"), sides.median
    of = f"the median shorter side of {num_read} is {median} px"
    if sides.are_squares and fitted == median != default_resize(size):
        of = f"{num_read} looked at {'is a square' if len(sides.shorter) == 1 else 'are squares'} of {median} px"
    notify(f"Size {size}, after resizing the shorter side to {fitted} (--size auto): {of}.")
    return replace(settings, rule=replace(rule, size=size, resize=fitted))


# What Pillow's plugins raise for damaged fields, and a source for a file that cannot be read.
_FAULTS = (OSError, ValueError, SyntaxError, TypeError, KeyError, IndexError, EOFError, RuntimeError, ArithmeticError)
