"""What data sets of other libraries know without decoding an image: files, columns, labels and the names of classes.

Knows Hugging Face's `datasets` and torchvision by the attributes that their data sets have, and imports neither.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.shards.classes import ImageClass
from loopfeed.preprocess.sources.given_items import call_user, is_path, split_item
from loopfeed.preprocess.sources.listing import SourceError

NUM_SAMPLED = 16
"""How many images of a data set are read to identify it, and to see whether its list of labels is that of its items."""


@dataclass(frozen=True)
class Columns:
    """The images of a data set, by their numbers, and their labels.

    Attributes:
        images: has `__len__` and `__getitem__`.
        labels: whole numbers or names.
        is_sampled: whether a few of the images identify the data set, because all others would have to be decoded.
    """

    images: Any
    labels: list[Any]
    is_sampled: bool = False


@dataclass(frozen=True)
class _Column:
    """One column of a data set."""

    items: Any
    get: Callable[[Any], Any]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.get(self.items[index])


def sampled(num_images: int) -> range:
    """Return the numbers of a few images, spread evenly."""
    return range(0, num_images, max(1, -(-num_images // NUM_SAMPLED)))


def known_columns(source: Any, where: Callable[[int], str]) -> Columns | None:
    """Return the columns of a map-style data set; None if its labels are not known without decoding its images.

    Args:
        source: has `__len__` and `__getitem__`.
        where: names an item in messages.

    Raises:
        SourceError: its items or columns are not images with labels.
        ItemError: its code raised an exception.
    """
    if isinstance(source, list | tuple):
        pairs = [split_item(each, where(number)) for number, each in enumerate(source)]
        return Columns([image for image, _ in pairs], [label for _, label in pairs])
    if _is_table(source):
        return _columns_of_table(source)
    if (files := _files_of(source)) is not None:
        return Columns([path for path, _ in files], [label for _, label in files])
    if (labels := _labels_of(source)) is None:
        return None
    for number in sampled(len(labels)):
        item = call_user(partial(source.__getitem__, number), where(number))
        if not _is_same(split_item(item, where(number))[1], labels[number]):
            return None  # its items have other labels than its list
    return Columns(_Column(source, lambda item: split_item(item, "an item")[0]), labels, is_sampled=True)


def known_classes(source: Any) -> tuple[ImageClass, ...] | None:
    """Return the classes that a data set knows, in the order of its labels; None if it knows none."""
    if isinstance(source, list | tuple):
        return None
    if _is_table(source):
        names = getattr(source.features[_label_column(source)], "names", None)
    else:
        names = getattr(source, "classes", None)
        if names is None and hasattr(source, "indices"):
            return known_classes(getattr(source, "dataset", None))
    if not isinstance(names, Sequence) or isinstance(names, str) or not names:
        return None
    readable = [each if isinstance(each, str) else ", ".join(map(str, each)) for each in names]
    ids = getattr(source, "wnids", readable)  # torchvision's ImageNet
    return tuple(ImageClass(each, name) for each, name in zip(ids, readable, strict=True))


def _is_table(source: Any) -> bool:
    """Return whether a data set is one of Hugging Face, in memory or streamed, whose columns are known."""
    return isinstance(getattr(source, "features", None), dict) and hasattr(source, "select_columns")


def _is_same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (RuntimeError, TypeError, ValueError):
        return False


def _columns_of_table(source: Any) -> Columns | None:
    """Return the columns of a data set of Hugging Face; None if a function of the user makes its items."""
    if source.format["type"] == "custom":
        return None
    plain, label = source.with_format(None), _label_column(source)
    images = [name for name, each in source.features.items() if type(each).__name__ == "Image"]
    if len(images) != 1:
        found = ", ".join(map(printable, source.column_names))
        raise SourceError(
            f"a data set must have one column of images, but this one has {len(images)} among its columns {found}; "
            "choose one with select_columns([image, label]), or make one with cast_column(name, datasets.Image())"
        )
    # The bytes of the files: decoding them is the packer's, in several threads.
    files = plain.select_columns(images).cast_column(images[0], type(source.features[images[0]])(decode=False))
    return Columns(_Column(files, lambda item: item[images[0]]), list(plain[label]), is_sampled=True)


def _label_column(source: Any) -> str:
    """Return the name of the column of labels: the only one with names of classes, else "label"."""
    with_names = [name for name, each in source.features.items() if hasattr(each, "names")]
    if len(with_names) == 1:
        return str(with_names[0])
    if "label" in source.features:
        return "label"
    found = ", ".join(map(printable, source.column_names))
    raise SourceError(
        f"a data set must have a column label, but this one has the columns {found}; rename the one that is meant with "
        'rename_column(name, "label")'
    )


def _files_of(source: Any) -> list[tuple[Any, Any]] | None:
    """Return the files and labels of torchvision's ImageFolder, or of a part of it, if it does not change them."""
    if (part := _part_of(source)) is not None:
        inner = _files_of(part[0])
        return None if inner is None else [inner[index] for index in part[1]]
    files = getattr(source, "samples", None)
    changes = (getattr(source, name, None) for name in ("transform", "target_transform", "transforms"))
    is_plain = getattr(getattr(source, "loader", None), "__name__", "") == "default_loader"
    if not is_plain or not isinstance(files, list) or any(each is not None for each in changes):
        return None
    is_pairs = all(isinstance(each, tuple) and len(each) == 2 and is_path(each[0]) for each in files)
    return files if is_pairs and len(files) == len(source) else None


def _labels_of(source: Any) -> list[Any] | None:
    """Return the labels that a data set of torchvision, or a part of one, keeps in a list."""
    if (part := _part_of(source)) is not None:
        inner = _labels_of(part[0])
        return None if inner is None else [inner[index] for index in part[1]]
    for name in ("targets", "labels", "_labels"):
        found = getattr(source, name, None)
        if found is None or not hasattr(found, "__len__") or len(found) != len(source):
            continue
        column = np.asarray(found)
        if column.ndim == 2 and column.shape[1] == 1:
            column = column[:, 0]
        if column.ndim == 1 and column.dtype.kind in "iuU":
            return list(column.tolist())
    return None


def _part_of(source: Any) -> tuple[Any, list[int]] | None:
    """Return the data set and the numbers of the items of PyTorch's Subset; None for any other data set."""
    if type(source).__name__ != "Subset" or not hasattr(source, "dataset") or not hasattr(source, "indices"):
        return None
    return source.dataset, [int(each) for each in source.indices]
