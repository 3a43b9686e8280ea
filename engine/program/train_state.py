"""The training state, and the protocol of a model.

Does not depend on the loops that carry the state, or on the host.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from loopfeed.engine.given_values import describe_given, traced
from loopfeed.engine.objective.patience import Patience, init_patience
from loopfeed.engine.updates.settings import CompiledSettings
from loopfeed.engine.updates.update import UpdateState, Weights, init_update


class TrainModel(Protocol):
    """The interface that the program requires of a model; `loopfeed.models.model.Model` implements it."""

    @property
    def init(self) -> Callable[[jax.Array], tuple[Any, Any]]:
        """The function that maps a PRNG key to (params, batch_stats), which are pytrees of arrays."""
        ...

    @property
    def apply(self) -> Callable[..., tuple[Any, Any]]:
        """The function that maps (params, batch_stats, images, train) to (logits, new batch_stats).

        Images are float32 [B, H, W, 3], train is a bool keyword, and logits are [B, K]. With a user-defined loss the
        outputs can be any pytree. If the function also has a parameter `key`, it is given PRNG keys [B] in training,
        one per image by (seed, position), and None in evaluations.
        """
        ...


class TrainState(NamedTuple):
    """The training state: everything on which later steps depend.

    Attributes:
        batch_index: index of the next batch, the number of batches taken; addresses the infeed and so the data.
        step: updates done; addresses the schedule.
        params, batch_stats: the model's pytrees.
        update: state of the updates, such as the optimizer's moments.
        owes_evaluation: whether an evaluation is due before the next pull; stays True until one is complete.
        num_evaluations: completed evaluations; addresses the evaluation infeed.
        top1: top-1 accuracy of the last evaluation as a fraction, 0 before the first.
        metrics: the states of the metrics over the batches gathered for the next update, None if each batch is an
            update or there are no metrics.
        patience: how long evaluations have not been better, None if they are not compared.
    """

    batch_index: Int32[Array, ""]
    step: Int32[Array, ""]
    params: Any
    batch_stats: Any
    update: UpdateState
    owes_evaluation: Bool[Array, ""]
    num_evaluations: Int32[Array, ""]
    top1: Float32[Array, ""]
    metrics: Any = None
    patience: Patience | None = None

    @property
    def evaluated(self) -> Weights:
        """The weights to evaluate and to save: the averaged weights if an average is kept, else the current ones."""
        return self.update.average or Weights(self.params, self.batch_stats)


def init_state(model: TrainModel, settings: CompiledSettings, key: jax.Array) -> TrainState:
    """Create the state before the first step, with parameters drawn from `key`."""
    params, batch_stats = init_weights(model, key)
    none, objective = jnp.zeros((), jnp.int32), settings.objective
    return TrainState(
        batch_index=none,
        step=none,
        params=params,
        batch_stats=batch_stats,
        update=init_update(settings, Weights(params, batch_stats)),
        owes_evaluation=jnp.zeros((), jnp.bool),
        num_evaluations=none,
        top1=jnp.zeros((), jnp.float32),
        metrics=objective.init_metrics() if settings.accumulates and objective.metrics else None,
        patience=None if settings.stop_metric is None else init_patience(),
    )


def init_weights(model: TrainModel, key: jax.Array) -> Weights:
    """Draw the initial weights of a model.

    Raises:
        ValueError: if `init` does not return a pair of pytrees of arrays.
    """
    name = name_of_model(model)
    with traced(f"init of {name}"):
        drawn = model.init(key)
    if isinstance(drawn, Mapping) and "params" in drawn:
        others = ", ".join(sorted(str(each) for each in drawn if each != "params")) or "nothing else"
        raise ValueError(
            f"init must return a tuple (params, batch_stats), but that of {name} returned Flax's variables, a dict of "
            f'params and {others}: return (variables["params"], variables.get("batch_stats", {{}})), or pass the '
            "module through loopfeed.engine.adapters.flax_linen"
        )
    if not isinstance(drawn, tuple | list) or len(drawn) != len(Weights._fields):
        raise ValueError(
            f"init must return a tuple (params, batch_stats), but that of {name} returned {describe_given(drawn)}: "
            "return (params, {}) if the model has no running statistics"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(Weights(*drawn)):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, int | float):
            where = jax.tree_util.keystr(path, simple=True, separator=".")
            raise ValueError(
                f"init must return pytrees of arrays, but that of {name} returned {type(leaf).__name__} as {where}: "
                "make it an array, or keep it out of the weights"
            )
    return Weights(*drawn)


def name_of_model(model: Any) -> str:
    """Return the name of a model in messages."""
    return str(getattr(model, "name", type(model).__name__))
