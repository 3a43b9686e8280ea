"""Reads IDX files, the form of MNIST, Fashion-MNIST and EMNIST: images and labels in a file each, often gzipped.

Format: http://yann.lecun.com/exdb/mnist/ (a magic number with type and dimensions, the dimensions, the values).
"""

import math
import re
import struct
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.sources.array_store import FileArray
from loopfeed.preprocess.sources.contents import GZIP_MAGIC, Content, file_content, gzip_content, head_of, load
from loopfeed.preprocess.sources.listing import Layout, SourceError
from loopfeed.preprocess.sources.samples import ArraySamples, check_images, class_numbers, samples_layout
from loopfeed.preprocess.sources.selection import split_of
from loopfeed.preprocess.sources.source_file import not_as_named

_NAME = re.compile(
    r"(?P<set>.*?)(?P<split>train|t10k|test|val|valid|validation)-(?P<role>images|labels)[-.]idx[134]-ubyte(\.gz)?"
)
_UINT8 = 8
_HEAD_BYTES = 4 + 4 * 4
_MAX_LABEL_BYTES = 2**28


def is_idx_name(name: str) -> bool:
    """Return whether a file has a name such as `train-images-idx3-ubyte.gz`."""
    return _NAME.fullmatch(name.lower()) is not None


def idx_layout(root: Path, files: Sequence[Path]) -> Layout:
    """Return the layout of pairs of IDX files; `t10k` is the split `test`.

    Raises:
        SourceError: a file of a pair is missing or damaged, or there are several data sets.
    """
    pairs: dict[str, dict[str, Path]] = {}
    sets: dict[str, None] = {}
    spellings: dict[str, str] = {}
    for path in sorted(files, key=lambda each: each.suffix != ".gz"):  # an unpacked file replaces its gzip file
        match = _NAME.fullmatch(path.name.lower())
        assert match is not None
        split = split_of(match["split"]) or "test"
        written = spellings.setdefault(split, match["split"])
        if written != match["split"]:
            raise SourceError(
                f"{printable(root)} has IDX files {match['split']}-… and {written}-… of the split {split}; keep one"
            )
        sets[f"{path.parent}/{match['set']}"] = None
        pairs.setdefault(split, {})[match["role"]] = path
    if len(sets) > 1:
        shown = " and ".join(printable(Path(each).name or ".") for each in list(sets)[:2])
        raise SourceError(
            f"{printable(root)} has the IDX files of several data sets, {shown}; move those of one to a folder"
        )
    splits = {split: _samples(root, split, pair) for split, pair in pairs.items()}
    names = " and ".join(pair["images"].name for pair in pairs.values())
    return samples_layout(f"IDX files {names}, with their labels", root, splits)


def _samples(root: Path, split: str, pair: dict[str, Path]) -> ArraySamples:
    for role in ("images", "labels"):
        if role not in pair:
            (found,) = pair.values()
            raise SourceError(
                f"{printable(root)} has {printable(found.name)}, but no file of {role} for {split}; download it too"
            )
    images, labels = _content(pair["images"]), _content(pair["labels"])
    shape, start = _header(images)
    label_shape, label_start = _header(labels)
    if len(label_shape) != 1:
        raise SourceError(f"{printable(labels.where)} has {len(label_shape)} dimensions, so it is no file of labels")
    check_images(shape, np.dtype(np.uint8), images.where)
    raw = load(labels, _MAX_LABEL_BYTES)[label_start:]
    if len(raw) != label_shape[0]:
        raise SourceError(
            f"{printable(labels.where)} declares {label_shape[0]} labels, but has {len(raw)}; download it again"
        )
    ids, numbers = class_numbers(np.frombuffer(raw, np.uint8), labels.where, shape[0])
    places = [(pair["images"].name, shape[0])]
    return ArraySamples(places, math.prod(shape[1:]), ids, numbers, [partial(_open, images, shape, start)])


def _open(images: Content, shape: tuple[int, ...], start: int) -> FileArray:
    file, offset = images.open(start + math.prod(shape))
    return FileArray(file, offset + start, math.prod(shape[1:]), shape, np.dtype(np.uint8))


def _content(path: Path) -> Content:
    is_packed = head_of(file_content(path), len(GZIP_MAGIC)) == GZIP_MAGIC
    return gzip_content(path) if is_packed else file_content(path)


def _header(content: Content) -> tuple[tuple[int, ...], int]:
    """Return the shape of an IDX file, and the offset of its values."""
    head = head_of(content, _HEAD_BYTES)
    if len(head) < 8 or head[:2] != b"\0\0" or head[3] not in (1, 3, 4):
        raise not_as_named(Path(content.where), head, "an IDX file")
    if head[2] != _UINT8:
        raise SourceError(f"{printable(content.where)} has values of the IDX type {head[2]:#x}; save it as uint8 (0x8)")
    start = 4 + 4 * head[3]
    if len(head) < start:
        raise SourceError(f"{printable(content.where)} is truncated: it ends within its header; download it again")
    return struct.unpack_from(f">{head[3]}I", head, 4), start
