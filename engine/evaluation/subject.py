"""The subject of an evaluation: a model, its trained weights, and how images are prepared for it.

Owns how these are derived from a recorded run, or from a weights file and its metadata. Must not know: programs.
"""

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from loopfeed.engine.config import SETTINGS, TrainConfig
from loopfeed.engine.crossing.choice import this_platform
from loopfeed.engine.feed.batches import HasSize, image_shape, largest_size, whole_of
from loopfeed.engine.named_parts import NAME_FORM, missing_parts
from loopfeed.engine.parts import UserParts, check_calls, check_evaluation
from loopfeed.engine.program.kernels import replace_missing_kernels
from loopfeed.engine.program.train_state import TrainModel, init_weights, name_of_model
from loopfeed.engine.records.given_weights import read_given_weights, rename_head
from loopfeed.engine.records.trained_run import TrainedRun, describe_later_steps
from loopfeed.engine.records.weights import StoredWeights, place_tensors
from loopfeed.engine.records.weights_metadata import (
    IMAGE_SIZE,
    LOSS,
    MEAN,
    STD,
    channels_in,
    check_metadata,
    image_size_in,
    num_classes_in,
    resize_rule_of,
    steps_in,
)
from loopfeed.engine.run.resolve import too_large_image, unknown_model
from loopfeed.engine.settings import SettingError
from loopfeed.engine.updates.update import Weights
from loopfeed.models.registry import UnknownModelError, build_model, find_network, image_size_of
from loopfeed.models.torchvision_names import num_classes_of
from loopfeed.preprocess.quantities import quantity

type Channels = tuple[float, float, float]

# The normalisation of torchvision's ImageNet weights, on the scale 0 … 1.
IMAGENET_MEAN: Channels = (0.485, 0.456, 0.406)
IMAGENET_STD: Channels = (0.229, 0.224, 0.225)
PACK_AGAIN = "pack them at the --size used in training"
"""What to do about packed images of another size."""


@dataclass(frozen=True)
class Subject:
    """A model with its trained weights, and the settings that prepare images for it.

    Attributes:
        model, weights: the model, and its weights on the device.
        config: of its settings, image_size (the central crop of the images, None for no crop) and those of the infeed
            and the compilation take effect.
        mean, std: of each channel on the scale 0 … 1, to normalise the pixels.
        num_classes: the number of classes, K; None if only a user-defined model determines it.
        step: the number of updates that produced the weights, 0 if unknown.
        name: the model's name in messages.
    """

    model: TrainModel
    weights: Weights
    config: TrainConfig
    mean: Channels
    std: Channels
    num_classes: int | None
    step: int
    name: str


def check_user_model(recorded: TrainedRun, model: TrainModel | None, *, command: str) -> None:
    """Raise ValueError if a user-defined model is missing, or is given for a run that trained a registry model.

    The error names `command`.
    """
    if recorded.weights.is_of_user_model and model is None:
        raise _missing(recorded, ["model"], command)
    if not recorded.weights.is_of_user_model and model is not None:
        raise ValueError(
            f"{recorded.path} was trained with the registry model {recorded.model_name}: leave out the model argument"
        )
    check_calls(UserParts(model=model))


def check_evaluated_parts(recorded: TrainedRun, parts: UserParts, *, has_data: bool) -> None:
    """Raise ValueError if parts with which a run is evaluated are missing, or not its own.

    Metrics are not compared: an evaluation may compute any.

    Args:
        recorded: the run.
        parts: the parts that are given.
        has_data: whether the images are those of a packed data set.
    """
    resolved = recorded.record.resolved
    is_own = {
        "model": recorded.weights.is_of_user_model,
        "loss": "loss" in recorded.user_parts,
        # Of those of its own, the run recorded the number alone.
        "evaluation": not has_data and bool(resolved.get("num_eval_batches")),
    }
    if missing := [name for name, is_needed in is_own.items() if is_needed and getattr(parts, name) is None]:
        raise _missing(recorded, missing, "run-eval")
    if not is_own["loss"] and parts.loss is not None:
        raise ValueError(
            f"{recorded.path} was trained with the ready-made loss {recorded.config.loss}: leave out the loss argument"
        )
    check_user_model(recorded, parts.model, command="run-eval")
    check_evaluation(parts.evaluation)
    check_calls(parts)


