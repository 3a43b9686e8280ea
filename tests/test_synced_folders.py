"""Folders survive a power failure: each is synced after what is created in it."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from loopfeed.preprocess.packing.pack import pack_split
from loopfeed.preprocess.shards.location import open_location
from loopfeed.preprocess.shards.split_files import prepare_for_writing
from loopfeed.preprocess.synced_folders import make_folders, sync_folder, sync_tree
from tests.fake_source import fake_source, files_of, pack, settings_for


@pytest.fixture
def synced(monkeypatch):
    """The folders in the order in which they are synced, each with the names in it at that time."""
    found, fsync = [], os.fsync

    def note(file):
        path = Path(f"/proc/self/fd/{file}").readlink()
        if path.is_dir():
            found.append((path, {each.name for each in path.iterdir()}))
        fsync(file)

    monkeypatch.setattr(os, "fsync", note)
    return found


def test_new_folders_are_synced_from_above(tmp_path, synced):
    make_folders(tmp_path / "a/b/c")
    make_folders(tmp_path / "a/b/c")
    assert synced == [(tmp_path, {"a"}), (tmp_path / "a", {"b"}), (tmp_path / "a/b", {"c"})]


def test_only_a_failing_disk_is_an_error(tmp_path, monkeypatch):
    def fail(number):
        def fsync(_file):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", fsync)

    for number in (errno.EINVAL, errno.ENOTSUP):
        fail(number)
        sync_folder(tmp_path)
    fail(errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        sync_folder(tmp_path)


@pytest.mark.parametrize("codec", ["raw", "blosc"])
def test_every_folder_of_a_pack_is_synced_before_its_manifest(tmp_path, synced, codec):
    pack(fake_source(9), tmp_path / "new/pack", codec=codec)
    before = [(path, names) for path, names in synced if not (path.name == "train" and "manifest.json" in names)]
    for folder in [each for each in tmp_path.rglob("*") if each.is_dir()]:
        assert any(path == folder.parent and folder.name in names for path, names in before), folder


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_pack_is_made_where_folders_cannot_be_synced(tmp_path, monkeypatch, number):
    fsync, files = os.fsync, set()

    def only_files(file):
        path = Path(f"/proc/self/fd/{file}").readlink()
        if path.is_dir():
            raise OSError(number, os.strerror(number))
        files.add(path.name.removesuffix(".__lock"))
        fsync(file)

    monkeypatch.setattr(os, "fsync", only_files)
    location = prepare_for_writing(open_location(str(tmp_path / "new")))
    assert location.spec["file_io_sync"] is False  # TensorStore would fail
    source = fake_source(9)
    pack_split(source, location.child("train"), settings_for(source, codec="blosc"))
    assert {"0", "zarr.json", "failures.jsonl", "manifest.json"} <= files
    files.clear()
    shutil.rmtree(tmp_path / "new/train/labels")
    assert pack_split(source, location.child("train"), settings_for(source, codec="blosc")).repaired
    assert {"0", "zarr.json"} <= files
    (tmp_path / "new/link").symlink_to("nowhere")
    sync_tree(tmp_path / "new")
    (tmp_path / "new/link").unlink()
    monkeypatch.undo()
    location = open_location(str(tmp_path / "usual"))
    assert prepare_for_writing(location) is location
    pack_split(source, location.child("train"), settings_for(source, codec="blosc"))
    assert files_of(tmp_path / "new") == files_of(tmp_path / "usual")
