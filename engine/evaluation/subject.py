"""What is evaluated: a model, its trained weights, and how images are made ready for it.

Owns what follows for these from the record of a run, or from a file of weights and what stands in it. Knows nothing of
programs.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from engine.config import TrainConfig
from engine.evaluation.trained_run import TrainedRun
from engine.feed.batches import EvaluationSource
from engine.program.train_state import TrainModel
from engine.records.weights import StoredWeights, place_tensors
from engine.run.misfit_errors import too_large_image, unknown_model
from engine.updates.update import Weights
from models.registry import UnknownModelError, build_model, find_network

type Channels = tuple[float, float, float]

# What torchvision's ImageNet weights were trained with, on the scale 0 … 1.
IMAGENET_MEAN: Channels = (0.485, 0.456, 0.406)
IMAGENET_STD: Channels = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Subject:
    """What is evaluated.

    Attributes:
        model, weights: the weights on the device.
        config: of its settings, image_size is the central crop that the images undergo, None for none, and those of
            the infeed and of the compilation are heeded.
        mean, std: of each channel on the scale 0 … 1: what normalises the pixels.
        num_classes: K, None where the user's own model alone knows.
        step: updates that the weights had, 0 where nobody knows.
        name: of the model, for people.
    """

    model: TrainModel
    weights: Weights
    config: TrainConfig
    mean: Channels
    std: Channels
    num_classes: int | None
    step: int
    name: str


def check_own_model(recorded: TrainedRun, model: TrainModel | None) -> None:
    """Raises ValueError where a model is given and the run's is one of the registry, or the other way round."""
    is_own = recorded.weights.is_of_own_model
    if is_own and model is None:
        raise ValueError(
            f"{recorded.path} was trained with a model of your own, {recorded.model_name!r}, which only Python has: "
            f"engine.evaluate({str(recorded.path)!r}, model=…)"
        )
    if not is_own and model is not None:
        raise ValueError(
            f"the model must be left out, since {recorded.path} was trained with {recorded.model_name} of the registry"
        )


def run_subject(
    recorded: TrainedRun, config: TrainConfig, model: TrainModel | None, source: EvaluationSource
) -> Subject:
    """Makes ready what a run trained, for images as large as those of the training.

    Args:
        recorded: the run.
        config: to evaluate with.
        model: the user's own, None where it is of the registry.
        source: of the images.

    Raises:
        ValueError: where the weights are not those of the model, or the images are of no size that it takes.
    """
    size = _crop_of_run(config, recorded, source)
    registry_name = recorded.model_name if model is None else None
    if model is None:
        model = _build(recorded.model_name, recorded.num_classes, config)
    mean, std = (_channels(recorded.weights.metadata.get(name, "")) for name in ("mean", "std"))
    if mean is None or std is None:
        raise ValueError(
            f"the weights of a run must say what its pixels were normalised with, and those of {recorded.path} do not: "
            "restore the file, or name it with --weights, --mean and --std"
        )
    weights = _place(recorded.weights, registry_name, model, os.fspath(recorded.path))
    config, step = replace(config, image_size=size), _steps_done(recorded.weights)
    return Subject(model, weights, config, mean, std, recorded.num_classes, step, recorded.model_name)


def file_subject(
    path: str,
    stored: StoredWeights,
    config: TrainConfig,
    source: EvaluationSource,
    mean: Channels | None,
    std: Channels | None,
    notify: Callable[[str], None],
) -> Subject:
    """Makes ready the weights of a file, see `engine.evaluation.run.evaluate_weights`.

    Raises:
        ValueError: where the weights are not those of the model, or a crop is larger than the images.
    """
    name = registry_name_of(path, stored, config)
    num_classes = num_classes_of(stored)
    size = _crop_of_file(config, stored, source, notify)
    model = _build(name, num_classes or 1, config)
    weights = _place(stored, name, model, path)
    mean, std = _scale_of_file(stored, mean, std, notify)
    return Subject(model, weights, replace(config, image_size=size), mean, std, num_classes, _steps_done(stored), name)


