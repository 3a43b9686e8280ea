"""Selects and orders images by the hashes of their keys, with the same result on every machine.

A key is the class id and the path below the class (see `loopfeed.preprocess.sources.listing`), without the source path.

The hashes are BLAKE2b with a different hash key for each purpose, so the order is independent of which images are held
out.

Which folders of a source are its splits follows one rule for folders and archives alike. Owns the names of splits, and
the refusal of images that would be left out because their folder has another name.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.sources.listing import Listing, SourceError

HOLDOUT_RULE = 2
"""The rule by which `held_out` chooses images for a new pack; see there. A pack records its rule."""

_ORDER_KEY = b"feedloop order"
_HOLDOUT_KEY = b"feedloop holdout"


def key_hashes(listing: Listing, purpose: bytes) -> np.ndarray:
    """Return a hash of each image's key as uint64 `[N]`; different purposes give different hashes."""
    digests = (hashlib.blake2b(listing.key_bytes(i), digest_size=8, key=purpose).digest() for i in range(len(listing)))
    return np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)


def held_out(
    listing: Listing, fraction: float, *, rule: int = HOLDOUT_RULE, groups: NDArray[np.uint32] | None = None
) -> np.ndarray:
    """Return a bool mask `[N]` of the images to hold out for the validation split.

    Under rule 2, each class loses `fraction` of its images, rounded to a whole number: at least one image, and never
    its last one. They are those whose keys have the smallest hashes in the class, so adding or removing images of a
    class can move only a few others of that class, and a larger fraction holds out the same images and more.

    Rule 1 is that of earlier packs: an image is held out if the hash of its key is in the first `fraction` of all
    hashes, unless it has the largest hash of its class. A class loses `fraction` of its images only on average, and a
    small class may lose none.

    With groups (uint32 `[N]`, one per image), a group is held out as a whole or not at all. Under rule 2, groups take
    turns in the order of the hashes of their first keys: first those that hold out of no class more than the count
    above, then those that bring the counts nearer. No group is held out that has all images that are left of a class.

    Raises:
        SourceError: the rule is unknown, or knows no groups.
    """
    if rule not in range(1, HOLDOUT_RULE + 1):
        raise SourceError(f"the hold-out rule must be 1 to {HOLDOUT_RULE}, got {rule}; install a newer loopfeed")
    if rule == 1 and groups is not None:
        raise SourceError(
            "this pack was begun without groups; leave --group-by out, or use another DEST or --overwrite"
        )
    hashes = key_hashes(listing, _HOLDOUT_KEY)
    labels = listing.labels
    by_class = np.lexsort((hashes, labels))
    if rule == 1:
        taken = hashes < np.uint64(round(fraction * 2**64))
        last_of_class = np.flatnonzero(np.diff(labels[by_class], append=-1))
        taken[by_class[last_of_class]] = False
        return taken
    counts = np.bincount(labels)
    num_taken = np.minimum(np.maximum(np.floor(fraction * counts + 0.5).astype(np.int64), 1), counts - 1)
    if groups is not None:
        return np.isin(groups, _held_out_groups(labels, groups, _in_turn(listing, groups, hashes), num_taken))
    ranks = np.arange(len(labels)) - (np.cumsum(counts) - counts)[labels[by_class]]
    taken = np.zeros(len(labels), bool)
    taken[by_class] = ranks < num_taken[labels[by_class]]
    return taken


def _in_turn(listing: Listing, groups: NDArray[np.uint32], hashes: np.ndarray) -> list[int]:
    """Return the groups in the order of the hash of the first of the sorted keys of each.

    The smallest hash would put large groups first, and hold out fewer groups than is typical.
    """
    first: dict[int, tuple[bytes, int]] = {}
    for index, group in enumerate(groups.tolist()):
        entry = listing.key_bytes(index), index
        first[group] = min(first.get(group, entry), entry)
    return sorted(first, key=lambda group: (hashes[first[group][1]], first[group]))


