"""How many pixels a decoder makes of a file whose insides may be larger than the picture that its header describes.

A TIFF of one pixel may consist of one tile of 20,000 × 20,000, and the frame in an AVIF or HEIC file may have another
size than its boxes say: the decoder takes memory for these. Does not decode anything.
"""

import struct
from collections.abc import Iterator

from loopfeed.preprocess.decoding.box_formats import AVIF, HEIC, boxes

MOST_PIXELS = 2**28
"""libavif's own limit, which holds where a file does not say in a simple way how large its frames are."""

_ITEM_LOCATIONS = b"iloc"
_MAX_ITEMS = 1_000
_HAS_SIZE = 2
_SEQUENCE_HEADER = 1
_FRAMES = frozenset({_SEQUENCE_HEADER, 3, 4, 6, 8})
# A frame of a header that is not reduced may be as large as its numbers of bits allow; up to this, it is counted so.
_MOST_BY_BITS = 2**26
_OBU_BYTES = 256

_HEVC_BOX, _HEVC_ARRAYS_AT = b"hvcC", 23
_HEVC_SEQUENCE, _HEVC_444 = 33, 3

_TILE_WIDTH, _TILE_LENGTH = 322, 323
# The types of a tag's numbers: SHORT, LONG, and of a BigTIFF LONG8.
_WORDS: dict[int, str] = {3: "H", 4: "I"}
_LONG8 = 16


def hidden_pixels(encoded: bytes, name: str) -> int | None:
    """Return the largest number of pixels that decoding the file takes memory for whatever the size of its picture.

    0 if that size decides; None if the file does not say it in a simple way, and it may be `MOST_PIXELS`.

    Args:
        encoded: the file.
        name: the name of its format, as in `loopfeed.preprocess.decoding.box_formats.FORMATS`.
    """
    find = {"TIFF": _tile_pixels, AVIF: _frame_pixels, HEIC: _picture_pixels}.get(name)
    if find is None:
        return 0
    try:
        return find(encoded)
    except (struct.error, IndexError):  # truncated: the decoder will refuse it
        return 0 if name == "TIFF" else None


class TiffTags:
    """The tags of a TIFF file's first image.

    Attributes:
        num_entries: their number.
        word_bytes: the bytes of a value that stands in the tag itself.
        order: the byte order of the file, as `struct` has it.

    Raises:
        struct.error: the file ends before them.
    """

    def __init__(self, encoded: bytes) -> None:
        self._encoded, self.order = encoded, "<" if encoded[:2] == b"II" else ">"
        is_big = 43 in encoded[2:4]
        start, entries, entry, self.word_bytes = (8, "Q", "HHQ", 8) if is_big else (4, "H", "HHI", 4)
        (directory,) = struct.unpack_from(self.order + ("Q" if is_big else "I"), encoded, start)
        (self.num_entries,) = struct.unpack_from(self.order + entries, encoded, directory)
        self._first, self._entry = directory + struct.calcsize(self.order + entries), self.order + entry

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield the tag, the type and the number of values of each, and where its value stands."""
        place = self._first
        for _ in range(self.num_entries):
            tag, kind, count = struct.unpack_from(self._entry, self._encoded, place)
            place += struct.calcsize(self._entry) + self.word_bytes
            yield tag, kind, count, place - self.word_bytes


def _tile_pixels(encoded: bytes) -> int:
    """Return the pixels of one tile of a TIFF file's first image, 0 if it has none."""
    tags, sides = TiffTags(encoded), {_TILE_WIDTH: 0, _TILE_LENGTH: 0}
    # A number of 8 bytes has its place in a tag only in a BigTIFF. Of a tag given twice, readers take either.
    word_of = _WORDS | ({_LONG8: "Q"} if tags.word_bytes == 8 else {})
    for tag, kind, count, place in tags:
        if tag in sides:
            if count != 1 or kind not in word_of:
                raise ValueError("the size of its tiles is no number; save it again")
            sides[tag] = max(sides[tag], *struct.unpack_from(tags.order + word_of[kind], encoded, place))
    return sides[_TILE_WIDTH] * sides[_TILE_LENGTH]


def _frame_pixels(encoded: bytes) -> int | None:
    """Return the pixels of all frames of an AVIF image, or None if they are not simply told.

    Each item of AV1 (colour, alpha, tiles of a grid) must lie in one piece and have one sequence header.
    """
    total = 0
    for place, num_bytes in _items(encoded):
        content = encoded[place : place + num_bytes]
        if content and not content[0] & _HAS_SIZE and content[0] >> 3 & 15 not in _FRAMES:
            continue  # as AV1 it would be one unit without a frame: metadata, or the description of a grid
        sizes = list(_sequence_sizes(content))
        if len(sizes) != 1 or sizes[0] is None:
            return None
        total += sizes[0]
    return total or None


