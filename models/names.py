"""The names of all networks, here and in timm, for code that must not import jax. `models/registry.py` defines them."""

import re
from collections.abc import Mapping
from types import MappingProxyType

TIMM_NAMES: Mapping[str, str | None] = MappingProxyType(
    {
        "resnet18": "resnet18",
        "resnet34": "resnet34",
        "resnet50": "resnet50",
        "resnet101": "resnet101",
        "resnet152": "resnet152",
        "resnet50-xlajl": None,
        "resnet50-d": "resnet50d",
        "convnext-tiny": "convnext_tiny",
        "vit-s16": "vit_small_patch16_224",
        "vit-b16": "vit_base_patch16_224",
        "efficientnet_b0": "efficientnet_b0",
        "tf_efficientnet_lite0": "tf_efficientnet_lite0",
        "mobilenetv3_large_100": "mobilenetv3_large_100",
        "resnet8": None,
        "resnet14": None,
        "resnet20": None,
        "resnet32": None,
        "resnet44": None,
        "resnet56": None,
        "resnet110": None,
        "convnet8": None,
        "convnet8-wide": None,
    }
)
"""The name in timm of each network, None where timm has no such network.

The weights of a network with a name in timm have the names and shapes of timm's (`models/torchvision_names.py`).
"""

MODEL_NAMES = tuple(TIMM_NAMES)
"""The names in the order of the registry, without "auto"."""


def find_timm_model(architecture: str) -> str | None:
    """Return the name of the network that timm calls by this name, None if there is no such network.

    Args:
        architecture: a name of timm, with or without the tag of its weights. The image size at the end of a vision
            transformer's name does not matter, as it is one network for all sizes.

    Example:
        >>> find_timm_model("resnet50d.ra2_in1k"), find_timm_model("vit_small_patch16_384"), find_timm_model("vgg11")
        ('resnet50-d', 'vit-s16', None)
    """
    wanted = _without_size(architecture.partition(".")[0])
    return next((name for name, timm in TIMM_NAMES.items() if timm is not None and _without_size(timm) == wanted), None)


def _without_size(architecture: str) -> str:
    return re.sub(r"(?<=_patch16)_\d+$", "", architecture)
