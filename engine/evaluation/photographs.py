"""Photographs to classify: the files that were asked for, decoded as packing does, and images in memory.

Owns which files of a folder are photographs. Must not know: models, programs.
"""

import os
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL.Image import Image
from PIL.ImageOps import exif_transpose

from loopfeed.engine.feed.batches import Pixels
from loopfeed.preprocess.decoding.decode import ResizeRule, decode_stored
from loopfeed.preprocess.decoding.memory_budget import file_budget, pixel_budget
from loopfeed.preprocess.extents import Whole
from loopfeed.preprocess.pixels import pack_rgb
from loopfeed.preprocess.regular_file import read_regular
from loopfeed.preprocess.shards.manifest import MANIFEST_KEY
from loopfeed.preprocess.sources.array_images import encode_array
from loopfeed.preprocess.sources.selection import IMAGE_SUFFIXES, is_image_name
from loopfeed.preprocess.system_entries import count_ignored, describe_ignored, is_hidden
from loopfeed.preprocess.system_errors import error_text, reading_remedy, status_of

_MOST_FILE_BYTES = 1 << 30
# The modes of Pillow whose arrays are images; others are converted.
_ARRAY_MODES = ("L", "RGB", "RGBA", "I;16")
_WIDE_MODES = ("I", "F")


def list_photographs(paths: Collection[str | os.PathLike[str]], notify: Callable[[str], None]) -> tuple[str, ...]:
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
        pack = next((path for path in map(Path, paths) if any(path.glob(f"*/{MANIFEST_KEY}"))), None)
        remedy = "" if pack is None else f": {pack} is a pack, which `run-eval RUN --data {pack}` evaluates"
        raise ValueError(
            f"IMAGES must contain images ({', '.join(sorted(IMAGE_SUFFIXES))}), but no file is one{remedy}"
        )
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


class Geometry(NamedTuple):
    """The size of images as they are decoded, before the crop that a network receives.

    Attributes:
        height, width: in pixels.
        whole: the geometry of whole pictures, None for images that fill their pixels.
    """

    height: int
    width: int
    whole: Whole | None = None


class PhotographDecoder:
    """Decodes photographs as packing does, on any thread, with a limit for the memory of all that are being decoded.

    Args:
        rule: how they are resized and cropped.
        timeout_s: how long an image may wait for memory, in seconds.
    """

    def __init__(self, rule: ResizeRule, timeout_s: float) -> None:
        self._rule = rule
        self.geometry = Geometry(*rule.stored_shape, rule.whole)
        self._pixels, self._bytes = pixel_budget(timeout_s), file_budget(timeout_s)

    def decode(self, photograph: Any) -> tuple[Pixels, int]:
        """Return a photograph's packed pixels, uint32 [H, W], and the word of its place, 0 if it fills them.

        Args:
            photograph: a path, the bytes of a file, a `PIL.Image.Image`, or an array as
                `loopfeed.preprocess.sources.array_images.encode_array` takes it.

        Raises:
            OSError, ValueError: it cannot be read or decoded.
        """
        if isinstance(photograph, str | os.PathLike):
            with self._bytes.held(2 * Path(photograph).stat().st_size):
                encoded = read_regular(photograph, max_bytes=_MOST_FILE_BYTES)
                image, extent = decode_stored(encoded, self._rule, budget=self._pixels)
        else:
            image, extent = decode_stored(_encode(photograph), self._rule, budget=self._pixels)
        return pack_rgb(np.asarray(image)), 0 if extent is None else extent.to_word()


def _encode(image: Any) -> bytes:
    """Return the bytes of a file with the pixels of an image in memory, which decode as those of its own file do."""
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    try:
        return encode_array(np.asarray(_with_pixels_of_file(image) if isinstance(image, Image) else image))
    except (MemoryError, OSError, ValueError):
        raise
    except Exception as error:  # Pillow reads the file only here, and raises all kinds of exceptions for a damaged one
        raise ValueError(error_text(error)) from error


def _with_pixels_of_file(image: Image) -> Image:
    """Return an upright image of a mode whose array is an image, with its transparency."""
    if image.mode in _WIDE_MODES:
        raise ValueError(
            f"an image of Pillow's mode {image.mode} does not say which values are black and white: convert it to L "
            "(8 bits) or I;16 (16 bits)"
        )
    upright = exif_transpose(image)
    if upright.mode == "La":
        upright = upright.convert("LA")
    if upright.has_transparency_data and upright.mode != "I;16":
        return upright.convert("RGBA")
    return upright if upright.mode in _ARRAY_MODES else upright.convert("RGB")


def pack_arrays(images: Any) -> Pixels:
    """Return images in memory as packed pixels, uint32 [N, H, W].

    Raises:
        ValueError: they are no array uint8 [N, H, W, 3], or there are none.
    """
    images = np.asarray(images)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3 or not images.size:
        raise ValueError(
            f"images must be paths or an array uint8 [N, H, W, 3] of RGB, got {images.dtype} "
            f"{list(images.shape)}: convert them"
        )
    return pack_rgb(images)
