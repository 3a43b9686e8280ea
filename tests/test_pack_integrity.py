"""Valid files of a pack in the wrong place, and paths that are not regular files: every reader detects them."""

import json
import math
import os
import shutil
import socket
import time
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.run.train import train
from loopfeed.preprocess.commands.inspect_cli import main
from loopfeed.preprocess.shards import (
    arrays,
    decoded_checks,
    mapped_images,
    mapped_shards,
    split_arrays,
    stored_pixels,
)
from loopfeed.preprocess.shards.checksum import crc32c
from loopfeed.preprocess.shards.manifest import Manifest
from loopfeed.preprocess.shards.reader import ChangedShardError, ShardError, open_split
from loopfeed.preprocess.shards.splits import find_splits
from loopfeed.preprocess.shards.verify import verify_split
from tests.fake_source import fake_source, pack, packed_words
from tests.toy import BATCH, SIZE, Linear, toy_batch, toy_config

SMALL, LARGE = 4, 64


def read(data, indices=None, split="train"):
    with open_split(str(data), split) as opened:
        indices = np.arange(opened.num_images) if indices is None else np.array(indices)
        pixels = np.zeros((len(indices), opened.height, opened.row_words), np.uint32)
        labels = np.zeros(len(indices), np.int32)
        opened.read_into(indices, pixels, labels, timeout_s=10)
    return pixels, labels


def shard_file(data, number, split="train"):
    return data / split / f"pixels/c/{number}/0/0"


def exchange(first, second):
    first.rename(first.with_name("between"))
    second.rename(first)
    first.with_name("between").rename(second)


@pytest.fixture(params=[(SMALL, "raw"), (LARGE, "raw"), (LARGE, "blosc")], ids=["gathered", "one by one", "stored"])
def data(request, tmp_path):
    size, codec = request.param
    pack(fake_source(12, size=size), tmp_path, codec=codec)
    pack(fake_source(12, size=size, seed=1, name="val"), tmp_path, codec=codec)
    return tmp_path


def test_swapped_shards_of_a_split_are_detected(data):
    exchange(shard_file(data, 0), shard_file(data, 1))
    with pytest.raises(ShardError, match=r"image [0-7] \(.+\) in pixels/c/[01]/0/0 is not the one that was packed"):
        read(data)
    assert len(read(data, [8, 11])[0]) == 2


def test_swapped_shards_of_two_splits_are_detected(data):
    exchange(shard_file(data, 1), shard_file(data, 1, "val"))
    for split in ("train", "val"):
        with pytest.raises(ShardError, match=r"image 4 \(.+\) in pixels/c/1/0/0 is not the one that was packed"):
            read(data, [4], split)


def counted_checksums(monkeypatch):
    """Return a list to which each comparison of a decoded image is appended."""
    compared = []

    def compare(image):
        compared.append(image.shape)
        return crc32c(image)

    monkeypatch.setattr(decoded_checks, "crc32c", compare)
    return compared


@pytest.mark.parametrize("way", ["renamed", "written to"])
def test_a_decoded_image_is_compared_anew_once_its_file_is_another(tmp_path, monkeypatch, way):
    pack(fake_source(12, size=LARGE), tmp_path, codec="blosc")
    compared = counted_checksums(monkeypatch)
    with open_split(str(tmp_path), "train") as split:
        pixels, labels = np.zeros((2, LARGE, LARGE), np.uint32), np.zeros(2, np.int32)
        for indices, num_compared in (([0, 5], 2), ([5, 0], 2), ([1, 5], 3)):
            split.read_into(np.array(indices), pixels, labels, timeout_s=10)
            assert len(compared) == num_compared
        if way == "renamed":
            exchange(shard_file(tmp_path, 0), shard_file(tmp_path, 1))
        else:
            content = shard_file(tmp_path, 0).read_bytes()
            os.truncate(shard_file(tmp_path, 0), 0)
            shard_file(tmp_path, 0).write_bytes(content)
            split.read_into(np.array([0, 5]), pixels, labels, timeout_s=10)
            assert len(compared) == 4
            shard_file(tmp_path, 0).write_bytes(shard_file(tmp_path, 1).read_bytes())
        with pytest.raises(ShardError, match=r"image 0 \(.+\) in pixels/c/0/0/0 is not the one that was packed"):
            split.read_into(np.array([0, 5]), pixels, labels, timeout_s=10)