def _missing(recorded: TrainedRun, names: Sequence[str], command: str) -> ValueError:
    return missing_parts(recorded.path, names, recorded.record.resolved, f"{command} {shlex.quote(str(recorded.path))}")


def run_subject(
    recorded: TrainedRun,
    config: TrainConfig,
    model: TrainModel | None,
    source: HasSize,
    notify: Callable[[str], None],
    remedy: str = PACK_AGAIN,
) -> Subject:
    """Prepare the evaluation of a run's weights on images of the size at which the run evaluates.

    Args:
        recorded: the run.
        config: the settings of the evaluation.
        model: a user-defined model, None for one of the registry.
        source: the source of the images.
        notify: called with a line if the run's kernels cannot be used, or a position embedding is interpolated.
        remedy: what to do about images of another size.

    Raises:
        ValueError: if the weights do not fit the model, or the images do not have a suitable size.
    """
    size = _crop_of_run(config, recorded, source, remedy)
    _warn_of_geometry(recorded, source, size, notify)
    registry_name = recorded.model_name if model is None else None
    if model is None:
        model = _build(recorded.model_name, recorded.num_classes, config, size, source)
    check_metadata(recorded.weights.metadata, os.fspath(recorded.path), num_classes=recorded.num_classes)
    mean, std = (channels_in(recorded.weights.metadata.get(name, "")) for name in (MEAN, STD))
    if mean is None or std is None:
        raise ValueError(
            f"the weights of a run must record the mean and std of its pixels, but those in {recorded.path} do not: "
            "restore the weights file, or evaluate it with --weights, --mean and --std"
        )
    weights = _place(recorded.weights, registry_name, model, os.fspath(recorded.path), notify)
    config = replace_missing_kernels(config, recorded.config, this_platform(), notify)
    config = replace(config, image_size=size, eval_image_size=None)
    step = steps_in(recorded.weights.metadata)
    return Subject(model, weights, config, mean, std, recorded.num_classes, step, recorded.model_name)


def file_subject(
    path: str,
    stored: StoredWeights,
    config: TrainConfig,
    source: HasSize,
    mean: Channels | None,
    std: Channels | None,
    notify: Callable[[str], None],
    remedy: str = PACK_AGAIN,
    model: TrainModel | None = None,
) -> Subject:
    """Prepare the evaluation of the weights in a file; see `loopfeed.engine.evaluation.run.evaluate_weights`.

    Args:
        path: of the file.
        stored: its weights.
        config: the settings of the evaluation.
        source: the source of the images.
        mean, std: as for `evaluate_weights`.
        notify: called with one-line messages.
        remedy: what to do about images of another size.
        model: a user-defined model, None for one of the registry.

    Raises:
        ValueError: if the weights do not fit the model, or a crop is larger than the images.
    """
    if model is None:
        registry_name = name = registry_name_of(path, stored, config)
        num_classes = num_classes_of(name, stored.tensors)
    else:
        registry_name, name = None, stored.metadata.get("model", name_of_model(model))
        num_classes = num_classes_in(stored.metadata)
    config = replace(config, image_size=config.eval_image_size or config.image_size, eval_image_size=None)
    chosen = {MEAN: mean, STD: std, IMAGE_SIZE: config.image_size}
    given = {key for key, value in chosen.items() if value is not None}
    for key in (MEAN, STD):
        SETTINGS[key].checked(chosen[key])
    check_metadata(stored.metadata, path, num_classes=num_classes, given=given)
    size = _crop_of_file(config, stored, source, notify, remedy)
    if model is None:
        model = _build(name, num_classes or 1, config, size, source)
    weights = _place(stored, registry_name, model, path, notify)
    mean, std = _scale_of_file(stored, mean, std, notify)
    return Subject(
        model, weights, replace(config, image_size=size), mean, std, num_classes, steps_in(stored.metadata), name
    )


