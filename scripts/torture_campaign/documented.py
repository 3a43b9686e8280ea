"""The list of faults that commands need not detect, each with its reason; the table counts them separately."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

type Tree = Mapping[str, bytes]


@dataclass(frozen=True)
class Exemption:
    """A fault that a command need not detect.

    Attributes:
        name: name of the exemption.
        reason: the reason for it.
    """

    name: str
    reason: str


PIXELS_WITHOUT_CHECKSUM = Exemption(
    "pixels without checksums",
    "without checksums (--no-checksum) a reader cannot detect changed pixels; inspect-shards --verify does",
)
BITS_WITHOUT_EFFECT = Exemption(
    "bits without effect",
    "for compressed images without checksums inspect-shards --verify compares the pixels, and says so; some bits of "
    "the compressed bytes do not affect any pixel",
)
SPLIT_GONE = Exemption(
    "a missing split",
    "a split whose folder is missing, empty or contains other files does not exist: a pack is the splits in its folder",
)
SPLIT_RENAMED = Exemption(
    "a split under another name",
    "the name of a split is the name of its folder: a renamed folder is a sound split with another name",
)
EXEMPTIONS = (PIXELS_WITHOUT_CHECKSUM, BITS_WITHOUT_EFFECT, SPLIT_GONE, SPLIT_RENAMED)


def find_reading_exemption(tree: Tree, sound: Tree, *, has_checksums: bool) -> Exemption | None:
    """Return the exemption for a reader that got other pixels or labels than those of the sound pack, or None.

    Args:
        tree: the bytes of each file of the pack that was read.
        sound: the bytes of each file of the sound pack.
        has_checksums: whether its images have checksums.
    """
    if has_swapped_splits(tree, sound):
        return SPLIT_RENAMED
    changed = [key for key in {*tree, *sound} if tree.get(key) != sound.get(key)]
    if not has_checksums and all("/pixels/c/" in key for key in changed):
        return PIXELS_WITHOUT_CHECKSUM
    return None


def find_verification_exemption(tree: Tree, sound: Tree) -> Exemption | None:
    """Return the exemption for a changed pack that was found intact, or None."""
    if has_swapped_splits(tree, sound):
        return SPLIT_RENAMED
    splits = {key.split("/")[0] for key in sound}
    gone = {split for split in splits if not any(_belongs_to(key, split) for key in tree)}
    kept = {key for key in {*tree, *sound} if key.split("/")[0] in splits - gone}
    if gone and all(tree.get(key) == sound.get(key) for key in kept):
        return SPLIT_GONE
    return None


def has_swapped_splits(tree: Tree, sound: Tree) -> bool:
    """Return whether the splits of a pack are complete but have swapped names."""
    names = sorted({key.split("/")[0] for key in sound})
    renamed = {
        f"{names[1 - names.index(head)]}/{rest}": sound[f"{head}/{rest}"] for head, rest in map(_split_key, sound)
    }
    return tree != sound and dict(tree) == renamed


def _split_key(key: str) -> tuple[str, str]:
    head, _, rest = key.partition("/")
    return head, rest


def _belongs_to(key: str, split: str) -> bool:
    """Return whether a file belongs to a split."""
    return key.startswith(
        tuple(f"{split}/{name}" for name in ("manifest", "failures", "pixels", "labels", "checksums"))
    )
