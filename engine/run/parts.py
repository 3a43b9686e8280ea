"""User-defined parts of a run, which replace the parts selected by the settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from engine.feed.batches import BatchFunction, BatchSource, EvaluationArrays, EvaluationSource
from engine.images.own_augment import OwnAugmentation
from engine.named_parts import NamedPart
from engine.objective.losses import Loss
from engine.objective.metrics import Metric, PerExample
from engine.program.statics import OwnFunctions
from engine.program.train_state import TrainModel
from engine.updates.own_optimizer import OwnOptimizer
from engine.updates.update import Schedule


@dataclass(frozen=True)
class OwnParts:
    """The user-defined parts of a run; None stands for the part selected by the settings.

    Attributes:
        model, batches, evaluation, loss, metrics, optimizer, schedule, augment: as `engine.run.train.train` takes them.
        named: the names and sources of the parts that were named on a command line.
    """

    model: TrainModel | None = None
    batches: BatchFunction | BatchSource | None = None
    evaluation: EvaluationSource | EvaluationArrays | None = None
    loss: Loss | None = None
    metrics: Mapping[str, Metric | PerExample] | None = None
    optimizer: OwnOptimizer | None = None
    schedule: Schedule | None = None
    augment: OwnAugmentation | None = None
    named: Mapping[str, NamedPart] = field(default_factory=dict)

    @property
    def determine_nothing(self) -> bool:
        """Whether the trained weights and their evaluation are those without user-defined parts."""
        own = (self.model, self.batches, self.evaluation, self.loss, self.optimizer, self.schedule, self.augment)
        return all(each is None for each in own)

    @property
    def functions(self) -> OwnFunctions:
        """The user-defined functions that are traced into the program."""
        return OwnFunctions(self.loss, self.metrics, self.optimizer, self.schedule, self.augment)

    def names(self) -> dict[str, Any]:
        """Return what identifies the user-defined functions in the record of a run: their names, by part."""
        loss = {} if self.loss is None else {"loss": name_of(self.loss)}
        functions = {"optimizer": self.optimizer, "schedule": self.schedule, "augment": self.augment}
        return (
            loss
            | ({"metrics": sorted(self.metrics)} if self.metrics else {})
            | {part: name_of(own) for part, own in functions.items() if own is not None}
        )


def name_of(function: Any) -> str:
    """Return the name of a function with its module, or of its type if it has no name itself.

    A `functools.partial` has the name of its function.
    """
    while isinstance(function, partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
