"""The training engine: image order, infeed, compiled training program, outfeed, and the commands that use them.

The names in `__all__` are the public API; any other name may move or change without notice. They are loaded on first
use, so that the commands can print their help without waiting for jax.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config import TrainConfig
    from engine.crossing.devices import DeviceInfo, devices
    from engine.evaluation.predict import PredictionResult, predict
    from engine.evaluation.result import EvaluationResult, ImagePredictions
    from engine.evaluation.run import evaluate, evaluate_weights
    from engine.evaluation.trained_run import run_settings
    from engine.feed.batches import BatchSource, EvaluationSource
    from engine.feed.feeder import FeederError
    from engine.inspection.explain import explain_program
    from engine.inspection.report import ProgramReport
    from engine.loggers.tensorboard import TensorBoardSink
    from engine.loggers.wandb import WandbSink
    from engine.objective.metrics import (
        Metric,
        balanced_accuracy,
        confusion_matrix,
        expected_calibration_error,
        mean_average_precision,
        mean_of,
        top_k,
    )
    from engine.processes import ThisProcess, join_processes, this_process
    from engine.profile.table import Profile
    from engine.program.train_state import TrainModel
    from engine.recipes import LoadedRecipe, load_recipe, recipe_names
    from engine.records.saved_weights import read_weights
    from engine.replay.replay import replay_run
    from engine.replay.report import Difference, ReplayReport
    from engine.report_page.report import report_run
    from engine.run.callbacks import Callback, RunHandle
    from engine.run.nonfinite import NonFiniteError
    from engine.run.result import TrainResult
    from engine.run.show_batch import ShownBatch, show_batch
    from engine.run.step_check import StepCheck, check_step
    from engine.run.train import train
    from engine.runtime.record import RuntimeReport
    from engine.runtime.report import describe_runtime
    from engine.runtime.runtime_file import read_runtime
    from engine.settings import ConfigError, SettingError
    from engine.sizing.device_rates import DeviceRates
    from engine.stream.sinks import EvaluationRecord, LossRecord, Sink

_HOME = {
    "BatchSource": "engine.feed.batches",
    "Callback": "engine.run.callbacks",
    "ConfigError": "engine.settings",
    "DeviceInfo": "engine.crossing.devices",
    "DeviceRates": "engine.sizing.device_rates",
    "Difference": "engine.replay.report",
    "EvaluationRecord": "engine.stream.sinks",
    "EvaluationResult": "engine.evaluation.result",
    "EvaluationSource": "engine.feed.batches",
    "FeederError": "engine.feed.feeder",
    "ImagePredictions": "engine.evaluation.result",
    "LoadedRecipe": "engine.recipes",
    "LossRecord": "engine.stream.sinks",
    "Metric": "engine.objective.metrics",
    "NonFiniteError": "engine.run.nonfinite",
    "PredictionResult": "engine.evaluation.predict",
    "Profile": "engine.profile.table",
    "ProgramReport": "engine.inspection.report",
    "ReplayReport": "engine.replay.report",
    "RunHandle": "engine.run.callbacks",
    "RuntimeReport": "engine.runtime.record",
    "SettingError": "engine.settings",
    "ShownBatch": "engine.run.show_batch",
    "Sink": "engine.stream.sinks",
    "StepCheck": "engine.run.step_check",
    "TensorBoardSink": "engine.loggers.tensorboard",
    "ThisProcess": "engine.processes",
    "TrainConfig": "engine.config",
    "TrainModel": "engine.program.train_state",
    "TrainResult": "engine.run.result",
    "WandbSink": "engine.loggers.wandb",
    "balanced_accuracy": "engine.objective.metrics",
    "check_step": "engine.run.step_check",
    "confusion_matrix": "engine.objective.metrics",
    "describe_runtime": "engine.runtime.report",
    "devices": "engine.crossing.devices",
    "evaluate": "engine.evaluation.run",
    "evaluate_weights": "engine.evaluation.run",
    "expected_calibration_error": "engine.objective.metrics",
    "explain_program": "engine.inspection.explain",
    "join_processes": "engine.processes",
    "load_recipe": "engine.recipes",
    "mean_average_precision": "engine.objective.metrics",
    "mean_of": "engine.objective.metrics",
    "predict": "engine.evaluation.predict",
    "read_runtime": "engine.runtime.runtime_file",
    "read_weights": "engine.records.saved_weights",
    "recipe_names": "engine.recipes",
    "replay_run": "engine.replay.replay",
    "report_run": "engine.report_page.report",
    "run_settings": "engine.evaluation.trained_run",
    "show_batch": "engine.run.show_batch",
    "this_process": "engine.processes",
    "top_k": "engine.objective.metrics",
    "train": "engine.run.train",
}

__all__ = [
    "BatchSource",
    "Callback",
    "ConfigError",
    "DeviceInfo",
    "DeviceRates",
    "Difference",
    "EvaluationRecord",
    "EvaluationResult",
    "EvaluationSource",
    "FeederError",
    "ImagePredictions",
    "LoadedRecipe",
    "LossRecord",
    "Metric",
    "NonFiniteError",
    "PredictionResult",
    "Profile",
    "ProgramReport",
    "ReplayReport",
    "RunHandle",
    "RuntimeReport",
    "SettingError",
    "ShownBatch",
    "Sink",
    "StepCheck",
    "TensorBoardSink",
    "ThisProcess",
    "TrainConfig",
    "TrainModel",
    "TrainResult",
    "WandbSink",
    "balanced_accuracy",
    "check_step",
    "confusion_matrix",
    "describe_runtime",
    "devices",
    "evaluate",
    "evaluate_weights",
    "expected_calibration_error",
    "explain_program",
    "join_processes",
    "load_recipe",
    "mean_average_precision",
    "mean_of",
    "predict",
    "read_runtime",
    "read_weights",
    "recipe_names",
    "replay_run",
    "report_run",
    "run_settings",
    "show_batch",
    "this_process",
    "top_k",
    "train",
]


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'engine' has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
