"""Average pool and the dense layer against float64 NumPy; which layers have a forward mode, as the docs say."""

import jax.numpy as jnp
import numpy as np
import pytest

from loopfeed.models.layers.head import dense

pytestmark = pytest.mark.kernels


def normal(seed, shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def test_dense_is_affine_and_answers_in_float32():
    x, kernel, bias = normal(0, (3, 6)), normal(1, (6, 4)), normal(2, (4,))
    np.testing.assert_allclose(dense(x, kernel, bias), np.asarray(x) @ np.asarray(kernel) + bias, atol=1e-5)
    assert dense(x.astype(jnp.bfloat16), kernel, bias).dtype == jnp.float32
