"""Residual networks (He et al., 2015): the ImageNet family, its XLA.jl variant and the CIFAR family.

A `ResNet` value describes a network; parameters are nested dictionaries keyed by torchvision's module names, so that a
path through them is a torchvision name (`layer1.0.conv1`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from models.layers.batch_norm import RunningStats, batch_norm, stored_relu
from models.layers.convolution import convolution
from models.layers.head import dense, global_average_pool
from models.layers.pooling import max_pool
from models.model import BatchStats, Params


@dataclass(frozen=True)
class ResNet:
    """The architecture of one residual network.

    Attributes:
        stages: number of blocks of each stage; every stage except the first halves the map and doubles the channels.
        width: channels of the first stage before a bottleneck's expansion.
        block: two 3×3 convolutions ("basic"), or a 1×1–3×3–1×1 "bottleneck" that expands its channels fourfold.
        stem: 7×7 stride 2 and a 3×3 stride 2 max-pool ("imagenet"), or one 3×3 convolution ("cifar").
        stem_norm: whether batch norm and ReLU follow the stem's convolution.
        conv_bias: whether convolutions have a bias.
        stride_on: the convolution of a block that applies its stride: "conv1" in a basic block; in a bottleneck "conv2"
            ("v1.5", torchvision) or "conv3" (XLA.jl).
    """

    stages: tuple[int, ...]
    width: int
    block: Literal["basic", "bottleneck"]
    stem: Literal["imagenet", "cifar"]
    stem_norm: bool = True
    conv_bias: bool = False
    stride_on: Literal["conv1", "conv2", "conv3"] = "conv1"

    @property
    def expansion(self) -> int:
        """The number of a block's output channels divided by the number of its inner convolutions' channels."""
        return 4 if self.block == "bottleneck" else 1

    @property
    def num_features(self) -> int:
        """The number of input channels of the classifier."""
        return self.width * 2 ** (len(self.stages) - 1) * self.expansion


@dataclass(frozen=True)
class Conv:
    """A convolution from C to K channels, with padding (kernel - 1) / 2 on all sides."""

    kernel: int
    C: int
    K: int
    stride: int = 1


@dataclass(frozen=True)
class Block:
    """A residual block: its convolutions in order, and the projection of its shortcut if the shape changes."""

    path: str
    convs: tuple[Conv, ...]
    projection: Conv | None


def stem_conv(net: ResNet) -> Conv:
    """Return the stem convolution of a network."""
    return Conv(7, 3, net.width, 2) if net.stem == "imagenet" else Conv(3, 3, net.width)


def blocks(net: ResNet) -> list[Block]:
    """Return all residual blocks in order. A shortcut is projected (1×1, "option B") only if its shape changes."""
    found, C = [], net.width
    for stage, num_blocks in enumerate(net.stages):
        inner = net.width * 2**stage
        outer = inner * net.expansion
        for index in range(num_blocks):
            stride = 2 if stage > 0 and index == 0 else 1
            widths = (
                [(3, C, inner), (3, inner, outer)]
                if net.block == "basic"
                else [
                    (1, C, inner),
                    (3, inner, inner),
                    (1, inner, outer),
                ]
            )
            convs = tuple(
                Conv(*shape, stride if net.stride_on == f"conv{place}" else 1) for place, shape in enumerate(widths, 1)
            )
            projection = Conv(1, C, outer, stride) if stride != 1 or outer != C else None
            found.append(Block(f"layer{stage + 1}.{index}", convs, projection))
            C = outer
    return found


# Parameters


def _convs(net: ResNet) -> Iterator[Conv]:
    """Yield all convolutions: the stem's, then for each block its convolutions and its projection, if it has one."""
    yield stem_conv(net)
    for block in blocks(net):
        yield from block.convs
        if block.projection is not None:
            yield block.projection


def _init_conv(net: ResNet, conv: Conv, kernels: Iterator[jax.Array]) -> Params:
    params = {"kernel": next(kernels)}
    return params | {"bias": jnp.zeros(conv.K, jnp.float32)} if net.conv_bias else params


def _init_kernels(net: ResNet, key: jax.Array) -> Iterator[jax.Array]:
    """Yield a He-normal kernel for each convolution, scaled by fan-out, which preserves the scale of gradients.

    All are sliced from one draw: with a separate draw for each, compiling ResNet-50's `init` took half a minute.
    """
    convs = list(_convs(net))
    sizes = [conv.kernel**2 * conv.C * conv.K for conv in convs]
    draws = jax.random.normal(key, (sum(sizes),), jnp.float32)
    start = 0
    for conv, size in zip(convs, sizes, strict=True):
        scale = (2.0 / (conv.kernel**2 * conv.K)) ** 0.5
        yield scale * draws[start : start + size].reshape(conv.kernel, conv.kernel, conv.C, conv.K)
        start += size


