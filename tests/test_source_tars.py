"""ImageNet's archives and tar archives of class folders, read in place."""

import gc
import os
import zipfile

import pytest

pytest.importorskip("scipy.io")

from loopfeed.preprocess.sources.listing import ChangedSourceError
from loopfeed.preprocess.sources.open_source import ImageClass, SourceError, open_source
from tests.imagenet_archives import SORTED_IDS, SORTED_NAMES, devkit, tar_bytes, train_archive, val_archive

TRUTH = [3, 1, 1, 2, 2, 3]
TRAIN, VAL, KIT = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"


@pytest.fixture
def archives(tmp_path):
    (tmp_path / TRAIN).write_bytes(train_archive())
    (tmp_path / VAL).write_bytes(val_archive(len(TRUTH)))
    (tmp_path / KIT).write_bytes(devkit(TRUTH))
    return tmp_path


def contents(split):
    return {split.image(i).name: (split.image(i).label, split.read(i)) for i in range(len(split))}


def test_both_archives_share_sorted_classes(archives):
    with open_source(archives) as source:
        assert source.layout == "ImageNet's archives of train and val"
        assert list(source.splits) == ["train", "val"]
        expected = tuple(ImageClass(*each) for each in zip(SORTED_IDS, SORTED_NAMES, strict=True))
        assert source.splits["train"].classes == expected
        assert source.splits["val"].classes == expected
        assert contents(source.splits["train"]) == {
            f"{TRAIN}!{each}.tar!{each}_{k}.JPEG": (label, f"train {each} {k}".encode())
            for label, each in enumerate(SORTED_IDS)
            for k in range(2)
        }
        label_of_number = {2: 0, 3: 1, 1: 2}
        assert contents(source.splits["val"]) == {
            f"{VAL}!ILSVRC2012_val_{k:08d}.JPEG": (label_of_number[number], f"val {k}".encode())
            for k, number in enumerate(TRUTH, start=1)
        }


def test_the_train_archive_alone_is_named_by_ids(archives):
    (archives / VAL).unlink()
    (archives / KIT).unlink()
    for path in (archives, archives / TRAIN):
        with open_source(path) as source:
            assert list(source.splits) == ["train"]
            assert source.splits["train"].classes == tuple(ImageClass(each, each) for each in SORTED_IDS)


def test_an_archive_with_another_name_is_recognised_by_its_members(archives):
    (archives / TRAIN).rename(archives / "renamed.tar")
    with open_source(archives / "renamed.tar") as source:
        assert len(source.splits["train"]) == 6
    with open_source(archives / VAL) as source:
        assert len(source.splits["val"]) == 6


def test_a_val_archive_needs_the_kit(archives):
    (archives / KIT).unlink()
    with pytest.raises(SourceError, match=r"ILSVRC2012_img_val\.tar contains no labels; put ILSVRC2012_devkit_t12"):
        open_source(archives)
    with open_source(archives, splits=("train",)) as source:
        assert list(source.splits) == ["train"]


def test_more_images_than_labels(archives):
    (archives / VAL).write_bytes(val_archive(len(TRUTH) + 1))
    with pytest.raises(SourceError, match=r"ILSVRC2012_val_00000007\.JPEG, for which .* has no label.* 1 to 6"):
        open_source(archives)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            tar_bytes({"n02000001.tar": b"x" * 512, "readme.txt": b""}),
            r"contains readme\.txt, but may contain only class archives",
        ),
        (
            tar_bytes({"n02000001.tar": b"x" * 512}),
            r"img_train\.tar!n02000001\.tar is damaged: no tar header at byte 512",
        ),
        (tar_bytes({"a/n02000001.tar": b"", "b/n02000001.tar": b""}), "two archives of the class n02000001"),
        (train_archive()[:-12000], r"img_train\.tar is truncated: it ends at byte \d+"),
        (tar_bytes({}), "is a file of zeros"),
    ],
)
def test_a_bad_train_archive_is_refused_and_closed(tmp_path, content, message):
    (tmp_path / TRAIN).write_bytes(content)
    before = num_descriptors()
    with pytest.raises(SourceError, match=message):
        open_source(tmp_path)
    assert num_descriptors() == before


def num_descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0  # noqa: PTH112, PTH208


def test_closing_closes_and_reading_then_fails(archives):
    before = num_descriptors()
    source = open_source(archives)
    split = source.splits["train"]
    source.close()
    source.close()
    assert num_descriptors() == before
    with pytest.raises(OSError, match="Bad file descriptor"):
        split.read(0)


def test_an_archive_modified_during_reading_is_an_oserror(archives):
    # Not one image's: were each later image noted as a failure, the trouble would stay hidden.
    with open_source(archives, splits=("train",)) as source:
        split = source.splits["train"]
        split.read(0)
        with (archives / TRAIN).open("ab") as file:
            file.write(b"more")
        with pytest.raises(OSError, match=r"img_train\.tar has changed since it was listed") as caught:
            split.read(0)
        assert isinstance(caught.value, ChangedSourceError)


def test_a_pipe_is_refused_as_a_source(tmp_path):
    os.mkfifo(tmp_path / "set.tar")
    before = num_descriptors()
    with pytest.raises(
        SourceError, match=r"set\.tar is not a file; give the folder or archive that contains the images"
    ):
        open_source(tmp_path / "set.tar")
    assert num_descriptors() == before


