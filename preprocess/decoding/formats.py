"""Decodes image files with Pillow, ignoring all metadata except the orientation and the range of deep values.

The format of a file is determined by its first bytes, not by its name.

`Image.open` is deliberately not used. It tries every Pillow plugin (including PostScript, with Ghostscript), and it
reads metadata that training does not need, with a warning for each damaged field; `warnings.catch_warnings` cannot
suppress such a warning in one thread without affecting all others. Therefore the metadata of JPEG and PNG files are
removed before decoding, and only the two rare formats whose plugins can still warn are opened one at a time.
"""

import ctypes
import io
import math
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

from PIL import Image, ImageFile, _imaging
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TiffImagePlugin import TiffImageFile

from loopfeed.preprocess.decoding.box_formats import (
    AVIF,
    HEIC,
    JPEG_2000,
    JPEG_XL,
    has_deep_avif,
    has_deep_heic,
    with_values_of_file,
)
from loopfeed.preprocess.decoding.colour import DeepValues
from loopfeed.preprocess.decoding.depth import (
    check_alpha,
    correct_samples,
    needs_low_bytes,
    read_low_bytes,
    values_of_file,
)
from loopfeed.preprocess.decoding.format_bounds import bounded, check_jpeg_scans
from loopfeed.preprocess.decoding.hidden_size import MOST_PIXELS, hidden_pixels
from loopfeed.preprocess.decoding.jpeg_xl import claimed_size, transcode_jpeg_xl
from loopfeed.preprocess.decoding.known_formats import FORMATS, Format
from loopfeed.preprocess.decoding.levels import Levels
from loopfeed.preprocess.decoding.notes import DecodeNotes
from loopfeed.preprocess.decoding.orientation import choose_orientation
from loopfeed.preprocess.decoding.stripping import png_depth_and_colour, split_jpeg, split_png
from loopfeed.preprocess.decoding.truncation import Load, is_cut, load_part, salvage

_PNG_GREY = 0


_WARNING_LOCK = threading.Lock()


@contextmanager
def _pillow_warnings_off() -> Iterator[None]:
    # The list of warning filters is global to the process, so only one thread at a time may replace it.
    with _WARNING_LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@cache
def _silence_libtiff() -> None:
    """Keep libtiff, from the first TIFF on, from writing its errors to stderr: Pillow raises them with the file's name.

    Pillow silences its warnings in the same way. Where libtiff's symbols are not exported, its lines appear.
    """
    with suppress(OSError, AttributeError):
        set_handler = ctypes.CDLL(_imaging.__file__).TIFFSetErrorHandler
        set_handler.argtypes, set_handler.restype = [ctypes.c_void_p], ctypes.c_void_p
        set_handler(None)


class OpenedImage(NamedTuple):
    """A decoded image: its pixels, the orientation (1 to 8) to apply, and what is known of values of over 8 bits."""

    image: Image.Image
    orientation: int
    deep: DeepValues | None


