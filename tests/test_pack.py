"""The packing job: its output, which no interruption changes, and no image left out without a record."""

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tensorstore as ts
from PIL import Image

from loopfeed.preprocess.decoding.decode import ResizeRule
from loopfeed.preprocess.decoding.memory_budget import MemoryBudget
from loopfeed.preprocess.packing import finish as numbers_module
from loopfeed.preprocess.packing import pipeline, shard_file
from loopfeed.preprocess.packing import plan as plan_module
from loopfeed.preprocess.packing.channels import ChannelSums
from loopfeed.preprocess.packing.journal import Journal, ShardRecord, read_failures
from loopfeed.preprocess.packing.pack import pack_split
from loopfeed.preprocess.packing.pipeline import PackedImage, decode_in_order
from loopfeed.preprocess.packing.plan import PackSettings
from loopfeed.preprocess.shards.arrays import create_array
from loopfeed.preprocess.shards.classes import ImageClass
from loopfeed.preprocess.shards.location import Location, ShardError, open_location
from loopfeed.preprocess.shards.reader import open_split
from loopfeed.preprocess.sources.listing import ChangedSourceError
from loopfeed.preprocess.sources.open_source import open_source
from loopfeed.preprocess.system_errors import Cause, cause_of
from tests.fake_source import CLASSES, FakeSource, fake_source, files_of, pack, packed_words, settings_for
from tests.waiting import wait_until


class Stopped(BaseException):
    """Stands for whatever ends a process between two steps."""


@pytest.fixture(autouse=True)
def blocks_of_one(monkeypatch):
    """So that an interruption falls between any two images, as it does at 224 px."""
    monkeypatch.setattr(pipeline, "_MAX_BLOCK_IMAGES", 1)


@pytest.fixture
def source():
    """14 images, 4 a shard, of which images 1, 5, 6, 12 and 13 are broken: 9 packed, the last shard with one."""
    return fake_source(14, broken=frozenset({1, 5, 6, 12, 13}))


@pytest.fixture
def expected(tmp_path, source):
    pack(source, tmp_path / "expected")
    return files_of(tmp_path / "expected")


def stored(data, split="train"):
    with open_split(str(data), split) as opened:
        pixels = np.zeros((opened.num_images, opened.height, opened.width), np.uint32)
        labels = np.zeros(opened.num_images, np.int32)
        opened.read_into(np.arange(opened.num_images), pixels, labels, timeout_s=10)
    return pixels, labels


