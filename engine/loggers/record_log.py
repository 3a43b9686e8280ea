"""What a logger of experiments shows of each record of a run, and under which names."""

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopfeed.engine.crossing.pushed import PushedHistograms, PushedImages
from loopfeed.engine.loggers.experiment_log import Cell, ExperimentLog, Moment, Table
from loopfeed.engine.loggers.pictures import MOST_MAP_SIDE, draw_images, draw_matrix
from loopfeed.engine.profile.table import Profile, ProfileRow, ScopeRow
from loopfeed.engine.stream.sinks import EvaluationRecord, LossRecord

type Logged = LossRecord | EvaluationRecord | PushedHistograms | PushedImages | Profile
"""A record that loggers take."""


def log_record(log: ExperimentLog, record: Logged, last_step: int, classes: tuple[str, ...] | None) -> None:
    """Write one record of a run to an open log.

    Args:
        log: the log.
        record: the record.
        last_step: the step of the last loss.
        classes: readable names of the classes, if any.
    """
    if isinstance(record, LossRecord):
        log.add_numbers(Moment(record.step, record.time), _numbers_of_step(record))
    elif isinstance(record, EvaluationRecord):
        _log_evaluation(log, record)
    elif isinstance(record, PushedHistograms):
        log.add_histograms(Moment(record.step, record.time), record.histograms)
    elif isinstance(record, PushedImages):
        log.add_picture(Moment(record.step, record.time), "images/training", draw_images(record, classes))
    else:
        _log_profile(log, record, last_step)


def _numbers_of_step(record: LossRecord) -> dict[str, float]:
    speed = {"speed/images_per_s": record.images_per_s, "speed/wait_ms": record.wait_ms}
    return {
        "train/loss": record.loss,
        "train/learning_rate": record.lr,
        **{f"train/{name}": value for name, value in record.metrics.items()},
        **{name: value for name, value in speed.items() if math.isfinite(value)},
    }


def _log_evaluation(log: ExperimentLog, record: EvaluationRecord) -> None:
    at = Moment(record.step, record.time)
    ranks = {"eval/top1": record.top1, "eval/top5": record.top5}
    numbers = {"eval/loss": record.loss, **{name: rank for name, rank in ranks.items() if not math.isnan(rank)}}
    for name, value in record.metrics.items():
        if isinstance(value, int | float):
            numbers[f"eval/{name}"] = value
    log.add_numbers(at, numbers)
    for name, matrix in _matrices(record.metrics):
        log.add_picture(at, f"eval/{name}", draw_matrix(matrix))


def _matrices(metrics: Mapping[str, Any]) -> Iterator[tuple[str, NDArray[np.float64]]]:
    for name, value in metrics.items():
        if isinstance(value, list):
            array = np.array(value, np.float64)
            if array.ndim == 2 and min(array.shape) > 0 and max(array.shape) <= MOST_MAP_SIDE:
                yield name, array


_PROFILE_COLUMNS = ("Mean Duration", "Duration Std Dev", "Number of Calls", "Samples/Second", "Total Time",
                    "Percent of Total")  # fmt: skip


def _log_profile(log: ExperimentLog, profile: Profile, step: int) -> None:
    at = Moment(step, time.time())
    actions = [(row.phase, row.action, *_cells(row)) for row in profile.rows]
    log.add_table(at, "profile/actions", Table(("Phase", "Action", *_PROFILE_COLUMNS), actions))
    if profile.scopes:
        scopes = [(row.phase, row.action, row.scope, *_cells(row)) for row in profile.scopes]
        log.add_table(at, "profile/scopes", Table(("Phase", "Action", "Scope", *_PROFILE_COLUMNS), scopes))
    rates = {f"profile/{row.phase}/{row.action}": row.samples_per_s for row in profile.rows}
    log.add_numbers(at, {name: rate for name, rate in rates.items() if rate is not None})


def _cells(row: ProfileRow | ScopeRow) -> tuple[Cell, ...]:
    return row.mean_s, row.std_s, row.calls, row.samples_per_s, row.total_s, row.percent