def open_pixels(
    encoded: bytes,
    known: Format,
    *,
    max_pixels: int,
    admit: Callable[[int], None] = lambda _: None,
    levels: Levels | None = None,
    keep_truncated: bool = False,
    note: Callable[[DecodeNotes], None] = lambda _: None,
) -> OpenedImage:
    """Decode the first frame of an image, keeping the colour mode of the file.

    Args:
        encoded: the file's bytes.
        known: the result of `sniff`.
        max_pixels: the largest number of pixels allowed, checked before they are decoded.
        admit: called with the number of pixels before they are decoded; returns when there is memory for them.
        levels: the values of an image of more than 8 bits that will become black and white, if they are given.
        keep_truncated: whether what is there of a truncated file is returned.
        note: called with what a pack should say about the image.

    Raises:
        ValueError: the image is too large, truncated, or has more parts than allowed.
        Exception: Pillow's error about damaged bytes.
    """
    name = known.name
    if name == JPEG_XL:
        admit(math.prod(claimed_size(encoded, max_pixels)) * known.memory)
        note(DecodeNotes(added_in=known.added_in))
        content = transcode_jpeg_xl(encoded)
        inner = next(each for each in FORMATS if each.accepts(content))
        return open_pixels(content, inner, max_pixels=max_pixels, levels=levels, note=note)
    reader = _Reader(known, max_pixels, admit)
    load: Load = reader.load
    try:
        content, exif, xmp, is_turned_anew = _without_metadata(encoded, name, max_pixels, levels)
        image: Image.Image = reader.load(content)
    except Exception as error:
        if isinstance(error, MemoryError) or not is_cut(error, encoded, name):
            raise
        content, exif, xmp, is_turned_anew = _without_metadata(encoded, name, max_pixels, levels, is_cut=True)
        image = _salvaged(content, name, reader, error, note, keep=keep_truncated)
        load = partial(load_part, reader.load)
    if name == "PNG":
        _scale_transparent_grey(image, encoded)
    if name in (AVIF, HEIC, JPEG_2000):
        image = _with_depth_of_file(image, encoded, name, levels)
    if name in ("WebP", "GIF", AVIF):
        exif, xmp = image.info.get("exif"), image.info.get("xmp")
        is_turned_anew = xmp is not None and _differ(exif, xmp, exif)
    if is_turned_anew or reader.is_corrected:
        note(DecodeNotes(num_changed=1))
    if known.added_in > 1:
        note(DecodeNotes(added_in=known.added_in))
    deep = None if name == "PPM" and levels is not None else values_of_file(encoded, name, image)
    if deep is not None and name != "PPM" and needs_low_bytes(image, levels, deep.white):
        deep = replace(deep, low_bytes=read_low_bytes(content, load))
    # Pillow applies the orientation of a TIFF itself.
    return OpenedImage(image, choose_orientation(exif, xmp), deep)


def header_size(encoded: bytes, known: Format, *, max_pixels: int) -> tuple[int, int]:
    """Return the width and height of an image, before it is turned, without decoding it.

    Raises:
        ValueError: the file exceeds a bound.
        Exception: Pillow's error about damaged bytes.
    """
    if known.name == JPEG_XL:
        return claimed_size(encoded, max_pixels)
    content, *_ = _without_metadata(encoded, known.name, max_pixels, None)
    with _pillow_warnings_off() if known.may_warn else nullcontext():
        width, height = known.opener(io.BytesIO(content)).size
    return width, height


def _with_depth_of_file(image: Image.Image, encoded: bytes, name: str, levels: Levels | None) -> Image.Image:
    """Return an image of boxes with the values that its file has.

    Raises:
        ValueError: the levels are those of values that Pillow does not give.
    """
    if name == JPEG_2000:
        return with_values_of_file(image, encoded)
    if levels is not None and (has_deep_avif(encoded) if name == AVIF else has_deep_heic(encoded)):
        raise ValueError("--levels cannot be applied to its 10 or 12 bits, of which Pillow gives 8; convert it to PNG")
    return image


def _without_metadata(
    encoded: bytes, name: str, max_pixels: int, levels: Levels | None, *, is_cut: bool = False
) -> tuple[bytes, bytes | None, bytes | None, bool]:
    """Return a file for Pillow, the EXIF data and the XMP packet, and whether earlier versions turned it otherwise."""
    if name == "JPEG":
        content, exif, xmp = split_jpeg(encoded)
        return content, exif, xmp, xmp is not None and _differ(exif, xmp, exif)
    if name == "PNG":
        content, chunk, raw, xmp = split_png(encoded, is_cut=is_cut)
        exif = raw if chunk is None else chunk
        return content, exif, xmp, (exif is not chunk or xmp is not None) and _differ(exif, xmp, chunk)
    return bounded(encoded, name, max_pixels=max_pixels, levels=levels), None, None, False


