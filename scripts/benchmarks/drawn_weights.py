"""Weights of a network that nobody has trained, for measurements and tests of what reads or exports weights."""

from pathlib import Path

import jax

from loopfeed.engine.records.weights import name_tensors, weights_file
from loopfeed.engine.records.weights_metadata import describe_weights
from loopfeed.models.registry import build_model
from loopfeed.preprocess.shards.classes import ImageClass


def write_drawn_weights(path: Path, name: str, *, image_size: int = 32, num_classes: int = 3) -> Path:
    """Write a file with the initial weights of a network of the registry, its classes and a resize rule; return it."""
    model = build_model(name, num_classes=num_classes, image_size=image_size)
    params, batch_stats = jax.jit(model.init)(jax.random.key(0))
    described = describe_weights(
        model=name,
        height=image_size,
        width=image_size,
        mean=(0.5, 0.4, 0.3),
        std=(0.2, 0.3, 0.1),
        num_classes=num_classes,
        classes=[ImageClass(f"n{number}", f"name {number}") for number in range(num_classes)],
        resize_rule={"size": image_size, "resize": round(image_size * 8 / 7), "resample": "bilinear"},
    )
    path.write_bytes(weights_file(name_tensors(name, params, batch_stats), described)[0])
    return path
