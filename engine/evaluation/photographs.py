"""Photographs to classify: the files that were asked for, decoded as packing does, and images in memory.

Owns which files of a folder are photographs, and the batches. Must not know: models, programs.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL.Image import Image

from loopfeed.engine.feed.batches import PADDING_LABEL, Labels, Pixels
from loopfeed.preprocess.decoding.decode import ResizeRule, decode_stored
from loopfeed.preprocess.decoding.memory_budget import file_budget, pixel_budget
from loopfeed.preprocess.extents import Extent
from loopfeed.preprocess.pixels import pack_rgb
from loopfeed.preprocess.regular_file import read_regular
from loopfeed.preprocess.sources.selection import IMAGE_SUFFIXES, is_image_name
from loopfeed.preprocess.system_entries import count_ignored, describe_ignored, is_hidden
from loopfeed.preprocess.system_errors import error_text, reading_remedy, status_of

_MOST_FILE_BYTES = 1 << 30
_ANY_CLASS = 0


def list_photographs(paths: Iterable[str | os.PathLike[str]], notify: Callable[[str], None]) -> tuple[str, ...]:
    """Return the files to classify: each given file, and the image files in each given folder and below it.

    A folder's files are sorted by path. Hidden files and those of systems and file servers, files whose suffix is not
    that of an image, and links to folders are left out; what was left out is counted, in one line each.

    Raises:
        ValueError: if a path does not exist, a folder cannot be listed, or there are no files.
    """
    found: list[str] = []
    for given in paths:
        path = os.fspath(given)
        if status_of(path) is None and not Path(path).is_symlink():
            raise ValueError(f"IMAGES must be files and folders, but {path} does not exist: check the path")
        found += _files_below(path, notify) if Path(path).is_dir() else [path]
    if not found:
        raise ValueError(f"IMAGES must contain images ({', '.join(sorted(IMAGE_SUFFIXES))}), but no file is one")
    return tuple(found)


def _files_below(folder: str, notify: Callable[[str], None]) -> list[str]:
    def refuse(error: OSError) -> None:
        remedy = reading_remedy(error, "check the path")
        raise ValueError(f"{error.filename} cannot be listed ({error.strerror}): {remedy}") from error

    files: list[str] = []
    num_others, ignored = 0, Counter[str]()
    for inner, folders, names in os.walk(folder, onerror=refuse):
        for name in filter(is_hidden, (*folders, *names)):
            count_ignored(name, ignored)
        folders[:] = [name for name in folders if not is_hidden(name)]
        for name in names:
            if is_hidden(name):
                continue
            if is_image_name(name):
                files.append(os.path.join(inner, name))  # noqa: PTH118 - keeps "./" as it was given
            else:
                num_others += 1
    if (line := describe_ignored(ignored)) is not None:
        notify(f"{folder}: {line}")
    if num_others:
        notify(f"{folder}: {num_others:,} file{'s' * (num_others > 1)} left out, whose names are not those of images")
    return sorted(files, key=os.fsencode)


class PhotographBatches:
    """Batches of photographs, decoded as they are read; a photograph that cannot be decoded becomes a padding row.

    Args:
        files: the photographs.
        rule: how they are resized and cropped.
        batch: images per batch.
        timeout_s: how long an image may wait for memory, in seconds.

    Attributes:
        failures: the reason for each photograph that cannot be decoded, by its index, complete after the last batch.
    """

    thread_safe = True

    def __init__(self, files: Sequence[str], rule: ResizeRule, *, batch: int, timeout_s: float) -> None:
        self._files, self._rule = files, rule
        self.batch, self.whole = batch, rule.whole
        self.height, self.width = rule.stored_shape
        self.num_batches = -(-len(files) // batch)
        self.failures: dict[int, str] = {}
        self._pixels, self._bytes = pixel_budget(timeout_s), file_budget(timeout_s)

    def fill(self, batch_index: int, rows: range, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:  # noqa: ARG002
        """Decode the photographs of a batch; their label is 0, and that of padding rows is PADDING_LABEL."""
        pixels[...], labels[...] = 0, PADDING_LABEL
        if self.whole:
            labels[:, 0] = Extent(self.height, self.width, is_transposed=False).to_word()
        start = batch_index % self.num_batches * self.batch + rows.start
        for row, index in enumerate(range(start, min(start + len(rows), len(self._files)))):
            if (decoded := self._decode(index)) is None:
                continue
            image, extent = decoded
            pixels[row] = pack_rgb(np.asarray(image))
            labels[row] = _ANY_CLASS if extent is None else (extent.to_word(), _ANY_CLASS)

    def _decode(self, index: int) -> tuple[Image, Extent | None] | None:
        path = self._files[index]
        try:
            with self._bytes.held(2 * Path(path).stat().st_size):
                encoded = read_regular(path, max_bytes=_MOST_FILE_BYTES)
                return decode_stored(encoded, self._rule, budget=self._pixels)
        except (OSError, ValueError) as error:
            self.failures[index] = error_text(error)
            return None


class RgbBatches:
    """Batches of images in memory.

    Args:
        images: uint8 [N, H, W, 3], RGB.
        batch: images per batch.

    Raises:
        ValueError: if the array has another shape or dtype, or is empty.
    """

    thread_safe = True

    def __init__(self, images: Any, *, batch: int) -> None:
        images = np.asarray(images)
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3 or not images.size:
            raise ValueError(
                f"images must be paths or an array uint8 [N, H, W, 3] of RGB, got {images.dtype} "
                f"{list(images.shape)}: convert them"
            )
        self._images = images
        self.batch, self.height, self.width = batch, images.shape[1], images.shape[2]
        self.num_batches = -(-len(images) // batch)
        self.failures: dict[int, str] = {}

    def fill(self, batch_index: int, rows: range, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:  # noqa: ARG002
        """Pack the images of a batch; padding rows are black and have PADDING_LABEL."""
        start = batch_index % self.num_batches * self.batch + rows.start
        packed = pack_rgb(self._images[start : start + len(rows)])
        pixels[: len(packed)], pixels[len(packed) :] = packed, 0
        labels[: len(packed)], labels[len(packed) :] = _ANY_CLASS, PADDING_LABEL