def test_good_images_are_packed_without_holes(tmp_path, source, expected):
    words, labels = packed_words(source)
    found_words, found_labels = stored(tmp_path / "expected")
    np.testing.assert_array_equal(found_words, words)
    np.testing.assert_array_equal(found_labels, labels)
    manifest = json.loads(expected["train/manifest.json"])
    assert manifest["num_images"] == 9
    assert manifest["num_failures"] == 5
    assert manifest["class_counts"] == np.bincount(labels, minlength=3).tolist()
    assert [entry["name"] for entry in manifest["classes"]] == [each.name for each in CLASSES]
    assert set(manifest["tool_versions"]) == {"numpy", "pillow", "tensorstore"}
    scaled = source.images[[0, 2, 3, 4, 7, 8, 9, 10, 11]].reshape(-1, 3) / 255
    # numpy sums floats: 144 roundings of 1e-16 each.
    np.testing.assert_allclose(manifest["channel_mean"], scaled.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(manifest["channel_std"], scaled.std(axis=0), rtol=1e-12)


def test_each_failure_is_recorded_with_its_path_and_reason(expected):
    lines = [json.loads(line) for line in expected["train/failures.jsonl"].splitlines()]
    assert [(line["index"], line["path"], line["label"]) for line in lines] == [
        (1, "n2/1.png", 1),
        (5, "n3/5.png", 2),
        (6, "n1/6.png", 0),
        (12, "n1/12.png", 0),
        (13, "n2/13.png", 1),
    ]
    assert all("PNG" in line["reason"] for line in lines)


@pytest.mark.parametrize("values", [{"num_workers": 3}])
def test_the_number_of_workers_does_not_change_a_byte(tmp_path, source, expected, values):
    pack(source, tmp_path / "again", **values)
    assert files_of(tmp_path / "again") == expected


def test_a_finished_pack_is_not_packed_again(tmp_path, source, expected):
    again = source.changed()
    result = pack(again, tmp_path / "expected")
    assert result.was_complete
    assert [failure.index for failure in result.failures] == [1, 5, 6, 12, 13]
    assert again.reads == []
    assert files_of(tmp_path / "expected") == expected


@pytest.mark.parametrize("at", range(14))
def test_interrupted_at_any_image_it_continues_to_the_same_bytes(tmp_path, source, expected, at):
    with pytest.raises(KeyboardInterrupt):
        pack(source.changed(raising={at: KeyboardInterrupt()}), tmp_path / "again")
    assert "train/manifest.json" not in files_of(tmp_path / "again")
    again = source.changed()
    result = pack(again, tmp_path / "again")
    assert files_of(tmp_path / "again") == expected
    # Shards 0 and 1 end after the good images 4 and 10.
    assert result.num_resumed in {0, 5, 11}
    assert min(again.reads) == result.num_resumed <= at


@pytest.mark.parametrize("is_done", [True, False], ids=["after", "before"])
@pytest.mark.parametrize("operation", range(12))
def test_interrupted_at_any_write_it_continues_to_the_same_bytes(
    tmp_path, source, expected, monkeypatch, operation, is_done
):
    count = 0

    def counted(original):
        def step(*args, **kwargs):
            nonlocal count
            count += 1
            if count - 1 != operation:
                return original(*args, **kwargs)
            if is_done:
                original(*args, **kwargs)
            raise Stopped

        return step

    with monkeypatch.context() as patched:
        patched.setattr(Location, "write", counted(Location.write))
        patched.setattr(numbers_module, "create_array", counted(create_array))
        patched.setattr(Journal, "delete", counted(Journal.delete))
        with pytest.raises(Stopped):
            pack(source, tmp_path / "again")
    # Plan, three records, five arrays, failures, manifest, then the journal goes.
    is_complete = "train/manifest.json" in files_of(tmp_path / "again")
    assert is_complete == (operation == 11 or (operation == 10 and is_done))
    pack(source, tmp_path / "again")
    assert files_of(tmp_path / "again") == expected


def test_a_killed_process_is_continued(tmp_path, source, expected):
    code = (
        "import sys, time\n"
        "from loopfeed.preprocess.packing import pipeline\n"
        "from tests.fake_source import *\n"
        "pipeline._MAX_BLOCK_IMAGES = 1\n"
        "class Slow(FakeSource):\n"
        "    def read(self, index):\n"
        "        time.sleep(60 if index == 8 else 0)\n"
        "        return super().read(index)\n"
        "s = fake_source(14, broken=frozenset({1, 5, 6, 12, 13}))\n"
        "pack(Slow(s.images, s.labels, broken=s.broken), sys.argv[1])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "again")])
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "again/train/pixels/c/0/0/0").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    pack(source, tmp_path / "again")
    assert files_of(tmp_path / "again") == expected


def test_a_shard_file_lost_before_continuing_is_written_again(tmp_path, source, expected):
    with pytest.raises(KeyboardInterrupt):
        pack(source.changed(raising={13: KeyboardInterrupt()}), tmp_path / "again")
    (tmp_path / "again/train/pixels/c/0/0/0").unlink()
    assert pack(source, tmp_path / "again").num_resumed == 0
    assert files_of(tmp_path / "again") == expected


@pytest.mark.parametrize("removed", [(), ("checksums",), ("sha256",), ("checksums", "sha256")])
def test_a_record_whose_labels_were_altered_is_damaged(tmp_path, source, removed):
    with pytest.raises(KeyboardInterrupt):
        pack(source.changed(raising={13: KeyboardInterrupt()}), tmp_path)
    path = tmp_path / "train/journal/shards/00000001.json"
    record = json.loads(path.read_text())
    record["labels"] = record["labels"][::-1]
    path.write_text(json.dumps({key: value for key, value in record.items() if key not in removed}))
    with pytest.raises(ShardError, match=r"00000001.json: the journal .* is damaged; pack with --overwrite"):
        pack(source, tmp_path)


NONE = np.empty(0, np.uint32)


def shard_record(**changes):
    record = ShardRecord(
        0, 2, np.array([0, 1], np.uint16), (), ChannelSums(), "0" * 64, np.array([5, 6], np.uint32), NONE
    )
    return replace(record, **changes)


@pytest.mark.parametrize(("num_checksums", "has_checksums"), [(0, True), (1, True), (3, True), (1, False), (2, False)])
def test_a_record_has_a_checksum_for_each_image_or_none(num_checksums, has_checksums):
    text = shard_record(checksums=np.zeros(num_checksums, np.uint32)).to_json().encode()
    with pytest.raises(ValueError, match=f"the record has {num_checksums} checksums?, not {2 * has_checksums}"):
        ShardRecord.from_json(text, format_version=2, has_checksums=has_checksums, has_extents=False)


@pytest.mark.parametrize("gap", [-1, 1])
def test_a_journal_whose_records_do_not_join_is_damaged(tmp_path, source, gap):
    with pytest.raises(KeyboardInterrupt):
        pack(source.changed(raising={13: KeyboardInterrupt()}), tmp_path)
    path = tmp_path / "train/journal/shards/00000001.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"start": record["start"] + gap}))
    with pytest.raises(ShardError, match=r"00000001.json: the journal .* is damaged; pack with --overwrite"):
        pack(source, tmp_path)


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_continued_pack_keeps_its_shard_size_by_default(tmp_path, source, is_complete):
    if is_complete:
        pack(source, tmp_path, shard_images=3)
    else:
        with pytest.raises(KeyboardInterrupt):
            pack(source.changed(raising={13: KeyboardInterrupt()}), tmp_path, shard_images=3)
    result = pack(source, tmp_path, shard_images=None)
    assert (result.was_complete, result.manifest.shard_images) == (is_complete, 3)
    with pytest.raises(ShardError, match="--size was"):
        pack(fake_source(14, size=5), tmp_path, shard_images=None)
    anew = pack(source, tmp_path, shard_images=None, overwrite=True)
    assert anew.manifest.shard_images == PackSettings(rule=ResizeRule(4, 4)).resolved_shard_images


@pytest.mark.parametrize("is_complete", [True, False])
def test_other_settings_are_not_mixed_into_a_pack(tmp_path, source, is_complete):
    if is_complete:
        pack(source, tmp_path)
    else:
        with pytest.raises(KeyboardInterrupt):
            pack(source.changed(raising={13: KeyboardInterrupt()}), tmp_path)
    before = files_of(tmp_path)
    with pytest.raises(
        ShardError,
        match=r"different settings: --codec was raw, is now blosc; --shard-images was 4, is now 3\. .*",
    ):
        pack(source, tmp_path, codec="blosc", shard_images=3)
    with pytest.raises(
        ShardError, match=r"the number of images was 14, is now 5; the source's images changed \(files were"
    ):
        pack(fake_source(5), tmp_path)
    assert files_of(tmp_path) == before


def test_overwriting_leaves_nothing_of_the_old_pack(tmp_path, source, expected):
    pack(fake_source(60, size=5), tmp_path / "again", shard_images=2)
    pack(source, tmp_path / "again", overwrite=True)
    assert files_of(tmp_path / "again") == expected
    assert not (tmp_path / "again/train/pixels/c/9").exists()


@pytest.mark.parametrize(
    ("operation", "is_complete"), [*((number, True) for number in range(9)), (0, False), (4, False), (8, False)]
)
def test_an_interrupted_overwrite_is_continued(tmp_path, source, expected, monkeypatch, operation, is_complete):
    old = fake_source(30, size=5, raising={} if is_complete else {29: KeyboardInterrupt()})
    with contextlib.suppress(KeyboardInterrupt):
        pack(old, tmp_path / "again", shard_images=2)
    count = 0

    def counted(original):
        def step(*args, **kwargs):
            nonlocal count
            count += 1
            if count - 1 == operation:
                raise Stopped
            return original(*args, **kwargs)

        return step

    with monkeypatch.context() as patched:
        patched.setattr(Location, "delete_keys", counted(Location.delete_keys))
        patched.setattr(Journal, "begin", counted(Journal.begin))
        with pytest.raises(Stopped):
            pack(source, tmp_path / "again", overwrite=True)
    # Nothing was deleted before the first operation, so there the wish to overwrite must be repeated.
    pack(source, tmp_path / "again", overwrite=operation == 0)
    assert files_of(tmp_path / "again") == expected


def test_overwriting_keeps_files_that_are_not_of_the_pack(tmp_path, source, expected):
    pack(fake_source(30), tmp_path / "again")
    mine = {
        f"train/{name}": b"mine"
        for name in (
            *("notes.txt", "manifest.json.bak", "failures.jsonl.mine", "pixels/notes/n.txt", "pixels/c/9/x/0"),
            *("pixels/c/7/0/0.old", "labels/c/3.txt", "journal2/plan.json", "journal/diary.txt", "pixels-mine/c/1/0/0"),
        )
    }
    for name, content in mine.items():
        path = tmp_path / "again" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "again/train/pixels-empty").mkdir()
    (tmp_path / "again/train/empty").mkdir()
    (tmp_path / "again/train/pixels/c/link").symlink_to(tmp_path / "again/train/empty")
    (tmp_path / "again/train/labels-link").symlink_to(tmp_path / "again/train/empty")
    pack(source, tmp_path / "again", overwrite=True)
    assert files_of(tmp_path / "again") == expected | mine
    folders = {path.name for path in (tmp_path / "again/train").iterdir() if path.is_dir()}
    assert folders >= {"pixels-empty", "empty", "labels-link"}
    assert (tmp_path / "again/train/pixels/c/link").is_symlink()
    assert not (tmp_path / "again/train/pixels/c/6").exists()


