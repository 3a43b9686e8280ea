"""Registry of models by name: what each costs, and the image size on which its parameters depend."""

import difflib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from loopfeed.models.families import convnext, efficientnet, pooled_convnet, resnet, vision_transformer
from loopfeed.models.families.convnext import ConvNeXt
from loopfeed.models.families.efficientnet import EfficientNet
from loopfeed.models.families.pooled_convnet import PooledConvNet
from loopfeed.models.families.resnet import ResNet
from loopfeed.models.families.vision_transformer import (
    POSITIONS,
    VisionTransformer,
    bicubic_weights,
    size_of_positions,
)
from loopfeed.models.model import BatchStats, Images, Logits, Model, Params
from loopfeed.models.names import MODEL_NAMES, TIMM_NAMES, find_timm_model

type Network = ResNet | PooledConvNet | VisionTransformer | ConvNeXt | EfficientNet
"""The architecture of a network. Its `head` is the path of the classifier, `undecayed` as in `Model`."""

_FAMILIES = MappingProxyType(
    {
        ResNet: resnet,
        PooledConvNet: pooled_convnet,
        VisionTransformer: vision_transformer,
        ConvNeXt: convnext,
        EfficientNet: efficientnet,
    }
)


def family_of(net: Network) -> ModuleType:
    """Return the module with the functions `init`, `apply` and `count_products` of a network."""
    return _FAMILIES[type(net)]


