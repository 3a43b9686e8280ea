"""Vision transformer and ConvNeXt: against NumPy in float64, by finite differences, in a loop, and initial values."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopfeed.models.families import convnext, vision_transformer
from loopfeed.models.families.convnext import ConvNeXt
from loopfeed.models.families.efficientnet import EfficientNet, Row
from loopfeed.models.families.vision_transformer import VisionTransformer
from loopfeed.models.model import Model
from loopfeed.models.registry import at_image_size, build_model, family_of
from tests import block_references as numpy_models
from tests.loop_hlo import slow_convolutions, slow_products, training_loop

pytestmark = pytest.mark.integration  # whole programs, or large networks

VIT = VisionTransformer(width=24, depth=2, num_heads=3, patch=8, image_size=32)
CONVNEXT = ConvNeXt(depths=(1, 1), widths=(8, 16))
SMALL = [pytest.param(VIT, id="vit"), pytest.param(CONVNEXT, id="convnext")]
NUM_CLASSES = 5


def model_of(net, dtype="float32"):
    family = family_of(net)
    apply = partial(family.apply, net, dtype=jnp.dtype(dtype))
    return Model("small", partial(family.init, net, NUM_CLASSES), apply, net.undecayed)


def drawn(net):
    """Parameters of which every one matters to the logits, float64 values that float32 can represent."""
    random = np.random.default_rng(3)
    shapes, _ = jax.eval_shape(model_of(net).init, jax.random.key(0))

    def draw(path, leaf):
        one = path[-1].key in ("scale", "gamma")
        spread = 0.2 if leaf.ndim < 2 else np.prod(leaf.shape[:-1]) ** -0.5
        return (one + spread * random.standard_normal(leaf.shape)).astype(np.float32).astype(np.float64)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def images_of(seed=0, size=32):
    return np.random.default_rng(seed).standard_normal((3, size, size, 3)).astype(np.float32)


def reference(net, params, images):
    images = images.astype(np.float64)
    if isinstance(net, VisionTransformer):
        return numpy_models.vision_transformer(params, images, net.num_heads)
    return numpy_models.convnext(params, images)


def narrow(params):
    return jax.tree.map(lambda leaf: leaf.astype(np.float32), params)


@pytest.mark.parametrize("net", SMALL)
def test_logits_are_numpys_and_gradients_its_finite_differences(net):
    """For each parameter along a random direction; central differences in float64 are exact to about 1e-8."""
    params, random = drawn(net), np.random.default_rng(4)
    images = images_of(size=32 if net is VIT else 19)  # 19 px: 4 patches and an incomplete one
    weights = random.standard_normal((3, NUM_CLASSES))
    apply = model_of(net).apply

    def loss(params, images):
        logits, stats = apply(params, {}, images, train=True)
        return (logits * weights).sum(), (logits, stats)

    def wanted_loss(params, images):
        return (reference(net, params, images) * weights).sum()

    gradients, (logits, stats) = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(narrow(params), images)
    wanted_logits = reference(net, params, images)
    assert stats == {}
    assert logits.dtype == jnp.float32
    # Sums of at most 200 float32 products, in layers of norms.
    np.testing.assert_allclose(logits, wanted_logits, rtol=0, atol=1e-5 * np.abs(wanted_logits).max())

    leaves, structure = jax.tree.flatten((params, images.astype(np.float64)))
    for place, (leaf, gradient) in enumerate(zip(leaves, jax.tree.leaves(gradients), strict=True)):
        direction = random.standard_normal(leaf.shape)
        there, back = (
            jax.tree.unflatten(structure, [*leaves[:place], leaf + step * direction, *leaves[place + 1 :]])
            for step in (1e-4, -1e-4)
        )
        wanted = (wanted_loss(*there) - wanted_loss(*back)) / 2e-4
        found = (np.asarray(gradient, np.float64) * direction).sum()
        assert abs(found - wanted) < 1e-4 * np.linalg.norm(gradient)


@pytest.mark.parametrize(
    ("net", "dtype", "image_size"),
    [
        (VisionTransformer(width=24, depth=1, num_heads=3), "bfloat16", 32),
        (VisionTransformer(width=24, depth=1, num_heads=3), "float32", 48),
        (ConvNeXt((1,), (8,)), "float32", 32),
        (EfficientNet(8, ((Row(1, 5, 2, 2, 8, True),),), "silu"), "bfloat16", 32),
    ],
    ids=["vit", "interpolated", "convnext", "efficientnet"],
)
def test_a_training_step_in_a_loop_has_no_slow_operation(net, dtype, image_size):
    net = at_image_size(net, 32)
    hlo = training_loop(model_of(net, dtype), 3, image_size)
    assert "while(" in hlo
    assert "dot(" in hlo
    assert slow_convolutions(hlo) == slow_products(hlo) == []


@pytest.mark.parametrize("net", SMALL)
def test_bfloat16_is_float64_up_to_rounding(net):
    params, images = drawn(net), images_of(size=32 if net is VIT else 16)
    logits, _ = jax.jit(partial(model_of(net, "bfloat16").apply, train=True))(narrow(params), {}, images)
    wanted = reference(net, params, images)
    # A dozen roundings of 2**-9 each.
    assert 1e-4 < np.abs(logits - wanted).max() / np.abs(wanted).max() < 0.05


def assert_deviation(leaf, wanted):
    """The deviation of n draws is known to 1/√(2n); five of those."""
    assert abs(np.std(leaf) / wanted - 1) < 5 / np.sqrt(2 * leaf.size)


def test_the_initial_values_of_a_vision_transformer_are_timms():
    params, _ = vision_transformer.init(VIT, NUM_CLASSES, jax.random.key(0))
    kernels = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params["blocks"]) if path[-1].key == "kernel"]
    assert len(kernels) == 8
    for leaf in (params["pos_embed"], params["head"]["kernel"], *kernels):
        assert_deviation(leaf, 0.02)
    assert_deviation(params["cls_token"], 1e-6)
    bound = (3 * 8 * 8) ** -0.5
    embedding = params["patch_embed"]["proj"]
    for leaf, least in ((embedding["kernel"], 0.99), (embedding["bias"], 0.5)):
        assert least * bound < np.abs(leaf).max() <= bound
    np.testing.assert_array_equal(params["blocks"]["1"]["attn"]["qkv"]["bias"], 0)
    np.testing.assert_array_equal(params["norm"]["scale"], 1)


def test_the_initial_values_of_a_convnext_are_the_papers():
    params, _ = convnext.init(CONVNEXT, NUM_CLASSES, jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for path, leaf in leaves:
        if path[-1].key == "kernel":
            assert_deviation(leaf, 0.02)
        else:
            np.testing.assert_array_equal(leaf, {"bias": 0, "scale": 1, "gamma": np.float32(1e-6)}[path[-1].key])
    assert sum(path[-1].key == "kernel" for path, _ in leaves) == 2 + 2 * 3 + 1


def test_images_that_are_no_multiple_of_the_patches_are_refused():
    for size in (50, 8):
        with pytest.raises(ValueError, match=rf"a multiple of its patches of 16 px, got {size} px: choose"):
            build_model("vit-s16", num_classes=3, image_size=size)
    model = build_model("vit-s16", num_classes=3, image_size=32)
    weights = jax.eval_shape(model.init, jax.random.key(0))
    images = jax.ShapeDtypeStruct((2, 32, 50, 3), jnp.float32)
    with pytest.raises(ValueError, match=r"16 px, got 32 × 50 px: choose an image size of 48 or 64 px"):
        jax.eval_shape(partial(model.apply, train=True), *weights, images)


def test_images_too_small_for_a_convnext_are_refused():
    params, _ = jax.eval_shape(model_of(CONVNEXT).init, jax.random.key(0))
    images = jax.ShapeDtypeStruct((2, 7, 9, 3), jnp.float32)
    with pytest.raises(ValueError, match="at least 8 × 8 px to be divided by 8, got 7 × 9: use larger"):
        jax.eval_shape(partial(model_of(CONVNEXT).apply, train=True), params, {}, images)
