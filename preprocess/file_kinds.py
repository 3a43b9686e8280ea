"""Recognises what a file is by its first bytes, for messages about a file that is not what it should be.

Owns the table of names and remedies. Knows nothing of what the file was expected to be.
"""

from __future__ import annotations

import re
from typing import NamedTuple

HEAD_BYTES = 512
"""How many bytes of a file are enough to recognise it."""


class FileKind(NamedTuple):
    """What a file is, such as "a Git LFS pointer", and what to do to get what was expected."""

    name: str
    remedy: str
    is_lost: bool = False
    """Whether the file stands for another, or was damaged, so that the remedy brings what was expected."""


_TO_PNG = "convert it to PNG"
_DEVELOP = "develop it to TIFF, PNG or JPEG"
_FRAMES = "extract its frames as images, such as with ffmpeg"
UNPACK = "unpack it"
"""The remedy for archives and compressed files."""
SAVE_AS_CSV = "save it as CSV"
"""The remedy for spreadsheets."""
_EXPORT = "export its images as PNG or TIFF"
_RENDER = "render it as PNG"
_AGAIN = "download it again"
_REMOVE = "remove it"

_LFS = FileKind("a Git LFS pointer instead of the file itself", "run `git lfs pull` in its repository", is_lost=True)
_ANNEX = FileKind(
    "a git-annex pointer instead of the file itself", "run `git annex get` in its repository", is_lost=True
)
_DVC = FileKind("a DVC pointer instead of the file itself", "run `dvc pull` in its repository", is_lost=True)
_HTML = FileKind("an HTML page, such as the error page of a failed download", _AGAIN, is_lost=True)
_XML = FileKind("an XML document, such as the error message of a failed download", _AGAIN, is_lost=True)
JSON_TEXT = FileKind("JSON text, such as the error message of a failed download", _AGAIN, is_lost=True)
_ZEROS = FileKind("a file of zeros, as after an interrupted copy", "copy or download it again", is_lost=True)
_TEXT = FileKind("text", _REMOVE)

