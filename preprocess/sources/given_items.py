"""The images that a Python program gives, as the encoded files that the decoder reads: in place, or from a spool.

An *item* is an image and its label. Only one thread at a time calls the data set of the user, whose file handles are
often not thread-safe; decoding and resizing run in parallel.
"""

import io
import os
import threading
import weakref
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.regular_file import read_regular
from loopfeed.preprocess.sources.array_images import encode_array
from loopfeed.preprocess.sources.array_store import KEY_BYTES, image_key
from loopfeed.preprocess.sources.listing import MAX_FILE_BYTES, MAX_IMAGES, SourceError
from loopfeed.preprocess.sources.source_file import SourceFile
from loopfeed.preprocess.sources.spool import Spool
from loopfeed.preprocess.sources.tree import FolderStore

_CHANNELS = (1, 3, 4)
_ORIENTATION, _UPRIGHT = 0x0112, 1
_IMAGE_KEYS, _LABEL_KEYS = ("image", "img"), ("label", "labels")


class ItemError(Exception):
    """Carries an exception of the user's code past the handling of faulty images.

    Attributes:
        cause: the exception, with a note that names the item.
    """

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def call_user[Result](function: Callable[[], Result], where: str) -> Result:
    """Return what a function of the user returns.

    Raises:
        SourceError: within it, Pillow refused the bytes of a file.
        ItemError: it raised any other exception.
    """
    try:
        return function()
    except Exception as error:
        if _is_faulty_file(error):
            raise SourceError(f"its file cannot be decoded: {error}") from error
        error.add_note(f"(raised for {where} of the given data set)")
        raise ItemError(error) from error


def _is_faulty_file(error: Exception) -> bool:
    """Return whether Pillow raised an error because of the bytes of a file, within the user's code."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    module = "" if place is None else str(place.tb_frame.f_globals.get("__name__"))
    is_bytes = isinstance(error, OSError | ValueError | SyntaxError | Image.DecompressionBombError)
    return is_bytes and module.partition(".")[0] == "PIL" and not getattr(error, "errno", None)


def split_item(item: Any, where: str) -> tuple[Any, Any]:
    """Return the image and the label of an item: a pair, or a dict with "image" and "label".

    Raises:
        SourceError: it is neither.
    """
    if isinstance(item, dict):
        images, labels = ([key for key in keys if key in item] for keys in (_IMAGE_KEYS, _LABEL_KEYS))
        if images and labels:
            return item[images[0]], item[labels[0]]
        raise SourceError(
            f"{where} must have the keys image and label, got {', '.join(map(printable, item))}; rename its columns"
        )
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    found = f"{len(item)} values" if isinstance(item, tuple | list) else type(item).__name__
    raise SourceError(f"{where} must be (image, label), got {found}; return both, and nothing else")


def is_path(image: Any) -> bool:
    """Return whether an image is given as the path of its file."""
    return isinstance(image, str | os.PathLike)


def detached(image: Any) -> Any:
    """Return an image that no longer depends on the user's code, which may use memory or an open file again."""
    if isinstance(image, Image.Image):
        if not getattr(image, "filename", ""):
            image.load()
        return image
    return np.array(image) if hasattr(image, "__array__") else image


def encode_item(image: Any, where: str) -> bytes:
    """Return an image as a file: its bytes, those of its path, or the pixels of an array or of an image of Pillow.

    Pixels of Pillow are turned as their EXIF data say. An array with channels first is recognised.

    Args:
        image: as `detached` returns it.
        where: names it in messages.

    Raises:
        ValueError: it is none of these, or not an image.
        OSError: the file at the path cannot be read.
        ItemError: Pillow raised an exception that is not about the bytes of a file.
    """
    if isinstance(image, dict) and image.keys() == {"bytes", "path"}:  # of Hugging Face, not decoded
        image = image["path"] if image["bytes"] is None else image["bytes"]
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if isinstance(image, Image.Image):
        return call_user(partial(_encode_picture, image), where)
    if is_path(image):
        try:
            return read_regular(image, max_bytes=MAX_FILE_BYTES)
        except FileNotFoundError:
            raise SourceError(f"its file {printable(os.fspath(image))} does not exist") from None
    if hasattr(image, "__array__"):
        pixels: NDArray[Any] = np.asarray(image)
        return encode_array(pixels.transpose(1, 2, 0) if has_channels_first(pixels.shape) else pixels)
    raise SourceError(
        f"an image must be an array, an image of Pillow, a path or the bytes of a file, got {type(image).__name__}"
    )


def has_channels_first(shape: tuple[int, ...]) -> bool:
    """Return whether the shape of an image is ``[C, H, W]``; where ``[H, W, C]`` is possible, it is that."""
    return len(shape) == 3 and shape[0] in _CHANNELS and shape[2] not in _CHANNELS


