"""Which folders of a source are its splits: the rule for folders and archives alike.

Owns the names of splits, and the refusal of images that would be left out because their folder has another name. Must
not know: file systems, archives.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.sources.listing import SourceError

SPLIT_ORDER = ("train", "val", "test")

# Name of a split folder to name of the split.
SPLIT_FOLDERS = {
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test",
}  # fmt: skip
# The other names may also be those of classes: alone, they denote splits only if all images are in such folders.
_CERTAIN = frozenset({"train", "val", "validation", "test"})

# Only used to detect images outside class folders; inside a class folder every file is tried.
IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".avif", ".jp2", ".j2k"}
)


@dataclass(frozen=True)
class TopFolder:
    """A folder at the top of a source.

    Attributes:
        name: its name.
        has_folders: whether it contains folders.
        find_image: returns the path below the source's root of an image in it, at any depth; None if there is none.
    """

    name: str
    has_folders: bool
    find_image: Callable[[], str | None]


def is_image_name(name: str) -> bool:
    """Return whether a file name has the suffix of an image."""
    return Path(name).suffix.lower() in IMAGE_SUFFIXES


def split_of(name: str) -> str | None:
    """Return the split that a folder of this name contains, or None if the name is not that of a split."""
    return SPLIT_FOLDERS.get(name.lower())


def choose_splits(tops: Iterable[TopFolder], where: str, *, have_classes: bool = True) -> dict[str, str]:
    """Return the name of the folder of each split; empty if the folders at the top are the classes themselves.

    A split folder has the name of a split and contains folders, because a class may also be called "train". Without
    class folders (`have_classes`), any folder with the name of a split is one. A `test` folder of images without class
    folders, as competitions publish it, is left out.

    Args:
        tops: the folders at the top, in any order.
        where: the source, for messages.
        have_classes: whether splits contain class folders.

    Raises:
        SourceError: a split has two folders, or another folder beside that of `train` contains images.
    """
    tops = list(tops)
    named = [each for each in tops if split_of(each.name) and (each.has_folders or not have_classes)]
    others = [each for each in tops if each not in named]
    if not any(each.name.lower() in _CERTAIN for each in named) and any(each.find_image() for each in others):
        return {}
    found: dict[str, str] = {}
    for each in named:
        split = SPLIT_FOLDERS[each.name.lower()]
        if split in found:
            raise SourceError(
                f"{printable(where)} has both {printable(found[split])}/ and {printable(each.name)}/ for the split "
                f"{split}; keep one"
            )
        found[split] = each.name
    for each in others if "train" in found else ():
        if split_of(each.name) != "test" and (image := each.find_image()) is not None:
            raise _left_out(each.name, image, found, where)
    return {split: found[split] for split in SPLIT_ORDER if split in found}


def _left_out(name: str, image: str, found: dict[str, str], where: str) -> SourceError:
    beside = " and ".join(f"{printable(each)}/" for each in found.values())
    split = SPLIT_FOLDERS.get(name.lower())
    if split is not None:
        return SourceError(
            f"{printable(where)} has images outside any class folder in {printable(name)}/ beside {beside}, for "
            f"example {printable(image)}; move each into the folder of its class, or move {printable(name)}/ elsewhere"
        )
    free = " or ".join(f"{each}/" for each in SPLIT_ORDER if each not in found)
    rename = f"rename {printable(name)}/ to {free} if it is that split, or " if free else ""
    return SourceError(
        f"{printable(where)} has images in {printable(name)}/ beside {beside}, for example {printable(image)}, but its "
        f"name is not that of a split; {rename}move it elsewhere"
    )
