"""Image folders: `class/**/image`, alone or below `train/`, `val/`, `test/`.

Symbolic links are followed, to files and to folders, also out of the tree (people link class folders together from
several disks); a folder that contains itself is refused. Pipes, sockets and devices are refused.
"""

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from preprocess.listing import FoundSplit, Listing, SourceError, index_classes

# What a split folder may be called, and what the split is called then.
SPLIT_FOLDERS = {"train": "train", "val": "val", "validation": "val", "test": "test"}

NAME_FILES = ("classes.txt", "LOC_synset_mapping.txt")

# Only for telling an image that lies outside every class folder; inside one, everything is tried.
IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm"})

# Not every system has these; Windows needs O_BINARY, and has no pipes among its files.
_READ_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

_SYSTEM_FILES = frozenset({"thumbs.db", "desktop.ini", "__macosx"})


@dataclass(frozen=True)
class FolderStore:
    """Reads files below a root."""

    root: Path

    def read(self, name: str, offset: int, size: int) -> bytes:  # noqa: ARG002 - a file is read whole
        """Returns the content of the file `root/name`.

        Raises:
            OSError: the file cannot be read.
            SourceError: it is no longer a file of `size` bytes, as it was when it was listed.
        """
        # A pipe that has taken the file's place would otherwise wait for a writer for ever.
        descriptor = os.open(self.root / name, _READ_FLAGS)
        with open(descriptor, "rb", buffering=0) as file:  # noqa: PTH123 - a descriptor has no path
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise SourceError("the file has changed since it was listed: it is no file any more; run again")
            if status.st_size != size:
                raise _changed(size, status.st_size)
            content = file.read(size)
        if len(content) != size:
            raise _changed(size, len(content))
        return content

    def close(self) -> None:
        """Has nothing to close: each file is closed once it is read."""


def _changed(listed_bytes: int, found_bytes: int) -> SourceError:
    return SourceError(
        f"the file has changed since it was listed: {listed_bytes} bytes then, {found_bytes} now; run again"
    )


def is_hidden(name: str) -> bool:
    """Whether the name is one that desktops leave behind (`.DS_Store`, `._x`, `Thumbs.db`), not a part of the data."""
    return name.startswith(".") or name.lower() in _SYSTEM_FILES


def list_folder(folder: Path) -> tuple[list[os.DirEntry[str]], list[os.DirEntry[str]]]:
    """Returns the visible sub-folders and other entries of a folder, each sorted by the bytes of their names.

    Raises:
        SourceError: the folder cannot be read.
    """
    try:
        with os.scandir(folder) as found:
            entries = sorted(
                (each for each in found if not is_hidden(each.name)), key=lambda each: os.fsencode(each.name)
            )
        return [each for each in entries if each.is_dir()], [each for each in entries if not each.is_dir()]
    except OSError as error:
        raise SourceError(f"{folder} cannot be listed: {error.strerror}") from error


def split_folders(root: Path) -> dict[str, Path]:
    """Returns the split folders of a tree that is divided into splits; none for a single tree of classes.

    A folder counts when it has a split's name and folders of its own: a class may well be called "train".
    """
    found: dict[str, Path] = {}
    for entry in list_folder(root)[0]:
        split = SPLIT_FOLDERS.get(entry.name.lower())
        if split is None or not list_folder(Path(entry.path))[0]:
            continue
        if split in found:
            raise SourceError(f"{root} has both {found[split].name}/ and {entry.name}/ for the split {split}; keep one")
        found[split] = Path(entry.path)
    return {split: found[split] for split in ("train", "val", "test") if split in found}


def split_openers(root: Path, folders: dict[str, Path]) -> dict[str, Callable[[], FoundSplit]]:
    """Returns for every split a function that lists it; names in the listing are relative to `root`."""
    names_in = tuple(dict.fromkeys((root, *folders.values())))
    return {
        split: partial(read_class_folders, root, folder, split, names_in=names_in) for split, folder in folders.items()
    }


def read_class_folders(root: Path, folder: Path, split: str, *, names_in: tuple[Path, ...]) -> FoundSplit:
    """Lists the classes of one split: each folder directly below `folder` is one, with all files at any depth.

    An empty class folder is a class without images. Every file that is not hidden is listed, whatever its suffix.
    Readable names are looked for in the folders `names_in`, the first to name a class has it.

    Raises:
        SourceError: images lie beside the class folders, a folder contains itself, an entry is no file.
    """
    class_entries, loose = list_folder(folder)
    outside = [each.name for each in loose if Path(each.name).suffix.lower() in IMAGE_SUFFIXES]
    if outside:
        raise SourceError(
            f"{folder} has {len(outside)} images outside every class folder, the first is {outside[0]}; "
            "move each into the folder of its class"
        )
    classes = index_classes((each.name for each in class_entries), read_names(*names_in), str(folder))
    label_of = {each.id: label for label, each in enumerate(classes)}
    listing = Listing(classes)
    prefix = folder.relative_to(root).as_posix()
    prefix = "" if prefix == "." else prefix + "/"
    for entry in class_entries:
        for below, size in _files_below(Path(entry.path), ()):
            listing.add(f"{prefix}{entry.name}/", below, label_of[entry.name], size)
    return FoundSplit(split, classes, listing, FolderStore(root))


def read_names(*folders: Path) -> dict[str, str]:
    """Reads readable class names, if a folder has a `classes.txt` or `LOC_synset_mapping.txt`: a class a line.

    A line is the class id, white space, and the name up to a first comma ("n01440764 tench, Tinca tinca"). The order of
    lines means nothing; blank lines and a byte order mark are passed over.

    Returns:
        Class id to readable name, "" where a line has none; also of classes that have no folder.

    Raises:
        SourceError: such a file cannot be read as UTF-8 text.
    """
    names: dict[str, str] = {}
    for path in (folder / name for folder in folders for name in NAME_FILES):
        if path.is_file():
            try:
                lines = path.read_text(encoding="utf-8-sig").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise SourceError(f"{path} cannot be read as UTF-8 text: {error}") from error
            for line in lines:
                if words := line.split(None, 1):
                    names.setdefault(words[0], words[1].partition(",")[0].strip() if len(words) > 1 else "")
    return names


def _files_below(folder: Path, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, int]]:
    """Yields relative path and size in bytes of every file; a broken link has size 0 and fails when it is read."""
    status = folder.stat()
    here = (status.st_dev, status.st_ino)
    if here in above:
        raise SourceError(f"{folder} is a link to a folder that contains it; remove the link")
    folders, others = list_folder(folder)
    for entry in others:
        yield entry.name, file_size(entry)
    for entry in folders:
        for below, size in _files_below(Path(entry.path), (*above, here)):
            yield f"{entry.name}/{below}", size


def file_size(entry: os.DirEntry[str]) -> int:
    """Returns the size in bytes of a file or of what a link leads to; 0 for a broken link, which then fails to read.

    Raises:
        SourceError: it is a pipe, a socket or a device, on which a reader could wait for ever.
    """
    try:
        status = entry.stat()
    except OSError:
        return 0
    if not stat.S_ISREG(status.st_mode):
        raise SourceError(f"{entry.path} is neither a file nor a folder; remove it")
    return status.st_size
