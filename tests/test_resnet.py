"""The residual networks: composition, feature maps, initial values, gradients against XLA's convolutions."""

from functools import partial
from itertools import cycle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from loopfeed.models.families import resnet
from loopfeed.models.families.resnet import ResNet
from loopfeed.models.layers.platform_forms import tracing_for
from loopfeed.models.registry import build_model, find_network, model_names


def normal(seed, shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def loss_and_gradients(model, params, batch_stats, images):
    def loss(params):
        logits, new = model.apply(params, batch_stats, images, train=True)
        return jnp.square(logits - 1).mean(), new

    return jax.value_and_grad(loss, has_aux=True)(params)


def assert_same(found, wanted):
    """Compares what `loss_and_gradients` gives."""
    (loss, stats), gradients = found
    (wanted_loss, wanted_stats), reference = wanted
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5), stats, wanted_stats)
    # Sums in another order, and now and then a ReLU on the other side of zero: 1e-3 of a leaf's largest gradient.
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=0, atol=1e-3 * np.abs(other).max()),
        gradients,
        reference,
    )


@pytest.mark.integration
def test_a_whole_network_gives_the_same_by_the_forms_for_a_card():
    model = build_model("resnet8", num_classes=7, image_size=18)
    state = *jax.jit(model.init)(jax.random.key(0)), normal(0, (32, 18, 17, 3))
    wanted = jax.jit(lambda *state: loss_and_gradients(model, *state))(*state)
    with tracing_for("cuda"):
        found = jax.jit(lambda *state: loss_and_gradients(model, *state))(*state)
    assert_same(found, wanted)


@pytest.mark.integration
@pytest.mark.usefixtures("untraced_blocks")
def test_a_whole_network_has_the_gradients_it_has_with_xlas_convolutions(monkeypatch):
    model = build_model("resnet8", num_classes=7, image_size=18)
    state = *jax.jit(model.init)(jax.random.key(0)), normal(0, (32, 18, 17, 3))
    ours = jax.jit(lambda *state: loss_and_gradients(model, *state))(*state)

    def plain(x, kernel, *, stride, padding, bias):
        assert bias is None
        dimensions = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, kernel, (stride, stride), padding, dimension_numbers=dimensions)

    monkeypatch.setattr(resnet, "convolution", plain)
    resnet._apply_block.clear_cache()  # type: ignore[attr-defined]
    assert_same(ours, jax.jit(lambda *state: loss_and_gradients(model, *state))(*state))


STAGES = {
    ("resnet18", 224): [(56, 64), (28, 128), (14, 256), (7, 512)],
    ("resnet50", 224): [(56, 256), (28, 512), (14, 1024), (7, 2048)],
    ("resnet50", 97): [(25, 256), (13, 512), (7, 1024), (4, 2048)],
    ("resnet50-xlajl", 224): [(56, 256), (28, 512), (14, 1024), (7, 2048)],
    ("resnet20", 32): [(32, 16), (16, 32), (8, 64)],
    ("resnet20", 33): [(33, 16), (17, 32), (9, 64)],
}


@pytest.mark.parametrize(("name", "image_size"), STAGES)
def test_the_last_block_of_each_stage_has_the_published_shape(name, image_size, monkeypatch):
    shapes = []
    apply_block = resnet._apply_block

    def spy(*arguments):
        y, new = apply_block(*arguments)
        shapes.append(y.shape)
        return y, new

    monkeypatch.setattr(resnet, "_apply_block", spy)
    model = build_model(name, num_classes=11, image_size=image_size)
    params, batch_stats = jax.eval_shape(model.init, jax.random.key(0))
    images = jax.ShapeDtypeStruct((2, image_size, image_size, 3), jnp.float32)
    logits, _ = jax.eval_shape(partial(model.apply, train=False), params, batch_stats, images)
    last = {block.path.split(".")[0]: shape for block, shape in zip(blocks(name), shapes, strict=True)}
    assert list(last.values()) == [(2, size, size, C) for size, C in STAGES[name, image_size]]
    assert (logits.shape, logits.dtype) == ((2, 11), jnp.float32)


def blocks(name):
    net = find_network(name)
    assert isinstance(net, ResNet)
    return resnet.blocks(net)


def strides(name):
    return [tuple(conv.stride for conv in block.convs) for block in blocks(name)]


