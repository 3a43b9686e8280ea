"""Reads CIFAR-10 and CIFAR-100 as their authors publish them: the binary files, and the pickles of the Python version.

An image is 3,072 bytes: red, green and blue, 32 rows of 32 pixels each. CIFAR-100's classes are the 100 fine ones.
Format: https://www.cs.toronto.edu/~kriz/cifar.html.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.sources.array_store import FileArray
from loopfeed.preprocess.sources.contents import file_content, load
from loopfeed.preprocess.sources.listing import Layout, SourceError
from loopfeed.preprocess.sources.plain_pickle import UnsafePickleError, load_plain
from loopfeed.preprocess.sources.samples import ArraySamples, class_numbers, samples_layout
from loopfeed.preprocess.sources.source_file import not_as_named

_SHAPE, _IMAGE_BYTES = (3, 32, 32), 3 * 32 * 32
_BINARY = re.compile(r"(?:data_batch_\d+|(?P<test>test_batch))\.bin|(?P<fine>train|(?P<fine_test>test))\.bin")
_PICKLED = re.compile(r"data_batch_\d+|(?P<test>test_batch)|train|(?P<fine_test>test)")
_NAMES = ("batches.meta.txt", "fine_label_names.txt", "batches.meta", "meta")
_MAX_NAMES_BYTES, _MAX_BATCH_BYTES = 2**20, 2**30
_PICKLE_MAGIC = b"\x80"

type _Part = tuple[str, int, list[int], Callable[[], FileArray | np.ndarray]]  # place, number, labels, opener


def is_cifar_name(name: str) -> bool:
    """Return whether a file has the name of one of CIFAR's batches."""
    return _BINARY.fullmatch(name) is not None or _PICKLED.fullmatch(name) is not None


def cifar_layout(root: Path, files: Sequence[Path]) -> Layout:  # noqa: ARG001 - the files are in one folder of it
    """Return the layout of a folder of CIFAR's files; its test batch is the split `test`.

    Raises:
        SourceError: a file is truncated, contains anything but plain values, or has a label out of range.
    """
    folder = files[0].parent
    is_binary = files[0].suffix == ".bin"
    names = _class_names(folder)
    parts: dict[str, list[_Part]] = {}
    if len({"batch" in path.name for path in files}) > 1:
        raise SourceError(f"{printable(folder)} has the files of both CIFAR-10 and CIFAR-100; keep those of one")
    for path in files:
        match = (_BINARY if is_binary else _PICKLED).fullmatch(path.name)
        if match is None:
            raise SourceError(
                f"{printable(folder)} has both the binary and the Python version of CIFAR; keep the files of one"
            )
        groups = match.groupdict()
        split = "test" if groups.get("test") or groups.get("fine_test") else "train"
        part = _binary_part(path, 2 if groups.get("fine") else 1) if is_binary else _pickled_part(path)
        parts.setdefault(split, []).append(part)
    splits = {split: _samples(found, names) for split, found in parts.items()}
    form = "binary files" if is_binary else "pickled files"
    description = f"CIFAR's {form} {', '.join(path.name for path in files)}"
    return samples_layout(
        description, folder, splits, None if names is None else {str(number): name for number, name in enumerate(names)}
    )


def _samples(parts: list[_Part], names: list[str] | None) -> ArraySamples:
    values = np.array([label for part in parts for label in part[2]], np.int64)
    places = [(place, count) for place, count, _, _ in parts]
    where = " and ".join(dict.fromkeys(place for place, _ in places))
    ids, labels = class_numbers(values, where, sum(count for _, count in places), None if names is None else len(names))
    return ArraySamples(places, _IMAGE_BYTES, ids, labels, [part[3] for part in parts], is_channels_first=True)


def _binary_part(path: Path, num_labels: int) -> _Part:
    content = load(file_content(path), _MAX_BATCH_BYTES)
    stride = num_labels + _IMAGE_BYTES
    if not content or len(content) % stride:
        head = content[:512]
        if len(content) < stride or not len(content) % (3 + _IMAGE_BYTES - num_labels):
            raise not_as_named(path, head, f"CIFAR's binary file of {stride} bytes an image")
        raise SourceError(
            f"{printable(path)} is truncated: its {len(content)} bytes are no multiple of the {stride} of an image; "
            "download it again"
        )
    labels = list(content[num_labels - 1 :: stride])
    return path.name, len(labels), labels, partial(_open_binary, path, stride, num_labels, len(content))


def _open_binary(path: Path, stride: int, num_labels: int, num_bytes: int) -> FileArray:
    file, start = file_content(path).open(num_bytes)
    return FileArray(file, start + num_labels, stride, (num_bytes // stride, *_SHAPE), np.dtype(np.uint8))


def _load_pickle(path: Path) -> dict[str, Any]:
    content = load(file_content(path), _MAX_BATCH_BYTES)
    if not content.startswith((_PICKLE_MAGIC, b"(")):
        raise not_as_named(path, content[:512], "a pickle of CIFAR's Python version")
    try:
        found = load_plain(content)
    except UnsafePickleError as error:
        raise SourceError(
            f"{printable(path)} is not one of CIFAR's pickles: {error}; download it again, and never load such a file "
            "with pickle"
        ) from error
    if not isinstance(found, dict):
        raise SourceError(f"{printable(path)} is not one of CIFAR's pickles: it contains no dict; download it again")
    return {
        key.decode("latin-1") if isinstance(key, bytes) else key: value
        for key, value in found.items()
        if isinstance(key, str | bytes)
    }


def _pickled_part(path: Path) -> _Part:
    found = _load_pickle(path)
    data, labels = found.get("data"), found.get("fine_labels", found.get("labels"))
    if isinstance(labels, np.ndarray):
        labels = labels.reshape(-1).tolist()
    if not isinstance(data, np.ndarray) or not isinstance(labels, list):
        raise SourceError(f"{printable(path)} has no data and labels; download CIFAR's Python version again")
    if data.dtype != np.uint8 or data.shape[1:] not in ((_IMAGE_BYTES,), _SHAPE):
        raise SourceError(f"{printable(path)} has data of {data.dtype} {list(data.shape)}; expected uint8 [N, 3072]")
    if len(labels) != len(data) or not all(type(each) is int for each in labels):
        raise SourceError(
            f"{printable(path)} has {len(labels)} labels for {len(data)} images; each image needs one number"
        )
    if not all(-(2**63) <= each < 2**63 for each in labels):
        raise SourceError(f"{printable(path)} has a label of more than 64 bits; download it again")
    return path.name, len(labels), labels, partial(data.reshape, len(data), *_SHAPE)


def _class_names(folder: Path) -> list[str] | None:
    """Return the names of the classes in order, from the file that CIFAR has for them; None without one."""
    path = next((folder / name for name in _NAMES if (folder / name).is_file()), None)
    if path is None:
        return None
    if path.suffix == ".txt":
        text = load(file_content(path), _MAX_NAMES_BYTES).decode("utf-8", "replace")
        return [line.strip() for line in text.splitlines() if line.strip()]
    found = _load_pickle(path)
    names = found.get("fine_label_names", found.get("label_names"))
    if not isinstance(names, list) or not names or not all(isinstance(each, str | bytes) for each in names):
        raise SourceError(f"{printable(path)} has no names of classes; download it again")
    return [each.decode("utf-8", "replace") if isinstance(each, bytes) else each for each in names]