@pytest.mark.parametrize("name", ["manifest.json", "journal/plan.json"])
@pytest.mark.parametrize("content", ['{"name": "my web app", "version": 3}', "{not json", "[]"])
@pytest.mark.parametrize("overwrite", [True, False])
def test_a_folder_with_another_programs_manifest_is_unchanged(tmp_path, source, name, content, overwrite):
    (tmp_path / "train/pixels/c/0/0").mkdir(parents=True)
    (tmp_path / "train/pixels/c/0/0/0").write_text("a drawing")
    (tmp_path / "train" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "train" / name).write_text(content)
    before = files_of(tmp_path)
    with pytest.raises(ShardError, match=r"clear (this one|the folder) by hand"):
        pack(source, tmp_path, overwrite=overwrite)
    assert files_of(tmp_path) == before


def test_lock_files_of_a_killed_process_are_removed(tmp_path, source, expected):
    with pytest.raises(KeyboardInterrupt):
        pack(source.changed(raising={13: KeyboardInterrupt()}), tmp_path / "again")
    split = tmp_path / "again/train"
    ours = ("manifest.json.__lock", "pixels/c/1/0/0.__lock", "journal/plan.json.__lock")
    for name in (*ours, "thesis.__lock"):
        (split / name).write_text("")
    pack(source, tmp_path / "again")
    assert files_of(tmp_path / "again") == expected | {"train/thesis.__lock": b""}


