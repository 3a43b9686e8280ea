"""TIFF files of all kinds of samples are decoded right or refused, whatever the other tags say."""

import re
import struct
import zlib
from itertools import product

import numpy as np
import pytest

from loopfeed.preprocess.decoding.decode import DecodeError, ResizeRule, decode_stored

SIZE, TILE, STRIP = 20, 16, 6
RAW, DEFLATE = 1, 8
HALF, FULL16, FULL32 = "-3000:3000", "0:65535", "0:4294967295"
SIGNED32 = "-2147483648:2147483647"
REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))

type File = tuple[float, float, str | None, int | None]
type Kind = tuple[int, int, int, int, tuple[int, ...]]

# What is stored: bits, sample format (1 unsigned, 2 signed, 3 float), photometric interpretation, channels, extra
# samples → the files: range of the values, --levels, and the largest sample value that the file names.
GREYS: dict[tuple[int, int], list[File]] = {
    (12, 1): [(0, 4095, None, None), (0, 1023, "0:1023", None), (0, 1023, None, 1023)],
    (16, 1): [(0, 65535, None, None), (0, 4095, "0:4095", None), (0, 4095, None, 4095)],
    (16, 2): [(0, 32767, None, None), (-3000, 3000, HALF, None)],
    (32, 1): [(0, 65535, None, None), (0, 2**32 - 1, FULL32, None), (2**31, 2**32 - 1, "2147483648:4294967295", None)],
    (32, 2): [(0, 65535, None, None), (-(2**31), 2**31 - 1, SIGNED32, None)],
    (32, 3): [(0, 1, None, None), (-5, 9, "-5:9", None)],
    (10, 1): [(0, 1023, None, None)],
    (24, 1): [(0, 65535, None, None)],
    (16, 3): [(0, 1, None, None)],
    (64, 1): [(0, 65535, None, None)],
    (64, 3): [(0, 1, None, None)],
}
COLOURS: list[tuple[int, int, tuple[int, ...]]] = [
    (2, 3, ()),
    (2, 4, ()),
    (2, 4, (0,)),
    (2, 4, (1,)),
    (2, 4, (2,)),
    (5, 4, ()),
    (1, 2, (0,)),
    (1, 2, (2,)),
]
KINDS: dict[Kind, list[File]] = {
    (*kind, photometric, 1, ()): files for kind, files in GREYS.items() for photometric in (0, 1)
}
KINDS |= {(16, 1, *colour): GREYS[16, 1] for colour in COLOURS}
KINDS |= {(32, 3, 2, 3, ()): GREYS[32, 3], (16, 3, 2, 3, ()): GREYS[16, 3], (32, 1, 2, 3, ()): GREYS[32, 1]}
# The kinds of which no file may be refused: those in the usual order of bits, chunky.
DECODED: set[Kind] = {(16, 1, 1, 1, ()), (16, 2, 1, 1, ()), (32, 2, 1, 1, ()), (32, 3, 1, 1, ()), (16, 1, 2, 3, ())}
DECODED |= {(16, 1, 2, 4, extra) for extra in ((), (0,), (2,))}
# Of these the little-endian files alone, because Pillow knows no others.
DECODED_LITTLE: set[Kind] = {(12, 1, 1, 1, ()), (16, 1, 0, 1, ()), (32, 1, 1, 1, ())}
# Of these those of the whole range alone, because the low bytes of the others cannot be read.
DECODED_WHOLE: set[Kind] = {(16, 1, 2, 4, (1,)), (16, 1, 5, 4, ())}
EIGHT_BITS: list[Kind] = [(8, 1, 0, 1, ()), (8, 1, 1, 1, ()), *((8, 1, *colour) for colour in COLOURS)]
KINDS |= {kind: [(0, 255, None, None)] for kind in EIGHT_BITS}


