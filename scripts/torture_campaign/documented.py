"""The one list of faults that commands need not notice, each with its reason; the table counts them by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

type Tree = Mapping[str, bytes]


@dataclass(frozen=True)
class Exemption:
    """A fault that a command may leave unnoticed.

    Attributes:
        name: of the exemption.
        reason: why it is one.
    """

    name: str
    reason: str


PIXELS_WITHOUT_CHECKSUM = Exemption(
    "pixels without checksums",
    "a pack made with --no-checksum has nothing to tell changed pixels by while reading; inspect-shards --verify does",
)
BITS_OF_NO_PIXEL = Exemption(
    "bits of no pixel",
    "of a compressed image without a checksum inspect-shards --verify compares the pixels, and says so; some bits of "
    "the compressed bytes change none",
)
SPLIT_GONE = Exemption(
    "a split that is gone",
    "a split whose folder is gone, empty or somebody else's is none: a pack is the splits that lie in it",
)
SPLIT_RENAMED = Exemption(
    "a split under another name",
    "the name of its folder says which split it is: renamed, it is a sound split of the other name",
)
EXEMPTIONS = (PIXELS_WITHOUT_CHECKSUM, BITS_OF_NO_PIXEL, SPLIT_GONE, SPLIT_RENAMED)


def exempt_reading(tree: Tree, sound: Tree, *, has_checksums: bool) -> Exemption | None:
    """Return the exemption of a reader that was given other pixels or labels than those of the sound pack, or None.

    Args:
        tree: the bytes of each file of the pack that was read.
        sound: the same of the sound pack.
        has_checksums: of its images.
    """
    if are_renamed(tree, sound):
        return SPLIT_RENAMED
    changed = [key for key in {*tree, *sound} if tree.get(key) != sound.get(key)]
    if not has_checksums and all("/pixels/c/" in key for key in changed):
        return PIXELS_WITHOUT_CHECKSUM
    return None


def exempt_verifying(tree: Tree, sound: Tree) -> Exemption | None:
    """Return the exemption of a pack that was found intact and is not as it was packed, or None."""
    if are_renamed(tree, sound):
        return SPLIT_RENAMED
    splits = {key.split("/")[0] for key in sound}
    gone = {split for split in splits if not any(_is_of(key, split) for key in tree)}
    kept = {key for key in {*tree, *sound} if key.split("/")[0] in splits - gone}
    if gone and all(tree.get(key) == sound.get(key) for key in kept):
        return SPLIT_GONE
    return None


def are_renamed(tree: Tree, sound: Tree) -> bool:
    """Return whether the splits of a pack lie under each other's names, and are whole."""
    names = sorted({key.split("/")[0] for key in sound})
    renamed = {f"{names[1 - names.index(head)]}/{rest}": sound[f"{head}/{rest}"] for head, rest in map(_halves, sound)}
    return tree != sound and dict(tree) == renamed


def _halves(key: str) -> tuple[str, str]:
    head, _, rest = key.partition("/")
    return head, rest


def _is_of(key: str, split: str) -> bool:
    """Whether a file is one that a split has."""
    return key.startswith(
        tuple(f"{split}/{name}" for name in ("manifest", "failures", "pixels", "labels", "checksums"))
    )
