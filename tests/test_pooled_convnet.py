"""Convolutional networks with pooled stages: against XLA's operations, composition, initial values, small images."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from loopfeed.models.families import pooled_convnet
from loopfeed.models.families.pooled_convnet import PooledConvNet, cosine_kernel
from loopfeed.models.model import BatchStats
from loopfeed.models.registry import build_model, count_params

NET = PooledConvNet(stem=6, stages=(8, 10))
FIXED = replace(NET, stem_learns=False)


def normal(seed, shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def drawn(net, num_classes=5):
    """Parameters and statistics that differ everywhere, so that none can stand in another's place."""
    shapes = jax.eval_shape(partial(pooled_convnet.init, net, num_classes), jax.random.key(0))
    rng = np.random.default_rng(1)

    def draw(leaf):
        # Kernels of one sign would make channels that are all alike, and norms that cancel all but rounding.
        return jnp.asarray(rng.uniform(0.2 if leaf.ndim == 1 else -1.0, 1.0, leaf.shape), jnp.float32)

    return jax.tree.map(draw, shapes)


def xla_layer(x, params, stats, *, margin, pool, train):
    """A layer of XLA's own convolution, reduce-window and elementary arithmetic; the new statistics beside it."""
    x = lax.conv_general_dilated(
        x, params["conv"]["kernel"], (1, 1), [(margin, margin)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    if pool:
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    mean, var = (x.mean((0, 1, 2)), x.var((0, 1, 2))) if train else (stats["norm"]["mean"], stats["norm"]["var"])
    count = x.size // x.shape[-1]
    moved = {
        "mean": 0.9 * stats["norm"]["mean"] + 0.1 * mean,
        "var": 0.9 * stats["norm"]["var"] + 0.1 * var * count / (count - 1),
    }
    x = (x - mean) / jnp.sqrt(var + 1e-5) + 8 * params["norm"]["bias"]
    return x / (1 + jnp.exp(-1.702 * x)), {"norm": moved if train else stats["norm"]}


def xla_network(params, stats, x, *, train):
    """Return the network of two stages, written without loops."""
    new: BatchStats = {"stage1": {}, "stage2": {}}
    stem = {"conv": {"kernel": cosine_kernel(6)}} | params["stem"]
    x, new["stem"] = xla_layer(x, stem, stats["stem"], margin=0, pool=False, train=train)
    for stage in ("stage1", "stage2"):
        for place, pool in (("0", True), ("1", False)):
            x, new[stage][place] = xla_layer(
                x, params[stage][place], stats[stage][place], margin=1, pool=pool, train=train
            )
    return (x.max((1, 2)) @ params["fc"]["kernel"] + params["fc"]["bias"]) / 8, new


def loss_and_gradients(forward, params, wanted):
    def loss(params):
        logits, new = forward(params)
        return jnp.square(logits - wanted).mean(), (logits, new)

    (_, (logits, new)), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    return logits, new, gradients


def in_a_loop(function, *operands):
    """The second of two turns of a `while_loop`, whose body is where the training program has the network."""
    shapes = jax.eval_shape(function, *operands)
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    @jax.jit
    def run(operands):
        return lax.while_loop(
            lambda carry: carry[0] < 2, lambda carry: (carry[0] + 1, function(*operands)), (jnp.int32(0), nothing)
        )[1]

    return run(operands)


@pytest.mark.integration
@pytest.mark.parametrize(("net", "size"), [(NET, (9, 14)), (FIXED, (16, 16))], ids=["learns", "fixed"])
def test_logits_statistics_and_gradients_are_those_of_xlas_operations(size, net):
    params, stats = drawn(net)
    images, wanted = normal(2, (4, *size, 3)), normal(3, (4, 5))

    def ours(params, images):
        forward = partial(pooled_convnet.apply, net, train=True, dtype=jnp.dtype(jnp.float32))
        return loss_and_gradients(lambda params: forward(params, stats, images), params, wanted)

    def plain(params, images):
        forward = partial(xla_network, train=True)
        return loss_and_gradients(lambda params: forward(params, stats, images), params, wanted)

    found = in_a_loop(ours, params, images)
    reference = jax.jit(plain)(params, images)
    # Float32 sums in another order, 5 norms deep: 1e-4 of a leaf's largest value.
    jax.tree.map(
        lambda ours, xla: np.testing.assert_allclose(ours, xla, rtol=0, atol=1e-4 * np.abs(xla).max() + 1e-7),
        found,
        reference,
    )


@pytest.mark.integration
def test_the_gradient_of_one_image_reaches_the_maxima():
    """In a loop, XLA computes the features again for the backward pass, where none equals the maximum to the last bit.

    The reference runs operation by operation, so that each value is computed once.
    """
    net = PooledConvNet(stem=24, stages=(64, 128))
    params, stats = jax.jit(partial(pooled_convnet.init, net, 5))(jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf + 0.05 * normal(leaf.size, leaf.shape) if leaf.ndim == 1 else leaf, params)
    images, wanted = normal(2, (1, 12, 12, 3)), normal(3, (1, 5))

    def gradients(forward, params):
        return loss_and_gradients(forward, params, wanted)[2]

    ours = partial(pooled_convnet.apply, net, batch_stats=stats, images=images, train=True, dtype=jnp.dtype("float32"))
    found = in_a_loop(partial(gradients, lambda params: ours(params=params)), params)
    with jax.disable_jit():
        expected = gradients(partial(xla_network, stats=stats, x=images, train=True), params)
    for ours, xla in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # Float32 sums in another order, through 5 norms. The gradients were off by a tenth and more.
        np.testing.assert_allclose(ours, xla, rtol=0, atol=1e-4 * np.abs(xla).max() + 1e-7)


def test_evaluation_normalises_by_the_running_statistics_and_leaves_them():
    params, stats = drawn(NET)
    images = normal(2, (4, 16, 16, 3))
    evaluate = jax.jit(partial(pooled_convnet.apply, NET, train=False, dtype=jnp.dtype(jnp.float32)))
    logits, after = evaluate(params, stats, images)
    wanted, _ = xla_network(params, stats, images, train=False)
    # Float32 sums in another order, here and for one image: 1e-5 of the largest logit.
    almost = partial(np.testing.assert_allclose, rtol=0, atol=1e-5 * np.abs(wanted).max())
    almost(logits, wanted)
    jax.tree.map(np.testing.assert_array_equal, after, stats)
    almost(evaluate(params, stats, images[:1])[0], wanted[:1])


@pytest.mark.integration
def test_bfloat16_stays_near_float32():
    """Eight bits of mantissa, rounded after each of 5 layers: logits within 5 % and the gradient within 20 %."""
    params, stats = jax.jit(partial(pooled_convnet.init, NET, 5))(jax.random.key(0))
    images, wanted = normal(2, (16, 16, 16, 3)), normal(3, (16, 5))

    def at(dtype):
        # As arguments: XLA would compute with constants while it compiles.
        @jax.jit
        def both(params, stats, images, wanted):
            forward = partial(pooled_convnet.apply, NET, train=True, dtype=jnp.dtype(dtype))
            return loss_and_gradients(lambda params: forward(params, stats, images), params, wanted)

        logits, new, gradients = both(params, stats, images, wanted)
        assert {leaf.dtype for leaf in jax.tree.leaves((logits, new, gradients))} == {jnp.dtype(jnp.float32)}
        return logits, np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gradients)])

    (logits, gradient), (narrow_logits, narrow_gradient) = at(jnp.float32), at(jnp.bfloat16)
    np.testing.assert_allclose(narrow_logits, logits, rtol=0, atol=0.05 * np.abs(logits).max())
    assert np.linalg.norm(narrow_gradient - gradient) < 0.2 * np.linalg.norm(gradient)
    assert not np.array_equal(narrow_logits, logits)  # it is narrow indeed


