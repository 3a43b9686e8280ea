"""How long evaluations have not been better than the best before: what a run with `stop_patience` counts on the device.

Does not depend on the loop.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from loopfeed.engine.objective.best_metric import BestMetric
from loopfeed.engine.objective.tally import Tally


class Patience(NamedTuple):
    """The count of a run.

    Attributes:
        best: the best score of all evaluations, see `score_of`; -infinity before the first that has one.
        num_worse: evaluations in a row, up to the last, that were not better than the best before.
    """

    best: Float32[Array, ""]
    num_worse: Int32[Array, ""]


def init_patience() -> Patience:
    """Return the count before the first evaluation."""
    return Patience(jnp.full((), -jnp.inf, jnp.float32), jnp.zeros((), jnp.int32))


def count_evaluation(
    patience: Patience, metric: BestMetric, tally: Tally, metrics: Mapping[str, jax.Array], done: Bool[Array, ""]
) -> Patience:
    """Return the count after an evaluation, the same if it is not `done`; an equal or undefined score is not better."""
    score = score_of(metric, tally, metrics)
    is_better = jnp.isfinite(score) & (score > patience.best)
    return Patience(
        best=jnp.where(done & is_better, score, patience.best),
        num_worse=jnp.where(done, jnp.where(is_better, 0, patience.num_worse + 1), patience.num_worse),
    )


def score_of(metric: BestMetric, tally: Tally, metrics: Mapping[str, jax.Array]) -> Float32[Array, ""]:
    """Return a number that is larger the better an evaluation was; NaN if it is undefined.

    Counts and the loss are summed over the images, of which every evaluation has as many: a quotient would be rounded.

    Args:
        metric: what is compared.
        tally: of all images of the evaluation.
        metrics: the values of the metrics by name.
    """
    counts = {"top1": tally.top1, "top5": tally.top5, "loss": tally.loss_sum}
    found = metrics[metric.name] if metric.is_own else counts[metric.name]
    if found is None:
        return jnp.full((), jnp.nan, jnp.float32)
    score = found.astype(jnp.float32)
    if metric.name == "top5":  # negative if there are too few classes, see `Tally`
        score = jnp.where(score < 0, jnp.nan, score)
    return score if metric.is_larger_better else -score
