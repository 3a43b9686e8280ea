"""Batches in the windowed order: the images that index arithmetic names, read in large parts, a window ahead."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopfeed.engine.feed.feeder import Feeder
from loopfeed.engine.feed.shard_batches import WindowedBatches
from loopfeed.engine.settings import SettingError
from loopfeed.preprocess.read_meter import ReadMeter
from loopfeed.preprocess.shards.reader import ShardError, open_split
from tests.fake_source import fake_source, pack, packed_words

pytestmark = pytest.mark.timeout(60)
IMAGE_BYTES = 4 * 4 * 4 + 4  # with its label


class NumberedSplit:
    """A split whose images contain their index, with a record of what is read."""

    height, row_words, width, num_images, target_words, copies = 4, 4, 4, 0, 0, None
    label_row = ()

    def __init__(self, num_images, shard_images=7, *, fails_at=None):
        self.num_images, self.fails_at = num_images, fails_at
        self.manifest = SimpleNamespace(shard_images=shard_images, image_bytes=64, whole=None)
        self.location = SimpleNamespace(local_path=None, display="numbers/")
        self.meter = ReadMeter()
        self.reads: list[tuple[int, int]] = []
        self.gate = threading.Event()
        self.gate.set()

    def read_into(self, indices, pixels, labels, *, timeout_s):
        self.reads.append((int(indices[0]), len(indices)))
        assert self.gate.wait(timeout_s)
        if self.fails_at in indices:
            raise ShardError(f"image {self.fails_at} is damaged")
        pixels[:], labels[:] = indices[:, None, None], indices % 5


def batches(split, batch, *, window_images, rows=None, first_batch=0, timeout_s=10.0, pairs=True):
    return WindowedBatches(
        cast(Any, split),
        batch=batch,
        seed=3,
        window_gb=2 * window_images * IMAGE_BYTES / 1e9,
        pairs=pairs,
        rows=rows or range(batch),
        first_batch=first_batch,
        num_threads=2,
        timeout_s=timeout_s,
    )


def filled(source, batch_index, rows=None, *, timeout_s=10.0):
    rows = rows or range(source.batch)
    pixels, labels = np.full((len(rows), 4, 4), 7, np.uint32), np.full(len(rows), -7, np.int32)
    source.fill(batch_index, rows, pixels, labels, timeout_s=timeout_s)
    return pixels, labels


def expected(source, batch_index):
    batch = source.batch
    return source.order.images_at(np.arange(batch_index * batch, (batch_index + 1) * batch, dtype=np.int64))


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_each_process_takes_its_rows_from_contiguous_parts_that_it_alone_reads(data):
    """Several threads take the batches of each process; together they have every image of every batch."""
    num_images, batch = data.draw(st.integers(1, 90)), data.draw(st.integers(1, 12))
    count = data.draw(st.sampled_from([each for each in (1, 2, 3, 4) if batch % each == 0]))
    window_images = data.draw(st.integers(min(batch, num_images), 60))
    first, num_batches, pairs = data.draw(st.integers(0, 9)), 8, data.draw(st.booleans())
    found = np.full((num_batches, batch), -1)
    for process in range(count):
        rows = range(batch * process // count, batch * (process + 1) // count)
        split = NumberedSplit(num_images)
        source = batches(split, batch, window_images=window_images, rows=rows, first_batch=first, pairs=pairs)
        assert source.held_bytes <= 2 * window_images * IMAGE_BYTES
        feeder = Feeder(
            source,
            rows=rows,
            start_index=first,
            stop_index=first + num_batches,
            depth=3,
            num_threads=3,
            timeout_s=10,
        )
        feeder.start()
        for number in range(num_batches):
            pixels, labels = np.zeros((len(rows), 4, 4), np.uint32), np.zeros(len(rows), np.int32)
            feeder.take(first + number, 0, pixels, labels)
            found[number, rows.start : rows.stop] = pixels[:, 0, 0]
            np.testing.assert_array_equal(labels, pixels[:, 1, 2] % 5)
        feeder.close()
        source.close()
        # Nothing is read twice, one image at a time: at most the windows of these batches, and two more.
        num_windows = source.order.window_at((first + num_batches) * batch) - source.order.window_at(first * batch) + 3
        read = sum(number for _, number in split.reads)
        assert read <= num_windows * source.order.largest_window
        # Of images that are mixed, a process has an even number of rows.
        own_lanes = source.order.num_lanes // (1 + pairs)
        if count in (2, 4) and own_lanes % count == 0:
            lanes = num_windows * (source.order.largest_window // batch + 1) * len(rows)
            assert read <= lanes
    for number in range(num_batches):
        np.testing.assert_array_equal(found[number], expected(source, first + number))


@pytest.mark.parametrize("codec", ["raw", "blosc"])
def test_a_packed_split_is_read_in_the_windowed_order(tmp_path, codec):
    packed = fake_source(53)
    pack(packed, tmp_path, shard_images=8, codec=codec)
    pixels, labels = packed_words(packed)
    with open_split(str(tmp_path), "train") as split:
        source = batches(split, 5, window_images=17)
        for batch_index in range(24):
            found = filled(source, batch_index)
            images = expected(source, batch_index)
            np.testing.assert_array_equal(found[0], pixels[images])
            np.testing.assert_array_equal(found[1], labels[images])
        source.check_unchanged()
        source.close()


def test_only_the_next_window_is_read_ahead():
    split = NumberedSplit(100, 5)
    source = batches(split, 5, window_images=20)
    for batch_index in range(4):
        filled(source, batch_index)
        time.sleep(0.05)
        num_read = sum(number for _, number in split.reads)
        assert num_read == (40 if batch_index < 3 else 60)
    source.close()


def test_any_batch_before_can_be_read_again():
    """A window that was given up is not read again as a whole."""
    source = batches(split := NumberedSplit(60), 4, window_images=12, first_batch=5)
    for batch_index in (4, 5, 6, 5, 7, 8, 9, 10, 11, 12, 2, 5, 13, 13, 14):
        np.testing.assert_array_equal(filled(source, batch_index)[0][:, 0, 0], expected(source, batch_index))
    assert max(number for _, number in split.reads) <= 12
    source.close()


def test_the_rows_of_others_are_refused():
    source = batches(NumberedSplit(60), 4, window_images=12, rows=range(2))
    with pytest.raises(ValueError, match=r"hold the rows range\(0, 2\) of each batch, got range\(1, 3\)"):
        filled(source, 0, range(1, 3))
    source.close()


def test_a_damaged_image_fails_the_batches_of_its_window_alone():
    whole = batches(NumberedSplit(60), 4, window_images=12)
    damaged = int(expected(whole, 7)[2])
    source = batches(NumberedSplit(60, fails_at=damaged), 4, window_images=12)
    window = source.order.window_at(7 * 4)
    start, stop = source.order.bounds(window)
    for batch_index in range(start // 4):
        filled(source, batch_index)
    for batch_index in range(start // 4, stop // 4):
        with pytest.raises(ShardError, match=f"image {damaged} is damaged"):
            filled(source, batch_index)
    source.close()
    whole.close()


def test_a_stalled_store_is_an_error_in_time_and_closing_ends_a_wait():
    split = NumberedSplit(60)
    split.gate.clear()
    source = batches(split, 4, window_images=12, timeout_s=30)
    started = time.monotonic()
    with pytest.raises(ShardError, match=r"a window of 12 images was not ready within 0\.5 s, with .* unread"):
        filled(source, 0, timeout_s=0.5)
    assert time.monotonic() - started < 5
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(filled, source, 0, timeout_s=30)
        time.sleep(0.2)
        source.close()
        with pytest.raises(ShardError, match="the reader was closed while a batch waited"):
            waiting.result(5)
    split.gate.set()


def test_a_window_smaller_than_a_batch_is_refused_with_the_least_that_works():
    split = cast(Any, NumberedSplit(60))
    how: dict[str, Any] = {"batch": 16, "seed": 0, "rows": range(16), "first_batch": 0}
    how |= {"num_threads": 1, "timeout_s": 1}
    least = -(-2 * 16 * IMAGE_BYTES // 1000) / 1e6
    with pytest.raises(SettingError, match=f"window_gb must be at least {least:g}, the memory of two windows of 16 im"):
        WindowedBatches(split, window_gb=2e-6, **how)
    assert WindowedBatches(split, window_gb=least, **how).order.window_images >= 16
    # A set smaller than a batch needs only its own images.
    tiny = WindowedBatches(cast(Any, NumberedSplit(3)), window_gb=6 * IMAGE_BYTES / 1e9, **how)
    np.testing.assert_array_equal(filled(tiny, 0)[0][:, 0, 0], expected(tiny, 0))
    tiny.close()
