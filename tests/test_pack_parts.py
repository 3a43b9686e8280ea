"""A pack in parts: the bytes of a single machine's pack, whatever the parts, their order and their interruptions."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tensorstore as ts

from loopfeed.preprocess.packing import parts as parts_module
from loopfeed.preprocess.packing import pipeline
from loopfeed.preprocess.packing.journal import Journal
from loopfeed.preprocess.packing.owner import OWNER_KEY, PartOwner
from loopfeed.preprocess.packing.part import Part, describe_parts
from loopfeed.preprocess.packing.parts import finish_parts, pack_part
from loopfeed.preprocess.shards.location import Location, ShardError, open_location
from tests.fake_source import FakeSource, fake_source, files_of, leave_unfinished_split, pack, settings_for

TIMEOUT_S = 60


@pytest.fixture(autouse=True)
def blocks_of_one(monkeypatch):
    """So that an interruption falls between any two images, as it does at 224 px."""
    monkeypatch.setattr(pipeline, "_MAX_BLOCK_IMAGES", 1)


# 18 images, 4 a shard: none is broken; one in the first, a middle or the last block; so many that blocks vanish.
BROKEN = [
    (),
    (0,),
    (9,),
    (17,),
    (3, 4),
    (1, 5, 6, 12, 13),
    (*range(4, 8), 16, 17),
    tuple(range(15)),
    tuple(range(1, 18)),
]


def source_with(broken=()):
    return fake_source(18, broken=frozenset(broken))


def split_at(dest, context=None):
    return open_location(str(dest), context=context).child("train")


def pack_one(source, dest, number, count, **values):
    return pack_part(source, split_at(dest), settings_for(source, **values), Part(number, count))


def finish(source, dest, **values):
    return finish_parts(source, split_at(dest), settings_for(source, **values))


def expected_of(source, tmp_path, **values):
    pack(source.changed(), tmp_path / "expected", **values)
    return files_of(tmp_path / "expected")


def folders_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_dir())


CASES: list[tuple[Any, Any]] = [({}, broken) for broken in BROKEN]
CASES += [(values, (1, 9)) for values in ({"codec": "blosc"}, {"checksum": False}, {"layout": "dense"})]


@pytest.mark.parametrize(("values", "broken"), CASES, ids=str)
def test_parts_make_the_bytes_of_one_machine(tmp_path, values, broken):
    source = source_with(broken)
    expected = expected_of(source, tmp_path, **values)
    results = [pack_one(source, tmp_path / "again", number, 3, **values) for number in (2, 3, 1)]
    assert [result.finished is not None for result in results] == [False, False, True]
    assert results[0].missing == (0, 2, 3)
    assert results[2].finished.manifest.num_failures == len(broken)
    assert [failure.index for failure in results[2].finished.failures] == list(broken)
    assert files_of(tmp_path / "again") == expected
    assert folders_of(tmp_path / "again") == folders_of(tmp_path / "expected")
    assert len(source.reads) == 18


@pytest.mark.parametrize("at", [0, 3, 4, 8, 9, 15, 17])
def test_an_interrupted_part_redoes_only_its_shards_in_progress(tmp_path, at):
    source = source_with((1, 9))
    expected = expected_of(source, tmp_path)
    number = at // 4 % 2 + 1
    with pytest.raises(KeyboardInterrupt):
        pack_one(source.changed(raising={at: KeyboardInterrupt()}), tmp_path / "again", number, 2)
    again = source.changed()
    result = pack_one(again, tmp_path / "again", number, 2)
    # The shard that was being written is recorded before the command stops.
    assert result.num_resumed == at // 8
    assert min(again.reads) == at // 4 * 4
    assert pack_one(again, tmp_path / "again", 3 - number, 2).finished is not None
    assert files_of(tmp_path / "again") == expected


@pytest.mark.parametrize(("codec", "num_images"), [("raw", 18), ("blosc", 10)])
def test_a_process_that_dies_anywhere_while_it_finishes_changes_no_byte(tmp_path, monkeypatch, codec, num_images):
    # So few that a shard replaces a block of which it has images, and so many that the last block vanishes.
    source = fake_source(num_images, broken=frozenset({1, 9, 16} if num_images == 18 else {1, 9}))
    expected = expected_of(source, tmp_path, codec=codec)
    ready, again = tmp_path / "ready", tmp_path / "again"
    with monkeypatch.context() as patch:
        patch.setattr(parts_module, "finish_job", lambda *_: None)
        pack_one(source, ready, 1, 1, codec=codec)
    for operation in itertools.count():
        shutil.copytree(ready, again)
        died = _finish_dying_at(operation, source, again, monkeypatch, codec=codec)
        # Continue with either command.
        if operation % 2:
            finish(source, again, codec=codec)
        else:
            pack_one(source, again, 1, 1, codec=codec)
        assert files_of(again) == expected, operation
        assert folders_of(again) == folders_of(tmp_path / "expected")
        shutil.rmtree(again)
        if not died:
            break
    assert operation > 15


class Died(BaseException):
    """Stands for the end of a process: nothing runs after it."""


def _finish_dying_at(operation, source, dest, monkeypatch, **values):
    """Finish with a process that dies before its write number ``operation``; return whether it had as many."""
    counted = itertools.count()

    def dying(method):
        def call(self, *args, **kwargs):
            if next(counted) >= operation:
                raise Died
            return method(self, *args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        from loopfeed.preprocess.packing.shard_file import ShardFile

        for kind, name in (
            (Location, "write"),
            (Location, "replace"),
            (Location, "delete_keys"),
            (Location, "delete"),
            (ShardFile, "_finish"),
        ):
            patch.setattr(kind, name, dying(getattr(kind, name)))
        try:
            finish(source, dest, **values)
        except Died:
            return True
    return False


def test_finishing_without_parts_is_an_error(tmp_path):
    with pytest.raises(ShardError, match=r"no unfinished pack, so there is nothing to finish; start the parts first"):
        finish(source_with(), tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with pytest.raises(KeyboardInterrupt):
        pack(source_with().changed(raising={8: KeyboardInterrupt()}), tmp_path / "one")
    for call in (
        lambda: finish(source_with(), tmp_path / "one"),
        lambda: pack_one(source_with(), tmp_path / "one", 1, 2),
    ):
        with pytest.raises(ShardError, match="this unfinished pack was begun without --part; run the same command wi"):
            call()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"codec": "blosc"}, "codec was raw, is now blosc"),
        ({"layout": "dense"}, "layout was .*, is now "),
        ({"shard_images": 8}, "--shard-images was 4, is now 8"),
        ({"checksum": False}, "checksum was True, is now False"),
    ],
)
def test_other_settings_in_another_part_are_refused_by_name(tmp_path, values, message):
    source = source_with()
    pack_one(source, tmp_path, 1, 2)
    for call in (pack_one, finish):
        with pytest.raises(ShardError, match=message):
            call(source, tmp_path, *((2, 2) if call is pack_one else ()), **values)


def test_another_source_and_other_parts_are_refused(tmp_path):
    source = source_with()
    pack_one(source, tmp_path / "again", 1, 2)
    with pytest.raises(ShardError, match="the source's images changed"):
        pack_one(fake_source(18, seed=1), tmp_path / "again", 2, 2)
    with pytest.raises(
        ShardError, match=r"train/: this unfinished pack was begun with --part I/2, not --part I/3; con"
    ):
        pack_one(source, tmp_path / "again", 3, 3)
    with pytest.raises(
        ShardError, match=r"was begun with --part I/2; continue it in the same way, then finish it with"
    ):
        pack(source, tmp_path / "again")
    pack(source, tmp_path / "again", overwrite=True)
    assert files_of(tmp_path / "again") == expected_of(source, tmp_path)


def test_of_parts_that_begin_at_once_one_writes_the_plan(tmp_path):
    location = split_at(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        for attempt in range(10):
            split = location.child(f"{attempt}")
            plans = [{"num_candidates": number} for number in range(8)]
            found = list(threads.map(lambda plan, split=split: Journal(split).begin_once(plan), plans))
            assert found == [Journal(split).plan()] * 8
            assert not split.create("journal/plan.json", b"another")


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train/notes.txt").write_text("mine")
    with pytest.raises(ShardError, match="contains files but no pack"):
        pack_one(source_with(), tmp_path, 1, 2)
    leave_unfinished_split(tmp_path / "other/train")
    with pytest.raises(ShardError, match="contains files but no pack"):
        pack_one(source_with(), tmp_path / "other", 1, 2)


def test_a_part_that_runs_twice_is_refused_and_others_are_not(tmp_path):
    source, location = source_with(), split_at(tmp_path)
    pack_one(source, tmp_path, 1, 3)
    with PartOwner(location, Part(2, 3)):
        with pytest.raises(ShardError, match="is packing part 2/3 of the split; stop one of the two"):
            pack_one(source, tmp_path, 2, 3)
        pack_one(source, tmp_path, 3, 3)
    assert pack_one(source, tmp_path, 2, 3).finished is not None


def test_a_part_that_was_overtaken_records_nothing_more(tmp_path):
    """In a store without locks, the process that began last goes on, and the earlier one stops."""
    context, source = ts.Context(), source_with()
    location = split_at("memory://packs", context)

    class Overtaken(FakeSource):
        def read(self, index):
            if index == 8:
                location.write("journal/parts/1-of-2.owner", b"another")
            return super().read(index)

    first = Overtaken(source.images, source.labels)
    with pytest.raises(ShardError, match="another preprocess-imagenet process is packing part 1/2"):
        pack_part(first, location, settings_for(source), Part(1, 2))
    assert location.list_keys("journal/blocks/") == []


@pytest.mark.parametrize("broken", [(), (1, 9)])
def test_a_store_in_memory_gets_the_same_values(tmp_path, broken):
    context, source = ts.Context(), source_with(broken)
    location = split_at("memory://packs", context)
    for number in (3, 1, 2):
        pack_part(source, location, settings_for(source), Part(number, 3))
    expected = expected_of(source, tmp_path)
    assert {f"train/{key}": location.read(key) for key in location.list_keys()} == expected


def test_parts_stop_while_a_process_finishes_or_replaces_the_split(tmp_path):
    source, location = source_with(), split_at(tmp_path)
    pack_one(source, tmp_path, 1, 2)
    location.write(OWNER_KEY, b"another")
    with pytest.raises(ShardError, match=r"is finishing or replacing this split; .* killed, run it with --finish"):
        pack_one(source, tmp_path, 2, 2)
    # A part that is packed disturbs nobody.
    assert pack_one(source, tmp_path, 1, 2).missing == (1, 3)
    location.delete(OWNER_KEY)
    assert pack_one(source, tmp_path, 2, 2).finished is not None


@pytest.mark.parametrize(
    ("is_other", "message"),
    [(False, "the checksum does not match"), (True, "its images are not those that were packed")],
)
def test_a_damaged_or_exchanged_block_is_found_before_it_is_used(tmp_path, is_other, message):
    source, dest = source_with((1,)), tmp_path / "again"
    pack_one(source, dest, 1, 2)
    shard = dest / "train/pixels/c/2/0/0"
    damaged = bytearray((dest / "train/pixels/c/4/0/0" if is_other else shard).read_bytes())
    damaged[5] ^= not is_other
    shard.write_bytes(damaged)
    with pytest.raises(ShardError, match=rf"pixels/c/2/0/0: {message}.*; delete this file, start its part again"):
        pack_one(source, dest, 2, 2)
    shard.unlink()
    pack_one(source, dest, 1, 2)
    assert files_of(dest) == expected_of(source, tmp_path)


def test_parts_are_parsed_and_described():
    assert Part.parse("2/8") == Part(2, 8)
    assert list(Part(2, 3).blocks(8)) == [1, 4, 7]
    for text, message in (
        ("0/3", "does not exist"),
        ("4/3", "does not exist"),
        ("1", "not of the form I/N"),
        ("1/0", "I/N"),
    ):
        with pytest.raises(ValueError, match=message):
            Part.parse(text)
    assert describe_parts([0, 1, 4, 7, 10, 13], 3) == "part 1/3 (shard 0), part 2/3 (shards 1, 4, 7 and 2 more)"
    assert describe_parts(range(10), 10).endswith("part 8/10 (shard 7), 2 more parts")


PARTS = """
import sys, time
from tests.test_pack_parts import *
pipeline._MAX_BLOCK_IMAGES = 1
number, count, slow = int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
class Slow(FakeSource):
    def read(self, index):
        time.sleep(60 if index == slow else 0.5 if index == slow - 1 else 0)
        return super().read(index)
