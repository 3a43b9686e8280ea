"""EfficientNet (Tan and Le, 2019, arXiv:1905.11946), its Lite variant, and MobileNetV3 (arXiv:1905.02244), as timm's.

All are inverted residual blocks: a 1×1 convolution that widens, a depthwise one, squeeze-and-excitation (Hu et al.,
2018) in some, and a 1×1 convolution that narrows. Parameters are nested dictionaries keyed by timm's module names, so
that a path through them is a timm name (`blocks.1.0.conv_dw`). No dropout and no stochastic depth, as timm's defaults.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loopfeed.models.layers.activations import hard_silu, relu6, silu
from loopfeed.models.layers.batch_norm import RunningStats, batch_norm
from loopfeed.models.layers.bfloat16_bits import read_twice, round_by_bits, widen_by_bits
from loopfeed.models.layers.convolution import convolution
from loopfeed.models.layers.head import dense, global_average_pool, linear
from loopfeed.models.model import BatchStats, Images, Logits, Params, get_at, set_at

type Activation = Literal["relu", "relu6", "silu", "hard_silu"]

_ACTIVATIONS = {"relu": jax.nn.relu, "relu6": relu6, "silu": silu, "hard_silu": hard_silu}


class Row(NamedTuple):
    """A row of blocks of one shape: the first has the stride, and may have another number of channels at its input.

    Attributes:
        repeats: number of blocks.
        kernel: height and width of the depthwise kernel.
        stride: 1 or 2.
        expansion: the number of channels of the depthwise convolution divided by that of the block's input; with 1 the
            convolution that widens is left out.
        K: number of output channels.
        squeezes: whether blocks have squeeze-and-excitation.
        relu: whether their activations are ReLU instead of the network's.
    """

    repeats: int
    kernel: int
    stride: int
    expansion: float
    K: int
    squeezes: bool = False
    relu: bool = False


@dataclass(frozen=True)
class EfficientNet:
    """The architecture of one network of inverted residual blocks.

    Attributes:
        stem: number of channels of the 3×3 convolution with stride 2 at the beginning.
        stages: rows of blocks; a stage is a number in timm's names.
        activation: of all norms but the last of each block.
        late_features: number of channels of a 1×1 convolution with a norm before the pool (MobileNetV3), which the
            1×1 convolution to 1280 channels then follows without a norm; 0 if that one is before the pool.
        squeezed: what squeeze-and-excitation squeezes to a quarter: the channels of the block's "input", or the
            "hidden" ones, to a multiple of 8. The latter squeezes by ReLU, and its gate is a hard sigmoid.
        same_padding: whether padding follows TensorFlow's rule, with more on the high side where a stride needs it,
            instead of (kernel - 1) / 2 on all sides.
        epsilon: added to the variance in norms.
    """

    stem: int
    stages: tuple[tuple[Row, ...], ...]
    activation: Activation
    late_features: int = 0
    squeezed: Literal["input", "hidden"] = "input"
    same_padding: bool = False
    epsilon: float = 1e-5
    head: ClassVar[str] = "classifier"
    undecayed: ClassVar[tuple[str, ...]] = ()
    num_features: ClassVar[int] = 1280


class Conv(NamedTuple):
    """A convolution from C to K channels; with `depthwise`, each channel by itself."""

    kernel: int
    C: int
    K: int
    stride: int = 1
    depthwise: bool = False
    bias: bool = False


class Layer(NamedTuple):
    """A convolution with the names of itself and of its norm in the block, and the activation, None for none."""

    name: str
    norm: str
    conv: Conv
    activation: Activation | None


class Block(NamedTuple):
    """A block: its layers in order, the number of squeezed channels (0 if none), and whether a shortcut is added.

    The squeezing stands before the last layer.
    """

    layers: tuple[Layer, ...]
    squeezed: int
    hard: bool
    has_shortcut: bool


def multiple_of_8(channels: float) -> int:
    """Round to the nearest multiple of 8 that is at least 8 and at least nine tenths of a number of channels."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * channels else rounded + 8


