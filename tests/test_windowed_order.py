"""The windowed order: every image once an epoch, in windows, with contiguous parts for each process."""

import hashlib
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopfeed.engine.feed.order import WindowedOrder
from tests.test_order import MASK

SIZES = {
    "num_images": st.integers(1, 300),
    "seed": st.integers(0, 2**63 - 1),
    "batch": st.integers(1, 48),
    "block_images": st.integers(1, 60),
    "window_images": st.integers(1, 150),
    "pairs": st.booleans(),
}
ORDERS = st.builds(WindowedOrder, **SIZES)


def mixed(word):
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & MASK
    return word ^ (word >> 31)


def words(seed, number, purpose):
    hashed = hashlib.blake2b(seed.to_bytes(8, "little") + number.to_bytes(8, "little"), digest_size=64, person=purpose)
    digest = hashed.digest()
    return [int.from_bytes(digest[at : at + 8], "little") for at in range(0, 64, 8)]


def permuted(value, count, keys):
    half = 2
    while 4**half < count:
        half += 1
    while True:
        left, right = divmod(value, 2**half)
        for key in keys:
            left, right = right, left ^ (mixed(right ^ key) % 2**half)
        value = left * 2**half + right
        if value < count:
            return value


def lane_of(order, row):
    """The lane of a row: consecutive rows have a lane in turn; of pairs, the two rows have lanes half of them apart."""
    if not order.pairs or order.batch % 2:
        return row * order.num_lanes // order.batch
    pair, half = row // 2, order.num_lanes // 2
    return row % 2 * half + pair * half // (order.batch // 2)


