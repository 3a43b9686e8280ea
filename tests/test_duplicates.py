"""Images with the same pixels in two splits, or in one under two labels: found exactly, and said by both commands."""

import json
from itertools import product

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

import loopfeed
from loopfeed.preprocess.commands.cli import main as preprocess_imagenet
from loopfeed.preprocess.commands.inspect_cli import main as inspect_shards
from loopfeed.preprocess.decoding.decode import ResizeRule
from loopfeed.preprocess.packing.pack import pack_split
from loopfeed.preprocess.packing.plan import PackSettings
from loopfeed.preprocess.shards import duplicates
from loopfeed.preprocess.shards.duplicates import find_same_pixels
from loopfeed.preprocess.shards.location import open_location
from loopfeed.preprocess.shards.targets import SplitTargets
from tests.fake_source import FakeSource, fake_source, pack

SPLITS = ("train", "val")


def split_of(pictures, labels, name="train"):
    """Return a split whose images are numbered pictures of noise."""
    images = np.random.default_rng(0).integers(0, 256, (100, 4, 4, 3), dtype=np.uint8)
    return FakeSource(images[pictures], labels, name=name)


def found(dest, splits=SPLITS, **values):
    return [
        (each.split, each.other, each.num_images, [(pair.index, pair.other_index) for pair in each.first])
        for each in find_same_pixels(str(dest), splits, **values)
    ]


# Pictures 3 and 7 of val are in train too, twice there; picture 5 is in train under the labels 0 and 2, picture 1 twice
# under one label, and picture 9 of val under another label than in train.
TRAIN = [1, 5, 3, 1, 7, 5, 3, 9]
TRAIN_LABELS = [0, 0, 1, 0, 1, 2, 1, 0]
VAL, VAL_LABELS = [20, 7, 3, 21, 9], [0, 1, 1, 0, 2]
EXPECTED = [("train", "train", 2, [(1, 5), (5, 1)]), ("val", "train", 3, [(1, 4), (2, 2), (4, 7)])]


@pytest.mark.parametrize(
    "values", [{}, {"codec": "blosc"}, {"layout": "dense"}, {"checksum": False}, {"layout": "dense", "codec": "blosc"}]
)
def test_what_is_the_same_is_found_exactly(tmp_path, values):
    pack(split_of(TRAIN, TRAIN_LABELS), tmp_path, **values)
    pack(split_of(VAL, VAL_LABELS, "val"), tmp_path, **values)
    assert found(tmp_path) == EXPECTED
    assert found(tmp_path, ("val",)) == []
    assert found(tmp_path, ("train",)) == EXPECTED[:1]
    # A quick search needs checksums.
    assert found(tmp_path, most_compared=100) == ([] if values == {"checksum": False} else EXPECTED)


def test_it_equals_a_plain_comparison_of_all_pairs(tmp_path):
    random = np.random.default_rng(1)
    numbers = {
        name: random.integers(0, 30, count).tolist() for name, count in (("train", 40), ("val", 25), ("test", 9))
    }
    labels = {name: random.integers(0, 3, len(each)).tolist() for name, each in numbers.items()}
    for name in numbers:
        pack(split_of(numbers[name], labels[name], name), tmp_path)
    names, expected = [*numbers], {}
    for one, other in product(names, names):
        pairs = [
            row
            for row, picture in enumerate(numbers[other])
            if any(
                picture == each and (one != other or labels[one][at] != labels[other][row])
                for at, each in enumerate(numbers[one])
            )
        ]
        if pairs and names.index(one) <= names.index(other):
            expected[other, one] = len(pairs), pairs[:3]
    result = {
        (each.split, each.other): (each.num_images, [pair.index for pair in each.first])
        for each in find_same_pixels(str(tmp_path), names)
    }
    assert result == expected


def test_equal_checksums_of_different_pixels_are_not_the_same(tmp_path, monkeypatch):
    pack(fake_source(9), tmp_path)
    pack(fake_source(9, seed=1, name="val"), tmp_path)
    monkeypatch.setattr(duplicates, "_keys", lambda name, split, _: np.zeros(split.num_images, np.uint64))
    assert found(tmp_path) == []
    assert found(tmp_path, most_compared=4) == []


