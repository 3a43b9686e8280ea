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
from loopfeed.preprocess.decoding.default_resize import MAX_SIZE
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.regular_file import read_regular
from loopfeed.preprocess.shards.classes import ImageClass

MOST_BYTES = 1 << 24
# What timm takes for a value that a config lacks: its `resolve_data_config`.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_CROP, _SIZE, _FILTER = 0.875, (3, 224, 224), "bicubic"
_OF_MODEL = ("architecture", "num_classes", "label_names", "label_descriptions")
"""The keys that are of the weights beside a config's `pretrained_cfg`, and of what they were made of within it."""
_LONGEST = 200
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
        config = _as_timm_reads(json.loads(content))
        architecture = config["architecture"].partition(".")[0]
        _, height, width = (int(each) for each in config.get("input_size") or _SIZE)
        mean, std = (tuple(map(float, config.get(key) or usual)) for key, usual in (("mean", _MEAN), ("std", _STD)))
        crop, num_classes = float(config.get("crop_pct") or _CROP), int(config.get("num_classes") or 0)
        resize = math.floor(height / crop) if crop > 0 else 0
        classes, lost = _classes_in(config, num_classes)
    except (ArithmeticError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = printable(str(error)[:_LONGEST])
        raise ValueError(
            f"{where} must be a config of timm, with architecture, input_size, mean and std, but is not ({reason}): "
            "download it again, or give the weights file alone"
        ) from None
    name = find_timm_model(architecture) or architecture
    notes = (
        []
        if name in MODEL_NAMES
        else [f"{where} names the network {printable(architecture[:_LONGEST])}, which is none of the registry's"]
    )
    notes += [f"{where} {each}" for each in lost]
    resample = str(config.get("interpolation") or _FILTER)
    rule: dict[str, int | str] | None = None
    if height == width and crop <= 1 and 0 < resize <= MAX_SIZE and resample in RESAMPLERS:
        rule = {"size": height, "resize": resize, "resample": resample}
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


def _as_timm_reads(config: Any) -> dict[str, Any]:
    """Return one table of what a config says, with the precedence of timm's `_parse_model_cfg`."""
    inner = config.get("pretrained_cfg") or {}
    found = {**config, **inner, **{key: config[key] for key in _OF_MODEL if key in config}}
    if not inner and "labels" in found:
        found["label_names"] = found["labels"]
    arguments = config.get("model_args") or {}
    is_fixed = found.get("fixed_input_size") and not arguments.get("dynamic_img_size")
    if is_fixed and (size := arguments.get("img_size")) is not None:
        found["input_size"] = (3, *((size, size) if isinstance(size, int) else size))
    return found


def _classes_in(config: Mapping[str, Any], num_classes: int) -> tuple[tuple[ImageClass, ...], list[str]]:
    """Return the classes that a config names, or ImageNet's if its weights were trained on these last; else ().

    The second result says why the names of a config are not taken.
    """
    labels, words = config.get("label_names"), config.get("label_descriptions") or {}
    if isinstance(labels, dict) and set(labels) == set(map(str, range(len(labels)))):
        labels = [labels[str(label)] for label in range(len(labels))]
    if isinstance(labels, list) and len(set(labels)) == num_classes == len(labels):
        return tuple(ImageClass(str(each), str(words.get(each, each))) for each in labels), []
    lost = [f"has label_names that are not taken: they must be {num_classes:,} different ones"] if labels else []
    tag = str(config.get("tag") or config["architecture"].partition(".")[2])
    is_imagenet = num_classes == len(imagenet_classes()) and _OF_IMAGENET.search(tag)
    return imagenet_classes() if is_imagenet else (), lost
