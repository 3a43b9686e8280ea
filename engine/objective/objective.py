"""What a run minimises and measures: the loss and metrics of a model's outputs, whatever form the labels have.

Owns how labels, their smoothing, mixtures and padding enter the loss. Does not depend on the loop.
"""

import math
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from loopfeed.engine.feed.batches import PADDING_LABEL
from loopfeed.engine.feed.label_form import LabelForm
from loopfeed.engine.given_values import describe_given, traced
from loopfeed.engine.images.augment import make_targets
from loopfeed.engine.images.mixing import WHOLE, mix_targets, swap_partners
from loopfeed.engine.objective.losses import (
    Loss,
    binary_cross_entropy_loss,
    check_class_weights,
    cross_entropy,
    weighted_mean,
    without_zero_weights,
)
from loopfeed.engine.objective.metrics import Metric
from loopfeed.models.layers.bfloat16_bits import to_float32

MOST_METRIC_NUMBERS = 40_000
"""The largest number of numbers that the metrics of a run may have together: one line of `eval.jsonl`."""


class Objective(NamedTuple):
    """The static part of the objective, compiled into the program.

    Attributes:
        loss: the loss of each example; None is the softmax cross entropy, whose targets can be smoothed.
        label_form: the form of the labels, None for class numbers.
        metrics: the metrics by name.
    """

    loss: Loss | None = None
    label_form: LabelForm | None = None
    metrics: Mapping[str, Metric] = MappingProxyType({})

    @property
    def has_classes(self) -> bool:
        """Whether the labels are class numbers, so that top-1 and top-5 accuracy are defined."""
        return self.label_form is None

    def read_labels(self, words: Int32[Array, "b *words"]) -> tuple[Any, Float32[Array, "b"]]:
        """Return the labels of a batch, given as pulled, and the weights of its examples."""
        if self.label_form is not None:
            return self.label_form.unpack(words)
        return words, (words != PADDING_LABEL).astype(jnp.float32)

    def training_loss(
        self,
        outputs: Any,
        words: Int32[Array, "b *words"],
        mix_weight: Int32[Array, "b"] | None,
        smoothing: Float32[Array, ""],
        class_weights: Float32[Array, "K"] | None = None,
    ) -> Float[Array, ""]:
        """Return the mean loss of a training batch.

        The mean is over the images, whatever their weights, so that it merges over devices and accumulated batches.

        Args:
            outputs: the model's outputs.
            words: the labels as pulled.
            mix_weight: the share of each image's own label if images were mixed, else None; see `augment_images`.
            smoothing: see `smooth_targets`; only the cross entropy smooths.
            class_weights: multiply the cross entropy of each image by the weight of its class or, of a mixed image, the
                mean of the weights of both labels by their shares; smoothing changes no weight. For the binary cross
                entropy, see `positive_weights` there. None multiplies nothing.
        """
        labels, weights = self.read_labels(words)
        if self.loss is not None:
            loss: Loss = self.loss
            if class_weights is not None:
                assert loss is binary_cross_entropy_loss  # `check_parts` refuses the others
                loss = partial(binary_cross_entropy_loss, positive_weights=class_weights)
            losses = self._mixed_losses(loss, outputs, labels, weights, mix_weight)
            return weighted_mean(losses, weights)
        logits = logits_of(outputs)
        if self.has_classes:
            targets = make_targets(labels, mix_weight, logits.shape[-1])
        else:
            targets = to_float32(labels)
            targets = targets if mix_weight is None else mix_targets(targets, mix_weight)
        if class_weights is None:
            return cross_entropy(logits, smooth_targets(targets, smoothing))
        check_class_weights(class_weights, logits)
        own = (targets * class_weights).sum(axis=-1, keepdims=True)
        return cross_entropy(logits, own * smooth_targets(targets, smoothing))

    def training_metrics(self, outputs: Any, words: jax.Array) -> dict[str, Any]:
        """Return the state of each metric after one training batch.

        The metrics see the labels of the images themselves, also where images are mixed. They are no part of what is
        differentiated, so they may use what has no derivative, such as `jax.pure_callback`.

        Args:
            outputs: the model's outputs.
            words: the labels as pulled.
        """
        labels, weights = self.read_labels(words)
        return self.update_metrics(self.init_metrics(), outputs, labels, weights)

    def init_metrics(self) -> dict[str, Any]:
        """Return the state of each metric before the first batch."""
        return {name: metric.init() for name, metric in self.metrics.items()}

    def update_metrics(
        self, states: dict[str, Any] | None, outputs: Any, labels: Any, weights: Float32[Array, "b"]
    ) -> dict[str, Any]:
        """Return the state of each metric with a batch added."""
        found = {}
        for name, metric in self.metrics.items():
            with traced(f"the metric {name}"):
                found[name] = metric.update((states or {})[name], outputs, labels, weights)
        return found

    def finish_metrics(self, states: dict[str, Any] | None) -> dict[str, jax.Array]:
        """Return the value of each metric: a number, or an array of fixed shape."""
        return {name: jnp.asarray(metric.finish((states or {})[name])) for name, metric in self.metrics.items()}

    def check_metrics(self) -> None:
        """Raise ValueError if the metrics have more numbers than a line of the log can contain."""
        shapes = jax.eval_shape(lambda: self.finish_metrics(self.init_metrics()))
        sizes = {name: math.prod(value.shape) for name, value in shapes.items()}
        if (total := sum(sizes.values())) > MOST_METRIC_NUMBERS:
            largest = max(sizes, key=lambda name: sizes[name])
            raise ValueError(
                f"the metrics of a run must have at most {MOST_METRIC_NUMBERS:,} numbers together, got {total:,}, of "
                f"which {largest} has {sizes[largest]:,}: leave it out, and compute it with loopfeed.evaluate"
            )

    @property
    def step_metrics(self) -> tuple[str, ...]:
        """The names of the metrics that are numbers, which are also computed in every training step."""
        shapes = jax.eval_shape(lambda: self.finish_metrics(self.init_metrics()))
        return tuple(name for name, value in shapes.items() if value.shape == ())

    def of_training(self) -> "Objective":
        """Return the objective with only the metrics that are computed in every training step."""
        return self._replace(metrics={name: self.metrics[name] for name in self.step_metrics})

    def merge_metrics(self, one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        """Return the state of each metric over two sets of batches together."""
        return {name: metric.merge(one[name], other[name]) for name, metric in self.metrics.items()}

    def _mixed_losses(
        self, loss: Loss, outputs: Any, labels: Any, weights: Float32[Array, "b"], mix_weight: Int32[Array, "b"] | None
    ) -> Float[Array, "b"]:
        """Return the loss of each example: of a mixed image, the same mixture of the losses by both labels."""
        own = losses_of(loss, outputs, labels, weights)
        if mix_weight is None:
            return own
        partners = losses_of(loss, outputs, jax.tree.map(swap_partners, labels), weights)
        share = mix_weight.astype(jnp.float32) * jnp.float32(1 / WHOLE)
        return share * without_zero_weights(own, share) + (1 - share) * without_zero_weights(partners, 1 - share)


CROSS_ENTROPY = Objective()
"""The objective of class numbers without metrics."""


def losses_of(loss: Loss, outputs: Any, labels: Any, weights: Float32[Array, "b"]) -> Float[Array, "b"]:
    """Return the loss of each example in float32; raise ValueError, while tracing, if it has another form."""
    num_examples = len(weights)
    with traced("the loss"):
        losses: Any = loss(outputs, labels, weights)
    is_array = hasattr(losses, "shape") and hasattr(losses, "dtype")
    if not is_array or losses.shape != (num_examples,) or not jnp.issubdtype(losses.dtype, jnp.floating):
        raise ValueError(
            f"a loss must return floats [{num_examples}], one for each example, but returned "
            f"{describe_given(losses)}: do not average over the batch, which the program does"
        )
    return to_float32(jnp.asarray(losses))


def smooth_targets(targets: Float[Array, "B K"], smoothing: Float32[Array, ""]) -> Float[Array, "B K"]:
    """Return targets · (1 - smoothing) + smoothing / K (Szegedy et al., 2015, arXiv:1512.00567, section 7).

    Args:
        targets: rows that sum to 1: one-hot labels or mixtures of them.
        smoothing: in 0 … 1, a runtime value; 0 leaves every bit unchanged.
    """
    return targets * (1 - smoothing) + smoothing / targets.shape[-1]


def logits_of(outputs: Any) -> Float[Array, "B K"]:
    """Return the logits among a model's outputs: the outputs themselves, or their entry "logits".

    Raises:
        ValueError: while tracing, if there are none.
    """
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else outputs
    if not isinstance(logits, jax.Array) or logits.ndim != 2:
        raise ValueError(
            "with class numbers as labels, a model must return logits [B, K], or a dictionary with such logits under "
            f'"logits", but returned {jax.tree.map(jnp.shape, outputs)}'
        )
    return logits
