"""The same training step as commonly written: a jitted function called from Python, with XLA's own convolutions.

Convolutions, max-pools and batch norms of the models are replaced, only in this process, by
`lax.conv_general_dilated`, `lax.reduce_window` and plain sums, with the gradients that jax derives. State is donated;
only the last step is waited for.
"""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from protocol import Channel, timed
from resident_training import LEARNING_RATE, MOMENTUM, make_step, versions

from loopfeed.models.families import pooled_convnet, resnet
from loopfeed.models.layers.batch_norm import EPSILON, RunningStats
from loopfeed.models.layers.batch_norm import MOMENTUM as SHARE


def lax_convolution(
    x: jax.Array, kernel: jax.Array, *, stride: Any = 1, padding: Any = "SAME", bias: jax.Array | None = None
) -> jax.Array:
    """Replace `loopfeed.models.layers.convolution.convolution`."""
    strides = (stride, stride) if isinstance(stride, int) else stride
    y = lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return y if bias is None else y + bias


def lax_max_pool(x: jax.Array, *, window: int = 3, stride: int = 2, padding: int = 1) -> jax.Array:
    """Replace `loopfeed.models.layers.pooling.max_pool`."""
    margins = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, window, window, 1), (1, stride, stride, 1), margins)


def plain_batch_norm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    running: RunningStats,
    *,
    train: bool,  # noqa: ARG001 - nothing is evaluated
    relu: bool = False,
) -> tuple[jax.Array, RunningStats]:
    """Replace `loopfeed.models.layers.batch_norm.batch_norm`, computed in one pass, as by default in Flax."""
    mean = x.mean((0, 1, 2))
    var = jnp.maximum(jnp.square(x).mean((0, 1, 2)) - jnp.square(mean), 0)
    y = (x - mean) * (scale * lax.rsqrt(var + EPSILON)) + bias
    count = x.size // x.shape[3]
    moved = RunningStats(
        (1 - SHARE) * running.mean + SHARE * mean, (1 - SHARE) * running.var + SHARE * var * count / max(count - 1, 1)
    )
    return jax.nn.relu(y) if relu else y, moved


def plain_relu(x: jax.Array, shortcut: jax.Array | None = None) -> jax.Array:
    """Replace `loopfeed.models.layers.batch_norm.stored_relu`."""
    return jax.nn.relu(x if shortcut is None else x + shortcut)


def replaced_layers() -> Iterator[tuple[ModuleType, str, Callable[..., Any]]]:
    """Yield each module with networks, the name of a layer that it uses, and the layer in its place."""
    for module in (resnet, pooled_convnet):
        yield module, "convolution", lax_convolution
        yield module, "max_pool", lax_max_pool
        yield module, "batch_norm", plain_batch_norm
    yield resnet, "stored_relu", plain_relu


def main(name: str, image_size: int, batch: int, num_classes: int) -> None:
    """Serve `batch` images a unit."""
    channel = Channel()
    for module, layer, replacement in replaced_layers():
        setattr(module, layer, replacement)
    optimizer = optax.sgd(LEARNING_RATE, momentum=MOMENTUM)
    state, step, facts = make_step(optimizer, name, image_size, batch, num_classes)
    train = jax.jit(step, donate_argnums=0)

    def work(num_units: int) -> None:
        nonlocal state
        for _ in range(num_units):
            state = train(state)
        jax.block_until_ready(state)

    work(1)
    facts["first loss"] = round(float(state.loss), 5)
    channel.ready(batch, versions=versions(), facts=facts)
    channel.serve(timed(work))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