def _cifar(depth: int) -> ResNet:
    """Return the ResNet of He et al., section 4.2: 6n+2 layers, with n two-layer blocks of each width (16, 32, 64)."""
    return ResNet(stages=((depth - 2) // 6,) * 3, width=16, block="basic", stem="cifar")


def _basic(*stages: int) -> ResNet:
    return ResNet(stages=stages, width=64, block="basic", stem="imagenet")


def _bottleneck(*stages: int) -> ResNet:
    return ResNet(stages=stages, width=64, block="bottleneck", stem="imagenet", stride_on="conv2")


def networks() -> dict[str, Network]:
    """Return the architectures of all networks by name."""
    known: dict[str, Network] = {**_imagenet_resnets(), **_imagenet_timm(), **_cifar_resnets()}
    # An image of 32 px takes 65 and 118 million multiplications. The wide one has the channels of Jordan's network and,
    # like it, a fixed stem: in six epochs on CIFAR-10's JPEG files, PyTorch reached 88.5 % with a fixed stem and 87.7 %
    # with a learned one.
    return known | {
        "convnet8": PooledConvNet(stem=24, stages=(64, 128, 256)),
        "convnet8-wide": PooledConvNet(stem=24, stages=(64, 256, 256), stem_learns=False),
    }


def _cifar_resnets() -> dict[str, ResNet]:
    return {f"resnet{depth}": _cifar(depth) for depth in (8, 14, 20, 32, 44, 56, 110)}


def _imagenet_resnets() -> dict[str, ResNet]:
    return {
        "resnet18": _basic(2, 2, 2, 2),
        "resnet34": _basic(3, 4, 6, 3),
        "resnet50": _bottleneck(3, 4, 6, 3),
        "resnet101": _bottleneck(3, 4, 23, 3),
        "resnet152": _bottleneck(3, 8, 36, 3),
        "resnet50-xlajl": ResNet(
            stages=(3, 4, 6, 3),
            width=64,
            block="bottleneck",
            stem="imagenet",
            stem_norm=False,
            conv_bias=True,
            stride_on="conv3",
        ),
        "resnet50-d": ResNet(
            stages=(3, 4, 6, 3), width=64, block="bottleneck", stem="deep", stride_on="conv2", pooled_shortcut=True
        ),
    }


def _imagenet_timm() -> dict[str, Network]:
    return {
        "convnext-tiny": ConvNeXt(depths=(3, 3, 9, 3), widths=(96, 192, 384, 768)),
        "vit-s16": VisionTransformer(width=384, depth=12, num_heads=6),
        "vit-b16": VisionTransformer(width=768, depth=12, num_heads=12),
        "efficientnet_b0": efficientnet.efficientnet_b0(),
        "tf_efficientnet_lite0": efficientnet.tf_efficientnet_lite0(),
        "mobilenetv3_large_100": efficientnet.mobilenetv3_large_100(),
    }


class UnknownModelError(ValueError):
    """Error raised for an unknown model name. `rule` is the message without its first word, "model"."""

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self.rule = rule

    def __str__(self) -> str:
        return f"model {self.rule}"


def model_names() -> tuple[str, ...]:
    """Return the names that `build_model` accepts besides "auto".

    Example:
        >>> {"resnet50", "convnext-tiny", "vit-s16"} <= set(model_names())
        True
    """
    return MODEL_NAMES


def find_network(name: str) -> Network:
    """Return the architecture of the network with this name.

    Raises:
        UnknownModelError: a ValueError; the name is unknown. The message says where they are listed.
    """
    known = networks()
    if name not in known:
        # Of a name of weights in timm, `timm/resnet18.a1_in1k`, the network is the part before the dot.
        architecture = name.rpartition("/")[2].partition(".")[0]
        timm = None if architecture == name else find_timm_model(architecture)
        near = [timm] if timm else difflib.get_close_matches(architecture.lower(), known, n=3)
        suggestion = f"did you mean {' or '.join(near)}?" if near else "run-train --list-models describes them"
        if timm:
            suggestion += " Weights of timm are given beside the model, with --init-from hf-hub:OWNER/NAME"
        raise UnknownModelError(
            "must be auto or a name that loopfeed.model_names() returns and run-train --help lists, "
            f"got {name!r}: {suggestion}"
        )
    return known[name]


def build_model(name: str, *, num_classes: int, image_size: int, dtype: DTypeLike = jnp.float32) -> Model:
    """Build the model with this name.

    Args:
        name: one of `model_names()`, or "auto": "resnet50" for images of at least 128 pixels, "resnet8" below.
        num_classes: length of the logits, at least 1.
        image_size: height and width in pixels, used by "auto" and the vision transformers, which make their position
            embedding for it. All networks accept images of other sizes; a vision transformer interpolates.
        dtype: dtype of activations and products; parameters, statistics and logits are float32.

    Raises:
        ValueError: if the name is unknown (the message says where all are), a number is below 1, or the image size
            is not a multiple of a vision transformer's patches.

    Example:
        >>> network = build_model("resnet8", num_classes=10, image_size=32)
        >>> params, batch_stats = jax.eval_shape(network.init, jax.random.key(0))
        >>> params["fc"]["kernel"].shape
        (64, 10)
    """
    if num_classes < 1 or image_size < 1:
        raise ValueError(f"num_classes and image_size must be at least 1, got {num_classes} and {image_size}")
    if name == "auto":
        name = "resnet50" if image_size >= 128 else "resnet8"
    net = at_image_size(find_network(name), image_size)
    forward = partial(family_of(net).apply, net)

    def apply(params: Params, batch_stats: BatchStats, images: Images, train: bool) -> tuple[Logits, BatchStats]:
        return forward(params, batch_stats, images, train=train, dtype=jnp.dtype(dtype))

    return Model(name, partial(init_network, net, num_classes), apply, net.undecayed)


def at_image_size(net: Network, image_size: int) -> Network:
    """Return a network for images of this height and width; only a vision transformer depends on it.

    Raises:
        ValueError: if the image size is not a multiple of its patches.
    """
    return replace(net, image_size=image_size) if isinstance(net, VisionTransformer) else net


def init_network(net: Network, num_classes: int, key: jax.Array) -> tuple[Params, BatchStats]:
    """Return initial float32 parameters and batch statistics of a network; their random values depend only on `key`."""
    return family_of(net).init(net, num_classes, key)


def count_params(params: Params) -> int:
    """Return the total number of learnable scalars in `params`.

    Example:
        >>> network = build_model("resnet50", num_classes=1000, image_size=224)
        >>> count_params(jax.eval_shape(network.init, jax.random.key(0))[0])  # as torchvision's
        25557032
    """
    return sum(leaf.size for leaf in jax.tree.leaves(params))


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
    weights = bicubic_weights(old, new)
    grid = positions[0, 1:].reshape(old, old, -1)
    resized = np.einsum("ph,qw,hwc->pqc", weights, weights, grid, optimize=True).reshape(1, new**2, -1)
    return params | {POSITIONS: np.concatenate([positions[:, :1], resized], axis=1).astype(np.float32)}


_LARGE = (224, 1000)
_SMALL = (32, 10)


class ModelSummary(NamedTuple):
    """One network at its usual size.

    Attributes:
        name: its name in the registry.
        timm_name: its name in timm, None if timm has no such network.
        image_size: height and width in pixels for which it is counted: 224 for ImageNet's networks, else 32.
        num_classes: number of classes for which it is counted: 1000 or 10.
        num_params: number of learnable scalars.
        num_products: multiply-accumulates of the forward pass of one image, in convolutions, dense layers and
            attention, as torchvision and timm count them; norms, activations and pools are left out.
    """

    name: str
    timm_name: str | None
    image_size: int
    num_classes: int
    num_params: int
    num_products: int


def summarise_models() -> tuple[ModelSummary, ...]:
    """Return a summary of every network of the registry, in its order."""
    return tuple(_summarise(name, net) for name, net in networks().items())


def _summarise(name: str, net: Network) -> ModelSummary:
    is_small = isinstance(net, PooledConvNet) or (isinstance(net, ResNet) and net.stem == "cifar")
    image_size, num_classes = _SMALL if is_small else _LARGE
    params, _ = jax.eval_shape(partial(init_network, net, num_classes), jax.random.key(0))
    num_products = family_of(net).count_products(net, image_size, num_classes)
    return ModelSummary(name, TIMM_NAMES[name], image_size, num_classes, count_params(params), num_products)
