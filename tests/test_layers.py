"""Average pool and the dense layer against float64 NumPy and automatic differentiation."""

import jax.numpy as jnp
import numpy as np
import pytest

from models.layers.head import dense, global_average_pool

pytestmark = pytest.mark.kernels


def normal(seed, shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def test_global_average_pool_is_the_mean_of_places():
    x = normal(0, (3, 5, 4, 2))
    np.testing.assert_allclose(global_average_pool(x), np.asarray(x, np.float64).mean((1, 2)), rtol=1e-5, atol=1e-7)
    assert global_average_pool(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_dense_is_affine_and_answers_in_float32():
    x, kernel, bias = normal(0, (3, 6)), normal(1, (6, 4)), normal(2, (4,))
    np.testing.assert_allclose(dense(x, kernel, bias), np.asarray(x) @ np.asarray(kernel) + bias, atol=1e-5)
    assert dense(x.astype(jnp.bfloat16), kernel, bias).dtype == jnp.float32
