"""User-defined parts of a run, which replace the parts selected by the settings."""

from dataclasses import dataclass

from engine.feed.batches import BatchFunction, BatchSource, EvaluationArrays, EvaluationSource
from engine.program.train_state import TrainModel


@dataclass(frozen=True)
class OwnParts:
    """The user-defined parts of a run; None stands for the part selected by the settings.

    Attributes:
        model, batches, evaluation: as `engine.run.train.train` takes them.
    """

    model: TrainModel | None = None
    batches: BatchFunction | BatchSource | None = None
    evaluation: EvaluationSource | EvaluationArrays | None = None
