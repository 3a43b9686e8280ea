"""Image folders: classes, hidden files, links, and what is refused."""

import os
import re
import socket
from itertools import pairwise
from pathlib import Path

import pytest

from loopfeed.preprocess.sources import tree
from loopfeed.preprocess.sources.open_source import ImageClass, SourceError, open_source
from loopfeed.preprocess.sources.tree import MAX_DEPTH


def grow(root, files):
    for name in files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return root


def listed(split):
    return {split.image(i).name: split.image(i).label for i in range(len(split))}


def test_one_tree_of_classes(tmp_path):
    grow(tmp_path, ["b/1.jpg", "a/2.JPEG", "a/deep/er/3.png", "B/4.jpg"])
    with open_source(tmp_path) as source:
        assert source.layout == "a folder of class folders"
        (split,) = source.splits.values()
        assert split.name == "train"
        assert split.classes == (ImageClass("B", "B"), ImageClass("a", "a"), ImageClass("b", "b"))  # by bytes
        assert listed(split) == {"B/4.jpg": 0, "a/2.JPEG": 1, "a/deep/er/3.png": 1, "b/1.jpg": 2}
        assert all(split.read(i) == split.image(i).name.encode() for i in range(4))


@pytest.mark.parametrize(
    ("folders", "splits"),
    [
        (["train", "val"], ["train", "val"]),
        (["train", "validation", "test"], ["train", "val", "test"]),
        (["Train", "Test"], ["train", "test"]),
        (["val"], ["val"]),
    ],
)
def test_split_folders(tmp_path, folders, splits):
    grow(tmp_path, [f"{folder}/{each}/1.jpg" for folder in folders for each in "ab"])
    grow(tmp_path, ["notes/readme.txt"])
    with open_source(tmp_path) as source:
        assert list(source.splits) == splits
        assert source.layout.endswith("of class folders (not read: notes/)")
        for folder, split in zip(folders, splits, strict=True):
            assert listed(source.splits[split]) == {f"{folder}/a/1.jpg": 0, f"{folder}/b/1.jpg": 1}


def test_hidden_files_are_ignored_and_all_others_are_listed(tmp_path):
    hidden = [".DS_Store", "a/.DS_Store", "a/._1.jpg", "a/Thumbs.db", "a/desktop.ini", "a/.git/x", "__MACOSX/a/1.jpg"]
    grow(tmp_path, [*hidden, "a/1.jpg", "a/notes.txt", "a/no suffix"])
    with open_source(tmp_path) as source:
        assert set(listed(source.splits["train"])) == {"a/1.jpg", "a/notes.txt", "a/no suffix"}


@pytest.mark.parametrize("file", ["classes.txt", "LOC_synset_mapping.txt"])
def test_readable_names(tmp_path, file):
    grow(tmp_path, ["n02/1.jpg", "n01/1.jpg", "n03/1.jpg"])
    (tmp_path / file).write_text("n02 great white shark, man-eater\nn09 nobody\n\nn01 tench\n", encoding="utf-8")
    with open_source(tmp_path) as source:
        names = [(each.id, each.name) for each in source.splits["train"].classes]
        assert names == [("n01", "tench"), ("n02", "great white shark"), ("n03", "n03")]


@pytest.mark.parametrize("text", ["\ufeffa\talpha\n\n  \nb  beta, second\nc\n", "c \r\nb\tbeta\r\n\r\na alpha"])
def test_names_in_any_white_space(tmp_path, text):
    grow(tmp_path, ["a/1.jpg", "b/1.jpg", "c/1.jpg"])
    (tmp_path / "classes.txt").write_bytes(text.encode())
    with open_source(tmp_path) as source:
        assert [each.name for each in source.splits["train"].classes] == ["alpha", "beta", "c"]


def test_names_in_one_split_count_for_all(tmp_path):
    grow(tmp_path, [f"{split}/{each}/1.jpg" for split in ("train", "val") for each in "ab"])
    (tmp_path / "train" / "classes.txt").write_text("a alpha\nb beta\n", encoding="utf-8")
    with open_source(tmp_path) as source:
        assert source.splits["train"].classes == source.splits["val"].classes
        assert [each.name for each in source.splits["val"].classes] == ["alpha", "beta"]
    with open_source(tmp_path, splits=("val",)) as source:
        assert source.splits["val"].classes[0] == ImageClass("a", "alpha")