def test_a_finished_pack_of_another_version_is_accepted(tmp_path, source, monkeypatch):
    pack(source, tmp_path)
    monkeypatch.setattr(plan_module, "tool_versions", lambda: {"numpy": "9"})
    assert pack(source, tmp_path).was_complete
    # An unfinished one would hold shards of both.
    with pytest.raises(KeyboardInterrupt):
        pack(source.changed(raising={13: KeyboardInterrupt()}), tmp_path / "again")
    monkeypatch.setattr(plan_module, "tool_versions", lambda: {"numpy": "10"})
    with pytest.raises(ShardError, match="the set of library versions was numpy 9, is now numpy 10"):
        pack(source, tmp_path / "again")


@pytest.mark.parametrize("overwrite", [False, True])
def test_names_that_are_not_utf8_are_packed_and_noted(tmp_path, source, overwrite):
    strange = (ImageClass("caf\udce9", "caf\udce9"), ImageClass("a\u2028b", "line\x85break"), CLASSES[2])
    source = source.changed(classes=strange)
    if overwrite:
        pack(fake_source(5), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        pack(source.changed(raising={11: KeyboardInterrupt()}), tmp_path, overwrite=overwrite)
    result = pack(source, tmp_path)
    assert result.num_resumed > 0
    assert result.manifest.classes == strange
    again = pack(source, tmp_path)
    assert again.was_complete
    assert again.failures == result.failures
    assert result.failures[2].path == "caf\udce9/6.png"
    assert result.failures[0].path == "a\u2028b/1.png"


def test_memory_holds_the_same_bytes_as_files(source, expected):
    context = ts.Context()
    pack(source, "memory://data", context=context)
    location = open_location("memory://data", context=context)
    assert {key: location.read(key) for key in location.list_keys()} == expected


@pytest.mark.parametrize(("num_images", "broken"), [(4, ()), (6, (4, 5)), (8, ()), (1, ()), (5, (0, 1, 2, 3))])
def test_every_ending_of_the_last_shard(tmp_path, num_images, broken):
    source = fake_source(num_images, broken=frozenset(broken))
    result = pack(source, tmp_path)
    np.testing.assert_array_equal(stored(tmp_path)[0], packed_words(source)[0])
    assert len(result.failures) == len(broken)
    num_files = len(list((tmp_path / "train/pixels/c").glob("*/0/0")))
    assert num_files == -(-(num_images - len(broken)) // 4) == result.manifest.num_shards


def test_a_split_with_only_failures_is_refused(tmp_path):
    with pytest.raises(ShardError, match=r"none of the 3 images of 'train' could be packed; .* failure is n1/0\.png: "):
        pack(fake_source(3, broken=frozenset({0, 1, 2})), tmp_path)
    assert not (tmp_path / "train/manifest.json").exists()


def test_an_empty_source_is_refused(tmp_path):
    with pytest.raises(ShardError, match="'train' contains no images"):
        pack(fake_source(0), tmp_path)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (
            FileNotFoundError(errno.ENOENT, "No such file", "x.png"),
            "the source has changed or can't be reached. Restore",
        ),
        (
            OSError("the archive ends too early"),
            "the source has changed or can't be reached. Restore it and run the same",
        ),
        (ChangedSourceError("the file has changed"), "restore it and run the same command again to continue, or pack"),
        # What passes, or lies in this machine, is no reason to change the source or to pack anew.
        (OSError(errno.EIO, "Input/output error"), "run the same command again to continue; if it fails again, check"),
        (
            OSError(errno.ESTALE, "Stale file handle"),
            "run the same command again to continue; if it fails again, check",
        ),
        (OSError(errno.ETIMEDOUT, "timed out"), "run the same command again to continue; if it fails again, check"),
        (PermissionError(errno.EACCES, "denied"), "grant read permission, then run the same command again to continue"),
        (
            OSError(errno.ENOMEM, "no memory"),
            "free memory, or raise the limits on it (ulimit -v, vm.max_map_count), then",
        ),
        (OSError(errno.EMFILE, "many files"), "allow more open files (ulimit -n), then run the same command again"),
        (OSError(errno.EILSEQ, "Invalid or incomplete"), "rename it, and pack with --overwrite or into another DEST"),
    ],
)
def test_a_listed_image_that_cannot_be_read_stops_the_pack(tmp_path, error, remedy):
    source = fake_source(6, raising={5: error})
    with pytest.raises(ShardError, match=rf"n3/5\.png: .*; {re.escape(remedy)}") as it:
        pack(source, tmp_path)
    if cause_of(error) == Cause.PASSING:
        assert "--overwrite" not in str(it.value)
    assert pack(source.changed(raising={}), tmp_path).num_resumed == 4


