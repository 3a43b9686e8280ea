"""Folders in stores: keys by prefix, conditional writes, and paths as users write them."""

import os
from pathlib import Path

import pytest
import tensorstore as ts

from loopfeed.preprocess.shards.location import ShardError, open_location
from loopfeed.preprocess.shards.split_files import delete_split_files, is_split_file, split_files


def test_a_write_is_refused_after_a_concurrent_write(monkeypatch):
    location = open_location("memory://x", context=ts.Context())
    assert location.replace("a", b"1")
    assert location.replace("a", b"2")
    assert location.read("a") == b"2"


@pytest.mark.parametrize(
    ("key", "is_ours"),
    [
        ("manifest.json", True),
        ("pixels/zarr.json", True),
        ("pixels/c/12/0/0", True),
        ("labels/c/12", True),
        ("journal/shards/00000001.json", True),
        ("manifest.json.bak", False),
        ("a/manifest.json", False),
        ("pixels/c/1/0/1", False),
        ("pixels/c/1/0/0/0", False),
        ("labels/c/1/0", False),
        ("journal/notes", False),
        ("pixels/c/x/0/0", False),
        ("manifestxjson", False),
    ],
)
def test_the_files_of_a_split(key, is_ours):
    assert is_split_file(key) == is_ours


def test_only_own_files_and_empty_own_folders_are_deleted(tmp_path):
    location = open_location(str(tmp_path))
    for key in ("pixels/c/0/0/0", "pixels/c/1/0/0", "pixels/c/1/0/mine", "labels/c/0", "other/x"):
        location.write(key, b"x")
    (tmp_path / "other/empty").mkdir()
    assert split_files(location) == ["labels/c/0", "pixels/c/0/0/0", "pixels/c/1/0/0"]
    delete_split_files(location, location.list_keys())
    left = {path.relative_to(tmp_path).as_posix() for path in Path(tmp_path).rglob("*")}
    below_mine = {"pixels", "pixels/c", "pixels/c/1", "pixels/c/1/0", "pixels/c/1/0/mine"}
    assert left == below_mine | {"other", "other/x", "other/empty"}


def test_a_path_that_is_not_utf8_is_refused_and_a_link_to_it_is_not(tmp_path):
    folder = tmp_path / os.fsdecode(b"donn\xe9es")
    folder.mkdir()
    with pytest.raises(ShardError, match=r"must be UTF-8, but .*donn\\udce9es.*: rename that folder, or give"):
        open_location(str(folder))
    (tmp_path / "link").symlink_to(folder)
    location = open_location(str(tmp_path / "link"))
    location.write("zarr.json", b"{}")
    assert (folder / "zarr.json").read_bytes() == location.read("zarr.json") == b"{}"