CLASS_TREE = {"b/1.jpg": b"b1", "a/deep/2.jpg": b"a2", "a/.DS_Store": b"", "__MACOSX/a/._1.jpg": b"", "README.md": b""}


@pytest.mark.parametrize("wrapped", ["", "set/", "set/inner/"])
def test_a_tar_of_class_folders(tmp_path, wrapped):
    path = tmp_path / "set.tar"
    path.write_bytes(tar_bytes({wrapped + name: content for name, content in CLASS_TREE.items()} | {"LICENSE": b""}))
    if wrapped:
        path.write_bytes(tar_bytes({wrapped + name: content for name, content in CLASS_TREE.items() if "/" in name}))
    with open_source(path) as source:
        assert [each.id for each in source.splits["train"].classes] == ["a", "b"]
        assert contents(source.splits["train"]) == {
            f"set.tar!{wrapped}a/deep/2.jpg": (0, b"a2"),
            f"set.tar!{wrapped}b/1.jpg": (1, b"b1"),
        }


def test_an_image_twice_in_a_tar_is_refused(tmp_path):
    path = tmp_path / "set.tar"
    path.write_bytes(tar_bytes({"a/1.jpg": b"old", "b/2.jpg": b"", "./a/1.jpg": b"new"}))
    before = num_descriptors()
    with pytest.raises(SourceError, match=r"set\.tar!a/1\.jpg exists twice; write the archive again without the"):
        open_source(path)
    assert num_descriptors() == before


def test_official_archives_and_their_folders_give_the_same_pack(archives, tmp_path_factory):
    def digest(path):
        with open_source(path, splits=("train",)) as source:
            return source.splits["train"].digest()

    folder = tmp_path_factory.mktemp("unpacked")
    for each in SORTED_IDS:
        (folder / "train" / each).mkdir(parents=True)
        for k in range(2):
            (folder / "train" / each / f"{each}_{k}.JPEG").write_bytes(f"train {each} {k}".encode())
    expected = digest(folder)
    assert digest(archives) == expected
    (archives / TRAIN).rename(archives / "renamed.tar")
    assert digest(archives / "renamed.tar") == expected


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({".DS_Store": b""}, "is an empty archive"),
        ({}, "is a file of zeros, as after an interrupted copy, neither a folder nor a tar or zip archive"),
        ({"1.jpg": b"", "a/2.jpg": b""}, r"contains the image 1\.jpg outside any class folder"),
        ({"notes.txt": b""}, r"contains no class folders \(its first file is notes\.txt\)"),
        ({"train/a/1.jpg": b"", "b/2.jpg": b""}, r"has images in b/ beside train/, for example b/2\.jpg"),
        ({"val/a/1.jpg": b"", "validation/a/1.jpg": b""}, "has both val/ and validation/ for the split val; keep one"),
        (
            {"train/a/1.jpg": b"", "val/b/2.jpg": b""},
            "val has 1 class that train lacks: b; put images of each into train",
        ),
    ],
)
def test_a_tar_in_no_known_order(tmp_path, entries, message):
    path = tmp_path / "set.tar"
    path.write_bytes(tar_bytes(entries))
    with pytest.raises(SourceError, match=message):
        open_source(path)


def test_an_archive_for_each_split_is_read_like_the_folders(tmp_path):
    def digests(root):
        with open_source(root) as source:
            return source.layout, {name: split.digest() for name, split in source.splits.items()}

    trains, vals = {"a/1.jpg": b"1", "b/2.jpg": b"22"}, {"b/3.jpg": b"333"}
    for split, files in (("train", trains), ("val", vals)):
        for name, content in files.items():
            path = tmp_path / "folder" / split / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    (tmp_path / "archives").mkdir()
    (tmp_path / "archives/train.tar").write_bytes(tar_bytes(trains))
    with zipfile.ZipFile(tmp_path / "archives/Validation.zip", "w") as archive:
        for name, content in vals.items():
            archive.writestr(f"val/{name}", content)
    layout, found = digests(tmp_path / "archives")
    assert layout == "archives train.tar and Validation.zip of class folders"
    assert found == digests(tmp_path / "folder")[1]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            {"val.tar": {"train/a/1.jpg": b"", "test/a/2.jpg": b""}},
            r"val\.tar contains train and test, unlike its name",
        ),
        ({"val.tar": {"test/a/1.jpg": b""}}, r"val\.tar contains test, unlike its name"),
        ({"val.tar": {"train/a/1.jpg": b""}}, r"val\.tar contains train, unlike its name"),
        (
            {"val.tar": {"a/1.jpg": b""}, "valid.tar": {"a/1.jpg": b""}},
            r"has both val\.tar and valid\.tar for the split",
        ),
        ({"val.tar": {".DS_Store": b""}}, r"val\.tar is an empty archive"),
        ({"val.tar": {"z/1.jpg": b""}}, "the split val has 1 class that train lacks: z"),
    ],
)
def test_archives_of_splits_that_contradict_each_other(tmp_path, names, message):
    for name, entries in ({"train.tar": {"a/1.jpg": b""}} | names).items():
        (tmp_path / name).write_bytes(tar_bytes(entries))
    with pytest.raises(SourceError, match=message):
        open_source(tmp_path)