def _encode_picture(image: Image.Image) -> bytes:
    try:
        orientation = image.getexif().get(_ORIENTATION, _UPRIGHT)
    except Exception:  # noqa: BLE001 - Pillow raises all kinds of exceptions for damaged EXIF data
        orientation = _UPRIGHT
    if orientation != _UPRIGHT:
        image = ImageOps.exif_transpose(image)
    if "transparency" in image.info or image.mode in ("PA", "LA", "La", "RGBa"):
        image = image.convert("RGBA")
    elif image.mode == "1":
        image = image.convert("L")
    elif image.mode in ("I", "F", "CMYK"):
        file = io.BytesIO()
        image.save(file, "TIFF")
        return file.getvalue()
    elif image.mode not in ("L", "RGB", "RGBA", "I;16"):
        image = image.convert("RGB")
    return encode_array(np.asarray(image))


class FileStore:
    """Images in files, by their paths below a folder."""

    def __init__(self, root: Path, paths: list[str]) -> None:
        self._folder, self._paths = FolderStore(root), paths

    def read(self, name: str, offset: int, size: int) -> bytes:  # noqa: ARG002 - names may be others than paths
        """Return the content of file `offset`; raise as `FolderStore.read`."""
        return self._folder.read(self._paths[offset], 0, size)

    def close(self) -> None:
        """Do nothing, because each file is closed as soon as it is read."""


class ItemStore:
    """Images that a function returns by their number, such as those of a data set with `__getitem__`.

    Args:
        get: returns an image.
        where: names an item in messages.
        sampled: the numbers of the images whose bytes identify the source.
    """

    def __init__(self, get: Callable[[int], Any], where: Callable[[int], str], sampled: range) -> None:
        self._get, self._where, self._sampled, self._lock = get, where, sampled, threading.Lock()

    def read(self, name: str, offset: int, size: int) -> bytes:  # noqa: ARG002 - an image is found by its number
        """Return image `offset` as a file.

        Raises:
            ItemError: the user's code raised an exception.
            ValueError: it has not returned an image.
        """
        where = self._where(offset)
        with self._lock:
            image = call_user(lambda: detached(self._get(offset)), where)
        return encode_item(image, where)

    def identity(self, offset: int) -> bytes:
        """Return what identifies image `offset` if it is one of the sampled ones and can be read, else nothing."""
        if offset not in self._sampled:
            return b""
        try:
            return image_key(self.read("", offset, 0))
        except (OSError, ValueError):
            return b"faulty"

    def close(self) -> None:
        """Do nothing: the data set is the user's."""


@dataclass
class SpoolStore:
    """Images that could be taken only one after another, in a temporary file.

    Attributes:
        file: the file.
        offsets, sizes: the place and the length of each image.
        keys: what identifies each, `KEY_BYTES` each.
        faults: why images cannot be read, by their offsets.
    """

    file: SourceFile
    offsets: "array[int]"
    sizes: "array[int]"
    keys: bytearray
    faults: dict[int, str]

    def __post_init__(self) -> None:
        # A split that is read for its classes alone, or before another is refused, is never opened.
        self._close = weakref.finalize(self, self.file.close)

    @classmethod
    def filled(cls, images: Iterable[bytes | str], folder: Path | None) -> Self:
        """Keep images, or why they cannot be read, in a temporary file in `folder`; None is that of temporary files.

        Raises:
            SourceError: the disk has no room for them, or there are more images than allowed.
        """
        offsets, sizes, keys, faults = array("q"), array("q"), bytearray(), dict[int, str]()
        what = "the images can be read only in their order, and all are kept until they are packed, in"
        with Spool(what, folder, remedy="choose a DEST on another disk, or end them (itertools.islice)") as spool:
            for each in images:
                if len(sizes) >= MAX_IMAGES:
                    raise SourceError(f"there are more than {MAX_IMAGES:,} images; end them with itertools.islice")
                if isinstance(each, str):
                    faults[spool.num_bytes] = each
                encoded = b"\0" if isinstance(each, str) else each
                offsets.append(spool.num_bytes)
                sizes.append(len(encoded))
                keys += image_key(encoded)
                spool.write(encoded)
            return cls(spool.finished(), offsets, sizes, keys, faults)

    def read(self, name: str, offset: int, size: int) -> bytes:  # noqa: ARG002 - an image is found by its place
        """Return the image at `offset`; raise ValueError if it cannot be read."""
        if offset in self.faults:
            raise SourceError(self.faults[offset])
        return self.file.read(offset, size)

    def identity(self, offset: int) -> bytes:
        """Return what identifies the bytes of the image at `offset`."""
        number = bisect_left(self.offsets, offset)
        return bytes(self.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES])

    def close(self) -> None:
        """Delete the file."""
        self._close()
