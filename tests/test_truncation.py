"""Truncated files: how much of them is there, what is kept, and that a missing end marker is no fault."""

import io
import re
import struct
import tracemalloc

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image, ImageFile

from loopfeed.preprocess.commands.cli import main
from loopfeed.preprocess.decoding.decode import DecodeError, ResizeRule, decode_image
from loopfeed.preprocess.decoding.formats import open_pixels
from loopfeed.preprocess.decoding.known_formats import sniff
from loopfeed.preprocess.decoding.notes import NOTHING, DecodeNotes

HEIGHT, WIDTH = 64, 80


def drawn(mode="RGB"):
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    waves = np.stack([rows * 3 % 256, columns * 3 % 256, rows * columns % 256], -1) // 2
    noise = np.random.default_rng(0).integers(0, 120, waves.shape)
    return Image.fromarray((waves + noise).astype(np.uint8)).convert(mode)


def encoded(kind, mode="RGB", **options):
    file = io.BytesIO()
    image = drawn(mode) if mode != "I;16" else Image.fromarray(np.asarray(drawn("L")).astype(np.uint16) * 257)
    image.save(file, kind, **options)
    return file.getvalue()


FILES = {
    "baseline JPEG": lambda: encoded("JPEG", quality=90),
    "JPEG 4:4:4": lambda: encoded("JPEG", subsampling=0),
    "JPEG with restarts": lambda: encoded("JPEG", restart_marker_rows=1),
    "grey JPEG": lambda: encoded("JPEG", "L"),
    "progressive JPEG": lambda: encoded("JPEG", progressive=True),
    "PNG": lambda: encoded("PNG"),
    "palette PNG": lambda: encoded("PNG", "P"),
    "transparent PNG": lambda: encoded("PNG", "RGBA"),
    "16-bit PNG": lambda: encoded("PNG", "I;16"),
    "1-bit PNG": lambda: encoded("PNG", "1"),
    "GIF": lambda: encoded("GIF"),
    "transparent GIF": lambda: encoded("GIF", "P", transparency=3),
    "BMP": lambda: encoded("BMP"),
    "TIFF": lambda: encoded("TIFF"),
    "PPM": lambda: encoded("PPM"),
    "PGM": lambda: encoded("PPM", "L"),
    "lossy WebP": lambda: encoded("WEBP"),
    "lossless WebP": lambda: encoded("WEBP", lossless=True),
}


def opened(content, **options):
    known = sniff(content)
    assert known is not None
    return np.asarray(open_pixels(content, known, max_pixels=10**4, **options).image)


def opened_or_message(content):
    try:
        return opened(content), ""
    except ValueError as error:
        return None, str(error)


def cuts_of(content):
    drawn_cuts = np.random.default_rng(1).integers(len(content) // 10, len(content), 12)
    return sorted({*drawn_cuts.tolist(), *range(len(content) - 9, len(content))})


def equal_rows(one, other):
    return int((one == other).reshape(HEIGHT, -1).all(axis=1).sum())


@pytest.mark.parametrize("name", FILES)
def test_as_many_rows_are_there_as_are_said(name):
    whole = FILES[name]()
    expected, num_shares = opened(whole), 0
    for cut in cuts_of(whole):
        found, message = opened_or_message(whole[:cut])
        share = re.search(r"(\d+) of 64 rows \((\d+) %\) are there; .*--truncated keep", message)
        if found is not None:
            np.testing.assert_array_equal(found, expected)  # nothing of the picture is missing
        elif share is None:
            assert re.search("truncated before its first row|all 64 rows .* not all of their detail", message)
        else:
            num_shares += 1
            assert int(share[2]) == 100 * int(share[1]) // HEIGHT
            kept = opened(whole[:cut], keep_truncated=True)
            # Smoothing of the colour changes the last row.
            assert equal_rows(kept, expected) >= int(share[1]) - 1
    assert num_shares or name == "progressive JPEG"


@pytest.mark.parametrize("name", [name for name in FILES if "WebP" not in name])
def test_what_is_kept_is_what_pillow_keeps(name, monkeypatch):
    whole = FILES[name]()
    for cut in (len(whole) // 2, len(whole) * 9 // 10):
        notes = list[DecodeNotes]()
        found = opened(whole[:cut], keep_truncated=True, note=notes.append)
        assert sum(notes, NOTHING).num_kept == 1
        with monkeypatch.context() as patched, Image.open(io.BytesIO(whole[:cut])) as image:
            patched.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
            np.testing.assert_array_equal(found, np.asarray(image))


def test_a_picture_without_its_end_marker_is_whole():
    rule = ResizeRule(size=32, resize=32)
    for whole in (FILES["baseline JPEG"](), FILES["progressive JPEG"](), FILES["JPEG with restarts"]()):
        for cut in (whole[:-2], whole[:-1], whole[:-2] + b"\xff"):
            np.testing.assert_array_equal(decode_image(cut, rule), decode_image(whole, rule))
    png = FILES["PNG"]()
    for num_bytes in (4, 12, 16):  # the checksum of IEND, IEND, and the checksum of the pixels
        np.testing.assert_array_equal(decode_image(png[:-num_bytes], rule), decode_image(png, rule))


def test_the_directory_of_a_tiff_may_be_at_its_end():
    whole = encoded("TIFF", compression="tiff_lzw")
    with pytest.raises(DecodeError, match="it is truncated before its first row"):
        decode_image(whole[: len(whole) // 2], ResizeRule(truncated="keep"))


def test_a_lossless_webp_that_lacks_bytes_of_its_picture_is_not_whole():
    plain = FILES["lossless WebP"]()
    for start in range(len(plain) // 2, len(plain) - 20, 7):
        with pytest.raises(DecodeError, match="it is truncated"):
            decode_image(plain[:start] + plain[start + 9 :], ResizeRule())


def test_the_memory_for_a_truncated_webp_depends_on_the_file_not_on_the_size_that_it_states():
    cut = bytearray(FILES["lossy WebP"]()[:-100])
    cut[4:8] = cut[16:20] = struct.pack("<I", 2**28)
    tracemalloc.start()
    with pytest.raises(DecodeError, match="it is truncated before its first row"):
        decode_image(bytes(cut), ResizeRule(truncated="keep"))
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


def test_the_command_says_how_much_is_there_and_keeps_it_if_told(tmp_path):
    folder = tmp_path / "images/a"
    folder.mkdir(parents=True)
    (tmp_path / "images/b").mkdir()
    whole = FILES["baseline JPEG"]()
    for name, content in {"whole": whole, "end": whole[:-2], "half": whole[: len(whole) // 2]}.items():
        (folder / f"{name}.jpg").write_bytes(content)
    (tmp_path / "images/b/1.jpg").write_bytes(whole)

    def run(dest, *options):
        arguments = [str(tmp_path / "images"), str(tmp_path / dest), "--size", "16", *options]
        return CliRunner().invoke(main, arguments)

    skipped = run("skip")
    assert skipped.exit_code == 0
    assert re.search(r"a/half\.jpg: .*it is truncated: \d+ of 64 rows \(\d+ %\) are there", skipped.output)
    assert "3 images of 2 classes packed" in skipped.output
    kept = run("keep", "--truncated", "keep")
    assert "4 images of 2 classes packed" in kept.output
    assert "Truncated, but kept (--truncated keep): 1 image." in kept.output
    again = run("keep")
    assert again.exit_code == 2
    assert "--truncated was keep, is now not given" in again.output
