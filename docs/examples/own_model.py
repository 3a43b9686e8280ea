"""A model of your own in plain JAX: two pure functions, trained on packed shards."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopfeed import TrainConfig, convolution, pack_demo, train

NUM_CLASSES = 10


# %% The parameters: any pytree of arrays. The second value is for running statistics;
# this model has none.
def init(key: jax.Array) -> tuple[Any, Any]:
    """Return (params, batch_stats)."""
    first, second, dense = jax.random.split(key, 3)
    params = {
        "first": jax.random.normal(first, (3, 3, 3, 16)) * (2 / 27) ** 0.5,
        "second": jax.random.normal(second, (3, 3, 16, 32)) * (2 / 144) ** 0.5,
        "dense": jax.random.normal(dense, (8 * 8 * 32, NUM_CLASSES)) * 0.02,
        "bias": jnp.zeros(NUM_CLASSES),
    }
    return params, {}


# %% The network. Images arrive normalised, float32 [B, H, W, 3]. `loopfeed.convolution`
# computes the same as `lax.conv_general_dilated`, and is fast inside the loop on a CPU.
def apply(
    params: Any, batch_stats: Any, images: jax.Array, train: bool
) -> tuple[jax.Array, Any]:
    """Return (logits [B, K], batch_stats)."""
    del train  # nothing here differs between training and evaluation
    x = jax.nn.relu(convolution(images, params["first"], stride=2))
    x = jax.nn.relu(convolution(x, params["second"], stride=2))
    return x.reshape(len(x), -1) @ params["dense"] + params["bias"], batch_stats


class Net(NamedTuple):
    """What `train` takes for a model: any object with `init` and `apply`."""

    init: Callable[..., Any]
    apply: Callable[..., Any]


# %% Train, with the optimiser, schedule, augmentation, evaluation and snapshots of the
# engine, as for its own models.
if not Path("data/demo").exists():
    pack_demo("data/demo")
config = TrainConfig(
    data="data/demo",
    steps=120,
    batch=64,
    optimizer="adamw",
    learning_rate=0.01,
    schedule="cosine",
    flip=0.5,
    run_dir="runs/own-model",
)
result = train(config, model=Net(init, apply))

print(f"loss {result.losses[0]:.3f} → {result.losses[-1]:.3f}")
print(f"top-1 {result.evaluations[-1].top1:.1%}")
assert result.losses[-20:].mean() < 0.9 * result.losses[:20].mean()
assert result.params["dense"].shape == (2048, NUM_CLASSES)

# %% A run with a model of your own is resumed with that model; without it the resume is
# refused.
resumed = replace(config, steps=130, resume=True)
try:
    train(resumed)
    raise AssertionError("a resume without the model must be refused")
except ValueError as error:
    print(error)

assert train(resumed, model=Net(init, apply)).steps_done == 130
