"""HEIC and JPEG XL: their remedy without their packages, their bounds, and with their packages their pixels.

The packages are extras, of which not everybody may use the licences: those tests are skipped without them.
"""

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

import loopfeed
from loopfeed.preprocess.decoding import known_formats
from loopfeed.preprocess.decoding.box_formats import HEIC, JPEG_XL, has_deep_heic
from loopfeed.preprocess.decoding.decode import DecodeError, ResizeRule, decode_image
from loopfeed.preprocess.decoding.hidden_size import hidden_pixels
from loopfeed.preprocess.decoding.jpeg_xl import claimed_size
from loopfeed.preprocess.decoding.known_formats import sniff
from loopfeed.preprocess.sources.selection import is_image_name

# A red picture of 70 × 50 pixels, by pillow-heif 1.8.1 (one HEVC picture of 72 × 64) and pillow-jxl-plugin 1.3.8.
RED_HEIC = base64.b64decode(
    "AAAAHGZ0eXBoZWljAAAAAG1pZjFoZWljbWlhZgAAAX1tZXRhAAAAAAAAACFoZGxyAAAAAAAAAABwaWN0AAAAAAAAAAAAAAAAAAAAACJpbG9jAAAA"
    "AERAAAEAAQAAAAABoQABAAAAAAAAACIAAAAjaWluZgAAAAAAAQAAABVpbmZlAgAAAAABAABodmMxAAAAAA5waXRtAAAAAAABAAAA/WlwcnAAAADd"
    "aXBjbwAAAHZodmNDAQNwAAAAkAAAAAAAHvAA/P34+AAADwNgAAEAGEABDAH//wNwAAADAJAAAAMAAAMAHroCQGEAAQAqQgEBA3AAAAMAkAAAAwAA"
    "AwAeoCSBB15bq5Ka5uAhoMCAAAAMgAAAAwCEYgABAAZEAcFzwYkAAAATY29scm5jbHgAAQANAAaAAAAAFGlzcGUAAAAAAAAARgAAAEAAAAAoY2xh"
    "cAAAAEYAAAABAAAAMgAAAAEAAAAAAAAAAv////IAAAACAAAAEHBpeGkAAAAAAwgICAAAABhpcG1hAAAAAAAAAAEAAQWBAgMFhAAAACptZGF0AAAA"
    "HigBrxlFjO9Jpb//4GZf9+Wv+La1pd+UUqYegkSFyA=="
)
RED_JXL = base64.b64decode(
    "/wqIAYoMABWIBgA0AZlbFACACpVRxg1ezvV8+aHDYtrGdYa22rawhDHxjIOFAChBsby7ZoHuEMCxnNwQQwJtqczRaQiAoAxa4QRGFyFfQVIA9wT4"
    "wQcM2pUA"
)
RULE = ResizeRule(24, 28)


def boxed(codestream: bytes, *cuts: int) -> bytes:
    """Return a JPEG XL file in boxes, of which the codestream is cut into parts."""
    parts = [codestream[start:stop] for start, stop in zip((0, *cuts), (*cuts, len(codestream)), strict=True)]
    found = b"\0\0\0\x0cJXL \r\n\x87\n\0\0\0\x14ftypjxl \0\0\0\0jxl "
    for number, part in enumerate(parts):
        content = number.to_bytes(4) + part if cuts else part
        found += (len(content) + 8).to_bytes(4) + (b"jxlp" if cuts else b"jxlc") + content
    return found


