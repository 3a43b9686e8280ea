"""Reading splits: golden bytes, other Zarr readers, random reads, damage, and what can't be opened."""

import errno
import hashlib
import json
import os
import struct
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from loopfeed.preprocess.shards import stored_pixels
from loopfeed.preprocess.shards.arrays import NUMBERS_PER_CHUNK, NUMBERS_PER_SHARD
from loopfeed.preprocess.shards.location import open_location
from loopfeed.preprocess.shards.manifest import Manifest
from loopfeed.preprocess.shards.reader import ShardError, list_splits, open_split
from loopfeed.preprocess.shards.splits import find_splits
from tests.fake_source import CLASSES, FakeSource, fake_source, files_of, pack, packed_words


def crc32c(data):
    """CRC-32C bit by bit (RFC 3720, appendix B.4)."""
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return struct.pack("<I", register ^ 0xFFFFFFFF)


def shard_bytes(chunks, num_slots):
    """A Zarr 3 shard by the specification: the chunks, then (offset, size) of every slot, then the index's CRC."""
    body, index = b"", b""
    for chunk in chunks:
        index += struct.pack("<QQ", len(body), len(chunk))
        body += chunk
    index += b"\xff" * 16 * (num_slots - len(chunks))
    return body + index + crc32c(index)


def read(split, indices, timeout_s=10.0):
    pixels = np.full((len(indices), split.height, split.width), 7, np.uint32)
    labels = np.full(len(indices), -1, np.int32)
    split.read_into(np.array(indices, np.int64), pixels, labels, timeout_s=timeout_s)
    return pixels, labels


def rewrite_manifest(data, **changes):
    """Return a valid manifest that does not match the split."""
    path = data / "train/manifest.json"
    path.write_text(replace(Manifest.from_json(path.read_bytes()), **changes).to_json())


@pytest.fixture
def source():
    return fake_source(10)


@pytest.fixture
def data(tmp_path, source):
    pack(source, tmp_path)
    return tmp_path


