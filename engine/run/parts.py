"""User-defined parts of a run, which replace the parts selected by the settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.feed.batches import BatchFunction, BatchSource, EvaluationArrays, EvaluationSource
from engine.objective.losses import Loss
from engine.objective.metrics import Metric, PerExample
from engine.program.statics import OwnFunctions
from engine.program.train_state import TrainModel


@dataclass(frozen=True)
class OwnParts:
    """The user-defined parts of a run; None stands for the part selected by the settings.

    Attributes:
        model, batches, evaluation, loss, metrics: as `engine.run.train.train` takes them.
    """

    model: TrainModel | None = None
    batches: BatchFunction | BatchSource | None = None
    evaluation: EvaluationSource | EvaluationArrays | None = None
    loss: Loss | None = None
    metrics: Mapping[str, Metric | PerExample] | None = None

    @property
    def functions(self) -> OwnFunctions:
        """The user-defined functions that are traced into the program."""
        return OwnFunctions(self.loss, self.metrics)

    def names(self) -> dict[str, Any]:
        """Return what identifies the user-defined functions in the record of a run: their names, by part."""
        loss = {} if self.loss is None else {"loss": name_of(self.loss)}
        return loss | ({"metrics": sorted(self.metrics)} if self.metrics else {})


def name_of(function: Any) -> str:
    """Return the name of a function with its module, or of its type if it has no name itself."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