@pytest.mark.integration
def test_places_that_share_a_maximum_share_its_gradient_in_bfloat16_too():
    """They are counted, and a count in bfloat16 stays at 256: 400 places would get 400/256 of the gradient."""
    params, stats = drawn(NET)
    params = jax.tree.map(lambda leaf: 0 * leaf if leaf.ndim == 4 else leaf, params)  # every place is like another
    images = jnp.zeros((2, 81, 81, 3))

    def logits_of(params, dtype):
        return pooled_convnet.apply(NET, params, stats, images, train=False, dtype=jnp.dtype(dtype))[0].sum()

    narrow, wide = (jax.jit(jax.grad(partial(logits_of, dtype=dtype)))(params) for dtype in (jnp.bfloat16, jnp.float32))
    found, wanted = (gradient["stage2"]["1"]["norm"]["bias"] for gradient in (narrow, wide))
    # 400 equal shares, each rounded to eight bits, before their exact sum.
    np.testing.assert_allclose(found, wanted, rtol=0.05)


def test_parameters_are_counted_by_hand():
    kernels = 4 * 3 * 24 + 9 * (24 * 64 + 64 * 64 + 64 * 128 + 128 * 128 + 128 * 256 + 256 * 256)
    biases = 24 + 2 * (64 + 128 + 256)
    params, _ = jax.eval_shape(build_model("convnet8", num_classes=10, image_size=32).init, jax.random.key(0))
    assert count_params(params) == kernels + biases + 256 * 10 + 10
    wider = 9 * (64 * 128 + 256 * 256 - 128 * 128 + 128 * 256) + 2 * 128
    params, _ = jax.eval_shape(build_model("convnet8-wide", num_classes=10, image_size=32).init, jax.random.key(0))
    assert count_params(params) == kernels + biases + wider + 256 * 10 + 10 - 4 * 3 * 24  # whose stem stays


