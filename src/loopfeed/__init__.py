"""Loopfeed: training of image classifiers by one compiled program per run.

The names in `__all__` are the public API; any other name may move or change without notice. They are loaded on first
use: the commands print their help without waiting for jax, and what packs or reads images never imports it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loopfeed.engine.config import TrainConfig
    from loopfeed.engine.crossing.devices import DeviceInfo, devices
    from loopfeed.engine.evaluation.predict import PredictionResult, Predictor, predict
    from loopfeed.engine.evaluation.result import EvaluationResult, ImagePredictions
    from loopfeed.engine.evaluation.run import evaluate, evaluate_weights
    from loopfeed.engine.export.export import ExportResult, export_model
    from loopfeed.engine.feed.batches import BatchSource, EvaluationSource
    from loopfeed.engine.feed.feeder import FeederError
    from loopfeed.engine.inspection.explain import explain_program
    from loopfeed.engine.inspection.report import ProgramReport
    from loopfeed.engine.inspection.show_batch import ShownBatch, show_batch
    from loopfeed.engine.inspection.step_check import StepCheck, check_step
    from loopfeed.engine.loggers.tensorboard import TensorBoardSink
    from loopfeed.engine.loggers.wandb import WandbSink
    from loopfeed.engine.objective.metrics import (
        Metric,
        balanced_accuracy,
        confusion_matrix,
        expected_calibration_error,
        mean_average_precision,
        mean_of,
        top_k,
    )
    from loopfeed.engine.opened_run import Mistakes, OpenedRun, open_run
    from loopfeed.engine.processes import ThisProcess, join_processes, this_process
    from loopfeed.engine.profile.table import Profile
    from loopfeed.engine.program.train_state import TrainModel
    from loopfeed.engine.recipes import LoadedRecipe, load_recipe, recipe_names
    from loopfeed.engine.recipes.stages_file import read_stages
    from loopfeed.engine.records.saved_weights import read_weights
    from loopfeed.engine.records.trained_run import run_settings
    from loopfeed.engine.replay.replay import replay_run
    from loopfeed.engine.replay.report import Difference, ReplayReport
    from loopfeed.engine.report_page.report import report_run
    from loopfeed.engine.run.background import BackgroundRun
    from loopfeed.engine.run.callbacks import Callback, RunHandle
    from loopfeed.engine.run.interrupted import RunInterrupted
    from loopfeed.engine.run.result import TrainResult
    from loopfeed.engine.run.run import NonFiniteError
    from loopfeed.engine.run.train import train
    from loopfeed.engine.runtime.record import RuntimeReport
    from loopfeed.engine.runtime.report import describe_runtime
    from loopfeed.engine.runtime.runtime_file import read_runtime
    from loopfeed.engine.settings import ConfigError, SettingError
    from loopfeed.engine.sizing.device_rates import DeviceRates
    from loopfeed.engine.stages import Stage
    from loopfeed.engine.stream.sinks import EvaluationRecord, LossRecord, Sink
    from loopfeed.models.layers.batch_norm import RunningStats, batch_norm
    from loopfeed.models.layers.convolution import convolution
    from loopfeed.models.layers.head import dense, global_average_pool
    from loopfeed.models.layers.lax_convolution import conv_general_dilated
    from loopfeed.models.layers.pooling import max_pool
    from loopfeed.models.model import Model
    from loopfeed.models.registry import build_model, count_params, model_names
    from loopfeed.models.torchvision_names import from_torchvision, to_torchvision
    from loopfeed.preprocess.demo.demo_set import pack_demo
    from loopfeed.preprocess.packing.pack import PackResult
    from loopfeed.preprocess.packing.pack_source import pack
    from loopfeed.preprocess.pixels import pack_rgb, unpack_rgb
    from loopfeed.preprocess.shards.damages import Damage
    from loopfeed.preprocess.shards.location import ShardError
    from loopfeed.preprocess.shards.reader import ChangedShardError, ShardSplit, open_split
    from loopfeed.preprocess.shards.shard_cache import ShardCache
    from loopfeed.preprocess.shards.splits import list_splits
    from loopfeed.preprocess.shards.verify import verify_split

_HOME = {
    "BackgroundRun": "loopfeed.engine.run.background",
    "BatchSource": "loopfeed.engine.feed.batches",
    "Callback": "loopfeed.engine.run.callbacks",
    "ChangedShardError": "loopfeed.preprocess.shards.reader",
    "ConfigError": "loopfeed.engine.settings",
    "Damage": "loopfeed.preprocess.shards.damages",
    "DeviceInfo": "loopfeed.engine.crossing.devices",
    "DeviceRates": "loopfeed.engine.sizing.device_rates",
    "Difference": "loopfeed.engine.replay.report",
    "EvaluationRecord": "loopfeed.engine.stream.sinks",
    "EvaluationResult": "loopfeed.engine.evaluation.result",
    "EvaluationSource": "loopfeed.engine.feed.batches",
    "ExportResult": "loopfeed.engine.export.export",
    "FeederError": "loopfeed.engine.feed.feeder",
    "ImagePredictions": "loopfeed.engine.evaluation.result",
    "LoadedRecipe": "loopfeed.engine.recipes",
    "LossRecord": "loopfeed.engine.stream.sinks",
    "Metric": "loopfeed.engine.objective.metrics",
    "Mistakes": "loopfeed.engine.opened_run",
    "Model": "loopfeed.models.model",
    "NonFiniteError": "loopfeed.engine.run.run",
    "OpenedRun": "loopfeed.engine.opened_run",
    "PackResult": "loopfeed.preprocess.packing.pack",
    "PredictionResult": "loopfeed.engine.evaluation.predict",
    "Predictor": "loopfeed.engine.evaluation.predict",
    "Profile": "loopfeed.engine.profile.table",
    "ProgramReport": "loopfeed.engine.inspection.report",
    "ReplayReport": "loopfeed.engine.replay.report",
    "RunHandle": "loopfeed.engine.run.callbacks",
    "RunInterrupted": "loopfeed.engine.run.interrupted",
    "RunningStats": "loopfeed.models.layers.batch_norm",
    "RuntimeReport": "loopfeed.engine.runtime.record",
    "SettingError": "loopfeed.engine.settings",
    "ShardCache": "loopfeed.preprocess.shards.shard_cache",
    "ShardError": "loopfeed.preprocess.shards.location",
    "ShardSplit": "loopfeed.preprocess.shards.reader",
    "ShownBatch": "loopfeed.engine.inspection.show_batch",
    "Sink": "loopfeed.engine.stream.sinks",
    "Stage": "loopfeed.engine.stages",
    "StepCheck": "loopfeed.engine.inspection.step_check",
    "TensorBoardSink": "loopfeed.engine.loggers.tensorboard",
    "ThisProcess": "loopfeed.engine.processes",
    "TrainConfig": "loopfeed.engine.config",
    "TrainModel": "loopfeed.engine.program.train_state",
    "TrainResult": "loopfeed.engine.run.result",
    "WandbSink": "loopfeed.engine.loggers.wandb",
    "balanced_accuracy": "loopfeed.engine.objective.metrics",
    "batch_norm": "loopfeed.models.layers.batch_norm",
    "build_model": "loopfeed.models.registry",
    "check_step": "loopfeed.engine.inspection.step_check",
    "confusion_matrix": "loopfeed.engine.objective.metrics",
    "conv_general_dilated": "loopfeed.models.layers.lax_convolution",
    "convolution": "loopfeed.models.layers.convolution",
    "count_params": "loopfeed.models.registry",
    "dense": "loopfeed.models.layers.head",
    "describe_runtime": "loopfeed.engine.runtime.report",
    "devices": "loopfeed.engine.crossing.devices",
    "evaluate": "loopfeed.engine.evaluation.run",
    "evaluate_weights": "loopfeed.engine.evaluation.run",
    "expected_calibration_error": "loopfeed.engine.objective.metrics",
    "explain_program": "loopfeed.engine.inspection.explain",
    "export_model": "loopfeed.engine.export.export",
    "from_torchvision": "loopfeed.models.torchvision_names",
    "global_average_pool": "loopfeed.models.layers.head",
    "join_processes": "loopfeed.engine.processes",
    "list_splits": "loopfeed.preprocess.shards.splits",
    "load_recipe": "loopfeed.engine.recipes",
    "max_pool": "loopfeed.models.layers.pooling",
    "mean_average_precision": "loopfeed.engine.objective.metrics",
    "mean_of": "loopfeed.engine.objective.metrics",
    "model_names": "loopfeed.models.registry",
    "open_run": "loopfeed.engine.opened_run",
    "open_split": "loopfeed.preprocess.shards.reader",
    "pack": "loopfeed.preprocess.packing.pack_source",
    "pack_demo": "loopfeed.preprocess.demo.demo_set",
    "pack_rgb": "loopfeed.preprocess.pixels",
    "predict": "loopfeed.engine.evaluation.predict",
    "read_runtime": "loopfeed.engine.runtime.runtime_file",
    "read_stages": "loopfeed.engine.recipes.stages_file",
    "read_weights": "loopfeed.engine.records.saved_weights",
    "recipe_names": "loopfeed.engine.recipes",
    "replay_run": "loopfeed.engine.replay.replay",
    "report_run": "loopfeed.engine.report_page.report",
    "run_settings": "loopfeed.engine.records.trained_run",
    "show_batch": "loopfeed.engine.inspection.show_batch",
    "this_process": "loopfeed.engine.processes",
    "to_torchvision": "loopfeed.models.torchvision_names",
    "top_k": "loopfeed.engine.objective.metrics",
    "train": "loopfeed.engine.run.train",
    "unpack_rgb": "loopfeed.preprocess.pixels",
    "verify_split": "loopfeed.preprocess.shards.verify",
}

__all__ = [
    "BackgroundRun",
    "BatchSource",
    "Callback",
    "ChangedShardError",
    "ConfigError",
    "Damage",
    "DeviceInfo",
    "DeviceRates",
    "Difference",
    "EvaluationRecord",
    "EvaluationResult",
    "EvaluationSource",
    "ExportResult",
    "FeederError",
    "ImagePredictions",
    "LoadedRecipe",
    "LossRecord",
    "Metric",
    "Mistakes",
    "Model",
    "NonFiniteError",
    "OpenedRun",
    "PackResult",
    "PredictionResult",
    "Predictor",
    "Profile",
    "ProgramReport",
    "ReplayReport",
    "RunHandle",
    "RunInterrupted",
    "RunningStats",
    "RuntimeReport",
    "SettingError",
    "ShardCache",
    "ShardError",
    "ShardSplit",
    "ShownBatch",
    "Sink",
    "Stage",
    "StepCheck",
    "TensorBoardSink",
    "ThisProcess",
    "TrainConfig",
    "TrainModel",
    "TrainResult",
    "WandbSink",
    "balanced_accuracy",
    "batch_norm",
    "build_model",
    "check_step",
    "confusion_matrix",
    "conv_general_dilated",
    "convolution",
    "count_params",
    "dense",
    "describe_runtime",
    "devices",
    "evaluate",
    "evaluate_weights",
    "expected_calibration_error",
    "explain_program",
    "export_model",
    "from_torchvision",
    "global_average_pool",
    "join_processes",
    "list_splits",
    "load_recipe",
    "max_pool",
    "mean_average_precision",
    "mean_of",
    "model_names",
    "open_run",
    "open_split",
    "pack",
    "pack_demo",
    "pack_rgb",
    "predict",
    "read_runtime",
    "read_stages",
    "read_weights",
    "recipe_names",
    "replay_run",
    "report_run",
    "run_settings",
    "show_batch",
    "this_process",
    "to_torchvision",
    "top_k",
    "train",
    "unpack_rgb",
    "verify_split",
]


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it (PEP 562)."""
    from importlib import import_module

    if name not in _HOME:
        near = import_module("loopfeed.preprocess.suggestions").describe_nearest(name, __all__, "dir(loopfeed)")
        raise AttributeError(f"loopfeed has no {name!r}{near}")
    as_public = import_module("loopfeed.engine.python_calls").public
    found = globals()[name] = as_public(getattr(import_module(_HOME[name]), name))
    return found


def __dir__() -> list[str]:
    return __all__
