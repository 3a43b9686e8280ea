"""The image size on which a vision transformer's parameters depend, and its position embedding for another one.

All other networks accept images of any size.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopfeed.models.families.vision_transformer import POSITIONS, VisionTransformer, size_of_positions
from loopfeed.models.model import Params
from loopfeed.models.registry import find_network

# Keys (1981): the cubic through its samples whose error falls fastest.
_SHARPNESS = -0.5


def image_size_of(model_name: str, params: Mapping[str, Any]) -> int | None:
    """Return the height and width in pixels of the images that parameters are for, None if they are for any.

    Args:
        model_name: one of `loopfeed.models.registry.model_names()`.
        params: parameters of that model; only shapes are used.
    """
    net = find_network(model_name)
    return size_of_positions(net, params[POSITIONS].shape[1]) if isinstance(net, VisionTransformer) else None


def resize_params(model_name: str, params: Params, image_size: int) -> Params:
    """Return a vision transformer's parameters for images of another size: its position embedding is interpolated.

    The interpolation over the grid of patches is bicubic and antialiased, as in timm (`resample_abs_pos_embed`). The
    class token's embedding is unchanged.

    Args:
        model_name: name of a vision transformer.
        params: its parameters as NumPy arrays.
        image_size: height and width in pixels, a multiple of its patches.
    """
    net = find_network(model_name)
    assert isinstance(net, VisionTransformer)
    positions = np.asarray(params[POSITIONS], np.float64)
    old, new = (size // net.patch for size in (image_size_of(model_name, params) or 0, image_size))
    weights = _bicubic_weights(old, new)
    grid = positions[0, 1:].reshape(old, old, -1)
    resized = np.einsum("ph,qw,hwc->pqc", weights, weights, grid, optimize=True).reshape(1, new**2, -1)
    return params | {POSITIONS: np.concatenate([positions[:, :1], resized], axis=1).astype(np.float32)}


def _bicubic_weights(old: int, new: int) -> NDArray[np.float64]:
    """Return the weights `[new,old]` of an antialiased bicubic interpolation from `old` to `new` points.

    Pixel centres are at half-integers; the filter is as wide as the coarser of the two grids; at the edges its weights
    are normalised over the points inside, as in Pillow and PyTorch (`antialias=True`).
    """
    step = old / new
    centres = step * (np.arange(new) + 0.5)
    distances = np.abs(np.arange(old) + 0.5 - centres[:, None]) / max(step, 1.0)
    near = ((_SHARPNESS + 2) * distances - (_SHARPNESS + 3)) * distances**2 + 1
    far = _SHARPNESS * (((distances - 5) * distances + 8) * distances - 4)
    weights = np.where(distances < 1, near, np.where(distances < 2, far, 0.0))
    return weights / weights.sum(1, keepdims=True)
