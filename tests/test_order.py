"""The order of images: every image once an epoch, the same on every machine, for any number of images."""

import hashlib
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopfeed.engine.feed.order import EpochOrder

MASK = (1 << 64) - 1
SEEDS = st.integers(0, 2**63 - 1)


def reference_image(num_images, seed, epoch, offset):
    """Return the image at one offset of an epoch, in Python integers: hash, eight rounds, cycle-walking."""
    hashed = hashlib.blake2b(digest_size=64, person=b"feedloop-order")
    hashed.update(seed.to_bytes(8, "little"))
    hashed.update(epoch.to_bytes(8, "little"))
    keys = [int.from_bytes(hashed.digest()[at : at + 8], "little") for at in range(0, 64, 8)]
    half = 2
    while 4**half < num_images:
        half += 1
    value = offset
    while True:
        left, right = value // 2**half, value % 2**half
        for key in keys:
            word = right ^ key
            word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & MASK
            word = (word ^ (word >> 27)) * 0x94D049BB133111EB & MASK
            word ^= word >> 31
            left, right = right, left ^ (word % 2**half)
        value = left * 2**half + right
        if value < num_images:
            return value


def epoch_of(num_images, seed, epoch):
    start = epoch * num_images
    return EpochOrder(num_images, seed).images_at(np.arange(start, start + num_images, dtype=np.int64))


# The order is part of what a seed means: a run resumed with a later release must go on where it was.
@pytest.mark.parametrize(
    ("num_images", "seed", "epoch", "golden"),
    [
        (1, 0, 0, [0]),
        (10, 0, 0, [5, 2, 7, 6, 0, 4, 9, 1, 8, 3]),
        (10, 0, 1, [8, 5, 4, 3, 2, 7, 9, 0, 6, 1]),
        (10, 1, 0, [7, 4, 0, 6, 1, 9, 5, 3, 2, 8]),
        (17, 2**63 - 1, 3, [14, 15, 11, 1, 10, 3, 7, 2, 0, 6, 12, 13, 16, 4, 8, 9, 5]),
    ],
)
def test_golden_order(num_images, seed, epoch, golden):
    assert epoch_of(num_images, seed, epoch).tolist() == golden


def test_golden_order_of_a_large_set():
    positions = np.array([0, 1, 2, 1_281_166, 1_281_167, 5 * 1_281_167], np.int64)
    assert EpochOrder(1_281_167, 42).images_at(positions).tolist() == [1004102, 399851, 660692, 998729, 988919, 993582]


@given(num_images=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 10**6))
@settings(max_examples=60)
def test_an_epoch_is_a_permutation_whatever_its_keys(num_images, seed, epoch):
    np.testing.assert_array_equal(np.sort(epoch_of(num_images, seed, epoch)), np.arange(num_images))


@given(num_images=st.integers(1, 2**40), seed=SEEDS, positions=st.lists(st.integers(0, 2**62), max_size=20))
@settings(max_examples=100)
def test_equals_the_reference_at_any_position(num_images, seed, positions):
    found = EpochOrder(num_images, seed).images_at(np.array(positions, np.int64))
    assert found.dtype == np.int64
    expected = [reference_image(num_images, seed, *divmod(position, num_images)) for position in positions]
    assert found.tolist() == expected


@given(num_images=st.integers(1, 60), batch=st.integers(1, 50), seed=SEEDS, num_epochs=st.integers(1, 3))
@settings(max_examples=60)
def test_every_image_once_an_epoch_across_ragged_batches(num_images, batch, seed, num_epochs):
    order = EpochOrder(num_images, seed)
    num_steps = -(-num_images * num_epochs // batch)
    stream = np.concatenate([order.batch(step, batch) for step in range(num_steps)])
    for epoch in range(num_epochs):
        images = stream[epoch * num_images : (epoch + 1) * num_images]
        np.testing.assert_array_equal(np.sort(images), np.arange(num_images))


def test_a_batch_of_a_huge_set_allocates_no_index_of_it():
    order = EpochOrder(10**8, seed=1)
    order.batch(0, 8)
    tracemalloc.start()
    try:
        images = order.batch(123_456, 128)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(set(images.tolist())) == 128
    # An index of the set would take 800 MB; the batch itself takes 1 KiB.
    assert peak_bytes < 64 * 1024


@pytest.mark.parametrize("num_images", [12, 100])
def test_every_image_is_equally_likely_at_every_position(num_images):
    num_epochs = 1000
    stream = EpochOrder(num_images, seed=5).images_at(np.arange(num_epochs * num_images, dtype=np.int64))
    epochs = stream.reshape(num_epochs, num_images)
    for place in (0, 1, num_images // 2, num_images - 1):
        counts = np.bincount(epochs[:, place], minlength=num_images)
        chi_square = float(np.sum((counts - num_epochs / num_images) ** 2) / (num_epochs / num_images))
        freedom = num_images - 1
        # Five standard deviations of the chi-square distribution; the seed is fixed, so this cannot flicker.
        assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("num_images", [0, -3])
def test_an_empty_set_has_no_order(num_images):
    with pytest.raises(ValueError, match=rf"num_images must be at least 1, got {num_images}"):
        EpochOrder(num_images, 0)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_has_63_bits(seed):
    with pytest.raises(ValueError, match=rf"seed must lie in 0 … 2\*\*63 - 1, got {seed}"):
        EpochOrder(10, seed)