def test_the_position_of_the_stride():
    assert strides("resnet50")[:4] == [(1, 1, 1)] * 3 + [(1, 2, 1)]
    assert strides("resnet50-xlajl")[:4] == [(1, 1, 1)] * 3 + [(1, 1, 2)]
    assert strides("resnet18")[:4] == [(1, 1), (1, 1), (2, 1), (1, 1)]
    projected = [block.path for block in blocks("resnet50-xlajl") if block.projection]
    assert projected == ["layer1.0", "layer2.0", "layer3.0", "layer4.0"]
    assert [block.path for block in blocks("resnet20") if block.projection] == [
        "layer2.0",
        "layer3.0",
    ]


def test_xlajls_stem_has_a_bias_and_neither_norm_nor_activation():
    model = build_model("resnet50-xlajl", num_classes=10, image_size=64)
    params, batch_stats = jax.eval_shape(model.init, jax.random.key(0))
    assert "bn1" not in params
    assert "bn1" not in batch_stats
    assert set(params["conv1"]) == {"kernel", "bias"}
    assert params["layer1"]["0"]["downsample"]["0"]["bias"].shape == (256,)


@pytest.mark.parametrize("name", ["resnet8", "resnet18"])
def test_initial_values(name):
    params, batch_stats = jax.jit(build_model(name, num_classes=10, image_size=32).init)(jax.random.key(3))
    kernel = np.asarray(params["layer3"]["0"]["conv2"]["kernel"])
    fan_out = 9 * kernel.shape[3]
    # The deviation of n normal draws is known to 1/√(2n); four of those.
    assert abs(kernel.std() / np.sqrt(2 / fan_out) - 1) < 4 / np.sqrt(2 * kernel.size)
    fc = np.asarray(params["fc"]["kernel"])
    assert np.abs(fc).max() <= fc.shape[0] ** -0.5
    assert np.abs(fc).max() > 0.9 * fc.shape[0] ** -0.5
    np.testing.assert_array_equal(params["layer1"]["0"]["bn2"]["scale"], 1)
    np.testing.assert_array_equal(batch_stats["bn1"]["var"], 1)


ONE_OF_EACH_BLOCK = ("resnet18", "resnet50", "resnet50-xlajl", "resnet50-d", "convnext-tiny", "vit-s16", "convnet8")


@pytest.mark.parametrize(("name", "dtype"), list(zip(model_names(), cycle([jnp.float32, jnp.bfloat16]), strict=False)))
def test_parameters_statistics_and_logits_are_float32_and_the_carry_keeps_its_shapes(name, dtype):
    model = build_model(name, num_classes=10, image_size=64, dtype=dtype)
    state = jax.eval_shape(model.init, jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype(jnp.float32)}
    if name not in ONE_OF_EACH_BLOCK:
        return  # the same blocks, more of them
    images = jax.ShapeDtypeStruct((2, 64, 64, 3), jnp.float32)
    (_, new), gradients = jax.eval_shape(lambda *state: loss_and_gradients(model, *state), *state, images)
    assert (gradients, new) == state


@pytest.mark.integration
def test_a_step_under_shard_map_is_the_plain_one():
    """Parameters are made to vary, gradients averaged. One device will do: JAX tells the two apart by type."""
    model = build_model("resnet8", num_classes=5, image_size=9)
    params, batch_stats = jax.jit(model.init)(jax.random.key(0))
    images = normal(0, (32, 9, 9, 3))

    def sharded(params, images):
        varying = jax.tree.map(lambda leaf: lax.pcast(leaf, "data", to="varying"), params)
        return lax.pmean(loss_and_gradients(model, varying, batch_stats, images), "data")

    replicated, split = PartitionSpec(), PartitionSpec("data")
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    found = jax.jit(jax.shard_map(sharded, mesh=mesh, in_specs=(replicated, split), out_specs=replicated))
    wanted = jax.jit(lambda *state: loss_and_gradients(model, *state))(params, batch_stats, images)
    # The same operations on the same numbers, but what is fused otherwise may round otherwise.
    jax.tree.map(
        lambda ours, plain: np.testing.assert_allclose(ours, plain, rtol=0, atol=1e-5 * np.abs(plain).max() + 1e-6),
        found(params, images),
        wanted,
    )
