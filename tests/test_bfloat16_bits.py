"""Conversions of bfloat16 by operations on integers, against XLA's own, bit for bit."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopfeed.models.kernels import ONEDNN, XLA, MissingKernelsError, using_kernels
from loopfeed.models.layers.batch_norm import NormGroups, RunningStats, batch_norm, normalising_over, stored_relu
from loopfeed.models.layers.bfloat16_bits import round_by_bits
from loopfeed.models.layers.gelu import gelu
from loopfeed.models.layers.head import global_average_pool, linear
from loopfeed.models.layers.layer_norm import layer_norm
from loopfeed.models.layers.pooling import max_pool


def _lacks_kernels() -> bool:
    try:
        with using_kernels(ONEDNN):
            return False
    except MissingKernelsError:
        return True


pytestmark = [
    pytest.mark.usefixtures("llvms_optimiser"),
    pytest.mark.kernels,
    pytest.mark.skipif(_lacks_kernels(), reason="oneDNN's kernels do not run here"),
]


def bits(x):
    """The bits of an array, of which a NaN has one form."""
    wide = np.asarray(x.astype(jnp.float32))
    return np.where(np.isnan(wide), np.uint32(0x7FC00000), wide.view(np.uint32))


def each_bfloat16():
    """All 65,536 numbers, with infinities, denormals and NaNs."""
    return jax.lax.bitcast_convert_type(jnp.arange(2**16, dtype=jnp.uint16), jnp.bfloat16)


def by_both(function, *operands):
    """The results of a function with XLA's conversions and by bits, compiled."""
    results = []
    for kernels in (XLA, ONEDNN):
        with using_kernels(kernels):
            compiled = jax.jit(lambda *operands: function(*operands)).lower(*operands).compile()
            results.append(compiled(*operands))
    return results


def assert_same_bits(results):
    for found, wanted in zip(*map(jax.tree.leaves, reversed(results)), strict=True):
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(bits(found), bits(wanted))


def test_rounding_is_xlas_for_numbers_between_ties_and_at_them():
    """Beside every bfloat16 number: the next float32 numbers, the tie, and its neighbours."""
    high = np.arange(2**16, dtype=np.uint32)[:, None] << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    numbers = jnp.asarray((high | low).view(np.float32))
    results = by_both(lambda x: round_by_bits(x, jnp.bfloat16), numbers)
    assert results[0].dtype == results[1].dtype == jnp.bfloat16
    # NaNs too, of which some have an upper half that alone would be infinity.
    one, other = (np.asarray(jax.lax.bitcast_convert_type(each, jnp.uint16)) for each in results)
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("has_shortcut", [False, True])
def test_the_relu_of_a_sum_and_its_gradients_have_the_same_bits(has_shortcut):
    x = each_bfloat16()
    other = jnp.roll(x, 12345) if has_shortcut else None

    def outcome(x, gradient):
        y, pullback = jax.vjp(stored_relu, x, other)
        return y, pullback(gradient)

    assert_same_bits(by_both(outcome, x, jnp.flip(x)))


def assert_same_bits_forward_and_backward(function, gradient, *operands):
    def outcome(gradient, *operands):
        y, pullback = jax.vjp(function, *operands)
        return y, pullback(gradient)

    assert_same_bits(by_both(outcome, gradient, *operands))


def test_gelu_and_its_gradient_have_the_same_bits():
    x = each_bfloat16()
    assert_same_bits_forward_and_backward(gelu, jnp.roll(x, 12345), x)


@pytest.mark.parametrize(("window", "stride", "padding", "size"), [(2, 2, 0, 4), (3, 2, 1, 4), (3, 1, 1, 8)])
def test_max_pooling_and_its_gradient_have_the_same_bits(window, stride, padding, size):
    # All numbers beside others, NaNs and equal ones too.
    x = jnp.stack([each_bfloat16(), jnp.ones(2**16, jnp.bfloat16)], 1).reshape(32, 8, 8, 64)
    gradient = jnp.roll(each_bfloat16(), 12345)[: 32 * size * size * 64 // 2].repeat(2).reshape(32, size, size, 64)
    pool = partial(max_pool, window=window, stride=stride, padding=padding)
    assert_same_bits_forward_and_backward(pool, jnp.where(jnp.isfinite(gradient), gradient, 1), x)


def test_layers_over_tokens_and_their_gradients_have_the_same_bits():
    rng = np.random.default_rng(0)
    shapes = {"x": (37, 96), "scale": (96,), "bias": (96,), "kernel": (96, 48), "to": (48,), "gradient": (37, 48)}
    drawn = {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}
    x, gradient = (drawn[name].astype(jnp.bfloat16) for name in ("x", "gradient"))
    assert_same_bits_forward_and_backward(layer_norm, jnp.flip(x), x, drawn["scale"], drawn["bias"])
    assert_same_bits_forward_and_backward(linear, gradient, x, drawn["kernel"], drawn["to"])
    images = x.reshape(37, 8, 4, 3)
    assert_same_bits_forward_and_backward(global_average_pool, images[:, 1, 1], images)


@pytest.mark.parametrize(
    ("shape", "images", "relu"),
    [
        ((4, 3, 7, 5), None, True),
        ((4, 3, 7, 5), 2, False),
        ((4, 8, 8, 16), None, False),
        ((4, 8, 8, 16), 2, True),
        ((4, 1, 1, 17), None, True),
        ((4, 1, 1, 17), 2, False),
        ((4, 1, 3, 1), None, False),
        ((4, 1, 3, 1), 2, True),
    ],
)
def test_batch_norm_and_its_gradients_have_the_same_bits(shape, relu, images):
    rng = np.random.default_rng(0)
    x, gradient = (jnp.asarray(rng.standard_normal(shape) * 3 + 1, jnp.bfloat16) for _ in range(2))
    scale, bias = (jnp.asarray(rng.standard_normal(shape[3]), jnp.float32) for _ in range(2))
    running = RunningStats(jnp.zeros(shape[3]), jnp.ones(shape[3]))

    def outcome(x, scale, bias, gradient):
        def normalise(x, scale, bias):
            with normalising_over(NormGroups(images=images)):
                return batch_norm(x, scale, bias, running, train=True, relu=relu)

        y, pullback, moved = jax.vjp(normalise, x, scale, bias, has_aux=True)
        return y, moved, pullback(gradient)

    assert_same_bits(by_both(outcome, x, scale, bias, gradient))


def test_a_backward_pass_converts_by_bits_too_if_only_the_forward_pass_was_traced_with_the_kernels():
    """As in a run, which chooses the kernels where it applies the model."""
    x, one = jnp.ones((2, 2, 2, 4), jnp.bfloat16), jnp.ones(4)

    def network(x):
        y, _ = batch_norm(x, one, one, RunningStats(one, one), train=True, relu=True)
        return stored_relu(y, x)

    def loss(apply, x):
        return (apply(x).astype(jnp.float32) ** 2).sum()

    def apply(x):
        with using_kernels(ONEDNN):
            return network(x)

    def num_conversions(apply):
        gradient = jax.grad(lambda x: loss(apply, x))
        return jax.jit(gradient).lower(x).as_text().count("stablehlo.bitcast_convert")

    outside = num_conversions(apply)
    with using_kernels(ONEDNN):
        assert outside == num_conversions(network) > num_conversions(lambda x: jax.lax.stop_gradient(network(x)))
