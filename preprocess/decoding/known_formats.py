"""The supported file formats: how to recognise and open each. The first bytes of a file decide, not its name."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from PIL import ImageFile, features
from PIL.AvifImagePlugin import AvifImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.Jpeg2KImagePlugin import Jpeg2KImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.PpmImagePlugin import PpmImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from loopfeed.preprocess.decoding.box_formats import AVIF, HEIC, JPEG_2000, JPEG_XL, is_avif, is_heic, is_jpeg_2000
from loopfeed.preprocess.decoding.jpeg_xl import is_jpeg_xl
from loopfeed.preprocess.file_kinds import HEAD_BYTES

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Format:
    """A supported file format.

    Attributes:
        name: its name.
        accepts: returns whether a file that begins with some bytes has the format.
        opener: opens such a file.
        may_warn: whether its Pillow plugin can issue warnings.
        feature: the part of Pillow that not every Pillow has, and that its decoder needs.
        module: the module of another package that its decoder needs.
        extra: the extra of Loopfeed that installs this package.
        memory: how much memory a pixel takes while it is decoded, as a multiple of that of the other formats.
        added_in: the version of the decoding rules since which its files are packed, see
            `loopfeed.preprocess.packing.plan.decoding_version`.
    """

    name: str
    accepts: Callable[[bytes], bool]
    opener: Callable[[Any], ImageFile.ImageFile]
    may_warn: bool = False
    feature: str | None = None
    module: str | None = None
    extra: str | None = None
    memory: int = 1
    added_in: int = 1

    @property
    def is_available(self) -> bool:
        """Whether the installed Pillow, or the package of its extra, can decode it."""
        if self.module is not None:
            return find_spec(self.module) is not None
        return self.feature is None or features.check(self.feature) is True


# Imported when the first such file is decoded. Neither is registered with Pillow by Loopfeed.
def _open_heic(file: Any) -> ImageFile.ImageFile:
    opened: ImageFile.ImageFile = import_module("pillow_heif").HeifImageFile(file)
    return opened


def _open_jpeg_xl(_: Any) -> ImageFile.ImageFile:
    raise AssertionError("a JPEG XL file is opened as what it is transcoded to")


FORMATS = (
    Format("JPEG", lambda head: head.startswith(b"\xff\xd8\xff"), JpegImageFile),
    Format("PNG", lambda head: head.startswith(PNG_SIGNATURE), PngImageFile),
    Format("WebP", lambda head: head.startswith(b"RIFF") and head[8:12] == b"WEBP", WebPImageFile),
    Format("GIF", lambda head: head.startswith((b"GIF87a", b"GIF89a")), GifImageFile, may_warn=True),
    Format("BMP", lambda head: head.startswith(b"BM"), BmpImageFile),
    Format(
        "TIFF", lambda head: head.startswith((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")), TiffImageFile, may_warn=True
    ),
    Format("PPM", lambda head: head[:1] == b"P" and head[1:2] in b"123456" and head[2:3].isspace(), PpmImageFile),
    Format(AVIF, is_avif, AvifImageFile, feature="avif", memory=2, added_in=3),
    Format(JPEG_2000, is_jpeg_2000, Jpeg2KImageFile, feature="jpg_2000", memory=2, added_in=3),
    Format(HEIC, is_heic, _open_heic, module="pillow_heif", extra="heic", memory=2, added_in=4),
    Format(JPEG_XL, is_jpeg_xl, _open_jpeg_xl, module="pillow_jxl", extra="jxl", memory=3, added_in=4),
)


def sniff(encoded: bytes) -> Format | None:
    """Return the format that the first bytes of a file indicate, or None if it is not supported."""
    head = encoded[:HEAD_BYTES]
    return next((known for known in FORMATS if known.accepts(head)), None)
