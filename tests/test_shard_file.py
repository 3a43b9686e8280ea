"""A shard file written image by image: the bytes that TensorStore writes, whole or not at all."""

import errno
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from loopfeed.preprocess.packing import shard_file
from loopfeed.preprocess.packing.shard_file import ShardFile
from loopfeed.preprocess.shards.arrays import PIXELS, pixels_metadata, shard_key, write_array
from loopfeed.preprocess.shards.checksum import crc32c
from loopfeed.preprocess.shards.location import open_location


def drawn(num_images, height, width, seed=0):
    return np.random.default_rng(seed).integers(1 << 32, size=(num_images, height, width), dtype=np.uint32)


def replace_calls(monkeypatch, **calls):
    """Replaces calls of the system for shard files alone."""
    monkeypatch.setattr(shard_file, "os", SimpleNamespace(**vars(os) | calls))


def stored_by_tensorstore(folder, words, *, shard_images, checksum):
    """The files of an array that TensorStore writes, one transaction a shard."""
    metadata = pixels_metadata(*words.shape, shard_images=shard_images, codec="raw", checksum=checksum)
    array = write_array(open_location(str(folder)), PIXELS, metadata)
    starts = range(0, len(words), shard_images)
    for start in starts:
        stop = min(start + shard_images, len(words))
        with ts.Transaction() as transaction:
            array.with_transaction(transaction)[start:stop].write(words[start:stop]).result(timeout=30)
    return [Path(folder, PIXELS, shard_key(number, 3)).read_bytes() for number in range(len(starts))]


@settings(max_examples=25, derandomize=True)
@given(st.data())
def test_the_bytes_equal_those_of_tensorstore(data):
    shard_images, checksum = data.draw(st.integers(1, 5)), data.draw(st.booleans())
    words = drawn(data.draw(st.integers(1, 11)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)))
    with tempfile.TemporaryDirectory() as folder:
        expected = stored_by_tensorstore(folder, words, shard_images=shard_images, checksum=checksum)
        for number, wanted in enumerate(expected):
            start, path = number * shard_images, Path(folder, "own", str(number))
            shard = ShardFile(path, shard_images=shard_images)
            for image in words[start : start + shard_images]:
                shard.add(image, crc32c(image) if checksum else None)
            shard.commit().result(timeout=30)
            assert path.read_bytes() == wanted
        assert {each.name for each in path.parent.iterdir()} == {str(number) for number in range(len(expected))}


def test_a_disk_that_takes_a_part_at_a_time_gets_all(tmp_path, monkeypatch):
    words = drawn(3, 2, 2)
    (expected,) = stored_by_tensorstore(tmp_path, words, shard_images=4, checksum=True)
    write = os.write
    replace_calls(monkeypatch, write=lambda file, data: write(file, bytes(data[:3])))
    shard = ShardFile(tmp_path / "own", shard_images=4)
    for image in words:
        shard.add(image, crc32c(image))
    shard.commit().result(timeout=30)
    assert (tmp_path / "own").read_bytes() == expected


def test_a_file_has_its_name_once_it_is_on_the_disk(tmp_path, monkeypatch):
    synced, path = [], tmp_path / "folder/own"
    fsync = os.fsync

    def sync(file):
        synced.append(path.exists())
        fsync(file)

    monkeypatch.setattr(os, "fsync", sync)
    shard = ShardFile(path, shard_images=1)
    shard.add(drawn(1, 2, 2)[0], 0)
    assert not path.exists()
    shard.commit().result(timeout=30)
    assert synced == [False, False, True]  # the folder of its folder, the file, then its folder
    assert [each.name for each in path.parent.iterdir()] == ["own"]


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_failure_leaves_only_the_old_file(tmp_path, monkeypatch, call):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "own"
    path.write_bytes(b"old")
    shard = ShardFile(path, shard_images=2)
    shard.add(drawn(1, 2, 2)[0], 0)
    replace_calls(monkeypatch, **{call: full})
    with pytest.raises(OSError, match="No space left"):
        shard.commit().result(timeout=30)
    shard.discard()
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("own", b"old")]


def test_a_file_that_another_pack_took_over_is_not_published(tmp_path):
    """Where files cannot be locked a second pack may remove the first one's unfinished file and begin its own."""
    shard = ShardFile(tmp_path / "own", shard_images=2)
    shard.add(drawn(1, 2, 2)[0], 0)
    with pytest.raises(FileExistsError):
        ShardFile(tmp_path / "own", shard_images=2)
    next(tmp_path.iterdir()).unlink()
    other = ShardFile(tmp_path / "own", shard_images=2)
    with pytest.raises(OSError, match="another process is packing into this folder"):
        shard.commit().result(timeout=30)
    other.add(drawn(1, 2, 2)[0], 0)
    other.commit().result(timeout=30)
    assert [each.name for each in tmp_path.iterdir()] == ["own"]
