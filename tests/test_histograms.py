"""Histograms on the device, compared with NumPy's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopfeed.engine.program.histograms import NUM_BUCKETS, compute_histograms

RANDOM = np.random.default_rng(5)
NAN, INF = np.nan, np.inf


def normal(*shape):
    return RANDOM.normal(1, 3, shape).astype(np.float32)


ARRAYS = {
    "a scalar": np.float32(3.5),
    "no elements": np.zeros((0, 4), np.float32),
    "few": normal(3),
    "one less than the padding": normal(255),
    "as many as the padding": normal(4, 4, 16),
    "larger": normal(300, 300),
    "equal": np.full(9, 2.5, np.float32),
    "neighbours": np.array([1, np.nextafter(np.float32(1), np.float32(2))], np.float32),
    "the widest range": np.array([-3e38, 0, 3e38], np.float32),
    "small numbers": np.array([0, 1e-30, 3e-30, -2e-30], np.float32),
    "on the edges": np.arange(NUM_BUCKETS + 1, dtype=np.float32),
    "some not finite": np.array([NAN, INF, 1, 2, -INF, 2], np.float32),
    "none finite": np.array([NAN, INF], np.float32),
    "complex": np.array([3 + 4j, 1, 2j], np.complex64),
    "narrow": jnp.asarray(normal(100), jnp.bfloat16),
}


@pytest.fixture(scope="module")
def found():
    arrays = [jnp.asarray(array) for array in ARRAYS.values()]
    histograms = jax.device_get(jax.jit(compute_histograms)(arrays))
    return {name: [part[index] for part in histograms] for index, name in enumerate(ARRAYS)}


@pytest.mark.parametrize("name", ARRAYS)
def test_it_equals_numpys(found, name):
    edges, counts, mean, std, num_nonfinite = found[name]
    array = np.asarray(ARRAYS[name])
    numbers = (np.abs(array) if np.iscomplexobj(array) else array).astype(np.float32).ravel()
    finite = numbers[np.isfinite(numbers)]
    assert num_nonfinite == numbers.size - finite.size
    np.testing.assert_array_equal(counts, np.histogram(finite, edges)[0])
    if not finite.size:
        assert not any(map(np.any, (edges, counts, mean, std)))
        return
    assert (edges[0], edges[-1]) == (finite.min(), finite.max())
    wide = finite.astype(np.float64)
    # The rounding of one float32 operation on the largest magnitude, or two.
    largest = np.abs(wide).max()
    np.testing.assert_allclose(edges, np.linspace(wide.min(), wide.max(), NUM_BUCKETS + 1), rtol=0, atol=3e-7 * largest)
    np.testing.assert_allclose(mean, wide.mean(), rtol=1e-5, atol=1e-6 * largest)
    np.testing.assert_allclose(std, wide.std(), rtol=1e-5, atol=1e-7 * largest)


@pytest.mark.usefixtures("on_a_card")
def test_the_form_for_other_devices_counts_the_same(found):
    names = [name for name in ARRAYS if np.size(ARRAYS[name]) < 256]
    histograms = jax.jit(lambda arrays: compute_histograms(arrays))([jnp.asarray(ARRAYS[name]) for name in names])
    for index, name in enumerate(names):
        np.testing.assert_array_equal(histograms.counts[index], found[name][1])
