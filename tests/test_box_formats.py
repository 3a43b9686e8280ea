"""AVIF and JPEG 2000: the pixels are those of Pillow, depth and orientation follow the rules of the other formats."""

import io
from functools import cache

import numpy as np
import pytest
from PIL import Image, ImageOps, features

from loopfeed.preprocess.decoding import box_formats
from loopfeed.preprocess.decoding.box_formats import codestream_of, has_deep_avif, is_avif
from loopfeed.preprocess.decoding.decode import DecodeError, ResizeRule, decode_image, decode_stored
from loopfeed.preprocess.packing.journal import Journal
from loopfeed.preprocess.shards.location import ShardError, open_location
from tests.fake_source import fake_source, pack

RULE = ResizeRule(24, 32)


def photograph(width=60, height=40, bands=3):
    small = np.random.default_rng(0).integers(0, 256, (8, 12, bands), np.uint8)
    return Image.fromarray(small.squeeze()).resize((width, height), Image.Resampling.BICUBIC)


def encode(image, form, **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def turned():
    exif = Image.Exif()
    exif[0x0112] = 6
    return encode(photograph(), "AVIF", exif=exif)


NAMES = ("AVIF", "AVIF, turned", "AVIF, transparent", "JP2", "J2K", "JP2, grey", "JP2, transparent")


@cache
def file_of(name):
    if name == "AVIF, turned":
        return turned()
    image = photograph(bands={"transparent": 4, "grey": 1}.get(name.rpartition(", ")[2], 3))
    return encode(image, "AVIF") if name.startswith("AVIF") else encode(image, "JPEG2000", no_jp2=name == "J2K")


@pytest.mark.parametrize("name", NAMES)
def test_the_pixels_are_those_of_pillow(name):
    opened = ImageOps.exif_transpose(Image.open(io.BytesIO(file_of(name))))
    # Through PNG, whose decoding is tested elsewhere.
    expected = decode_image(encode(opened, "PNG"), RULE)
    np.testing.assert_array_equal(decode_image(file_of(name), RULE), expected)


@pytest.mark.parametrize("cut", [1, 2, 10, 0.5, 0.9])
@pytest.mark.parametrize("name", ["AVIF", "JP2", "J2K"])
def test_a_truncated_file_is_refused(name, cut):
    whole = file_of(name)
    part = whole[:-cut] if isinstance(cut, int) else whole[: int(len(whole) * cut)]
    for rule in (RULE, ResizeRule(24, 32, truncated="keep")):
        with pytest.raises(DecodeError, match=r"it is truncated: .*; download it again$"):
            decode_image(part, rule)


def twelve_bits():
    """Return grey of 12 bits, and a JP2 file of it: one of 16 bits whose values lie in the middle, said to have 12."""
    values = np.random.default_rng(1).integers(0, 4096, (24, 24)).astype(np.uint16)
    file = bytearray(encode(Image.fromarray(values + np.uint16(2**15 - 2**11)), "JPEG2000"))
    for place in (file.index(b"ihdr") + 14, file.index(b"\xff\x4f\xff\x51") + 42):
        assert file[place] == 15
        file[place] = 11
    return values, bytes(file)


@pytest.mark.parametrize(("levels", "white"), [(None, 4095), ("0:4095", 4095), ("0:1000", 1000)])
def test_deep_grey_is_scaled_from_the_values_of_its_file(levels, white):
    values, file = twelve_bits()
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(file))), values << 4)  # what Pillow gives
    found = np.asarray(decode_stored(file, ResizeRule(24, 24, "nearest", levels))[0])
    expected = np.floor(np.minimum(values, white) * 255.0 / white + 0.5)
    np.testing.assert_array_equal(found, np.repeat(expected[..., None], 3, axis=2))


def test_what_pillow_would_cut_to_8_bits_is_refused():
    deep = bytearray(file_of("JP2"))
    place = deep.index(b"\xff\x4f\xff\x51") + 42
    deep[place : place + 9 : 3] = bytes([11] * 3)
    assert codestream_of(bytes(deep)).bits == (12, 12, 12)
    with pytest.raises(DecodeError, match=r"its channels have 12, 12, 12 bits, but only 8 are .*; convert it to PNG"):
        decode_image(bytes(deep), RULE)
    avif = bytearray(file_of("AVIF"))
    assert not has_deep_avif(bytes(avif))
    avif[avif.index(b"av1C") + 6] |= 0x40
    assert has_deep_avif(bytes(avif))


def test_levels_are_not_ignored_for_deep_avif(monkeypatch):
    monkeypatch.setattr("loopfeed.preprocess.decoding.formats.has_deep_avif", lambda _: True)
    assert decode_image(file_of("AVIF"), RULE).shape == (24, 24, 3)
    with pytest.raises(DecodeError, match="--levels cannot be applied to its 10 or 12 bits"):
        decode_image(file_of("AVIF"), ResizeRule(24, 32, levels="0:1023"))


def test_the_size_of_the_picture_counts_not_that_of_the_box():
    file = bytearray(file_of("JP2"))
    place = file.index(b"\xff\x4f\xff\x51") + 8
    file[place : place + 8] = (20_000).to_bytes(4) * 2
    with pytest.raises(DecodeError, match="20000×20000 is more than the 89478485 pixels allowed"):
        decode_image(bytes(file), RULE)


def test_a_pillow_without_the_decoder_is_named(monkeypatch):
    monkeypatch.setattr(features, "check", lambda _: None)
    with pytest.raises(
        DecodeError, match="the installed Pillow cannot decode AVIF: python -m pip install pillow, and pack again"
    ):
        decode_image(file_of("AVIF"), RULE)
    assert decode_image(encode(photograph(), "JPEG"), RULE).shape == (24, 24, 3)


def test_containers_are_told_apart_by_their_brands():
    assert is_avif(file_of("AVIF")[:64])
    assert is_avif(b"\0\0\0\x18ftypmif1\0\0\0\0mif1avif")
    assert not is_avif(b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic")
    assert not is_avif(b"\0\0\0\x14ftypmif1\0\0\0\0mif1avif")  # beyond the box
    assert box_formats.is_jpeg_2000(file_of("J2K"))


def test_a_pack_of_an_earlier_version_does_not_get_what_it_left_out(tmp_path):
    source = fake_source(6, raising={5: OSError(5, "Input/output error")})
    with pytest.raises(ShardError, match="Input/output error"):
        pack(source, tmp_path)
    journal = Journal(open_location(str(tmp_path)).child("train"))
    plan = journal.plan()
    assert plan is not None
    assert plan["decoding"] == 4
    journal.begin(plan | {"decoding": 2})
    added = source.changed(raising={}, forms={5: "AVIF"})
    with pytest.raises(
        ShardError, match=r"leaves images of this format out; pack with --overwrite or, in parts, into another DEST$"
    ):
        pack(added, tmp_path)
    # Version 3 packs it; and images of other formats go on as before.
    journal.begin(plan | {"decoding": 3})
    assert pack(added, tmp_path).manifest.num_images == 6
    (tmp_path / "train/manifest.json").unlink()
    journal.begin(plan | {"decoding": 2})
    assert pack(source.changed(raising={}), tmp_path).manifest.num_images == 6
