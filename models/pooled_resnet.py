"""Small residual networks for small images, after David Page's ResNet-9 ("How to Train Your ResNet", 2018).

What is his: maps are halved by a 2×2 max-pool that stands between a convolution and its norm, so that norm and
activation touch a quarter of the values; a residual pair of 3×3 convolutions is added after its last activation; a
maximum over places and a classifier whose logits are scaled by 1/8 end it. What is not: the stem is pooled too, every
stage has its pair, the classifier has a bias, and the activation and the widths are a `PooledResNet`'s own.

Most of its work lies at 16 pixels and below, with 32 channels and more, where convolutions are fast on a CPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from models.convolution import convolution
from models.layers import RunningStats, batch_norm, dense
from models.model import BatchStats, Params
from models.pooling import max_pool

LOGIT_SCALE = 0.125
SAME = ((1, 1), (1, 1))
PLACES = (1, 2)


@dataclass(frozen=True)
class PooledResNet:
    """The composition of one network.

    Attributes:
        stem: channels of the first convolution.
        stages: channels of each stage. Stem and stages halve the map.
        activation: "relu", or "silu" with a slope of 1.702 inside, which approximates GELU (Hendrycks and Gimpel, 2016,
            arXiv:1606.08415, section 2).
    """

    stem: int
    stages: tuple[int, ...]
    activation: Literal["relu", "silu"] = "relu"

    @property
    def smallest_image(self) -> int:
        """Least height and width in pixels: every pool needs two."""
        return 2 ** (1 + len(self.stages))


@dataclass(frozen=True)
class Layer:
    """A 3×3 convolution from C to K channels, a 2×2 max-pool or none, batch norm and the activation."""

    path: tuple[str, ...]
    C: int
    K: int
    pool: bool


def layers(net: PooledResNet) -> list[list[Layer]]:
    """The layers in order, by stage: the stem alone, then each stage's pooled layer and its residual pair."""
    found = [[Layer(("stem",), 3, net.stem, pool=True)]]
    C = net.stem
    for number, K in enumerate(net.stages, 1):
        stage = f"stage{number}"
        pair = [Layer((stage, "residual", place), K, K, pool=False) for place in ("0", "1")]
        found.append([Layer((stage, "widen"), C, K, pool=True), *pair])
        C = K
    return found


# Parameters


def _set(tree: Params, path: tuple[str, ...], value: Params) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _get(tree: Params, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _init_kernels(every: list[Layer], key: jax.Array) -> Iterator[jax.Array]:
    """He et al.'s normal distribution by fan-in, all cut from one draw, which compiles faster than one for each."""
    sizes = [9 * layer.C * layer.K for layer in every]
    draws = jax.random.normal(key, (sum(sizes),), jnp.float32)
    start = 0
    for layer, size in zip(every, sizes, strict=True):
        scale = (2.0 / (9 * layer.C)) ** 0.5
        yield scale * draws[start : start + size].reshape(3, 3, layer.C, layer.K)
        start += size


def init(net: PooledResNet, num_classes: int, key: jax.Array) -> tuple[Params, BatchStats]:
    """Fresh float32 parameters and batch statistics, a function of the key alone.

    Convolutions: He normal by fan-in. Norms: scale 1, bias 0. Classifier: normal of deviation 1/√C, bias 0.
    """
    kernels_key, fc_key = jax.random.split(key)
    every = [layer for stage in layers(net) for layer in stage]
    params: Params = {}
    stats: BatchStats = {}
    for layer, kernel in zip(every, _init_kernels(every, kernels_key), strict=True):
        zeros, ones = jnp.zeros(layer.K, jnp.float32), jnp.ones(layer.K, jnp.float32)
        _set(params, layer.path, {"conv": {"kernel": kernel}, "norm": {"scale": ones, "bias": zeros}})
        _set(stats, layer.path, {"norm": {"mean": zeros, "var": ones}})
    C = every[-1].K
    params["fc"] = {
        "kernel": C**-0.5 * jax.random.normal(fc_key, (C, num_classes), jnp.float32),
        "bias": jnp.zeros(num_classes, jnp.float32),
    }
    return params, stats


# Forward pass


def _activate(net: PooledResNet, x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(1.702 * x) if net.activation == "silu" else jax.nn.relu(x)


def _apply_layer(
    net: PooledResNet, layer: Layer, params: Params, batch_stats: BatchStats, x: jax.Array, train: bool
) -> tuple[jax.Array, BatchStats]:
    """One layer, which takes its own part of the network's parameters and statistics, and its new statistics."""
    kernel = _get(params, (*layer.path, "conv", "kernel"))
    x = convolution(x, kernel.astype(x.dtype), padding=SAME)
    if layer.pool:
        x = max_pool(x, window=2, stride=2, padding=0)
    norm, running = _get(params, (*layer.path, "norm")), RunningStats(**_get(batch_stats, (*layer.path, "norm")))
    x, moved = batch_norm(x, norm["scale"], norm["bias"], running, train=train)
    return _activate(net, x), {"norm": moved._asdict()}


def apply(
    net: PooledResNet, params: Params, batch_stats: BatchStats, images: jax.Array, *, train: bool, dtype: jnp.dtype
) -> tuple[jax.Array, BatchStats]:
    """Float32 logits `[B,K]` of normalised images `[B,H,W,3]`, and new batch statistics; activations are in `dtype`.

    Raises:
        ValueError: images smaller than `net.smallest_image`.
    """
    if min(images.shape[1:3]) < net.smallest_image:
        raise ValueError(
            f"images must have at least {net.smallest_image} × {net.smallest_image} px to be halved "
            f"{1 + len(net.stages)} times, got {images.shape[1]} × {images.shape[2]}: give larger ones"
        )
    new_stats: BatchStats = {}
    x = images.astype(dtype)
    for first, *pair in layers(net):
        x, stats = _apply_layer(net, first, params, batch_stats, x, train)
        _set(new_stats, first.path, stats)
        inner = x
        for layer in pair:
            inner, stats = _apply_layer(net, layer, params, batch_stats, inner, train)
            _set(new_stats, layer.path, stats)
        x = x + inner if pair else x
    features = x.max(PLACES)
    return LOGIT_SCALE * dense(features, params["fc"]["kernel"], params["fc"]["bias"]), new_stats
