"""Reads ImageNet's official archives and plain tar archives of class folders without unpacking them.

Opening an archive reads its headers (512 bytes per image, 1.28 million images in ImageNet's training set). Reading an
image is then one `pread` at a known offset.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from preprocess.printable import printable
from preprocess.shards.classes import MAX_CLASSES
from preprocess.sources.devkit import ARCHIVE as DEVKIT_ARCHIVE
from preprocess.sources.devkit import find_devkit
from preprocess.sources.listing import FoundSplit, Listing, SourceError, index_classes
from preprocess.sources.tarindex import Member, TarFile, members, open_tar
from preprocess.sources.tree import IMAGE_SUFFIXES, SPLIT_FOLDERS, is_hidden

TRAIN_ARCHIVE = "ILSVRC2012_img_train.tar"
VAL_ARCHIVE = "ILSVRC2012_img_val.tar"

# n01440764.tar: WordNet's part of speech and offset.
_CLASS_ARCHIVE = re.compile(r"(?:.*/)?(n\d{8})\.tar")
_VAL_IMAGE = re.compile(r"(?:.*/)?ILSVRC2012_val_(\d{8})\.JPEG")


@dataclass(frozen=True)
class TarStore:
    """An open archive whose members are read by their offsets."""

    tar: TarFile

    def read(self, name: str, offset: int, size: int) -> bytes:  # noqa: ARG002 - the offset is sufficient
        """Return the `size` bytes at `offset`.

        Raises:
            OSError: the archive cannot be read, or was written to after it was opened.
        """
        self.tar.check_unchanged()
        return self.tar.read(offset, size)

    def close(self) -> None:
        """Close the archive."""
        os.close(self.tar.descriptor)


def imagenet_openers(folder: Path) -> dict[str, Callable[[], FoundSplit]]:
    """Return, for each official archive in the folder (if any), a function that lists its images."""
    openers: dict[str, Callable[[], FoundSplit]] = {}
    if (folder / TRAIN_ARCHIVE).is_file():
        openers["train"] = partial(read_train_archive, folder / TRAIN_ARCHIVE)
    if (folder / VAL_ARCHIVE).is_file():
        openers["val"] = partial(read_val_archive, folder / VAL_ARCHIVE)
    return openers


def tar_openers(path: Path) -> tuple[str, dict[str, Callable[[], FoundSplit]]]:
    """Detect the layout of an uncompressed tar archive from its members.

    Returns:
        A description of the layout and, for each split, a function that lists its images.

    Raises:
        SourceError: the archive is empty, damaged or unsafe, or its members are not in class folders.
    """
    store = TarStore(open_tar(path))
    try:
        first = next((each for each in members(store.tar) if not _is_hidden_path(each.name)), None)
        if first is None:
            raise SourceError(f"{printable(path)} is an empty archive; give one with images")
        if _CLASS_ARCHIVE.fullmatch(first.name):
            return "a tar archive with one tar archive per class", {"train": partial(read_train_archive, path)}
        if _VAL_IMAGE.fullmatch(first.name):
            return "ImageNet's validation archive", {"val": partial(read_val_archive, path)}
        folders = _class_folders(path, store.tar)
    finally:
        store.close()
    openers: dict[str, Callable[[], FoundSplit]] = {}
    for top, classes in sorted(folders.items()):
        split = SPLIT_FOLDERS.get(top.lower(), "train")
        if split in openers:
            raise SourceError(
                f"{printable(path)} has two folders for the split {split}, one of them {printable(top)}/; keep one"
            )
        openers[split] = partial(_read_folders, path, split, classes)
    return "a tar archive of class folders", openers


def read_train_archive(path: Path) -> FoundSplit:
    """List the images of a tar archive that contains one tar archive per class, named after the class's WordNet id.

    Readable names are read from the development kit beside it, if there is one.

    Raises:
        SourceError: an archive is damaged, unsafe, or not of this kind.
    """
    devkit = find_devkit(path.parent)
    with _kept_open(path) as store:
        inner_archives = _inner_archives(path, store.tar)
        classes = index_classes(inner_archives, devkit.names if devkit else {}, str(path))
        listing = Listing(classes)
        for label, each in enumerate(classes):
            inner = inner_archives[each.id]
            for member in members(store.tar, inner.offset, inner.offset + inner.size, inside=inner.name):
                if not _is_hidden_path(member.name):
                    listing.add(f"{path.name}!{inner.name}!", member.name, label, member.size, member.offset)
        return FoundSplit("train", classes, listing, store)


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
    listing = Listing(classes)
    with _kept_open(path) as store:
        for member in members(store.tar):
            if _is_hidden_path(member.name):
                continue
            match = _VAL_IMAGE.fullmatch(member.name)
            number = int(match[1]) if match else 0
            if not 1 <= number <= len(devkit.validation_ids):
                raise SourceError(
                    f"{printable(path)} contains {printable(member.name)}, for which {DEVKIT_ARCHIVE} has no label; "
                    f"use the archive with the images 1 to {len(devkit.validation_ids)}"
                )
            label = label_of[devkit.validation_ids[number - 1]]
            listing.add(f"{path.name}!", member.name, label, member.size, member.offset)
        return FoundSplit("val", classes, listing, store)


@contextmanager
def _kept_open(path: Path) -> Iterator[TarStore]:
    """Open an archive for listing. It stays open unless the body of the `with` statement raises an exception."""
    store = TarStore(open_tar(path))
    try:
        yield store
    except BaseException:
        store.close()
        raise


def _is_hidden_path(name: str) -> bool:
    return any(is_hidden(part) for part in name.split("/"))


def _inner_archives(path: Path, tar: TarFile) -> dict[str, Member]:
    found: dict[str, Member] = {}
    for member in members(tar):
        if _is_hidden_path(member.name):
            continue
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


def _class_folders(path: Path, tar: TarFile) -> dict[str, dict[str, Listing]]:
    """Return the members by split folder ("" if there is none) and class, all with the placeholder label 0.

    A single folder that encloses everything ("imagenette2/train/…") is skipped.
    """
    everything = Listing()
    for member in members(tar):
        if not _is_hidden_path(member.name):
            everything.add("", member.name, 0, member.size, member.offset)
    depth = _wrapping_depth(everything)
    tops: dict[str, dict[str, Listing]] = {}
    for entry in range(len(everything)):
        name = everything.name(entry)
        parts = name.split("/")[depth:]
        top = parts.pop(0) if len(parts) > 2 and parts[0].lower() in SPLIT_FOLDERS else ""
        if len(parts) > 1:
            classes = tops.setdefault(top, {})
            if len(classes) == MAX_CLASSES and parts[0] not in classes:
                raise SourceError(f"{printable(path)} has more than {MAX_CLASSES} classes; use fewer classes")
            listing = classes.setdefault(parts[0], Listing())
            below = "/".join(parts[1:])
            folder = f"{path.name}!{name.removesuffix(below)}"
            listing.add(folder, below, 0, everything.size(entry), everything.offset(entry))
        elif Path(name).suffix.lower() in IMAGE_SUFFIXES:
            raise SourceError(
                f"{printable(path)} contains the image {printable(name)} outside any class folder; "
                "move it into the folder of its class"
            )
    if not tops:
        raise SourceError(
            f"{printable(path)} contains no class folders (its first file is {printable(everything.name(0))}); "
            "put each image into the folder of its class"
        )
    if "" in tops and len(tops) > 1:
        raise SourceError(
            f"{printable(path)} contains split folders beside the class folder {printable(next(iter(tops[''])))}; "
            "use either split folders or class folders at the top level"
        )
    return tops


def _wrapping_depth(everything: Listing) -> int:
    for depth in range(8):
        tops = {parts[depth] if len(parts) > depth + 2 else "" for parts in _parts(everything)}
        if len(tops) != 1 or "" in tops or tops.pop().lower() in SPLIT_FOLDERS:
            return depth
    return 8


def _parts(listing: Listing) -> Iterator[list[str]]:
    return (listing.name(entry).split("/") for entry in range(len(listing)))


def _read_folders(path: Path, split: str, members_of: dict[str, Listing]) -> FoundSplit:
    classes = index_classes(members_of, {}, str(path))
    listing = Listing(classes)
    for label, each in enumerate(classes):
        found = members_of[each.id]
        for entry in range(len(found)):
            member = found.member(entry)
            listing.add(found.name(entry).removesuffix(member), member, label, found.size(entry), found.offset(entry))
    return FoundSplit(split, classes, listing, TarStore(open_tar(path)))
