"""How the programs apply a model: with the kernels and keys of the run, and checked while the program is traced."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, UInt32

from loopfeed.engine.feed.batches import FunctionBatches, label_form_of
from loopfeed.engine.given_values import describe_given, traced
from loopfeed.engine.images.positions import Positions, Purpose, image_keys, key_of_purpose
from loopfeed.engine.objective.objective import logits_of
from loopfeed.engine.program.train_state import TrainModel, name_of_model
from loopfeed.engine.settings import SettingError
from loopfeed.engine.updates.update import Weights
from loopfeed.models.kernels import using_kernels

_MOST_QUOTED = 400


def takes_key(model: Any) -> bool:
    """Return whether the model's `apply` has a parameter named `key`; called once, before tracing."""
    try:
        parameter = inspect.signature(model.apply).parameters.get("key")
    except (TypeError, ValueError):  # a built-in function has no signature
        return False
    return parameter is not None and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY


def model_keys(seed_words: UInt32[Array, "2"], at: Positions) -> Key[Array, "b"]:
    """Return one PRNG key per image for the model; it depends only on the seed and the image's position."""
    return key_of_purpose(image_keys(seed_words, at), Purpose.MODEL)


class CheckedModel:
    """A wrapper of a model that every program applies: it has the kernels chosen, and the results checked.

    The checks are made while `apply` is traced; the compiled program has none.

    If `num_classes` is None, the batch source checks its labels against the number of classes of the model.

    Args:
        model: the model to check.
        num_classes: K, or None to use the model's.
        source: source of the training batches.
        kernels: the name of the kernels that its layers use, as `loopfeed.models.kernels.using_kernels` takes it.
        notify: called with a line of text if the model returns more logits than there are classes.

    Attributes:
        outputs: the shapes and dtypes of the outputs that were traced last, of evaluations if there were any.
    """

    outputs: Any = None

    def __init__(
        self,
        model: TrainModel,
        num_classes: int | None,
        source: object,
        kernels: str,
        notify: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._model, self._num_classes, self._source, self._notify = model, num_classes, source, notify
        self._kernels, self._takes_key = kernels, takes_key(model)

    @property
    def init(self) -> Callable[[jax.Array], tuple[Any, Any]]:
        """The `init` function of the model."""
        return self._model.init

    def apply(
        self, params: Any, batch_stats: Any, images: jax.Array, train: bool, key: jax.Array | None = None
    ) -> tuple[Any, Any]:
        """Apply the model, with `key` if it has such a parameter, and check its result.

        Raises:
            ValueError: if the result is not a tuple of outputs and batch statistics with the keys, shapes and dtypes of
                the argument, or the labels are class numbers and the outputs no float logits [B, K] of enough classes.
        """
        keys = {"key": key} if self._takes_key else {}
        name = name_of_model(self._model)
        with using_kernels(self._kernels), traced(f"apply of {name}"):
            given = self._model.apply(params, batch_stats, images, train=train, **keys)
        if not isinstance(given, tuple) or len(given) != 2:
            raise ValueError(
                f"apply must return a tuple (logits, batch_stats), but that of {name} returned "
                f"{describe_given(given)}: return (logits, batch_stats), "
                "with the argument batch_stats if nothing changes it"
            )
        outputs, new_stats = given
        if label_form_of(self._source) is None:
            self._check_logits(outputs, len(images))
            self._note_spare_logits(logits_of(outputs).shape[1], train)
        before, after = (jax.tree.map(_describe, tree) for tree in (batch_stats, new_stats))
        if before != after:
            raise ValueError(
                "apply must return batch statistics with the keys, shapes and dtypes of its argument, "
                f"but that of {name} got {before} and returned {after}: return the argument batch_stats, or new values "
                "for its arrays"
            )
        if not train or self.outputs is None:
            self.outputs = jax.tree.map(_shape, outputs)
        return outputs, new_stats

    def _check_logits(self, outputs: Any, batch: int) -> None:
        logits = outputs.get("logits", outputs) if isinstance(outputs, Mapping) else outputs
        shape = logits.shape if isinstance(logits, jax.Array) else ()
        if len(shape) != 2 or shape[0] != batch or not jnp.issubdtype(logits.dtype, jnp.floating):
            remedy = 'return (logits, batch_stats), in this order; among other outputs, logits have the key "logits"'
            if isinstance(logits, np.ndarray):
                remedy = "compute them from the images with jax.numpy"
            raise ValueError(
                f"logits must be a float array [{batch}, K], but apply of {name_of_model(self._model)} returned "
                f"{describe_given(logits)}{' of NumPy' * isinstance(logits, np.ndarray)} in their place: {remedy}"
            )
        if self._num_classes is not None and shape[1] < self._num_classes:
            raise SettingError(
                "num_classes",
                "the model must return at least {wanted} logits per image, one per class, but returns {found}: "
                "change its last layer, or {setting}",
                wanted=self._num_classes,
                found=shape[1],
            )
        if self._num_classes is None and isinstance(self._source, FunctionBatches):
            self._source.limit_labels(shape[1])

    def _note_spare_logits(self, num_logits: int, train: bool) -> None:
        if train and self._num_classes is not None and num_logits > self._num_classes:
            self._notify(
                f"{name_of_model(self._model)} returns {num_logits:,} logits per image for {self._num_classes:,} "
                f"classes; no label has the last {num_logits - self._num_classes:,}"
            )


def size_refusal(model: CheckedModel, weights: Weights, size: int, *, batch: int, train: bool = False) -> str | None:
    """Return why a model cannot be applied to images of `size` × `size` px, None if it can; computes only shapes.

    Args:
        model: the model, of the registry or a user's, whose `apply` may raise anything.
        weights: its parameters and statistics, arrays or `jax.ShapeDtypeStruct`.
        size: in pixels.
        batch: images at once, of one device.
        train: whether to apply it as in training.
    """

    def apply(weights: Weights, images: jax.Array) -> Any:
        key = jax.random.split(jax.random.key(0), batch) if train else None
        return model.apply(weights.params, weights.batch_stats, images, train=train, key=key)

    try:
        jax.eval_shape(apply, weights, jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32))
    except Exception as error:  # noqa: BLE001 - a user's model may raise anything
        text = " ".join(str(error).split())[:_MOST_QUOTED]
        return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
    return None


def _shape(leaf: Any) -> Any:
    # Outputs of other types reach only a user's own loss and metrics.
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else leaf


def _describe(leaf: Any) -> str:
    is_number = hasattr(leaf, "dtype") or isinstance(leaf, int | float | complex)
    return f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}" if is_number else type(leaf).__name__