def stem_layer(net: EfficientNet) -> Layer:
    """Return the convolution at the beginning."""
    return Layer("conv_stem", "bn1", Conv(3, 3, net.stem, 2), net.activation)


def blocks(net: EfficientNet) -> Iterator[tuple[str, Block]]:
    """Yield the path and the description of each block in order."""
    C = net.stem
    for stage, rows in enumerate(net.stages):
        index = 0
        for row in rows:
            for repeat in range(row.repeats):
                yield f"blocks.{stage}.{index}", _block(net, row, C, row.stride if repeat == 0 else 1)
                C, index = row.K, index + 1
    if net.late_features:
        last = Layer("conv", "bn1", Conv(1, C, net.late_features), net.activation)
        yield f"blocks.{len(net.stages)}.0", Block((last,), 0, False, False)


def _block(net: EfficientNet, row: Row, C: int, stride: int) -> Block:
    activation: Activation = "relu" if row.relu else net.activation
    hidden = C if row.expansion == 1 else multiple_of_8(C * row.expansion)
    layers = [("conv_dw", Conv(row.kernel, hidden, hidden, stride, depthwise=True))]
    if row.expansion == 1:
        layers += [("conv_pw", Conv(1, hidden, row.K))]
    else:
        layers = [("conv_pw", Conv(1, C, hidden)), *layers, ("conv_pwl", Conv(1, hidden, row.K))]
    named = tuple(
        Layer(name, f"bn{place}", conv, activation if place < len(layers) else None)
        for place, (name, conv) in enumerate(layers, 1)
    )
    hard = net.squeezed == "hidden"
    squeezed = (multiple_of_8(hidden / 4) if hard else round(C / 4)) if row.squeezes else 0
    return Block(named, squeezed, hard, stride == 1 and row.K == C)


def _last_channels(net: EfficientNet) -> int:
    return net.late_features or net.stages[-1][-1].K


def _head_conv(net: EfficientNet) -> Conv:
    return Conv(1, _last_channels(net), net.num_features, bias=bool(net.late_features))


def _squeezes(block: Block) -> dict[str, Conv]:
    hidden = block.layers[-1].conv.C
    found = {"conv_reduce": Conv(1, hidden, block.squeezed, bias=True)}
    return (found | {"conv_expand": Conv(1, block.squeezed, hidden, bias=True)}) if block.squeezed else {}


