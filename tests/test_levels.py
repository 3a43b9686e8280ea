"""Values of more than 8 bits: which of them are black and white, and what a pack says about them."""

import io
import json
import struct
import zlib

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from loopfeed.preprocess.commands.cli import main
from loopfeed.preprocess.decoding.decode import MissingLevelsError, ResizeRule, decode_stored
from loopfeed.preprocess.decoding.levels import Levels
from loopfeed.preprocess.decoding.notes import NOTHING, DecodeNotes
from loopfeed.preprocess.shards.reader import open_split
from tests.fake_source import files_of

SIZE = 16
TWELVE = np.random.default_rng(0).integers(0, 4096, (SIZE, SIZE, 4)).astype(np.uint16)
TWELVE[0, 0], TWELVE[0, 1] = 0, 4095
# v · 255 / 4095, rounded to the nearest; 4095 = 255 · 16 + 15 is odd, so no value lies halfway.
WANTED = ((TWELVE.astype(np.int64) * 510 + 4095) // 8190).astype(np.uint8)


def decoded(content, levels=None):
    notes = list[DecodeNotes]()
    rule = ResizeRule(size=SIZE, resize=SIZE, resample="nearest", levels=levels)
    return np.asarray(decode_stored(content, rule, note=notes.append)[0]), sum(notes, NOTHING)


def png(values, colour, significant=None, depth=16):
    def chunk(kind, payload):
        return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", SIZE, SIZE, depth, colour, 0, 0, 0))
    bits = b"" if significant is None else chunk(b"sBIT", bytes(significant))
    return b"\x89PNG\r\n\x1a\n" + header + bits + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def tiff(values, order, max_value=None):
    """Return an uncompressed 16-bit TIFF file of grey, RGB or RGBA."""
    letter, (_, _, channels) = "<" if order == b"II" else ">", values.shape
    pixels = values.astype(f"{letter}u2").tobytes()
    tags = [(256, SIZE), (257, SIZE), (259, 1), (262, 1 if channels == 1 else 2), (277, channels), (278, SIZE)]
    tags += [(281, max_value)] * (max_value is not None) + [(338, 2)] * (channels == 4)
    start = 8 + 2 + 12 * (len(tags) + 3) + 4
    entries = [(tag, struct.pack(f"{letter}HHIHH", tag, 3, 1, value, 0)) for tag, value in tags]
    entries.append((273, struct.pack(f"{letter}HHII", 273, 4, 1, start + 8)))
    entries.append((279, struct.pack(f"{letter}HHII", 279, 4, 1, len(pixels))))
    bits = struct.pack(f"{letter}HHIHH", 258, 3, 1, 16, 0)
    entries.append((258, bits if channels == 1 else struct.pack(f"{letter}HHII", 258, 3, channels, start)))
    directory = struct.pack(f"{letter}H", len(entries)) + b"".join(entry for _, entry in sorted(entries))
    head = order + struct.pack(f"{letter}HI", 42, 8) + directory + bytes(4)
    return head + struct.pack(f"{letter}4H", 16, 16, 16, 16) + pixels


def opaque(channels):
    """Return 12-bit values and the wanted colours of so many channels; the second of two, or the fourth, is alpha."""
    values = TWELVE[..., :channels].copy()
    if channels in (2, 4):
        values[..., -1] = 65535
    return values, np.repeat(WANTED[..., :1], 3, -1) if channels < 3 else WANTED[..., :3]


@pytest.mark.parametrize(("colour", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_the_significant_bits_of_a_png_decide_unless_levels_are_given(colour, channels):
    values, wanted = opaque(channels)
    declared = DecodeNotes(num_declared=1, white_min=4095, white_max=4095, num_changed=1)
    found, notes = decoded(png(values, colour, [12] * channels))
    np.testing.assert_array_equal(found, wanted)
    assert notes == declared
    found, notes = decoded(png(values, colour), levels="0:4095")
    np.testing.assert_array_equal(found, wanted)
    assert notes == NOTHING
    found, notes = decoded(png(values, colour))
    assert found.max() == 16 if channels == 1 else 15  # as before; Pillow cuts the low byte of colour off
    assert (notes.num_deep, notes.deep_max >> 8) == (1, 15)


@pytest.mark.parametrize("colour", [0, 2])
def test_values_beyond_the_significant_bits_are_scaled_as_png_prescribes(colour):
    values, wanted = opaque(1 if colour == 0 else 3)
    found, notes = decoded(png(values << 4, colour, [12] * values.shape[-1]))
    assert np.abs(found.astype(int) - wanted).max() <= 1
    assert notes.num_deep == 1


@pytest.mark.parametrize("order", [b"II", b"MM"])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_the_largest_sample_value_of_a_tiff_decides(order, channels):
    values, wanted = opaque(channels)
    for content, levels in ((tiff(values, order, 4095), None), (tiff(values, order), "0:4095")):
        np.testing.assert_array_equal(decoded(content, levels)[0], wanted)
    assert decoded(tiff(values, order))[1].num_deep == 1


@pytest.mark.parametrize("largest", [1023, 4095, 16383, 65535])
def test_levels_are_values_of_the_file_in_a_portable_map(largest):
    values = TWELVE[..., :3].astype(np.int64) % (largest + 1)
    wanted = WANTED[..., :3] if largest > 1023 else None
    grey, colour = values[..., 0].astype(">u2").tobytes(), values.astype(">u2").tobytes()
    plain = b" ".join(b"%d" % value for value in values[..., 0].ravel())
    for head, content in ((b"P5", grey), (b"P2", plain), (b"P6", colour)):
        found, _ = decoded(head + b" 16 16 %d\n" % largest + content, levels="0:4095")
        expected = ((values.astype(np.int64) * 510 + 4095) // 8190) if wanted is None else wanted
        np.testing.assert_array_equal(found, expected if head == b"P6" else np.repeat(expected[..., :1], 3, -1))


def test_negative_integers_and_floats_need_levels():
    hounsfield = (TWELVE[..., 0].astype(np.int32) - 1024).astype(np.int32)
    file = io.BytesIO()
    Image.fromarray(hounsfield).save(file, "TIFF")
    message = r"range from -1024 to 3071, but without --levels only 0 to 65535 .* such as --levels -1024:3071"
    with pytest.raises(MissingLevelsError, match=message):
        decoded(file.getvalue())
    np.testing.assert_array_equal(decoded(file.getvalue(), "-1024:3071")[0][..., 0], WANTED[..., 0])
    found, notes = decoded(file.getvalue(), "0:100")
    assert (found.min(), found.max(), notes.num_clipped) == (0, 255, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [("4095", "got '4095'"), ("0:x", "got '0:x'"), ("5:5", "got 5:5"), ("9:1", "got 9:1"), ("0:inf", "got 0:inf")],
)
def test_other_levels_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Levels.parse(text)


def fill(folder, images, suffix="png"):
    for index, image in enumerate(images):
        path = folder / "ab"[index % 2] / f"{index}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)


def run(*arguments):
    return CliRunner().invoke(main, [str(each) for each in arguments])


def test_a_pack_names_the_share_of_the_range_and_records_the_levels(tmp_path):
    source = tmp_path / "images"
    fill(source, [Image.fromarray(np.roll(TWELVE[..., 0], shift)) for shift in range(6)])
    dark = run(source, tmp_path / "dark", "--size", 16, "--shard-images", 2)
    assert dark.exit_code == 0
    assert (
        "warning: 6 images of 16 bits have no value over 4,095, so they use 6.2 % of the range 0 to 65,535 and become "
        "dark. If 4,095 is white, run the same command again with --levels 0:4095 --overwrite"
    ) in dark.output
    for part in (1, 2):  # the notes of the parts are those of the whole
        parts = run(source, tmp_path / "parts", "--size", 16, "--shard-images", 2, "--part", f"{part}/2")
    assert "6 images of 16 bits have no value over 4,095" in parts.output
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "dark")

    light = run(source, tmp_path / "light", "--size", 16, "--levels", "0:4095")
    assert "warning" not in light.output
    manifest = json.loads((tmp_path / "light/train/manifest.json").read_text())
    assert manifest["resize_rule"] == {"size": 16, "resize": 16, "resample": "bicubic", "levels": "0:4095"}
    assert manifest["channel_mean"][0] == pytest.approx(WANTED[..., 0].mean() / 255)
    assert "already complete" in run(source, tmp_path / "light", "--size", 16, "--levels", "0:4095.0").output
    other = run(source, tmp_path / "light", "--size", 16)
    assert other.exit_code == 2
    assert "--levels was 0:4095, is now not given" in other.output


def test_files_that_name_different_ranges_are_pointed_out(tmp_path):
    source = tmp_path / "images"
    for index, white in enumerate((2047, 4095)):
        path = source / "ab"[index] / "1.tif"
        path.parent.mkdir(parents=True)
        path.write_bytes(tiff(TWELVE[..., :1] % (white + 1), b"II", white))
    found = run(source, tmp_path / "pack", "--size", 16)
    assert (
        "the files name different values for white, from 2,047 to 4,095, and each is scaled by its own" in found.output
    )


def test_floats_of_a_data_set_have_one_scale(tmp_path):
    source, generator = tmp_path / "images", np.random.default_rng(1)
    peaks = (0.9, 200.0, 0.5, 150.0)
    images = [(generator.random((SIZE, SIZE)) * peak).astype(np.float32) for peak in peaks]
    fill(source, map(Image.fromarray, images), "tiff")
    refused = run(source, tmp_path / "pack", "--size", 16, "--shard-images", 1)
    assert refused.exit_code == 2
    assert "float pixel values range from" in refused.output
    assert "such as --levels 0:255, with --overwrite or another DEST" in " ".join(refused.output.split())
    found = run(source, tmp_path / "pack", "--size", 16, "--shard-images", 1, "--levels", "0:255", "--overwrite")
    assert "4 images of 2 classes packed" in found.output
    with open_split(str(tmp_path / "pack"), "train") as split:
        pixels = np.zeros((4, SIZE, SIZE), np.uint32)
        split.read_into(np.arange(4), pixels, np.zeros(4, np.int32), timeout_s=9)
    expected = sorted(float(np.floor(image.astype(np.float64) + 0.5).mean()) for image in images)
    assert sorted((pixels >> 24).mean((1, 2)).tolist()) == pytest.approx(expected)