def _init_norm(K: int) -> tuple[Params, BatchStats]:
    zeros, ones = jnp.zeros(K, jnp.float32), jnp.ones(K, jnp.float32)
    return {"scale": ones, "bias": zeros}, {"mean": zeros, "var": ones}


def _init_block(net: ResNet, block: Block, kernels: Iterator[jax.Array]) -> tuple[Params, BatchStats]:
    params: Params = {}
    stats: BatchStats = {}
    for place, conv in enumerate(block.convs, 1):
        params[f"conv{place}"] = _init_conv(net, conv, kernels)
        params[f"bn{place}"], stats[f"bn{place}"] = _init_norm(conv.K)
    if block.projection is not None:
        norm_params, norm_stats = _init_norm(block.projection.K)
        params["downsample"] = {"0": _init_conv(net, block.projection, kernels), "1": norm_params}
        stats["downsample"] = {"1": norm_stats}
    return params, stats


def init(net: ResNet, num_classes: int, key: jax.Array) -> tuple[Params, BatchStats]:
    """Return initial float32 parameters and batch statistics; their random values depend only on `key`.

    Convolutions: He normal by fan-out, bias 0. Norms: scale 1, bias 0. Classifier: uniform within 1/√C.
    """
    kernels_key, fc_key, bias_key = jax.random.split(key, 3)
    kernels = _init_kernels(net, kernels_key)
    stem = stem_conv(net)
    params: Params = {"conv1": _init_conv(net, stem, kernels)}
    stats: BatchStats = {}
    if net.stem_norm:
        params["bn1"], stats["bn1"] = _init_norm(stem.K)
    for block in blocks(net):
        stage, index = block.path.split(".")
        initial = _init_block(net, block, kernels)
        params.setdefault(stage, {})[index], stats.setdefault(stage, {})[index] = initial
    bound = net.num_features**-0.5
    params["fc"] = {
        "kernel": jax.random.uniform(fc_key, (net.num_features, num_classes), jnp.float32, -bound, bound),
        "bias": jax.random.uniform(bias_key, (num_classes,), jnp.float32, -bound, bound),
    }
    return params, stats


# Forward pass


def _conv(x: jax.Array, params: Params, conv: Conv) -> jax.Array:
    margin = (conv.kernel - 1) // 2
    padding = ((margin, margin), (margin, margin))
    return convolution(
        x, params["kernel"].astype(x.dtype), stride=conv.stride, padding=padding, bias=params.get("bias")
    )


def _norm(
    x: jax.Array, params: Params, stats: BatchStats, train: bool, relu: bool = False
) -> tuple[jax.Array, BatchStats]:
    running = RunningStats(stats["mean"], stats["var"])
    y, moved = batch_norm(x, params["scale"], params["bias"], running, train=train, relu=relu)
    return y, {"mean": moved.mean, "var": moved.var}


# Traced once for all blocks of one shape: ResNet-50's 16 blocks have 8 shapes, which saves half a second at its start.
@partial(jax.jit, static_argnums=(0, 1, 5))
def _apply_block(
    convs: tuple[Conv, ...], projection: Conv | None, params: Params, stats: BatchStats, x: jax.Array, train: bool
) -> tuple[jax.Array, BatchStats]:
    new_stats: BatchStats = {}
    shortcut = x
    if projection is not None:
        shortcut = _conv(x, params["downsample"]["0"], projection)
        shortcut, norm_stats = _norm(shortcut, params["downsample"]["1"], stats["downsample"]["1"], train)
        new_stats["downsample"] = {"1": norm_stats}
    for place, conv in enumerate(convs, 1):
        x = _conv(x, params[f"conv{place}"], conv)
        inner = place < len(convs)
        x, new_stats[f"bn{place}"] = _norm(x, params[f"bn{place}"], stats[f"bn{place}"], train, relu=inner)
    return stored_relu(x + shortcut), new_stats


def apply(
    net: ResNet, params: Params, batch_stats: BatchStats, images: jax.Array, *, train: bool, dtype: jnp.dtype
) -> tuple[jax.Array, BatchStats]:
    """Return float32 logits `[B,K]` for normalised images `[B,H,W,3]`, and new batch statistics.

    Activations are in `dtype`.
    """
    new_stats: BatchStats = {}
    x = _conv(images.astype(dtype), params["conv1"], stem_conv(net))
    if net.stem_norm:
        x, new_stats["bn1"] = _norm(x, params["bn1"], batch_stats["bn1"], train, relu=True)
    if net.stem == "imagenet":
        x = max_pool(x)
    for block in blocks(net):
        stage, index = block.path.split(".")
        variables = params[stage][index], batch_stats[stage][index]
        x, block_stats = _apply_block(block.convs, block.projection, *variables, x, train)
        new_stats.setdefault(stage, {})[index] = block_stats
    return dense(global_average_pool(x), params["fc"]["kernel"], params["fc"]["bias"]), new_stats