s = source_with((1, 9))
print(pack_one(Slow(s.images, s.labels, broken=s.broken), sys.argv[1], number, count).finished is not None)
"""


def start_part(dest, number, count, slow=-1):
    return subprocess.Popen(
        [sys.executable, "-c", PARTS, str(dest), str(number), str(count), str(slow)], stdout=subprocess.PIPE, text=True
    )


def test_processes_at_once_of_which_one_is_killed_make_the_same_bytes(tmp_path):
    expected = expected_of(source_with((1, 9)), tmp_path)
    dest = tmp_path / "again"
    # Part 1 has the blocks 0, 2 and 4, and stands still in block 2.
    slow, other = start_part(dest, 1, 2, slow=10), start_part(dest, 2, 2)
    try:
        assert other.communicate(timeout=TIMEOUT_S)[0] == "False\n"
        unfinished = dest / "train/pixels/c/2/0/0.__lock"
        deadline = time.monotonic() + TIMEOUT_S
        while not (dest / "train/journal/blocks/00000000.json").exists() or not unfinished.exists():
            assert slow.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with pytest.raises(ShardError, match="is packing part 1/2 of the split"):
            pack_one(source_with((1, 9)), dest, 1, 2)
    finally:
        os.kill(slow.pid, signal.SIGKILL)
        slow.communicate()
        other.kill()
    again = source_with((1, 9))
    result = pack_one(again, dest, 1, 2)
    assert result.num_resumed == 1
    assert sorted(again.reads) == [8, 9, 10, 11, 16, 17]
    assert result.finished is not None
    assert files_of(dest) == expected
