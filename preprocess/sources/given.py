"""The data sets that a Python program gives to `loopfeed.pack` in the place of a path, as a layout of splits.

Images that can be read at any time by their number, and whose labels are known without decoding them, are read when
they are packed: files, arrays, data sets with columns (Hugging Face) or lists of labels (torchvision). All others are
read once, in their order, into a spool. What follows, the classes, hold-out, order and checks, is that of folders.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.classes import ImageClass
from loopfeed.preprocess.sources.array_store import ArrayStore
from loopfeed.preprocess.sources.given_classes import ONE_LABEL, first_faulty, item_name, number_classes
from loopfeed.preprocess.sources.given_items import (
    FileStore,
    ItemStore,
    SpoolStore,
    call_user,
    detached,
    encode_item,
    has_channels_first,
    is_path,
    split_item,
)
from loopfeed.preprocess.sources.given_sets import Columns, known_classes, known_columns, sampled
from loopfeed.preprocess.sources.listing import ByteStore, FoundSplit, Layout, Listing, SourceError
from loopfeed.preprocess.sources.selection import SPLIT_ORDER, split_of
from loopfeed.preprocess.system_errors import status_of

_ITEM_FOLDER = "item "


@dataclass
class _Images:
    """The images of a split.

    Attributes:
        store: where they are read.
        labels: their labels, whole numbers or names.
        offsets: the place of each in the store; None if those are their numbers.
        sizes: the length of each in bytes, 0 where that is not known.
        members: their names; None if those are their numbers.
        classes: the classes that the data set knows; None if it knows none.
        notes: one-line messages to the user.
    """

    store: ByteStore
    labels: list[Any]
    offsets: Sequence[int] | None = None
    sizes: Sequence[int] | None = None
    members: Sequence[str] | None = None
    classes: tuple[ImageClass, ...] | None = None
    notes: tuple[str, ...] = field(default=())


def given_layout(
    source: Any,
    *,
    classes: Iterable[str] | None = None,
    names: Any = None,
    splits: Iterable[str] | None = None,
    dest: Path | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> Layout:
    """Return the layout of a data set in Python, whose images that can be read only once have been read.

    Args:
        source: `(images, labels)`, a list or a data set of `(image, label)`, an iterable of these, or a dict of splits.
        classes: the name of each class; labels may then be their numbers.
        names: the name of each image, a sequence or, of several splits, a dict of them.
        splits: the splits to read; None reads all.
        dest: the folder of the pack, beside which images are kept that can be read only once; None if it is remote.
        notify: called with a line about the spool.

    Raises:
        SourceError: the source has another form, or a label is not that of a class; the message names the item.
        ItemError: the user's code raised an exception.
    """
    if isinstance(classes, str | Mapping):
        kind = type(classes).__name__
        raise SourceError(f"classes must be a list of names in the order of their numbers, got a {kind}; give a list")
    parts = _split_parts(source)
    wanted = {*(parts if splits is None else splits)}
    folder = None if dest is None else next((each for each in (dest, *dest.parents) if each.is_dir()), None)
    read: dict[str, _Images] = {}
    try:
        for name, each in parts.items():
            if name not in wanted and (name != "train" or "val" in parts):
                # A split that is not packed has classes too: without them, labels would be others in another call.
                known_here = known_classes(each)
                if classes is not None or known_here is not None:
                    read[name] = _Images(FileStore(Path(), []), [], classes=known_here)
                    continue
            read[name] = _read_split(each, name, folder, notify)
            if (members := _members(names, name, len(parts), len(read[name].labels))) is not None:
                read[name].members = members
            else:
                _check_files(read[name].members, name)
        known, labels, united = number_classes(read, None if classes is None else list(classes), wanted)
        found = {}
        for name, numbers in labels.items():
            read[name].notes += united
            found[name] = _found_split(name, read[name], known, numbers)
    except BaseException:
        for each in read.values():
            each.store.close()
        raise
    return Layout("the given data set", {name: partial(found.__getitem__, name) for name in found})


def _split_parts(source: Any) -> dict[str, Any]:
    """Return the parts of a source by the names of their splits."""
    if not isinstance(source, Mapping):
        return {"train": source}
    parts: dict[str, Any] = {}
    for name, each in source.items():
        split = split_of(name) if isinstance(name, str) else None
        if split is None or split in parts:
            raise SourceError(
                f"the keys of a dict must be splits, each once, from {', '.join(SPLIT_ORDER)}, got "
                f"{', '.join(repr(key) for key in source)}; give images and labels as (images, labels)"
            )
        parts[split] = each
    return {name: parts[name] for name in SPLIT_ORDER if name in parts}


def _read_split(source: Any, split: str, spool_folder: Path | None, notify: Callable[[str], None]) -> _Images:
    """Return the images of a split, in whichever form they are given."""
    columns: Columns | None = None
    if isinstance(source, tuple) and len(source) == 2:
        columns = _pair_of_columns(source, split)
    elif hasattr(source, "dtype") and hasattr(source, "shape"):
        raise SourceError(f"{split} is an array of images without labels; give (images, labels)")
    elif is_path(source):
        raise SourceError(
            f"{split} is a path; give the path of the folder or archive that has all splits as the source"
        )
    elif hasattr(source, "iloc"):
        raise SourceError(f'{split} is a table; give two of its columns, such as (table["path"], table["label"])')
    elif hasattr(source, "dataset") and hasattr(source, "batch_size"):
        raise SourceError(f"{split} is a loader of batches ({type(source).__name__}); give its .dataset")
    elif _is_map_style(source):
        columns = known_columns(source, lambda number: item_name(number, split))
    elif inspect.isroutine(source):
        raise SourceError(f"{split} is a function ({source.__name__}); call it, and give the iterable that it returns")
    elif not isinstance(source, Iterable):
        raise SourceError(
            f"{split} must be (images, labels), a list of (image, label), a data set with __len__ and __getitem__, or "
            f"an iterable of (image, label), got {type(source).__name__}"
        )
    images = _read_columns(columns, split) if columns is not None else _read_all(source, split, spool_folder, notify)
    if not images.labels:
        raise SourceError(f"{split} has no images; give at least one")
    images.classes = known_classes(source)
    return images


def _is_map_style(source: Any) -> bool:
    # PyTorch's IterableDataset inherits a __getitem__ that raises.
    is_iterable_only = any(each.__name__ == "IterableDataset" for each in type(source).__mro__)
    return hasattr(source, "__len__") and hasattr(source, "__getitem__") and not is_iterable_only


def _pair_of_columns(source: tuple[Any, Any], split: str) -> Columns:
    images, labels = source
    if all(isinstance(each, tuple) and len(each) == 2 and len(getattr(each[0], "shape", ())) > 2 for each in source):
        raise SourceError('two pairs of arrays are two splits; give a dict, such as {"train": (x, y), "val": (x, y)}')
    for what, each in (("images", images), ("labels", labels)):
        is_column = hasattr(each, "__getitem__") and (hasattr(each, "__len__") or len(getattr(each, "shape", ())) > 0)
        if isinstance(each, str | bytes) or not is_column:
            raise SourceError(
                f"a pair must be (images, labels), but the {what} of {split} are {type(each).__name__}; give both as "
                "arrays or lists, and pairs of an image and its label in a list"
            )
    if len(getattr(images, "shape", ())) == 1:  # such as a column of pandas, whose items are found by its index
        images = np.asarray(images).tolist()
    column = list(labels) if isinstance(labels, list | tuple) else _label_column(labels, split)
    num_images = images.shape[0] if hasattr(images, "shape") else len(images)  # an array of Zarr has no length
    if num_images != len(column):
        raise SourceError(
            f"{split} has {quantity(num_images, 'image')} but {quantity(len(column), 'label')}; give each image one"
        )
    return Columns(images, column)


def _label_column(labels: Any, split: str) -> list[Any]:
    column = np.asarray(labels)
    if column.ndim == 2 and column.shape[1] == 1:  # as Keras and MedMNIST have them
        column = column[:, 0]
    if column.ndim != 1 or column.dtype.kind not in "iubUTO":
        remedy = f"of one-hot rows give .argmax(1); {ONE_LABEL}"
        if column.ndim == 1:
            remedy = f"of whole numbers give .astype(int); {ONE_LABEL}"
        elif column.ndim > 2:
            remedy = "these look like images; give (images, labels) in this order"
        raise SourceError(
            f"the labels of {split} must be one whole number or name per image, got {column.dtype} "
            f"{list(column.shape)}; {remedy}"
        )
    return list(column.astype(np.int64) if column.dtype.kind in "iub" else column)


def _read_columns(columns: Columns, split: str) -> _Images:
    """Return images that can be read at any time."""
    images, labels = columns.images, columns.labels
    if len(getattr(images, "shape", ())) > 1:
        return _read_array(images, labels, split)
    if not len(labels):
        return _Images(FileStore(Path(), []), [])
    first = call_user(lambda: images[0], item_name(0, split))
    if is_path(first):
        return _read_files([_path_of(each, number, split) for number, each in enumerate(images)], labels, split)
    _check_first(first, item_name(0, split))
    identifying = sampled(len(labels)) if columns.is_sampled else range(len(labels))
    return _Images(ItemStore(images.__getitem__, lambda number: item_name(number, split), identifying), labels)


def _check_first(image: Any, where: str) -> None:
    """Raise SourceError if the first image is of a type or a shape that all others are likely to have as well."""
    try:
        encode_item(call_user(lambda: detached(image), where), where)
    except ValueError as error:
        raise SourceError(f"{where}: {error}") from error


def _read_array(images: Any, labels: list[Any], split: str) -> _Images:
    """Return the images of an array, which may be one that is not in memory."""
    pixels = np.asarray(images) if hasattr(images, "__dlpack__") else images
    shape = tuple(pixels.shape)
    is_first = has_channels_first(shape[1:])
    store, num_bytes = ArrayStore([pixels], is_channels_first=is_first), 0
    if shape[0]:
        try:
            num_bytes = len(store.read("", 0, 0))
        except ValueError as error:
            raise SourceError(f"the images of {split}, {pixels.dtype} {list(shape)}: {error}") from error
    height, width = shape[2:] if is_first else shape[1:3]
    note = f"The images of {split} have their channels first: {shape[1]} of {width} × {height} px"
    return _Images(store, labels, sizes=[num_bytes] * shape[0], notes=(note,) if is_first else ())


def _path_of(image: Any, number: int, split: str) -> str:
    if not is_path(image):
        raise SourceError(
            f"{item_name(number, split)} is of type {type(image).__name__}, but the first is a path; give all images "
            "of a split in one form"
        )
    return os.fsdecode(image)


def _read_files(paths: list[str], labels: list[Any], split: str) -> _Images:
    """Return images in files. Their names are the paths below the folder that all of them have in common."""
    whole = [os.path.abspath(each) for each in paths]  # noqa: PTH100 - links are kept
    root = os.path.commonpath([os.path.dirname(each) for each in whole])  # noqa: PTH120 - a Path each would be slow
    sizes: list[int] = []
    for number, path in enumerate(whole):
        try:
            status = status_of(Path(path))
        except OSError as error:
            raise SourceError(f"{item_name(number, split)}: {printable(paths[number])}: {error.strerror}") from error
        if status is None:
            what = "is a URL; download it first" if "://" in paths[number] else "does not exist; correct its path"
            raise SourceError(f"{item_name(number, split)}: {printable(paths[number])} {what}")
        sizes.append(status.st_size)
    members = [each.removeprefix(root).lstrip("/") for each in whole]
    return _Images(FileStore(Path(root), members), labels, sizes=sizes, members=members)


def _read_all(source: Any, split: str, spool_folder: Path | None, notify: Callable[[str], None]) -> _Images:
    """Return images that can be read only once, or whose labels are not known before."""
    items = _iterate(source, split)
    try:
        image, label = next(items)
    except StopIteration:
        return _Images(FileStore(Path(), []), [])
    items = chain([(image, label)], items)
    if is_path(image):
        pairs = [(_path_of(each, number, split), label) for number, (each, label) in enumerate(items)]
        return _read_files([path for path, _ in pairs], [label for _, label in pairs], split)
    _check_first(image, item_name(0, split))
    notify(f"reading the images of {split} into a temporary file, because they can be read only in their order")
    labels: list[Any] = []

    def encoded() -> Iterator[bytes | str]:
        for number, (image, label) in enumerate(items):
            labels.append(label)
            where = item_name(number, split)
            try:
                yield encode_item(call_user(partial(detached, image), where), where)
            except (OSError, ValueError) as error:
                yield str(error)

    store = SpoolStore.filled(encoded(), spool_folder)
    return _Images(store, labels, store.offsets, store.sizes)


def _iterate(source: Any, split: str) -> Iterator[tuple[Any, Any]]:
    """Yield the image and the label of each item, in order."""
    # A data set with __getitem__ is iterated as its __len__ says.
    items = (source[number] for number in range(len(source))) if _is_map_style(source) else source
    end, number = object(), 0
    iterator = call_user(lambda: iter(items), split)
    while True:
        where = item_name(number, split)
        try:
            item = call_user(lambda: next(iterator, end), where)
        except SourceError as error:
            raise SourceError(f"{where}: {error}; leave it out, or give the paths of files") from error
        if item is end:
            return
        yield split_item(item, where)
        number += 1


def _members(names: Any, split: str, num_parts: int, num_images: int) -> list[str] | None:
    """Return the names of the images of a split if they are given."""
    if isinstance(names, Mapping):
        names = names.get(split)
    elif names is not None and num_parts > 1:
        raise SourceError(f"names must be a dict with the names of each split, got {type(names).__name__}")
    if names is None:
        return None
    members = [each.lstrip("/") if isinstance(each, str) else "" for each in names]
    if len(members) != num_images:
        raise SourceError(
            f"{split} has {quantity(num_images, 'image')} but {quantity(len(members), 'name')}; give each image one"
        )
    number = first_faulty(members)
    if number is not None:
        what = "is not a text with a letter in it" if not members[number] else "is that of an earlier image too"
        raise SourceError(
            f"{item_name(number, split)} has the name {list(names)[number]!r}, which {what}; give each image its own"
        )
    return members


def _check_files(members: Sequence[str] | None, split: str) -> None:
    """Raise SourceError if a file is given twice, whose name would be that of two images."""
    number = None if members is None else first_faulty([*members])
    if members is not None and number is not None:
        first = members.index(members[number])
        raise SourceError(
            f"{item_name(number, split)} is the file {printable(members[number])}, as item {first} is; give each file "
            "once (run-train --sampling draws some more often), or each item a name of its own with names="
        )


def _found_split(split: str, images: _Images, classes: tuple[ImageClass, ...], labels: list[int]) -> FoundSplit:
    listing = Listing(classes, keys="path")
    for number, label in enumerate(labels):
        # As in `samples` and `parquet`, so that a file of arrays and the arrays themselves are packed in one order.
        member = f"{number:08d}" if images.members is None else images.members[number]
        listing.add(
            _ITEM_FOLDER if images.members is None else "",
            member,
            label,
            0 if images.sizes is None else images.sizes[number],
            number if images.offsets is None else images.offsets[number],
        )
    return FoundSplit(split, classes, listing, images.store, notes=images.notes)