def count_products(net: EfficientNet, image_size: int, num_classes: int) -> int:
    """Return the multiply-accumulates of the convolutions and the classifier for one square image."""
    size, total = -(-image_size // 2), 0
    total += size**2 * _num_weights(stem_layer(net).conv)
    for _, block in blocks(net):
        for layer in block.layers:
            size = -(-size // layer.conv.stride)
            total += size**2 * _num_weights(layer.conv)
        total += sum(map(_num_weights, _squeezes(block).values()))
    total += (1 if net.late_features else size**2) * _num_weights(_head_conv(net))
    return total + net.num_features * num_classes


# Parameters


def _num_weights(conv: Conv) -> int:
    return conv.kernel**2 * (1 if conv.depthwise else conv.C) * conv.K


def _convs(net: EfficientNet) -> dict[str, Conv]:
    """Return all convolutions in order, by path."""
    found = {"conv_stem": stem_layer(net).conv}
    for path, block in blocks(net):
        found |= {f"{path}.{layer.name}": layer.conv for layer in block.layers}
        found |= {f"{path}.se.{name}": conv for name, conv in _squeezes(block).items()}
    return found | {"conv_head": _head_conv(net)}


def _norms(net: EfficientNet) -> dict[str, int]:
    """Return the numbers of channels of all norms, by path."""
    found = {"bn1": net.stem}
    for path, block in blocks(net):
        found |= {f"{path}.{layer.norm}": layer.conv.K for layer in block.layers}
    return found if net.late_features else found | {"bn2": net.num_features}


def init(net: EfficientNet, num_classes: int, key: jax.Array) -> tuple[Params, BatchStats]:
    """Return initial float32 parameters and batch statistics; their random values depend only on `key`.

    As TensorFlow's implementation and timm: kernels normal with variance 2 / fan-out, where a depthwise kernel's
    fan-out is that of one channel; classifier uniform within 1/√K; all biases 0. Norms: scale 1.
    """
    kernels_key, classifier_key = jax.random.split(key)
    params: Params = {}
    stats: BatchStats = {}
    convs = _convs(net)
    draws, start = jax.random.normal(kernels_key, (sum(map(_num_weights, convs.values())),), jnp.float32), 0
    for path, conv in convs.items():
        fan_out = conv.kernel**2 * (1 if conv.depthwise else conv.K)
        shape = conv.kernel, conv.kernel, 1 if conv.depthwise else conv.C, conv.K
        stop = start + _num_weights(conv)
        set_at(params, path, {"kernel": (2.0 / fan_out) ** 0.5 * draws[start:stop].reshape(shape)})
        if conv.bias:
            set_at(params, f"{path}.bias", jnp.zeros(conv.K, jnp.float32))
        start = stop
    for path, K in _norms(net).items():
        zeros, ones = jnp.zeros(K, jnp.float32), jnp.ones(K, jnp.float32)
        set_at(params, path, {"scale": ones, "bias": zeros})
        set_at(stats, path, {"mean": zeros, "var": ones})
    bound, shape_of_classifier = num_classes**-0.5, (net.num_features, num_classes)
    params["classifier"] = {
        "kernel": jax.random.uniform(classifier_key, shape_of_classifier, jnp.float32, -bound, bound),
        "bias": jnp.zeros(num_classes, jnp.float32),
    }
    return params, stats


# Forward pass


def _conv(same_padding: bool, x: jax.Array, params: Params, conv: Conv) -> jax.Array:
    margin = (conv.kernel - 1) // 2
    padding = "SAME" if same_padding else ((margin, margin),) * 2
    groups = conv.C if conv.depthwise else 1
    kernel = round_by_bits(params["kernel"], x.dtype)
    return convolution(x, kernel, stride=conv.stride, padding=padding, groups=groups)


class _Settings(NamedTuple):
    same_padding: bool
    epsilon: float
    train: bool


def _apply_layer(
    settings: _Settings, layer: Layer, params: Params, stats: BatchStats, x: jax.Array
) -> tuple[jax.Array, BatchStats]:
    """Apply a convolution, its norm and its activation, each in a scope of its name."""
    with jax.named_scope(layer.name):
        x = _conv(settings.same_padding, x, params[layer.name], layer.conv)
    with jax.named_scope(layer.norm):
        norm, running = params[layer.norm], RunningStats(**stats[layer.norm])
        is_relu = layer.activation == "relu"
        x, moved = batch_norm(
            x, norm["scale"], norm["bias"], running, train=settings.train, relu=is_relu, epsilon=settings.epsilon
        )
        if layer.activation is not None and not is_relu:
            x = _ACTIVATIONS[layer.activation](x)
    return x, {layer.norm: moved._asdict()}


@jax.named_scope("se")
def _squeeze_and_excite(hard: bool, params: Params, x: Float[Array, "B H W C"]) -> Float[Array, "B H W C"]:
    """Multiply each channel by a gate that two dense layers compute from the means of all channels."""
    squeezed = _dense_1x1(global_average_pool(x), params["conv_reduce"])
    gate = _dense_1x1(jax.nn.relu(squeezed) if hard else silu(squeezed), params["conv_expand"])
    wide = widen_by_bits(gate)
    share = jnp.clip(wide + 3.0, 0.0, 6.0) / 6.0 if hard else jax.nn.sigmoid(wide)
    return round_by_bits(widen_by_bits(x) * share[:, None, None], x.dtype)


def _dense_1x1(x: Float[Array, "B C"], params: Params) -> Float[Array, "B K"]:
    return linear(x, params["kernel"][0, 0], params["bias"])


# Traced once for all blocks of one shape.
@partial(jax.jit, static_argnums=(0, 1))
def _apply_block(
    settings: _Settings, block: Block, params: Params, stats: BatchStats, x: jax.Array
) -> tuple[jax.Array, BatchStats]:
    new_stats: BatchStats = {}
    x, shortcut = read_twice(x) if block.has_shortcut else (x, x)
    for layer in block.layers:
        if block.squeezed and layer is block.layers[-1]:
            x = _squeeze_and_excite(block.hard, params["se"], x)
        x, of_layer = _apply_layer(settings, layer, params, stats, x)
        new_stats |= of_layer
    if block.has_shortcut:
        x = round_by_bits(widen_by_bits(x) + widen_by_bits(shortcut), x.dtype)
    return x, new_stats


def apply(
    net: EfficientNet, params: Params, batch_stats: BatchStats, images: Images, *, train: bool, dtype: jnp.dtype
) -> tuple[Logits, BatchStats]:
    """Return logits for normalised images, and new batch statistics.

    Activations are in `dtype`.
    """
    settings = _Settings(net.same_padding, net.epsilon, train)
    with jax.named_scope("stem"):
        x, new_stats = _apply_layer(settings, stem_layer(net), params, batch_stats, images.astype(dtype))
    for path, block in blocks(net):
        _, stage, index = path.split(".")
        with jax.named_scope(f"stage{stage}"), jax.named_scope(index):
            x, of_block = _apply_block(settings, block, get_at(params, path), get_at(batch_stats, path), x)
        set_at(new_stats, path, of_block)
    with jax.named_scope("head"):
        if net.late_features:
            features = _ACTIVATIONS[net.activation](_dense_1x1(global_average_pool(x), params["conv_head"]))
        else:
            last = Layer("conv_head", "bn2", _head_conv(net), net.activation)
            x, of_head = _apply_layer(settings, last, params, batch_stats, x)
            features, new_stats = global_average_pool(x), new_stats | of_head
        return dense(features, **params["classifier"]), new_stats


_EFFICIENTNET_B0 = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


def efficientnet_b0() -> EfficientNet:
    """Return EfficientNet-B0."""
    stages = tuple((Row(*row, squeezes=True),) for row in _EFFICIENTNET_B0)
    return EfficientNet(stem=32, stages=stages, activation="silu")


def tf_efficientnet_lite0() -> EfficientNet:
    """Return EfficientNet-Lite0: without squeezing and with ReLU6, padded and normalised as in TensorFlow."""
    stages = tuple((Row(*row),) for row in _EFFICIENTNET_B0)
    return EfficientNet(stem=32, stages=stages, activation="relu6", same_padding=True, epsilon=1e-3)


def mobilenetv3_large_100() -> EfficientNet:
    """Return MobileNetV3-Large."""
    stages = (
        (Row(1, 3, 1, 1, 16, relu=True),),
        (Row(1, 3, 2, 4, 24, relu=True), Row(1, 3, 1, 3, 24, relu=True)),
        (Row(3, 5, 2, 3, 40, squeezes=True, relu=True),),
        (Row(1, 3, 2, 6, 80), Row(1, 3, 1, 2.5, 80), Row(2, 3, 1, 2.3, 80)),
        (Row(2, 3, 1, 6, 112, squeezes=True),),
        (Row(3, 5, 2, 6, 160, squeezes=True),),
    )
    return EfficientNet(stem=16, stages=stages, activation="hard_silu", late_features=960, squeezed="hidden")
