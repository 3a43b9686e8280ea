"""Reads ImageNet's official archives and plain tar archives of class folders without unpacking them.

Opening an archive reads its headers (512 bytes per image, 1.28 million images in ImageNet's training set). Reading an
image is then one `pread` at a known offset.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import compress, tee
from pathlib import Path

from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.shards.classes import MAX_CLASSES
from loopfeed.preprocess.sources.class_names import (
    MAX_NAME_FILE_BYTES,
    NAME_FILES,
    NameFile,
    name_classes,
    parse_name_file,
)
from loopfeed.preprocess.sources.devkit import ARCHIVE as DEVKIT_ARCHIVE
from loopfeed.preprocess.sources.devkit import find_devkit
from loopfeed.preprocess.sources.listing import FoundSplit, Layout, Listing, SourceError, index_classes
from loopfeed.preprocess.sources.selection import SPLIT_ORDER, TopFolder, choose_splits, is_image_name, split_of
from loopfeed.preprocess.sources.tarindex import Member, TarFile, members, open_tar
from loopfeed.preprocess.system_entries import visible

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


def tar_layout(path: Path) -> Layout:
    """Detect the layout of an uncompressed tar archive from its members.

    Raises:
        SourceError: the archive is empty, damaged or unsafe, or its members are not in class folders.
    """
    store = TarStore(open_tar(path))
    try:
        first = next(visible_members(store.tar), None)
        if first is None:
            raise SourceError(f"{printable(path)} is an empty archive; give one with images")
        if _CLASS_ARCHIVE.fullmatch(first.name):
            return Layout("a tar archive with one tar archive per class", {"train": partial(read_train_archive, path)})
        if _VAL_IMAGE.fullmatch(first.name):
            return Layout("ImageNet's validation archive", {"val": partial(read_val_archive, path)})
        ignored: Counter[str] = Counter()
        tree = _read_tree(path, store.tar, ignored)
    finally:
        store.close()
    openers = {split: partial(_read_folders, path, split, tree, classes) for split, classes in tree.splits.items()}
    unread = f" (not read: {tree.unread})" if tree.unread else ""
    return Layout("a tar archive of class folders" + unread, dict(openers), ignored)


def read_train_archive(path: Path) -> FoundSplit:
    """List the images of a tar archive that contains one tar archive per class, named after the class's WordNet id.

    Readable names are read from the development kit beside it, if there is one.

    Raises:
        SourceError: an archive is damaged, unsafe, or not of this kind.
    """
    devkit, ignored = find_devkit(path.parent), Counter[str]()
    with _kept_open(path) as store:
        inner_archives = _inner_archives(path, store.tar, ignored)
        classes = index_classes(inner_archives, devkit.names if devkit else {}, str(path))
        listing = Listing(classes)
        for label, each in enumerate(classes):
            inner = inner_archives[each.id]
            found = members(store.tar, inner.offset, inner.offset + inner.size, inside=inner.name)
            for member in _visible(found, ignored):
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
    with _kept_open(path) as store:
        for member in visible_members(store.tar, ignored):
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


@contextmanager
def _kept_open(path: Path) -> Iterator[TarStore]:
    """Open an archive for listing. It stays open unless the body of the `with` statement raises an exception."""
    store = TarStore(open_tar(path))
    try:
        yield store
    except BaseException:
        store.close()
        raise


def visible_members(tar: TarFile, ignored: Counter[str] | None = None) -> Iterator[Member]:
    """Yield the files in an archive whose paths have no hidden part; count the others in `ignored`.

    Raises:
        SourceError: as `loopfeed.preprocess.sources.tarindex.members`.
    """
    return _visible(members(tar), Counter() if ignored is None else ignored)


def _visible(found: Iterable[Member], ignored: Counter[str]) -> Iterator[Member]:
    listed, named = tee(found)
    return compress(listed, visible((member.name for member in named), ignored))


def _inner_archives(path: Path, tar: TarFile, ignored: Counter[str]) -> dict[str, Member]:
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


@dataclass(frozen=True)
class _Tree:
    """The members of an archive of class folders.

    Attributes:
        splits: the members of each class of each split, all with the placeholder label 0.
        name_files: the files of class names.
        unread: the folders that are not read, for messages; "" without any.
    """

    splits: dict[str, dict[str, Listing]]
    name_files: tuple[NameFile, ...]
    unread: str


def _read_tree(path: Path, tar: TarFile, ignored: Counter[str]) -> _Tree:
    """Return the members by split and class. A single folder that encloses everything is skipped.

    Raises:
        SourceError: images are outside class folders, or in folders that are neither splits nor classes.
    """
    everything = Listing()
    for member in visible_members(tar, ignored):
        everything.add("", member.name, 0, member.size, member.offset)
    depth = _wrapping_depth(everything)
    tops = _top_folders(everything, depth)
    folders = choose_splits(tops, str(path))
    splits: dict[str, dict[str, Listing]] = {}
    name_files, split_of_top = [], {name: split for split, name in folders.items()}
    for entry in range(len(everything)):
        name = everything.name(entry)
        parts = name.split("/")[depth:]
        if len(parts) > 1 and folders and parts[0] not in split_of_top:
            continue
        split = split_of_top[parts.pop(0)] if len(parts) > 1 and folders else "train"
        if len(parts) > 1:
            _add(path, splits.setdefault(split, {}), parts, everything, entry)
        elif is_image_name(name):
            raise SourceError(
                f"{printable(path)} contains the image {printable(name)} outside any class folder; "
                "move it into the folder of its class"
            )
        elif parts[0] in NAME_FILES and everything.size(entry) <= MAX_NAME_FILE_BYTES:
            content = tar.read(everything.offset(entry), everything.size(entry))
            name_files.append(parse_name_file(content, f"{path}!{name}"))
    if not splits:
        raise SourceError(
            f"{printable(path)} contains no class folders (its first file is {printable(everything.name(0))}); "
            "put each image into the folder of its class"
        )
    unread = sorted(f"{printable(each.name)}/" for each in tops if folders and each.name not in split_of_top)
    return _Tree(
        {split: splits[split] for split in SPLIT_ORDER if split in splits}, tuple(name_files), ", ".join(unread)
    )


def _top_folders(everything: Listing, depth: int) -> list[TopFolder]:
    """Return the folders at the top of an archive."""
    have_folders: dict[str, bool] = {}
    images: dict[str, str] = {}
    for entry in range(len(everything)):
        name = everything.name(entry)
        parts = name.split("/")[depth:]
        if len(parts) > 1:
            have_folders[parts[0]] = have_folders.get(parts[0], False) or len(parts) > 2
            if parts[0] not in images and is_image_name(name):
                images[parts[0]] = name
    return [TopFolder(top, has_folders, partial(images.get, top)) for top, has_folders in have_folders.items()]


def _add(path: Path, classes: dict[str, Listing], parts: list[str], everything: Listing, entry: int) -> None:
    """Add a member, whose path below its split is `parts`, to its class."""
    if len(classes) == MAX_CLASSES and parts[0] not in classes:
        raise SourceError(f"{printable(path)} has more than {MAX_CLASSES} classes; use fewer classes")
    below = "/".join(parts[1:])
    folder = f"{path.name}!{everything.name(entry).removesuffix(below)}"
    listing = classes.setdefault(parts[0], Listing())
    listing.add(folder, below, 0, everything.size(entry), everything.offset(entry))


def _wrapping_depth(everything: Listing) -> int:
    """Return how many folders enclose everything: each is the only one, and has no image beside its folders."""
    for depth in range(8):
        tops, has_folders = set(), False
        for parts in (everything.name(entry).split("/") for entry in range(len(everything))):
            is_loose = len(parts) == depth + 1 or (len(parts) == depth + 2 and is_image_name(parts[-1]))
            tops.add("" if is_loose else parts[depth])
            has_folders = has_folders or len(parts) > depth + 2
        if len(tops) != 1 or "" in tops or not has_folders or split_of(tops.pop()) is not None:
            return depth
    return 8


def _read_folders(path: Path, split: str, tree: _Tree, members_of: dict[str, Listing]) -> FoundSplit:
    named = name_classes(tree.name_files, members_of)
    classes = index_classes(members_of, named.names, str(path))
    listing = Listing(classes)
    for label, each in enumerate(classes):
        found = members_of[each.id]
        for entry in range(len(found)):
            member = found.member(entry)
            listing.add(found.name(entry).removesuffix(member), member, label, found.size(entry), found.offset(entry))
    return FoundSplit(split, classes, listing, TarStore(open_tar(path)), notes=named.notes)
