"""The training engine: order, infeed, the compiled program, outfeed, and the commands around them.

The public names are loaded on first use, so that the commands can print their help without waiting for jax.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config import TrainConfig
    from engine.evaluation.result import EvaluationResult
    from engine.evaluation.run import evaluate, evaluate_weights, run_settings
    from engine.feed.batches import BatchSource
    from engine.replay.replay import replay_run
    from engine.replay.report import Difference, ReplayReport
    from engine.run.result import TrainResult
    from engine.run.train import train

__all__ = [
    "BatchSource",
    "Difference",
    "EvaluationResult",
    "ReplayReport",
    "TrainConfig",
    "TrainResult",
    "evaluate",
    "evaluate_weights",
    "replay_run",
    "run_settings",
    "train",
]

_HOME = {
    "BatchSource": "engine.feed.batches",
    "Difference": "engine.replay.report",
    "EvaluationResult": "engine.evaluation.result",
    "ReplayReport": "engine.replay.report",
    "TrainConfig": "engine.config",
    "TrainResult": "engine.run.result",
    "evaluate": "engine.evaluation.run",
    "evaluate_weights": "engine.evaluation.run",
    "replay_run": "engine.replay.replay",
    "run_settings": "engine.evaluation.run",
    "train": "engine.run.train",
}


def __getattr__(name: str) -> Any:
    """Loads a public name from the module that defines it (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'engine' has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
