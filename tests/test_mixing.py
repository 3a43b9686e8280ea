"""Mixup and cutmix against NumPy with the same draws, and Beta against its distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import betainc

from loopfeed.engine.images.mixing import (
    WHOLE,
    draw_beta,
    draw_mixture,
)
from loopfeed.engine.images.positions import Purpose, image_keys, positions
from tests.threefry_reference import index, unit, words_at

pytestmark = pytest.mark.usefixtures("llvms_optimiser")

SEED = 11
beta_of = jax.jit(draw_beta, static_argnums=1)


def keys_of(num, step=0):
    return image_keys(jnp.array([0, SEED], jnp.uint32), positions(jnp.int32(step), num, 0, num))


def drawn(num, height, width, mixup_alpha, cutmix_alpha):
    run = jax.jit(lambda: draw_mixture(keys_of(num), height, width, mixup_alpha=mixup_alpha, cutmix_alpha=cutmix_alpha))
    return jax.tree.map(np.asarray, run())


def reference_beta(words, alpha):
    power = ((words[0] >> 8) + 1) / 2**24
    power **= 1 / alpha
    cosine = np.cos(2 * np.pi * unit(words[1]))
    return 0.5 + 0.5 * cosine * np.sqrt((1 - power) / (power + (1 - power) * cosine**2))


@pytest.mark.parametrize("alpha", [0.1, 0.2, 1.0, 8.0])
def test_beta_has_its_distribution(alpha):
    words = np.random.default_rng(0).integers(2**32, size=(20_000, 2), dtype=np.uint32)
    shares = np.asarray(beta_of(words, alpha), np.float64)
    assert np.isfinite(shares).all()
    assert shares.min() >= 0
    assert shares.max() <= 1
    assert shares.mean() == pytest.approx(0.5, abs=4 * 0.5 / np.sqrt(20_000))
    assert shares.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.05)
    # Kolmogorov's test of the whole law at the level 0.001; JAX's incomplete beta errs by under 1e-4.
    ordered = np.sort(shares)
    law = np.asarray(betainc(alpha, alpha, jnp.asarray(ordered, jnp.float32)))
    # What lies nearer to an end than float32 can say shares one value with the end.
    inner = (ordered > 1e-6) & (ordered < 1 - 1e-6)
    gaps = np.abs(law - np.arange(0.5, 20_000) / 20_000)
    assert inner.mean() > 0.4
    assert gaps[inner].max() < 1.95 / np.sqrt(20_000) + 1e-4


@pytest.mark.parametrize("alpha", [0.001, 0.2, 1.0, 1000.0])
def test_beta_at_the_ends_of_its_words(alpha):
    words = np.array([(a, b) for a in (0, 2**31, 2**32 - 1) for b in (0, 2**30, 2**31, 2**32 - 1)], np.uint32)
    shares = np.asarray(beta_of(words, alpha))
    assert np.isfinite(shares).all()
    assert ((shares >= 0) & (shares <= 1)).all()


def test_mixup_equals_the_reference():
    mixture = drawn(64, 8, 8, 0.4, 0.0)
    for row in range(64):
        share = reference_beta(words_at(SEED, row // 2 * 2, Purpose.MIXUP, 0), 0.4)
        # float32 against float64: 1e-6, and rounding to 2**-16.
        assert mixture.own_level[row] / WHOLE == pytest.approx(share, abs=1e-5)
        assert mixture.own_target[row] == mixture.own_level[row]
    assert not np.any(mixture.box.height)


def test_cutmix_equals_the_reference():
    height, width = 20, 31
    mixture = drawn(64, height, width, 0.0, 1.0)
    assert (mixture.own_level == WHOLE).all()
    for row in range(64):
        side = np.sqrt(1 - reference_beta(words_at(SEED, row // 2 * 2, Purpose.CUTMIX, 0), 1.0))
        middle = words_at(SEED, row // 2 * 2, Purpose.CUTMIX, 1)
        inside = np.zeros((height, width))
        y, x = index(middle[0], height), index(middle[1], width)
        half_y, half_x = int(height * side) // 2, int(width * side) // 2
        inside[max(y - half_y, 0) : y + half_y, max(x - half_x, 0) : x + half_x] = 1
        box = [int(value[row]) for value in mixture.box]
        assert box[2] * box[3] == inside.sum()
        assert inside[box[0] : box[0] + box[2], box[1] : box[1] + box[3]].all()
        assert mixture.own_target[row] / WHOLE == pytest.approx(1 - inside.mean(), abs=2**-17 + 1e-7)


def test_a_coin_chooses_where_both_are_on():
    both, mixup, cutmix = (drawn(2000, 16, 16, *alphas) for alphas in ((0.3, 0.7), (0.3, 0.0), (0.0, 0.7)))
    coins = np.array([words_at(SEED, row // 2 * 2, Purpose.MIX_CHOICE, 0)[0] < 2**31 for row in range(2000)])
    # 1000 coins: four standard deviations are 0.063.
    assert coins.mean() == pytest.approx(0.5, abs=0.063)
    np.testing.assert_array_equal(both.own_level, np.where(coins, WHOLE, mixup.own_level))
    np.testing.assert_array_equal(both.own_target, np.where(coins, cutmix.own_target, mixup.own_target))
    for chosen, alone in zip(both.box, cutmix.box, strict=True):
        np.testing.assert_array_equal(chosen, np.where(coins, alone, 0))
