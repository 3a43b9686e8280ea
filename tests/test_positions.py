"""Positions as 64-bit numbers and the draws that belong to them, against Python's own integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopfeed.engine.images.positions import (
    Positions,
    Purpose,
    draw_words,
    image_keys,
    positions,
    to_index,
    to_unit,
)
from tests.threefry_reference import threefry, words_at

words_of = jax.jit(draw_words, static_argnums=(1, 2))


def joined(at):
    return [int(high) << 32 | int(low) for high, low in zip(*at, strict=True)]


def at_positions(numbers):
    return Positions(
        jnp.array([number >> 32 for number in numbers], jnp.uint32),
        jnp.array([number & 0xFFFFFFFF for number in numbers], jnp.uint32),
    )


def seed_words(seed):
    return jnp.array([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32)


@given(
    step=st.integers(0, 2**31 - 1),
    batch=st.one_of(st.integers(1, 2**31 - 1), st.sampled_from([1, 2**16, 2**20, 2**31 - 1])),
    data=st.data(),
)
@settings(max_examples=150)
def test_positions_equal_pythons_integers(step, batch, data):
    count = data.draw(st.integers(1, min(batch, 5)))
    start = data.draw(st.integers(0, batch - count))
    at = positions(jnp.int32(step), batch, start, count)
    assert at.high.dtype == at.low.dtype == jnp.uint32
    assert joined(at) == [step * batch + start + row for row in range(count)]


@pytest.mark.parametrize("num_shards", [1, 2, 8])
def test_shards_take_the_batch_in_order(num_shards):
    step, batch = 2**31 - 2, 1024
    count = batch // num_shards
    # The first row may be known at run time alone, as under shard_map.
    shard = jax.jit(lambda start: positions(jnp.int32(step), batch, start, count))
    taken = [number for index in range(num_shards) for number in joined(shard(jnp.int32(index * count)))]
    assert taken == list(range(step * batch, (step + 1) * batch))


@pytest.mark.parametrize(
    ("batch", "count", "message"),
    [(0, 1, "batch must lie in"), (2**31, 1, "batch must lie in"), (4, 5, "1 … 4 images"), (4, 0, "1 … 4 images")],
)
def test_impossible_batches(batch, count, message):
    with pytest.raises(ValueError, match=message):
        positions(jnp.int32(0), batch, 0, count)


def test_the_reference_gives_the_published_answers():
    # Known answers of the authors' Random123 library.
    assert threefry((0, 0), (0, 0)) == (0x6B200159, 0x99BA4EFE)
    assert threefry((2**32 - 1,) * 2, (2**32 - 1,) * 2) == (0x1CB996FC, 0xBB002BE7)
    assert threefry((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3)) == (0xC4923A9C, 0x483DF7A0)


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1])
def test_draws_equal_the_reference(seed):
    numbers = [0, 1, 2**32 - 1, 2**32, 3 * 2**40 + 5]
    keys = image_keys(seed_words(seed), at_positions(numbers))
    for purpose in Purpose:
        words = words_of(keys, purpose, 3)
        assert words.dtype == jnp.uint32
        expected = [[words_at(seed, number, purpose, block) for block in range(3)] for number in numbers]
        np.testing.assert_array_equal(words, np.array(expected, np.uint32))


def test_golden_draws():
    keys = image_keys(seed_words(1), at_positions([0, 2**32]))
    golden = [[3537425036, 484748158], [3862313409, 3637216142]]
    np.testing.assert_array_equal(draw_words(keys, Purpose.FLIP)[:, 0], np.array(golden, np.uint32))


def test_the_numbers_of_the_purposes_are_fixed():
    assert {purpose.name: purpose.value for purpose in Purpose} == {
        "CROP": 1, "FLIP": 2, "BRIGHTNESS": 3, "CONTRAST": 4, "SATURATION": 5, "HUE": 6,
        "MIX_CHOICE": 7, "MIXUP": 8, "CUTMIX": 9, "ERASING": 10,
        "AUTO_AUGMENT": 11, "OWN_AUGMENTATION": 12, "MODEL": 13,
    }  # fmt: skip


def test_no_two_draws_are_equal():
    draws = [
        words_of(image_keys(seed_words(seed), at_positions([0, 1, 2, 2**32, 2**32 + 1])), purpose, 16)
        for seed in (0, 1, 2**32)
        for purpose in Purpose
    ]
    blocks = np.stack([np.asarray(draw) for draw in draws]).reshape(-1, 2)
    assert len(np.unique(blocks, axis=0)) == len(blocks)
    # Nor like the keys that initial parameters come from.
    of_seed = jax.random.wrap_key_data(seed_words(0), impl="threefry2x32")
    split = np.asarray(jax.random.key_data(jax.random.split(of_seed, 64)))
    assert not {tuple(key) for key in split} & {tuple(block) for block in blocks}


@given(word=st.integers(0, 2**32 - 1), count=st.one_of(st.integers(1, 2**31), st.sampled_from([1, 2**16, 2**31])))
@settings(max_examples=150)
def test_index_is_the_scaled_word(word, count):
    assert int(to_index(jnp.uint32(word), jnp.uint32(count))) == word * count >> 32


def test_units_are_exact_and_below_one():
    words = jnp.array([0, 255, 256, 2**31, 2**32 - 1], jnp.uint32)
    np.testing.assert_array_equal(to_unit(words), [0, 0, 2**-24, 0.5, 1 - 2**-24])


def test_options_of_jax_change_no_draw():
    at = at_positions([3, 4])
    usual = draw_words(image_keys(seed_words(5), at), Purpose.CROP, 4)
    with jax.threefry_partitionable(False), jax.default_prng_impl("rbg"):
        other = draw_words(image_keys(seed_words(5), at), Purpose.CROP, 4)
    np.testing.assert_array_equal(usual, other)