def test_initial_values():
    init = jax.jit(build_model("convnet8", num_classes=10, image_size=32).init)
    params, stats = init(jax.random.key(3))
    for place, fan_in in (("0", 9 * 64), ("1", 9 * 128)):
        layer = params["stage2"][place]
        kernel, passed = np.asarray(layer["conv"]["kernel"]), min(fan_in // 9, 128)
        unit = np.zeros_like(kernel[..., :passed])
        unit[1, 1, range(passed), range(passed)] = 1
        np.testing.assert_array_equal(kernel[..., :passed], unit)
        np.testing.assert_array_equal(layer["norm"]["bias"], 0)
        assert set(layer["norm"]) == {"bias"}
    # The deviation of n normal draws is known to 1/√(2n); four of those.
    free = np.asarray(params["stage2"]["0"]["conv"]["kernel"])[..., 64:]
    assert abs(free.std() / np.sqrt(2 / (9 * 64)) - 1) < 4 / np.sqrt(2 * free.size)
    np.testing.assert_array_equal(params["stem"]["conv"]["kernel"], cosine_kernel(24))
    fc = np.asarray(params["fc"]["kernel"])
    assert abs(fc.std() * np.sqrt(256) - 1) < 4 / np.sqrt(2 * fc.size)
    np.testing.assert_array_equal(stats["stem"]["norm"]["mean"], 0)
    np.testing.assert_array_equal(stats["stem"]["norm"]["var"], 1)
    jax.tree.map(np.testing.assert_array_equal, init(jax.random.key(3)), (params, stats))
    other = init(jax.random.key(4))[0]
    assert not np.array_equal(other["fc"]["kernel"], fc)
    # Each layer has draws of its own: what passes nothing on is compared, draw by draw.
    first, second = (np.ravel(params[stage]["0"]["conv"]["kernel"])[:5000] for stage in ("stage2", "stage3"))
    index = np.arange(5000)
    are_drawn = (index % 128 >= 64) & (index % 256 >= 128)
    assert abs(np.corrcoef(first[are_drawn], second[are_drawn])[0, 1]) < 4 / np.sqrt(are_drawn.sum())
    assert not np.array_equal(other["stage2"]["0"]["conv"]["kernel"], params["stage2"]["0"]["conv"]["kernel"])


@pytest.mark.parametrize("num_channels", [2, 18, 24])
def test_stem_filters_are_orthonormal_and_come_with_their_negatives(num_channels):
    kernel = cosine_kernel(num_channels)
    half = kernel.reshape(12, num_channels)[:, : num_channels // 2].astype(np.float64)
    np.testing.assert_allclose(half.T @ half, np.eye(num_channels // 2), atol=1e-6)  # float32's last digits
    np.testing.assert_array_equal(kernel[..., num_channels // 2 :], -kernel[..., : num_channels // 2])
    np.testing.assert_allclose(kernel[..., 0], 12**-0.5, rtol=1e-6)  # brightness


def test_stems_that_have_no_such_filters_are_refused():
    for stem in (0, 13, 26):
        with pytest.raises(ValueError, match=rf"stem must be an even number from 2 to 24, got {stem}"):
            PooledConvNet(stem=stem, stages=(8,))


def test_images_that_cannot_be_halved_so_often_are_refused():
    params, stats = drawn(NET)
    forward = partial(pooled_convnet.apply, NET, params, stats, train=False, dtype=jnp.dtype(jnp.float32))
    assert jax.eval_shape(forward, jnp.zeros((1, 5, 5, 3)))[0].shape == (1, 5)
    with pytest.raises(ValueError, match="at least 5 × 5 px to be halved 2 times, got 9 × 4: use larger images"):
        forward(jnp.zeros((1, 9, 4, 3)))
