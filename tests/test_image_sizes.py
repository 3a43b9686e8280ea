"""Position embeddings for another image size, against Pillow's antialiased bicubic filter and timm's networks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from loopfeed.models import registry
from loopfeed.models.families.vision_transformer import VisionTransformer
from loopfeed.models.registry import build_model, image_size_of, resize_params
from loopfeed.models.torchvision_names import from_torchvision, to_torchvision

C = 384


def params_of(grid):
    return {"pos_embed": np.concatenate([np.full((1, 1, C), 7.0), grid.reshape(1, -1, C)], axis=1).astype(np.float32)}


@pytest.mark.parametrize(("old", "new"), [(14, 4), (14, 2), (4, 14), (3, 4), (5, 3), (1, 3), (3, 1), (4, 4)])
def test_the_grid_is_interpolated_as_by_pillow(old, new):
    grid = np.random.default_rng(0).standard_normal((old, old, C)).astype(np.float32)
    found = resize_params("vit-s16", params_of(grid), 16 * new)["pos_embed"]
    assert found.shape == (1, 1 + new**2, C)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found[0, 0], 7)
    for channel in (0, 100, C - 1):
        image = np.asarray(Image.fromarray(grid[..., channel]).resize((new, new), Image.Resampling.BICUBIC))
        # Pillow rounds to float32 after each of two passes.
        np.testing.assert_allclose(found[0, 1:, channel].reshape(new, new), image, rtol=0, atol=2e-6)


def test_the_image_size_is_read_off_the_shapes():
    for name, size, wanted in (("vit-s16", 48, 48), ("vit-b16", 224, 224), ("convnext-tiny", 64, None)):
        params, _ = jax.eval_shape(build_model(name, num_classes=3, image_size=size).init, jax.random.key(0))
        assert image_size_of(name, params) == wanted
    params = params_of(np.zeros((2, 2, C)))
    assert image_size_of("vit-s16", params) == 32
    assert VisionTransformer(width=C, depth=1, num_heads=6, image_size=32).num_patches == 4


# Logits of two images, and the gradient of the mean of their squares by channel 0 of the five position embeddings, of
# timm 1.0.31: VisionTransformer(img_size=32, patch_size=16, embed_dim=12, depth=1, num_heads=3, num_classes=3,
# dynamic_img_size=True), with the weights and images of `formula`.
TIMM = {
    (32, 32): (
        [[0.753570, 1.458040, 4.669050], [2.890260, 2.114140, 3.300460]],
        [0.169634, -0.528131, -0.662272, -0.045564, -0.003643],
    ),
    (48, 48): (
        [[0.558140, 1.940630, 3.771456], [1.376890, 0.909210, 4.043700]],
        [-0.094934, 0.031542, -0.157324, -0.146152, -0.138819],
    ),
    (16, 16): (
        [[3.437440, 1.108890, 3.519040], [2.752580, 0.197900, 2.356340]],
        [0.021367, -0.067187, -0.067187, -0.067187, -0.067187],
    ),
    (80, 80): (
        [[1.239260, 2.281150, 2.840840], [0.535510, 0.119820, 4.051930]],
        [0.827818, 0.450214, -0.639104, 0.281724, -0.115271],
    ),
    (32, 64): (
        [[0.977640, 1.707710, 3.490870], [1.409740, 1.496250, 3.348630]],
        [-0.278393, -0.205042, -0.232188, 0.328297, -0.118721],
    ),
}


def formula(shape, factor, offset=0):
    return (np.arange(np.prod(shape)) ** 1.5 * factor + offset).reshape(shape)


@pytest.fixture
def small_vit(monkeypatch):
    """A small vision transformer as `vit-s16`, its weights by a formula of their names, and those for another size."""
    monkeypatch.setattr(registry, "networks", lambda: {"vit-s16": VisionTransformer(width=12, depth=1, num_heads=3)})
    model = build_model("vit-s16", num_classes=3, image_size=32)
    empty = jax.tree.map(lambda leaf: np.zeros(leaf.shape), jax.eval_shape(model.init, jax.random.key(0))[0])
    tensors = {}
    for name, tensor in to_torchvision("vit-s16", empty, {}).items():
        value = np.sin(formula(tensor.shape, 0.7, len(name)))
        is_scale = "norm" in name and name.endswith("weight")
        tensors[name] = (1 + 0.3 * value if is_scale else value * (0.1 if tensor.ndim == 4 else 1)).astype(np.float32)
    return model, from_torchvision("vit-s16", tensors)[0]


@pytest.mark.parametrize(("shape", "wanted"), TIMM.items())
def test_a_network_with_images_of_another_size_is_timms(shape, wanted, small_vit):
    model, params = small_vit
    images = np.cos(formula((2, *shape, 3), 0.37)).astype(np.float32)

    def loss(params):
        logits, _ = model.apply(params, {}, images, train=True)
        return jnp.square(logits).mean(), logits

    gradients, logits = jax.jit(jax.grad(loss, has_aux=True))(params)
    np.testing.assert_allclose(logits, wanted[0], rtol=0, atol=1e-4)
    # Activations up to 100, in float32 here and there.
    np.testing.assert_allclose(gradients["pos_embed"][0, :, 0], wanted[1], rtol=0, atol=5e-4)


def test_the_interpolated_network_is_that_of_resized_weights(small_vit):
    """The two compute the same products in float32 and in float64."""
    model, params = small_vit
    images = np.cos(formula((2, 64, 64, 3), 0.37)).astype(np.float32)
    resized = resize_params("vit-s16", params, 64)
    own = build_model("vit-s16", num_classes=3, image_size=64)
    logits, wanted = (net.apply(each, {}, images, train=False)[0] for net, each in ((model, params), (own, resized)))
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-5)


def test_position_embeddings_of_no_square_are_refused(small_vit):
    model, params = small_vit
    wrong = params | {"pos_embed": params["pos_embed"][:, :4]}
    images = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
    with pytest.raises(ValueError, match="a class token and a square of patches, got 4: use the weights"):
        jax.eval_shape(partial(model.apply, train=False), wrong, {}, images)
