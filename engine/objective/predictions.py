"""The decisions of an evaluation, image by image: the first classes of each image, their probabilities, and its loss.

Owns how a batch is added to them. Does not depend on the loop, or on where the images come from.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from loopfeed.engine.feed.batches import PADDING_LABEL


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
