"""A folder with a config and weights, which `timm.create_model("local-dir:…", pretrained=True)` loads."""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from loopfeed.engine.export.exported_model import ExportedModel
from loopfeed.engine.records.weights import name_tensors, weights_file
from loopfeed.engine.records.weights_metadata import classes_of
from loopfeed.models.names import TIMM_NAMES
from loopfeed.models.registry import find_network, image_size_of
from loopfeed.models.torchvision_names import num_classes_of

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def timm_files(exported: ExportedModel) -> dict[str, bytes]:
    """Return the content of the folder's files by name.

    Raises:
        ValueError: timm has no such network, or cannot prepare photographs as the weights need.
    """
    subject = exported.subject
    architecture = TIMM_NAMES.get(subject.name)
    if architecture is None:
        raise ValueError(
            f"timm has no network like {subject.name}: export it as ONNX or StableHLO (--format onnx, stablehlo), or "
            "its weights alone (--format safetensors)"
        )
    if exported.rule.canvas is not None:
        raise ValueError(
            f"timm crops a square of each photograph, but {subject.name} was trained on whole pictures (--canvas "
            f"{exported.rule.canvas}): export it as ONNX or StableHLO (--format onnx, stablehlo)"
        )
    tensors = name_tensors(subject.name, subject.weights.params, subject.weights.batch_stats)
    metadata = {**exported.metadata, "format": "pt"}
    content, _ = weights_file(tensors, metadata)
    config = _config(exported, architecture, tensors)
    return {WEIGHTS: content, CONFIG: (json.dumps(config, indent=2) + "\n").encode()}


def _config(exported: ExportedModel, architecture: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    subject = exported.subject
    num_classes = num_classes_of(subject.name, tensors)
    is_fixed = image_size_of(subject.name, subject.weights.params) is not None
    classes = classes_of(exported.metadata, exported.name)
    stem = next(name for name, each in tensors.items() if np.ndim(each) == 4 and each.shape[1] == 3)
    pretrained: dict[str, Any] = {
        "input_size": [3, *exported.size],
        "fixed_input_size": is_fixed,
        "interpolation": exported.rule.resample,
        "crop_pct": crop_share(exported.size[0], exported.rule.resize),
        "crop_mode": "center",
        "mean": list(subject.mean),
        "std": list(subject.std),
        "num_classes": num_classes,
        "pool_size": None,
        "first_conv": stem.removesuffix(".weight"),
        "classifier": find_network(subject.name).head,
    }
    if classes:
        pretrained["label_names"] = [each.id for each in classes]
        pretrained["label_descriptions"] = {each.id: each.name for each in classes}
    config = {"architecture": architecture, "num_classes": num_classes, "pretrained_cfg": pretrained}
    # A vision transformer has the position embedding of one size.
    return config | ({"model_args": {"img_size": exported.size[0]}} if is_fixed else {})


def crop_share(size: int, resize: int) -> float:
    """Return timm's `crop_pct`, with which `floor(size / crop_pct)`, its length of the shorter side, is `resize`."""
    share = size / resize
    while math.floor(size / share) > resize:
        share = math.nextafter(share, 2)
    while math.floor(size / share) < resize:
        share = math.nextafter(share, 0)
    return share