def _items(encoded: bytes) -> Iterator[tuple[int, int]]:
    """Yield the place and the length of each item of a file by its box of locations; of several pieces, none (0, 0)."""
    top = {kind: (place, size) for place, size, kind in boxes(encoded)}
    if b"meta" not in top or b"moov" in top:  # a sequence: its frames lie elsewhere
        return
    place, size = top[b"meta"]
    inner = {kind: place + 12 + at for at, _, kind in boxes(encoded[place + 12 : place + size])}
    if _ITEM_LOCATIONS not in inner:
        return
    at = inner[_ITEM_LOCATIONS] + 8
    idat = inner.get(b"idat", 0) + 8
    version = encoded[at]
    offset_bytes, length_bytes = encoded[at + 4] >> 4, encoded[at + 4] & 15
    base_bytes, index_bytes = encoded[at + 5] >> 4, encoded[at + 5] & 15 if version else 0
    id_bytes = 2 if version < 2 else 4
    count, at = int.from_bytes(encoded[at + 6 : at + 6 + id_bytes]), at + 6 + id_bytes
    for _ in range(min(count, _MAX_ITEMS)):
        at += id_bytes
        is_in_idat = bool(version) and encoded[at + 1] & 15 == 1
        at += 4 if version else 2
        base, at = int.from_bytes(encoded[at : at + base_bytes]), at + base_bytes
        num_pieces, at = int.from_bytes(encoded[at : at + 2]), at + 2
        start = length = 0
        for _ in range(num_pieces):
            at += index_bytes
            start, at = int.from_bytes(encoded[at : at + offset_bytes]), at + offset_bytes
            length, at = int.from_bytes(encoded[at : at + length_bytes]), at + length_bytes
            if at > len(encoded):
                raise struct.error
        yield (base + start + (idat if is_in_idat else 0), length) if num_pieces == 1 else (0, 0)


def _sequence_sizes(content: bytes) -> Iterator[int | None]:
    """Yield the largest frame's number of pixels for each sequence header of an item; None for one not understood."""
    at = 0
    while at < len(content):
        kind, has_extension, has_size = content[at] >> 3 & 15, content[at] & 4, content[at] & _HAS_SIZE
        if not has_size:
            yield None
            return
        at += 2 if has_extension else 1
        size = shift = 0
        while True:
            byte, at = content[at], at + 1
            size |= (byte & 127) << shift
            shift += 7
            if byte < 128 or shift > 56:
                break
        if kind == _SEQUENCE_HEADER:
            yield _size_of(content[at : at + min(size, _OBU_BYTES)])
        at += size


def _size_of(header: bytes) -> int | None:
    """Return the pixels of the largest frame that a sequence header of AV1 (section 5.5) allows; None if it is rare."""
    bits, used = int.from_bytes(header), 0

    def take(count: int) -> int:
        nonlocal used
        used += count
        left = 8 * len(header) - used
        if left < 0:
            raise struct.error
        return bits >> left & (1 << count) - 1

    take(4)  # the profile, and whether it is a still picture
    is_reduced = take(1)
    if is_reduced:
        take(5)
    else:
        if take(1):  # timing
            return None
        has_delay = take(1)
        for _ in range(take(5) + 1):
            take(12)
            if take(5) > 7:
                take(1)
            if has_delay and take(1):
                take(4)
    width_bits, height_bits = take(4) + 1, take(4) + 1
    if is_reduced:
        return (take(width_bits) + 1) * (take(height_bits) + 1)
    bound = 1 << width_bits + height_bits
    return bound if bound <= _MOST_BY_BITS else None


def _picture_pixels(encoded: bytes) -> int | None:
    """Return the pixels of the largest HEVC picture of a HEIC file, such as a tile; None if it is not simply told.

    Each configuration (hvcC, ISO/IEC 14496-15, 8.3.3.1) has the parameters of its pictures.
    """
    largest, place = 0, encoded.find(_HEVC_BOX)
    for _ in range(_MAX_ITEMS):
        if place < 0:
            return largest or None
        at, found = place + 4 + _HEVC_ARRAYS_AT, 0
        for _ in range(encoded[at - 1]):
            kind, count, at = encoded[at] & 63, int.from_bytes(encoded[at + 1 : at + 3]), at + 3
            for _ in range(count):
                size = int.from_bytes(encoded[at : at + 2])
                if kind == _HEVC_SEQUENCE:
                    found = max(found, _hevc_pixels(encoded[at + 2 : at + 2 + min(size, _OBU_BYTES)]))
                at += 2 + size
        if not found:
            return None
        largest, place = max(largest, found), encoded.find(_HEVC_BOX, place + 4)
    return None


def _hevc_pixels(unit: bytes) -> int:
    """Return the pixels of the pictures of a sequence parameter set of HEVC (ITU-T H.265, 7.3.2.2)."""
    content = unit.replace(b"\0\0\3", b"\0\0")  # bytes that only prevent a start code
    bits = "".join(f"{byte:08b}" for byte in content[2:])
    num_layers, at = int(bits[4:7], 2), 8 + 96  # the general profile, tier and level come first
    if num_layers:
        flags = [bits[at + 2 * layer : at + 2 * layer + 2] for layer in range(num_layers)]
        at += 16 + sum(88 * (each[:1] == "1") + 8 * (each[1:] == "1") for each in flags)

    def take() -> int:
        nonlocal at
        zeros = bits.index("1", at) - at
        at += 2 * zeros + 1
        return int(bits[at - zeros - 1 : at], 2) - 1

    take()
    if take() == _HEVC_444:
        at += 1
    return take() * take()
