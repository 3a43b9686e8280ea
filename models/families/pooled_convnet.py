"""A small convolutional network that trains on small images in a few epochs.

After Keller Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU" (2024), arXiv:2404.00498.

The same as in the paper: a 2×2 stem without padding; stages of two 3×3 convolutions, with max-pooling between the first
and its norm, so that norm and activation process a quarter of the values; convolutions initialised as the identity on
their input channels; norms that learn only a bias, with a larger learning rate than the kernels; a global max-pool and
a classifier with scaled-down logits.

Different from the paper: the widths are settings of `PooledConvNet`; the stem is a cosine transform with a norm,
learned or fixed, instead of fixed filters computed from the data; GELU is approximated; the logits are scaled by 1/8
instead of 1/9; the norms compute their running averages as in all models here; the classifier has a bias; the global
max-pool accepts maps of any size.

Most of the computation is at half the image's size and below, with many channels, where convolutions are fast on a CPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from loopfeed.models.layers.batch_norm import RunningStats, batch_norm
from loopfeed.models.layers.bfloat16_bits import round_by_bits
from loopfeed.models.layers.convolution import convolution
from loopfeed.models.layers.gelu import quick_gelu
from loopfeed.models.layers.head import dense
from loopfeed.models.layers.pooling import global_max_pool, max_pool
from loopfeed.models.model import BatchStats, Images, Logits, Params

LOGIT_SCALE = 0.125
# The learned bias is multiplied by this, so that under SGD the product changes faster by the square of this factor.
BIAS_GAIN = 8.0
STEM_SIZE = 2
MOST_STEM_CHANNELS = 2 * 3 * STEM_SIZE**2


@dataclass(frozen=True)
class PooledConvNet:
    """The architecture of one network.

    Attributes:
        stem: channels of the first convolution, an even number up to `MOST_STEM_CHANNELS`.
        stages: channels of each stage; each stage halves the map.
        stem_learns: whether the stem's kernel is learned; otherwise it is fixed at its initial value.

    Raises:
        ValueError: if the number of stem channels is odd or out of range.
    """

    stem: int
    stages: tuple[int, ...]
    stem_learns: bool = True
    head: ClassVar[str] = "fc"
    undecayed: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if self.stem % 2 or not 2 <= self.stem <= MOST_STEM_CHANNELS:
            raise ValueError(f"stem must be an even number from 2 to {MOST_STEM_CHANNELS}, got {self.stem}")

    @property
    def smallest_image(self) -> int:
        """The smallest height and width: the stem removes one pixel, and each stage needs at least two to halve."""
        return 2 ** len(self.stages) + STEM_SIZE - 1


@dataclass(frozen=True)
class Layer:
    """A learned or fixed convolution from C to K channels, an optional 2×2 max-pool, batch norm, and an activation."""

    path: tuple[str, ...]
    C: int
    K: int
    pool: bool = False
    margin: int = 1
    learns: bool = True


def layers(net: PooledConvNet) -> list[Layer]:
    """Return the layers in order: the stem, then for each stage one layer with pooling and one without."""
    found = [Layer(("stem",), 3, net.stem, margin=0, learns=net.stem_learns)]
    for number, K in enumerate(net.stages, 1):
        stage = f"stage{number}"
        found += [Layer((stage, "0"), found[-1].K, K, pool=True), Layer((stage, "1"), K, K)]
    return found


def count_products(net: PooledConvNet, image_size: int, num_classes: int) -> int:
    """Return the multiply-accumulates of the convolutions and the classifier for one square image."""
    total, size = 0, image_size
    for layer in layers(net):
        window = 3 if layer.margin else STEM_SIZE
        size += 2 * layer.margin + 1 - window
        total += size**2 * window**2 * layer.C * layer.K
        size //= 2 if layer.pool else 1
    return total + net.stages[-1] * num_classes


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
    """Return the stem's cosine filters, each of norm 1, as a float32 array `[STEM_SIZE,STEM_SIZE,3,num_channels]`.

    The first half of the filters are orthogonal: products of the cosines of the discrete cosine transform (DCT-II)
    along height and width with brightness, red against blue, or green against both. Low frequencies and brightness come
    first, because they have most of a photograph's variance. The other half are their negatives, for activations that
    pass only one sign.

    These filters are nearly the principal components of patches of photographs (Ahmed et al., 1974, "Discrete Cosine
    Transform"), so that with the following norm they whiten patches without statistics of the data.
    """
    indices = np.arange(STEM_SIZE)
    cosines = np.cos(np.pi / STEM_SIZE * indices[:, None] * (indices + 0.5))
    colours = np.array([[1, 1, 1], [1, 0, -1], [1, -2, 1]])
    filters = {
        (down, across, colour): np.einsum("h,w,c->hwc", cosines[down], cosines[across], colours[colour])
        for down in indices
        for across in indices
        for colour in range(len(colours))
    }
    # Photographs, like the eye, have less variance in colour than in brightness, least in its fine detail.
    ordered = sorted(filters, key=lambda key: key[0] + key[1] + (0, 1.5, 1.75)[key[2]])
    half = np.stack([filters[key] / np.linalg.norm(filters[key]) for key in ordered[: num_channels // 2]], axis=-1)
    return np.concatenate([half, -half], axis=-1).astype(np.float32)


def _init_kernels(all_layers: list[Layer], key: jax.Array) -> Iterator[jax.Array]:
    """Yield the stem's filters, then He-normal (fan-in) kernels.

    The kernels are sliced from a single draw of random numbers, which compiles faster than several draws.

    In each kernel, the first output channels, as many as there are input channels, copy the input channels.
    """
    stem, *others = all_layers
    yield jnp.asarray(cosine_kernel(stem.K))
    sizes = [9 * layer.C * layer.K for layer in others]
    draws = jax.random.normal(key, (sum(sizes),), jnp.float32)
    start = 0
    for layer, size in zip(others, sizes, strict=True):
        kernel = (2.0 / (9 * layer.C)) ** 0.5 * draws[start : start + size].reshape(3, 3, layer.C, layer.K)
        copied = min(layer.C, layer.K)
        yield kernel.at[..., :copied].set(0.0).at[1, 1, :copied, :copied].set(jnp.eye(copied))
        start += size


def init(net: PooledConvNet, num_classes: int, key: jax.Array) -> tuple[Params, BatchStats]:
    """Return initial float32 parameters and batch statistics; their random values depend only on `key`.

    Stem: `cosine_kernel`, if it is learned. Other convolutions: the identity for as many outputs as there are inputs,
    He normal by fan-in for the rest. Norms: bias 0. Classifier: normal with standard deviation 1/√C, bias 0.
    """
    kernels_key, fc_key = jax.random.split(key)
    all_layers = layers(net)
    params: Params = {}
    stats: BatchStats = {}
    for layer, kernel in zip(all_layers, _init_kernels(all_layers, kernels_key), strict=True):
        zeros, ones = jnp.zeros(layer.K, jnp.float32), jnp.ones(layer.K, jnp.float32)
        learned = {"conv": {"kernel": kernel}} if layer.learns else {}
        _set(params, layer.path, learned | {"norm": {"bias": zeros}})
        _set(stats, layer.path, {"norm": {"mean": zeros, "var": ones}})
    C = all_layers[-1].K
    params["fc"] = {
        "kernel": C**-0.5 * jax.random.normal(fc_key, (C, num_classes), jnp.float32),
        "bias": jnp.zeros(num_classes, jnp.float32),
    }
    return params, stats


# Forward pass


def _apply_layer(
    layer: Layer, params: Params, batch_stats: BatchStats, x: jax.Array, train: bool
) -> tuple[jax.Array, BatchStats]:
    """Apply one layer to `x`; return its output and its new batch statistics."""
    kernel = _get(params, (*layer.path, "conv", "kernel")) if layer.learns else jnp.asarray(cosine_kernel(layer.K))
    with jax.named_scope("conv"):
        x = convolution(x, round_by_bits(kernel, x.dtype), stride=1, padding=((layer.margin, layer.margin),) * 2)
    if layer.pool:
        with jax.named_scope("pool"):
            x = max_pool(x, window=2, stride=2, padding=0)
    running = RunningStats(**_get(batch_stats, (*layer.path, "norm")))
    bias = BIAS_GAIN * _get(params, (*layer.path, "norm", "bias"))
    with jax.named_scope("norm"):
        x, moved = batch_norm(x, jnp.ones_like(bias), bias, running, train=train)
    with jax.named_scope("act"):
        return quick_gelu(x), {"norm": moved._asdict()}


def apply(
    net: PooledConvNet, params: Params, batch_stats: BatchStats, images: Images, *, train: bool, dtype: jnp.dtype
) -> tuple[Logits, BatchStats]:
    """Return logits for normalised images, and new batch statistics.

    Activations are in `dtype`.

    Raises:
        ValueError: if the images are smaller than `net.smallest_image`.
    """
    if min(images.shape[1:3]) < net.smallest_image:
        raise ValueError(
            f"images must have at least {net.smallest_image} × {net.smallest_image} px to be halved "
            f"{len(net.stages)} times, got {images.shape[1]} × {images.shape[2]}: use larger images"
        )
    new_stats: BatchStats = {}
    x = images.astype(dtype)
    for layer in layers(net):
        with jax.named_scope("/".join(layer.path)):
            x, stats = _apply_layer(layer, params, batch_stats, x, train)
        _set(new_stats, layer.path, stats)
    with jax.named_scope("head"):
        features = global_max_pool(x)
        return LOGIT_SCALE * dense(features, params["fc"]["kernel"], params["fc"]["bias"]), new_stats
