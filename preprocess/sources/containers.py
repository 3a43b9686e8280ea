"""Recognises containers of labelled images: WebDataset, Parquet, NumPy, IDX and CIFAR.

Owns which files of a folder belong to a container. Class folders take precedence: a folder with images is none.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.sources.archives import ZIP_BEGINNINGS, TarArchive, open_archive, visible_members
from loopfeed.preprocess.sources.cifar import cifar_layout, is_cifar_name
from loopfeed.preprocess.sources.contents import GZIP_MAGIC, file_content, gzip_content, head_of
from loopfeed.preprocess.sources.idx import idx_layout, is_idx_name
from loopfeed.preprocess.sources.listing import Layout, SourceError
from loopfeed.preprocess.sources.numpy_files import MAGIC as NPY_MAGIC
from loopfeed.preprocess.sources.numpy_files import numpy_layout
from loopfeed.preprocess.sources.parquet import MAGIC as PARQUET_MAGIC
from loopfeed.preprocess.sources.parquet import parquet_layout
from loopfeed.preprocess.sources.selection import is_image_name, split_of
from loopfeed.preprocess.sources.tarindex import BLOCK, is_tar
from loopfeed.preprocess.sources.webdataset import is_webdataset, webdataset_layout
from loopfeed.preprocess.system_entries import is_hidden

_MAX_DEPTH = 3
_MAX_FILES = 100_000
# Folders that containers are published in, beside those of splits: Hugging Face's and torchvision's.
_FOLDERS = frozenset({"data", "default", "raw"})
# What is not read → what it is, and what to do.
_NOT_READ = {
    **dict.fromkeys(
        (".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".tar.zst"),
        "a compressed archive, whose images cannot be read in place; unpack it, or, of WebDataset, only decompress it "
        "with gunzip",
    ),
    ".arrow": "an Arrow file, such as save_to_disk of datasets writes it; write Parquet, such as with its to_parquet",
    **dict.fromkeys((".tfrecord", ".tfrecords"), "a TFRecord file; write WebDataset archives or Parquet"),
    **dict.fromkeys((".h5", ".hdf5"), "an HDF5 file; save its arrays of images and labels with numpy.savez"),
    ".mat": "a MATLAB file; save its arrays of images and labels with numpy.savez",
}
_PICKLE_MAGIC = b"\x80"
_IDX_HEADS = (b"\0\0\x08\x01", b"\0\0\x08\x03")


def recognise_container(root: Path, class_column: str | None = None) -> Layout | None:
    """Return the layout of a container, a file or a folder; None if it is none.

    Args:
        root: the file or folder.
        class_column: the column with the classes of a container of columns; None for one of the usual names.

    Raises:
        SourceError: it is a container, but is damaged, incomplete, or one of several.
    """
    return _recognise_folder(root, class_column) if root.is_dir() else _recognise_file(root, class_column)


def _recognise_file(path: Path, class_column: str | None) -> Layout | None:
    head = head_of(file_content(path), BLOCK)
    if is_tar(head):
        with closing(open_archive(path)) as archive:
            is_wanted = is_webdataset(archive)
        return webdataset_layout(path, [path]) if is_wanted else None
    if head.startswith(PARQUET_MAGIC):
        return parquet_layout(path, [path], class_column)
    if head.startswith(ZIP_BEGINNINGS) and _is_npz(path, head):
        return numpy_layout(path, [path])
    if path.suffix.lower() == ".npz":
        return numpy_layout(path, [path])
    is_idx = head.startswith(_IDX_HEADS) or (head.startswith(GZIP_MAGIC) and _is_idx_in_gzip(path))
    what = "a NumPy array" if head.startswith(NPY_MAGIC) else "an IDX file" if is_idx else ""
    what = what or ("a Python pickle" if head.startswith(_PICKLE_MAGIC) else "")
    if what:
        raise SourceError(
            f"{printable(path)} is {what}, which is a part of a data set; give the folder with its images and labels"
        )
    return None


def _is_npz(path: Path, head: bytes) -> bool:
    # The name of the first member is in the first bytes: the directory of many images takes seconds.
    if not head[30 : 30 + int.from_bytes(head[26:28], "little")].endswith(b".npy"):
        return False
    with closing(open_archive(path)) as archive:
        return all(each.name.endswith(".npy") for each in visible_members(archive))


def _is_idx_in_gzip(path: Path) -> bool:
    try:
        return head_of(gzip_content(path), 4).startswith(_IDX_HEADS)
    except SourceError:
        return False


def _recognise_folder(root: Path, class_column: str | None) -> Layout | None:
    found = _container_files(root)
    kinds = {kind: files for kind in _KINDS if (files := [each for each in found if kind(each)])}
    unread = next((each for each in found if each.name.lower().endswith(tuple(_NOT_READ))), None)
    if unread is not None and not kinds:
        what = next(what for suffix, what in _NOT_READ.items() if unread.name.lower().endswith(suffix))
        raise SourceError(f"{printable(unread)} is {what}")
    if not kinds or (len(kinds) == 1 and _KINDS[next(iter(kinds))] is webdataset_layout and not _are_webdataset(found)):
        return None
    if len(kinds) > 1:
        shown = " and ".join(f"{quantity(len(files), 'file')} such as {files[0].name}" for files in kinds.values())
        raise SourceError(
            f"{printable(root)} has files of several forms: {shown}; give the files of one, or its folder"
        )
    ((kind, files),) = kinds.items()
    if _KINDS[kind] is parquet_layout:
        return parquet_layout(root, files, class_column)
    return _KINDS[kind](root, files)


def _are_webdataset(files: Sequence[Path]) -> bool:
    with closing(open_archive(next(each for each in files if _is_tar_name(each)))) as archive:
        return isinstance(archive, TarArchive) and is_webdataset(archive)


def _container_files(root: Path) -> list[Path]:
    """Return the files in a folder, and in those of its folders that are splits or usual; none beside images."""
    found: list[Path] = []
    unread: list[str] = []
    waiting = [(root, 0)]
    try:
        while waiting:
            folder, depth = waiting.pop()
            folders = []
            with os.scandir(folder) as entries:
                for entry in entries:
                    if is_hidden(entry.name):
                        continue
                    if entry.is_dir():
                        folders.append(entry)
                    elif is_image_name(entry.name) or len(found) > _MAX_FILES:
                        return []
                    else:
                        found.append(Path(entry.path))
            is_wrapper = len(folders) == 1 and not any(map(_is_read, found))
            for each in folders:
                is_usual = is_wrapper or split_of(each.name) or each.name.lower() in _FOLDERS
                if is_usual and depth < _MAX_DEPTH:
                    waiting.append((Path(each.path), depth + 1))
                else:
                    unread.append(each.path)
    except OSError:  # the reader of class folders names what is wrong
        return []
    is_of_container = any(_is_read(each) or each.name.lower().endswith(tuple(_NOT_READ)) for each in found)
    if not is_of_container or any(map(_has_image, unread)):
        return []
    return sorted(found)


def _is_read(path: Path) -> bool:
    """Return whether a file has the name of one of a container."""
    return any(kind(path) for kind in _KINDS)


def _has_image(folder: str) -> bool:
    """Return whether a folder has a file that may be an image by its name, at any depth."""
    names = (name for _, _, files in os.walk(folder) for name in files if not is_hidden(name))
    return any(is_image_name(name) or not Path(name).suffix for name in names)


def _is_tar_name(path: Path) -> bool:
    return path.suffix.lower() == ".tar"


def _is_cifar(path: Path) -> bool:
    """Return whether a file is one of CIFAR's; names such as `train` count only beside the names of its classes."""
    if not is_cifar_name(path.name):
        return False
    beside = "fine_label_names.txt" if path.suffix else "meta"
    return path.name.startswith(("data_batch", "test_batch")) or (path.parent / beside).is_file()


_KINDS: dict[Callable[[Path], bool], Callable[[Path, Sequence[Path]], Layout]] = {
    lambda path: path.suffix.lower() == ".parquet": parquet_layout,
    _is_tar_name: webdataset_layout,
    lambda path: path.suffix.lower() in (".npz", ".npy"): numpy_layout,
    lambda path: is_idx_name(path.name): idx_layout,
    _is_cifar: cifar_layout,
}