def test_a_pack_of_an_earlier_version_continues_up_to_an_image_that_it_decodes_otherwise(tmp_path, monkeypatch):
    source = fake_source(8)
    with pytest.raises(KeyboardInterrupt):
        pack(source.changed(raising={5: KeyboardInterrupt()}), tmp_path / "earlier")
    plan = tmp_path / "earlier/train/journal/plan.json"
    values = json.loads(plan.read_text())
    assert values.pop("decoding") == 4
    plan.write_text(json.dumps(values))
    shutil.copytree(tmp_path / "earlier", tmp_path / "unchanged")
    pack(source, tmp_path / "unchanged")
    pack(source, tmp_path / "whole")
    assert files_of(tmp_path / "unchanged") == files_of(tmp_path / "whole")

    read = FakeSource.read
    monkeypatch.setattr(FakeSource, "read", lambda self, index: read(self, index)[: -20 if index == 6 else None])
    message = r"n1/6\.png: an earlier version began this pack, and decodes this image in another way .*--overwrite"
    with pytest.raises(ShardError, match=message):
        pack(source, tmp_path / "earlier")
    assert pack(source, tmp_path / "earlier", overwrite=True).failures == ()


def test_short_reads_leave_no_image_out(tmp_path, monkeypatch):
    source = fake_source(4)
    for index, image in enumerate(source.images):
        path = tmp_path / "source" / "abc"[source.labels[index]] / f"{index:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    pread = os.pread
    for name in ("whole", "short"):
        with open_source(tmp_path / "source") as opened:
            where = open_location(str(tmp_path / name)).child("train")
            assert pack_split(opened.splits["train"], where, settings_for(source)).failures == ()
        monkeypatch.setattr(os, "pread", lambda file, size, at: pread(file, min(size, 64), at))
    assert files_of(tmp_path / "short") == files_of(tmp_path / "whole")