def test_an_image_of_a_file_that_changes_while_it_is_read_is_compared_and_not_marked(tmp_path, monkeypatch):
    pack(fake_source(12, size=LARGE), tmp_path, codec="blosc")
    with open_split(str(tmp_path), "train") as split:
        pixels, labels = np.zeros((1, LARGE, LARGE), np.uint32), np.zeros(1, np.int32)
        split.read_into(np.array([0]), pixels, labels, timeout_s=10)
        start = arrays.start_reading

        def touch_and_read(*arguments):
            future = start(*arguments)
            future.result()
            os.utime(shard_file(tmp_path, 0))
            return future

        monkeypatch.setattr(stored_pixels, "start_reading", touch_and_read)
        compared = counted_checksums(monkeypatch)
        for num_compared in (1, 2):
            split.read_into(np.array([0]), pixels, labels, timeout_s=10)
            assert len(compared) == num_compared


@pytest.mark.parametrize("name", ["pixels", "labels", "checksums"])
def test_metadata_with_control_characters_are_quoted_without_them(tmp_path, name):
    pack(fake_source(4), tmp_path)
    path = tmp_path / f"train/{name}/zarr.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"data_type": "\x1b[31mred\x07\x9b2J\nnew line"}))
    with pytest.raises(ShardError) as caught:
        read(tmp_path)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["labels", "checksums"])
def test_labels_and_checksums_of_another_split_are_detected(data, name):
    pack(fake_source(12, size=SMALL, seed=2).changed(labels=[2] * 12), data / "other")
    shutil.copy(data / f"other/train/{name}/c/0", data / f"train/{name}/c/0")
    with pytest.raises(ShardError, match=f"{name}/c/0: the {name} differ from those that were packed"):
        read(data)


@pytest.mark.parametrize("held", [0, 1 << 24])
@pytest.mark.parametrize("per_shard", [1 << 10, 1 << 20])
def test_labels_and_checksums_of_several_files_are_read_in_any_order(tmp_path, monkeypatch, held, per_shard):
    shards = arrays.NumberShards(per_shard=per_shard)
    for name in (arrays.LABELS, arrays.CHECKSUMS):
        monkeypatch.setitem(arrays.COLUMNS, name, arrays.COLUMNS[name]._replace(shards=shards))
    monkeypatch.setattr(split_arrays, "HELD_NUMBERS", held)
    source = fake_source(2100, size=2)
    pack(source, tmp_path, shard_images=512)
    words, labels = packed_words(source)
    indices = np.array([2099, 0, 1023, 1024, 2047, 2048, 7, 7])
    found = read(tmp_path, indices)
    np.testing.assert_array_equal(found[0], words[indices])
    np.testing.assert_array_equal(found[1], labels[indices])
    assert verify_split(str(tmp_path), "train") == ()
    # A label that is another, with the right checksum of its chunk, in one of the files.
    other = fake_source(2100, size=2).changed(labels=[*source.labels[:-1], 0])
    pack(other, tmp_path / "other", shard_images=512)
    last = 2100 // per_shard
    shutil.copy(tmp_path / f"other/train/labels/c/{last}", tmp_path / f"train/labels/c/{last}")
    with pytest.raises(ShardError, match=f"labels/c/{last}: the labels differ from those that were packed"):
        read(tmp_path, [2099])


@pytest.mark.parametrize("key", ["manifest.json", "failures.jsonl", "pixels/zarr.json", "labels/zarr.json"])
def test_verify_does_not_pass_a_split_that_lacks_a_file(data, key):
    (data / "val" / key).unlink()
    (data / "val" / key).symlink_to("nowhere")
    result = CliRunner().invoke(main, [str(data), "--verify"])
    assert result.exit_code == 2
    assert "val" in result.output
    assert key in result.output


def test_a_split_that_lost_its_manifest_is_named_and_not_passed(data):
    (data / "val/manifest.json").unlink()
    assert find_splits(str(data)).broken == ("val",)
    for arguments in (["--verify"], []):
        result = CliRunner().invoke(main, [str(data), *arguments])
        assert result.exit_code == 2
        assert "val/ contains files of a split, but its manifest.json is missing" in result.output
    with pytest.raises(ValueError, match=r"must have a manifest.json, but .*/val has none: .*--eval-split"):
        train(TrainConfig(data=str(data), steps=1, batch=4, model="resnet8"))


@pytest.mark.parametrize("key", ["format_version", "num_images", "source_digest"])
def test_a_manifest_that_overwrite_would_not_know_gets_another_remedy(data, key):
    path = data / "val/manifest.json"
    document = json.loads(path.read_bytes())
    del document[key]
    path.write_text(json.dumps(document))
    with pytest.raises(ShardError, match=f"missing key {key}; restore that file, or clear the split's folder by hand"):
        open_split(str(data), "val")
    with pytest.raises(ShardError, match="contains files but no pack"):
        pack(fake_source(6, size=SMALL, name="val"), data, overwrite=True)


def irregular(path, kind):
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        here = os.open(path.parent, os.O_RDONLY)  # a socket's path may not be long
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


