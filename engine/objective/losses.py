"""The losses that training can minimise: functions of a model's outputs and of the labels, one number for each example.

Owns the interface of a loss and the ready-made ones. Does not depend on models, batches or the loop.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Shaped

from loopfeed.models.layers.bfloat16_bits import to_float32

type Loss = Callable[[Any, Any, Float32[Array, "B"]], Float[Array, "B"]]
"""(outputs of the model, labels, weights of the examples) → the loss of each example.

`outputs` is the first result of the model's `apply`, and `labels` are those of the batch, any pytrees of arrays [B, …].
A weight is 1 for an image and 0 for a padding row, whose loss is ignored.
"""


def cross_entropy_loss(
    logits: Float[Array, "B K"],
    labels: Int[Array, "B"] | Float[Array, "B K"],
    weights: Float32[Array, "B"],  # noqa: ARG001
) -> Float[Array, "B"]:
    """Return the softmax cross entropy of each example in nats, computed in float32.

    The labels are classes, or target distributions. A class outside 0 … K - 1 gives NaN.
    """
    log_probabilities = jax.nn.log_softmax(to_float32(logits))
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        targets = to_float32(labels)
        return -jnp.sum(targets * without_zero_weights(log_probabilities, targets), axis=-1)
    num_classes = logits.shape[-1]
    # A one-hot product, because a gather's gradient is a scatter, which is slow or not deterministic on GPUs.
    picked = jnp.sum(jnp.where(labels[:, None] == jnp.arange(num_classes), log_probabilities, 0), axis=-1)
    return jnp.where((labels >= 0) & (labels < num_classes), -picked, jnp.nan)


def binary_cross_entropy_loss(
    logits: Float[Array, "B K"],
    labels: Shaped[Array, "B K"],
    weights: Float32[Array, "B"],  # noqa: ARG001
    positive_weights: Float32[Array, "K"] | None = None,
) -> Float[Array, "B"]:
    """Return the mean binary cross entropy of the K labels of each example in nats (multi-label), in float32.

    As PyTorch's `binary_cross_entropy_with_logits`, averaged over K, of labels that are booleans, or numbers in 0 … 1.
    A logit of infinity on the side of a certain label costs 0. `positive_weights` multiply the term of each label that
    is true, as PyTorch's `pos_weight`; None multiplies nothing.

    Raises:
        ValueError: while tracing, if logits and labels have different shapes, which would otherwise be broadcast.
    """
    if logits.shape != labels.shape:
        raise ValueError(
            "the binary cross entropy needs one logit for each label, but the model returns "
            f"{list(logits.shape)} for labels {list(labels.shape)}: change its last layer"
        )
    logits, targets = to_float32(logits), to_float32(labels)
    # Each softplus is accurate and has the sigmoid as its derivative, at 0 too, where that of abs is one-sided.
    if_true, if_false = jax.nn.softplus(-logits), jax.nn.softplus(logits)
    losses = targets * without_zero_weights(if_true, targets)
    if positive_weights is not None:
        check_class_weights(positive_weights, logits)
        losses *= positive_weights
    losses += (1 - targets) * without_zero_weights(if_false, 1 - targets)
    return losses.reshape(len(losses), -1).mean(axis=1)


def mean_squared_error_loss(
    outputs: Float[Array, "B *rest"],
    labels: Shaped[Array, "B ..."],
    weights: Float32[Array, "B"],  # noqa: ARG001
) -> Float[Array, "B"]:
    """Return the mean squared difference of each example (regression), computed in float32.

    The labels are numbers of the shape of `outputs`; numbers [B] also fit outputs [B, 1].
    """
    difference = to_float32(outputs) - to_float32(labels).reshape(outputs.shape)
    return jnp.square(difference).reshape(len(difference), -1).mean(axis=1)


def check_class_weights(class_weights: Float32[Array, "K"], logits: Float[Array, "B K"]) -> None:
    """Raise ValueError, while tracing, unless there is a weight for each logit."""
    if class_weights.shape != logits.shape[1:]:
        raise ValueError(
            f"class weights need one logit for each of the {len(class_weights)} classes, but the model returns "
            f"{list(logits.shape)}: change its last layer"
        )


LOSSES: dict[str, Loss] = {
    "cross-entropy": cross_entropy_loss,
    "binary-cross-entropy": binary_cross_entropy_loss,
    "mean-squared-error": mean_squared_error_loss,
}
"""The ready-made losses by their names in the setting `loss`."""


def weighted_mean(values: Float[Array, "B"], weights: Float32[Array, "B"]) -> Float[Array, ""]:
    """Return the mean of the values over the examples with a weight; 0 if all weights are 0.

    A value of NaN in an example without weight is ignored.
    """
    counted = jnp.where(weights > 0, to_float32(values) * weights, 0)
    return counted.sum() / jnp.maximum(weights.sum(), jnp.finfo(jnp.float32).tiny)


def without_zero_weights(values: Float[Array, "*shape"], weights: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return the values, with 0 where their weight is 0, so that 0 times an infinite value is 0 in a weighted sum.

    So it is in the limit, t · log p → 0 for t → 0, in the value and in its derivative.
    """
    return jnp.where(weights == 0, 0, values)


def cross_entropy(logits: Float[Array, "B K"], targets: Float[Array, "B K"]) -> Float[Array, ""]:
    """Return the softmax cross entropy in nats, averaged over the batch, computed in float32.

    Rows of targets sum to 1; a NaN row makes the loss NaN. A class with target 0 may have a logit of minus infinity, as
    a masked class has.
    """
    log_probabilities = without_zero_weights(jax.nn.log_softmax(to_float32(logits)), targets)
    return -jnp.mean(jnp.sum(targets * log_probabilities, axis=-1))
