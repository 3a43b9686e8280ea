"""Running counts that give the exact top-1 and top-5 accuracy and mean loss of an evaluation; each image counts once.

Owns the counts and how a batch is added to them; the loop over batches is in `engine.program.loop`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from engine.feed.batches import PADDING_LABEL

_NO_RANK = 2**31 - 1


class ClassCounts(NamedTuple):
    """Counts per class over the batches evaluated so far.

    Attributes:
        num_images, top1: int32 [K], images of each class, and those of them whose class ranks first.
    """

    num_images: jax.Array
    top1: jax.Array


class Tally(NamedTuple):
    """Counts and summed loss over the batches evaluated so far.

    Attributes:
        num_images, top1, top5: int32 [], all images, those whose class ranks first, and those whose class is among the
            first five.
        loss_sum: float32 [], in nats.
        loss_lost: float32 [], the rounding error of `loss_sum` (Kahan summation, 1965), which would otherwise grow with
            every image.
        classes: the counts per class; if None, they are not compiled.
    """

    num_images: jax.Array
    top1: jax.Array
    top5: jax.Array
    loss_sum: jax.Array
    loss_lost: jax.Array
    classes: ClassCounts | None = None


def empty_tally(num_classes: int | None = None) -> Tally:
    """Return a tally of zeros; if `num_classes` (K) is given, the tally also has counts per class."""
    none, zero = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
    each = None if num_classes is None else jnp.zeros(num_classes, jnp.int32)
    return Tally(none, none, none, zero, zero, None if each is None else ClassCounts(each, each))


def tally_batch(tally: Tally, logits: jax.Array, labels: jax.Array) -> Tally:
    """Return the tally with one batch added.

    Equal logits rank in the order of their classes, as in `lax.top_k` and a stable sort. An image with a NaN logit, or
    with a label out of range, counts as wrong and makes the loss NaN.

    Args:
        tally: tally of the previous batches.
        logits: [B, K] of any float dtype.
        labels: int32 [B], PADDING_LABEL in padding rows.
    """
    logits = logits.astype(jnp.float32)
    is_image = labels != PADDING_LABEL
    classes = jnp.arange(logits.shape[1])
    own = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[:, None], axis=1)
    ahead = (logits > own) | ((logits == own) & (classes < labels[:, None]))
    is_unranked = jnp.isnan(logits).any(axis=1) | (labels >= logits.shape[1])
    rank = jnp.where(is_unranked, _NO_RANK, ahead.sum(axis=1))
    losses = jax.nn.logsumexp(logits, axis=1) - own[:, 0]
    added = jnp.where(is_image, losses, 0).sum() - tally.loss_lost
    loss_sum = tally.loss_sum + added
    is_first = is_image & (rank < 1)
    return Tally(
        num_images=tally.num_images + is_image.sum(dtype=jnp.int32),
        top1=tally.top1 + is_first.sum(dtype=jnp.int32),
        top5=tally.top5 + (is_image & (rank < 5)).sum(dtype=jnp.int32),
        loss_sum=loss_sum,
        loss_lost=(loss_sum - tally.loss_sum) - added,
        classes=None if tally.classes is None else _count_classes(tally.classes, is_first, labels),
    )


def _count_classes(counts: ClassCounts, is_first: jax.Array, labels: jax.Array) -> ClassCounts:
    """Return the counts with a batch (bool [B] `is_first`, int32 [B] `labels`) added; ignore out-of-range labels."""
    belongs = labels[:, None] == jnp.arange(len(counts.num_images))
    return ClassCounts(
        num_images=counts.num_images + belongs.sum(axis=0, dtype=jnp.int32),
        top1=counts.top1 + (belongs & is_first[:, None]).sum(axis=0, dtype=jnp.int32),
    )