def test_names_that_are_not_text(tmp_path):
    grow(tmp_path, ["a/1.jpg"])
    (tmp_path / "classes.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(SourceError, match=r"classes\.txt cannot be read as UTF-8 text"):
        open_source(tmp_path)


def test_links_to_files_and_folders_are_followed(tmp_path):
    grow(tmp_path / "elsewhere", ["1.jpg", "2.jpg"])
    grow(tmp_path / "set", ["a/0.jpg"])
    (tmp_path / "set" / "b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "set" / "a" / "linked.jpg").symlink_to(tmp_path / "elsewhere" / "1.jpg")
    with open_source(tmp_path / "set") as source:
        split = source.splits["train"]
        assert listed(split) == {"a/0.jpg": 0, "a/linked.jpg": 0, "b/1.jpg": 1, "b/2.jpg": 1}
        place = [split.image(i).name for i in range(4)].index("a/linked.jpg")
        assert split.read(place) == b"1.jpg"


def test_a_link_to_a_folder_around_it_is_refused(tmp_path):
    grow(tmp_path, ["a/deep/1.jpg"])
    (tmp_path / "a" / "deep" / "loop").symlink_to(tmp_path / "a")
    with pytest.raises(SourceError, match="a/deep/loop is a link to a folder that contains it; remove the link"):
        open_source(tmp_path)


def test_a_broken_link_is_listed_and_fails_when_read(tmp_path):
    grow(tmp_path, ["a/1.jpg"])
    (tmp_path / "a" / "broken.jpg").symlink_to(tmp_path / "nowhere")
    with open_source(tmp_path) as source:
        split = source.splits["train"]
        place = [split.image(i).name for i in range(2)].index("a/broken.jpg")
        with pytest.raises(SourceError, match="the symbolic link leads to a file or folder that does not exist"):
            split.read(place)


def test_a_broken_link_in_place_of_a_class_folder_is_a_class_that_cannot_be_read(tmp_path):
    grow(tmp_path, ["a/1.jpg", "c/2.jpg"])
    for name in ("b", "classes.txt"):
        (tmp_path / name).symlink_to(tmp_path / "nowhere" / name)
    with open_source(tmp_path) as source:
        split = source.splits["train"]
        assert [each.id for each in split.classes] == ["a", "b", "c"]
        images = [split.image(i) for i in range(len(split))]
        assert sorted((each.name, each.label) for each in images) == [("a/1.jpg", 0), ("b", 1), ("c/2.jpg", 2)]
        with pytest.raises(SourceError, match="the symbolic link leads to a file or folder that does not exist"):
            split.read([each.name for each in images].index("b"))


def test_a_broken_link_in_place_of_a_split_folder_is_refused(tmp_path):
    grow(tmp_path, ["train/a/1.jpg"])
    (tmp_path / "val").symlink_to(tmp_path / "nowhere")
    with pytest.raises(SourceError, match=r"val is a link that leads nowhere; correct or remove it"):
        open_source(tmp_path)


def test_a_huge_file_is_refused_unread(tmp_path):
    grow(tmp_path, ["a/1.jpg"])
    os.truncate(tmp_path / "a" / "1.jpg", 2**40)  # sparse
    with open_source(tmp_path) as source, pytest.raises(ValueError, match="has 1099511627776 bytes, more than"):
        source.splits["train"].read(0)


@pytest.mark.parametrize("content", [b"", b"longer than before", None])
def test_a_file_that_changed_after_it_was_listed_is_refused(tmp_path, content):
    grow(tmp_path, ["a/1.jpg"])
    with open_source(tmp_path) as source:
        (tmp_path / "a" / "1.jpg").unlink()
        if content is None:
            os.mkfifo(tmp_path / "a" / "1.jpg")  # reading it would wait for a writer
            message = "changed since it was listed: it is no longer a regular file"
        else:
            (tmp_path / "a" / "1.jpg").write_bytes(content)
            message = f"changed since it was listed: 7 bytes then, {len(content)} now"
        with pytest.raises(OSError, match=message):
            source.splits["train"].read(0)


def test_a_file_that_shrinks_while_it_is_read(tmp_path, monkeypatch):
    grow(tmp_path, ["a/1.jpg"])
    real = os.fstat

    def fstat(descriptor):
        status = real(descriptor)
        os.truncate(tmp_path / "a" / "1.jpg", 3)
        return status

    with open_source(tmp_path) as source:
        monkeypatch.setattr(os, "fstat", fstat)
        with pytest.raises(OSError, match="7 bytes then, 3 now"):
            source.splits["train"].read(0)


def test_pipes_and_sockets_are_refused(tmp_path, monkeypatch):
    grow(tmp_path, ["a/1.jpg"])
    os.mkfifo(tmp_path / "a" / "pipe.jpg")
    with pytest.raises(SourceError, match=r"pipe\.jpg is neither a file nor a folder; remove it"):
        open_source(tmp_path)
    (tmp_path / "a" / "pipe.jpg").unlink()
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(tmp_path / "a")  # the name of a socket must be short
        server.bind("s.jpg")
        with pytest.raises(SourceError, match=r"s\.jpg is neither a file nor a folder"):
            open_source(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            [],
            r"is not a data set: expected class folders, .*, ILSVRC2012_img_train\.tar.*found an empty folder",
        ),
        (
            ["1.jpg", "2.jpg"],
            r"is not a data set: .* or a container .*; found 1\.jpg, 2\.jpg; give the table .* with --labels",
        ),
        (["1.jpg", "a/2.jpg"], r"has 1 image outside any class folder, for example 1\.jpg"),
        (["train/a/1.jpg", "train/2.jpg"], r"train has 1 image outside any class folder, for example 2\.jpg"),
        (["val/a/1.jpg", "validation/a/1.jpg"], "has both val/ and validation/ for the split val; keep one"),
        (["cifar/train/a/1.jpg", "x/1.jpg"], r"cifar/ has a train/ folder; give .*cifar"),
        (["train/a/1.jpg", "val/a/1.jpg", "val/c/1.jpg"], "val has 1 class that train lacks: c"),
        (["a/.DS_Store"], "the split train of .* has no images"),
    ],
)
def test_invalid_trees_are_refused(tmp_path, files, message):
    grow(tmp_path, files)
    with pytest.raises(SourceError, match=message):
        open_source(tmp_path)


