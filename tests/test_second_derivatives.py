"""Gradients of layers beside oneDNN's kernels, pulled back elsewhere, and second derivatives, as of a penalty."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopfeed.models.families.vision_transformer import self_attention
from loopfeed.models.kernels import ONEDNN, XLA, using_kernels
from loopfeed.models.kernels.onednn.handler import TARGET
from loopfeed.models.kernels.onednn.library import load_library
from loopfeed.models.layers.batch_norm import RunningStats, batch_norm, stored_relu
from loopfeed.models.layers.convolution import convolution
from loopfeed.models.layers.gelu import gelu, quick_gelu
from loopfeed.models.layers.head import dense
from loopfeed.models.layers.pooling import max_pool
from tests.direct_operations import normal
from tests.kernels import needs_onednn

pytestmark = [pytest.mark.kernels, needs_onednn]


def norm(x, *, train):
    running = RunningStats(jnp.zeros(16), jnp.ones(16))
    return batch_norm(x, jnp.array(normal(1, (16,))), jnp.array(normal(2, (16,))), running, train=train, relu=True)[0]


def attention(qkv):
    return self_attention(qkv, num_heads=3)


def pool(x):
    # Windows that do not overlap: XLA may leave out the roundings between sums of bfloat16 numbers.
    return max_pool(x, window=2, stride=2, padding=0)


def penalty_gradient(layer, *operands):
    """Return the gradients of the squared norm of the gradients of a loss."""

    def loss(*operands):
        y = layer(*operands).astype(jnp.float32)
        return (y**2 * normal(9, y.shape)).sum()

    def penalty(*operands):
        found = jax.grad(loss, range(len(operands)))(*operands)
        return sum((each.astype(jnp.float32) ** 2).sum() for each in found)

    return jax.grad(penalty, range(len(operands)))(*operands)


EVERY_ROUNDING = {"xla_allow_excess_precision": False}
IMAGES = (4, 16, 15, 16)
TOKENS = (2, 5, 36)


LAYERS = [
    pytest.param(convolution, "float32", (IMAGES, (3, 3, 16, 16)), True, id="convolution"),
    pytest.param(convolution, "bfloat16", (IMAGES, (3, 3, 16, 16)), True, id="convolution in bfloat16"),
    pytest.param(
        partial(convolution, stride=2), "bfloat16", ((4, 32, 32, 64), (1, 1, 64, 64)), True, id="strided 1×1 kernel"
    ),
    pytest.param(partial(dense, bias=jnp.float32(0)), "float32", ((128, 256), (256, 100)), True, id="dense layer"),
    pytest.param(partial(norm, train=True), "bfloat16", (IMAGES,), False, id="norm"),
    pytest.param(partial(norm, train=False), "bfloat16", (IMAGES,), False, id="norm in evaluation"),
    pytest.param(gelu, "bfloat16", (IMAGES,), False, id="GELU"),
    pytest.param(pool, "bfloat16", (IMAGES,), False, id="max-pooling"),
    pytest.param(attention, "float32", (TOKENS,), True, id="attention"),
    pytest.param(stored_relu, "bfloat16", (IMAGES, IMAGES), False, id="residual sum"),
]


def is_called(has_calls, dtype):
    """Return whether a layer that has kernels uses them on this processor."""
    return has_calls and load_library().supports(dtype)


@pytest.mark.parametrize(("layer", "dtype", "shapes", "has_calls"), LAYERS)
def test_second_derivatives_are_those_of_xlas_forms(layer, dtype, shapes, has_calls):
    operands = [normal(number, shape, dtype) for number, shape in enumerate(shapes)]
    found = {}
    for kernels in (XLA, ONEDNN):
        with using_kernels(kernels):
            lowered = jax.jit(partial(penalty_gradient, layer)).lower(*operands)
            assert (TARGET in lowered.as_text()) == (is_called(has_calls, dtype) and kernels == ONEDNN)
            found[kernels] = [np.asarray(each, np.float32) for each in lowered.compile(EVERY_ROUNDING)(*operands)]
    for own, expected in zip(found[ONEDNN], found[XLA], strict=True):
        assert np.abs(expected).max() > 1
        # Sums of float32 in another order, or the same bits; of convolutions in bfloat16 three results, each rounded.
        is_narrow = has_calls and dtype == "bfloat16"
        np.testing.assert_allclose(
            own, expected, rtol=0, atol=(3 * 2**-8 if is_narrow else 1e-5) * np.abs(expected).max()
        )


@pytest.mark.parametrize(("layer", "dtype", "shapes", "has_calls"), LAYERS)
def test_a_gradient_uses_the_kernels_of_its_forward_pass(layer, dtype, shapes, has_calls):
    """Whichever are chosen where it is pulled back."""
    operands = [normal(number, shape, dtype) for number, shape in enumerate(shapes)]

    def gradients(is_outside, *operands):
        with using_kernels(ONEDNN):
            y, pull = jax.vjp(layer, *operands)
            if not is_outside:
                return pull(y)
        return pull(y)

    inside, outside = (jax.jit(partial(gradients, each)).lower(*operands).as_text() for each in (False, True))
    assert inside == outside
    assert (TARGET in outside) == is_called(has_calls, dtype)


def test_second_derivatives_of_the_approximate_gelu_are_nearer_to_float32_than_xlas():
    """It rounds once where XLA's form rounds after each operation."""
    x = normal(0, IMAGES, "bfloat16")
    (exact,) = jax.jit(partial(penalty_gradient, quick_gelu))(jnp.asarray(x, jnp.float32))
    errors = {}
    for kernels in (XLA, ONEDNN):
        with using_kernels(kernels):
            (found,) = jax.jit(partial(penalty_gradient, quick_gelu)).lower(x).compile(EVERY_ROUNDING)(x)
            errors[kernels] = np.abs(np.asarray(found, np.float32) - exact).max() / np.abs(exact).max()
    assert 0 < errors[ONEDNN] <= errors[XLA] < 2**-6
