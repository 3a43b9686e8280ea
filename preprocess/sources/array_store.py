"""Images in arrays `[N, H, W]`, `[N, H, W, C]` or `[N, C, H, W]`, in memory, in a file, or in a library's object."""

import hashlib
import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopfeed.preprocess.sources.array_images import encode_array
from loopfeed.preprocess.sources.source_file import SourceFile

KEY_BYTES = 16


@dataclass(frozen=True)
class FileArray:
    """An array in a file, of which one image at a time is read.

    Attributes:
        file: the file.
        start: the offset of the first image, in bytes.
        stride: how many bytes are from one image to the next.
        shape: the shape of the array.
        dtype: the type of its values.
    """

    file: SourceFile
    start: int
    stride: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __getitem__(self, index: int) -> NDArray[Any]:
        num_bytes = int(np.prod(self.shape[1:], dtype=object)) * self.dtype.itemsize
        content = self.file.read_unchanged(self.start + index * self.stride, num_bytes)
        return np.frombuffer(content, self.dtype).reshape(self.shape[1:])


class ArrayStore:
    """Images in one or more arrays, whose offsets are their numbers over all of them.

    Args:
        arrays: each has a `shape`, and returns an image by its number.
        is_channels_first: whether their shape is `[N, C, H, W]`.
    """

    def __init__(self, arrays: Sequence[Any], *, is_channels_first: bool = False) -> None:
        self._arrays, self._is_channels_first = arrays, is_channels_first
        self._starts = [0, *accumulate(each.shape[0] for each in arrays)]
        self._lock = threading.Lock()

    def read(self, name: str, offset: int, size: int) -> bytes:  # noqa: ARG002 - an image is found by its number
        """Return image `offset` as a file; raise OSError if it is in a file that cannot be read or has changed."""
        place = bisect_right(self._starts, offset) - 1
        array, index = self._arrays[place], offset - self._starts[place]
        if isinstance(array, np.ndarray | FileArray):
            pixels: NDArray[Any] = array[index]
        else:
            with self._lock:  # a library such as HDF5's may have one cursor
                pixels = np.asarray(array[index])
        return encode_array(pixels.transpose(1, 2, 0) if self._is_channels_first else pixels)

    def identity(self, offset: int) -> bytes:
        """Return what identifies the pixels of image `offset`, whose size is that of any other."""
        return image_key(self.read("", offset, 0))

    def close(self) -> None:
        """Close the files; arrays in memory are the user's."""
        for each in self._arrays:
            if isinstance(each, FileArray):
                each.file.close()


def image_key(encoded: bytes) -> bytes:
    """Return what identifies an image by its bytes, of which 16 are enough to tell images of a source apart."""
    return hashlib.blake2b(encoded, digest_size=KEY_BYTES).digest()
