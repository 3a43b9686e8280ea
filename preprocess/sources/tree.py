"""Reads class folders (`class/**/image`) that are in a folder itself or in its subfolders `train/`, `val/` and `test/`.

Symbolic links to files and folders are followed, even out of the tree (users link class folders from several disks). A
folder that contains itself is refused, as is one that is reached more than `MAX_VISITS` times in a class, because links
that fan out would double the images at each level. Folders may be at most `MAX_DEPTH` levels deep in a class.
Pipes, sockets and devices are refused.
"""

import os
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.regular_file import IrregularFileError, open_regular, read_at
from loopfeed.preprocess.sources.class_names import (
    NAME_FILES,
    ClassFrom,
    NameFile,
    UnitedClasses,
    describe_leaves,
    leaf_folders,
    name_classes,
    read_name_files,
    unite_classes,
)
from loopfeed.preprocess.sources.listing import ChangedSourceError, FoundSplit, Listing, SourceError, index_classes
from loopfeed.preprocess.sources.selection import TopFolder, choose_splits, is_image_name, split_of
from loopfeed.preprocess.system_entries import count_ignored, is_hidden
from loopfeed.preprocess.system_errors import Cause, cause_of, reading_remedy, status_of

MAX_DEPTH = 100
MAX_VISITS = 16


@dataclass(frozen=True)
class FolderStore:
    """A folder whose image files are read by their relative paths."""

    root: Path

    def read(self, name: str, offset: int, size: int) -> bytes:  # noqa: ARG002 - a file is read whole
        """Return the content of the file `root/name`.

        Raises:
            OSError: the file cannot be read, or is no longer a file of `size` bytes, as when it was listed.
            SourceError: it is a link that led nowhere even then.
        """
        try:
            descriptor = open_regular(f"{self.root}/{name}")
        except FileNotFoundError as error:
            # It led nowhere when it was listed too: it is a fault of this image, not of the disk.
            if size == 0 and (self.root / name).is_symlink():
                raise SourceError("the symbolic link leads to a file or folder that does not exist") from error
            raise
        except IrregularFileError as error:
            raise _changed("it is no longer a regular file") from error
        try:
            found_bytes = os.fstat(descriptor).st_size
            if found_bytes != size:
                raise _resized(size, found_bytes)
            content = read_at(descriptor, size, 0)
        finally:
            os.close(descriptor)
        if len(content) != size:
            raise _resized(size, len(content))
        return content

    def close(self) -> None:
        """Do nothing, because each file is closed as soon as it is read."""


def _resized(listed_bytes: int, found_bytes: int) -> OSError:
    return _changed(f"{quantity(listed_bytes, 'byte')} then, {found_bytes} now")


def _changed(how: str) -> OSError:
    # Not a fault of the image: if it were recorded as one, the image would be left out of the pack for good.
    return ChangedSourceError(f"the file has changed since it was listed: {how}")


def list_folder(
    folder: Path, ignored: Counter[str] | None = None
) -> tuple[list[os.DirEntry[str]], list[os.DirEntry[str]]]:
    """Return the subfolders and the other entries of a folder, both sorted by the bytes of their names.

    Hidden entries and those of systems and file servers are left out, and counted in `ignored`.

    Raises:
        SourceError: the folder cannot be read.
    """
    entries = []
    try:
        with os.scandir(folder) as found:
            for each in found:
                if not is_hidden(each.name):
                    entries.append(each)
                elif ignored is not None:
                    count_ignored(each.name, ignored)
    except OSError as error:
        raise _refused(folder, "listed", error, "check its path") from error
    entries.sort(key=lambda each: os.fsencode(each.name))
    are_folders = [_is_folder(each) for each in entries]
    folders = [each for each, is_folder in zip(entries, are_folders, strict=True) if is_folder]
    return folders, [each for each, is_folder in zip(entries, are_folders, strict=True) if not is_folder]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:  # such as a link to itself, or through a folder without permission
        raise _refused(entry.path, "accessed", error, "remove it") from error


def _refused(path: str | os.PathLike[str], doing: str, error: OSError, otherwise: str) -> SourceError:
    """Return the error for a path that cannot be read; `otherwise` is the remedy for faults of the path itself."""
    # A link to itself is a fault of the path, which `remove it` mends too.
    remedy = otherwise if cause_of(error) == Cause.LINKS else reading_remedy(error, otherwise)
    return SourceError(f"{printable(path)} cannot be {doing}: {error.strerror}; {remedy}")


