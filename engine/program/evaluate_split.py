"""The loop over the batches of a split that is evaluated, inside the program."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, Shaped

from loopfeed.engine.crossing.infeed import Batch, BatchInfeed
from loopfeed.engine.crossing.token import Token
from loopfeed.engine.images.augment import prepare_for_evaluation
from loopfeed.engine.images.unpack import PixelScale
from loopfeed.engine.objective.tally import Tally, empty_tally, merge_tallies, tally_outputs
from loopfeed.engine.program.pulls import for_each, pull_part
from loopfeed.engine.program.train_state import TrainModel
from loopfeed.engine.scopes import LOSS, PREDICT, UNPACK
from loopfeed.engine.updates.settings import CompiledSettings
from loopfeed.engine.updates.update import Weights


class _SplitCarry(NamedTuple):
    """The carry of the loop over the pulls of a split.

    Attributes:
        token: the token of the last crossing.
        batch: batches counted.
        stopped: whether the host requested a stop.
        tally: the tally so far.
    """

    token: Token
    batch: Int32[Array, ""]
    stopped: Bool[Array, ""]
    tally: Tally


def evaluate_split(
    model: TrainModel,
    settings: CompiledSettings,
    weights: Weights,
    infeed: BatchInfeed,
    token: Token,
    first_batch: Int32[Array, ""],
    num_batches: Int32[Array, ""],
    scale: PixelScale,
    *,
    start: Tally | None = None,
) -> tuple[Token, Tally, Bool[Array, ""]]:
    """Evaluate a model on a whole split, using the running statistics in `weights`.

    Args:
        model: the model to evaluate.
        settings: the compiled settings; those used are the image size and whether to evaluate mirror images too.
        weights: the model's parameters and statistics.
        infeed: infeed of the split's batches.
        token: the token of the crossing before.
        first_batch: address of the first batch.
        num_batches: number of batches.
        scale: mean and standard deviation of the pixels.
        start: the tally before the first batch; None is an empty tally without classes.

    Returns:
        The token of the last crossing, the tally, and whether it is incomplete because the host requested a stop.
    """

    def continues(carry: _SplitCarry) -> jax.Array:
        return (carry.batch < num_batches) & ~carry.stopped

    def one_pull(carry: _SplitCarry) -> _SplitCarry:
        batch = carry.batch
        num_wanted = jnp.minimum(num_batches - batch, infeed.chunk)
        token, pulled = pull_part(infeed, carry.token, first_batch + batch, num_wanted, settings.replicas)
        token, tally, num_taken = for_each(infeed, token, pulled, count, carry.tally)
        return _SplitCarry(token, batch + num_taken, num_taken < num_wanted, tally)

    def count(tally: Tally, batch: Batch) -> Tally:
        images = prepare_for_evaluation(settings.evaluated_augmentation, batch.pixels, scale, batch.extents)
        if settings.eval_mirror:
            with jax.named_scope(UNPACK):
                images = jnp.concatenate([images, images[:, :, ::-1]])
        with jax.named_scope(PREDICT):
            logits, _ = model.apply(weights.params, weights.batch_stats, images, train=False)
            if settings.eval_mirror:
                logits = jax.tree.map(mean_of_halves, logits)
        with jax.named_scope(LOSS):
            return tally_outputs(settings.evaluated_objective, tally, logits, batch.labels)

    empty = start or empty_tally(objective=settings.evaluated_objective)
    before = _SplitCarry(token, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.bool), empty)
    after = lax.while_loop(continues, one_pull, before)
    with jax.named_scope(LOSS):
        tally = settings.replicas.merge(partial(merge_tallies, settings.evaluated_objective), after.tally)
    return after.token, tally, after.stopped


def mean_of_halves(outputs: Shaped[Array, "twice *rest"]) -> Float32[Array, "twice//2 *rest"]:
    """Return the mean of the outputs for images and for their mirror images."""
    return outputs.astype(jnp.float32).reshape(2, len(outputs) // 2, *outputs.shape[1:]).mean(0)