FILES = ["manifest.json", "failures.jsonl", "pixels/c/1/0/0"]
FILES += [f"{name}/{part}" for name in ("labels", "checksums") for part in ("zarr.json", "c/0")] + ["pixels/zarr.json"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("key", FILES)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "socket"])
def test_an_entry_that_is_not_a_file_is_named_at_once(tmp_path, key, kind):
    pack(fake_source(12, size=SMALL), tmp_path, codec="blosc" if kind in ("pipe", "socket") else "raw")
    irregular(tmp_path / "train" / key, kind)
    started = time.monotonic()
    result = CliRunner().invoke(main, [str(tmp_path), "--verify"])
    assert result.exit_code == 2
    assert key in result.output
    if key != "failures.jsonl":
        with pytest.raises(ShardError, match=f"{key}|has lost"):
            read(tmp_path)
    assert time.monotonic() - started < 8


@pytest.mark.timeout(60)
@pytest.mark.parametrize("codec", ["raw", "blosc"])
def test_a_pipe_that_replaces_a_shard_during_reading_is_named_at_once(tmp_path, codec, monkeypatch):
    monkeypatch.setattr(mapped_shards, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(mapped_shards, "_MOST_LOOKS_A_S", math.inf)
    pack(fake_source(12, size=SMALL), tmp_path, codec=codec)
    with open_split(str(tmp_path), "train") as split:
        pixels, labels = np.zeros((1, SMALL, SMALL), np.uint32), np.zeros(1, np.int32)
        split.read_into(np.array([5]), pixels, labels, timeout_s=30)
        irregular(shard_file(tmp_path, 1), "pipe")
        started = time.monotonic()
        with pytest.raises(ShardError, match="pixels/c/1/0/0 can't be read: it is a pipe"):
            split.read_into(np.array([5]), pixels, labels, timeout_s=30)
        assert time.monotonic() - started < 8


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_shard_truncated_while_mapped_is_an_error_and_not_a_crash(tmp_path, size, monkeypatch):
    """Of files that are not looked at meanwhile, and not held open: the fault itself is what is noticed."""
    monkeypatch.setattr(mapped_shards, "_LOOK_EVERY_S", 1e9)
    monkeypatch.setattr(mapped_images, "_OPEN_SHARE", 0)
    source = fake_source(1200, size=size) if size == SMALL else fake_source(12, size=size)
    pack(source, tmp_path, shard_images=len(source))
    with open_split(str(tmp_path), "train") as split:
        everything = np.arange(len(source))
        pixels = np.zeros((len(source), size, size), np.uint32)
        labels = np.zeros(len(source), np.int32)
        split.read_into(everything, pixels, labels, timeout_s=30)
        lent = split.lend(everything, labels, timeout_s=30)
        os.truncate(shard_file(tmp_path, 0), 4096)
        if lent is not None:
            np.copyto(pixels, np.stack(lent.images))
            with pytest.raises(ShardError, match="pixels/c/0/0/0 was truncated"):
                lent.check()
        with pytest.raises(ShardError, match="pixels/c/0/0/0"):
            split.read_into(everything, pixels, labels, timeout_s=30)


def test_a_file_modified_in_place_is_reported_unless_its_content_is_the_same(tmp_path):
    pack(fake_source(12, size=LARGE), tmp_path)
    path = shard_file(tmp_path, 0)
    with open_split(str(tmp_path), "train") as split:
        pixels, labels = np.zeros((4, LARGE, LARGE), np.uint32), np.zeros(4, np.int32)
        split.read_into(np.arange(4), pixels, labels, timeout_s=30)
        split.check_unchanged()
        os.utime(path)
        split.check_unchanged()
        path.write_bytes(path.read_bytes())
        split.check_unchanged()
        content = bytearray(path.read_bytes())
        content[7] ^= 1
        with path.open("r+b") as file:
            file.write(content)
        for _ in range(2):  # whoever asks later hears of it too
            with pytest.raises(ChangedShardError, match=r"pixels/c/0/0/0 was written to while it was being read"):
                split.check_unchanged()


def test_a_modified_file_with_a_restored_time_is_reported(tmp_path):
    pack(fake_source(12, size=LARGE), tmp_path)
    path = shard_file(tmp_path, 0)
    with open_split(str(tmp_path), "train") as split:
        split.read_into(np.arange(4), np.zeros((4, LARGE, LARGE), np.uint32), np.zeros(4, np.int32), timeout_s=30)
        times = path.stat()
        with path.open("r+b") as file:
            file.write(bytes(64))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.raises(ChangedShardError):
            split.check_unchanged()


def test_a_file_of_another_form_is_mapped_once_it_is_restored(tmp_path):
    source = fake_source(12, size=LARGE)
    pack(source, tmp_path)
    path = shard_file(tmp_path, 0)
    content = path.read_bytes()
    path.write_bytes(content + b"more")
    with open_split(str(tmp_path), "train") as split:
        assert split.lend(np.array([0]), np.zeros(1, np.int32), timeout_s=10) is None
        path.write_bytes(content)
        lent = split.lend(np.array([0]), np.zeros(1, np.int32), timeout_s=10)
        assert lent is not None
        np.testing.assert_array_equal(lent.images[0], packed_words(source)[0][0])


class ActOnce:
    """A sink that calls a function once, at the first loss of `step` or a later one."""

    def __init__(self, action, step=1):
        self._action, self._step, self._is_done = action, step, False

    def open(self):
        pass

    def write(self, record):
        if not self._is_done and record.step >= self._step:
            self._is_done = True
            self._action()

    def write_evaluation(self, _):
        pass

    def close(self):
        pass


def test_a_run_whose_data_were_written_to_ends_with_an_error(tmp_path, monkeypatch):
    """Nothing of the file is looked at before the end of so short a run."""
    monkeypatch.setattr(mapped_shards, "_LOOK_EVERY_S", 1e9)
    pack(fake_source(12), tmp_path / "data", shard_images=12)

    def overwrite():
        with shard_file(tmp_path / "data", 0).open("r+b") as file:
            file.write(bytes(64))

    config = toy_config(data=str(tmp_path / "data"), num_classes=None, steps=40, batch=4, run_dir=str(tmp_path / "run"))
    # Every image was checked by then: an epoch is three steps.
    with pytest.raises(ShardError, match="pixels/c/0/0/0 was written to while it was being read"):
        train(config, model=Linear(), sinks=[ActOnce(overwrite, step=4)])
    assert (tmp_path / "run/model.safetensors").exists()
    assert '"stopped_by": "error"' in (tmp_path / "run/result.json").read_text()
    assert not (tmp_path / "run/snapshots").exists()  # nobody is to go on from such a state


def test_a_source_that_reports_changed_data_ends_the_run_after_writing_weights(tmp_path):
    class Source:
        batch, height, width, thread_safe = BATCH, SIZE, SIZE, False

        def fill(self, step, rows, pixels, labels, *, timeout_s):
            pixels[...], labels[...] = toy_batch(step)

        def check_unchanged(self):
            raise RuntimeError("the camera was moved")

    with pytest.raises(RuntimeError, match="the camera was moved"):
        train(toy_config(run_dir=str(tmp_path / "run")), model=Linear(), batches=Source())
    assert (tmp_path / "run/model.safetensors").exists()


def test_a_shard_truncated_during_a_training_ends_it_after_writing_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped_shards, "_LOOK_EVERY_S", 1e9)
    monkeypatch.setattr(mapped_images, "_OPEN_SHARE", 0)
    pack(fake_source(4096), tmp_path / "data", shard_images=4096)
    path = shard_file(tmp_path / "data", 0)
    config = toy_config(
        data=str(tmp_path / "data"), num_classes=None, steps=100_000, batch=64, run_dir=str(tmp_path / "run")
    )
    with pytest.raises(ShardError, match="pixels/c/0/0/0"):
        train(config, model=Linear(), sinks=[ActOnce(lambda: os.truncate(path, 5000))])
    assert (tmp_path / "run/model.safetensors").exists()
    assert "ShardError" in (tmp_path / "run/result.json").read_text()