def reference_epoch(order, epoch):
    """Return the images of an epoch, one position after the other, as the module describes the order."""
    size, num_images = order.block_images, order.num_images
    num_whole, num_left = divmod(num_images, size)
    keys = words(order.seed, epoch, b"feedloop-blocks")
    blocks = [permuted(block, num_whole, keys) for block in range(num_whole)]
    if num_left:
        blocks.insert(words(order.seed, epoch, b"feedloop-last")[0] % (num_whole + 1), num_whole)
    stream = [image for block in blocks for image in range(block * size, min((block + 1) * size, num_images))]
    images, num_windows = [], -(-num_images // order.window_images)
    for number in range(num_windows):
        start, stop = (num_images * k // num_windows for k in (number, number + 1))
        first, second = words(order.seed, epoch * num_windows + number, b"feedloop-window")[:2]
        rows = [(epoch * num_images + offset) % order.batch for offset in range(start, stop)]
        lanes = [lane_of(order, row) for row in rows]
        waiting, place = {}, start
        for lane in range(order.num_lanes):
            count = lanes.count(lane)
            part = range(place, place + count)
            waiting[lane] = sorted(part, key=lambda at: mixed(mixed((at - start) ^ first) ^ second))
            place += count
        images += [stream[waiting[lane].pop(0)] for lane in lanes]
    return images


def images_of(order, epoch):
    start = epoch * order.num_images
    return order.images_at(np.arange(start, start + order.num_images, dtype=np.int64))


@given(order=ORDERS, epoch=st.integers(0, 50))
@settings(max_examples=150)
def test_every_image_once_an_epoch_whatever_the_sizes(order, epoch):
    np.testing.assert_array_equal(np.sort(images_of(order, epoch)), np.arange(order.num_images))


@given(order=ORDERS, epoch=st.integers(0, 1000))
@settings(max_examples=60)
def test_equals_the_reference(order, epoch):
    assert images_of(order, epoch).tolist() == reference_epoch(order, epoch)


@given(order=ORDERS, position=st.integers(0, 2000))
def test_windows_divide_the_positions_and_do_not_span_epochs(order, position):
    window = order.window_at(position)
    start, stop = order.bounds(window)
    assert start <= position < stop
    assert stop - start <= order.largest_window <= order.window_images
    assert order.bounds(window + 1)[0] == stop
    assert start // order.num_images == (stop - 1) // order.num_images


@given(order=ORDERS, window=st.integers(0, 100))
def test_each_lane_has_its_own_contiguous_places(order, window):
    start, stop = order.bounds(window)
    places, starts = order.places(window), order.lane_starts(window)
    assert order.batch % order.num_lanes == 0
    assert starts[0] == 0
    assert starts[-1] == stop - start
    lanes = np.array([lane_of(order, position % order.batch) for position in range(start, stop)])
    for lane in range(order.num_lanes):
        expected = np.arange(starts[lane], starts[lane + 1])
        np.testing.assert_array_equal(np.sort(places[lanes == lane]), expected)


def test_the_images_of_a_window_are_few_contiguous_parts():
    order = WindowedOrder(10_000, 3, 64, 100, 1000)
    for window in range(order.num_windows):
        start, stop = order.bounds(window)
        images = order.images_at_places(window, np.arange(stop - start))
        assert np.count_nonzero(np.diff(images) != 1) <= 1000 // 100


# The order is part of what a seed means: a run resumed with a later release must go on where it was.
def test_golden_order():
    alone = {"pairs": False}
    assert images_of(WindowedOrder(11, 0, 4, 3, 6, **alone), 0).tolist() == [3, 5, 6, 7, 4, 9, 0, 2, 8, 10, 1]
    assert images_of(WindowedOrder(11, 1, 4, 3, 6, **alone), 2).tolist() == [6, 8, 9, 10, 7, 5, 0, 2, 3, 4, 1]
    assert images_of(WindowedOrder(11, 0, 4, 3, 6), 0).tolist() == [3, 6, 5, 7, 4, 0, 9, 2, 8, 1, 10]
    assert images_of(WindowedOrder(11, 1, 4, 3, 6), 2).tolist() == [10, 8, 9, 7, 6, 5, 0, 3, 2, 4, 1]


@pytest.mark.parametrize("batch", [2, 6, 32, 128, 384, 1024])
def test_mixed_partners_are_of_different_blocks_and_a_process_reads_two_parts(batch):
    order = WindowedOrder(50_000, 0, batch, 1024, 8192)
    # An epoch of an even number of images begins with a pair, though perhaps in the midst of a batch.
    partners = (images_of(order, 1) // 1024).reshape(-1, 2)
    # 0.96 in batches of 128 without pairs; 0.125 if windows of eight blocks were permuted as a whole.
    assert np.mean(partners[:, 0] == partners[:, 1]) < 0.05
    for rows in (range(batch), range(batch // 2, batch), range(2)):
        places = order.places_of(3, rows)
        assert np.count_nonzero(np.diff(places) != 1) <= 1
        own = np.isin(np.arange(*order.bounds(3)) % batch, rows)
        assert set(order.places(3)[own].tolist()) <= set(places.tolist())


def test_images_of_all_places_are_mixed_over_epochs():
    """Each image is about as often in each tenth of an epoch."""
    order, num_epochs = WindowedOrder(100, 5, 4, 5, 40), 400
    tenths: Counter[tuple[int, int]] = Counter()
    for epoch in range(num_epochs):
        tenths.update(zip(images_of(order, epoch).tolist(), [place // 10 for place in range(100)], strict=True))
    counts = np.array([tenths[image, tenth] for image in range(100) for tenth in range(10)])
    expected = num_epochs / 10
    chi_square = float(np.sum((counts - expected) ** 2) / expected)
    # A hundred images of nine free tenths each; images of a block move together, which adds to the variance.
    assert chi_square < 900 + 10 * (2 * 900) ** 0.5


@pytest.mark.parametrize("name", ["num_images", "batch", "block_images", "window_images"])
def test_sizes_are_positive(name):
    values: dict[str, Any] = {"num_images": 10, "seed": 0, "batch": 2, "block_images": 2, "window_images": 4}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        WindowedOrder(**(values | {name: 0}))
    with pytest.raises(ValueError, match="seed must lie in"):
        WindowedOrder(**(values | {"seed": -1}))
