"""Running counts that give the exact top-1 and top-5 accuracy and mean loss of an evaluation; each image counts once.

Owns the counts, the decisions on single images, and how a batch is added to them; the loop over batches is in
`loopfeed.engine.program.evaluate_split`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from loopfeed.engine.feed.batches import PADDING_LABEL
from loopfeed.engine.objective.losses import cross_entropy_loss
from loopfeed.engine.objective.metrics import NO_RANK, add_compensated
from loopfeed.engine.objective.objective import CROSS_ENTROPY, Objective, logits_of, losses_of


class Predictions(NamedTuple):
    """The decisions on the images evaluated so far, in their order, followed by rows that are not used yet.

    Attributes:
        labels: the labels of the images.
        classes: the classes of the T largest logits, largest first; equal logits rank in the order of their classes.
            -1 if a logit of the image is NaN.
        probabilities: their softmax probabilities.
        losses: the loss of each image.
    """

    labels: Int32[Array, "N"]
    classes: Int32[Array, "N T"]
    probabilities: Float32[Array, "N T"]
    losses: Float32[Array, "N"]


def empty_predictions(num_images: int, num_ranked: int) -> Predictions:
    """Return rows for at most `num_images` images (N), each with its first `num_ranked` classes (T)."""
    return Predictions(
        labels=jnp.full(num_images, PADDING_LABEL, jnp.int32),
        classes=jnp.full((num_images, num_ranked), -1, jnp.int32),
        probabilities=jnp.full((num_images, num_ranked), jnp.nan, jnp.float32),
        losses=jnp.full(num_images, jnp.nan, jnp.float32),
    )


def add_predictions(
    before: Predictions,
    num_before: Int32[Array, ""],
    logits: Float[Array, "B K"],
    labels: Int32[Array, "B"],
    losses: Float32[Array, "B"] | None,
) -> Predictions:
    """Add one batch; padding rows are left out.

    Args:
        before: the decisions so far.
        num_before: the number of images so far.
        logits: the logits; K is at least T.
        labels: PADDING_LABEL in padding rows.
        losses: None computes the softmax cross entropy.
    """
    logits = logits.astype(jnp.float32)
    total = jax.nn.logsumexp(logits, axis=1)
    if losses is None:
        losses = total - jnp.take_along_axis(logits, jnp.maximum(labels, 0)[:, None], axis=1)[:, 0]
    largest, classes = jax.lax.top_k(logits, before.classes.shape[1])
    is_nan = jnp.isnan(logits).any(axis=1, keepdims=True)
    is_image = labels != PADDING_LABEL
    # A row beyond the last is dropped.
    rows = jnp.where(is_image, num_before + jnp.cumsum(is_image, dtype=jnp.int32) - 1, len(before.labels))
    return Predictions(
        labels=before.labels.at[rows].set(labels, mode="drop"),
        classes=before.classes.at[rows].set(jnp.where(is_nan, -1, classes), mode="drop"),
        probabilities=before.probabilities.at[rows].set(jnp.exp(largest - total[:, None]), mode="drop"),
        losses=before.losses.at[rows].set(losses, mode="drop"),
    )


class ClassCounts(NamedTuple):
    """Counts per class over the batches evaluated so far.

    Attributes:
        num_images, top1: images of each class, and those of them whose class ranks first.
    """

    num_images: Int32[Array, "K"]
    top1: Int32[Array, "K"]


class Tally(NamedTuple):
    """Counts and summed loss over the batches evaluated so far.

    Attributes:
        num_images, top1, top5: all images, those whose class ranks first, and those whose class is among the first
            five; the last two are None if the labels are not class numbers. `top5` is negative if the network has fewer
            than six classes: it would be 1 whatever the network does. Read it with `count_top5`.
        loss_sum: the sum of the losses.
        loss_lost: the rounding error of `loss_sum`, as `add_compensated` keeps it.
        classes: the counts per class; if None, they are not compiled.
        metrics: the state of each metric by name.
        predictions: the decisions image by image; if None, they are not compiled.
    """

    num_images: Int32[Array, ""]
    top1: Int32[Array, ""] | None
    top5: Int32[Array, ""] | None
    loss_sum: Float32[Array, ""]
    loss_lost: Float32[Array, ""]
    classes: ClassCounts | None = None
    metrics: dict[str, Any] | None = None
    predictions: Predictions | None = None


def count_top5(top5: int | None) -> int | None:
    """Return `Tally.top5`, read from the device, if it says something about the network, else None."""
    return None if top5 is None or top5 < 0 else top5


def empty_tally(
    num_classes: int | None = None, objective: Objective = CROSS_ENTROPY, predictions: Predictions | None = None
) -> Tally:
    """Return a tally of zeros; with `num_classes` (K), it has counts per class; with `predictions`, it fills them."""
    none, zero = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
    each = None if num_classes is None else jnp.zeros(num_classes, jnp.int32)
    ranked = none if objective.has_classes else None
    return Tally(
        num_images=none,
        top1=ranked,
        top5=ranked,
        loss_sum=zero,
        loss_lost=zero,
        classes=None if each is None else ClassCounts(each, each),
        metrics=objective.init_metrics(),
        predictions=predictions,
    )


def tally_outputs(objective: Objective, tally: Tally, outputs: Any, words: Int32[Array, "B *words"]) -> Tally:
    """Add one batch to the tally.

    Args:
        objective: the loss, the form of the labels and the metrics.
        tally: the tally of the batches before.
        outputs: the model's outputs: logits [B, K], or what `objective.loss` expects.
        words: the labels as pulled.
    """
    labels, weights = objective.read_labels(words)
    losses = None
    if objective.has_classes:
        counted = tally_batch(tally, logits_of(outputs), words)
    else:
        counted = tally._replace(num_images=tally.num_images + (weights > 0).sum(dtype=jnp.int32))
    if objective.loss is not None or not objective.has_classes:
        loss = objective.loss or cross_entropy_loss
        losses = losses_of(loss, outputs, labels, weights)
        summed = jnp.where(weights > 0, losses * weights, 0).sum()
        loss_sum, loss_lost = add_compensated(tally.loss_sum, tally.loss_lost, summed)
        counted = counted._replace(loss_sum=loss_sum, loss_lost=loss_lost)
    if tally.predictions is not None:
        predictions = add_predictions(tally.predictions, tally.num_images, logits_of(outputs), words, losses)
        counted = counted._replace(predictions=predictions)
    return counted._replace(metrics=objective.update_metrics(tally.metrics, outputs, labels, weights))


def merge_tallies(objective: Objective, one: Tally, other: Tally) -> Tally:
    """Return the tally of the batches of both tallies, which have no predictions."""
    assert one.predictions is None
    loss_sum, loss_lost = add_compensated(one.loss_sum, one.loss_lost, other.loss_sum - other.loss_lost)
    counts = (one.num_images, one.top1, one.top5, one.classes)
    others = (other.num_images, other.top1, other.top5, other.classes)
    num_images, top1, top5, classes = jax.tree.map(jnp.add, counts, others)
    return Tally(
        num_images=num_images,
        top1=top1,
        top5=top5,
        loss_sum=loss_sum,
        loss_lost=loss_lost,
        classes=classes,
        metrics=objective.merge_metrics(one.metrics or {}, other.metrics or {}),
    )


def tally_batch(tally: Tally, logits: Float[Array, "B K"], labels: Int32[Array, "B"]) -> Tally:
    """Return the tally with one batch added.

    Equal logits rank in the order of their classes, as in `lax.top_k` and a stable sort. An image with a NaN logit, or
    with a label out of range, counts as wrong and makes the loss NaN. Padding rows have the label PADDING_LABEL.
    """
    logits = logits.astype(jnp.float32)
    is_image = labels != PADDING_LABEL
    classes = jnp.arange(logits.shape[1])
    own = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[:, None], axis=1)
    ahead = (logits > own) | ((logits == own) & (classes < labels[:, None]))
    is_unranked = jnp.isnan(logits).any(axis=1) | (labels >= logits.shape[1])
    rank = jnp.where(is_unranked, NO_RANK, ahead.sum(axis=1))
    losses = jax.nn.logsumexp(logits, axis=1) - own[:, 0]
    summed = jnp.where(is_image, losses, 0).sum()
    loss_sum, loss_lost = add_compensated(tally.loss_sum, tally.loss_lost, summed)
    is_first = is_image & (rank < 1)
    in_five = (is_image & (rank < 5)).sum(dtype=jnp.int32) if logits.shape[1] > 5 else jnp.int32(-1)
    assert tally.top1 is not None
    assert tally.top5 is not None
    if (counts := tally.classes) is not None:
        belongs = labels[:, None] == jnp.arange(len(counts.num_images))  # labels out of range are ignored
        counts = ClassCounts(
            num_images=counts.num_images + belongs.sum(axis=0, dtype=jnp.int32),
            top1=counts.top1 + (belongs & is_first[:, None]).sum(axis=0, dtype=jnp.int32),
        )
    return Tally(
        num_images=tally.num_images + is_image.sum(dtype=jnp.int32),
        top1=tally.top1 + is_first.sum(dtype=jnp.int32),
        top5=tally.top5 + in_five,
        loss_sum=loss_sum,
        loss_lost=loss_lost,
        classes=counts,
        metrics=tally.metrics,
    )
