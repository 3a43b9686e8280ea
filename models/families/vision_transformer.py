"""Vision transformers (Dosovitskiy et al., 2020, arXiv:2010.11929), as timm's `vit_…_patch16_224`.

A `VisionTransformer` value describes a network; parameters are nested dictionaries keyed by timm's module names, so
that a path through them is a timm name (`blocks.0.attn.qkv`). There are no batch statistics.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32
from numpy.typing import NDArray

from loopfeed.models.kernels.choice import XLA, kernels_in_use, using_kernels
from loopfeed.models.layers import onednn_product
from loopfeed.models.layers.bfloat16_bits import round_by_bits, wide_dtype, widen_by_bits
from loopfeed.models.layers.gelu import gelu
from loopfeed.models.layers.head import dense, linear, normal_arrays, patch_linear
from loopfeed.models.layers.layer_norm import init_layer_norm, layer_norm
from loopfeed.models.layers.platform_forms import on_platform, with_derivative_of
from loopfeed.models.model import BatchStats, Images, Logits, Params, set_at


def self_attention(qkv: Float[Array, "B N width"], num_heads: int) -> Float[Array, "B N width//3"]:
    """Return softmax(Q·Kᵀ/√d)·V of each head (Vaswani et al., 2017, arXiv:1706.03762), joined along the last axis.

    Args:
        qkv: the queries, keys and values of N tokens with C = width / 3 channels each; in each, the heads follow one
            another with d = C / num_heads channels, as in timm.
        num_heads: number of heads, a divisor of C.

    Returns:
        The attention in the dtype of `qkv`. The operands of all products, forward and backward, have that dtype; their
        sums and the softmax are float32.
    """
    B, N, width = qkv.shape
    d = width // (3 * num_heads)
    # Batch and heads as the only batch axis, in front: the form of a product that XLA:CPU passes to its fast kernels.
    apart = qkv.reshape(B, N, 3, num_heads, d).transpose(2, 0, 3, 1, 4).reshape(3, B * num_heads, N, d)
    heads = _attend(kernels_in_use(), apart[0], apart[1], apart[2])
    return heads.reshape(B, num_heads, N, d).transpose(0, 2, 1, 3).reshape(B, N, num_heads * d)


def _product(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int, dtype: DTypeLike | None = None) -> jax.Array:
    """Sum over an axis of `x` and one of `y`, for each element of the first axis of both.

    Sums are float32 or wider, and rounded to `dtype` at the end, if one is given.
    """
    form = partial(_sums, x_axis=x_axis, y_axis=y_axis, dtype=dtype or wide_dtype(x))
    if kernels_in_use() == XLA or not onednn_product.has_faster_batch(x, x_axis):
        return form(x, y)
    kernel = partial(onednn_product.batch, x_axis=x_axis, y_axis=y_axis, dtype=dtype or wide_dtype(x))
    return on_platform(x, y, cpu=partial(with_derivative_of, form, kernel), default=form)


def _sums(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int, dtype: DTypeLike) -> jax.Array:
    sums = jax.lax.dot_general(x, y, (((x_axis,), (y_axis,)), ((0,), (0,))), preferred_element_type=wide_dtype(x))
    return round_by_bits(sums, dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    kernels: str, queries: Float[Array, "M N d"], keys: Float[Array, "M N d"], values: Float[Array, "M N d"]
) -> Float[Array, "M N d"]:
    """Return the attention of queries, keys and values.

    It has a custom derivative, because an automatic derivative would multiply float32 operands.
    """
    with using_kernels(kernels):
        return _product(_weights(queries, keys), values, 2, 1, values.dtype)


def _weights(queries: jax.Array, keys: jax.Array) -> jax.Array:
    scores = _product(queries, keys, 2, 2) * (1.0 / math.sqrt(queries.shape[2]))
    return round_by_bits(jax.nn.softmax(scores, axis=-1), queries.dtype)


def _attend_forward(
    kernels: str, queries: jax.Array, keys: jax.Array, values: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    with using_kernels(kernels):
        weights = _weights(queries, keys)
        attended = _product(weights, values, 2, 1, values.dtype)
    return attended, (queries, keys, values, weights, attended)


def _attend_backward(
    kernels: str, residuals: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    with using_kernels(kernels):
        return _gradients(residuals, gradient)


def _gradients(residuals: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of queries, keys and values.

    With P the softmax of the scores S and O = P·V: dS = P ∘ (dP - rowsum(P ∘ dP)). The row sums are those of O ∘ dO.
    """
    queries, keys, values, weights, attended = residuals
    dtype = queries.dtype
    weights_gradient = _product(gradient, values, 2, 2)
    sums = (widen_by_bits(attended) * widen_by_bits(gradient)).sum(-1, keepdims=True)
    scores_gradient = widen_by_bits(weights) * (weights_gradient - sums) * (1.0 / math.sqrt(queries.shape[2]))
    scores_gradient = round_by_bits(scores_gradient, dtype)
    return (
        _product(scores_gradient, keys, 2, 1, dtype),
        _product(scores_gradient, queries, 1, 1, dtype),
        _product(weights, gradient, 1, 1, dtype),
    )


