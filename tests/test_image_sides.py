"""The size of small images: which fits, `--size auto`, and what a pack says about those that it enlarges."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

import loopfeed
from loopfeed.preprocess.commands.cli import main
from loopfeed.preprocess.decoding.decode import ResizeRule, decode_stored
from loopfeed.preprocess.decoding.default_resize import default_resize, fitting_size
from loopfeed.preprocess.decoding.notes import NOTHING, DecodeNotes
from loopfeed.preprocess.pixels import unpack_rgb
from loopfeed.preprocess.sources.array_images import encode_array


@pytest.mark.parametrize(
    ("shorter_side", "resize", "right"),
    [
        (28, None, (28, 28)),
        (32, None, (32, 32)),
        (50, None, (48, 48)),
        (64, None, (64, 64)),
        (72, None, (64, 64)),
        (96, None, (84, 96)),
        (255, None, (220, 251)),
        (256, None, (224, 256)),
        (5000, None, (224, 256)),
        (3, None, (3, 3)),
        (1, None, (1, 1)),
        (32, 40, (32, 40)),
        (100, 40, (40, 40)),
        (500, 300, (224, 300)),
    ],
)
def test_the_size_that_fits(shorter_side: int, resize: int | None, right: tuple[int, int]) -> None:
    assert fitting_size(shorter_side, resize) == right


@pytest.mark.parametrize(
    ("side", "resize", "right"),
    [
        (28, None, (28, 28)),
        (50, None, (48, 48)),
        (64, None, (64, 64)),
        (65, None, (64, 65)),
        (96, None, (96, 96)),
        (150, None, (148, 150)),
        (224, None, (224, 224)),
        (240, None, (224, 240)),
        (256, None, (224, 256)),
        (1024, None, (224, 256)),
        (96, 80, (80, 80)),
    ],
)
def test_squares_of_one_size_keep_their_pixels(side: int, resize: int | None, right: tuple[int, int]) -> None:
    assert fitting_size(side, resize, are_squares=True) == right


def test_no_multiple_of_4_that_fits_is_larger() -> None:
    for side in range(4, 300):
        size, resize = fitting_size(side)
        assert size % 4 == 0
        assert resize <= side
        assert size == 224 or default_resize(size + 4) > side


def folder_of(root: Path, *sizes: tuple[int, int]) -> Path:
    """Write images of these widths and heights in two classes."""
    for number, size in enumerate(sizes):
        path = root / "ab"[number % 2] / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise(size, 90).save(path)
    return root


def run(*arguments: Any) -> str:
    result = CliRunner().invoke(main, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def rule_of(dest: Path) -> tuple[int, int]:
    with loopfeed.open_split(dest, "train") as split:
        rule = ResizeRule.from_json(split.manifest.resize_rule)
    return rule.size, rule.resize


@pytest.mark.parametrize(
    ("sizes", "options", "right"),
    [
        ([(32, 32)] * 6, [], (32, 32)),
        ([(100, 40), (40, 60), (300, 500), (40, 40)], [], (40, 40)),
        ([(300, 400)] * 4, [], (224, 256)),
        ([(96, 96)] * 4, [], (96, 96)),
        ([(96, 96), (96, 100)], [], (84, 96)),
        ([(96, 96), (100, 100)], [], (84, 96)),
        ([(96, 96)] * 4, ["--resize", 80], (80, 80)),
        ([(300, 400)] * 4, ["--resize", 100], (100, 100)),
        ([(100, 75)] * 4, ["--canvas", "3:2"], (64, 64)),
        ([(100, 75)] * 4, ["--layout", "dense"], (64, 64)),
    ],
    ids=["CIFAR", "median", "large", "squares", "oblong", "two sizes", "squares resized", "resize", "canvas", "dense"],
)
def test_auto_is_chosen_by_the_median_and_kept(
    sizes: list[tuple[int, int]], options: list[Any], right: tuple[int, int], tmp_path: Path
) -> None:
    source = folder_of(tmp_path / "images", *sizes)
    said = run(source, tmp_path / "data", "--size", "auto", *options)
    assert f"Size {right[0]}, after resizing the shorter side to {right[1]} (--size auto): " in said
    assert rule_of(tmp_path / "data") == right
    folder_of(tmp_path / "images", *[(500, 500)] * (len(sizes) + 3))
    if not options:
        for path in source.rglob("*.png"):
            path.touch()
    again = CliRunner().invoke(main, [*map(str, (source, tmp_path / "data", "--size", "auto", *options))])
    assert f"Size {right[0]} (--size auto), as of the pack in" in again.output
    assert again.exit_code == 2  # the images have changed, not the size
    assert "source's images changed" in again.output or "number of images" in again.output
    assert "--size" not in again.output.partition("packed from a different source")[2].partition(". Use")[0]
    run(source, tmp_path / "data", "--size", "auto", "--overwrite", *options)
    assert rule_of(tmp_path / "data") == fitting_size(500, options[1] if "--resize" in options else None)


def test_auto_continues_an_interrupted_pack_and_finds_a_finished_one(tmp_path: Path) -> None:
    pixels, labels = np.random.default_rng(0).integers(0, 256, (24, 20, 30, 3), np.uint8), np.arange(24) % 2

    def stop(_split: str, progress: Any) -> None:
        if progress.done:
            raise KeyboardInterrupt

    arguments: dict[str, Any] = {"size": "auto", "shard_images": 2, "workers": 1}
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loopfeed.preprocess.packing.pipeline._MAX_BLOCK_IMAGES", 2)
        with pytest.raises(KeyboardInterrupt):
            loopfeed.pack((pixels, labels), tmp_path, on_progress=stop, **arguments)
    found = loopfeed.pack((pixels, labels), tmp_path, notify=said.append, **arguments)["train"]
    assert found.num_resumed
    assert said[0].startswith("Size 20 (size auto), as of the pack in")
    assert loopfeed.pack((pixels, labels), tmp_path, **arguments)["train"].was_complete
    assert rule_of(tmp_path) == (20, 20)


def test_auto_passes_over_what_cannot_be_read(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "images", (16, 16))
    (source / "a" / "faulty.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (source / "a" / "text.jpg").write_bytes(b"text")
    assert "the median shorter side of 1 image is 16 px" in run(source, tmp_path / "data", "--size", "auto")
    (source / "a" / "000.png").write_bytes(b"")
    result = CliRunner().invoke(main, [str(source), str(tmp_path / "other"), "--size", "auto"])
    assert result.exit_code == 2
    assert "the size of no image of train can be read. The first: a/" in result.output
    assert "Correct the images, or give --size, such as 224" in result.output


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "the file is empty"),
        (b"text of some length", "not an image that can be read: it is text"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "python -m pip install 'loopfeed[heic]'"),
    ],
    ids=["empty", "text", "HEIC"],
)
def test_auto_names_why_no_size_can_be_read(
    content: bytes, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loopfeed.preprocess.decoding.known_formats.Format.is_available", False)
    for name in "ab":
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "1.jpg").write_bytes(content)
    result = CliRunner().invoke(main, [str(tmp_path / "images"), str(tmp_path / "data"), "--size", "auto"])
    assert result.exit_code == 2
    assert "/1.jpg: " in result.output
    assert cause in result.output


@pytest.mark.parametrize("size", ["automatic", "0", "4097", "1.5"])
def test_other_words_and_numbers_are_refused(size: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [str(tmp_path), str(tmp_path / "data"), "--size", size])
    assert result.exit_code == 2
    assert "Invalid value for '--size'" in result.output
    with pytest.raises(ValueError, match="size must be a whole number"):
        loopfeed.pack(tmp_path / "images", tmp_path / "data", size="large")  # type: ignore[arg-type]


def test_a_pack_and_a_dry_run_say_how_many_images_are_enlarged(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "images", *[(32, 40)] * 5, (100, 100))
    dry = run(source, tmp_path / "data", "--dry-run", "--size", 64)
    assert "5 of 6 images looked at have a shorter side of less than --size 64, and would be enlarged; " in dry
    assert "--size auto would be 32." in dry
    said = run(source, tmp_path / "data", "--size", 64)
    assert "Enlarged, because their shorter side is less than --size 64: 5 of 6 images (at most 32 px)." in said
    assert "--size 32 fits them, and takes 24.0 KiB in the place of 96.0 KiB; run the same command again" in said
    few = run(folder_of(tmp_path / "few", (32, 40), *[(100, 100)] * 5), tmp_path / "few_data", "--size", 64)
    assert "less than --size 64: 1 of 6 images (at most 32 px)." in few
    assert "fits them" not in few
    assert "nlarged" not in run(source, tmp_path / "small", "--size", 32)


def test_images_below_the_resized_length_are_enlarged_and_squares_can_keep_their_pixels(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "images", *[(96, 96)] * 4)
    dry = run(source, tmp_path / "data", "--dry-run", "--size", 96)
    assert "4 of 4 images looked at have a shorter side of less than --resize 110, and would be enlarged; " in dry
    assert "--size auto would be 96, without resizing." in dry
    assert "central crop of 96 x 96 px (76 % of a square image); " in dry
    said = run(source, tmp_path / "data", "--size", 96)
    assert "Enlarged, because their shorter side is less than --resize 110: 4 of 4 images (at most 96 px)." in said
    assert "warning: --size 84 fits them, and takes 110.2 KiB in the place of 144.0 KiB; " in said
    assert "; --size 96 --resize 96 keeps all their pixels; run the same command again with one of these" in said
    kept = run(source, tmp_path / "data", "--size", 96, "--resize", 96, "--overwrite")
    assert not any(words in kept for words in ("nlarged", "photograph", "square image"))
    with loopfeed.open_split(tmp_path / "data", "train") as split:
        pixels, labels = np.empty((1, split.height, split.row_words), np.uint32), np.empty(1, np.int32)
        split.read_into(np.arange(1), pixels, labels, timeout_s=60)
        names = split.names(np.arange(1))
    assert names is not None
    image = np.asarray(Image.open(source / names[0]).convert("RGB"))
    np.testing.assert_array_equal(unpack_rgb(pixels)[0], image)
    oblong = run(folder_of(tmp_path / "oblong", *[(96, 100)] * 4), tmp_path / "other", "--size", 96)
    assert "% of a 4:3 photograph" in oblong
    assert "--size 84 fits them" in oblong
    assert "keeps all" not in oblong
    resized = run(source, tmp_path / "data", "--size", 84, "--resize", 120, "--overwrite")
    assert "warning: --size 84 --resize 96 fits them; --size 96 --resize 96 keeps" in resized


def test_notes_of_enlarged_images_can_be_added() -> None:
    notes: list[DecodeNotes] = []
    for side in (16, 40, 30):
        decode_stored(encode_array(np.zeros((side, 50), np.uint8)), ResizeRule(32, 32), note=notes.append)
    assert sum(notes, NOTHING) == DecodeNotes(num_enlarged=2, enlarged_max=30)
    same = DecodeNotes(num_enlarged=1, enlarged_max=96, enlarged_square=96)
    assert (same + NOTHING + same).enlarged_square == 96
    for other in (DecodeNotes(num_enlarged=1, enlarged_max=96), replace(same, enlarged_max=90, enlarged_square=90)):
        assert (same + other + same).enlarged_square == 0