@pytest.mark.parametrize(("encoded", "name", "extra"), [(RED_HEIC, HEIC, "heic"), (RED_JXL, JPEG_XL, "jxl")])
def test_without_its_package_a_file_is_listed_with_the_extra(
    encoded: bytes, name: str, extra: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(known_formats, "find_spec", lambda _: None)
    source = tmp_path / "source"
    (source / "red").mkdir(parents=True)
    (source / "red" / f"a.{extra}").write_bytes(encoded)
    Image.new("RGB", (8, 8)).save(source / "red" / "b.png")
    loopfeed.pack(source, tmp_path / "data", size=8)
    listed = json.loads((tmp_path / "data/train/failures.jsonl").read_text().splitlines()[0])
    assert listed["reason"] == (
        f"no package is installed that decodes {name}: python -m pip install 'loopfeed[{extra}]', and pack again with "
        "--overwrite; or convert the image to PNG"
    )
    with pytest.raises(loopfeed.ShardError, match=rf"a\.{extra}: no package .*loopfeed\[{extra}\]"):
        loopfeed.pack(source, tmp_path / "other", size=8, on_error="fail")


def test_the_names_and_the_first_bytes_are_known() -> None:
    assert all(is_image_name(f"photo{each}") for each in (".HEIC", ".heif", ".jxl", ".avif"))
    beginnings = {
        b"\0\0\0\x18ftypheic\0\0\0\0mif1heic": HEIC,
        b"\0\0\0\x18ftypmif1\0\0\0\0mif1heix": HEIC,
        b"\0\0\0\x18ftypmif1\0\0\0\0heicavif": "AVIF",
        b"\xff\x0a\x7a\x1f": JPEG_XL,
        b"\0\0\0\x0cJXL \r\n\x87\n": JPEG_XL,
    }
    assert {each: getattr(sniff(each), "name", None) for each in beginnings} == beginnings
    assert sniff(b"\0\0\0\x18ftypmif1\0\0\0\0mif1unci") is None


def test_the_size_of_a_jpeg_xl_is_read_before_it_is_decoded() -> None:
    # By the first bits: small, height / 8 - 1, and a ratio of 1:1 or 2:1; or none, and width / 8 - 1.
    heads = {(1, 0, 1): (8, 8), (1, 31, 1): (256, 256), (1, 1, 7): (32, 16), (1, 1, 0, 2): (24, 16)}
    for bits, size in heads.items():
        value = sum(bit << at for bit, at in zip(bits, (0, 1, 6, 9), strict=False))
        assert claimed_size(b"\xff\x0a" + value.to_bytes(12, "little"), 10**8) == size
    for each in (RED_JXL, boxed(RED_JXL), boxed(RED_JXL, 3, 6, 40)):
        assert claimed_size(each, 3500) == (70, 50)
        with pytest.raises(ValueError, match="70×50 is more than the 3499 pixels allowed"):
            claimed_size(each, 3499)
    with pytest.raises(ValueError, match="is truncated, or has no picture"):
        claimed_size(boxed(b"")[:20], 10**8)


def test_the_pictures_inside_a_heic_count() -> None:
    assert hidden_pixels(RED_HEIC, HEIC) == 72 * 64
    assert hidden_pixels(RED_HEIC.replace(b"hvcC", b"free"), HEIC) is None
    assert hidden_pixels(RED_HEIC[: RED_HEIC.index(b"hvcC") + 40], HEIC) is None
    assert not has_deep_heic(RED_HEIC)


# With the packages.


def picture() -> Image.Image:
    ramp = np.add.outer(np.arange(60) * 2, np.arange(90)).astype(np.uint8)
    return Image.fromarray(np.stack([ramp, ramp[::-1], 255 - ramp], axis=-1))


def saved(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def heic(image: Image.Image, **options: Any) -> bytes:
    plugin = pytest.importorskip("pillow_heif")
    from unittest.mock import patch

    with patch.dict(Image.SAVE), patch.dict(Image.EXTENSION), patch.dict(Image.OPEN), patch.dict(Image.SAVE_ALL):
        plugin.register_heif_opener()
        return saved(image, "HEIF", **{"quality": -1} | options)


def jxl(image: Image.Image, **options: Any) -> bytes:
    pytest.importorskip("pillow_jxl")
    return saved(image, "JXL", **{"lossless": True} | options)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "LA"])
@pytest.mark.parametrize("encode", [heic, jxl])
def test_a_lossless_file_has_the_pixels_of_a_png(encode: Callable[..., bytes], mode: str) -> None:
    image = picture()
    if "A" in mode:
        image.putalpha(image.getchannel("R"))
    image = image.convert(mode)
    right = decode_image(saved(image, "PNG"), RULE)
    # HEVC stores brightness and two colours, each rounded to 8 bits.
    np.testing.assert_allclose(decode_image(encode(image), RULE), right, atol=3 if encode is heic else 0)


def test_jpeg_xl_of_16_bits_is_scaled_by_the_levels() -> None:
    image = Image.fromarray((np.arange(5400).reshape(60, 90) * 12).astype(np.uint16))
    for rule in (RULE, ResizeRule(24, 28, levels="0:40000")):
        np.testing.assert_array_equal(decode_image(jxl(image), rule), decode_image(saved(image, "PNG"), rule))


def test_orientations_are_applied_once() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    right = decode_image(saved(ImageOps.exif_transpose(_with(picture(), exif)), "PNG"), RULE)
    np.testing.assert_allclose(decode_image(heic(picture(), exif=exif.tobytes()), RULE), right, atol=3)


def _with(image: Image.Image, exif: Image.Exif) -> Image.Image:
    return Image.open(io.BytesIO(saved(image, "PNG", exif=exif)))


@pytest.mark.filterwarnings("ignore:Using JPEG reconstruction")
def test_a_jpeg_in_a_jpeg_xl_is_the_jpeg(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    picture().save(tmp_path / "turned.jpg", exif=exif)
    with Image.open(tmp_path / "turned.jpg") as image:
        encoded = jxl(image, lossless=False)
    right = decode_image((tmp_path / "turned.jpg").read_bytes(), RULE)
    np.testing.assert_array_equal(decode_image(encoded, RULE), right)


@pytest.mark.parametrize(("encoded", "package"), [(RED_HEIC, "pillow_heif"), (RED_JXL, "pillow_jxl")])
def test_damaged_and_large_files_are_refused(encoded: bytes, package: str) -> None:
    pytest.importorskip(package)
    np.testing.assert_allclose(
        decode_image(encoded, RULE).mean(axis=(0, 1)), [200, 30, 20], atol=20
    )  # of a low quality
    for length in (13, 40, len(encoded) // 2, len(encoded) - 9):
        with pytest.raises(DecodeError, match="truncated"):
            decode_image(encoded[:length], RULE)
    with pytest.raises(DecodeError, match="70×50 is more than the 100 pixels allowed"):
        decode_image(encoded, RULE, max_pixels=100)


def test_levels_are_refused_for_deep_heic() -> None:
    encoded = heic(Image.fromarray(np.arange(4096, dtype=np.uint16).reshape(64, 64)))
    assert has_deep_heic(encoded)
    assert decode_image(encoded, RULE).shape == (24, 24, 3)
    with pytest.raises(DecodeError, match="--levels cannot be applied to its 10 or 12 bits"):
        decode_image(encoded, ResizeRule(24, 28, levels="0:4095"))
