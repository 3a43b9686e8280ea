"""Reads NumPy's .npz and .npy files: an array of images and an array of labels for each split, by their names.

Pickled objects are never loaded. Images stay in their file, where they are read one by one; those of a compressed .npz
are unpacked into a temporary file.
Format: NumPy's NEP 1.
"""

import io
import math
import re
import warnings
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopfeed.preprocess.printable import first_names, printable
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.sources.archives import ZIP_BEGINNINGS, open_archive
from loopfeed.preprocess.sources.array_store import FileArray
from loopfeed.preprocess.sources.contents import Content, file_content, head_of, load, member_content, wrong_length
from loopfeed.preprocess.sources.listing import Layout, SourceError
from loopfeed.preprocess.sources.samples import (
    ArraySamples,
    check_images,
    class_numbers,
    samples_layout,
    split_of_path,
)
from loopfeed.preprocess.sources.selection import split_of
from loopfeed.preprocess.sources.source_file import not_as_named

MAGIC = b"\x93NUMPY"
# Version 3 differs by names of records alone, which are no images.
_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_ROLES = {
    **dict.fromkeys(("images", "image", "imgs", "img", "x", "data", "pixels"), "images"),
    **dict.fromkeys(("labels", "label", "y", "targets", "target", "classes"), "labels"),
}
_USUAL = "images and labels, x and y, x_train and y_train, or train_images and train_labels"
_MAX_HEADER_BYTES = 65_536
_MAX_LABEL_BYTES = 2**30
_MAX_DIMENSIONS, _MAX_LENGTH = 8, 2**48
_MAX_SHOWN = 6
# The tokenizer of Python ends in a SystemError for some headers that are no UTF-8.
_DAMAGES = (ValueError, TypeError, KeyError, SyntaxError, TokenError, RecursionError, MemoryError, SystemError)


@dataclass(frozen=True)
class _Array:
    """An array in a file: its content, its shape, its type, and the offset of its values."""

    content: Content
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    start: int


def numpy_layout(root: Path, files: Sequence[Path]) -> Layout:
    """Return the layout of .npz or .npy files.

    Raises:
        SourceError: an array is missing, damaged or of another shape or type, or the files are no arrays.
    """
    found: dict[tuple[str, str], _Array] = {}
    unread: list[str] = []
    for split, name, content in _contents(root, files):
        words = [each for each in re.split(r"[^a-z0-9]+", name.lower()) if each]
        roles = [_ROLES[each] for each in words if each in _ROLES]
        splits = [each for each in map(split_of, words) if each]
        if len(roles) != 1 or len(splits) > 1 or len(words) != len(roles) + len(splits):
            unread.append(name)
            continue
        place = (*splits, split)[0], roles[0]
        if place in found:
            raise SourceError(
                f"{printable(root)} has two arrays of {place[1]} for the split {place[0]}, "
                f"{printable(found[place].content.where)} and {printable(content.where)}; keep one"
            )
        found[place] = _read_header(content)
    splits_found = {split: _samples(root, found, split, unread) for split, _ in dict.fromkeys(found)}
    if not splits_found:
        shown = ", ".join(map(printable, unread[:_MAX_SHOWN])) or "no array"
        raise SourceError(f"{printable(root)} has no arrays of images and labels: found {shown}; name them {_USUAL}")
    shown = first_names([each.name for each in files], 2)
    left = f" (not read: {', '.join(map(printable, unread[:_MAX_SHOWN]))})" if unread else ""
    return samples_layout(f"{quantity(len(files), 'NumPy file')}: {shown}{left}", root, splits_found)


