"""Reads from mapped shard files: the packed pixels, each image checked, and of no file but the one that is there."""

import errno
import math
import os
import shutil
import sys
import threading
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from loopfeed.preprocess.shards import mapped_images, mapped_shards
from loopfeed.preprocess.shards.mapped_images import MappedImages
from loopfeed.preprocess.shards.reader import ShardError, open_split
from tests.fake_source import fake_source, pack, packed_words
from tests.test_shards import crc32c

NUM_IMAGES = 10
SHARD_IMAGES = 4
SMALL, LARGE = 5, 64
assert 4 * SMALL**2 < mapped_images._LEAST_ONE_BY_ONE_BYTES <= 4 * LARGE**2


class CountedReads:
    """Stands for the store of a split's pixels and notes which images it is asked for."""

    def __init__(self, split):
        self._stored, self.asked = split._pixels.array, []
        split._pixels.array = self

    def __getitem__(self, indices):
        self.asked += np.atleast_1d(indices).tolist()
        return self._stored[indices]

    def take(self):
        asked, self.asked = self.asked, []
        return asked


def read(split, indices):
    pixels = np.full((len(indices), split.height, split.width), 7, np.uint32)
    labels = np.full(len(indices), -1, np.int32)
    split.read_into(np.array(indices, np.int64), pixels, labels, timeout_s=30.0)
    return pixels


def shard_file(data, number):
    return data / f"train/pixels/c/{number}/0/0"


