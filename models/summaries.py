"""What each network of the registry costs, counted from its description, without compiling or computing anything."""

from functools import partial
from typing import NamedTuple

import jax

from loopfeed.models.families.pooled_convnet import PooledConvNet
from loopfeed.models.families.resnet import ResNet
from loopfeed.models.registry import Network, count_params, family_of, init_network, networks

_LARGE = (224, 1000)
_SMALL = (32, 10)


class ModelSummary(NamedTuple):
    """One network at its usual size.

    Attributes:
        name: its name in the registry.
        image_size: height and width in pixels for which it is counted: 224 for ImageNet's networks, else 32.
        num_classes: number of classes for which it is counted: 1000 or 10.
        num_params: number of learnable scalars.
        num_products: multiply-accumulates of the forward pass of one image, in convolutions, dense layers and
            attention, as torchvision and timm count them; norms, activations and pools are left out.
    """

    name: str
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
    return ModelSummary(name, image_size, num_classes, count_params(params), num_products)