_attend.defvjp(_attend_forward, _attend_backward)


CLASS_TOKEN = "cls_token"
POSITIONS = "pos_embed"
_HIDDEN = 4
_DEVIATION = 0.02
_TOKEN_DEVIATION = 1e-6
# Keys (1981): the cubic through its samples whose error falls fastest.
_SHARPNESS = -0.5


@dataclass(frozen=True)
class VisionTransformer:
    """The architecture of one vision transformer.

    Attributes:
        width: length of each token, C.
        depth: number of blocks.
        num_heads: number of attention heads, a divisor of the width.
        patch: height and width of the patches in pixels.
        image_size: height and width in pixels of the images for which `init` makes a position embedding, one for each
            patch; a multiple of `patch`. It is interpolated for images of another size.

    Raises:
        ValueError: if the image size is not a multiple of the patch size.
    """

    width: int
    depth: int
    num_heads: int
    patch: int = 16
    image_size: int = 224
    head: ClassVar[str] = "head"
    undecayed: ClassVar[tuple[str, ...]] = (CLASS_TOKEN, POSITIONS)

    def __post_init__(self) -> None:
        _check_sides(self.patch, self.image_size)

    @property
    def num_patches(self) -> int:
        """The number of patches of an image."""
        return (self.image_size // self.patch) ** 2


def _check_sides(patch: int, *sides: int) -> None:
    """Raise ValueError if images of these sides in pixels, one of a square, cannot be divided into patches."""
    for side in sides:
        if side < 1 or side % patch:
            below = side // patch * patch
            choices = [str(size) for size in (below, below + patch) if size]
            raise ValueError(
                f"images for a vision transformer must have a height and width that are a multiple of its patches of "
                f"{patch} px, got {' × '.join(map(str, sides))} px: choose an image size of {' or '.join(choices)} px"
            )


def size_of_positions(net: VisionTransformer, num_positions: int) -> int | None:
    """Return the image size in pixels with so many position embeddings, the class token's included; None if none."""
    side = math.isqrt(max(num_positions - 1, 0))
    return side * net.patch if side and side**2 == num_positions - 1 else None


def bicubic_weights(old: int, new: int) -> NDArray[np.float64]:
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


def count_products(net: VisionTransformer, image_size: int, num_classes: int) -> int:
    """Return the multiply-accumulates of the dense layers and the attention for one square image."""
    num_patches = (image_size // net.patch) ** 2
    num_tokens, C = num_patches + 1, net.width
    block = num_tokens * (4 + 2 * _HIDDEN) * C**2 + 2 * num_tokens**2 * C
    return num_patches * 3 * net.patch**2 * C + net.depth * block + C * num_classes


# Parameters


def _layer_shapes(net: VisionTransformer, num_classes: int) -> dict[str, tuple[int, int]]:
    """Return the shapes `[C,K]` of the kernels of all dense layers after the patches, in order, by path."""
    C = net.width
    in_block = {
        "attn.qkv": (C, 3 * C),
        "attn.proj": (C, C),
        "mlp.fc1": (C, _HIDDEN * C),
        "mlp.fc2": (_HIDDEN * C, C),
    }
    blocks = {f"blocks.{i}.{path}": shape for i in range(net.depth) for path, shape in in_block.items()}
    return blocks | {"head": (C, num_classes)}


def init(net: VisionTransformer, num_classes: int, key: jax.Array) -> tuple[Params, BatchStats]:
    """Return initial float32 parameters, and no batch statistics; their random values depend only on `key`.

    As in timm: dense layers and position embeddings normal with deviation 0.02 (timm's truncation at ±2 is 100
    deviations away), bias 0; the class token with 1e-6; the patches' kernel and bias uniform within 1/√(3·patch²).
    """
    C, p = net.width, net.patch
    patch_key, bias_key, token_key, kernels_key = jax.random.split(key, 4)
    shapes = _layer_shapes(net, num_classes)
    positions, *kernels = normal_arrays(kernels_key, [(1, net.num_patches + 1, C), *shapes.values()], _DEVIATION)
    bound = (3 * p**2) ** -0.5
    params: Params = {
        CLASS_TOKEN: _TOKEN_DEVIATION * jax.random.normal(token_key, (1, 1, C), jnp.float32),
        POSITIONS: positions,
        "patch_embed": {
            "proj": {
                "kernel": jax.random.uniform(patch_key, (p, p, 3, C), jnp.float32, -bound, bound),
                "bias": jax.random.uniform(bias_key, (C,), jnp.float32, -bound, bound),
            }
        },
        "blocks": {str(i): {"norm1": init_layer_norm(C), "norm2": init_layer_norm(C)} for i in range(net.depth)},
        "norm": init_layer_norm(C),
    }
    for path, kernel in zip(shapes, kernels, strict=True):
        set_at(params, path, {"kernel": kernel, "bias": jnp.zeros(kernel.shape[1], jnp.float32)})
    return params, {}


# Forward pass


@partial(jax.jit, static_argnums=0)  # traced once for all blocks
def _apply_block(num_heads: int, params: Params, x: Float[Array, "B N C"]) -> Float[Array, "B N C"]:
    """Apply one block to tokens: attention, then two dense layers, each after a norm and with a shortcut."""
    attention, mlp = params["attn"], params["mlp"]
    with jax.named_scope("attn"):
        x = x + linear(
            self_attention(linear(layer_norm(x, **params["norm1"]), **attention["qkv"]), num_heads), **attention["proj"]
        )
    with jax.named_scope("mlp"):
        return x + linear(gelu(linear(layer_norm(x, **params["norm2"]), **mlp["fc1"])), **mlp["fc2"])


@jax.named_scope("stem")
def _embed(net: VisionTransformer, params: Params, images: Float[Array, "B H W 3"]) -> Float[Array, "B N C"]:
    """Return the class token and the patches of images as tokens, with their position embeddings."""
    B, H, W, _ = images.shape
    _check_sides(net.patch, H, W)
    grid = H // net.patch, W // net.patch
    patches = patch_linear(images, **params["patch_embed"]["proj"]).reshape(B, math.prod(grid), net.width)
    first = jnp.broadcast_to(params[CLASS_TOKEN].astype(patches.dtype), (B, 1, net.width))
    positions = _positions_of(net, params[POSITIONS], grid)
    return (jnp.concatenate([first, patches], axis=1) + positions).astype(patches.dtype)


def _positions_of(
    net: VisionTransformer, positions: Float32[Array, "1 M C"], grid: tuple[int, int]
) -> Float32[Array, "1 N C"]:
    """Return the position embeddings for a grid of patches: interpolated, as `bicubic_weights` does, for another one.

    The class token's embedding is unchanged. This is timm's `resample_abs_pos_embed`, and has a derivative.
    """
    size = size_of_positions(net, positions.shape[1])
    if size is None:
        raise ValueError(
            f"a vision transformer's position embeddings must be those of a class token and a square of patches, got "
            f"{positions.shape[1]}: use the weights of a square image"
        )
    side = size // net.patch
    if grid == (side, side):
        return positions
    down, across = (jnp.asarray(bicubic_weights(side, length), jnp.float32) for length in grid)
    square = positions[0, 1:].reshape(side, side, net.width)
    # Without HIGHEST a GPU rounds the factors to 11 bits and a TPU to 8.
    rows = jnp.einsum("ph,hwc->pwc", down, square, precision=jax.lax.Precision.HIGHEST)
    resized = jnp.einsum("qw,pwc->pqc", across, rows, precision=jax.lax.Precision.HIGHEST)
    return jnp.concatenate([positions[:, :1], resized.reshape(1, math.prod(grid), net.width)], axis=1)


def apply(
    net: VisionTransformer, params: Params, batch_stats: BatchStats, images: Images, *, train: bool, dtype: jnp.dtype
) -> tuple[Logits, BatchStats]:
    """Return logits for normalised images, and the batch statistics, which are empty.

    Activations are in `dtype`; training and evaluation are the same.

    Raises:
        ValueError: if a side of the images is not a multiple of the patches.
    """
    del train
    x = _embed(net, params, images.astype(dtype))
    for i in range(net.depth):
        with jax.named_scope(f"block{i}"):
            x = _apply_block(net.num_heads, params["blocks"][str(i)], x)
    with jax.named_scope("head"):
        return dense(layer_norm(x[:, 0], **params["norm"]), **params["head"]), batch_stats
