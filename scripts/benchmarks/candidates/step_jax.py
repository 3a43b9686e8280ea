"""A training step in jax on a resident batch: by Loopfeed's layers in its loop, or as it is commonly written.

"loop": N updates in one `lax.while_loop`, N a runtime value, with kernels chosen by name, or oneDNN's wherever it can
be used ("auto"). "jit": a jitted function called from Python, whose convolutions, max-pools and norms are replaced,
only in this process, by `lax.conv_general_dilated`, `lax.reduce_window` and plain sums, with the gradients that jax
derives; only the last step is waited for. State is donated. The update is SGD with momentum, as every candidate makes
it; the engine's own also looks whether the gradient is finite, clips and decays.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from protocol import Channel, jax_versions, timed
from work_of_models import work_of

from loopfeed.engine.objective.losses import cross_entropy
from loopfeed.engine.updates.optim import trace
from loopfeed.models.families import pooled_convnet, resnet
from loopfeed.models.kernels import ONEDNN, XLA, MissingKernelsError, using_kernels
from loopfeed.models.kernels.onednn.library import load_library
from loopfeed.models.layers.batch_norm import EPSILON, RunningStats
from loopfeed.models.layers.batch_norm import MOMENTUM as SHARE
from loopfeed.models.registry import build_model, count_params

LEARNING_RATE, MOMENTUM = 1e-3, 0.9


class State(NamedTuple):
    """The state that a step changes: pytrees, and the loss of the last batch, float32 []."""

    params: Any
    batch_stats: Any
    opt_state: Any
    loss: jax.Array


def make_step(
    optimizer: optax.GradientTransformation, name: str, image_size: int, batch: int, num_classes: int, dtype: str
) -> tuple[State, Callable[[State], State], int]:
    """Return a fresh state, the step, and the number of parameters, for a batch drawn from a fixed seed."""
    model = build_model(name, num_classes=num_classes, image_size=image_size, dtype=dtype)
    params, batch_stats = jax.jit(model.init)(jax.random.key(0))
    random = np.random.default_rng(0)
    images = jnp.asarray(random.standard_normal((batch, image_size, image_size, 3), np.float32))
    targets = jax.nn.one_hot(random.integers(num_classes, size=batch), num_classes)

    def step(state: State) -> State:
        def loss_of(params: Any) -> tuple[jax.Array, Any]:
            logits, batch_stats = model.apply(params, state.batch_stats, images, train=True)
            return cross_entropy(logits, targets), batch_stats

        (loss, batch_stats), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), batch_stats, opt_state, loss)

    return State(params, batch_stats, optimizer.init(params), jnp.zeros(())), step, count_params(params)


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


def chosen_kernels(name: str) -> tuple[str, dict[str, str]]:
    """Return the name of the kernels, and the version of oneDNN if they are its."""
    if name == XLA:
        return XLA, {}
    try:
        return ONEDNN, {"onednn": load_library().version}
    except MissingKernelsError:
        if name != "auto":
            raise
        return XLA, {}


def main(kind: str, kernels: str, dtype: str, name: str, image_size: int, batch: int, num_classes: int) -> None:
    """Serve `batch` images a unit."""
    channel = Channel()
    chosen, library_versions = (XLA, dict[str, str]()) if kind == "jit" else chosen_kernels(kernels)
    flop = work_of(name, image_size, num_classes).image_flop
    if kind == "jit":
        for module, layer, replacement in replaced_layers():
            setattr(module, layer, replacement)
    moments = trace(jnp.float32(MOMENTUM), nesterov=False, applied=jnp.bool_(True))
    ours = optax.chain(moments, optax.scale(-LEARNING_RATE))
    optimizer = optax.sgd(LEARNING_RATE, momentum=MOMENTUM) if kind == "jit" else ours
    with using_kernels(chosen):
        state, step, num_params = make_step(optimizer, name, image_size, batch, num_classes, dtype)
        one_step = jax.jit(step, donate_argnums=0)

        @partial(jax.jit, donate_argnums=0)
        def many_steps(state: State, num_steps: jax.Array) -> State:
            def body(carry: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
                return carry[0] + 1, step(carry[1])

            return lax.while_loop(lambda carry: carry[0] < num_steps, body, (jnp.int32(0), state))[1]

        def work(num_units: int) -> None:
            nonlocal state
            if kind == "loop":
                state = many_steps(state, jnp.int32(num_units))
            else:
                for _ in range(num_units):
                    state = one_step(state)
            jax.block_until_ready(state)

        work(1)
        facts = {"parameters": num_params, "first loss": round(float(state.loss), 5), "GFLOP an image": flop / 1e9}
        run = timed(work)

        def run_and_count(num_units: int) -> tuple[float, dict[str, float]]:
            seconds = run(num_units)
            return seconds, {"GFLOP/s": flop * batch * num_units / seconds / 1e9}

        channel.ready(batch, versions=jax_versions() | library_versions, facts=facts | {"kernels": chosen})
        channel.serve(run_and_count)


if __name__ == "__main__":
    kind, kernels, dtype, name, *sizes = sys.argv[1:]
    main(kind, kernels, dtype, name, *map(int, sizes))
