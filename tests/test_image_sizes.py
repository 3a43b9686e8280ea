"""Position embeddings for another image size, against Pillow's antialiased bicubic filter."""

import jax
import numpy as np
import pytest
from PIL import Image

from loopfeed.models.families.vision_transformer import VisionTransformer
from loopfeed.models.registry import build_model, image_size_of, resize_params

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
