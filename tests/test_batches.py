"""Sources of batches: each returns the batch of a step, independently of earlier calls."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from loopfeed.engine.feed import shard_batches as shard_batches_module
from loopfeed.engine.feed.batches import FunctionBatches
from loopfeed.engine.feed.order import EpochOrder
from loopfeed.engine.feed.resizable_batches import SyntheticBatches
from loopfeed.engine.feed.shard_batches import ShardBatches
from loopfeed.preprocess.shards.reader import open_split
from tests.fake_source import fake_source, pack, packed_words
from tests.toy import toy_batch


def filled(source, step, timeout_s=10.0):
    pixels = np.full((source.batch, source.height, source.width), 7, np.uint32)
    labels = np.full(source.batch, -7, np.int32)
    source.fill(step, range(source.batch), pixels, labels, timeout_s=timeout_s)
    return pixels, labels


def numbered(step, batch=4):
    """A batch of the user that contains its step."""
    return np.full((batch, 2, 3), step << 8, np.uint32), np.arange(batch) + step


def test_shards_are_read_in_the_keyed_order(tmp_path):
    source = fake_source(11)
    pack(source, tmp_path)
    pixels, labels = packed_words(source)
    with open_split(str(tmp_path), "train") as split:
        batches = ShardBatches(split, batch=4, seed=5)
        assert (batches.batch, batches.height, batches.width) == (4, *pixels.shape[1:])
        for step in (0, 5, 2, 2):
            images = EpochOrder(11, 5).images_at(np.arange(4 * step, 4 * step + 4, dtype=np.int64))
            found = filled(batches, step)
            np.testing.assert_array_equal(found[0], pixels[images])
            np.testing.assert_array_equal(found[1], labels[images])


def test_synthetic_batches_are_functions_of_seed_and_step():
    def source(seed):
        return SyntheticBatches(batch=3, height=4, width=5, num_classes=7, seed=seed)

    keys = [(0, 0), (0, 1), (1, 0), (2**32, 0), (2**32, 1), (2**63 - 1, 0)]
    batches = {key: filled(source(key[0]), key[1]) for key in keys}
    for (seed, step), (pixels, labels) in batches.items():
        again = filled(source(seed), step)
        np.testing.assert_array_equal(pixels, again[0])
        np.testing.assert_array_equal(labels, again[1])
    assert len({pixels.tobytes() for pixels, _ in batches.values()}) == len(keys)


def test_a_function_is_called_once_per_step():
    asked = []

    def function(step):
        asked.append(step)
        return numbered(step)

    source = FunctionBatches(function, first_batch=6)
    assert (source.batch, source.height, source.width) == (4, 2, 3)
    assert asked == [6]
    for step in range(6, 10):
        pixels, labels = filled(source, step)
        np.testing.assert_array_equal(pixels, numbered(step)[0])
        np.testing.assert_array_equal(labels, numbered(step)[1])
    assert asked == [6, 7, 8, 9]


def test_a_function_may_reuse_one_buffer():
    buffer = np.zeros((2, 1, 1), np.uint32)

    def function(step):
        buffer[...] = step << 8
        return buffer, [0, 1]

    source = FunctionBatches(function)
    assert [int(filled(source, step)[0][0, 0, 0]) >> 8 for step in range(3)] == [0, 1, 2]


PIXELS, LABELS = numbered(0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            [PIXELS, LABELS],
            r"a batch must be a tuple \(pixels, labels\), but .* returned a list of 2 for batch 0",
        ),
        (
            (PIXELS,),
            r"a batch must be a tuple \(pixels, labels\), but .* returned a tuple of 1 for batch 0",
        ),
        ((PIXELS, LABELS, LABELS), r"but the source returned a tuple of 3 for batch 0: return these two"),
        ({"image": PIXELS, "label": LABELS}, r"but the source returned a dict with the keys image, label for"),
        ((PIXELS, [[0, 1], 2, 0]), r"the labels that .* has for batch 0 must be one array, but are a list of 3 whose"),
        (None, r"a batch must be a tuple \(pixels, labels\), but the source returned None for batch 0"),
        ((PIXELS.astype(np.int64), LABELS), r"pixels must be uint32 \[B, H, W\].* has int64 \[4, 2, 3\] for batch 0"),
        ((PIXELS[0], LABELS), r"pixels must be uint32 \[B, H, W\].* has uint32 \[2, 3\] for batch 0"),
        (
            (PIXELS, LABELS[:3]),
            r"labels must be integers \[4\], one for each image, but .* has int64 \[3\] for batch 0",
        ),
        ((PIXELS, LABELS * 1.0), r"labels must be integers \[4\].* has float64 \[4\] for batch 0"),
        ((PIXELS, LABELS > 1), r"labels must be integers \[4\].* has bool \[4\] for batch 0"),
        ((PIXELS, LABELS - 1), r"labels must lie in 0 … 2, but the batch source has -1 … 2 for batch 0"),
        ((PIXELS, LABELS), r"labels must lie in 0 … 2, but the batch source has 0 … 3 for batch 0"),
    ],
)
def test_a_batch_of_another_shape_or_dtype_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        FunctionBatches(lambda step: given, num_classes=3)


def test_every_batch_has_the_shape_of_the_first():
    source = FunctionBatches(lambda step: numbered(step, batch=4 if step < 2 else 3))
    filled(source, 0)
    filled(source, 1)
    message = (
        r"every batch must have the shape of the first, \(4, 2, 3\), "
        r"but the batch source returned \(3, 2, 3\) for batch 2"
    )
    with pytest.raises(ValueError, match=message):
        filled(source, 2)


def test_an_exception_of_a_function_is_passed_on():
    def function(step):
        raise LookupError(f"no step {step}")

    with pytest.raises(LookupError, match="no step 3"):
        FunctionBatches(function, first_batch=3)


def test_steps_requested_in_any_order_by_many_threads_are_correct(monkeypatch):
    """Positions are ordered some steps at a time, here three, and kept until others are asked for."""
    asked = []

    class Split:
        num_images, height, width, row_words, target_words, lends = 23, 2, 2, 2, 0, False
        meter, manifest = None, SimpleNamespace(whole=None)

        def read_into(self, indices, pixels, labels, *, timeout_s):
            asked.append((int(pixels[0, 0, 0]), indices.tolist()))

    monkeypatch.setattr(shard_batches_module, "_POSITIONS_AT_ONCE", 3 * 5 + 2)
    source, order = ShardBatches(cast(Any, Split()), batch=5, seed=3), EpochOrder(23, 3)
    steps = np.random.default_rng(0).integers(40, size=300).tolist()

    def fill(step):
        pixels = np.full((5, 2, 2), step, np.uint32)
        source.fill(step, range(source.batch), pixels, np.zeros(5, np.int32), timeout_s=1.0)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fill, steps))
    assert sorted(step for step, _ in asked) == sorted(steps)
    for step, images in asked:
        assert images == order.batch(step, 5).tolist()


def test_a_function_that_ends_says_after_how_many_batches():
    batches = iter([toy_batch(step) for step in range(3)])
    source = FunctionBatches(lambda _: next(batches))
    pixels, labels = np.zeros((8, 4, 4), np.uint32), np.zeros(8, np.int32)
    for step in range(3):
        source.fill(step, range(source.batch), pixels, labels, timeout_s=1)
    with pytest.raises(ValueError, match=r"the batch source has ended after 3 batches, but the run needs more"):
        source.fill(3, range(source.batch), pixels, labels, timeout_s=1)