def _differ(exif: bytes | None, xmp: bytes | None, exif_before: bytes | None) -> bool:
    """Return whether an image is turned in another way than by its EXIF data alone, as in earlier versions."""
    return choose_orientation(exif, xmp) != choose_orientation(exif_before, None)


class _Reader:
    """Opens and decodes files of one format, asking for memory only for the first."""

    def __init__(self, known: Format, max_pixels: int, admit: Callable[[int], None]) -> None:
        self._known, self._max_pixels, self._admit = known, max_pixels, admit
        self._is_admitted = False
        self.is_corrected = False

    def load(
        self, content: bytes, prepare: Callable[[ImageFile.ImageFile], None] = lambda _: None
    ) -> ImageFile.ImageFile:
        """Decode a file; ``prepare`` is called with the opened image before it is decoded."""
        quietly = _pillow_warnings_off if self._known.may_warn else nullcontext
        with quietly():
            image = self._known.opener(io.BytesIO(content))
        width, height = image.size
        if width * height > self._max_pixels:
            raise ValueError(
                f"{width}×{height} is more than the {self._max_pixels} pixels allowed in one image; make it smaller"
            )
        if isinstance(image, JpegImageFile) and _may_have_many_scans(image, content):
            check_jpeg_scans(content, width * height)
        if not self._is_admitted:
            hidden = hidden_pixels(content, self._known.name)
            if hidden is not None and hidden > self._max_pixels:
                raise ValueError(
                    f"its tiles or frames have {hidden} pixels, more than the {self._max_pixels} allowed; save it again"
                )
            # May wait, so it must not hold the lock that other images need.
            self._admit(max(width * height, MOST_PIXELS if hidden is None else hidden) * self._known.memory)
            self._is_admitted = True
        if isinstance(image, TiffImageFile):
            _silence_libtiff()
            self.is_corrected = correct_samples(image)
        prepare(image)
        with quietly():
            image.load()
        if isinstance(image, TiffImageFile):
            check_alpha(image)
        return image


def _salvaged(
    content: bytes,
    name: str,
    reader: _Reader,
    error: Exception,
    note: Callable[[DecodeNotes], None],
    *,
    keep: bool,
) -> Image.Image:
    """Return what is there of a truncated file; raise ValueError if there is nothing, or it is not to be kept."""
    found = salvage(content, name, reader.load)
    if found is not None and found.is_whole:
        note(DecodeNotes(num_changed=1))  # only an end marker, or a checksum, is missing
        return found.image
    if found is None or not found.num_rows:
        # Python's words about a header that ends too early would not help.
        why = "" if isinstance(error, (struct.error, IndexError)) or "unpack" in str(error) else f" ({error})"
        raise ValueError(f"it is truncated before its first row{why}; download it again") from error
    if not keep:
        raise ValueError(
            f"it is truncated: {found.describe()}; download it again, or keep such images with --truncated keep"
        ) from error
    note(DecodeNotes(num_kept=1, num_changed=1))
    return found.image


def _may_have_many_scans(image: JpegImageFile, encoded: bytes) -> bool:
    """Return whether a JPEG file can have several scans.

    Only then are they counted, because counting takes a twentieth of the decoding time.
    """
    stop = image.fp.tell() if image.fp is not None else 0  # the end of the header of the first scan
    start = encoded.rfind(b"\xff\xda", 0, stop)
    is_header = start >= 0 and int.from_bytes(encoded[start + 2 : start + 4]) == stop - start - 2
    return not is_header or encoded[start + 4] < image.layers or "progressive" in image.info


def _scale_transparent_grey(image: Image.Image, encoded: bytes) -> None:
    """Scale the transparent grey level of a 2-bit or 4-bit PNG to 8 bits, because Pillow scales only the pixels."""
    depth, colour = png_depth_and_colour(encoded)
    if colour == _PNG_GREY and depth in (2, 4) and "transparency" in image.info:
        image.info["transparency"] *= 255 // (2**depth - 1)
