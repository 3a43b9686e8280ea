"""EfficientNet and MobileNetV3: names and shapes as timm's, and a small network of each kind against plain `lax`."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from loopfeed.models.families import efficientnet
from loopfeed.models.families.efficientnet import EfficientNet, Row, multiple_of_8
from loopfeed.models.layers import activations
from loopfeed.models.layers.batch_norm import RunningStats, batch_norm
from loopfeed.models.registry import build_model
from loopfeed.models.torchvision_names import to_torchvision

# Shapes of timm 1.0.31's state dictionaries, those that a rule of rounding or a special case decides.
OF_TIMM = {
    "efficientnet_b0": {
        "blocks.0.0.se.conv_reduce.weight": (8, 32, 1, 1),
        "blocks.0.0.conv_pw.weight": (16, 32, 1, 1),
        "blocks.1.0.se.conv_expand.weight": (96, 4, 1, 1),
        "blocks.5.0.conv_dw.weight": (672, 1, 5, 5),
        "blocks.6.0.bn3.running_var": (320,),
        "bn2.running_mean": (1280,),
    },
    "tf_efficientnet_lite0": {
        "conv_stem.weight": (32, 3, 3, 3),
        "blocks.5.3.conv_pwl.weight": (192, 1152, 1, 1),
        "conv_head.weight": (1280, 320, 1, 1),
        "classifier.weight": (3, 1280),
    },
    "mobilenetv3_large_100": {
        "blocks.2.0.se.conv_reduce.weight": (24, 72, 1, 1),
        "blocks.2.1.se.conv_reduce.bias": (32,),
        "blocks.3.1.conv_dw.weight": (200, 1, 3, 3),
        "blocks.3.2.conv_dw.weight": (184, 1, 3, 3),
        "blocks.6.0.conv.weight": (960, 160, 1, 1),
        "conv_head.bias": (1280,),
    },
}
NUM_TENSORS = {"efficientnet_b0": 360, "tf_efficientnet_lite0": 296, "mobilenetv3_large_100": 312}

ROWS = ((Row(1, 3, 1, 1, 16, True, True),), (Row(1, 5, 2, 2.3, 24, True), Row(1, 3, 1, 3, 24)))
B0 = EfficientNet(stem=16, stages=ROWS, activation="silu")
LITE = replace(B0, stages=((Row(1, 5, 2, 6, 8),),), activation="relu6", same_padding=True, epsilon=1e-3)
MOBILE = replace(B0, activation="hard_silu", late_features=40, squeezed="hidden")


@pytest.mark.parametrize("name", OF_TIMM)
def test_tensors_have_timms_names_and_shapes(name):
    shapes = jax.eval_shape(build_model(name, num_classes=3, image_size=32).init, jax.random.key(0))
    tensors = to_torchvision(name, *jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes))
    assert len(tensors) == NUM_TENSORS[name]
    assert {key: tensors[key].shape for key in OF_TIMM[name]} == OF_TIMM[name]


def test_initial_values_are_timms():
    params, stats = jax.jit(partial(efficientnet.init, MOBILE, 7))(jax.random.key(0))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        keys = [each.key for each in path]
        if keys[-1] != "kernel":
            np.testing.assert_array_equal(leaf, keys[-1] == "scale")
        elif keys[0] == "classifier":
            assert 0.95 < np.abs(leaf).max() * 7**0.5 <= 1
        else:  # The deviation of n draws is known to 1/√(2n); five of those.
            fan_out = leaf.shape[0] * leaf.shape[1] * (1 if "conv_dw" in keys else leaf.shape[3])
            assert abs(np.std(leaf) * (fan_out / 2) ** 0.5 - 1) < 5 / (2 * leaf.size) ** 0.5
    assert all(np.all(leaf == (path[-1].key == "var")) for path, leaf in jax.tree_util.tree_leaves_with_path(stats))


def test_widths_are_rounded_as_timms():
    assert [multiple_of_8(each) for each in (4, 12, 18, 30, 55.2, 184.0, 200.0)] == [8, 16, 24, 32, 56, 184, 200]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_and_their_gradients_are_numpys(dtype):
    x = jnp.asarray(np.linspace(-9, 9, 1001) + 1e-3, dtype)
    exact = np.asarray(x, np.float64)
    share = 1 / (1 + np.exp(-exact))
    inside = (exact > 0) & (exact < 6), np.abs(exact) < 3
    wanted = {
        "silu": (exact * share, share * (1 + exact * (1 - share))),
        "relu6": (np.clip(exact, 0, 6), inside[0]),
        "hard_silu": (exact * np.clip(exact + 3, 0, 6) / 6, np.where(inside[1], exact / 3 + 0.5, exact > 0)),
    }
    rounding = 2.0**-8 if dtype == "bfloat16" else 0
    for name, both in wanted.items():
        y, pullback = jax.vjp(getattr(activations, name), x)
        found = y, *pullback(jnp.ones_like(x))
        for each, exactly in zip(found, both, strict=True):
            assert each.dtype == x.dtype
            np.testing.assert_allclose(np.asarray(each, np.float64), exactly, rtol=rounding, atol=4e-6, err_msg=name)


def test_the_epsilon_of_a_norm_is_that_given():
    x, running = jnp.array([0.0, 2.0]).reshape(1, 1, 2, 1), RunningStats(jnp.zeros(1), jnp.full(1, 3.0))
    for train, wanted in ((True, 1 / 2**0.5), (False, 2 / 4**0.5)):
        y, _ = batch_norm(x, jnp.ones(1), jnp.zeros(1), running, train=train, epsilon=1.0)
        np.testing.assert_allclose(y[0, 0, 1, 0], wanted, rtol=1e-6)


# A network of these blocks in plain JAX, in the order of timm's code: it looks at names, not at descriptions


def conv(params, x, stride, padding):
    kernel = params["kernel"]
    margin = (kernel.shape[0] - 1) // 2
    pads = "SAME" if padding == "SAME" else ((margin, margin),) * 2
    layout = ("NHWC", "HWIO", "NHWC")
    groups = x.shape[3] // kernel.shape[2]
    y = lax.conv_general_dilated(x, kernel, (stride,) * 2, pads, dimension_numbers=layout, feature_group_count=groups)
    return y + params.get("bias", 0)


def norm(params, stats, x, epsilon, train):
    mean, var = (x.mean((0, 1, 2)), x.var((0, 1, 2))) if train else (stats["mean"], stats["var"])
    return (x - mean) / jnp.sqrt(var + epsilon) * params["scale"] + params["bias"]


def plain_logits(net, act, strides, train, params, stats, images):
    padding = "SAME" if net.same_padding else None
    hard = bool(net.late_features)

    def layer(at, conv_name, norm_name, x, stride, activation):
        params, stats = at
        x = conv(params[conv_name], x, stride, padding)
        return activation(norm(params[norm_name], stats[norm_name], x, net.epsilon, train))

    x = layer((params, stats), "conv_stem", "bn1", images, 2, act)
    for (stage, block), stride in strides.items():
        at, shortcut = (params["blocks"][stage][block], stats["blocks"][stage][block]), x
        here = jax.nn.relu if stage == "0" else act
        names = [name for name in ("conv_pw", "conv_dw", "conv_pwl") if name in at[0]]
        names = names if "conv_pwl" in names else ["conv_dw", "conv_pw"]
        for place, name in enumerate(names, 1):
            if place == len(names) and "se" in at[0]:
                squeezed = conv(at[0]["se"]["conv_reduce"], x.mean((1, 2), keepdims=True), 1, None)
                gate = conv(at[0]["se"]["conv_expand"], (jax.nn.relu if hard else jax.nn.silu)(squeezed), 1, None)
                x = x * (jax.nn.hard_sigmoid if hard else jax.nn.sigmoid)(gate)
            last = place == len(names)
            x = layer(at, name, f"bn{place}", x, stride if name == "conv_dw" else 1, (lambda x: x) if last else here)
        x = x + shortcut if x.shape == shortcut.shape else x
    if hard:
        x = layer((params["blocks"]["2"]["0"], stats["blocks"]["2"]["0"]), "conv", "bn1", x, 1, act)
        x = act(conv(params["conv_head"], x.mean((1, 2), keepdims=True), 1, None))
    else:
        x = layer((params, stats), "conv_head", "bn2", x, 1, act)
    return x.mean((1, 2)) @ params["classifier"]["kernel"] + params["classifier"]["bias"]


STRIDES = {("0", "0"): 1, ("1", "0"): 2, ("1", "1"): 1}
SMALL = [
    pytest.param(B0, jax.nn.silu, STRIDES, True, id="efficientnet"),
    pytest.param(LITE, jax.nn.relu6, {("0", "0"): 2}, False, id="lite"),
    pytest.param(MOBILE, jax.nn.hard_swish, STRIDES, False, id="mobilenet"),
]


def drawn(net):
    """Values of which every one matters to the logits: scales and variances about 1, the others about 0."""
    random = np.random.default_rng(3)

    def draw(path, leaf):
        if path[-1].key in ("scale", "var"):
            return random.uniform(0.5, 1.5, leaf.shape).astype(np.float32)
        deviation = 0.3 if leaf.ndim < 2 else np.prod(leaf.shape[:-1]) ** -0.5
        return (deviation * random.standard_normal(leaf.shape)).astype(np.float32)

    shapes = jax.eval_shape(partial(efficientnet.init, net, 5), jax.random.key(0))
    return jax.tree_util.tree_map_with_path(draw, shapes)


@pytest.mark.parametrize(("net", "act", "strides", "train"), SMALL)
def test_logits_and_gradients_are_those_of_plain_layers(net, act, strides, train):
    params, stats = drawn(net)
    # 21 × 18 px: maps of odd and even sides before a stride, which TensorFlow pads differently.
    images = np.random.default_rng(1).standard_normal((3, 21, 18, 3)).astype(np.float32)
    weights = np.random.default_rng(2).standard_normal((3, 5)).astype(np.float32)
    apply = partial(efficientnet.apply, net, train=train, dtype=jnp.dtype("float32"))

    def loss(params):
        logits, moved = apply(params, stats, jnp.asarray(images))
        return (logits * weights).sum(), (logits, moved)

    def wanted_loss(params):
        logits = plain_logits(net, act, strides, train, params, stats, images)
        return (logits * weights).sum(), logits

    gradients, (logits, moved) = jax.jit(jax.grad(loss, has_aux=True))(params)
    wanted, wanted_logits = jax.jit(jax.grad(wanted_loss, has_aux=True))(params)
    # Sums of float32 in another order; a bias before a norm has a gradient of 0, with the rounding of its terms.
    np.testing.assert_allclose(logits, wanted_logits, rtol=0, atol=2e-5 * np.abs(wanted_logits).max())
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(wanted))
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-3, atol=2e-5 * largest), gradients, wanted
    )
    is_same = jax.tree.map(lambda one, other: bool((one == other).all()), moved, stats)
    assert set(jax.tree.leaves(is_same)) == {not train}
