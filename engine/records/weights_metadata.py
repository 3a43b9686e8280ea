"""The metadata of `model.safetensors`: what the images of the weights must be like, and what the outputs mean.

All values are strings, as safetensors requires; lists and objects are JSON. The digest in the file covers them. Must
not know: programs, jax.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from preprocess.shards.classes import ImageClass

STEPS_DONE = "steps_done"
"""The key for the number of updates that produced the weights."""
WEIGHTS_METADATA = "weights_metadata"
"""The key of the resolved part of `config.json` for the metadata of the run's weights, without `STEPS_DONE`."""
LOSS = "loss"
"""The key for the ready-made loss of weights that were trained on targets, not on class numbers."""
TARGETS = "targets"
"""The key for what the outputs of such weights are: `classes`, a logit for each of several, or `numbers`."""
_CLASSES = "classes"
_NUM_CLASSES = "num_classes"
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
            `preprocess.decoding.decode.ResizeRule`.
        targets: `classes` if the weights were trained on images with several classes each, `numbers` for regression;
            None for one class per image.
        loss: with targets, the ready-made loss; None for a user-defined one.
    """
    described = {
        "model": model,
        "image_size": f"{height}x{width}",
        "mean": " ".join(map(str, mean)),
        "std": " ".join(map(str, std)),
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


def _malformed(where: str, key: str, rule: str) -> ValueError:
    return ValueError(f"the metadata {key} of {where} must be {rule}, but are not: restore the file, or save it again")
