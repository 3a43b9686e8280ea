"""What AVIF, HEIC and JPEG 2000 files say that Pillow does not: their depth, whether they are whole, their true size.

Both consist of boxes (ISO/IEC 14496-12, 15444-1). Pillow decodes them with libavif and OpenJPEG, and gives AVIF and
colour of JPEG 2000 as 8 bits, and grey of JPEG 2000 as 8 or, shifted to the top, 16.
"""

import struct
from typing import NamedTuple

import numpy as np
from PIL import Image

AVIF, HEIC, JPEG_2000, JPEG_XL = "AVIF", "HEIC", "JPEG 2000", "JPEG XL"

_CODESTREAM = b"\xff\x4f\xff\x51"
_SIGNATURE = b"\x00\x00\x00\x0cjP  \r\n\x87\n"
_END = b"\xff\xd9"
_MAX_BOXES = 1_000
_NEEDED_BOXES = frozenset({b"ftyp", b"jp2h", b"jp2c", b"meta", b"mdat"})
_AVIF_BRANDS = (b"avif", b"avis")
_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs")
# Brands of containers, which hold AV1 or HEVC only if one of the brands above is among the compatible ones.
_CONTAINER_BRANDS = (b"mif1", b"msf1")
_TEN_BITS = 0x40
_HEVC_DEPTH_AT = 4 + 17  # behind the kind of the box
# OpenJPEG takes 12 kB for each tile, and up to 1 kB for each precinct, which may be one pixel.
_MAX_TILES = 4096
_MAX_PRECINCTS = 2**17
_COD, _COC, _SOT, _SOD = b"\xff\x52", b"\xff\x53", b"\xff\x90", b"\xff\x93"
_MAX_MARKERS = 2**18
# ISO/IEC 15444-1, table A.2, and 15444-2: CAP to CPF, QCD to CRG, COM, MCT, MCC, NLT, MCO, CBD, ATK, and SOT.
_MARKERS_WITH_LENGTH = frozenset(
    {*range(0x50, 0x5A), *range(0x5C, 0x62), 0x63, 0x64, *range(0x72, 0x7A), 0x90},
)
_MAX_COMPONENTS = 4


class Codestream(NamedTuple):
    """The header of a JPEG 2000 codestream: size in pixels, bits per channel, number of tiles, and where it begins."""

    width: int
    height: int
    bits: tuple[int, ...]
    num_tiles: int
    start: int


def is_avif(head: bytes) -> bool:
    """Return whether a file that begins with the bytes `head` is an AVIF image."""
    return _has_brand(head, _AVIF_BRANDS)


def is_heic(head: bytes) -> bool:
    """Return whether a file that begins with the bytes `head` is a HEIF image whose pixels are HEVC, as of phones."""
    return _has_brand(head, _HEIC_BRANDS)


def _has_brand(head: bytes, wanted: tuple[bytes, ...]) -> bool:
    if head[4:8] != b"ftyp":
        return False
    brands = head[16 : int.from_bytes(head[:4])]
    return head[8:12] in wanted or (
        head[8:12] in _CONTAINER_BRANDS and any(brands[at : at + 4] in wanted for at in range(0, len(brands), 4))
    )


def is_jpeg_2000(head: bytes) -> bool:
    """Return whether a file that begins with the bytes `head` is a JPEG 2000 image, with boxes or without."""
    return head.startswith((_SIGNATURE, _CODESTREAM))


def has_deep_avif(encoded: bytes) -> bool:
    """Return whether the pixels of an AVIF file have 10 or 12 bits per channel, by the configuration of its codec."""
    place = encoded.find(b"av1C")
    return 0 <= place < len(encoded) - 6 and bool(encoded[place + 6] & _TEN_BITS)


def has_deep_heic(encoded: bytes) -> bool:
    """Return whether the pixels of a HEIC file have more than 8 bits per channel, by the configuration of its codec."""
    place = encoded.find(b"hvcC")
    return 0 <= place < len(encoded) - _HEVC_DEPTH_AT and bool(encoded[place + _HEVC_DEPTH_AT] & 7)


def check_avif(encoded: bytes, max_pixels: int) -> None:  # noqa: ARG001 - all checks take the same arguments
    """Raise ValueError if an AVIF or HEIC file ends within one of its boxes."""
    _check_whole(encoded)


def check_jpeg_2000(encoded: bytes, max_pixels: int) -> None:
    """Raise ValueError if a JPEG 2000 file is truncated, or its picture is of a depth or a size that is not supported.

    OpenJPEG takes memory by the header of the codestream, Pillow checks the one of the boxes.
    """
    if not encoded.rstrip(b"\0").endswith(_END) and not encoded.startswith(_SIGNATURE):
        raise ValueError("it is truncated: its end marker is missing; download it again")
    if encoded.startswith(_SIGNATURE):
        _check_whole(encoded)
    found = codestream_of(encoded)
    if found.width * found.height > max_pixels:
        raise ValueError(
            f"{found.width}×{found.height} is more than the {max_pixels} pixels allowed in one image; make it smaller"
        )
    if found.num_tiles > _MAX_TILES:
        raise ValueError(f"it has {found.num_tiles} tiles, more than the {_MAX_TILES} allowed; save it in larger ones")
    num_precincts = _num_precincts(encoded, found)
    if num_precincts > _MAX_PRECINCTS:
        raise ValueError(
            f"it has up to {num_precincts} precincts, more than the {_MAX_PRECINCTS} allowed; save it with larger ones"
        )
    if set(found.bits) != {8} and not (len(found.bits) == 1 and 8 < found.bits[0] <= 16):
        raise ValueError(
            f"its channels have {', '.join(map(str, found.bits))} bits, but only 8 are supported, and up to 16 in one "
            "channel of grey; convert it to PNG"
        )