def registry_name_of(path: str, stored: StoredWeights, config: TrainConfig) -> str:
    """Gives the name of a file's model; raises ValueError where neither setting nor file names one of the registry."""
    name = stored.metadata.get("model", "auto") if config.model == "auto" else config.model
    if name == "auto":
        raise ValueError(f"the model must be named, since {path} does not say whose weights it holds: --model NAME")
    try:
        find_network(name)
    except UnknownModelError as error:
        raise unknown_model(error) from None
    return name


def num_classes_of(stored: StoredWeights) -> int | None:
    """Gives how many classes weights of the registry tell apart, None where they have no classifier."""
    bias = stored.tensors.get("fc.bias")
    return None if bias is None or bias.ndim != 1 else len(bias)


def _build(name: str, num_classes: int | None, config: TrainConfig) -> TrainModel:
    assert num_classes is not None  # a run of a model of the registry has it
    # "auto", which alone depends on the size, is a name by now.
    return build_model(name, num_classes=num_classes, image_size=1, dtype=jnp.dtype(config.precision))


def _place(stored: StoredWeights, registry_name: str | None, model: TrainModel, where: str) -> Weights:
    """Puts stored weights where the model has them, on the device."""
    words = jax.ShapeDtypeStruct((2,), jnp.uint32)
    shapes = jax.eval_shape(lambda words: model.init(jax.random.wrap_key_data(words, impl="threefry2x32")), words)
    try:
        return jax.device_put(place_tensors(registry_name, stored.tensors, Weights(*shapes)))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _steps_done(stored: StoredWeights) -> int:
    text = stored.metadata.get("steps_done", "0")
    return int(text) if text.isdecimal() else 0


def _scale_of_file(
    stored: StoredWeights, mean: Channels | None, std: Channels | None, notify: Callable[[str], None]
) -> tuple[Channels, Channels]:
    given = mean, std
    in_file = tuple(_channels(stored.metadata.get(name, "")) for name in ("mean", "std"))
    chosen_mean, chosen_std = (
        next(each for each in choices if each is not None)
        for choices in zip(given, in_file, (IMAGENET_MEAN, IMAGENET_STD), strict=True)
    )
    if (mean is None or std is None) and None in in_file:
        words = [" ".join(f"{each:g}" for each in part) for part in (chosen_mean, chosen_std)]
        notify(f"pixels: normalised with mean {words[0]} and std {words[1]}, as torchvision's ImageNet weights expect")
    return chosen_mean, chosen_std


def _channels(text: str) -> Channels | None:
    """Reads three numbers, None where they are not."""
    try:
        red, green, blue = (float(part) for part in text.split())
    except ValueError:
        return None
    return red, green, blue


def _crop_of_run(config: TrainConfig, recorded: TrainedRun, source: EvaluationSource) -> int | None:
    """Gives the size of the central crop that makes the split's images as large as those of the training.

    Raises:
        ValueError: where no crop does.
    """
    size = config.image_size
    wanted = (recorded.height, recorded.width) if size is None else (size, size)
    found = source.height, source.width
    if found == wanted:
        return config.image_size
    if wanted[0] == wanted[1] and wanted[0] <= min(found):
        return wanted[0]
    raise ValueError(
        f"the images must be as large as those of the training, {wanted[0]} × {wanted[1]} px, or larger and square, "
        f"got {found[0]} × {found[1]} px: pack them at that --size"
    )


def _crop_of_file(
    config: TrainConfig, stored: StoredWeights, source: EvaluationSource, notify: Callable[[str], None]
) -> int | None:
    least = min(source.height, source.width)
    if config.image_size is not None and config.image_size > least:
        raise too_large_image(config.image_size, source.height, source.width)
    if config.image_size is not None:
        return config.image_size
    height, _, width = stored.metadata.get("image_size", "").partition("x")
    if height.isdecimal() and int(height) > least:
        notify(
            f"warning: the weights are of images of {height} × {width} px, and these have {source.height} × "
            f"{source.width}: pack them at that --size for the network's own accuracy"
        )
    is_smaller = height == width and height.isdecimal() and int(height) <= least
    return int(height) if is_smaller and (source.height, source.width) != (int(height),) * 2 else None