def test_a_search_that_is_cut_short_says_so(tmp_path):
    pack(fake_source(9), tmp_path)
    pack(fake_source(9, name="val"), tmp_path)
    (same,) = find_same_pixels(str(tmp_path), SPLITS, most_compared=6)
    assert not same.is_all
    assert str(same).startswith(f"at least {same.num_images} image")
    (same,) = find_same_pixels(str(tmp_path), SPLITS, most_compared=18)
    assert str(same) == (
        "9 images of val are in train too, pixel for pixel: n1/0.png (image 0) = n1/0.png (image 0), n2/1.png (image 1)"
        " = n2/1.png (image 1), n3/2.png (image 2) = n3/2.png (image 2) and 6 more"
    )


def test_whole_pictures_with_the_same_canvas_but_other_extents_are_not_the_same(tmp_path):
    black = {(6, 4): np.zeros((4, 6, 3), np.uint8), (5, 4): np.zeros((4, 5, 3), np.uint8)}
    settings = PackSettings(rule=ResizeRule(4, 4, "bicubic", canvas="3:2"))
    for name, size in (("train", (6, 4)), ("val", (5, 4)), ("test", (6, 4))):
        source = FakeSource([black[size]] * 2, [0, 0], name=name)  # type: ignore[arg-type]
        source.digest = lambda: "ab" * 32  # type: ignore[method-assign]
        pack_split(source, open_location(str(tmp_path)).child(name), settings)
    assert found(tmp_path, ("train", "val", "test")) == [("test", "train", 2, [(0, 0), (1, 0)])]


def test_targets_are_labels(tmp_path):
    source = split_of([1, 1, 2, 2], [0] * 4)
    for values, expected in (
        ([[1], [1], [2], [2]], []),
        ([[1], [3], [2], [2]], [("train", "train", 2, [(0, 1), (1, 0)])]),
    ):
        targets = SplitTargets("classes", "ab" * 32, np.array(values, np.uint32))
        settings = PackSettings(rule=ResizeRule(4, 4))
        pack_split(source, open_location(str(tmp_path)).child("train"), settings, overwrite=True, targets=targets)
        assert found(tmp_path, ("train",)) == expected


def test_both_commands_say_which_files_are_in_two_splits(tmp_path):
    random = np.random.default_rng(0)
    for name, numbers in (("train/cat", range(4)), ("train/dog", range(4, 8)), ("val/cat", (1, 8)), ("val/dog", (9,))):
        for number in numbers:
            path = tmp_path / "photos" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (9, 9, 3), np.uint8)).save(path)
    copy = tmp_path / "photos/train/cat/1.png"
    (tmp_path / "photos/val/cat/1.png").write_bytes(copy.read_bytes())
    (tmp_path / "photos/train/dog/copy.png").write_bytes((tmp_path / "photos/train/cat/0.png").read_bytes())
    packed = CliRunner().invoke(preprocess_imagenet, ["--size", "8", *map(str, (tmp_path / "photos", tmp_path / "p"))])
    assert "warning: 1 image of val is in train too, pixel for pixel: cat/1.png (image " in packed.stderr
    assert "warning: 2 images of train are there under another label too, pixel for pixel: " in packed.stderr
    for options in ([], ["--verify"]):
        result = CliRunner().invoke(inspect_shards, [str(tmp_path / "p"), *options])
        assert result.exit_code == 0
        assert "warning: 1 image of val is in train too, pixel for pixel: cat/1.png (image " in result.stdout
    found = json.loads(CliRunner().invoke(inspect_shards, [str(tmp_path / "p"), "--json"]).stdout)["same_pixels"]
    assert [(each["split"], each["other"], each["num_images"]) for each in found] == [
        ("train", "train", 2),
        ("val", "train", 1),
    ]
    assert {found[0]["first"][0][name] for name in ("name", "other_name")} == {"cat/0.png", "dog/copy.png"}


def test_a_pack_from_python_is_warned_of_too(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
    said: list[str] = []
    source = {"train": (images, np.arange(6) % 3), "val": (images[4:], np.array([1, 2]))}
    loopfeed.pack(source, tmp_path, size=8, notify=said.append)
    (warning,) = [each for each in said if each.startswith("warning: ")]
    assert warning.startswith("warning: 2 images of val are in train too, pixel for pixel: ")
