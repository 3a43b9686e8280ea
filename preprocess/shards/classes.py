"""The classes of a labelled data set, in sources and packed splits alike."""

from dataclasses import dataclass

MAX_CLASSES = 0xFFFF  # labels are stored as uint16, and the highest number marks one that is missing


@dataclass(frozen=True)
class ImageClass:
    """A class: `id` is its folder name or WordNet id ("n01440764"), `name` what people call it ("tench")."""

    id: str
    name: str