@pytest.fixture(autouse=True)
def always_look(monkeypatch):
    monkeypatch.setattr(mapped_shards, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(mapped_shards, "_MOST_LOOKS_A_S", math.inf)


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    """Packed sets by size and checksum, with their pixels."""
    made = {}
    for size in (SMALL, LARGE):
        source = fake_source(NUM_IMAGES, size=size, seed=size)
        for checksum in (True, False):
            folder = tmp_path_factory.mktemp(f"{size}-{checksum}")
            pack(source, folder, shard_images=SHARD_IMAGES, checksum=checksum)
            made[size, checksum] = folder, packed_words(source)[0]
    return made


@pytest.fixture
def data(packs, tmp_path):
    """Return a copy with checksums that the test may damage."""
    shutil.copytree(packs[LARGE, True][0], tmp_path / "data")
    return tmp_path / "data"


@settings(max_examples=90)
@given(
    size=st.sampled_from([SMALL, LARGE]),
    checksum=st.booleans(),
    open_share=st.sampled_from([0, 1 / 4]),
    reads=st.lists(st.lists(st.integers(0, NUM_IMAGES - 1), max_size=8), max_size=6),
)
def test_any_reads_give_the_packed_pixels_and_need_no_store(packs, size, checksum, open_share, reads):
    folder, words = packs[size, checksum]
    with patch.object(mapped_images, "_OPEN_SHARE", open_share), open_split(str(folder), "train") as split:
        store = CountedReads(split)
        for indices in reads:
            np.testing.assert_array_equal(read(split, indices), words[indices].reshape(-1, size, size))
        assert store.take() == []


def test_strided_rows_and_many_threads_are_served(packs):
    folder, words = packs[LARGE, True]
    failures = []

    def work(split, seed):
        random = np.random.default_rng(seed)
        buffer = np.zeros((6, LARGE, LARGE + 3), np.uint32)
        try:
            for _ in range(40):
                indices = random.integers(0, NUM_IMAGES, 6)
                split.read_into(indices, buffer[..., :LARGE], np.zeros(6, np.int32), timeout_s=30.0)
                np.testing.assert_array_equal(buffer[..., :LARGE], words[indices])
                assert not buffer[..., LARGE:].any()
        except BaseException as error:  # noqa: BLE001 - raised by the test itself
            failures.append(error)

    with open_split(str(folder), "train") as split:
        threads = [threading.Thread(target=work, args=(split, seed)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    if failures:
        raise failures[0]


@pytest.mark.parametrize("checksum", [True, False])
def test_images_are_lent_from_the_files_with_their_labels(packs, checksum):
    folder, words = packs[LARGE, checksum]
    indices = np.array([9, 2, 2, 5])
    with open_split(str(folder), "train") as split:
        assert split.lends
        labels = np.full(4, -1, np.int32)
        lent = split.lend(indices, labels, timeout_s=30.0)
        assert lent is not None
        np.testing.assert_array_equal(lent.images, words[indices])
        assert labels.tolist() == (indices % 3).tolist()
        assert not any(image.flags.writeable or image.flags.owndata for image in lent.images)
        assert split.lend(np.array([], np.int64), np.array([], np.int32), timeout_s=30.0) is None
    with open_split(str(packs[SMALL, checksum][0]), "train") as split:
        assert not split.lends
        assert split.lend(np.array([1]), np.zeros(1, np.int32), timeout_s=30.0) is None


def test_a_lent_image_survives_the_replacement_of_its_file(tmp_path):
    sources = [fake_source(SHARD_IMAGES, size=LARGE, seed=seed) for seed in (1, 2)]
    for source, name in zip(sources, ("a", "b"), strict=True):
        pack(source, tmp_path / name, shard_images=SHARD_IMAGES, checksum=False)
    labels = np.zeros(2, np.int32)
    with open_split(str(tmp_path / "a"), "train") as split:
        before = split.lend(np.array([0, 1]), labels, timeout_s=30.0)
        shard_file(tmp_path / "b", 0).replace(shard_file(tmp_path / "a", 0))
        after = split.lend(np.array([0, 1]), labels, timeout_s=30.0)
    for lent, source in ((before, sources[0]), (after, sources[1])):
        assert lent is not None
        np.testing.assert_array_equal(lent.images, packed_words(source)[0][:2])
        lent.check()


def test_every_image_is_checked_though_others_of_its_file_were(data):
    path = shard_file(data, 0)
    content = bytearray(path.read_bytes())
    content[2 * (4 * LARGE**2 + 4) + 11] ^= 1  # in the third image
    path.write_bytes(content)
    with open_split(str(data), "train") as split:
        for _ in range(2):
            read(split, [0, 1, 3])
            with pytest.raises(ShardError, match=r"image 2 \(.+\) in pixels/c/0/0/0: the checksum does not match"):
                read(split, [1, 2, 0])
            labels = np.zeros(2, np.int32)
            assert split.lend(np.array([1, 2]), labels, timeout_s=30.0) is None
            assert split.lend(np.array([1, 3]), labels, timeout_s=30.0) is not None


def open_files(folder):
    """The names of the files of images that this process has open; those of labels TensorStore closes in its time."""
    links = [os.fspath(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    pixels = f"{folder}/train/pixels/"
    return sorted(link.removeprefix(pixels) for link in links if link.startswith(pixels))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux's list of open files")
def test_files_of_small_images_stay_open_as_many_as_may_and_are_closed_with_the_split(packs, tmp_path, monkeypatch):
    shutil.copytree(packs[SMALL, True][0], tmp_path / "data")
    monkeypatch.setattr(mapped_images, "_most_open_files", lambda: 2)
    with open_split(str(tmp_path / "data"), "train") as split:
        read(split, [0, 4, 8])
        assert open_files(tmp_path / "data") == ["c/0/0/0", "c/1/0/0"]
        shutil.copy(shard_file(tmp_path / "data", 1), tmp_path / "copy")
        (tmp_path / "copy").replace(shard_file(tmp_path / "data", 1))
        np.testing.assert_array_equal(read(split, [8, 4, 0]), packs[SMALL, True][1][[8, 4, 0]])
        assert open_files(tmp_path / "data") == ["c/0/0/0"]
    del split
    assert open_files(tmp_path / "data") == []


def test_a_small_image_of_a_truncated_file_is_reported(packs, tmp_path, monkeypatch):
    shutil.copytree(packs[SMALL, True][0], tmp_path / "data")
    with open_split(str(tmp_path / "data"), "train") as split:
        read(split, [0, 4])
        monkeypatch.setattr(mapped_shards, "_LOOK_EVERY_S", math.inf)
        with shard_file(tmp_path / "data", 1).open("r+b") as file:
            file.truncate(4 * SMALL**2)
        with pytest.raises(ShardError, match=r"image 4 \(.+\) in pixels/c/1/0/0: "):
            read(split, [4, 0])
        np.testing.assert_array_equal(read(split, [0]), packs[SMALL, True][1][[0]])


def test_a_read_that_fails_is_left_to_the_store(packs, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    folder, words = packs[SMALL, True]
    with open_split(str(folder), "train") as split:
        store = CountedReads(split)
        monkeypatch.setattr(os, "preadv", fail)
        np.testing.assert_array_equal(read(split, [4, 0]), words[[4, 0]])
        assert sorted(store.take()) == [0, 4]


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("place", [0, 9])  # of the image's entry: where it lies, how large it is
def test_an_image_whose_place_is_damaged_is_left_to_the_store_which_says_so(packs, tmp_path, checksum, place):
    shutil.copytree(packs[LARGE, checksum][0], tmp_path / "data")
    path = shard_file(tmp_path / "data", 0)
    content = bytearray(path.read_bytes())
    content[-4 - 16 * (SHARD_IMAGES - 1) + place] ^= 1  # of the second image
    path.write_bytes(content)
    with open_split(str(tmp_path / "data"), "train") as split:
        np.testing.assert_array_equal(read(split, [0, 2, 3, 5]), packs[LARGE, checksum][1][[0, 2, 3, 5]])
        with pytest.raises(ShardError, match=r"image 1 \(.+\) in pixels/c/0/0/0: the checksum does not match"):
            read(split, [0, 1])
        assert split.lend(np.array([0, 1]), np.zeros(2, np.int32), timeout_s=30.0) is None


def test_a_file_that_takes_the_place_of_another_is_checked_anew(packs, data):
    words = packs[LARGE, True][1]
    with open_split(str(data), "train") as split:
        np.testing.assert_array_equal(read(split, [0, 5, 1]), words[[0, 5, 1]])
        damaged = bytearray(shard_file(data, 0).read_bytes())
        damaged[4 * LARGE**2 + 4] ^= 1  # in its second image
        (data / "damaged").write_bytes(damaged)
        (data / "damaged").replace(shard_file(data, 0))
        np.testing.assert_array_equal(read(split, [0, 5]), words[[0, 5]])
        with pytest.raises(ShardError, match=r"image 1 \(.+\) in pixels/c/0/0/0: the checksum does not match"):
            read(split, [0, 5, 1])


def test_a_removed_or_truncated_file_is_reported_as_usual(data):
    with open_split(str(data), "train") as split:
        read(split, range(NUM_IMAGES))
        read(split, range(NUM_IMAGES))
        shard_file(data, 1).unlink()
        with pytest.raises(ShardError, match=r"image 4 \(.+\) in pixels/c/1/0/0: the shard file, or the image"):
            read(split, [0, 4])
        with shard_file(data, 0).open("r+b") as file:
            file.truncate(1000)
        with pytest.raises(ShardError, match=r"pixels/c/0/0/0 was written to while it was being read"):
            read(split, [0])
        # Images of it may have been used: nothing more is read by whoever did.
        for images in ([0], [8, 9]):
            with pytest.raises(ShardError, match=r"pixels/c/0/0/0 was written to while it was being read"):
                read(split, images)
    with open_split(str(data), "train") as split:
        with pytest.raises(ShardError, match=r"image 0 \(.+\) in pixels/c/0/0/0: "):
            read(split, [0])
        read(split, [8, 9])


def test_images_that_lie_in_another_order_stay_with_the_store(tmp_path):
    source = fake_source(SHARD_IMAGES, size=LARGE)
    pack(source, tmp_path, shard_images=SHARD_IMAGES, checksum=False)
    path, image_bytes = shard_file(tmp_path, 0), 4 * LARGE**2
    content = path.read_bytes()
    images = [content[place * image_bytes :][:image_bytes] for place in range(SHARD_IMAGES)]
    # The second and the third exchanged, in the file and in its index.
    index = np.frombuffer(content, "<u8", 2 * SHARD_IMAGES, SHARD_IMAGES * image_bytes).reshape(-1, 2).copy()
    index[[1, 2]] = index[[2, 1]]
    path.write_bytes(images[0] + images[2] + images[1] + images[3] + index.tobytes() + crc32c(index.tobytes()))
    words = packed_words(source)[0]
    with open_split(str(tmp_path), "train") as split:
        store = CountedReads(split)
        for _ in range(2):
            np.testing.assert_array_equal(read(split, [0, 1, 2]), words[:3])
            assert store.take() == [1, 2]


def test_what_is_compressed_or_elsewhere_or_of_another_endianness_is_not_mapped(tmp_path, monkeypatch):
    source = fake_source(NUM_IMAGES, size=SMALL)
    pack(source, tmp_path / "blosc", codec="blosc")
    context = ts.Context()
    pack(source, "memory://set/", context=context)
    pack(source, tmp_path / "raw")
    for address, used in ((str(tmp_path / "blosc"), None), ("memory://set/", context)):
        with open_split(address, "train", context=used) as split:
            store = CountedReads(split)
            for _ in range(2):
                np.testing.assert_array_equal(read(split, [3, 0]), packed_words(source)[0][[3, 0]])
                assert store.take() == [3, 0]
    with open_split(str(tmp_path / "raw"), "train") as split:
        assert MappedImages.is_mappable(split.manifest)
        monkeypatch.setattr(sys, "byteorder", "big")
        assert not MappedImages.is_mappable(split.manifest)


def test_a_file_that_cannot_be_opened_for_a_while_is_mapped_afterwards(packs, monkeypatch):
    folder, words = packs[LARGE, True]
    with open_split(str(folder), "train") as split:
        with monkeypatch.context() as patch:
            patch.setattr(mapped_shards, "open_regular", lambda _: os_error(errno.EMFILE))
            np.testing.assert_array_equal(read(split, [1, 9]), words[[1, 9]])
            assert split.lend(np.array([1]), np.zeros(1, np.int32), timeout_s=30.0) is None
        lent = split.lend(np.array([1]), np.zeros(1, np.int32), timeout_s=30.0)
        assert lent is not None
        np.testing.assert_array_equal(lent.images[0], words[1])


def os_error(code):
    raise OSError(code, os.strerror(code))


def test_no_more_files_are_mapped_than_allowed_for_a_process(packs, monkeypatch):
    monkeypatch.setattr(mapped_shards, "MOST_MAPPED", 1)
    folder, words = packs[LARGE, True]
    with open_split(str(folder), "train") as split:
        store = CountedReads(split)
        for _ in range(2):
            np.testing.assert_array_equal(read(split, [0, 4, 8]), words[[0, 4, 8]])
            assert store.take() == [4, 8]
    maps = Path("/proc/self/maps")
    assert not maps.exists() or os.fspath(folder) not in maps.read_text()
