"""Describes the classes of a labelled data set, both in a source and in a packed split."""

from dataclasses import dataclass

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
