"""The file of the decisions of an evaluation, one line for each image, as CSV or as JSON lines."""

import csv
import io
import json
import math
import os
from pathlib import Path

import numpy as np

from loopfeed.engine.evaluation.result import ImagePredictions
from loopfeed.engine.records.whole_file import write_whole
from loopfeed.preprocess.system_errors import status_of

_COLUMNS = ("index", "label", "predicted", "probability", "loss")
_SUFFIXES = (".csv", ".jsonl")


def check_prediction_file(path: str | os.PathLike[str]) -> None:
    """Raise ValueError if a file for predictions has another suffix than .csv or .jsonl, or its folder is missing."""
    file = Path(path)
    if file.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"a file of predictions must end in {' or '.join(_SUFFIXES)}, got {path}: rename it")
    if not file.parent.is_dir() or file.is_dir():
        where = "is in a folder that does not exist" if status_of(file.parent) is None else "is below a file"
        found = "is a folder" if file.is_dir() else where
        raise ValueError(f"a file of predictions must be a file to write, but {path} {found}: choose another path")


def write_predictions(path: str | os.PathLike[str], predictions: ImagePredictions) -> None:
    """Write the index in the split, the label, the predicted class, its probability and the loss of each image.

    The file is CSV with a header, or JSON lines, by its suffix. Numbers are the shortest decimals that are the same
    float32; NaN and infinity are null, and empty in CSV.

    Raises:
        ValueError: as `check_prediction_file`.
        OSError: if it cannot be written; an old file is then unchanged.
    """
    check_prediction_file(path)
    columns = (predictions.labels, predictions.classes[:, 0], predictions.probabilities[:, 0], predictions.losses)
    rows = ((index, *map(_number, row)) for index, row in enumerate(zip(*columns, strict=True)))
    text = io.StringIO(newline="")
    if Path(path).suffix.lower() == ".csv":
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(_COLUMNS)
        writer.writerows(rows)
    else:
        text.writelines(json.dumps(dict(zip(_COLUMNS, row, strict=True))) + "\n" for row in rows)
    write_whole(Path(path), text.getvalue().encode())


def _number(value: np.generic) -> int | float | None:
    if isinstance(value, np.integer):
        return int(value)
    return float(str(value)) if math.isfinite(float(value)) else None
