"""The classes of a labelled data set, used by sources and packed splits."""

from dataclasses import dataclass

MAX_CLASSES = 0xFFFF  # labels are stored as uint16, whose highest value marks a missing label


@dataclass(frozen=True)
class ImageClass:
    """A class of images: `id` is its folder name or WordNet id ("n01440764"), `name` its readable name ("tench")."""

    id: str
    name: str
