"""Average pool and the dense layer against float64 NumPy; which layers have a forward mode, as the docs say."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopfeed.engine.objective.losses import LOSSES
from loopfeed.models.families.vision_transformer import self_attention
from loopfeed.models.layers.batch_norm import RunningStats, batch_norm, stored_relu
from loopfeed.models.layers.convolution import convolution
from loopfeed.models.layers.gelu import gelu, quick_gelu
from loopfeed.models.layers.head import dense, global_average_pool
from loopfeed.models.layers.layer_norm import layer_norm
from loopfeed.models.layers.pooling import average_pool, global_max_pool, max_pool

pytestmark = pytest.mark.kernels


def normal(seed, shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def test_dense_is_affine_and_answers_in_float32():
    x, kernel, bias = normal(0, (3, 6)), normal(1, (6, 4)), normal(2, (4,))
    np.testing.assert_allclose(dense(x, kernel, bias), np.asarray(x) @ np.asarray(kernel) + bias, atol=1e-5)
    assert dense(x.astype(jnp.bfloat16), kernel, bias).dtype == jnp.float32


ONES: Any = np.ones(12, np.float32)
norm = partial(batch_norm, scale=ONES, bias=ONES, running=RunningStats(ONES, ONES))
REVERSE_ONLY = {
    "convolution": lambda x: convolution(x, jnp.ones((3, 3, 12, 12))),
    "batch_norm in training": lambda x: norm(x, train=True)[0],
    "batch_norm with its ReLU": lambda x: norm(x, train=False, relu=True)[0],
    "max_pool": max_pool,
    "dense": lambda x: dense(x.reshape(len(x), -1), jnp.ones((x[0].size, 3)), jnp.ones(3)),
    "layer norm": lambda x: layer_norm(x, ONES, ONES),
    "GELU": gelu,
    "attention": lambda x: self_attention(x[:, 0], num_heads=2),
    "ReLU after a shortcut": lambda x: stored_relu(x, x),
}
BOTH_MODES = {
    "average pool": partial(average_pool, window=2),
    "global average pool": global_average_pool,
    "global maximum": global_max_pool,
    "batch_norm in evaluation": lambda x: norm(x, train=False)[0],
    "approximate GELU": quick_gelu,
    **{name: partial(lambda loss, x: loss(x[:, 0, 0], jnp.ones((2, 12)), jnp.ones(2)), each)
       for name, each in LOSSES.items()},
}  # fmt: skip


@pytest.mark.parametrize("name", [*REVERSE_ONLY, *BOTH_MODES])
def test_which_layers_have_a_forward_mode(name):
    x = jax.ShapeDtypeStruct((2, 4, 4, 12), jnp.float32)

    def differentiate(layer):
        jax.jit(lambda x: jax.vjp(layer, x)[1](layer(x))).lower(x)
        return jax.jit(lambda x: jax.jvp(layer, (x,), (x,))[1]).lower(x).out_info

    if name in BOTH_MODES:
        assert differentiate(BOTH_MODES[name]).dtype == jnp.float32
        return
    with pytest.raises(TypeError, match="forward-mode"):
        differentiate(REVERSE_ONLY[name])
