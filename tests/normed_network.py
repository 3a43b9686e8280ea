"""A small network with two batch norms, in float32 or float64, to compare runs on several devices."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from loopfeed import RunningStats, batch_norm
from loopfeed.models.layers.convolution import convolution
from loopfeed.models.layers.head import dense, global_average_pool

SIZE, CLASSES, CHANNELS = 8, 4, 8
SETTINGS: dict[str, Any] = {"synthetic": True, "image_size": SIZE, "num_classes": CLASSES, "batch": 32}


@dataclass(frozen=True)
class Normed:
    """Two convolutions, each with a norm and a ReLU, and a dense layer; float64 needs `jax_enable_x64`."""

    dtype: str = "float32"

    def init(self, key):
        keys = iter(jax.random.split(key, 3))
        shapes = {"first": (3, 3, 3, CHANNELS), "second": (3, 3, CHANNELS, CHANNELS), "last": (CHANNELS, CLASSES)}
        params = {name: 0.2 * jax.random.normal(next(keys), shape, self.dtype) for name, shape in shapes.items()}
        zeros, ones = jnp.zeros(CHANNELS, self.dtype), jnp.ones(CHANNELS, self.dtype)
        params |= {"scale": ones, "bias": zeros, "last_bias": jnp.zeros(CLASSES, self.dtype)}
        return params, {"first": RunningStats(zeros, ones), "second": RunningStats(zeros, ones)}

    def apply(self, params, batch_stats, images, train):
        # Fused with the conversion, the normalisation of the images would be rounded differently in each program.
        x = jax.lax.optimization_barrier(images).astype(self.dtype)
        moved = {}
        for name, running in batch_stats.items():
            x = convolution(x, params[name])
            x, moved[name] = batch_norm(x, params["scale"], params["bias"], running, train=train, relu=True)
        return dense(global_average_pool(x), params["last"], params["last_bias"]), moved