# The brand of a file of ISO base media boxes (ISO/IEC 14496-12) → what it is.
_BRANDS = {
    **dict.fromkeys(
        (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1"),
        FileKind("a HEIF image (HEIC)", "convert it to JPEG or PNG, such as with heif-convert"),
    ),
    b"crx ": FileKind("a raw photograph (Canon CR3)", _DEVELOP),
    b"jxl ": FileKind("a JPEG XL image", "convert it to PNG, such as with djxl"),
}
_VIDEO = FileKind("a video (MP4 or QuickTime)", _FRAMES)

_BEGINNINGS: tuple[tuple[bytes, FileKind], ...] = (
    (b"version https://git-lfs", _LFS),
    (b"/annex/objects/", _ANNEX),
    (b"outs:\n", _DVC),
    (b"\xff\x0a", _BRANDS[b"jxl "]),
    (b"\0\0\0\x0cJXL \r\n\x87\n", _BRANDS[b"jxl "]),
    (b"II\xbc\x01", FileKind("a JPEG XR image", _TO_PNG)),
    (b"LinS", FileKind("an MSP image", _TO_PNG)),
    (b"DanM", FileKind("an MSP image", _TO_PNG)),
    (b"BLP1", FileKind("a BLP texture", _TO_PNG)),
    (b"BLP2", FileKind("a BLP texture", _TO_PNG)),
    (b"FTEX", FileKind("an FTEX texture", _TO_PNG)),
    (b"Image type:", FileKind("an IM image", _TO_PNG)),
    (b"\xb1\x68\xde\x3a", FileKind("a DCX image", _TO_PNG)),
    (b"\x80\xe8\0\0", FileKind("a PIXAR image", _TO_PNG)),
    (b"P7 332", FileKind("a thumbnail of XV", _TO_PNG)),
    (b"GRIB", FileKind("a GRIB file", _EXPORT)),
    (b"BUFR", FileKind("a BUFR file", _EXPORT)),
    (b"8BPS", FileKind("a Photoshop document", _TO_PNG)),
    (b"\0\0\1\0", FileKind("an icon (ICO)", _TO_PNG)),
    (b"icns", FileKind("an icon (ICNS)", _TO_PNG)),
    (b"qoif", FileKind("a QOI image", _TO_PNG)),
    (b"DDS ", FileKind("a DDS texture", _TO_PNG)),
    (b"\xabKTX", FileKind("a KTX texture", _TO_PNG)),
    (b"\x0a\x05\x01\x08", FileKind("a PCX image", _TO_PNG)),
    (b"\x0a\x03\x01", FileKind("a PCX image", _TO_PNG)),
    (b"\x01\xda", FileKind("an SGI image", _TO_PNG)),
    (b"\x59\xa6\x6a\x95", FileKind("a Sun raster image", _TO_PNG)),
    (b"BPG\xfb", FileKind("a BPG image", _TO_PNG)),
    (b"FLIF", FileKind("a FLIF image", _TO_PNG)),
    (b"farbfeld", FileKind("a farbfeld image", _TO_PNG)),
    (b"P7\n", FileKind("a PAM image", _TO_PNG)),
    (b"PF\n", FileKind("a PFM image of floats", "save it as a TIFF of floats")),
    (b"Pf\n", FileKind("a PFM image of floats", "save it as a TIFF of floats")),
    (b"gimp xcf", FileKind("a GIMP document (XCF)", _TO_PNG)),
    (b"/* XPM */", FileKind("an XPM image", _TO_PNG)),
    (b"#define ", FileKind("an XBM image, or a program's source", _TO_PNG)),
    (
        b"\x76\x2f\x31\x01",
        FileKind("an OpenEXR image of floats", "save it as a TIFF of floats, or map its tones to PNG"),
    ),
    (b"#?RADIANCE", FileKind("a Radiance HDR image of floats", "map its tones to PNG")),
    (b"#?RGBE", FileKind("a Radiance HDR image of floats", "map its tones to PNG")),
    (b"FUJIFILMCCD-RAW", FileKind("a raw photograph (Fujifilm RAF)", _DEVELOP)),
    (b"IIRO", FileKind("a raw photograph (Olympus ORF)", _DEVELOP)),
    (b"IIRS", FileKind("a raw photograph (Olympus ORF)", _DEVELOP)),
    (b"MMOR", FileKind("a raw photograph (Olympus ORF)", _DEVELOP)),
    (b"IIU\0", FileKind("a raw photograph (Panasonic RW2)", _DEVELOP)),
    (b"FOVb", FileKind("a raw photograph (Sigma X3F)", _DEVELOP)),
    (b"\0MRM", FileKind("a raw photograph (Minolta MRW)", _DEVELOP)),
    (b"SIMPLE  =", FileKind("a FITS file", _EXPORT)),
    (b"\x89HDF\r\n\x1a\n", FileKind("an HDF5 file", _EXPORT)),
    (b"\x0e\x03\x13\x01", FileKind("an HDF4 file", _EXPORT)),
    (b"CDF\x01", FileKind("a NetCDF file", _EXPORT)),
    (b"CDF\x02", FileKind("a NetCDF file", _EXPORT)),
    (b"\x93NUMPY", FileKind("a NumPy array", _EXPORT)),
    (b"MATLAB 5.0", FileKind("a MATLAB file", _EXPORT)),
    (b"PAR1", FileKind("a Parquet table", _EXPORT)),
    (b"ARROW1", FileKind("an Arrow table", _EXPORT)),
    (b"SQLite format 3", FileKind("an SQLite database", _EXPORT)),
    (b"\x5c\x01\0\0", FileKind("a NIfTI volume", _EXPORT)),
    (b"NRRD0", FileKind("an NRRD volume", _EXPORT)),
    (b"%PDF", FileKind("a PDF document", _RENDER)),
    (b"%!PS", FileKind("a PostScript document", _RENDER)),
    (b"\xc5\xd0\xd3\xc6", FileKind("a PostScript document (EPS)", _RENDER)),
    (b"AT&TFORM", FileKind("a DjVu document", _RENDER)),
    (b"\xd7\xcd\xc6\x9a", FileKind("a Windows metafile (WMF)", _RENDER)),
    (b"\x1aE\xdf\xa3", FileKind("a video (Matroska or WebM)", _FRAMES)),
    (b"\0\0\1\xba", FileKind("a video (MPEG)", _FRAMES)),
    (b"\0\0\1\xb3", FileKind("a video (MPEG)", _FRAMES)),
    (b"FLV\x01", FileKind("a video (Flash)", _FRAMES)),
    (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", FileKind("a video (Windows Media)", _FRAMES)),
    (b"OggS", FileKind("an Ogg recording", _REMOVE)),
    (b"ID3", FileKind("an MP3 recording", _REMOVE)),
    (b"PK\x03\x04", FileKind("a zip archive", UNPACK)),
    (b"PK\x05\x06", FileKind("an empty zip archive", _AGAIN)),
    (b"Rar!\x1a\x07", FileKind("a RAR archive", UNPACK)),
    (b"7z\xbc\xaf\x27\x1c", FileKind("a 7z archive", UNPACK)),
    (b"\x1f\x8b", FileKind("compressed with gzip", UNPACK)),
    (b"\xfd7zXZ", FileKind("compressed with xz", UNPACK)),
    (b"BZh", FileKind("compressed with bzip2", UNPACK)),
    (b"\x28\xb5\x2f\xfd", FileKind("compressed with zstd", UNPACK)),
    (b"\x04\x22\x4d\x18", FileKind("compressed with lz4", UNPACK)),
    (b"\x1f\x9d", FileKind("compressed with compress", UNPACK)),
    (b"hsqs", FileKind("a SquashFS image", "mount or unpack it")),
    (b"\x80\x02", FileKind("a Python pickle", _EXPORT)),
    (b"\x80\x04", FileKind("a Python pickle", _EXPORT)),
    (b"\x80\x05", FileKind("a Python pickle", _EXPORT)),
    (b"\0\x05\x16\x07", FileKind("metadata of macOS (AppleDouble)", _REMOVE)),
    (b"L\0\0\0\x01\x14\x02\0", FileKind("a Windows shortcut", "copy the file that it leads to")),
    (b"[InternetShortcut]", FileKind("a Windows shortcut to a web page", "download what it leads to")),
    (b"\x7fELF", FileKind("a program", _REMOVE)),
    (b"MZ", FileKind("a Windows program", _REMOVE)),
)
# Excel's and LibreOffice's files are zip archives, and those of Excel before 2007 compound files of Microsoft.
_ARCHIVES_OF_SPREADSHEETS = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1")
_PARTS_OF_SPREADSHEETS = (
    b"[Content_Types].xml", b"xl/", b"docProps/", b"application/vnd.oasis.opendocument.spreadsheet", b"\xd0\xcf\x11\xe0"
)  # fmt: skip
_RIFF = {b"AVI ": FileKind("a video (AVI)", _FRAMES), b"WAVE": FileKind("a WAVE recording", _REMOVE)}
_PAGE = re.compile(rb"<(?:!doctype\s+html|html|head|body|!--)", re.IGNORECASE)
_SVG = re.compile(rb"<svg[\s>]", re.IGNORECASE)
# The kinds of a picture in the header of a TGA file, which has no beginning of its own.
_TGA_KINDS = (2, 3, 10, 11)
_BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
_LEAST_ZEROS = 8


def kind_of(head: bytes) -> FileKind | None:
    """Return what a file is that begins with the bytes `head`, at best `HEAD_BYTES` of them; None if unknown."""
    if head[4:8] == b"ftyp":
        return _BRANDS.get(head[8:12], _VIDEO)
    if head[:4] == b"RIFF" and head[8:12] in _RIFF:
        return _RIFF[head[8:12]]
    if head[128:132] == b"DICM":
        return FileKind("a DICOM image", "export it as a 16-bit PNG or TIFF")
    if head[257:262] == b"ustar":
        return FileKind("a tar archive", UNPACK)
    if head[:2] == b"\0\0" and len(head) > _LEAST_ZEROS and head[2] in _TGA_KINDS and not any(head[3:8]):
        return FileKind("a TGA image", _TO_PNG)
    if head.startswith(_ARCHIVES_OF_SPREADSHEETS) and any(each in head for each in _PARTS_OF_SPREADSHEETS):
        return FileKind("a spreadsheet", SAVE_AS_CSV)
    if head[:4] == b"\0\0\2\0":
        return FileKind("a cursor (CUR)", _TO_PNG)
    if head[4:6] in (b"\x11\xaf", b"\x12\xaf"):
        return FileKind("an animation (FLI)", _TO_PNG)
    if len(head) >= _LEAST_ZEROS and not any(head):
        return _ZEROS
    found = next((kind for start, kind in _BEGINNINGS if head.startswith(start)), None)
    return found or _kind_of_text(head)


def _kind_of_text(head: bytes) -> FileKind | None:
    for mark in _BYTE_ORDER_MARKS:
        if head.startswith(mark):
            head = head.removeprefix(mark).replace(b"\0", b"")
    text = head.lstrip()
    if _SVG.search(text) and text.startswith(b"<"):
        return FileKind("an SVG drawing", _RENDER)
    if _PAGE.match(text):
        return _HTML
    if text.startswith(b"<?xml") or re.match(rb"<[A-Za-z][\w:.-]*[\s/>]", text):
        return _HTML if _PAGE.search(text) else _XML
    if re.match(rb'[{\[]\s*["\[{\d]', text):
        return JSON_TEXT
    try:
        text.decode("utf-8", "strict" if len(head) < HEAD_BYTES else "ignore")
    except UnicodeDecodeError:
        return None
    is_plain = text and all(byte >= 0x20 or byte in b"\t\n\r\f" for byte in text) and 0x7F not in text
    return _TEXT if is_plain and text.isascii() else None
