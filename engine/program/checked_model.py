"""A model of the user's own, held to what the program asks of it while it is traced."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from engine.feed.batches import BatchSource, FunctionBatches
from engine.program.train_state import TrainModel
from engine.settings import SettingError


class CheckedModel:
    """Passes on a model's functions and checks what `apply` gives; costs nothing once compiled.

    What is learned of the number of classes is made known to the batches, whose labels are then held to it.

    Args:
        model: to be checked.
        num_classes: K that is asked for, None where the model alone knows.
        source: of the batches that it is trained on.
    """

    def __init__(self, model: TrainModel, num_classes: int | None, source: BatchSource) -> None:
        self._model, self._num_classes, self._source = model, num_classes, source

    @property
    def init(self) -> Callable[[jax.Array], tuple[Any, Any]]:
        """The model's."""
        return self._model.init

    def apply(self, params: Any, batch_stats: Any, images: jax.Array, train: bool) -> tuple[jax.Array, Any]:
        """The model's, checked.

        Raises:
            ValueError: where it gives anything but float logits [B, K] of enough classes, and batch statistics of the
                shapes and dtypes that it was given.
        """
        given = self._model.apply(params, batch_stats, images, train=train)
        if not isinstance(given, tuple) or len(given) != 2:
            raise ValueError(f"apply must give a tuple (logits, batch_stats), and gave {type(given).__name__}")
        logits, new_stats = given
        self._check_logits(logits, len(images))
        before, after = (jax.tree.map(_described, tree) for tree in (batch_stats, new_stats))
        if before != after:
            raise ValueError(
                "apply must give batch statistics of the same keys, shapes and dtypes as it took, "
                f"and took {before} and gave {after}"
            )
        return logits, new_stats

    def _check_logits(self, logits: Any, batch: int) -> None:
        shape, dtype = jnp.shape(logits), jnp.result_type(logits)
        if len(shape) != 2 or shape[0] != batch or not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"logits must be floats [{batch}, K], and apply gave {dtype} {list(shape)}")
        if self._num_classes is not None and shape[1] < self._num_classes:
            raise SettingError(
                "num_classes",
                "the model must give a logit for each of the {wanted} classes, and gives {found}: "
                "change its last layer, or {setting}",
                wanted=self._num_classes,
                found=shape[1],
            )
        if self._num_classes is None and isinstance(self._source, FunctionBatches):
            self._source.limit_labels(shape[1])


def _described(leaf: Any) -> str:
    return f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
