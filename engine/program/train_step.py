"""The training step: one batch through augmentation, forward and backward pass, and an update if one is due.

Does not depend on the loops around it, or on the crossings.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from loopfeed.engine.crossing.infeed import Batch
from loopfeed.engine.program.augmented_batch import augment_batch
from loopfeed.engine.program.checked_model import model_keys
from loopfeed.engine.program.observed import SeenImages, observe_images
from loopfeed.engine.program.train_state import TrainModel, TrainState
from loopfeed.engine.scopes import FORWARD, LOSS, OPT_STEP, PUSH
from loopfeed.engine.updates.reach import UNKNOWN, Reach
from loopfeed.engine.updates.selection import join_frozen, keep_frozen, mark_frozen, split_frozen, unmark_frozen
from loopfeed.engine.updates.settings import CompiledSettings, RuntimeSettings
from loopfeed.engine.updates.skipping import choose
from loopfeed.engine.updates.update import Microbatch, Outcome, Weights, update_weights
from loopfeed.models.layers.batch_norm import normalising_over


def train_step(
    model: TrainModel,
    settings: CompiledSettings,
    state: TrainState,
    batch: Batch,
    learning_rate_factor: Float32[Array, ""],
    values: RuntimeSettings,
    reach: Reach = UNKNOWN,
) -> tuple[TrainState, Outcome, dict[str, jax.Array], SeenImages | None]:
    """Train on one batch: augment it, run the forward and backward passes, and make an update if one is due.

    Args:
        model: the model to train.
        settings: the compiled settings.
        state: the state before the batch.
        batch: the images and their labels.
        learning_rate_factor: multiplies the schedule's learning rate.
        values: the runtime settings.
        reach: bounds of the weights, see `update_weights`.

    Returns:
        The new state, the outcome of the batch, the metrics over the batches of the update so far, and the images that
        are observed.
    """
    images, mix_weight, at = augment_batch(settings, batch, state.batch_index, values)
    keys = {"key": model_keys(values.seed_words, at)} if settings.takes_key else {}

    trained, frozen = split_frozen(state.params, settings.frozen)
    given_stats = mark_frozen(state.batch_stats, settings.frozen) if settings.fixes_norms else state.batch_stats

    def loss_of(trained: Any) -> tuple[jax.Array, tuple[Any, Any]]:
        params = join_frozen(trained, frozen)
        with jax.named_scope(FORWARD), normalising_over(settings.norm_groups):
            outputs, batch_stats = model.apply(params, given_stats, images, train=True, **keys)
        with jax.named_scope(LOSS):
            loss = settings.objective.training_loss(
                outputs, batch.labels, mix_weight, values.smoothing, values.class_weights
            )
        return loss, (batch_stats, outputs)

    (loss, (batch_stats, outputs)), gradients = jax.value_and_grad(loss_of, has_aux=True)(trained)
    with jax.named_scope(LOSS):
        metrics = settings.objective.training_metrics(outputs, batch.labels)
    if settings.fixes_norms:
        batch_stats = unmark_frozen(batch_stats)
    batch_stats = keep_frozen(batch_stats, state.batch_stats, settings.frozen)
    hyperparams = values.hyperparams
    factor = hyperparams.learning_rate * learning_rate_factor
    with jax.named_scope(OPT_STEP):
        (params, batch_stats), update, outcome = update_weights(
            settings,
            Weights(state.params, state.batch_stats),
            state.update,
            Microbatch(loss, gradients, batch_stats),
            state.step,
            values._replace(hyperparams=hyperparams._replace(learning_rate=factor)),
            reach,
        )
    step = state.step + outcome.due.astype(jnp.int32)
    accumulated, finished = _finish_metrics(settings, state.metrics, metrics, outcome.due)
    state = state._replace(
        batch_index=state.batch_index + 1,
        step=step,
        params=params,
        batch_stats=batch_stats,
        update=update,
        metrics=accumulated,
    )
    labels = batch.labels if settings.objective.has_classes else None
    with jax.named_scope(PUSH):
        seen = observe_images(settings, images, labels, mix_weight, values.scale)
    return state, outcome, finished, seen


@jax.named_scope(LOSS)
def _finish_metrics(
    settings: CompiledSettings, accumulated: Any, metrics: dict[str, Any], due: Bool[Array, ""]
) -> tuple[Any, dict[str, jax.Array]]:
    """Return the states of the metrics to keep for the next batch, and the metrics over the update's batches so far."""
    objective = settings.objective
    if accumulated is not None:
        metrics = objective.merge_metrics(accumulated, metrics)
        accumulated = choose(due, objective.init_metrics(), metrics)
    metrics = settings.replicas.merge_if(due, objective.merge_metrics, metrics)
    return accumulated, objective.finish_metrics(metrics)
