"""Lists the images of a folder or an archive whose labels are in a file; class folders play no role.

Owns which files of such a source are images, and the errors of images and lines that do not match.
"""

from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np

from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.classes import ImageClass
from loopfeed.preprocess.sources.archives import kept_open, opened, visible_members
from loopfeed.preprocess.sources.labels_file import LabelTable
from loopfeed.preprocess.sources.listing import ByteStore, FoundSplit, LabelMatch, Layout, Listing, SourceError
from loopfeed.preprocess.sources.selection import TopFolder, choose_splits, is_image_name, split_of
from loopfeed.preprocess.sources.tree import FolderStore, files_below, list_folder, split_folders
from loopfeed.preprocess.suggestions import describe_forms, is_same_text

# The key of an image is its path below its split.
_NO_CLASS = (ImageClass("", ""),)
_MISSING_KEPT = 10_000
_MAX_WRAPPING_DEPTH = 8


def labelled_folder(root: Path, table: LabelTable) -> Layout:
    """Return the layout of a folder of images.

    Raises:
        SourceError: there are images beside the folders of the splits.
    """
    folders = split_folders(root, have_classes=False)
    if not folders:
        return Layout("a folder of images", {"train": partial(_list_folder, root, root, "train", table)})
    ignored: Counter[str] = Counter()
    others, files = list_folder(root, ignored)
    loose = [each.name for each in files if is_image_name(each.name)]
    if loose:
        raise SourceError(
            f"{printable(root)} has {quantity(len(loose), 'image')} outside the folders of its splits, for example "
            f"{printable(loose[0])}; move each into {' or '.join(f'{each.name}/' for each in folders.values())}"
        )
    unread = [each.name for each in others if Path(each.path) not in folders.values()]
    description = "folders " + " and ".join(f"{each.name}/" for each in folders.values()) + " of images"
    if unread:
        description += f" (not read: {printable(unread[0])}/" + (f" and {len(unread) - 1} more)" if unread[1:] else ")")
    openers = {name: partial(_list_folder, root, each, name, table) for name, each in folders.items()}
    return Layout(description, dict(openers), ignored)


def labelled_archive(path: Path, table: LabelTable) -> Layout:
    """Return the layout of a tar or zip archive of images.

    Raises:
        SourceError: the archive is damaged or unsafe, has two folders for a split, or images beside those of splits.
    """
    ignored: Counter[str] = Counter()
    with opened(path) as archive:
        names = [each.name for each in visible_members(archive, ignored)]
    wrapper = _wrapper(names)
    tops: dict[str, str | None] = {}
    for name in names:
        top, slash, _ = name[len(wrapper) :].partition("/")
        if slash:
            tops[top] = tops.get(top) or (name if is_image_name(name) else None)
    folders = choose_splits(
        [TopFolder(top, False, partial(tops.get, top)) for top in tops], str(path), have_classes=False
    )
    if not folders:
        openers = {"train": partial(_list_archive, path, wrapper, "train", table)}
        return Layout(f"a {archive.kind} of images", dict(openers), ignored)
    openers = {name: partial(_list_archive, path, f"{wrapper}{top}/", name, table) for name, top in folders.items()}
    return Layout(f"a {archive.kind} with {' and '.join(folders)} folders of images", dict(openers), ignored)


def check_lines(found: Iterable[FoundSplit], table: LabelTable, root: Path) -> None:
    """Check that each line of a file of labels has an image, and each image a line.

    Raises:
        SourceError: a line or an image is left over; the message names the first.
    """
    matches = [each.match for each in found if each.match is not None]
    is_used = np.zeros(len(table.rows), np.bool)
    for match in matches:
        is_used[np.array(match.rows, np.int64)] = True
    missing = [path for match in matches for path in match.missing]
    if not is_used.all():
        row = int(np.argmin(is_used))
        path = next(path for path, number in table.rows.items() if number == row)
        base = path.rpartition("/")[2]
        near = next((each for each in missing if is_same_text(each, path)), None)
        near = near or next((each for each in missing if is_same_text(each.rpartition("/")[2], base)), None)
        hint = "correct or remove the line" if near is None else f"did you mean {printable(near)}?"
        if near is not None and (forms := describe_forms(path, near)):
            hint = (
                f"the image has this name in another Unicode form ({forms}): write the paths in the form that the "
                "images' names have, or rename the images"
            )
        more = int((~is_used).sum()) - 1
        also = f" (and {quantity(more, 'more line')} without an image)" if more else ""
        raise SourceError(f"{table.where(row)}: {printable(root)} has no image {printable(path)}{also}; {hint}")
    if missing:
        num_missing = sum(match.num_missing for match in matches)
        raise SourceError(
            f"{printable(table.file)} has no line for {quantity(num_missing, 'image')} of {printable(root)}, for "
            f"example {printable(missing[0])}; add a line for each image, or remove the image"
        )


class _Split:
    """The images of a split, as they are found."""

    def __init__(self, name: str, store: ByteStore, table: LabelTable) -> None:
        self._name, self._store, self._table = name, store, table
        self._listing, self._match = Listing(_NO_CLASS), LabelMatch()

    def add(self, path: str, folder: str, member: str, size: int, offset: int = 0) -> None:
        """Add a file if it has a line; `path` is its path in the file of labels."""
        row, match = self._table.rows.get(path), self._match
        if row is not None:
            self._listing.add(folder, member, 0, size, offset)
            match.rows.append(row)
        elif is_image_name(member):
            match.num_missing += 1
            if len(match.missing) < _MISSING_KEPT:
                match.missing.append(path)
        else:
            match.num_unread += 1
            match.unread = match.unread or path

    def found(self, ignored: Counter[str]) -> FoundSplit:
        """Return the split with all added images; `ignored` counts the entries that were left out."""
        classes = tuple(ImageClass(name, name) for name in self._table.names)
        return FoundSplit(self._name, classes, self._listing, self._store, match=self._match, ignored=ignored)


def _list_folder(root: Path, folder: Path, split: str, table: LabelTable) -> FoundSplit:
    prefix = "" if folder == root else f"{folder.relative_to(root).as_posix()}/"
    images, ignored = _Split(split, FolderStore(root), table), Counter[str]()
    for below, size in files_below(str(folder), printable(folder), ignored):
        path = f"{prefix}{below}"
        if path not in table.rows and below.rpartition("/")[2] == table.file.name and _is_same(folder / below, table):
            continue
        images.add(path, prefix, below, size)
    return images.found(ignored)


def _is_same(path: Path, table: LabelTable) -> bool:
    try:
        return path.samefile(table.file)
    except OSError:
        return False


def _list_archive(path: Path, folder: str, split: str, table: LabelTable) -> FoundSplit:
    with kept_open(path) as archive:
        images = _Split(split, archive, table)
        for member in visible_members(archive):
            if member.name.startswith(folder):
                below = member.name[len(folder) :]
                images.add(member.name, f"{path.name}!{folder}", below, member.size, member.offset)
        return images.found(Counter())  # they were counted when the archive was recognised


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
