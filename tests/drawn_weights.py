"""A file with drawn weights of a network."""

import jax

from loopfeed.engine.records.weights import name_tensors, weights_file
from loopfeed.engine.records.weights_metadata import describe_weights
from loopfeed.models.registry import build_model
from loopfeed.preprocess.shards.classes import ImageClass


def write_weights(folder, name):
    """Write a file with the weights of a network for images of 32 px, three classes and a resize rule."""
    model = build_model(name, num_classes=3, image_size=32)
    params, batch_stats = jax.jit(model.init)(jax.random.key(0))
    described = describe_weights(
        model=name,
        height=32,
        width=32,
        mean=(0.5, 0.4, 0.3),
        std=(0.2, 0.3, 0.1),
        num_classes=3,
        classes=[ImageClass(f"n{number}", f"name {number}") for number in range(3)],
        resize_rule={"size": 32, "resize": 37, "resample": "bilinear"},
    )
    path = folder / f"{name}.safetensors"
    path.write_bytes(weights_file(name_tensors(name, params, batch_stats), described)[0])
    return path