def test_golden_bytes_of_a_tiny_split(tmp_path):
    images = np.array([[[[1, 2, 3], [255, 0, 128]]] * 2, [[[0, 0, 0]] * 2] * 2, [[[9, 8, 7]] * 2] * 2], np.uint8)
    pack(FakeSource(images, [2, 0, 1]), tmp_path, shard_images=2)
    files = files_of(tmp_path / "train")
    row = bytes([0, 3, 2, 1, 0, 128, 0, 255])
    chunks = [row * 2, bytes(16), bytes([0, 7, 8, 9]) * 4]
    chunks = [chunk + crc32c(chunk) for chunk in chunks]
    labels = struct.pack("<HHH", 2, 0, 1) + b"\xff" * 2 * (NUMBERS_PER_CHUNK - 3)
    assert files.pop("pixels/c/0/0/0") == shard_bytes(chunks[:2], 2)
    assert files.pop("pixels/c/1/0/0") == shard_bytes(chunks[2:], 2)
    assert files.pop("labels/c/0") == shard_bytes([labels + crc32c(labels)], NUMBERS_PER_SHARD // NUMBERS_PER_CHUNK)
    checksums = b"".join(chunk[-4:] for chunk in chunks) + bytes(4 * (NUMBERS_PER_CHUNK - 3))
    assert files.pop("checksums/c/0") == shard_bytes(
        [checksums + crc32c(checksums)], NUMBERS_PER_SHARD // NUMBERS_PER_CHUNK
    )
    assert files.pop("failures.jsonl") == b""
    manifest = json.loads(files["manifest.json"])
    assert manifest["shard_digests"] == [
        hashlib.sha256(pixels).hexdigest() for pixels in (row * 2 + bytes(16), bytes([0, 7, 8, 9]) * 4)
    ]
    assert manifest["labels_digest"] == hashlib.sha256(labels[:6]).hexdigest()
    assert manifest["failures_digest"] == hashlib.sha256(b"").hexdigest()
    assert manifest["label_digests"] == [manifest["labels_digest"]]
    assert manifest["checksum_digests"] == [hashlib.sha256(checksums[:12]).hexdigest()]
    assert manifest["metadata_digests"] == {
        name: hashlib.sha256(files.pop(f"{name}/zarr.json")).hexdigest()
        for name in ("pixels", "labels", "checksums", "names", "name_offsets")
    }
    # Compressed, so of no certain bytes.
    names, offsets = b"n3/0.pngn1/1.pngn2/2.png", struct.pack("<QQQQ", 0, 8, 16, 24)
    assert manifest["column_digests"] == {
        "names": [hashlib.sha256(names).hexdigest()],
        "name_offsets": [hashlib.sha256(offsets).hexdigest()],
    }
    assert (manifest["name_bytes"], manifest["num_groups"]) == (24, 0)
    digest = manifest.pop("manifest_digest")
    assert digest == hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    assert sorted(files) == ["manifest.json", "name_offsets/c/0", "names/c/0"]


@pytest.mark.parametrize("codec", ["raw", "blosc"])
@pytest.mark.parametrize("checksum", [True, False])
def test_any_zarr_reader_finds_the_packed_pixels(tmp_path, source, codec, checksum):
    pack(source, tmp_path, codec=codec, checksum=checksum)
    words, labels = packed_words(source)
    for name, expected in (("pixels", words), ("labels", labels)):
        path = str(tmp_path / "train" / name)
        np.testing.assert_array_equal(zarr.open_array(path, mode="r")[:], expected)
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
        np.testing.assert_array_equal(ts.open(spec).result().read().result(), expected)


@settings(max_examples=30)
@given(indices=st.lists(st.integers(0, 9), max_size=12))
def test_images_come_in_the_order_asked_for_with_repeats(tmp_path_factory, indices):
    source = fake_source(10)
    context = ts.Context()
    pack(source, "memory://data", context=context)
    words, labels = packed_words(source)
    with open_split("memory://data", "train", context=context) as split:
        found_words, found_labels = read(split, indices)
    np.testing.assert_array_equal(found_words, words[indices])
    np.testing.assert_array_equal(found_labels, labels[indices])


@pytest.mark.parametrize("address", ["{path}", "{path}/", "file://{path}", "file://{path}/"])
def test_paths_and_urls_are_the_same_folder(data, source, address):
    with open_split(address.format(path=data), "train") as split:
        np.testing.assert_array_equal(read(split, [3])[0], packed_words(source)[0][[3]])
    assert list_splits(address.format(path=data)) == ("train",)


def test_a_view_with_strides_is_filled(data, source):
    buffer = np.zeros((6, 4, 8), np.uint32)
    labels = np.zeros(3, np.int32)
    with open_split(str(data), "train") as split:
        split.read_into(np.array([9, 0, 4]), buffer[::2, :, 4:], labels, timeout_s=10)
    np.testing.assert_array_equal(buffer[::2, :, 4:], packed_words(source)[0][[9, 0, 4]])
    assert not buffer[1::2].any()
    assert not buffer[:, :, :4].any()


def test_many_threads_read_one_split(data, source):
    words, _ = packed_words(source)
    wrong: list[np.ndarray] = []

    def reader(seed):
        rng = np.random.default_rng(seed)
        for _ in range(20):
            indices = rng.integers(0, 10, 5)
            if not np.array_equal(read(split, indices)[0], words[indices]):
                wrong.append(indices)

    with open_split(str(data), "train") as split:
        threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive()
    assert not wrong


@pytest.mark.parametrize("codec", ["raw", "blosc"])
def test_a_flipped_bit_names_shard_and_image(tmp_path, source, codec):
    pack(source, tmp_path, codec=codec)
    shard = tmp_path / "train/pixels/c/1/0/0"
    damaged = bytearray(shard.read_bytes())
    damaged[3] ^= 1
    shard.write_bytes(damaged)
    with open_split(str(tmp_path), "train") as split:
        with pytest.raises(
            ShardError, match=r"train: image 4 \(.+\) in pixels/c/1/0/0: .*checksum.*inspect-shards --verify"
        ):
            read(split, [9, 4, 0])
        read(split, [9, 5, 0])


def test_a_missing_shard_is_an_error_not_a_black_image(data):
    (data / "train/pixels/c/2/0/0").unlink()
    with open_split(str(data), "train") as split:
        with pytest.raises(ShardError, match=r"image 8 \(.+\) in pixels/c/2/0/0: .*missing"):
            read(split, [0, 8])
        read(split, [0, 7])


@pytest.mark.parametrize("name", ["labels", "checksums"])
def test_missing_labels_or_checksums_are_an_error(data, name):
    (data / f"train/{name}/c/0").unlink()
    with open_split(str(data), "train") as split, pytest.raises(ShardError, match=rf"train/{name}/c/0: .*missing"):
        read(split, [1])


def test_a_label_without_a_class_is_an_error(data):
    rewrite_manifest(data, classes=CLASSES[:2], class_counts=(7, 3))
    with (
        open_split(str(data), "train") as split,
        pytest.raises(ShardError, match=r"label 2 of image 5 \(n3/5.png\) is not one of"),
    ):
        read(split, [0, 5])


class Silent:
    """Stands for an array whose store never answers."""

    def __init__(self):
        self.pair: Any = ts.Promise.new()  # kept: a promise let go of counts as an answer
        self.reads = 0

    def __getitem__(self, _):
        return self

    def read(self, **_):
        self.reads += 1
        return self.pair[1]


@pytest.mark.parametrize("name", ["_labels", "_checksums"])
def test_numbers_of_a_store_that_does_not_answer_end_at_the_time_limit(data, monkeypatch, name):
    with open_split(str(data), "train") as split:
        silent = Silent()
        monkeypatch.setattr(getattr(split, name), "_array", silent)
        start = time.monotonic()
        with pytest.raises(ShardError, match=rf"train/{name[1:]}/c/0: not read in time"):
            read(split, [0, 4], timeout_s=0.2)
        assert silent.reads == 1
        assert time.monotonic() - start < 30


def test_pixels_of_a_store_that_does_not_answer_end_at_the_time_limit(tmp_path, source, monkeypatch):
    pack(source, tmp_path, codec="blosc")  # the store reads these
    silent = Silent()
    monkeypatch.setattr(stored_pixels, "start_reading", lambda *_: silent.read())
    with open_split(str(tmp_path), "train") as split:
        start = time.monotonic()
        with pytest.raises(
            ShardError, match=r"train: no response within 0\.2 s for 2 images of pixels/c/0/0/0 and 1 more"
        ):
            read(split, [0, 4], timeout_s=0.2)
        # A second try after the time is up would only hide the first.
        assert silent.reads == 1
        assert time.monotonic() - start < 30


def frozen(array):
    array.flags.writeable = False
    return array


def unaligned(array):
    return np.frombuffer(bytearray(array.nbytes + 1), np.uint8)[1:].view(array.dtype).reshape(array.shape)


@pytest.mark.parametrize(
    ("indices", "pixels", "labels", "message"),
    [
        (np.array([10]), np.zeros((1, 4, 4), np.uint32), np.zeros(1, np.int32), r"image 10 is outside 0\.\.9"),
        (np.array([-1]), np.zeros((1, 4, 4), np.uint32), np.zeros(1, np.int32), r"image -1 is outside 0\.\.9"),
        (np.array([0]), np.zeros((1, 4, 5), np.uint32), np.zeros(1, np.int32), r"pixels must be .* \[1, 4, 4\]"),
        (
            np.array([0]),
            np.zeros((1, 4, 4), np.int32),
            np.zeros(1, np.int32),
            "pixels must be a writeable, aligned uint32",
        ),
        (np.array([0]), frozen(np.zeros((1, 4, 4), np.uint32)), np.zeros(1, np.int32), "pixels must .*, not writeable"),
        (
            np.array([0]),
            unaligned(np.zeros((1, 4, 4), np.uint32)),
            np.zeros(1, np.int32),
            "pixels must .*, not aligned",
        ),
        (np.array([0]), np.zeros((1, 4, 4), np.uint32), frozen(np.zeros(1, np.int32)), "labels must .*, not writeable"),
        (
            np.array([0]),
            np.zeros((1, 4, 4), np.uint32),
            unaligned(np.zeros(1, np.int32)),
            "labels must .*, not aligned",
        ),
        (np.array([0]), np.zeros((1, 4, 4), np.uint32), np.zeros(2, np.int32), r"labels must be .* int32 \[1\]"),
        (np.array([0], np.int32), np.zeros((1, 4, 4), np.uint32), np.zeros(1, np.int32), "indices must be int64"),
    ],
)
def test_wrong_arguments_are_named(data, indices, pixels, labels, message):
    with open_split(str(data), "train") as split, pytest.raises(ShardError, match=message):
        split.read_into(indices, pixels, labels, timeout_s=5)


def test_a_closed_split_is_an_error(data):
    split = open_split(str(data), "train")
    split.close()
    split.close()
    with pytest.raises(ShardError, match="the split is closed"):
        read(split, [0])


def test_an_empty_folder_says_how_to_pack(tmp_path):
    with pytest.raises(ShardError, match=r"/nothing does not exist; create it with `preprocess-imagenet SOURCE DEST`"):
        open_split(str(tmp_path / "nothing"), "train")
    with pytest.raises(ShardError, match=r"/ contains no pack; make one with `preprocess-imagenet SOURCE DEST`"):
        open_split(str(tmp_path), "train")
    assert list_splits(str(tmp_path / "nothing")) == ()


def test_naming_the_split_instead_of_its_folder_is_explained(data):
    with pytest.raises(ShardError, match="/train/ is itself a split; give the folder that contains it"):
        open_split(str(data / "train"), "train")


@pytest.mark.parametrize("bad", ["", "nosuch://x", "gs://", "file:///x|zip:pack/"])
def test_an_invalid_address_is_refused(bad):
    with pytest.raises(ShardError, match="gs://"):
        list_splits(bad)


@pytest.mark.parametrize("is_local", [True, False])
def test_each_folder_of_a_pack_has_one_state(tmp_path, is_local):
    context = ts.Context()
    address = str(tmp_path / "data") if is_local else "memory://data"
    location = open_location(address, context=context)
    for name in ("val", "train"):
        pack(fake_source(2, name=name), address, context=context)
        location.write(f"{name}/journal/plan.json", b"{}")  # as a pack leaves that is killed behind its manifest
    location.write("begun/journal/plan.json", b"{}")
    location.write("begun/labels/zarr.json", b"{}")
    location.write("lost/labels/c/0", b"x")
    location.write("cat/1.jpg", b"x")
    location.write("notes", b"x")
    found = find_splits(address, context=context)
    assert (found.complete, found.unfinished, found.broken) == (("train", "val"), ("begun",), ("lost",))
    assert list_splits(address, context=context) == found.complete


@pytest.mark.parametrize(
    ("what", "code", "reason"),
    [
        ("listdir", errno.ESTALE, "Stale file handle"),
        ("stat", errno.ESTALE, "Stale file handle"),
        ("stat", errno.EACCES, "Permission denied"),
    ],
)
def test_a_pack_that_cannot_be_looked_at_has_not_lost_a_split(data, monkeypatch, what, code, reason):
    """Neither a file server that fails for a moment nor a lack of rights may leave out an evaluation."""
    real, failing = getattr(os, what), data if what == "listdir" else data / "train/manifest.json"

    def fail(path=".", *args, **more):
        if os.fspath(path) == str(failing):
            raise OSError(code, reason, str(path))
        return real(path, *args, **more)

    monkeypatch.setattr(os, what, fail)
    with pytest.raises(ShardError, match=f"^{failing} can't be read: {reason}"):
        find_splits(str(data))
