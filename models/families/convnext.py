"""ConvNeXt (Liu et al., 2022, arXiv:2201.03545), as timm's `convnext_tiny`.

A `ConvNeXt` value describes a network; parameters are nested dictionaries keyed by timm's module names, so that a path
through them is a timm name (`stages.0.blocks.0.conv_dw`). There are no batch statistics.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loopfeed.models.layers.convolution import convolution
from loopfeed.models.layers.gelu import gelu
from loopfeed.models.layers.head import dense, global_average_pool, linear, normal_arrays, patch_linear
from loopfeed.models.layers.layer_norm import init_layer_norm, layer_norm
from loopfeed.models.model import BatchStats, Images, Logits, Params, set_at

_WINDOW = 7
_MARGIN = _WINDOW // 2
_HIDDEN = 4
_STEM_PATCH, _PATCH = 4, 2
_DEVIATION = 0.02
_LAYER_SCALE = 1e-6


@dataclass(frozen=True)
class ConvNeXt:
    """The architecture of one ConvNeXt.

    Attributes:
        depths: number of blocks of each stage.
        widths: number of channels of each stage.
    """

    depths: tuple[int, ...]
    widths: tuple[int, ...]
    head: ClassVar[str] = "head.fc"
    undecayed: ClassVar[tuple[str, ...]] = ()

    @property
    def smallest_image(self) -> int:
        """The smallest height and width: the stem divides by 4, and each later stage by 2."""
        return _STEM_PATCH * _PATCH ** (len(self.depths) - 1)


def count_products(net: ConvNeXt, image_size: int, num_classes: int) -> int:
    """Return the multiply-accumulates of the convolutions and the dense layers for one square image."""
    total, size, C, patch = 0, image_size, 3, _STEM_PATCH
    for depth, K in zip(net.depths, net.widths, strict=True):
        size //= patch
        total += size**2 * (patch**2 * C * K + depth * (_WINDOW**2 * K + 2 * _HIDDEN * K**2))
        C, patch = K, _PATCH
    return total + C * num_classes


# Parameters


def _kernel_shapes(net: ConvNeXt, num_classes: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the kernels of all convolutions and dense layers in order, by path."""
    shapes: dict[str, tuple[int, ...]] = {"stem.0": (_STEM_PATCH, _STEM_PATCH, 3, net.widths[0])}
    for stage, (depth, C) in enumerate(zip(net.depths, net.widths, strict=True)):
        if stage:
            shapes[f"stages.{stage}.downsample.1"] = (_PATCH, _PATCH, net.widths[stage - 1], C)
        for block in range(depth):
            path = f"stages.{stage}.blocks.{block}"
            shapes[f"{path}.conv_dw"] = (_WINDOW, _WINDOW, 1, C)
            shapes[f"{path}.mlp.fc1"] = (C, _HIDDEN * C)
            shapes[f"{path}.mlp.fc2"] = (_HIDDEN * C, C)
    return shapes | {"head.fc": (net.widths[-1], num_classes)}


def init(net: ConvNeXt, num_classes: int, key: jax.Array) -> tuple[Params, BatchStats]:
    """Return initial float32 parameters, and no batch statistics; their random values depend only on `key`.

    As in the paper and timm: kernels normal with deviation 0.02 (truncation at ±2 is 100 deviations away), bias 0,
    layer scale 1e-6.
    """
    params: Params = {}
    shapes = _kernel_shapes(net, num_classes)
    for path, kernel in zip(shapes, normal_arrays(key, list(shapes.values()), _DEVIATION), strict=True):
        set_at(params, path, {"kernel": kernel, "bias": jnp.zeros(kernel.shape[-1], jnp.float32)})
    for stage, (depth, C) in enumerate(zip(net.depths, net.widths, strict=True)):
        for block in range(depth):
            path = f"stages.{stage}.blocks.{block}"
            set_at(params, f"{path}.norm", init_layer_norm(C))
            set_at(params, f"{path}.gamma", jnp.full(C, _LAYER_SCALE, jnp.float32))
        if stage:
            set_at(params, f"stages.{stage}.downsample.0", init_layer_norm(net.widths[stage - 1]))
    set_at(params, "stem.1", init_layer_norm(net.widths[0]))
    set_at(params, "head.norm", init_layer_norm(net.widths[-1]))
    return params, {}


# Forward pass


@jax.jit  # traced once for all blocks of one shape
def _apply_block(params: Params, x: Float[Array, "B H W C"]) -> Float[Array, "B H W C"]:
    """Apply one block: a depthwise convolution, a norm and two dense layers, with a shortcut."""
    conv, mlp = params["conv_dw"], params["mlp"]
    padding = ((_MARGIN, _MARGIN),) * 2
    with jax.named_scope("conv_dw"):
        y = convolution(x, conv["kernel"].astype(x.dtype), padding=padding, bias=conv["bias"], groups=x.shape[3])
    with jax.named_scope("mlp"):
        y = linear(gelu(linear(layer_norm(y, **params["norm"]), **mlp["fc1"])), **mlp["fc2"])
    return (x + params["gamma"] * y).astype(x.dtype)


def apply(
    net: ConvNeXt, params: Params, batch_stats: BatchStats, images: Images, *, train: bool, dtype: jnp.dtype
) -> tuple[Logits, BatchStats]:
    """Return logits for normalised images, and the batch statistics, which are empty.

    Activations are in `dtype`; training and evaluation are the same.

    Raises:
        ValueError: if the images are smaller than `net.smallest_image`.
    """
    del train
    if min(images.shape[1:3]) < net.smallest_image:
        raise ValueError(
            f"images must have at least {net.smallest_image} × {net.smallest_image} px to be divided by "
            f"{net.smallest_image}, got {images.shape[1]} × {images.shape[2]}: use larger images"
        )
    with jax.named_scope("stem"):
        x = patch_linear(images.astype(dtype), **params["stem"]["0"])
        x = layer_norm(x, **params["stem"]["1"])
    for index, depth in enumerate(net.depths):
        stage = params["stages"][str(index)]
        with jax.named_scope(f"stage{index}"):
            if index:
                before, halving = stage["downsample"]["0"], stage["downsample"]["1"]
                with jax.named_scope("downsample"):
                    x = patch_linear(layer_norm(x, **before), **halving)
            for block in range(depth):
                with jax.named_scope(str(block)):
                    x = _apply_block(stage["blocks"][str(block)], x)
    head = params["head"]
    with jax.named_scope("head"):
        return dense(layer_norm(global_average_pool(x), **head["norm"]), **head["fc"]), batch_stats