def test_a_pack_that_claims_far_more_than_it_stores_is_refused_before_buffers_are_made(data):
    path = data / "train/manifest.json"
    manifest = Manifest.from_json(path.read_bytes())
    large = replace(manifest, height=4096, width=4096)
    path.write_text(large.to_json())
    claimed = manifest.num_images * 4096 * 4096 * 4
    stored = sum(shard_file(data, number).stat().st_size for number in range(manifest.num_shards))
    said = (
        f"images of the first {manifest.num_shards} shard files would take {claimed:,} bytes, but these have {stored:,}"
    )
    with pytest.raises(ShardError, match=said):
        open_split(str(data), "train")


def test_the_remedy_for_a_lost_manifest_is_one_that_works(data):
    remedy = "its manifest.json is missing; restore that file, or clear the split's folder by hand and pack again"
    (data / "val/manifest.json").unlink()
    said = CliRunner().invoke(main, [str(data)]).output
    assert f"{data}/val/ contains files of a split, but {remedy}" in said
    assert "--overwrite" not in said
    with pytest.raises(ShardError, match=remedy):
        open_split(str(data), "val")
    source = fake_source(6, size=SMALL, name="val")
    with pytest.raises(ShardError, match="contains files but no pack"):
        pack(source, data, overwrite=True)
    shutil.rmtree(data / "val")
    pack(source, data)
    assert CliRunner().invoke(main, [str(data), "--verify"]).exit_code == 0
