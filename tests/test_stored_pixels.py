"""Files that cannot be mapped are read: packs, copies in a cache, weights, losses."""

import errno
import os

import numpy as np
import pytest

from loopfeed.engine.records import weights
from loopfeed.engine.records.weights import read_weights
from loopfeed.engine.stream.spooled_losses import SpooledLosses
from loopfeed.preprocess.shards import file_maps, stored_pixels
from loopfeed.preprocess.shards.reader import open_split
from loopfeed.preprocess.shards.split_arrays import open_pixels
from tests.fake_source import fake_source, pack, packed_words


@pytest.fixture(params=[errno.ENODEV, errno.ENOMEM])
def nothing_maps(request, monkeypatch):
    """Let every mapping of a file fail: Loopfeed's own and, as its error reads, TensorStore's."""
    number = request.param
    map_memory, read = file_maps._map, stored_pixels._read

    def refuse(address, size_bytes, flags, file):
        if file >= 0:
            raise OSError(number, os.strerror(number))
        return map_memory(address, size_bytes, flags, file)

    mapped = []

    def note_mapped(location, manifest):
        array = open_pixels(location, manifest)
        if "file_io_mode" in location.spec:
            mapped.append(array)
        return array

    def refuse_read(array, *arguments):
        if any(array is each for each in mapped):
            raise ValueError(f"Failed to mmap [os_error_code='{number}']")
        read(array, *arguments)

    monkeypatch.setattr(file_maps, "_map", refuse)
    monkeypatch.setattr(stored_pixels, "_read", refuse_read)
    monkeypatch.setattr(stored_pixels, "open_pixels", note_mapped)
    return os.strerror(number)


@pytest.mark.parametrize("values", [{}, {"codec": "blosc"}], ids=str)
def test_packs_are_read_with_one_warning(tmp_path, nothing_maps, values):
    source, said = fake_source(9), list[str]()
    pack(source, tmp_path, **values)
    words, labels = packed_words(source)
    with open_split(str(tmp_path), "train", notify=said.append) as split:
        pixels, found = np.zeros_like(words), np.zeros_like(labels)
        for _ in range(2):
            assert split.lend(np.arange(9), found, timeout_s=9) is None
            split.read_into(np.arange(9), pixels, found, timeout_s=9)
            np.testing.assert_array_equal(pixels, words)
            np.testing.assert_array_equal(found, labels)
        split.check_unchanged()
    assert said == [
        f"warning: files of {tmp_path} can't be mapped into memory ({nothing_maps}), so they are read, which takes "
        "longer"
    ]


def test_a_read_that_fails_after_another_thread_found_out_is_repeated(tmp_path, nothing_maps, monkeypatch):
    del nothing_maps
    source, said, is_first = fake_source(9), list[str](), [True]
    pack(source, tmp_path, codec="blosc")
    words, labels = packed_words(source)
    refuse_read = stored_pixels._read

    def read_meanwhile(array, *arguments):
        if is_first and is_first.pop():
            split.read_into(np.arange(9), np.zeros_like(words), np.zeros_like(labels), timeout_s=9)
        refuse_read(array, *arguments)

    with open_split(str(tmp_path), "train", notify=said.append) as split:
        monkeypatch.setattr(stored_pixels, "_read", read_meanwhile)
        pixels = np.zeros_like(words)
        split.read_into(np.arange(9), pixels, np.zeros_like(labels), timeout_s=9)
    np.testing.assert_array_equal(pixels, words)
    assert len(said) == 1


def test_a_damaged_shard_is_still_named(tmp_path, nothing_maps):
    del nothing_maps
    pack(fake_source(9), tmp_path)
    with (tmp_path / "train/pixels/c/1/0/0").open("r+b") as shard:
        shard.write(b"damage")
    with open_split(str(tmp_path), "train") as split:
        pixels = np.zeros((9, 4, 4), np.uint32)
        with pytest.raises(ValueError, match=r"image 4 \(.+\) in pixels/c/1/0/0: the checksum does not match"):
            split.read_into(np.arange(9), pixels, np.zeros(9, np.int32), timeout_s=9)


def test_a_folder_in_which_nothing_maps_is_found(tmp_path, nothing_maps):
    del nothing_maps
    assert not file_maps.can_map_files(tmp_path)
    assert file_maps.can_map_files(tmp_path / "missing")
    assert not any(tmp_path.iterdir())


def test_weights_are_read(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    tensors: dict[str, np.ndarray] = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array(7, np.int64)}
    path.write_bytes(weights.weights_file(tensors, {"note": "ü"})[0])
    mapped = read_weights(path)

    def refuse(*_, **__):
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(weights, "safe_open", refuse)
    found = read_weights(path)
    assert found.metadata == mapped.metadata
    assert found.digest == mapped.digest is not None
    for name in tensors:
        np.testing.assert_array_equal(found.tensors[name], mapped.tensors[name])
        assert found.tensors[name].dtype == mapped.tensors[name].dtype
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="must be a complete safetensors file"):
        read_weights(path)


def test_losses_are_read(monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENODEV, "No such device")

    losses = SpooledLosses(4)
    for step in range(50):
        losses.append(step)
    monkeypatch.setattr(np, "memmap", refuse)
    found = losses.to_array()
    losses.close()
    np.testing.assert_array_equal(found, np.arange(50, dtype=np.float32))
    found[0] = 1