def _leads_nowhere(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a symbolic link whose target does not exist."""
    return entry.is_symlink() and not Path(entry.path).exists()


def split_folders(root: Path, *, have_classes: bool = True) -> dict[str, Path]:
    """Return the folder of each split, as `choose_splits` finds it; empty if the root itself has the class folders.

    Raises:
        SourceError: as `choose_splits`, or a split's folder is a link that leads nowhere beside the folder of another.
    """
    folders, others = list_folder(root)
    tops = [
        TopFolder(each.name, split_of(each.name) is not None and _has_folders(each), partial(_find_image, each))
        for each in folders
    ]
    found = choose_splits(tops, str(root), have_classes=have_classes)
    broken = [each for each in others if split_of(each.name) is not None and _leads_nowhere(each)]
    if found and broken:
        raise SourceError(f"{printable(broken[0].path)} is a link that leads nowhere; correct or remove it")
    return {split: root / name for split, name in found.items()}


def _has_folders(entry: os.DirEntry[str]) -> bool:
    return bool(list_folder(Path(entry.path))[0])


def _find_image(entry: os.DirEntry[str]) -> str | None:
    """Return the path of an image in a folder that is no split, below the folder that contains it; None without one."""
    try:
        # By names alone: such a folder may have as many files as there are images, and a stat of each takes minutes.
        below = (below for below, _ in _entries_below(entry.path, f"the folder {printable(entry.path)}"))
        return next((f"{entry.name}/{path}" for path in below if is_image_name(path)), None)
    except SourceError:  # such as a folder without permission: nothing is read in it
        return None


def split_openers(
    root: Path, folders: dict[str, Path], class_from: ClassFrom = "top"
) -> dict[str, Callable[[], FoundSplit]]:
    """Return, for each split, a function that lists its images, with names relative to `root`.

    Raises:
        SourceError: as `class_ids`.
    """
    files = read_name_files(*dict.fromkeys((root, *folders.values())))
    ids_of = {split: class_ids(folder, class_from) for split, folder in folders.items()}
    united = unite_classes(ids_of, files, str(root))
    return {
        split: partial(read_class_folders, root, folder, split, files, united, class_from)
        for split, folder in folders.items()
    }


def class_ids(folder: Path, class_from: ClassFrom = "top") -> list[str]:
    """Return the classes of a split by names alone: no file is opened.

    A link that leads nowhere, in place of a class folder, is a class too.

    Raises:
        SourceError: there are images beside the class folders.
    """
    folders, loose = list_folder(folder)
    outside = [each.name for each in loose if is_image_name(each.name)]
    if outside:
        raise SourceError(
            f"{printable(folder)} has {quantity(len(outside), 'image')} outside any class folder, for example "
            f"{printable(outside[0])}; move each into the folder of its class"
        )
    if class_from == "leaf":
        return list(dict.fromkeys(each.rpartition("/")[2] for each in _leaves(folder)))
    return [each.name for each in (*folders, *_broken_classes(folders, loose))]


def _broken_classes(folders: list[os.DirEntry[str]], loose: list[os.DirEntry[str]]) -> list[os.DirEntry[str]]:
    return [each for each in loose if each.name not in NAME_FILES and _leads_nowhere(each)] if folders else []


def _leaves(folder: Path) -> list[str]:
    return leaf_folders(below for below, _ in _entries_below(str(folder), f"the folder {printable(folder)}"))


def read_class_folders(
    root: Path,
    folder: Path,
    split: str,
    name_files: Collection[NameFile],
    united: UnitedClasses,
    class_from: ClassFrom = "top",
) -> FoundSplit:
    """List the images of one split. Each direct subfolder of `folder` is a class that includes all files below it.

    With `class_from` "leaf", the folder that contains an image is its class, and the keys of images are their paths
    below the split.

    An empty class folder is a class without images. A link that leads nowhere, in place of a class folder, is a class
    with one image of size 0, which cannot be read. Every file that is not hidden is listed, whatever its suffix.

    Args:
        root: the source.
        folder: the folder of the split.
        split: its name.
        name_files: the files of class names; the first name found for a class is used.
        united: the classes of all splits.
        class_from: which folder is the class.

    Raises:
        SourceError: a folder contains itself, an entry is not a file, or the split has a class that is not known.
    """
    united.check(split)
    ignored: Counter[str] = Counter()
    named = name_classes(name_files, united.ids)
    classes = index_classes(united.ids, named.names, str(folder))
    label_of = {each.id: label for label, each in enumerate(classes)}
    prefix = folder.relative_to(root).as_posix()
    prefix = "" if prefix == "." else prefix + "/"
    notes = [*united.notes, *named.notes]
    subfolder = None
    if class_from == "leaf":
        listing = Listing(classes, "path")
        notes += _list_leaves(folder, prefix, listing, label_of, ignored)
    else:
        listing = Listing(classes)
        entries, loose = list_folder(folder, ignored)
        for entry in entries:
            if entry.name not in label_of:
                raise SourceError(
                    f"{printable(entry.path)} was added while its source was listed; run the command again"
                )
            for below, size in files_below(entry.path, f"the class {printable(entry.path)}", ignored):
                listing.add(f"{prefix}{entry.name}/", below, label_of[entry.name], size)
                if subfolder is None and "/" in below:
                    subfolder = f"{prefix}{entry.name}/{below.partition('/')[0]}"
        for entry in _broken_classes(entries, loose):
            listing.add(f"{prefix}{entry.name}", "", label_of[entry.name], file_size(entry))
    return FoundSplit(
        split,
        classes,
        listing,
        FolderStore(root),
        subfolder,
        ignored=ignored,
        notes=tuple(notes),
    )


def _list_leaves(
    folder: Path, prefix: str, listing: Listing, label_of: dict[str, int], ignored: Counter[str]
) -> list[str]:
    """List the images of a split by the folders that contain them, and return notes."""
    leaves, num_unread, unread = set(_leaves(folder)), 0, ""
    for below, size in files_below(str(folder), f"the folder {printable(folder)}", ignored):
        inside = below.rpartition("/")[0]
        if inside in leaves:
            listing.add(prefix, below, label_of[inside.rpartition("/")[2]], size)
        elif inside:
            num_unread, unread = num_unread + 1, unread or f"{prefix}{below}"
    notes = describe_leaves(leaves)
    if num_unread:
        notes.append(f"not read: {quantity(num_unread, 'file')} outside class folders, such as {printable(unread)}")
    return notes


@dataclass(frozen=True)
class _Folder:
    """A folder in a class folder: its path, its path below the class folder, and the identities of its ancestors."""

    path: str
    below: str
    above: tuple[tuple[int, int], ...]


def files_below(top: str, place: str, ignored: Counter[str] | None = None) -> Iterator[tuple[str, int]]:
    """Yield the relative path and the size in bytes of each file below the folder `top`, called `place` in messages.

    A broken link has size 0, and reading it raises SourceError. Hidden entries are counted in `ignored`.
    """
    for below, entry in _entries_below(top, place, ignored):
        yield below, file_size(entry)


def _entries_below(top: str, place: str, ignored: Counter[str] | None = None) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the relative path and the entry of all that is below a folder and is not a folder; as `files_below`."""
    waiting = [_Folder(top, "", ())]
    visits: Counter[tuple[int, int]] = Counter()
    while waiting:
        folder = waiting.pop()
        try:
            status = Path(folder.path).stat()
        except OSError as error:
            raise _refused(folder.path, "listed", error, "check its path") from error
        here = status.st_dev, status.st_ino  # the same whichever link leads to it
        visits[here] += 1
        _check_reached(folder, here, visits[here], place)
        folders, others = list_folder(Path(folder.path), ignored)
        for entry in others:
            yield f"{folder.below}{entry.name}", entry
        above = (*folder.above, here)
        # Reversed, because the last folder of the list is visited first: folders are then visited in name order.
        waiting += [_Folder(each.path, f"{folder.below}{each.name}/", above) for each in reversed(folders)]


def _check_reached(folder: _Folder, here: tuple[int, int], num_visits: int, place: str) -> None:
    shown = printable(folder.path)
    if here in folder.above:
        raise SourceError(f"{shown} is a link to a folder that contains it; remove the link")
    if num_visits > MAX_VISITS:
        raise SourceError(
            f"{shown} is reached more than {MAX_VISITS} times through links in {place}; remove the links to it"
        )
    if len(folder.above) > MAX_DEPTH:
        raise SourceError(f"{shown} is more than {MAX_DEPTH} folders deep in {place}; move its images up")


def file_size(entry: os.DirEntry[str]) -> int:
    """Return the size in bytes of a file or of the target of a link, or 0 for a broken link, which cannot be read.

    Raises:
        SourceError: the entry is a pipe, a socket or a device, on which a reader could wait forever; or the system does
            not tell its size. A size of 0 would then be part of the plan, and the pack could not be continued.
    """
    try:
        status = status_of(entry.path)
    except OSError as error:
        raise _refused(entry.path, "accessed", error, "remove it") from error
    if status is None:
        return 0
    if not stat.S_ISREG(status.st_mode):
        raise SourceError(f"{printable(entry.path)} is neither a file nor a folder; remove it")
    return status.st_size
