"""Lists the images of a folder or an archive whose labels are in a table; class folders play no role.

Owns which files of such a source are images, in which split each is, and the errors of images without a line.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.classes import ImageClass
from loopfeed.preprocess.shards.targets import unpack_bits
from loopfeed.preprocess.sources.archives import open_archive, visible_members
from loopfeed.preprocess.sources.class_names import (
    MAX_NAME_FILE_BYTES,
    NAME_FILES,
    NameFile,
    describe_alike,
    describe_lacking,
    name_classes,
    parse_name_file,
    read_name_files,
)
from loopfeed.preprocess.sources.label_paths import NO_ROW, match_rows
from loopfeed.preprocess.sources.labels_file import NO_CLASS, LabelTable
from loopfeed.preprocess.sources.listing import ByteStore, FoundSplit, Layout, Listing, SourceError, index_classes
from loopfeed.preprocess.sources.selection import SPLIT_ORDER, TopFolder, choose_splits, is_image_name, split_of
from loopfeed.preprocess.sources.tree import FolderStore, files_below, list_folder, split_folders

# The key of an image with several classes or numbers is a slash and its path below its split.
_NO_CLASS = (ImageClass("", ""),)
_MAX_WRAPPING_DEPTH = 8


@dataclass
class _Files:
    """All files of a source that may be images.

    Attributes:
        root: the source.
        description: what the source is, for messages.
        open_store: opens the store of the images.
        place: what stands before a path in the name of an image: the name of the archive, or nothing.
        outer: the folders that enclose everything in an archive, with a slash, or "".
        folders: the folder of each split, with a slash; none if the source has no such folders.
        listing: the files, whose names are their paths below the source.
        name_files: the files of class names.
        ignored: counts the hidden entries that were left out, by name.
    """

    root: Path
    description: str
    open_store: Callable[[], ByteStore]
    place: str = ""
    outer: str = ""
    folders: dict[str, str] = field(default_factory=dict)
    listing: Listing = field(default_factory=Listing)
    name_files: list[NameFile] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)


@dataclass
class _Split:
    """The images of a split, as they are found: their listing, and the row of each."""

    listing: Listing
    rows: array[int] = field(default_factory=lambda: array("q"))


def labelled_layout(root: Path, table: LabelTable) -> Layout:
    """Return the layout of a folder, or a tar or zip archive, of images with a table of their labels.

    Raises:
        SourceError: the archive is damaged or unsafe, a split has two folders, there are images beside those of the
            splits, an image has no line, a line no image, or a group is in two splits.
    """
    files = _list_folder(root, table) if root.is_dir() else _list_archive(root, table)
    row_of = match_rows(files.listing, table, root, files.folders)
    if table.kind is None:
        named = name_classes(files.name_files, table.names, numeric=True)
        classes = index_classes(table.names, named.names, str(table.file), numeric=True)
        notes = (*table.notes, *named.notes, *describe_alike(table.names, printable(table.file.name)))
    else:
        classes, notes = tuple(ImageClass(name, name) for name in table.names), table.notes
    splits, unread, more = _divide(files, table, row_of, classes)
    _check_groups(splits, table)
    in_order = sorted(splits, key=SPLIT_ORDER.index)
    more += describe_lacking({name: _classes_with_images(splits[name], table) for name in in_order}, table.names)
    openers = {}
    for name in in_order:
        rows = np.array(splits[name].rows, np.int64)
        openers[name] = partial(_open_split, files, name, classes, splits[name].listing, rows, table, (*notes, *more))
    return Layout(files.description, dict(openers), files.ignored, unread)


def _open_split(
    files: _Files,
    name: str,
    classes: tuple[ImageClass, ...],
    listing: Listing,
    rows: NDArray[np.int64],
    table: LabelTable,
    notes: tuple[str, ...],
) -> FoundSplit:
    return FoundSplit(
        name,
        classes,
        listing,
        files.open_store(),
        notes=notes,
        rows=rows,
        weights=None if table.weights is None else table.weights[rows],
        groups=None if table.groups is None else table.groups[rows],
    )


def _classes_with_images(split: _Split, table: LabelTable) -> Collection[str]:
    rows = np.array(split.rows, np.int64)
    if table.kind == "numbers" or not len(rows):
        return table.names
    values = table.values[rows]
    if table.kind is None:
        return [table.names[number] for number in np.unique(values)]
    united = np.bitwise_or.reduce(values.astype(np.uint32, copy=False), keepdims=True)
    return [table.names[number] for number in np.flatnonzero(unpack_bits(united, len(table.names)))]


def _divide(
    files: _Files, table: LabelTable, row_of: NDArray[np.int64], classes: tuple[ImageClass, ...]
) -> tuple[dict[str, _Split], str | None, list[str]]:
    """Return the images of each split, what is not read, and notes on what is left out."""
    number_of = {each.id: number for number, each in enumerate(classes)}
    labels = [number_of[name] for name in table.names]
    names = [*files.folders] or ["train"]
    splits = {name: _new_split(table, classes) for name in names if table.splits is None}
    left: list[str] = []
    unlabelled: list[str] = []
    test, is_test_used = files.folders.get("test", "\0"), False
    for index, row in enumerate(row_of.tolist()):
        path = files.listing.name(index)
        if row == NO_ROW:
            (unlabelled if is_image_name(path) else left).append(path)
        elif table.kind is None and table.values[row] == NO_CLASS:
            unlabelled.append(path)
        else:
            is_test_used = is_test_used or path.startswith(test)
            split, folder = _place(files, table, row, path)
            listed = splits.setdefault(split, _new_split(table, classes))
            label = labels[table.values[row]] if table.kind is None else 0
            size, offset = files.listing.size(index), files.listing.offset(index)
            listed.listing.add(files.place + folder, path[len(folder) :], label, size, offset)
            listed.rows.append(row)
    notes = []
    in_test = [] if is_test_used else [path for path in unlabelled if path.startswith(test)]
    if in_test:
        # As competitions publish it; beside class folders, such a folder is left out too.
        unlabelled = [path for path in unlabelled if not path.startswith(test)]
        notes.append(f"{printable(test)} is not read, because none of its {quantity(len(in_test), 'image')} has a line")
        splits.pop("test", None)
    notes += _describe_unlabelled(unlabelled, files, table)
    if unlabelled and any(len(each.listing) for each in splits.values()):
        splits = {name: each for name, each in splits.items() if len(each.listing)}
    if table.kind is None and files.name_files:
        left = [path for path in left if path.rpartition("/")[2] not in NAME_FILES]
    unread = f"{quantity(len(left), 'file')} without a line, such as {printable(left[0])}" if left else None
    return splits, unread, notes


def _describe_unlabelled(unlabelled: list[str], files: _Files, table: LabelTable) -> list[str]:
    """Return a message on the images that are left out, or raise SourceError unless they may be."""
    if not unlabelled:
        return []
    count, first = quantity(len(unlabelled), "image"), printable(unlabelled[0])
    if table.unlabelled == "skip":
        return [f"left out: {count} without a label, such as {first}"]
    raise SourceError(
        f"{printable(table.file)} has no line for {count} of {printable(files.root)}, for example {first}; add a line "
        "for each image, remove the image, or leave such images out with --unlabelled skip"
    )


def _new_split(table: LabelTable, classes: tuple[ImageClass, ...]) -> _Split:
    return _Split(Listing(classes, "path") if table.kind is None else Listing(_NO_CLASS))


def _place(files: _Files, table: LabelTable, row: int, path: str) -> tuple[str, str]:
    """Return the split of an image, and the folder below which its path is its key."""
    given = None if table.splits is None else SPLIT_ORDER[table.splits[row]]
    for split, folder in files.folders.items():
        if path.startswith(folder) and given in (None, split):
            return split, folder
    return given or "train", files.outer


def _check_groups(splits: dict[str, _Split], table: LabelTable) -> None:
    """Check that no group is in two given splits, where images that are alike would be both learnt and tested."""
    if table.groups is None:
        return
    of = {name: np.unique(table.groups[np.array(each.rows, np.int64)]) for name, each in splits.items()}
    for one, other in combinations(of, 2):
        both = np.intersect1d(of[one], of[other])
        if len(both):
            raise SourceError(
                f"{printable(table.file)}: {quantity(len(both), 'group')} of --group-by in both {one} and {other}, for "
                f"example {printable(table.group_names[both[0]])}; give each group one split, leave --group-by out, or "
                "leave the splits out and use --holdout, which keeps groups together"
            )


def _list_folder(root: Path, table: LabelTable) -> _Files:
    files = _Files(root, "a folder of images", partial(FolderStore, root))
    folders = _folders_of_splits(root, table, files)
    files.folders = {name: f"{each.relative_to(root).as_posix()}/" for name, each in folders.items()}
    starts = [root] if table.splits is not None or not folders else [*folders.values()]
    for folder in starts:
        prefix = "" if folder == root else f"{folder.relative_to(root).as_posix()}/"
        # The entries beside the splits' folders were counted there.
        for below, size in files_below(str(folder), printable(folder), files.ignored):
            if below.rpartition("/")[2] != table.file.name or not _is_same(folder / below, table):
                files.listing.add("", f"{prefix}{below}", 0, size)
    if table.kind is None:
        files.name_files = read_name_files(*dict.fromkeys((root, *folders.values())))
    return files


def _folders_of_splits(root: Path, table: LabelTable, files: _Files) -> dict[str, Path]:
    """Return the folder of each split; a table with a column of splits decides itself which images are in one."""
    if table.splits is not None:
        found = {split: Path(each.path) for each in list_folder(root)[0] if (split := split_of(each.name))}
        files.description = "a folder of images"
        return found
    folders = split_folders(root, have_classes=False)
    if not folders:
        return {}
    others, loose_entries = list_folder(root, files.ignored)
    loose = [each.name for each in loose_entries if is_image_name(each.name)]
    if loose:
        raise SourceError(
            f"{printable(root)} has {quantity(len(loose), 'image')} outside the folders of its splits, for example "
            f"{printable(loose[0])}; move each into {' or '.join(f'{each.name}/' for each in folders.values())}"
        )
    unread = [each.name for each in others if Path(each.path) not in folders.values()]
    files.description = "folders " + " and ".join(f"{each.name}/" for each in folders.values()) + " of images"
    if unread:
        more = f" and {len(unread) - 1} more)" if unread[1:] else ")"
        files.description += f" (not read: {printable(unread[0])}/{more}"
    return folders


def _is_same(path: Path, table: LabelTable) -> bool:
    try:
        return path.samefile(table.file)
    except OSError:
        return False


def _list_archive(path: Path, table: LabelTable) -> _Files:
    with closing(open_archive(path)) as archive:
        files = _Files(path, f"a {archive.kind} of images", cache(partial(open_archive, path)), f"{path.name}!")
        members = [*visible_members(archive, files.ignored)]
        names = [each.name for each in members]
        files.outer = outer = _wrapper(names)
        tops: dict[str, str | None] = {}
        for name in names:
            top, slash, _ = name[len(outer) :].partition("/")
            if slash:
                tops[top] = tops.get(top) or (name if is_image_name(name) else None)
        if table.splits is not None:
            folders = {split: top for top in tops if (split := split_of(top))}
        else:
            found = [TopFolder(top, False, partial(tops.get, top)) for top in tops]
            folders = choose_splits(found, str(path), have_classes=False)
        if folders and table.splits is None:
            files.description = f"a {archive.kind} with {' and '.join(folders)} folders of images"
        files.folders = {name: f"{outer}{top}/" for name, top in folders.items()}
        within = (outer,) if table.splits is not None or not folders else tuple(files.folders.values())
        for member in members:
            if member.name.startswith(within):
                files.listing.add("", member.name, 0, member.size, member.offset)
            if table.kind is None and member.name[len(outer) :] in NAME_FILES and member.size <= MAX_NAME_FILE_BYTES:
                content = archive.read(member.name, member.offset, member.size)
                files.name_files.append(parse_name_file(content, f"{path}!{member.name}"))
    return files


def _wrapper(names: list[str]) -> str:
    """Return the folder that encloses everything in an archive, with a slash, such as "photos/"; "" if there is none.

    It is not part of the keys, so that an archive of a folder is packed in the same order as the folder.
    """
    wrapper = ""
    for _ in range(_MAX_WRAPPING_DEPTH if names else 0):
        top = names[0][len(wrapper) :].partition("/")[0]
        prefix = f"{wrapper}{top}/"
        if split_of(top) is not None or not all(name.startswith(prefix) for name in names):
            break
        wrapper = prefix
    return wrapper
