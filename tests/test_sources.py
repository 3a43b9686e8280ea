"""Opening a source: arguments, digest, hold-out, limit, and files that are no data set."""

import gzip
import io
import tarfile
import unicodedata
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from loopfeed.preprocess.sources.open_source import SourceError, open_source
from tests.fake_source import fake_source, pack


@pytest.fixture
def tree(tmp_path):
    for name in "abc":
        (tmp_path / name).mkdir()
        for k in range(100):
            (tmp_path / name / f"{k}.jpg").write_bytes(bytes([k]))
    return tmp_path


def names(split):
    return [split.image(i).name for i in range(len(split))]


def test_holding_out_divides_the_images(tree):
    with open_source(tree, holdout=0.2) as source:
        train, val = source.splits["train"], source.splits["val"]
        assert sorted(names(train) + names(val)) == sorted(f"{each}/{k}.jpg" for each in "abc" for k in range(100))
        assert train.classes == val.classes
        assert Counter(name[0] for name in names(val)) == {"a": 20, "b": 20, "c": 20}
        assert all(val.read(i) == bytes([int(val.image(i).name[2:-4])]) for i in range(len(val)))
        everything = names(train)
    with open_source(tree, holdout=0.2, splits=("train",)) as source:
        assert names(source.splits["train"]) == everything
    with open_source(tree, holdout=0.2, splits=("val",), limit=5) as source:
        assert list(source.splits) == ["val"]
        assert len(source.splits["val"]) == 5


def test_classes_of_one_image_are_all_trained_on(tmp_path):
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.jpg").touch()
    with pytest.raises(
        SourceError, match="keeps one training image and the largest of its 3 classes has 1; give a folder with val/"
    ):
        open_source(tmp_path, holdout=0.9)
    with open_source(tmp_path, holdout=0.9, splits=("train",)) as source:
        assert len(source.splits["train"]) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"holdout": -0.1}, "holdout must be at least 0 and less than 1, got -0.1"),
        ({"holdout": 1.0}, "holdout must be at least 0 and less than 1"),
        ({"holdout": float("nan")}, "holdout must be at least 0 and less than 1"),
        ({"limit": 0}, "limit must be at least 1 image per split, got 0"),
        ({"splits": ("val",)}, "has no split val; choose from train"),
        ({"splits": ("test", "dev"), "holdout": 0.1}, "has no split test, dev; choose from train, val"),
    ],
)
def test_arguments_out_of_range(tree, options, message):
    with pytest.raises(SourceError, match=message):
        open_source(tree, **options)


def test_holding_out_where_there_is_a_val_split(tmp_path):
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        (tmp_path / split / "a" / "1.jpg").touch()
    with pytest.raises(SourceError, match="already has a val split; omit holdout"):
        open_source(tmp_path, holdout=0.1)
    (tmp_path / "train").rename(tmp_path / "test")
    (tmp_path / "val").rename(tmp_path / "x")
    with pytest.raises(SourceError, match="has no train split to hold out images from"):
        open_source(tmp_path, holdout=0.1)


def digest(path, **options):
    with open_source(path, **options) as source:
        return source.splits["train"].digest()


def test_the_digest_sees_names_labels_sizes_and_classes(tree):
    original = digest(tree)
    assert len(bytes.fromhex(original)) == 32
    assert digest(tree) == original
    assert digest(tree, limit=10) != original
    (tree / "a" / "0.jpg").write_bytes(b"longer")
    resized = digest(tree)
    (tree / "a" / "0.jpg").rename(tree / "a" / "zero.jpg")
    renamed = digest(tree)
    (tree / "a" / "zero.jpg").rename(tree / "b" / "zero.jpg")
    moved = digest(tree)
    (tree / "d").mkdir()
    assert len({original, resized, renamed, moved, digest(tree)}) == 5


def everything(path):
    with open_source(path, holdout=0.3) as source:
        return {
            name: (split.digest(), [split.read(index) for index in range(len(split))])
            for name, split in source.splits.items()
        }


