"""Orders that draw some images more often: exact counts of images and classes, over one epoch and over many."""

import itertools
import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopfeed.engine.feed.draws import Arcs, DrawnOrder, EpochImages, most_weight
from loopfeed.engine.feed.order import EpochOrder

SEEDS = st.integers(0, 2**63 - 1)
WEIGHTS = st.one_of(st.integers(0, 3), st.integers(0, 10**9))


def order_of(arcs, num_images, seed, subset=None):
    images = EpochImages(subset, arcs)
    return DrawnOrder(num_images, seed, lambda _: images)


def counts_of(order, first_epoch, num_epochs):
    """Return how often each image is drawn in each epoch, int [epochs, N]."""
    num_images = order.num_images
    positions = np.arange(first_epoch * num_images, (first_epoch + num_epochs) * num_images, dtype=np.int64)
    epochs = order.images_at(positions).reshape(num_epochs, num_images)
    return np.array([np.bincount(each, minlength=num_images) for each in epochs])


@st.composite
def weighted_sets(draw):
    """Return the classes of images, their arcs, and the expected number of draws of each an epoch, exactly."""
    num_images, num_classes = draw(st.integers(1, 40)), draw(st.integers(1, 5))
    classes = np.array(
        draw(st.lists(st.integers(0, num_classes - 1), min_size=num_images, max_size=num_images)), np.int32
    )
    counts = np.bincount(classes, minlength=num_classes)
    of_classes = draw(st.booleans())
    size = num_classes if of_classes else num_images
    weights = np.array(draw(st.lists(WEIGHTS, min_size=size, max_size=size)), np.int64)
    if of_classes:
        weights[counts == 0] = 0
    weights[classes[0] if of_classes else 0] += 1
    total = int(weights.sum())
    if of_classes:
        expected = [num_images * Fraction(int(weights[each]), total * int(counts[each])) for each in classes]
        return classes, Arcs.of_classes(classes, weights), expected
    return classes, Arcs.of_weights(weights, classes), [num_images * Fraction(int(each), total) for each in weights]


@given(weighted_sets(), SEEDS, st.integers(0, 5000))
@settings(max_examples=60)
def test_images_and_classes_are_drawn_as_often_as_expected_rounded_down_or_up(case, seed, first):
    classes, arcs, expected = case
    num_images, num_epochs = len(classes), 8
    epochs = counts_of(order_of(arcs, num_images, seed), first * num_epochs, num_epochs)
    assert (epochs.sum(axis=1) == num_images).all()
    # Spans of 1, 2, 4 and 8 epochs that begin at a multiple of their length.
    for length, number in itertools.chain(*([(each, n) for n in range(num_epochs // each)] for each in (1, 2, 4, 8))):
        found = epochs[number * length : (number + 1) * length].sum(axis=0)
        for image, mean in enumerate(expected):
            assert math.floor(mean * length) <= found[image] <= math.ceil(mean * length)
        for label in set(classes.tolist()):
            mean = sum((expected[image] for image in np.flatnonzero(classes == label)), Fraction(0)) * length
            assert math.floor(mean) <= found[classes == label].sum() <= math.ceil(mean)


def test_no_image_is_left_out_of_any_epochs():
    """A class of 910 images is drawn 100 times an epoch."""
    classes = np.repeat(np.arange(10, dtype=np.int32), [910, *[10] * 9])
    arcs = Arcs.of_classes(classes, np.ones(10, np.int64))
    epochs = counts_of(order_of(arcs, 1000, 7), 0, 70)
    assert (epochs[:, :910].sum(axis=1) == 100).all()
    totals = np.cumsum(epochs, axis=0)
    for length in range(1, 70):
        spans = totals[length:] - totals[:-length]
        expected = length * np.where(classes == 0, 100 / 910, 10)
        assert np.abs(spans - expected).max() < 2 * math.log2(length) + 1
    assert np.abs(totals[63] - 64 * np.where(classes == 0, 100 / 910, 10)).max() < 1


def test_equal_weights_draw_each_image_once_and_a_seed_draws_others():
    arcs = Arcs.of_weights(np.full(30, 5, np.int64))
    assert (counts_of(order_of(arcs, 30, 3), 0, 4) == 1).all()
    half = Arcs.of_weights(np.repeat([1, 29], [29, 1]).astype(np.int64))
    assert len({tuple(counts_of(order_of(half, 30, seed), 0, 1)[0]) for seed in range(20)}) > 5


def test_a_subset_in_the_usual_order_is_the_usual_order_of_its_entries():
    subset = np.array([7, 3, 3, 11, 2], np.int32)
    positions = np.arange(40, dtype=np.int64)
    found = order_of(None, 5, 9, subset).images_at(positions)
    np.testing.assert_array_equal(found, subset[EpochOrder(5, 9).images_at(positions)])


# What a seed means is part of a run, as in test_order.py.
def test_golden_draws():
    classes = np.array([0, 0, 0, 0, 0, 1, 1, 2], np.int32)
    balanced = order_of(Arcs.of_classes(classes, np.ones(3, np.int64)), 8, 1)
    assert balanced.images_at(np.arange(16)).tolist() == [7, 6, 0, 7, 2, 3, 6, 5, 5, 4, 3, 1, 6, 7, 7, 7]


def test_a_set_of_millions_is_exact_and_a_batch_needs_no_memory():
    num_images = 3_000_001
    classes = (np.arange(num_images) % 1000).astype(np.int32)
    arcs = Arcs.of_classes(classes, np.ones(1000, np.int64))
    order = order_of(arcs, num_images, 2**62)
    order.images_at(np.arange(8))
    tracemalloc.start()
    images = order.images_at(np.arange(10**15, 10**15 + 128))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 128 * 1024
    assert len(set(images.tolist())) > 120
    # The largest numbers that are allowed.
    most = Arcs.of_weights(np.array([most_weight(3), 0, 0], np.int64))
    assert (order_of(most, 3, 2**63 - 1).images_at(np.arange(300)) == 0).all()


@pytest.mark.parametrize("weights", [[0, 0], [most_weight(2), 1]])
def test_weights_must_draw_something_and_stay_exact(weights):
    with pytest.raises(ValueError, match="the weights must add up to 1 … "):
        Arcs.of_weights(np.array(weights, np.int64))
