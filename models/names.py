"""The names of all networks, for code that must not import jax. `loopfeed.models.registry` defines the networks."""

MODEL_NAMES = (
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnet50-xlajl",
    "resnet50-d",
    "convnext-tiny",
    "vit-s16",
    "vit-b16",
    "resnet8",
    "resnet14",
    "resnet20",
    "resnet32",
    "resnet44",
    "resnet56",
    "resnet110",
    "convnet8",
    "convnet8-wide",
)
"""The names in the order of the registry, without "auto"."""