def codestream_of(encoded: bytes) -> Codestream:
    """Return the header of a JPEG 2000 file's codestream; raise ValueError if it has none."""
    start = 0
    if not encoded.startswith(_CODESTREAM):
        start = next((place for place, _, kind in boxes(encoded) if kind == b"jp2c"), -1)
        header = 16 if encoded[start : start + 4] == b"\0\0\0\1" else 8
        start = start + header if start >= 0 else len(encoded)
    try:
        _, right, bottom, left, top, *tiles = struct.unpack_from(">HIIIIIIII", encoded, start + 6)
        (count,) = struct.unpack_from(">H", encoded, start + 40)
    except struct.error:
        raise ValueError("it has no picture; save the image again") from None
    if not encoded.startswith(_CODESTREAM, start) or not 1 <= count <= _MAX_COMPONENTS:
        raise ValueError(f"it must have a picture of 1 to {_MAX_COMPONENTS} channels; save the image again")
    bits = tuple((encoded[start + 42 + 3 * at] & 0x7F) + 1 for at in range(count))
    across, down, tiles_left, tiles_top = tiles
    if not across or not down:
        raise ValueError("its tiles have no size; save the image again")
    num_tiles = -(-(right - tiles_left) // across) * -(-(bottom - tiles_top) // down)
    return Codestream(right - left, bottom - top, bits, num_tiles, start)


def _num_precincts(encoded: bytes, found: Codestream) -> int:
    """Return about how many precincts a JPEG 2000 picture has, if the header that asks for most holds everywhere.

    The headers are those of the picture and of its tiles (ISO/IEC 15444-1, A.6.1 and A.6.2).
    """
    most, at, next_tile = 0, found.start + 2, len(encoded)
    num_pixels = found.width * found.height * len(found.bits)
    for _ in range(_MAX_MARKERS):
        marker = encoded[at : at + 2]
        if len(marker) < 2 or marker[0] != 0xFF or marker == _END:
            break
        if marker == _SOD:
            at = next_tile
            continue
        size = int.from_bytes(encoded[at + 2 : at + 4])
        if marker[1] not in _MARKERS_WITH_LENGTH:
            raise ValueError(f"it has the marker FF{marker[1]:02X}, which is not of its format; save the image again")
        if marker == _SOT:
            num_bytes = int.from_bytes(encoded[at + 6 : at + 10])
            next_tile = at + max(14, num_bytes) if num_bytes else len(encoded)  # the last one may reach to the end
        elif marker in (_COD, _COC):
            # What the header says of itself, then (COD) the order and layers, then five bytes, then the sizes.
            flags, sizes = (at + 4, at + 14) if marker == _COD else (at + 5, at + 11)
            if encoded[flags] & 1:
                # From the smallest resolution to the picture's own: each has four times the pixels of the one before.
                largest_first = encoded[sizes : at + 2 + size][::-1]
                counts = (
                    num_pixels >> 2 * level + (each & 15) + (each >> 4) for level, each in enumerate(largest_first)
                )
                most = max(most, sum(counts))
        at += 2 + max(2, size)
    else:
        raise ValueError(f"its headers have more than {_MAX_MARKERS} markers; save the image again")
    return most


def with_values_of_file(image: Image.Image, encoded: bytes) -> Image.Image:
    """Return deep grey of JPEG 2000 with the values of its file, which Pillow shifts to the top of 16 bits."""
    bits = codestream_of(encoded).bits[0]
    if image.mode != "I;16" or bits == 16:
        return image
    return Image.fromarray(np.asarray(image) >> np.uint16(16 - bits))


def boxes(encoded: bytes) -> list[tuple[int, int, bytes]]:
    """Return the place, the size and the kind of each box of a file; the last may reach beyond its end."""
    found: list[tuple[int, int, bytes]] = []
    place = 0
    while place + 8 <= len(encoded) and len(found) < _MAX_BOXES:
        num_bytes, kind = struct.unpack_from(">I4s", encoded, place)
        if num_bytes == 1 and place + 16 <= len(encoded):
            (num_bytes,) = struct.unpack_from(">Q", encoded, place + 8)
        elif num_bytes == 0:  # up to the end of the file
            num_bytes = len(encoded) - place
        found.append((place, num_bytes, kind))
        place += max(8, num_bytes)
    return found


def _check_whole(encoded: bytes) -> None:
    """Raise ValueError if a file ends within a box that the picture needs; other bytes may follow the last box."""
    for place, num_bytes, kind in boxes(encoded):
        if kind in _NEEDED_BOXES and place + num_bytes > len(encoded):
            raise ValueError(
                f"it is truncated: it has {len(encoded)} of at least {place + num_bytes} bytes; download it again"
            )