def fan(folder, num_levels):
    """Levels of folders in which two links each lead to the next level: 2^n paths."""
    levels = [folder / f"level{number}" for number in range(num_levels)]
    for level in levels:
        level.mkdir(parents=True)
    for level, following in pairwise(levels):
        (level / "x").symlink_to(following)
        (level / "y").symlink_to(following)
    (levels[-1] / "image.jpg").write_bytes(b"x")
    return levels[0]


def test_links_that_fan_out_are_refused_with_their_name(tmp_path):
    (tmp_path / "set" / "a").mkdir(parents=True)
    (tmp_path / "set" / "a" / "top").symlink_to(fan(tmp_path / "elsewhere", 30))
    with pytest.raises(
        SourceError, match=r"set/a/top/x.* is reached more than 16 times through links in the class .*set/a;"
    ):
        open_source(tmp_path / "set")


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1, 150])
def test_the_depth_of_folders_is_limited(tmp_path, depth, monkeypatch):
    (tmp_path / "set" / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "set" / "a")
    for _ in range(depth):
        Path("d").mkdir()
        os.chdir("d")
    Path("image.jpg").write_bytes(b"x")
    os.chdir(tmp_path)
    if depth <= MAX_DEPTH:
        with open_source("set") as source:
            assert source.splits["train"].image(0).name == "a/" + "d/" * depth + "image.jpg"
    else:
        with pytest.raises(SourceError, match="is more than 100 folders deep in the class set/a; move its images up"):
            open_source("set")


def huge_file(path):
    path.touch()
    os.truncate(path, 2**32)


@pytest.mark.parametrize("name", ["classes.txt", "LOC_synset_mapping.txt"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "it is a pipe, not a file"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a device, not a file"),
        (huge_file, "the file is larger than the 16,777,216 bytes allowed"),
    ],
    ids=["pipe", "device", "huge"],
)
def test_a_table_of_names_that_is_no_plain_file_is_refused(tmp_path, name, make, message):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "image.jpg").write_bytes(b"x")
    make(tmp_path / name)
    with pytest.raises(SourceError, match=rf"{re.escape(name)} cannot be read as UTF-8 text: {message}"):
        open_source(tmp_path)


def test_a_link_to_itself_is_named(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "loop").symlink_to("loop")
    with pytest.raises(SourceError, match="a/loop cannot be accessed: Too many levels of symbolic links; remove it"):
        open_source(tmp_path)


def test_files_beside_the_splits_are_known_by_their_names_alone(tmp_path, monkeypatch):
    """ImageNet's annotations are half a million files: a look at each takes minutes on a file server."""
    grow(tmp_path, ["train/a/1.png", "val/a/1.png", "Annotations/train/1.xml", "Annotations/train/2.xml"])
    looked = []

    def status_of(path):
        looked.append(os.path.relpath(path, tmp_path))
        return Path(path).stat()

    monkeypatch.setattr(tree, "status_of", status_of)
    with open_source(tmp_path) as source:
        assert set(source.splits) == {"train", "val"}
        assert [len(split) for split in source.splits.values()] == [1, 1]
    assert set(looked) == {"train/a/1.png", "val/a/1.png"}