def _held_out_groups(
    labels: np.ndarray, groups: NDArray[np.uint32], in_turn: list[int], num_wanted: np.ndarray
) -> list[int]:
    """Return the groups to hold out, so that class c loses about `num_wanted[c]` images."""
    counts = np.bincount(labels)
    sizes: dict[int, list[tuple[int, int]]] = {}  # of each group: its classes, and how many images of each
    pairs, numbers = np.unique(np.stack([groups, labels], axis=1), axis=0, return_counts=True)
    for (group, label), number in zip(pairs.tolist(), numbers.tolist(), strict=True):
        sizes.setdefault(group, []).append((label, number))
    wanted, left = num_wanted.tolist(), counts.tolist()
    taken: dict[int, None] = {}

    def distance(group: int) -> int:
        """Return by how much less the counts are missed if a group is held out too."""
        return sum(abs(wanted[label]) - abs(wanted[label] - number) for label, number in sizes[group])

    def take(group: int) -> None:
        taken[group] = None
        for label, number in sizes[group]:
            wanted[label] -= number
            left[label] -= number

    for fits in (
        lambda group: all(number <= wanted[label] for label, number in sizes[group]),
        lambda group: distance(group) > 0,
    ):
        for group in in_turn:
            if group not in taken and fits(group) and all(number < left[label] for label, number in sizes[group]):
                take(group)
    if not taken:
        # Every group has more images than are wanted: the nearest is better than none.
        free = [group for group in in_turn if all(number < left[label] for label, number in sizes[group])]
        taken = dict.fromkeys([max(free, key=distance)] if free else [])
    return list(taken)


def pack_order(listing: Listing, entries: np.ndarray, limit: int | None = None) -> np.ndarray:
    """Return the entries (int64 indices into the listing) in pack order.

    Entries are sorted by the hashes of their keys, and by the keys themselves if hashes are equal, so that every shard
    has a mixture of classes for any source layout. With a limit, classes contribute one image each in turn until
    `limit` are chosen, so the class counts differ by at most one unless a class runs out.

    Raises:
        SourceError: two entries have the same key, which is possible in an archive.
    """
    hashes = key_hashes(listing, _ORDER_KEY)[entries]
    order = np.lexsort((_key_ranks(listing, entries, hashes), hashes))
    entries, hashes = entries[order], hashes[order]
    if limit is None or limit >= len(entries):
        return entries
    turns = _turns(listing.labels[entries])
    chosen = np.sort(np.argsort(turns, kind="stable")[:limit])
    return entries[chosen]


def _key_ranks(listing: Listing, entries: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """Return each entry's rank by key among the entries with non-unique hashes, and 0 for the rest.

    Equal hashes are rare with 64 bits.
    """
    ranks = np.zeros(len(entries), np.int64)
    _, inverse, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    tied = [(listing.key_bytes(int(entries[place])), place) for place in np.flatnonzero(counts[inverse] > 1).tolist()]
    tied.sort()
    for (key, place), (following, _) in pairwise(tied):
        if key == following:
            raise SourceError(
                f"{printable(listing.name(int(entries[place])))} exists twice; "
                "write the archive again without the duplicate"
            )
    for rank, (_, place) in enumerate(tied):
        ranks[place] = rank
    return ranks


def _turns(labels: np.ndarray) -> np.ndarray:
    """Return, for each image, the number of earlier images of the same class."""
    by_class = np.argsort(labels, kind="stable")
    counts = np.bincount(labels)
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    turns = np.empty(len(labels), np.int64)
    turns[by_class] = np.arange(len(labels)) - np.repeat(starts, counts)
    return turns


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
    {
        ".jpg",
        ".jpeg",
        ".png",
        ".webp",
        ".gif",
        ".bmp",
        ".tif",
        ".tiff",
        ".ppm",
        ".pgm",
        ".avif",
        ".heic",
        ".heif",
        ".hif",
        ".jp2",
        ".j2k",
        ".jxl",
    }
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
    stem, _, suffix = name[name.rfind("/") + 1 :].rpartition(".")
    return stem != "" and f".{suffix.lower()}" in IMAGE_SUFFIXES


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
