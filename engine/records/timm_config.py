"""The `config.json` beside the weights of a network of timm, read as the metadata of a weights file of this project.

Owns which of timm's words mean which of ours. Must not know where the file is from.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loopfeed.engine.records.imagenet import imagenet_classes
from loopfeed.engine.records.weights_metadata import describe_weights
from loopfeed.models.names import MODEL_NAMES, find_timm_model
from loopfeed.preprocess.decoding.decode import RESAMPLERS
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.regular_file import read_regular
from loopfeed.preprocess.shards.classes import ImageClass

MOST_BYTES = 1 << 24
# What timm takes for a value that a config lacks: its `resolve_data_config`.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_CROP, _SIZE, _FILTER = 0.875, (3, 224, 224), "bicubic"
_OF_IMAGENET = re.compile("(^|_)in1k(_|$)")


def is_config_of_timm(path: Path) -> bool:
    """Return whether a `config.json` is one of timm, not the record of a run; false if it cannot be read."""
    try:
        found = json.loads(read_regular(path, max_bytes=MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "architecture" in found


def metadata_of_config(content: bytes, where: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the metadata that a config of timm stands for, and one-line messages about what is not taken from it.

    Args:
        content: of the file, JSON.
        where: its name in messages.

    Raises:
        ValueError: it is not an object with an `architecture`, or a value of it has another form than timm's.
    """
    try:
        config = json.loads(content)
        config = {**config, **(config.get("pretrained_cfg") or {})}
        architecture = str(config["architecture"]).partition(".")[0]
        _, height, width = (int(each) for each in config.get("input_size") or _SIZE)
        mean, std = (tuple(map(float, config.get(key) or usual)) for key, usual in (("mean", _MEAN), ("std", _STD)))
        crop, num_classes = float(config.get("crop_pct") or _CROP), int(config.get("num_classes") or 0)
        classes = _classes_in(config, num_classes)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{where} must be a config of timm, with architecture, input_size, mean and std, but is not "
            f"({printable(str(error))}): download it again, or give the weights file alone"
        ) from None
    name = find_timm_model(architecture) or architecture
    notes = (
        []
        if name in MODEL_NAMES
        else [f"{where} names the network {printable(architecture)}, which is none of the registry's"]
    )
    resample = str(config.get("interpolation") or _FILTER)
    rule: dict[str, int | str] | None = None
    if height == width and 0 < crop <= 1 and resample in RESAMPLERS:
        rule = {"size": height, "resize": math.floor(height / crop), "resample": resample}
    else:
        notes.append(f"{where} has a way to resize that is not taken: crop_pct {crop:g}, {printable(resample)}")
    if (mode := config.get("crop_mode") or "center") != "center":
        notes.append(f"warning: {where} has crop_mode {printable(str(mode))}, but the centre is taken here")
    described = describe_weights(
        model=name,
        height=height,
        width=width,
        mean=mean,
        std=std,
        num_classes=num_classes or None,
        classes=classes,
        resize_rule=rule,
    )
    return described, tuple(notes)


def _classes_in(config: Mapping[str, Any], num_classes: int) -> tuple[ImageClass, ...]:
    """Return the classes that a config names, or ImageNet's if its weights were trained on these last; else ()."""
    labels, words = config.get("label_names"), config.get("label_descriptions") or {}
    if isinstance(labels, list) and len(labels) == num_classes:
        return tuple(ImageClass(str(each), str(words.get(each, each))) for each in labels)
    tag = str(config.get("tag") or str(config["architecture"]).partition(".")[2])
    is_imagenet = num_classes == len(imagenet_classes()) and _OF_IMAGENET.search(tag)
    return imagenet_classes() if is_imagenet else ()
