"""Small residual networks for small images, after David Page's ResNet-9 ("How to Train Your ResNet", 2018).

What is his: a stage's map is halved by a 2×2 max-pool that stands between a convolution and its norm, so that norm and
activation touch a quarter of the values; a residual pair of 3×3 convolutions is added after its last activation; a
maximum over places and a classifier whose logits are scaled by 1/8 end it. What is not: every stage has its pair, the
classifier has a bias, activation and widths are a `PooledResNet`'s own, and so is the stem. That is a 4×4 convolution
of stride 2 which starts as a cosine transform, for what his whitens the image with by statistics of the data.

All the work lies at half the image's size and below, with many channels, where convolutions are fast on a CPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from models.convolution import convolution
from models.layers import RunningStats, batch_norm, dense
from models.model import BatchStats, Params
from models.pooling import max_pool

LOGIT_SCALE = 0.125
MARGIN = ((1, 1), (1, 1))
PLACES = (1, 2)
STEM_SIZE = 4
STEM_STRIDE = 2
MOST_STEM_CHANNELS = 2 * 3 * STEM_SIZE**2


@dataclass(frozen=True)
class PooledResNet:
    """The composition of one network.

    Attributes:
        stem: channels of the first convolution, an even number up to `MOST_STEM_CHANNELS`.
        stages: channels of each stage. Stem and stages halve the map.
        activation: "relu", or "silu" with a slope of 1.702 inside, which approximates GELU (Hendrycks and Gimpel, 2016,
            arXiv:1606.08415, section 2).

    Raises:
        ValueError: a number of stem channels that is none of these.
    """

    stem: int
    stages: tuple[int, ...]
    activation: Literal["relu", "silu"] = "relu"

    def __post_init__(self) -> None:
        if self.stem % 2 or not 2 <= self.stem <= MOST_STEM_CHANNELS:
            raise ValueError(f"stem must be an even number in 2 … {MOST_STEM_CHANNELS}, got {self.stem}")

    @property
    def smallest_image(self) -> int:
        """Least height and width in pixels: what is halved has two."""
        return 2 ** (1 + len(self.stages))


@dataclass(frozen=True)
class Layer:
    """A convolution from C to K channels, a 2×2 max-pool or none, batch norm and the activation."""

    path: tuple[str, ...]
    C: int
    K: int
    pool: bool = False
    kernel: int = 3
    stride: int = 1


def layers(net: PooledResNet) -> list[list[Layer]]:
    """The layers in order, by stage: the stem alone, then every stage's pooled layer and its residual pair."""
    found = [[Layer(("stem",), 3, net.stem, kernel=STEM_SIZE, stride=STEM_STRIDE)]]
    C = net.stem
    for number, K in enumerate(net.stages, 1):
        stage = f"stage{number}"
        pair = [Layer((stage, "residual", place), K, K) for place in ("0", "1")]
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


def cosine_kernel(num_channels: int) -> np.ndarray:
    """A bank of filters `[STEM_SIZE,STEM_SIZE,3,num_channels]`, float32, each of norm 1.

    The first half are orthogonal: products of the cosines of the discrete cosine transform (DCT-II) along height and
    width with brightness, red against blue, or green against both; low frequencies and brightness first, which have
    the most of a photograph's variance. The other half are their negatives, for activations that pass one sign.

    Patches of photographs have nearly these as their principal components (Ahmed et al., 1974, "Discrete Cosine
    Transform"), so that the norm behind makes their responses white without a look at the data.
    """
    places = np.arange(STEM_SIZE)
    cosines = np.cos(np.pi / STEM_SIZE * places[:, None] * (places + 0.5))
    colours = np.array([[1, 1, 1], [1, 0, -1], [1, -2, 1]])
    filters = {
        (down, across, colour): np.einsum("h,w,c->hwc", cosines[down], cosines[across], colours[colour])
        for down in places
        for across in places
        for colour in range(len(colours))
    }
    # Of colours an eye, and a photograph, has less, and least of it in detail.
    first = sorted(filters, key=lambda key: key[0] + key[1] + (0, 1.5, 1.75)[key[2]])
    half = np.stack([filters[key] / np.linalg.norm(filters[key]) for key in first[: num_channels // 2]], axis=-1)
    return np.concatenate([half, -half], axis=-1).astype(np.float32)


def _init_kernels(every: list[Layer], key: jax.Array) -> Iterator[jax.Array]:
    """The stem's filters; then He et al.'s normal distribution by fan-in, cut from one draw, which compiles faster."""
    stem, *others = every
    yield jnp.asarray(cosine_kernel(stem.K))
    sizes = [layer.kernel**2 * layer.C * layer.K for layer in others]
    draws = jax.random.normal(key, (sum(sizes),), jnp.float32)
    start = 0
    for layer, size in zip(others, sizes, strict=True):
        scale = (2.0 / (layer.kernel**2 * layer.C)) ** 0.5
        yield scale * draws[start : start + size].reshape(layer.kernel, layer.kernel, layer.C, layer.K)
        start += size


def init(net: PooledResNet, num_classes: int, key: jax.Array) -> tuple[Params, BatchStats]:
    """Fresh float32 parameters and batch statistics, a function of the key alone.

    Stem: `cosine_kernel`. Other convolutions: He normal by fan-in. Norms: scale 1, bias 0. Classifier: normal of
    deviation 1/√C, bias 0.
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
    x = convolution(x, kernel.astype(x.dtype), stride=layer.stride, padding=MARGIN)
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
    # In float32, as its derivative counts the places that share a maximum: a sum in bfloat16 stays at 256.
    features = x.astype(jnp.float32).max(PLACES).astype(dtype)
    return LOGIT_SCALE * dense(features, params["fc"]["kernel"], params["fc"]["bias"]), new_stats
