"""The metadata of `model.safetensors`: what the images of the weights must be like, and what the outputs mean.

All values are strings, as safetensors requires; lists and objects are JSON. The digest in the file covers them. Must
not know: programs, jax.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from loopfeed.engine.config import SETTINGS
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.quantities import parse_float
from loopfeed.preprocess.shards.classes import ImageClass
from loopfeed.preprocess.shards.targets import TARGET_KINDS

STEPS_DONE = "steps_done"
"""The key for the number of updates that produced the weights."""
WEIGHTS_METADATA = "weights_metadata"
"""The key of the resolved part of `config.json` for the metadata of the run's weights, without `STEPS_DONE`."""
LOSS = "loss"
"""The key for the ready-made loss of weights that were trained on targets, not on class numbers."""
TARGETS = "targets"
"""The key for what the outputs of such weights are: `classes`, a logit for each of several, or `numbers`."""
IMAGE_SIZE, MEAN, STD = OF_INPUT = ("image_size", "mean", "std")
_CLASSES = "classes"
_NUM_CLASSES = "num_classes"
_MAX_SIDE = 1 << 16
_LEAST_STD = 0.0039
"""Just below the least one with which a run trains, 1/255."""
_PREPROCESSING = "preprocessing"


def describe_weights(
    *,
    model: str,
    height: int,
    width: int,
    mean: Sequence[float],
    std: Sequence[float],
    num_classes: int | None = None,
    classes: Sequence[ImageClass] = (),
    resize_rule: Mapping[str, int | str] | None = None,
    targets: str | None = None,
    loss: str | None = None,
) -> dict[str, str]:
    """Return the metadata of weights.

    Args:
        model: the name of the model.
        height, width: the size of the network's input, in pixels.
        mean, std: of each channel on the scale 0 … 1.
        num_classes: K, None if only a user-defined model determines it.
        classes: the classes by label; there can be fewer than K.
        resize_rule: how images are resized and cropped before the central crop of `height` × `width` pixels, as JSON of
            `loopfeed.preprocess.decoding.decode.ResizeRule`.
        targets: `classes` if the weights were trained on images with several classes each, `numbers` for regression;
            None for one class per image.
        loss: with targets, the ready-made loss; None for a user-defined one.
    """
    described = {
        "model": model,
        IMAGE_SIZE: f"{height}x{width}",
        MEAN: " ".join(map(str, mean)),
        STD: " ".join(map(str, std)),
    }
    if num_classes is not None:
        described[_NUM_CLASSES] = str(num_classes)
    if classes:
        described[_CLASSES] = json.dumps([{"id": each.id, "name": each.name} for each in classes])
    if resize_rule is not None:
        described[_PREPROCESSING] = json.dumps(dict(resize_rule))
    if targets is not None:
        described[TARGETS] = targets
        described |= {} if loss is None else {LOSS: loss}
    return described


def check_metadata(
    metadata: Mapping[str, str], where: str, *, num_classes: int | None = None, given: Collection[str] = ()
) -> None:
    """Raise ValueError if metadata of this project are there but cannot be read, or cannot be those of weights.

    Nothing takes their place without a word: the right pixels with the wrong mean are another evaluation.

    Args:
        metadata: the metadata.
        where: the file's name in messages.
        num_classes: the number of classes, K, that the tensors have; None if it is not known.
        given: the keys for which the user has given other values.
    """
    losses, most_classes = SETTINGS["loss"].choices, SETTINGS["num_classes"].largest
    rules: dict[str, tuple[Callable[[str], bool], str]] = {
        IMAGE_SIZE: (lambda text: image_size_in(text) is not None, "HEIGHTxWIDTH in pixels, such as 224x224"),
        MEAN: (lambda text: _is_scale(text, 0), "three numbers from 0 to 1"),
        STD: (lambda text: _is_scale(text, _LEAST_STD), f"three numbers from {_LEAST_STD} to 1"),
        STEPS_DONE: (lambda text: _count_in(text) is not None, "a number of updates"),
        _NUM_CLASSES: (lambda text: 1 <= (_count_in(text) or 0) <= most_classes, f"1 to {most_classes:,.0f}"),
        LOSS: (losses.__contains__, f"one of {', '.join(losses)}"),
        TARGETS: (TARGET_KINDS.__contains__, f"one of {', '.join(TARGET_KINDS)}"),
    }
    for key, text in metadata.items():
        if not isinstance(text, str):
            raise _malformed(where, key, "text", str(text)[:80])
    for key, (is_valid, rule) in rules.items():
        if key in metadata and key not in given and not is_valid(metadata[key]):
            raise _malformed(where, key, rule, metadata[key])
    recorded = _count_in(metadata.get(_NUM_CLASSES, ""))
    if None not in (recorded, num_classes) and recorded != num_classes:
        raise _malformed(where, _NUM_CLASSES, f"that of the tensors, {num_classes}", metadata[_NUM_CLASSES])
    most, num_named = recorded or num_classes, len(classes_of(metadata, where))
    if most is not None and num_named > most:
        raise _malformed(where, _CLASSES, f"at most {most:,}, as the outputs are", f"{num_named:,} classes")


