"""The labelled images of a container, whose classes are identifiers rather than folders.

Owns how the classes of several splits become one list: those of all splits, and those that the container names, so that
a class that a split lacks shifts no other. Must not know: any form of containers.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from loopfeed.preprocess.printable import is_unicode, printable
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.classes import MAX_ID_CHARACTERS
from loopfeed.preprocess.sources.array_store import ArrayStore, FileArray
from loopfeed.preprocess.sources.class_names import (
    ClassNames,
    NameFile,
    name_classes,
    read_name_files,
    unite_classes,
)
from loopfeed.preprocess.sources.listing import (
    MAX_FILE_BYTES,
    ByteStore,
    FoundSplit,
    Layout,
    Listing,
    SourceError,
    index_classes,
)
from loopfeed.preprocess.sources.selection import SPLIT_ORDER, split_of

_GREY, _RGB, _RGBA = 1, 3, 4

type ArrayLabels = tuple[list[str], NDArray[np.int64]]


class Samples(Protocol):
    """The labelled images of one split of a container."""

    @property
    def class_ids(self) -> Collection[str]:
        """The identifiers of its classes."""

    def list_images(self, listing: Listing, label_of: Mapping[str, int]) -> ByteStore:
        """Add its images to a listing, and return the store that reads them.

        Args:
            listing: the listing, whose keys are paths below the split.
            label_of: the label of each identifier.
        """


def samples_layout(
    description: str, root: Path, splits: Mapping[str, Samples], names: Mapping[str, str] | None = None
) -> Layout:
    """Return the layout of a container.

    Args:
        description: what it is, for messages.
        root: SOURCE.
        splits: the images of each split.
        names: the readable names of all classes by their identifiers, if the container has them; otherwise those of
            `classes.txt` beside it are used, of which line i may also be the name of class i alone.

    Raises:
        SourceError: there is no class, or there are too many.
    """
    ids_of = {split: splits[split].class_ids for split in SPLIT_ORDER if split in splits}
    ids = {each for found in ids_of.values() for each in found}
    files = read_name_files(root if root.is_dir() else root.parent) if names is None else []
    names = names or _names_in_order(files, ids)
    named = ClassNames({}, ()) if names is not None else name_classes(files, ids, numeric=True)
    # With names for all, each of these classes is known.
    united = unite_classes(ids_of if names is None else {"names": {*names, *ids}, **ids_of}, files, str(root))
    classes = index_classes(united.ids, dict(names or named.names), str(root), numeric=True)
    label_of = {each.id: label for label, each in enumerate(classes)}

    def open_samples(split: str) -> FoundSplit:
        united.check(split)
        listing = Listing(classes, keys="path")
        store = splits[split].list_images(listing, label_of)
        return FoundSplit(split, classes, listing, store, notes=(*united.notes, *named.notes))

    return Layout(description, {split: partial(open_samples, split) for split in ids_of})


def _names_in_order(files: Sequence[NameFile], ids: Collection[str]) -> dict[str, str] | None:
    """Return names by class number if the classes are numbers, and a file has one name for each, in order."""
    if not files or not all(each.isdecimal() and each == str(int(each)) for each in ids):
        return None
    lines = files[0].lines
    if files[0].first_words & set(ids) or max(map(int, ids), default=0) >= len(lines):
        return None
    return {each: lines[int(each)] for each in ids}


def class_id(value: object, where: str) -> str:
    """Return the identifier of a class from a number or a text.

    Raises:
        SourceError: it is neither, empty, negative, or too long.
    """
    text = value.strip() if isinstance(value, str) else ""
    if 0 < len(text) <= MAX_ID_CHARACTERS and "\n" not in text and is_unicode(text):
        return text
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return str(value)
    shown = printable(repr(value)[:80]) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    raise SourceError(
        f"{where} has the class {shown}; a class must be a number from 0, or a name of at most {MAX_ID_CHARACTERS:,} "
        "characters on one line"
    )


def split_of_path(path: Path, root: Path) -> str:
    """Return the split that the name of a file or else the nearest of its folders names, "train" if none does.

    The name is one of its words, such as in `imagenet-train-000000.tar`.

    Raises:
        SourceError: the name of the file has the names of two splits.
    """
    inside = path.relative_to(root) if path != root else Path(path.name)
    words = re.split(r"[^A-Za-z0-9]+", inside.stem if inside.suffix else inside.name)
    found = list(dict.fromkeys(filter(None, map(split_of, words))))
    if len(found) > 1:
        raise SourceError(f"{printable(path)} has the names of two splits, {' and '.join(found)}; rename it")
    folders = [split for each in reversed(inside.parts[:-1]) if (split := split_of(each)) is not None]
    return (*found, *folders, "train")[0]


@dataclass(frozen=True)
class ArraySamples:
    """Images in arrays, whose keys are their numbers in the split.

    Attributes:
        places: where each array is, for messages, and how many images it has.
        image_bytes: the bytes of an image.
        ids: the identifiers of its classes.
        labels: the index of each image's class in `ids`.
        open_arrays: returns each array.
        is_channels_first: whether their shape is `[N, C, H, W]`.
    """

    places: Sequence[tuple[str, int]]
    image_bytes: int
    ids: Sequence[str]
    labels: NDArray[np.int64]
    open_arrays: Sequence[Callable[[], FileArray | NDArray[Any]]]
    is_channels_first: bool = False

    @property
    def class_ids(self) -> Collection[str]:
        """The identifiers of its classes."""
        return self.ids

    def list_images(self, listing: Listing, label_of: Mapping[str, int]) -> ByteStore:
        """Add its images to a listing, and return the store that reads them."""
        labels = np.array([label_of[each] for each in self.ids], np.int64)[self.labels].tolist()
        starts = [0]
        for place, count in self.places:
            for index in range(starts[-1], starts[-1] + count):
                listing.add(f"{place}/", f"{index:08d}", labels[index], self.image_bytes, index)
            starts.append(starts[-1] + count)
        arrays: list[FileArray | NDArray[Any]] = []
        try:
            arrays.extend(each() for each in self.open_arrays)
        except BaseException:
            ArrayStore(arrays).close()
            raise
        return ArrayStore(arrays, is_channels_first=self.is_channels_first)


def class_numbers(values: NDArray[Any], where: str, num_images: int, num_classes: int | None = None) -> ArrayLabels:
    """Return the identifiers of the classes of an array of labels `[N]` or `[N, 1]`, and the index of each image's.

    Args:
        values: whole numbers, or names.
        where: the array, for messages.
        num_images: how many images there are.
        num_classes: how many classes there are, if that is known.

    Raises:
        SourceError: the array has another shape or type, or a label out of range.
    """
    shown = printable(where)
    flat = values.reshape(len(values)) if values.ndim == 2 and values.shape[1] == 1 else values
    if flat.ndim != 1:
        remedy = "one-hot labels become numbers with .argmax(1)" if flat.ndim == 2 else "give one class for each image"
        raise SourceError(f"{shown} has labels of the shape {list(values.shape)} instead of [N]; {remedy}")
    if flat.dtype.kind not in "iubUS":
        what = "an array of Python objects" if flat.dtype.hasobject else f"of the type {flat.dtype}"
        raise SourceError(
            f"{shown} is {what}, but labels must be whole numbers or text; convert them with .astype(numpy.int64)"
        )
    if len(flat) != num_images:
        raise SourceError(
            f"{shown} has {quantity(len(flat), 'label')} for {quantity(num_images, 'image')}; give one for each image"
        )
    is_text = flat.dtype.kind in "US"
    found, labels = np.unique(flat, return_inverse=True)
    if not is_text and len(found):
        lowest, highest = int(found[0]), int(found[-1])
        stop = num_classes if num_classes is not None else 2**63
        if lowest < 0 or highest >= stop:
            value = lowest if lowest < 0 else highest
            index = int(np.flatnonzero(flat == value)[0])
            limits = "from 0" if num_classes is None else f"from 0 to {num_classes - 1}"
            raise SourceError(f"{shown} has the label {value} for image {index}; labels must be {limits}: remove it")
    try:
        values_found = (np.char.decode(found, "utf-8") if flat.dtype.kind == "S" else found).tolist()
    except (ValueError, SystemError) as error:  # SystemError: numbers that are no characters
        raise SourceError(f"{shown} has a label that is not valid text: {error}; write it as UTF-8") from error
    return [class_id(each if is_text else int(each), shown) for each in values_found], labels.astype(np.int64)


def check_images(shape: tuple[int, ...], dtype: np.dtype[Any], where: str) -> None:
    """Check the shape `[N, …]` and the type of an array of images.

    Raises:
        SourceError: it cannot be packed; the message has the remedy.
    """
    shown = printable(where)
    if dtype.hasobject:
        raise SourceError(
            f"{shown} is an array of Python objects, which is never read; stack the images into one array of uint8"
        )
    if dtype.kind == "f":
        raise SourceError(
            f"{shown} has images of {dtype}; save them as uint8, with (255 * images).round().astype(numpy.uint8) if "
            "they are from 0 to 1"
        )
    if dtype.kind != "u" or dtype.itemsize > 2:
        raise SourceError(f"{shown} has images of {dtype}; save them as uint8 from 0 to 255, or as uint16")
    if len(shape) == 4 and shape[1] in (_GREY, _RGB, _RGBA) and shape[3] not in (_GREY, _RGB, _RGBA):
        raise SourceError(
            f"{shown} has the shape {list(shape)}, with its channels before height and width; save it with "
            "images.transpose(0, 2, 3, 1)"
        )
    if len(shape) not in (3, 4) or (len(shape) == 4 and shape[3] not in (_GREY, _RGB, _RGBA)):
        raise SourceError(
            f"{shown} has the shape {list(shape)}; images must be [N, H, W] or [N, H, W, C] with 1, 3 or 4 channels"
        )
    image_bytes = math.prod(shape[1:]) * dtype.itemsize
    if image_bytes > MAX_FILE_BYTES:
        raise SourceError(
            f"{shown} has images of {image_bytes:,} bytes, more than the {MAX_FILE_BYTES:,} allowed; make them smaller"
        )
    if 0 in shape:
        raise SourceError(f"{shown} has the shape {list(shape)}, so it has no pixels; add images to it")