def stored(values, bits, order, predictor, compression, is_turned):
    """Return the bytes of a strip or tile of values [H, W, C]."""
    height, width, channels = values.shape
    if bits in (10, 12, 24):
        digits = np.asarray(values, np.int64)[..., None] >> np.arange(bits)[::-1] & 1
        content = np.packbits(digits.reshape(height, -1).astype(np.uint8), axis=1).tobytes()
    elif predictor == 3:
        # Each row has the most significant bytes of all its samples first, whatever the order, and then differences.
        rows = values.astype(values.dtype.newbyteorder(">")).reshape(height, -1).view(np.uint8)
        rows = rows.reshape(height, width * channels, -1).swapaxes(1, 2).reshape(height, -1)
        content = np.diff(rows.astype(np.int16), axis=1, prepend=0)
        content[:, :channels] = rows[:, :channels]
        content[:, channels:] = rows[:, channels:].astype(np.int16) - rows[:, :-channels]
        content = (content & 255).astype(np.uint8).tobytes()
    else:
        if predictor == 2:
            whole = values.view(f"u{bits // 8}").copy()
            whole[:, 1:] -= values.view(f"u{bits // 8}")[:, :-1]
            values = whole
        content = values.astype(values.dtype.newbyteorder(order)).tobytes()
    if compression == DEFLATE:
        content = zlib.compress(content, 1)
    return content.translate(REVERSED) if is_turned else content


def tiff(values, kind, *, order, planes, compression, predictor, fill, is_tiled, most):
    """Return a TIFF file of values [SIZE, SIZE, C]."""
    bits, form, photometric, channels, extra = kind
    step = TILE if is_tiled else STRIP
    parts = []
    for first in range(channels) if planes == 2 else [slice(None)]:
        plane = values[..., [first]] if planes == 2 else values
        for top, left in product(range(0, SIZE, step), range(0, SIZE, TILE) if is_tiled else [0]):
            part = plane[top : top + step, left : left + TILE if is_tiled else SIZE]
            if is_tiled:
                part = np.pad(part, [(0, TILE - part.shape[0]), (0, TILE - part.shape[1]), (0, 0)])
            content = stored(np.ascontiguousarray(part), bits, order, predictor, compression, fill == 2)
            parts.append(content + bytes(len(content) % 2))
    starts = [8 + sum(map(len, parts[:index])) for index in range(len(parts))]
    lengths = [len(part) for part in parts]
    tags = {256: SIZE, 257: SIZE, 258: [bits] * channels, 259: compression, 262: photometric, 266: fill, 277: channels}
    tags |= {284: planes, 317: predictor, 339: [form] * channels}
    tags |= {322: TILE, 323: TILE, 324: starts, 325: lengths} if is_tiled else {273: starts, 278: STRIP, 279: lengths}
    tags |= {338: list(extra)} if extra else {}
    tags |= {} if most is None else {281: [most] * channels}
    directory = 8 + sum(lengths)
    entries, beyond = b"", b""
    for tag, number in sorted(tags.items()):
        numbers = number if isinstance(number, list) else [number]
        is_long = tag in (273, 279, 324, 325)
        packed = struct.pack(f"{order}{len(numbers)}{'I' if is_long else 'H'}", *numbers)
        if len(packed) > 4:
            place = struct.pack(f"{order}I", directory + 6 + 12 * len(tags) + len(beyond))
            beyond += packed
        else:
            place = packed.ljust(4, b"\0")
        entries += struct.pack(f"{order}HHI", tag, 4 if is_long else 3, len(numbers)) + place
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", directory)
    return head + b"".join(parts) + struct.pack(f"{order}H", len(tags)) + entries + bytes(4) + beyond