def test_another_spelling_of_the_source_is_the_same_pack(tree, tmp_path_factory):
    plain = everything(tree)
    around = tmp_path_factory.mktemp("around")
    (around / "train").symlink_to(tree)
    assert everything(around) == plain
    for archive, inside in (("one.tar", "."), ("two.tar", "."), ("deep.tar", "set/inner"), ("split.tar", "set/train")):
        with tarfile.open(around / archive, "w") as tar:
            tar.add(tree, inside)
        assert everything(around / archive) == plain


def test_images_are_made_on_demand_and_bounded(tree):
    with open_source(tree) as source:
        split = source.splits["train"]
        assert split.image(3) == split.image(3)
        for index in (-1, 300):
            with pytest.raises(IndexError, match=f"image {index} is out of range for split train, which has 300"):
                split.image(index)


@pytest.mark.parametrize("where", ["gs://bucket/set", "s3://bucket/set.tar", "file:///data/set"])
def test_a_url_is_refused_as_a_source(where):
    with pytest.raises(SourceError, match=f"SOURCE must be a folder or archive on this machine, got {where}; copy"):
        open_source(where)


@pytest.mark.parametrize("finished", [True, False])
def test_a_pack_is_refused_as_a_source(tmp_path, finished):
    pack(fake_source(5), tmp_path / "shards")
    split = tmp_path / "shards" / "train"
    if not finished:
        (split / "manifest.json").unlink()
    for path in (tmp_path, tmp_path / "shards", split):
        with pytest.raises(SourceError, match=r"already contains packed shards, in .*train; train on them"):
            open_source(path)


def open_files() -> list[str]:
    return sorted(each.name for each in Path("/proc/self/fd").iterdir())


def test_a_failure_closes_opened_files(tmp_path):
    with tarfile.open(tmp_path / "set.tar", "w") as tar:
        for name in ("train/a/1.jpg", "val/a/1.jpg", "val/b/1.jpg"):
            tar.addfile(tarfile.TarInfo(name))
    before = open_files()
    with pytest.raises(SourceError, match="val has 1 class that train lacks: b"):
        open_source(tmp_path / "set.tar")
    with open_source(tmp_path / "set.tar", splits=("train",)):
        assert len(open_files()) > len(before)
    assert open_files() == before


def test_files_that_are_no_archive(tmp_path):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a/1.jpg"))
    (tmp_path / "set.tar.gz").write_bytes(gzip.compress(file.getvalue()))
    (tmp_path / "set.7z").write_bytes(b"7z\xbc\xaf\x27\x1c" + bytes(1000))
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8\xff" + bytes(1000))
    (tmp_path / "lfs.tar").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    for name, what in {"set.tar.gz": "compressed with gzip", "set.7z": "a 7z archive"}.items():
        with pytest.raises(SourceError, match=f"{name} is {what}, so .*; unpack it and give the folder$"):
            open_source(tmp_path / name)
    with pytest.raises(SourceError, match=r"lfs\.tar is a Git LFS pointer .*; run `git lfs pull` in its repository$"):
        open_source(tmp_path / "lfs.tar")
    with pytest.raises(SourceError, match=r"photo\.jpg is neither a folder nor a tar or zip archive"):
        open_source(tmp_path / "photo.jpg")


def test_classes_in_different_unicode_forms_are_named_as_such(tmp_path):
    composed, decomposed = (unicodedata.normalize(form, "Küche") for form in ("NFC", "NFD"))
    for place in (f"train/{composed}", f"val/{decomposed}"):
        (tmp_path / place).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / place / "1.png")
    with pytest.raises(SourceError, match=r"only in Unicode form \(NFD, not NFC\); rename it"):
        open_source(tmp_path)
    (tmp_path / "val" / decomposed).rename(tmp_path / "val" / composed)
    open_source(tmp_path).close()
    (tmp_path / "l.csv").write_text(f"path,classes\ntrain/{decomposed}/1.png,a\nval/{composed}/1.png,a\n")
    with pytest.raises(SourceError, match=r"line 2: .*; .* has this name in another Unicode form \(NFC, not NFD\)"):
        open_source(tmp_path, labels=tmp_path / "l.csv")
