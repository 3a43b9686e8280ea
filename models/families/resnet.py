"""Residual networks (He et al., 2015): the ImageNet family, its XLA.jl and "D" variants, and the CIFAR family.

A `ResNet` value describes a network; parameters are nested dictionaries keyed by torchvision's module names, so that a
path through them is a torchvision name (`layer1.0.conv1`), in the D variant timm's (`layer1.0.downsample.1`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from loopfeed.models.layers.batch_norm import RunningStats, batch_norm, stored_relu
from loopfeed.models.layers.bfloat16_bits import read_twice, round_by_bits
from loopfeed.models.layers.convolution import convolution
from loopfeed.models.layers.head import dense, global_average_pool
from loopfeed.models.layers.pooling import average_pool, max_pool
from loopfeed.models.model import BatchStats, Images, Logits, Params


@dataclass(frozen=True)
class ResNet:
    """The architecture of one residual network.

    Attributes:
        stages: number of blocks of each stage; every stage except the first halves the map and doubles the channels.
        width: channels of the first stage before a bottleneck's expansion.
        block: two 3×3 convolutions ("basic"), or a 1×1–3×3–1×1 "bottleneck" that expands its channels fourfold.
        stem: 7×7 stride 2 and a 3×3 stride 2 max-pool ("imagenet"), the same with three 3×3 convolutions instead of
            the 7×7 ("deep"; He et al., 2018, arXiv:1812.01187, ResNet-C), or one 3×3 convolution ("cifar").
        stem_norm: whether batch norm and ReLU follow the stem's convolution.
        conv_bias: whether convolutions have a bias.
        stride_on: the convolution of a block that applies its stride: "conv1" in a basic block; in a bottleneck "conv2"
            ("v1.5", torchvision) or "conv3" (XLA.jl).
        pooled_shortcut: whether a shortcut with a stride averages 2×2 pixels before its 1×1 convolution, which then
            has no stride (He et al., 2018, arXiv:1812.01187, ResNet-D).
    """

    stages: tuple[int, ...]
    width: int
    block: Literal["basic", "bottleneck"]
    stem: Literal["imagenet", "deep", "cifar"]
    stem_norm: bool = True
    conv_bias: bool = False
    stride_on: Literal["conv1", "conv2", "conv3"] = "conv1"
    pooled_shortcut: bool = False
    head: ClassVar[str] = "fc"
    undecayed: ClassVar[tuple[str, ...]] = ()

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
    """A residual block: its convolutions in order, and the projection of its shortcut if the shape changes.

    If `pool` is above 1, the shortcut averages windows of that size before its projection, which has no stride.
    """

    path: str
    convs: tuple[Conv, ...]
    projection: Conv | None
    pool: int = 1


def stem_convs(net: ResNet) -> tuple[Conv, ...]:
    """Return the convolutions of a network's stem."""
    if net.stem == "deep":
        half = net.width // 2
        return Conv(3, 3, half, 2), Conv(3, half, half), Conv(3, half, net.width)
    return (Conv(7, 3, net.width, 2) if net.stem == "imagenet" else Conv(3, 3, net.width),)


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
            pool = stride if net.pooled_shortcut else 1
            projection = Conv(1, C, outer, stride // pool) if stride != 1 or outer != C else None
            found.append(Block(f"layer{stage + 1}.{index}", convs, projection, pool))
            C = outer
    return found


def count_products(net: ResNet, image_size: int, num_classes: int) -> int:
    """Return the multiply-accumulates of the convolutions and the classifier for one square image."""
    size, total = image_size, 0

    def convolve(conv: Conv, size: int) -> int:
        """Count a convolution's products, and return its output's height and width."""
        nonlocal total
        out = -(-size // conv.stride)
        total += out**2 * conv.kernel**2 * conv.C * conv.K
        return out

    for conv in stem_convs(net):
        size = convolve(conv, size)
    if net.stem != "cifar":
        size = -(-size // 2)
    for block in blocks(net):
        if block.projection is not None:
            convolve(block.projection, -(-size // block.pool))
        for conv in block.convs:
            size = convolve(conv, size)
    return total + net.num_features * num_classes


# Parameters


def _convs(net: ResNet) -> Iterator[Conv]:
    """Yield all convolutions: the stem's, then for each block its convolutions and its projection, if it has one."""
    yield from stem_convs(net)
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


def _init_stem(net: ResNet, kernels: Iterator[jax.Array]) -> tuple[Params, BatchStats]:
    """Return the stem: `conv1` and `bn1`, in a deep one `conv1.0` to `conv1.6` with norms at 1 and 4, and `bn1`."""
    *inner, last = stem_convs(net)
    params: Params = {}
    stats: BatchStats = {}
    for place, conv in enumerate(inner):
        norm_params, norm_stats = _init_norm(conv.K)
        params |= {str(3 * place): _init_conv(net, conv, kernels), str(3 * place + 1): norm_params}
        stats[str(3 * place + 1)] = norm_stats
    final = _init_conv(net, last, kernels)
    stem: Params = {"conv1": params | {str(3 * len(inner)): final} if inner else final}
    stem_stats: BatchStats = {"conv1": stats} if inner else {}
    if net.stem_norm:
        stem["bn1"], stem_stats["bn1"] = _init_norm(last.K)
    return stem, stem_stats


def _projection_paths(has_pool: bool) -> tuple[str, str]:
    """Return the names of a shortcut's convolution and norm; in the D variant, timm's pool is number 0."""
    return ("1", "2") if has_pool else ("0", "1")


def _init_block(net: ResNet, block: Block, kernels: Iterator[jax.Array]) -> tuple[Params, BatchStats]:
    params: Params = {}
    stats: BatchStats = {}
    for place, conv in enumerate(block.convs, 1):
        params[f"conv{place}"] = _init_conv(net, conv, kernels)
        params[f"bn{place}"], stats[f"bn{place}"] = _init_norm(conv.K)
    if block.projection is not None:
        norm_params, norm_stats = _init_norm(block.projection.K)
        conv_path, norm_path = _projection_paths(net.pooled_shortcut)
        params["downsample"] = {conv_path: _init_conv(net, block.projection, kernels), norm_path: norm_params}
        stats["downsample"] = {norm_path: norm_stats}
    return params, stats


def init(net: ResNet, num_classes: int, key: jax.Array) -> tuple[Params, BatchStats]:
    """Return initial float32 parameters and batch statistics; their random values depend only on `key`.

    Convolutions: He normal by fan-out, bias 0. Norms: scale 1, bias 0. Classifier: uniform within 1/√C.
    """
    kernels_key, fc_key, bias_key = jax.random.split(key, 3)
    kernels = _init_kernels(net, kernels_key)
    params, stats = _init_stem(net, kernels)
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
    kernel = round_by_bits(params["kernel"], x.dtype)
    return convolution(x, kernel, stride=conv.stride, padding=padding, bias=params.get("bias"))


def _norm(
    x: jax.Array, params: Params, stats: BatchStats, train: bool, relu: bool = False
) -> tuple[jax.Array, BatchStats]:
    running = RunningStats(stats["mean"], stats["var"])
    y, moved = batch_norm(x, params["scale"], params["bias"], running, train=train, relu=relu)
    return y, {"mean": moved.mean, "var": moved.var}


# Traced once for all blocks of one shape: ResNet-50's 16 blocks have 8 shapes, which saves half a second at its start.
@partial(jax.jit, static_argnums=(0, 1, 5, 6))
def _apply_block(
    convs: tuple[Conv, ...],
    projection: Conv | None,
    params: Params,
    stats: BatchStats,
    x: jax.Array,
    train: bool,
    pool: int | None = None,
) -> tuple[jax.Array, BatchStats]:
    """Apply one block; `pool` is None except in the D variant, there the window of the shortcut's pool."""
    new_stats: BatchStats = {}
    x, shortcut = read_twice(x)
    if projection is not None:
        conv_path, norm_path = _projection_paths(pool is not None)
        with jax.named_scope("downsample"):
            shortcut = shortcut if pool is None else average_pool(shortcut, pool)
            shortcut = _conv(shortcut, params["downsample"][conv_path], projection)
            variables = params["downsample"][norm_path], stats["downsample"][norm_path]
            shortcut, norm_stats = _norm(shortcut, *variables, train)
        new_stats["downsample"] = {norm_path: norm_stats}
    for place, conv in enumerate(convs, 1):
        with jax.named_scope(f"conv{place}"):
            x = _conv(x, params[f"conv{place}"], conv)
        inner = place < len(convs)
        with jax.named_scope(f"bn{place}"):
            x, new_stats[f"bn{place}"] = _norm(x, params[f"bn{place}"], stats[f"bn{place}"], train, relu=inner)
    return stored_relu(x, shortcut), new_stats


@jax.named_scope("stem")
def _apply_stem(
    net: ResNet, params: Params, batch_stats: BatchStats, x: jax.Array, train: bool
) -> tuple[jax.Array, BatchStats]:
    *inner, last = stem_convs(net)
    new_stats: BatchStats = {"conv1": {}} if inner else {}
    for place, conv in enumerate(inner):
        norm = str(3 * place + 1)
        x = _conv(x, params["conv1"][str(3 * place)], conv)
        variables = params["conv1"][norm], batch_stats["conv1"][norm]
        x, new_stats["conv1"][norm] = _norm(x, *variables, train, relu=True)
    x = _conv(x, params["conv1"][str(3 * len(inner))] if inner else params["conv1"], last)
    if net.stem_norm:
        x, new_stats["bn1"] = _norm(x, params["bn1"], batch_stats["bn1"], train, relu=True)
    return (x if net.stem == "cifar" else max_pool(x)), new_stats


def apply(
    net: ResNet, params: Params, batch_stats: BatchStats, images: Images, *, train: bool, dtype: jnp.dtype
) -> tuple[Logits, BatchStats]:
    """Return logits for normalised images, and new batch statistics.

    Activations are in `dtype`.
    """
    x, new_stats = _apply_stem(net, params, batch_stats, images.astype(dtype), train)
    for block in blocks(net):
        stage, index = block.path.split(".")
        variables = params[stage][index], batch_stats[stage][index]
        pool = (block.pool,) if net.pooled_shortcut else ()
        with jax.named_scope(stage), jax.named_scope(index):
            x, block_stats = _apply_block(block.convs, block.projection, *variables, x, train, *pool)
        new_stats.setdefault(stage, {})[index] = block_stats
    with jax.named_scope("head"):
        return dense(global_average_pool(x), params["fc"]["kernel"], params["fc"]["bias"]), new_stats