def _decoding():
    return [thread for thread in threading.enumerate() if thread.name.startswith("decode-")]


def test_no_thread_remains_after_packing(tmp_path, source):
    with pytest.raises(KeyboardInterrupt):
        pack(source.changed(raising={2: KeyboardInterrupt()}), tmp_path, num_workers=3)
    pack(source, tmp_path, num_workers=3)
    assert _decoding() == []


def test_a_bug_in_a_worker_reaches_the_caller_with_its_traceback(tmp_path):
    source = fake_source(6, raising={2: ZeroDivisionError("in the worker")})
    with pytest.raises(ZeroDivisionError, match="in the worker") as caught:
        pack(source, tmp_path)
    assert "read" in [entry.name for entry in caught.traceback]


def test_a_read_that_hangs_ends_at_the_time_limit_and_no_later_image_is_read(tmp_path, monkeypatch):
    answers, read = threading.Event(), []

    class Hanging(FakeSource):
        def read(self, index):
            read.append(index)
            if index == 2:
                answers.wait(60)
            return super().read(index)

    source = fake_source(6)
    monkeypatch.setattr(pipeline, "IMAGE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(pipeline, "_JOIN_TIMEOUT_S", 0.1)
    with pytest.raises(ShardError, match=r"n3/2\.png was not read and decoded within 0 s; check the disk"):
        pack(Hanging(source.images, source.labels), tmp_path, num_workers=1)
    answers.set()
    wait_until(lambda: not _decoding())
    assert read == [0, 1, 2]


def test_a_full_disk_is_one_clear_error(tmp_path, source, monkeypatch):
    monkeypatch.setattr(ts.Transaction, "commit_async", lambda self: _Failed())
    with pytest.raises(ShardError, match=r"pixels/c/0/0/0 can't be written: .*No space left.*to continue at shard 0"):
        pack(source, tmp_path, codec="blosc")


@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize("call", ["open", "write", "fsync"])
def test_a_disk_that_is_full_for_a_while_costs_nothing_that_was_written(
    tmp_path, source, expected, monkeypatch, call, shard
):
    files = set()

    def is_of_shard(target):
        return target in files or f"/c/{shard}/" in str(target)

    def call_or_fail(name):
        def replaced(target, *args):
            if name == call and is_of_shard(target):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            result = getattr(os, name)(target, *args)
            if name == "open" and is_of_shard(target):
                files.add(result)
            return result

        return replaced

    calls = {name: call_or_fail(name) for name in ("open", "write", "fsync")}
    with monkeypatch.context() as patch:
        patch.setattr(shard_file, "os", SimpleNamespace(**vars(os) | calls))
        match = rf"pixels/c/{shard}/0/0 can't be written: .*No space left.*to continue at shard {shard}"
        with pytest.raises(ShardError, match=match):
            pack(source, tmp_path / "again")
    assert list(files_of(tmp_path / "again/train/pixels")) == ["c/0/0/0"] * shard
    pack(source, tmp_path / "again")
    assert files_of(tmp_path / "again") == expected


class _Failed:
    def result(self, timeout):
        raise ValueError("RESOURCE_EXHAUSTED: Failed to write: [OS error 28: No space left on device]")


def test_an_unwritable_place_is_one_clear_error(tmp_path, source):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ShardError, match=r"file/data/train/: can't "):
        pack(source, tmp_path / "file" / "data")


