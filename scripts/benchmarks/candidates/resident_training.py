"""Code shared by the two training steps in jax: a model of the registry, SGD with momentum, a batch on the device."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from loopfeed.engine.objective.cross_entropy import cross_entropy
from loopfeed.models.registry import build_model, count_params

LEARNING_RATE, MOMENTUM = 1e-3, 0.9


class State(NamedTuple):
    """The state that a step changes: pytrees, and the loss of the last batch, float32 []."""

    params: Any
    batch_stats: Any
    opt_state: Any
    loss: jax.Array


def make_step(
    optimizer: optax.GradientTransformation,
    name: str,
    image_size: int,
    batch: int,
    num_classes: int,
    dtype: str = "float32",
) -> tuple[State, Callable[[State], State], dict[str, Any]]:
    """Return a fresh state, the step, and the facts that are compared between candidates.

    The batch is drawn from a fixed seed: float32 [batch, image_size, image_size, 3] and its labels. Activations and
    products are of `dtype`.
    """
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

    state = State(params, batch_stats, optimizer.init(params), jnp.zeros(()))
    return state, step, {"parameters": count_params(params)}


def versions() -> dict[str, str]:
    """Return the versions of the software that does the work."""
    return {package: version(package) for package in ("jax", "jaxlib")}
