"""What reading threads do is attributed to the stage and the file at fault."""

import os
import re
import time

import numpy as np
import pytest

from loopfeed.engine.feed.feed_meter import FeedMeter
from loopfeed.engine.feed.shard_batches import WindowedBatches
from loopfeed.preprocess import read_meter
from loopfeed.preprocess.read_meter import AWAIT, CHECK, COPY, IDLE, OPEN, READ, SOURCE, Profile, ReadMeter
from loopfeed.preprocess.shards import mapped_images, mapped_shards, stored_pixels
from loopfeed.preprocess.shards.decoded_checks import DecodedChecks
from loopfeed.preprocess.shards.reader import open_split
from tests.fake_source import fake_source, pack

SLOW_S = 0.05


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets: seconds since the start."""

    class Clock:
        now = 0.0

    monkeypatch.setattr(read_meter, "perf_counter", lambda: Clock.now)
    return Clock


def test_every_second_belongs_to_one_stage(clock):
    reading = ReadMeter().here()
    clock.now = 5.0
    reading.begin(7)
    for stage, file, until in ((OPEN, "a", 6), (READ, "a", 9), (CHECK, "b", 10), (READ, "c", 14), (SOURCE, "c", 15)):
        assert reading.work == 7
        reading.enter(stage)
        reading.visit(file)
        clock.now = until
    found = reading.end()
    assert found == Profile((1.0, 1.0, 7.0, 1.0, 0.0), "c")
    assert (reading.work, reading.stage, sum(reading.totals)) == (-1, IDLE, 10.0)
    reading.begin(8)
    clock.now = 17.0
    assert reading.end() == Profile((2.0, 0.0, 0.0, 0.0, 0.0), None)
    assert sum(reading.totals) == 12.0


def test_a_wait_for_other_threads_is_theirs(clock):
    reading = ReadMeter().here()
    reading.begin(0)
    before = reading.enter(AWAIT)
    clock.now = 8.0
    wait_s = clock.now - reading.since
    reading.enter(before)
    reading.blame(Profile((0, 0, 3.0, 1.0, 0), "w"), wait_s)
    reading.enter(COPY)
    clock.now = 9.0
    assert reading.end() == Profile((0.0, 0.0, 6.0, 2.0, 1.0), "w")
    # What another thread reads is in its own totals.
    assert sum(reading.totals[:AWAIT]) == 1.0


def test_waits_are_attributed_to_the_stages_of_their_batches():
    meter = FeedMeter(ReadMeter(), first=10)
    meter.keep_cause(10, Profile((4.0, 0, 0, 0, 0), None))
    meter.attribute(10, 4.0)
    meter.keep_cause(11, Profile((0, 0, 3.0, 1.0, 0), "slow"))
    meter.attribute(11, 2.0)
    meter.attribute(12, 0.5)  # it was ready, but on its way to the device
    assert meter.wait_s_by_stage == [4.0, 0.0, 1.5, 0.5, 0.5]
    assert (meter.wait_s, meter.first_wait_s) == (6.5, 4.0)
    assert [tuple(stall) for stall in meter.stalls()] == [
        (4.0, 10, "source", None), (2.0, 11, "read", "slow"), (0.5, 12, "copy", None),
    ]  # fmt: skip


def test_what_shards_wait_at_once_counts_once_and_a_batch_that_never_came_counts():
    meter = FeedMeter(ReadMeter())
    meter.waited(0, 10.0, 14.0, Profile((0, 0, 1.0, 0, 0), "c/0"))
    meter.waited(0, 11.0, 15.0, Profile((0, 0, 1.0, 0, 0), "c/0"))
    assert meter.wait_s_by_stage == [0.0, 0.0, 5.0, 0.0, 0.0]
    reading = meter.readings.here()
    reading.begin(1)
    reading.enter(CHECK)
    reading.visit("c/1")
    meter.waited(1, 20.0, 26.0, None)
    assert meter.wait_s_by_stage == [0.0, 0.0, 5.0, 6.0, 0.0]
    assert (meter.stalls()[0].stage, meter.stalls()[0].file) == ("check", "c/1")
    assert (meter.wait_s, meter.first_wait_s) == (11.0, 5.0)


def slowly(function):
    """Return a function that takes longer."""

    def slow(*arguments, **values):
        time.sleep(SLOW_S)
        return function(*arguments, **values)

    return slow


def of_mapped_images(stage):
    return {
        OPEN: (mapped_shards, "map_file"),
        READ: (os, "preadv"),
        CHECK: (mapped_shards, "crc32c"),
    }[stage]


def of_stored_images(stage):
    return {READ: (stored_pixels, "start_reading"), CHECK: (DecodedChecks, "find_mismatch")}[stage]


@pytest.mark.parametrize(
    ("codec", "size", "count", "lends", "stage", "patched"),
    [
        ("raw", 4, 2, False, READ, of_mapped_images(READ)),
        ("raw", 4, 2, False, OPEN, of_mapped_images(OPEN)),
        ("raw", 4, 2, False, CHECK, of_mapped_images(CHECK)),
        ("raw", 4, 4, False, CHECK, of_mapped_images(CHECK)),
        ("raw", 64, 2, False, CHECK, of_mapped_images(CHECK)),
        ("raw", 64, 2, True, READ, (mapped_images, "read_pages")),
        ("raw", 64, 2, True, CHECK, of_mapped_images(CHECK)),
        ("blosc", 4, 2, False, READ, of_stored_images(READ)),
        ("blosc", 4, 2, False, CHECK, of_stored_images(CHECK)),
    ],
    ids=lambda value: str(value) if isinstance(value, int | str) else "",
)
def test_the_slow_stage_of_a_read_is_named(tmp_path, monkeypatch, codec, size, count, lends, stage, patched):
    """One stage of one read is slowed down. Four images of a file are gathered at once, two are copied one by one."""
    pack(fake_source(8, size=size), tmp_path, codec=codec)
    with open_split(str(tmp_path), "train") as split:
        monkeypatch.setattr(*patched, slowly(getattr(*patched)))
        reading = split.meter.here()
        reading.begin(0)
        indices, labels = np.arange(4, 4 + count), np.zeros(count, np.int32)
        if lends:
            assert split.lend(indices, labels, timeout_s=30) is not None
        else:
            split.read_into(indices, np.zeros((count, size, split.row_words), np.uint32), labels, timeout_s=30)
        seconds, file = reading.end()
        assert max(range(AWAIT), key=seconds.__getitem__) == stage
        assert seconds[stage] >= SLOW_S
        name = split.meter.name(file)
        assert name is not None
        assert name.endswith("train/pixels/c/1/0/0")
        assert reading.num_bytes == count * split.manifest.image_bytes


def test_a_slow_part_of_a_window_is_what_its_batches_waited_for(tmp_path, monkeypatch):
    pack(fake_source(24), tmp_path)
    with open_split(str(tmp_path), "train") as split:
        monkeypatch.setattr(os, "preadv", slowly(os.preadv))
        source = WindowedBatches(
            split, batch=4, seed=0, window_gb=2e-6, rows=range(4), first_batch=0, num_threads=1, timeout_s=30
        )
        try:
            reading = source.read_meter.join()
            reading.begin(0)
            source.fill(0, range(4), np.zeros((4, 4, 4), np.uint32), np.zeros(4, np.int32), timeout_s=30)
            seconds, file = reading.end()
        finally:
            source.close()
        assert max(range(AWAIT), key=seconds.__getitem__) == READ
        assert seconds[READ] >= SLOW_S
        assert seconds[COPY] > 0
        assert re.fullmatch(r".*train/pixels/c/\d/0/0", split.meter.name(file) or "")
        # Only the thread of the window read.
        assert reading.totals[READ] == 0