def made(kind, file):
    """Return values, and the 8-bit levels [SIZE, SIZE, 3] that they mean, not rounded."""
    bits, form, photometric, channels, extra = kind
    low, high, levels, most = file
    unit = 255 if bits == 8 else 65535
    dtype = {1: "u", 2: "i", 3: "f"}[form] + str({10: 2, 12: 2, 24: 4}.get(bits, bits // 8))
    generator = np.random.default_rng(bits + channels)
    shares = generator.random((SIZE, SIZE, channels))
    shares[0, 0], shares[0, 1] = 0, 1
    alpha = channels == 2 or (photometric == 2 and channels == 4)
    if extra == (1,):
        shares[..., :-1] *= shares[..., -1:]
    values = low + shares * (high - low)
    if alpha:
        values[..., -1] = shares[..., -1] * unit
    values = values.astype(dtype) if form == 3 else np.round(values).astype(dtype)
    black, white = map(float, levels.split(":")) if levels else (0, 1 if form == 3 else most or min(2**bits - 1, 65535))
    seen = (values.astype(np.float64) - black) / (white - black)
    if photometric == 0:
        seen = 1 - seen
    if photometric == 5:
        seen = (1 - seen[..., :3]) * (1 - seen[..., 3:])
    elif alpha:
        opacity = values[..., -1:] / unit
        colour = seen[..., :-1]
        if extra != (0,):
            colour = colour + 1 - opacity if extra == (1,) else colour * opacity + 1 - opacity
        seen = colour
    return values, np.broadcast_to(seen, (SIZE, SIZE, 3)) * 255


def outcome(encoded, levels, wanted):
    """Return the largest difference from the wanted levels, or the error."""
    rule = ResizeRule(size=SIZE, resize=SIZE, resample="nearest", levels=levels)
    try:
        found = np.asarray(decode_stored(encoded, rule)[0])
    except DecodeError as error:
        return str(error)
    return float(np.abs(found - wanted).max())


STORAGES = [(RAW, 1), (DEFLATE, 1), (DEFLATE, 2), (DEFLATE, 3)]


def must_decode(kind, file, order, planes, fill):
    """Return whether a file of this kind may not be refused."""
    if fill == 2 or (planes == 2 and kind[3] > 1):
        # Both decoders read these planes.
        return fill == 1 and kind == (16, 1, 2, 3, ()) and file[1] == 65535
    whole = kind in DECODED_WHOLE and file[1] == 65535
    return kind in DECODED or (kind[0] == 8 and kind[3] != 2) or whole or (kind in DECODED_LITTLE and order == "<")


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_samples_are_decoded_right_or_refused(kind):
    bits, form, _, channels, _ = kind
    tolerance = 1.01 if channels in (1, 3) else 3  # colours times alpha, or black, are rounded more than once
    for file, (compression, predictor) in product(KINDS[kind], STORAGES):
        if (predictor == 2 and bits not in (8, 16, 32, 64)) or (predictor == 3 and form != 3):
            continue
        values, wanted = made(kind, file)
        for order, planes, fill, is_tiled in product("<>", (1, 2), (1, 2), (False, True)[: 3 - predictor]):
            storage = {
                "order": order,
                "planes": planes,
                "compression": compression,
                "predictor": predictor,
                "fill": fill,
            }
            encoded = tiff(values, kind, **storage, is_tiled=is_tiled, most=file[3])
            found = outcome(encoded, file[2], wanted)
            if isinstance(found, str):
                assert not must_decode(kind, file, order, planes, fill), (found, file, storage, is_tiled)
            else:
                assert found < tolerance, (file, storage, is_tiled)


@pytest.mark.parametrize(
    ("kind", "file", "compression", "message"),
    [
        ((16, 1, 5, 4, ()), (0, 65535, None, None), RAW, r"16-bit CMYK with separate planes .*\.transpose\(1, 2, 0\)"),
        (
            (16, 1, 2, 3, ()),
            (0, 4095, "0:4095", None),
            DEFLATE,
            r"compressed 16-bit colour with separate planes .*; save",
        ),
        (
            (16, 1, 5, 4, ()),
            (0, 4095, "0:4095", None),
            DEFLATE,
            r"compressed 16-bit colour with separate planes .*; save",
        ),
        ((16, 1, 2, 4, ()), (0, 65535, None, None), DEFLATE, r"16-bit RGBA with separate planes .*=\[.unassalpha.\]"),
        ((32, 3, 0, 1, ()), (0, 1, None, None), RAW, r"float values have white at 0 .* save 1 - values"),
    ],
)
def test_samples_that_pillow_would_misread_are_refused_by_name(kind, file, compression, message):
    storage = {"order": "<", "planes": 2, "compression": compression, "predictor": 1, "fill": 1}
    found = outcome(tiff(made(kind, file)[0], kind, **storage, is_tiled=False, most=file[3]), file[2], 0)
    assert re.search(message, str(found)), found
