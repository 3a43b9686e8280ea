"""Reads ImageNet's official archives without unpacking them.

Opening an archive reads its headers (512 bytes per image, 1.28 million images in ImageNet's training set). Reading an
image is then one `pread` at a known offset.
"""

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.sources.archives import Archive, kept_open, visible_members, without_hidden
from loopfeed.preprocess.sources.devkit import ARCHIVE as DEVKIT_ARCHIVE
from loopfeed.preprocess.sources.devkit import find_devkit
from loopfeed.preprocess.sources.listing import FoundSplit, Layout, Listing, SourceError, index_classes
from loopfeed.preprocess.sources.tarindex import Member, members

TRAIN_ARCHIVE = "ILSVRC2012_img_train.tar"
VAL_ARCHIVE = "ILSVRC2012_img_val.tar"

# n01440764.tar: WordNet's part of speech and offset.
_CLASS_ARCHIVE = re.compile(r"(?:.*/)?(n\d{8})\.tar")
_VAL_IMAGE = re.compile(r"(?:.*/)?ILSVRC2012_val_(\d{8})\.JPEG")


def imagenet_openers(folder: Path) -> dict[str, Callable[[], FoundSplit]]:
    """Return, for each official archive in the folder (if any), a function that lists its images."""
    openers: dict[str, Callable[[], FoundSplit]] = {}
    if (folder / TRAIN_ARCHIVE).is_file():
        openers["train"] = partial(read_train_archive, folder / TRAIN_ARCHIVE)
    if (folder / VAL_ARCHIVE).is_file():
        openers["val"] = partial(read_val_archive, folder / VAL_ARCHIVE)
    return openers


def imagenet_archive(path: Path, first: str) -> Layout | None:
    """Return the layout of one of ImageNet's archives under another name, by its first member; None if it is none."""
    if _CLASS_ARCHIVE.fullmatch(first):
        return Layout("a tar archive with one tar archive per class", {"train": partial(read_train_archive, path)})
    if _VAL_IMAGE.fullmatch(first):
        return Layout("ImageNet's validation archive", {"val": partial(read_val_archive, path)})
    return None


def read_train_archive(path: Path) -> FoundSplit:
    """List the images of a tar archive that contains one tar archive per class, named after the class's WordNet id.

    Readable names are read from the development kit beside it, if there is one.

    Raises:
        SourceError: an archive is damaged, unsafe, or not of this kind.
    """
    devkit, ignored = find_devkit(path.parent), Counter[str]()
    with kept_open(path) as store:
        inner_archives = _inner_archives(path, store, ignored)
        classes = index_classes(inner_archives, devkit.names if devkit else {}, str(path))
        listing = Listing(classes)
        for label, each in enumerate(classes):
            inner = inner_archives[each.id]
            found = members(store.file, inner.offset, inner.offset + inner.size, inside=inner.name)
            for member in without_hidden(found, ignored):
                listing.add(f"{path.name}!{inner.name}!", member.name, label, member.size, member.offset)
        return FoundSplit("train", classes, listing, store, ignored=ignored)


def read_val_archive(path: Path) -> FoundSplit:
    """List the images of ImageNet's validation archive. Their labels are in the development kit beside it.

    Raises:
        SourceError: the kit is missing or has no label for an image, or the archive is damaged, unsafe or not
            ImageNet's validation archive.
    """
    devkit = find_devkit(path.parent)
    if devkit is None:
        raise SourceError(
            f"{printable(path)} contains no labels; put {DEVKIT_ARCHIVE} beside it, or pack only the train split"
        )
    classes = index_classes(devkit.names, devkit.names, DEVKIT_ARCHIVE)
    label_of = {each.id: label for label, each in enumerate(classes)}
    listing, ignored = Listing(classes), Counter[str]()
    with kept_open(path) as store:
        for member in visible_members(store, ignored):
            match = _VAL_IMAGE.fullmatch(member.name)
            number = int(match[1]) if match else 0
            if not 1 <= number <= len(devkit.validation_ids):
                raise SourceError(
                    f"{printable(path)} contains {printable(member.name)}, for which {DEVKIT_ARCHIVE} has no label; "
                    f"use the archive with the images 1 to {len(devkit.validation_ids)}"
                )
            label = label_of[devkit.validation_ids[number - 1]]
            listing.add(f"{path.name}!", member.name, label, member.size, member.offset)
        return FoundSplit("val", classes, listing, store, ignored=ignored)


def _inner_archives(path: Path, tar: Archive, ignored: Counter[str]) -> dict[str, Member]:
    found: dict[str, Member] = {}
    for member in visible_members(tar, ignored):
        match = _CLASS_ARCHIVE.fullmatch(member.name)
        if match is None:
            raise SourceError(
                f"{printable(path)} contains {printable(member.name)}, "
                "but may contain only class archives such as n01440764.tar; remove that file"
            )
        if match[1] in found:
            raise SourceError(f"{printable(path)} contains two archives of the class {match[1]}; download it again")
        found[match[1]] = member
    return found