def at_one_size(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that the user gives for an evaluation; `image_size` replaces the run's `eval_image_size` too."""
    return {"eval_image_size": None, **given} if "image_size" in given else dict(given)


def describe_weights_of(recorded: TrainedRun, notify: Callable[[str], None], *, is_chosen: bool) -> None:
    """Say which weights of a run are used; `is_chosen` is whether the user chose a snapshot."""
    step = steps_in(recorded.weights.metadata)
    what = f"weights: {recorded.path}, {recorded.model_name} after {quantity(step, 'step')}"
    if recorded.snapshot_step is not None:
        notify(f"{what} (a snapshot" + (")" if is_chosen else ", the newest: the run has written no weights yet)"))
        return
    notify(what + (" (no digest: unchecked)" if recorded.weights.digest is None else ""))
    if (notice := describe_later_steps(recorded.path, step)) is not None:
        notify(notice)


def with_recorded_loss(config: TrainConfig, metadata: Mapping[str, str], where: str) -> TrainConfig:
    """Return the settings with the loss that the metadata of weights record, unless they have another one already.

    Raises:
        ValueError: if it is none of the ready-made losses; `where` is the file's name in the message.
    """
    recorded = metadata.get(LOSS)
    if recorded is None or config.loss != TrainConfig().loss:
        return config
    check_metadata({LOSS: recorded}, where)
    return TrainConfig(**(config.to_json() | {"loss": recorded}))


def registry_name_of(path: str, stored: StoredWeights, config: TrainConfig) -> str:
    """Return the registry name of a file's model; raise ValueError if it is neither set nor recorded, or is unknown."""
    if stored.is_of_user_model:
        raise ValueError(
            f"{path} has the weights of a model of your own, {stored.metadata.get('model')!r}, which must be given "
            f"too: as model=… in Python, or with --model {NAME_FORM}"
        )
    name = stored.metadata.get("model", "auto") if config.model == "auto" else config.model
    if name == "auto":
        raise ValueError(f"{path} does not record which model its weights belong to: give the model with --model NAME")
    try:
        find_network(name)
    except UnknownModelError as error:
        raise unknown_model(error) from None
    return name


def read_weights_file(
    name: str,
    config: TrainConfig,
    notify: Callable[[str], None],
    storage_options: Mapping[str, str] | None = None,
    *,
    is_of_registry: bool = True,
) -> StoredWeights:
    """Read weights that are no run, as the setting `model` names their network or, if that is "auto", they themselves.

    Args:
        name, storage_options: as `read_given_weights` takes them.
        config: the settings.
        notify: called with a line about each change while reading.
        is_of_registry: whether the network is one of the registry, whose names the tensors then get.
    """
    found = read_given_weights(name, storage_options)
    if is_of_registry:
        found = rename_head(found, find_network(registry_name_of(name, found.stored, config)).head)
    for note in found.notes:
        notify(f"weights: {note}")
    return found.stored


def _build(name: str, num_classes: int | None, config: TrainConfig, crop: int | None, source: HasSize) -> TrainModel:
    if num_classes is None:
        raise ValueError(
            f"a run of {name} must record its number of classes, but records none: restore its config.json"
        )
    size = crop or min(image_shape(source))
    return build_model(name, num_classes=num_classes, image_size=size, dtype=jnp.dtype(config.precision))


def _place(
    stored: StoredWeights, registry_name: str | None, model: TrainModel, where: str, notify: Callable[[str], None]
) -> Weights:
    """Arrange stored weights as the model's pytrees, and move them to the device."""
    words = jax.ShapeDtypeStruct((2,), jnp.uint32)
    shapes = jax.eval_shape(
        lambda words: init_weights(model, jax.random.wrap_key_data(words, impl="threefry2x32")), words
    )
    try:
        placed = place_tensors(registry_name, stored.tensors, Weights(*shapes))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if registry_name is not None:
        trained, given = (image_size_of(registry_name, params) for params in (placed.params, shapes[0]))
        if trained != given:
            notify(
                f"the position embedding is interpolated: the weights are for images of {trained} × {trained} px, "
                f"these have {given} × {given} px"
            )
    return jax.device_put(placed)


def _scale_of_file(
    stored: StoredWeights, mean: Channels | None, std: Channels | None, notify: Callable[[str], None]
) -> tuple[Channels, Channels]:
    given = mean, std
    in_file = tuple(channels_in(stored.metadata.get(name, "")) for name in (MEAN, STD))
    chosen_mean, chosen_std = (
        next(each for each in choices if each is not None)
        for choices in zip(given, in_file, (IMAGENET_MEAN, IMAGENET_STD), strict=True)
    )
    if (mean is None or std is None) and None in in_file:
        texts = [" ".join(f"{each:g}" for each in part) for part in (chosen_mean, chosen_std)]
        notify(f"pixels: normalised with mean {texts[0]} and std {texts[1]}, as torchvision's ImageNet weights expect")
    return chosen_mean, chosen_std


def _warn_of_geometry(recorded: TrainedRun, source: HasSize, size: int | None, notify: Callable[[str], None]) -> None:
    """Say so if whole pictures are evaluated after a training on squares, or the reverse, and are cropped otherwise.

    The network receives all of a picture's central crop, resized, but the centre of a square.
    """
    rule, whole = resize_rule_of(recorded.weights.metadata, os.fspath(recorded.path)), whole_of(source)
    was_whole = rule is not None and "canvas" in rule
    if rule is None or was_whole == (whole is not None) or size in (None, rule.get("size")):
        return
    kinds = ("squares", "whole pictures")
    notify(
        f"warning: the run was trained on {kinds[was_whole]}, but these are {kinds[not was_whole]}, of which another "
        f"part becomes {size} × {size} px: pack them as the training images were (preprocess-imagenet --canvas)"
    )


def _crop_of_run(config: TrainConfig, recorded: TrainedRun, source: HasSize, remedy: str) -> int | None:
    """Return the size of the central crop that reduces the split's images to the size of the run's evaluations.

    Raises:
        ValueError: if there is no such crop.
    """
    trained, evaluated = recorded.config.image_size, recorded.config.eval_image_size
    # A size that replaces that of the run is the one to evaluate at.
    size = config.image_size if config.image_size != trained else config.eval_image_size or trained
    expected = recorded.shape if size is None else (size, size)
    found = image_shape(source)
    if found == expected:
        return size
    if expected[0] == expected[1] and expected[0] <= largest_size(source):
        return expected[0]
    if size not in (None, trained, evaluated):
        raise _too_large(size, source, remedy)
    used = "of the run's evaluations" if size is not None and size == evaluated else "used in training"
    raise ValueError(
        f"the images must have the size {used}, {expected[0]} × {expected[1]} px, or a larger size if the "
        f"training images were square, got {found[0]} × {found[1]} px: {remedy}"
    )


def _too_large(size: int, source: HasSize, remedy: str) -> SettingError:
    if remedy == PACK_AGAIN:
        return too_large_image("image_size", size, source)
    return SettingError(
        "image_size",
        "{setting} must be at most the size of the images, {height} × {width} px, got {size}: leave it out, or "
        "{remedy}",
        height=source.height,
        width=source.width,
        size=size,
        remedy=remedy,
    )


def _crop_of_file(
    config: TrainConfig,
    stored: StoredWeights,
    source: HasSize,
    notify: Callable[[str], None],
    remedy: str,
) -> int | None:
    least = largest_size(source)
    if config.image_size is not None:
        if config.image_size > least:
            raise _too_large(config.image_size, source, remedy)
        return config.image_size
    height, width = image_size_in(stored.metadata.get(IMAGE_SIZE, "")) or (0, 0)
    if height > least:
        notify(
            f"warning: the weights are for images of {height} × {width} px, but these images are "
            f"{source.height} × {source.width} px: {remedy}, as the network is less accurate on others"
        )
    is_smaller = height == width and 0 < height <= least
    return height if is_smaller and image_shape(source) != (height, height) else None