def _contents(root: Path, files: Iterable[Path]) -> Iterable[tuple[str, str, Content]]:
    """Yield the split that the name of its file says, the name and the content of each array."""
    for path in files:
        head = head_of(file_content(path), 512)
        if path.suffix.lower() == ".npy":
            if not head.startswith(MAGIC):
                raise not_as_named(path, head, "a NumPy array")
            words = [each for each in re.split(r"[^A-Za-z0-9]+", path.stem) if split_of(each) is None]
            yield split_of_path(path, root), "_".join(words), file_content(path)
            continue
        if not head.startswith(ZIP_BEGINNINGS):
            raise not_as_named(path, head, "a NumPy archive")
        with closing(open_archive(path)) as archive:
            for member in archive.members():
                if member.name.endswith(".npy"):
                    content = member_content(path, replace(member, name=member.name.removesuffix(".npy")))
                    yield split_of_path(path, root), member.name.removesuffix(".npy"), content


def _samples(root: Path, found: dict[tuple[str, str], _Array], split: str, unread: list[str]) -> ArraySamples:
    for has, lacks in (("images", "labels"), ("labels", "images")):
        if (split, lacks) not in found:
            others = f" (found {', '.join(map(printable, unread[:_MAX_SHOWN]))})" if unread else ""
            raise SourceError(
                f"{printable(root)} has {printable(found[split, has].content.where)}, but no array of {lacks} for "
                f"{split}{others}; name the arrays {_USUAL}"
            )
    images, labels = found[split, "images"], found[split, "labels"]
    check_images(images.shape, images.dtype, images.content.where)
    ids, numbers = class_numbers(_load_labels(labels), labels.content.where, images.shape[0])
    image_bytes = math.prod(images.shape[1:]) * images.dtype.itemsize
    where = images.content.where.removeprefix(f"{root.parent}/")
    return ArraySamples([(where, images.shape[0])], image_bytes, ids, numbers, [partial(_open, images, image_bytes)])


def _open(array: _Array, stride: int) -> FileArray:
    file, offset = array.content.open(array.start + array.shape[0] * stride)
    return FileArray(file, offset + array.start, stride, array.shape, array.dtype)


def _load_labels(array: _Array) -> NDArray[Any]:
    where = array.content.where
    if array.dtype.hasobject:
        return np.zeros(array.shape, np.dtype(object)) if math.prod(array.shape) < 1 else np.zeros(1, object)
    content = load(array.content, _MAX_LABEL_BYTES)
    expected = array.start + math.prod(array.shape) * array.dtype.itemsize
    if len(content) != expected:
        raise wrong_length(where, len(content), expected)
    return np.frombuffer(content, array.dtype, offset=array.start).reshape(array.shape)


def _read_header(content: Content) -> _Array:
    """Read the header of an array without evaluating anything in it but literals.

    Raises:
        SourceError: it is damaged, or the array is stored column by column.
    """
    where = printable(content.where)
    head = head_of(content, _MAX_HEADER_BYTES)
    if not head.startswith(MAGIC):
        raise not_as_named(Path(content.where), head, "a NumPy array")
    stream = io.BytesIO(head)
    try:
        read = _READERS[np.lib.format.read_magic(stream)]
        with warnings.catch_warnings():  # of Python, about escapes in the text of the header
            warnings.simplefilter("ignore")
            shape, is_fortran, dtype = read(stream, max_header_size=_MAX_HEADER_BYTES)
        if dtype.fields or dtype.subdtype is not None or not dtype.itemsize:
            raise ValueError(f"of its type {str(dtype)[:40]}")
        if len(shape) > _MAX_DIMENSIONS or min(shape, default=0) < 0 or max(shape, default=0) >= _MAX_LENGTH:
            raise ValueError("of its shape")
    except _DAMAGES as error:
        raise SourceError(
            f"{where} is a damaged NumPy array, or one of records: its header is not valid; save it again as uint8"
        ) from error
    if is_fortran and len(shape) > 1:
        raise SourceError(
            f"{where} is stored column by column (Fortran order), so no image is in one piece; save it with "
            "numpy.ascontiguousarray"
        )
    return _Array(content, shape, dtype, stream.tell())
