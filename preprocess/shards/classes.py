"""Describes the classes of a labelled data set, both in a source and in a packed split.

The classes of weights are compared with those of data by their identifiers, never by their number.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from loopfeed.preprocess.printable import composed, printable
from loopfeed.preprocess.quantities import quantity

MAX_ID_CHARACTERS = 1_024
"""The maximum length of the identifier of a class in a table or a container; those of folders are shorter."""
MAX_CLASSES = 0xFFFF  # labels are stored as uint16, whose highest value marks a missing label


@dataclass(frozen=True)
class ImageClass:
    """A class of images.

    Attributes:
        id: its folder name or WordNet id, e.g. ``n01440764``.
        name: its readable name, e.g. ``tench``.
    """

    id: str
    name: str


_MOST_NAMED = 3


def lacking(has: Sequence[ImageClass], lacks: Sequence[ImageClass]) -> str | None:
    """Return the classes of `has` that `lacks` does not contain, such as "2 classes (cat, dog)"; None if none."""
    known = {_identity(each) for each in lacks}
    found = [printable(each.id) for each in has if _identity(each) not in known]
    if not found:
        return None
    more = ", …" if len(found) > _MOST_NAMED else ""
    return f"{quantity(len(found), 'class')} ({', '.join(found[:_MOST_NAMED])}{more})"


def places(of: Sequence[ImageClass], among: Sequence[ImageClass]) -> list[int]:
    """Return where each class is among others.

    Raises:
        KeyError: a class is not there.
    """
    number_of = {_identity(each): number for number, each in enumerate(among)}
    return [number_of[_identity(each)] for each in of]


def have_same_order(one: Sequence[ImageClass], other: Sequence[ImageClass]) -> bool:
    """Return whether two lists have the same identifiers in the same order."""
    return [*map(_identity, one)] == [*map(_identity, other)]


def _identity(of: ImageClass) -> str:
    """Return the identifier in one Unicode form: a Mac names the folder of a class in another than Linux."""
    return composed(of.id)
