"""A trained network as one function from photographs' pixels to its outputs, in forms that every platform has.

Owns what is exported: the input, the outputs and what is recorded of them. Must not know: formats of files.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt8

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.evaluation.subject import Subject, file_subject, read_weights_file, run_subject
from loopfeed.engine.feed.batches import EvaluationSource
from loopfeed.engine.images.unpack import PixelScale, normalise_levels
from loopfeed.engine.objective.objective import logits_of
from loopfeed.engine.program.checked_model import takes_key
from loopfeed.engine.program.train_state import TrainModel
from loopfeed.engine.records.trained_run import TrainedRun
from loopfeed.engine.records.weights_metadata import (
    IMAGE_SIZE,
    TARGETS,
    classes_of,
    image_size_in,
    resize_rule_of,
)
from loopfeed.engine.updates.update import Weights
from loopfeed.models.kernels import XLA, using_kernels
from loopfeed.models.layers.platform_forms import PLAIN, tracing_for
from loopfeed.preprocess.decoding.decode import ResizeRule
from loopfeed.preprocess.decoding.default_resize import default_resize
from loopfeed.preprocess.extents import Whole

_USUAL_SIZE = 224
_TARGETS_OF = {"cross-entropy": None, "binary-cross-entropy": "classes", "mean-squared-error": "numbers"}
INPUT, LOGITS, PROBABILITIES, NUMBERS = "images", "logits", "probabilities", "outputs"
"""The names of the input and of the outputs; `outputs` are those of a regression."""

type Function = Callable[[UInt8[Array, "B H W 3"]], dict[str, Float32[Array, "B K"]]]


class _Size(NamedTuple):
    """The size of the images of a source that has none."""

    height: int
    width: int
    whole: Whole | None
    batch: int = 1
    num_batches: int = 1


class ExportedModel(NamedTuple):
    """What is exported.

    Attributes:
        subject: the model with its weights.
        size: height and width of the input, in pixels.
        rule: how photographs are resized and cropped before that.
        targets: what the outputs are: None for one class per image, else `classes` or `numbers`.
        metadata: of the weights.
        name: of the file or run in messages.
    """

    subject: Subject
    size: tuple[int, int]
    rule: ResizeRule
    targets: str | None
    metadata: dict[str, str]
    name: str

    @property
    def description(self) -> dict[str, Any]:
        """What an exported file records of itself, as JSON."""
        classes = classes_of(self.metadata, self.name)
        return {
            "model": self.subject.name,
            "steps_done": self.subject.step,
            "input": {"name": INPUT, "dtype": "uint8", "shape": ["batch", *self.size, 3], "channels": "RGB"},
            "outputs": list(output_names(self.targets)),
            "targets": self.targets or "class",
            "preprocessing": {**self.rule.to_json(), "crop": min(self.size)},
            "mean": list(self.subject.mean),
            "std": list(self.subject.std),
            "classes": [{"id": each.id, "name": each.name} for each in classes],
        }


def output_names(targets: str | None) -> tuple[str, ...]:
    """Return the names of the outputs."""
    return (NUMBERS,) if targets == "numbers" else (LOGITS, PROBABILITIES)


def export_run(recorded: TrainedRun, model: TrainModel | None, notify: Callable[[str], None]) -> ExportedModel:
    """Return what is exported of a run; the size of the input is that of its evaluations."""
    where = os.fspath(recorded.path)
    config = replace(recorded.config, precision="float32", kernels="xla")
    rule = _rule_of(recorded.weights.metadata, where, recorded.shape[0], notify)
    size = _Size(*recorded.shape, rule.whole)
    subject = run_subject(recorded, config, model, cast(EvaluationSource, size), notify)
    metadata = recorded.weights.metadata
    has_own = "loss" in recorded.user_parts and recorded.record.resolved.get("labels") is not None
    targets = metadata.get(TARGETS) or ("numbers" if has_own else _TARGETS_OF[recorded.config.loss])
    return ExportedModel(subject, _input_size(subject, size), rule, targets, metadata, where)


def export_weights_file(
    where: str,
    registry_name: str | None,
    image_size: int | None,
    notify: Callable[[str], None],
    storage_options: Mapping[str, str] | None,
) -> ExportedModel:
    """Return what is exported of weights that are no run."""
    config = replace(TrainConfig(), precision="float32", kernels="xla", model=registry_name or "auto")
    stored = read_weights_file(where, config, notify, storage_options)
    recorded_size, _ = image_size_in(stored.metadata.get(IMAGE_SIZE, "")) or (_USUAL_SIZE, 0)
    rule = _rule_of(stored.metadata, where, image_size or recorded_size, notify)
    if image_size is not None and rule.size < image_size:
        rule = ResizeRule(size=image_size, resize=default_resize(image_size), resample=rule.resample)
    size = _Size(*rule.stored_shape, rule.whole)
    config = replace(config, image_size=image_size)
    source = cast(EvaluationSource, size)
    subject = file_subject(where, stored, config, source, None, None, notify)
    return ExportedModel(
        subject, _input_size(subject, size), rule, stored.metadata.get(TARGETS), stored.metadata, where
    )


def _input_size(subject: Subject, size: _Size) -> tuple[int, int]:
    if (crop := subject.config.image_size) is not None:
        return crop, crop
    return (size.height, size.width) if size.whole is None else (size.whole.size, size.whole.size)


def _rule_of(metadata: dict[str, str], where: str, size: int, notify: Callable[[str], None]) -> ResizeRule:
    found = resize_rule_of(metadata, where)
    if found is not None:
        return ResizeRule.from_json(found)
    rule = ResizeRule(size=size, resize=default_resize(size))
    notify(
        f"warning: the weights do not record how their images were made: a resize to {rule.resize} px and a crop of "
        f"{size} px are recorded in the export"
    )
    return rule


def make_function(exported: ExportedModel, forms: str = PLAIN) -> Function:
    """Return the function that is exported: uint8 images [B, H, W, 3] → float32 logits and probabilities [B, K].

    The pixels are normalised inside. Probabilities are the softmax, or of several classes per image the sigmoid.
    Products and activations of registry models are float32, whatever the precision of the training. The function can be
    traced for a symbolic B: a model whose `apply` needs a number, as `len(images)` does, is given one image at a time
    under `jax.vmap`.

    Args:
        exported: what is exported.
        forms: the forms of operations, `PLAIN` or `ONNX` of `loopfeed.models.layers.platform_forms`.

    Raises:
        ValueError: the model cannot be traced so, or says other things of an image beside others.
    """
    at_once = partial(_outputs_of, exported)
    one_by_one = jax.vmap(lambda image: jax.tree.map(lambda each: each[0], at_once(image[None])))
    errors = []
    for form in (at_once, one_by_one):
        function = partial(_in_forms, forms, form)
        try:
            jax.eval_shape(function, any_batch(exported))
        except Exception as error:  # noqa: BLE001 - a user's model may raise anything
            errors.append(error)
            continue
        if errors:
            _check_is_same(exported, at_once, one_by_one)
        return function
    raise _cannot_be_traced(exported, errors[0]) from errors[-1]


def _check_is_same(exported: ExportedModel, at_once: Function, one_by_one: Function) -> None:
    """Raise ValueError if a model says other things of two images together than of each."""
    images = np.random.default_rng(0).integers(0, 256, (2, *exported.size, 3), dtype=np.uint8)
    together, alone = (jax.jit(partial(_in_forms, PLAIN, form))(images) for form in (at_once, one_by_one))
    for name, expected in together.items():
        most = 1e-3 * float(jnp.abs(expected).max()) + 1e-5
        is_same = alone[name].shape == expected.shape
        if not is_same or not np.allclose(alone[name], expected, rtol=0, atol=most, equal_nan=True):
            raise _cannot_be_traced(exported, ValueError("its outputs for an image depend on the others in the batch"))


def _in_forms(forms: str, function: Function, images: UInt8[Array, "B H W 3"]) -> dict[str, Float32[Array, "B K"]]:
    with using_kernels(XLA), tracing_for(forms):
        return function(images)


def _outputs_of(exported: ExportedModel, images: UInt8[Array, "B H W 3"]) -> dict[str, Float32[Array, "B K"]]:
    subject, targets = exported.subject, exported.targets
    scale = PixelScale(jnp.array(subject.mean, jnp.float32), jnp.array(subject.std, jnp.float32))
    apply = partial(_apply, subject.model, subject.weights, is_mirrored=subject.config.eval_mirror)
    outputs = logits_of(apply(normalise_levels(images.astype(jnp.float32), scale))).astype(jnp.float32)
    if targets == "numbers":
        return {NUMBERS: outputs}
    shares = jax.nn.softmax(outputs, axis=-1) if targets is None else jax.nn.sigmoid(outputs)
    return {LOGITS: outputs, PROBABILITIES: shares}


def _apply(model: TrainModel, weights: Weights, images: Float32[Array, "B H W 3"], *, is_mirrored: bool) -> Any:
    keys = {"key": None} if takes_key(model) else {}

    def outputs_of(images: Float32[Array, "B H W 3"]) -> Any:
        return model.apply(weights.params, weights.batch_stats, images, train=False, **keys)[0]

    outputs = outputs_of(images)
    if not is_mirrored:
        return outputs
    return jax.tree.map(lambda one, other: (one + other) / 2, outputs, outputs_of(images[:, :, ::-1]))


def any_batch(exported: ExportedModel) -> jax.ShapeDtypeStruct:
    """Return the shape of the input, whose first axis is symbolic."""
    (batch,) = jax.export.symbolic_shape("batch")
    return jax.ShapeDtypeStruct((batch, *exported.size, 3), jnp.uint8)


def describe(exported: ExportedModel) -> str:
    """Return the description as JSON text."""
    return json.dumps(exported.description, indent=1)


def _cannot_be_traced(exported: ExportedModel, error: Exception) -> ValueError:
    text = " ".join(str(error).split())[:300]
    return ValueError(
        f"a model is exported for any number of images, but {exported.subject.name} cannot be traced so "
        f"({type(error).__name__}: {text}): make its outputs for one image independent of the others, or export the "
        "weights alone (--format safetensors)"
    )
