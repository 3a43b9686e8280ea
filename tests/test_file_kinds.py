"""What a file is by its first bytes, and what a message about it advises."""

import io
from functools import partial
from typing import Any

import pytest
from PIL import Image

from loopfeed.engine.records.given_weights import read_given_weights
from loopfeed.preprocess.decoding.decode import DecodeError, ResizeRule, decode_image
from loopfeed.preprocess.file_kinds import kind_of
from loopfeed.preprocess.shards.location import ShardError
from loopfeed.preprocess.shards.manifest import Manifest
from loopfeed.preprocess.sources.labels_file import read_labels
from loopfeed.preprocess.sources.listing import SourceError

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 132735\n"


def written(form, size=(16, 16), mode="RGB"):
    file = io.BytesIO()
    Image.new(mode, size, 1).save(file, form)
    return file.getvalue()


# Beginnings from the formats' specifications, or files that Pillow wrote.
FOREIGN: dict[str, tuple[Any, str, str]] = {
    "git lfs": (LFS, "a Git LFS pointer", "run `git lfs pull`"),
    "git-annex": (b"/annex/objects/SHA256E-s3--2c\n", "a git-annex pointer", "run `git annex get`"),
    "page": (b"\n<!DOCTYPE html>\n<html lang=en><title>404", "an HTML page", "download it again"),
    "page with a mark": (b"\xef\xbb\xbf<HTML><body>", "an HTML page", "download it again"),
    "answer of a store": (b'<?xml version="1.0"?><Error><Code>NoSuchKey', "an XML document", "download it again"),
    "answer of an API": (b'{"message": "Not Found"}', "JSON text", "download it again"),
    "zeros": (bytes(600), "a file of zeros", "copy or download it again"),
    "heif": (b"\0\0\0\x18ftypmif1\0\0\0\0mif1unci", "a HEIF image", "heif-convert"),
    "canon": (b"\0\0\0\x18ftypcrx \0\0\0\1crx ", "a raw photograph", "develop it"),
    "fujifilm": (b"FUJIFILMCCD-RAW 0201", "a raw photograph", "develop it"),
    "mp4": (b"\0\0\0\x20ftypisom\0\0\2\0isomiso2", "a video", "ffmpeg"),
    "matroska": (b"\x1aE\xdf\xa3\x01\0\0\0", "a video", "ffmpeg"),
    "avi": (b"RIFF\x24\0\0\0AVI LIST", "a video", "ffmpeg"),
    "photoshop": (b"8BPS\0\1\0\0\0\0", "a Photoshop document", "convert it to PNG"),
    "gimp": (b"gimp xcf v011\0", "a GIMP document", "convert it to PNG"),
    "svg": (b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg">', "an SVG drawing", "render it"),
    "bare svg": (b'<svg width="8">', "an SVG drawing", "render it"),
    "pdf": (partial(written, "PDF"), "a PDF document", "render it"),
    "postscript": (partial(written, "EPS"), "a PostScript document", "render it"),
    "icon": (partial(written, "ICO"), "an icon", "convert it to PNG"),
    "icns": (partial(written, "ICNS", (64, 64)), "an icon", "convert it to PNG"),
    "pcx": (partial(written, "PCX"), "a PCX image", "convert it to PNG"),
    "sgi": (partial(written, "SGI"), "an SGI image", "convert it to PNG"),
    "dds": (partial(written, "DDS"), "a DDS texture", "convert it to PNG"),
    "tga": (partial(written, "TGA"), "a TGA image", "convert it to PNG"),
    "im": (b"Image type: RGB image\r\n", "an IM image", "convert it to PNG"),
    "msp": (partial(written, "MSP", mode="1"), "an MSP image", "convert it to PNG"),
    "qoi": (b"qoif\0\0\0\x10\0\0\0\x10\3\0", "a QOI image", "convert it to PNG"),
    "exr": (b"\x76\x2f\x31\x01\2\0\0\0", "an OpenEXR image", "map its tones"),
    "radiance": (b"#?RADIANCE\nFORMAT=32-bit_rle_rgbe\n", "a Radiance HDR image", "map its tones"),
    "dicom": (bytes(128) + b"DICM\2\0", "a DICOM image", "16-bit PNG"),
    "fits": (b"SIMPLE  =                    T", "a FITS file", "export its images"),
    "hdf5": (b"\x89HDF\r\n\x1a\n\0\0", "an HDF5 file", "export its images"),
    "numpy": (b"\x93NUMPY\1\0", "a NumPy array", "export its images"),
    "parquet": (b"PAR1\x15\4", "a Parquet table", "export its images"),
    "zip": (b"PK\3\4\x0a\0\0\0\0\0", "a zip archive", "unpack it"),
    "gzip": (b"\x1f\x8b\x08\0", "compressed with gzip", "unpack it"),
    "7z": (b"7z\xbc\xaf\x27\x1c\0\4", "a 7z archive", "unpack it"),
    "macos": (b"\0\5\x16\7\0\2\0\0Mac OS X", "metadata of macOS", "remove it"),
    "text": (b"this is not the image that you look for", "text", "remove it"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_file_of_another_kind_is_named_with_a_remedy(case):
    given, name, remedy = FOREIGN[case]
    encoded = given() if callable(given) else given
    with pytest.raises(DecodeError) as caught:
        decode_image(encoded, ResizeRule(16, 16))
    said = str(caught.value)
    assert said.startswith(f"not an image that can be read: it is {name}"), said
    assert remedy in said.partition("; ")[2]
    assert "\n" not in said


def test_a_supported_image_is_never_taken_for_something_else():
    for form in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"):
        assert kind_of(written(form)[:512]) is None


def test_a_pointer_in_place_of_another_file_is_named(tmp_path):
    (tmp_path / "w.safetensors").write_bytes(LFS)
    with pytest.raises(ValueError, match=r"w\.safetensors is a Git LFS pointer .*: run `git lfs pull` in its"):
        read_given_weights(tmp_path / "w.safetensors")
    (tmp_path / "w.pt").write_bytes(b"<!doctype html><html>")
    with pytest.raises(ValueError, match=r"w\.pt is an HTML page, .*: download it again"):
        read_given_weights(tmp_path / "w.pt")
    (tmp_path / "l.csv").write_bytes(LFS)
    with pytest.raises(SourceError, match=r"l\.csv: it is a Git LFS pointer .*; run `git lfs pull`"):
        read_labels(tmp_path / "l.csv")
    with pytest.raises(ShardError, match=r"^m: it is a Git LFS pointer .*; run `git lfs pull`"):
        Manifest.from_json(LFS, where="m")