def image_size_in(text: str) -> tuple[int, int] | None:
    """Return the height and the width in pixels that a text such as "224x224" names; None for any other text."""
    found = re.fullmatch("([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", text)
    size = None if found is None else (int(found[1]), int(found[2]))
    return None if size is None or max(size) > _MAX_SIDE else size


def channels_in(text: str) -> tuple[float, float, float] | None:
    """Return the three finite numbers of a text such as "0.5 0.5 0.5"; None for any other text."""
    try:
        red, green, blue = (parse_float(part) for part in text.split())
    except ValueError:
        return None
    return (red, green, blue) if all(map(math.isfinite, (red, green, blue))) else None


def steps_in(metadata: Mapping[str, str]) -> int:
    """Return the number of updates that produced the weights, 0 if the metadata lack it."""
    return _count_in(metadata.get(STEPS_DONE, "0")) or 0


def num_classes_in(metadata: Mapping[str, str]) -> int | None:
    """Return the number of classes, K, None if the metadata lack it."""
    return _count_in(metadata.get(_NUM_CLASSES, ""))


def _is_scale(text: str, least: float) -> bool:
    channels = channels_in(text)
    return channels is not None and all(least <= each <= 1 for each in channels)


def _count_in(text: str) -> int | None:
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def without_classes(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return metadata without the identifiers and names of the classes."""
    return {key: text for key, text in metadata.items() if key != _CLASSES}


def classes_of(metadata: Mapping[str, str], where: str) -> tuple[ImageClass, ...]:
    """Return the classes by label, or () if the metadata lack them; `where` is the file's name in messages.

    Raises:
        ValueError: if they are not a list of identifiers and names.
    """
    if _CLASSES not in metadata:
        return ()
    found = _parse(metadata, _CLASSES, where)
    is_list = isinstance(found, list) and all(
        isinstance(each, dict) and set(each) == {"id", "name"} and all(type(text) is str for text in each.values())
        for each in found
    )
    if not is_list:
        raise _malformed(where, _CLASSES, "a list of objects with the strings id and name")
    return tuple(ImageClass(**each) for each in found)


def resize_rule_of(metadata: Mapping[str, str], where: str) -> dict[str, Any] | None:
    """Return the resize rule as a JSON object, or None if the metadata lack it; `where` is the file's name in messages.

    Raises:
        ValueError: if it is not an object.
    """
    if _PREPROCESSING not in metadata:
        return None
    found = _parse(metadata, _PREPROCESSING, where)
    if not isinstance(found, dict):
        raise _malformed(where, _PREPROCESSING, "an object with size, resize and resample")
    return found


def _parse(metadata: Mapping[str, str], key: str, where: str) -> Any:
    try:
        return json.loads(metadata[key])
    except (ValueError, RecursionError):
        raise _malformed(where, key, "JSON") from None


def _malformed(where: str, key: str, rule: str, found: str | None = None) -> ValueError:
    but = "are not" if found is None else f"are {printable(found)!r}" if found else "are empty"
    return ValueError(
        f"the metadata {key} of {where} must be {rule}, but {but}: restore the file, or save it again without them"
    )
