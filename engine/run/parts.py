"""What a caller brings in place of what the settings name."""

from dataclasses import dataclass

from engine.feed.batches import BatchFunction, BatchSource, EvaluationArrays, EvaluationSource
from engine.program.train_state import TrainModel


@dataclass(frozen=True)
class OwnParts:
    """The caller's own parts of a run; None leaves each to the settings.

    Attributes:
        model, batches, evaluation: as `engine.run.train.train` takes them.
    """

    model: TrainModel | None = None
    batches: BatchFunction | BatchSource | None = None
    evaluation: EvaluationSource | EvaluationArrays | None = None