@pytest.mark.parametrize("num_workers", [1, 3])
def test_outcomes_come_in_source_order_within_a_bounded_window(num_workers, monkeypatch):
    monkeypatch.setattr(pipeline, "_MAX_BLOCK_IMAGES", 2)
    source = fake_source(60, broken=frozenset({7}))
    seen: list[int] = []
    for block in decode_in_order(source, ResizeRule(4, 4), ranges=[range(3, 60)], num_workers=num_workers):
        seen += [outcome.index for outcome in block]
        # Blocks of 2, 4 a worker, handed in before the first one is waited for.
        assert max(source.reads) < len(seen) + 3 + 2 * 4 * num_workers
        assert all(isinstance(outcome, PackedImage) == (outcome.index != 7) for outcome in block)
    assert seen == list(range(3, 60))
    assert sorted(source.reads) == seen


def test_failures_are_read_back(tmp_path, source):
    packed = pack(source, tmp_path)
    location, count = open_location(str(tmp_path)).child("train"), len(packed.failures)
    assert count
    assert read_failures(location, packed.manifest) == packed.failures
    line = b'{"index": %s, "path": "a", "label": 0, "reason": "b"}\n'
    for damaged in (b"{}\n" * count, line % b"0" * (count + 1), line % b"18446744073709551616" * count):
        location.write("failures.jsonl", damaged)
        with pytest.raises(ShardError, match=r"failures.jsonl is damaged"):
            read_failures(location, packed.manifest)
    location.write("failures.jsonl", b" " * 70_000 * count)
    with pytest.raises(ShardError, match=r"failures.jsonl can't be read: the file is larger than"):
        read_failures(location, packed.manifest)


@pytest.mark.parametrize(
    ("size", "shard_images"), [(224, 256), (32, 16384), (64, 4096), (384, 64), (4096, 1), (1, 16384)]
)
def test_a_shard_fills_at_most_64_mebibytes_by_default(size, shard_images):
    assert PackSettings(rule=ResizeRule(size, size)).resolved_shard_images == shard_images


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shard_images": 0}, "shard_images must be at least 1, got 0"),
        ({"num_workers": 0}, "num_workers must be at least 1, got 0"),
        (
            {"shard_images": 10**9},
            r"shard_images 1,000,000,000 at 224 × 224 px .* 186,\d+ GiB, more than the 4 GiB .*; use at most 21,399",
        ),
        ({"codec": "zip"}, "codec must be one of raw, blosc, got 'zip'"),
        ({"on_error": "cry"}, "on_error must be skip or fail, got 'cry'"),
    ],
)
def test_settings_check_themselves(values, message):
    with pytest.raises(ValueError, match=message):
        PackSettings(**values)


def test_an_image_for_which_there_is_too_little_memory_is_named(tmp_path):
    with pytest.raises(MemoryError, match=r"for n2/1\.png"):
        pack(fake_source(4, raising={1: MemoryError()}), tmp_path)


@pytest.mark.timeout(60)
def test_a_wait_for_memory_that_does_not_end_is_one_clear_error(tmp_path, source, monkeypatch):
    hanging = MemoryBudget(1, 0, timeout_s=0.05)
    monkeypatch.setattr(pipeline, "file_budget", lambda timeout_s: hanging)
    said = r"n1/0.png: waited 0 s for \d+ bytes of memory .*, or check the disk or the network; .* to continue"
    with hanging.held(1), pytest.raises(ShardError, match=said):
        pack(source, tmp_path)
    monkeypatch.setattr(pipeline, "pixel_budget", lambda timeout_s: hanging)
    monkeypatch.setattr(pipeline, "file_budget", lambda timeout_s: MemoryBudget(1, 0, timeout_s=60))
    with hanging.held(1), pytest.raises(ShardError, match=said):
        pack(source, tmp_path)
    assert {each.index for each in pack(source, tmp_path).failures} == source.broken  # nothing was noted as left out
