"""What an evaluation outside of a training gives back."""

import math
from dataclasses import dataclass

from engine.stream.sinks import EvaluationRecord


@dataclass(frozen=True)
class ClassResult:
    """What was counted of one class.

    Attributes:
        id, name: of the class, the name for people; both the label's digits where the images are arrays.
        num_images: counted.
        num_top1: of these, whose class ranks first.
    """

    id: str
    name: str
    num_images: int
    num_top1: int

    @property
    def top1(self) -> float:
        """Fraction of its images whose class ranks first, NaN of a class without images."""
        return self.num_top1 / self.num_images if self.num_images else math.nan


@dataclass(frozen=True)
class EvaluationResult:
    """What an evaluation gives back.

    Attributes:
        record: the numbers, as the training loop records them; its step is 0 where the weights do not tell theirs.
        num_top1, num_top5: images whose class is the first, or among the first five.
        classes: the same by label, none where it was not asked for.
        data: evaluated on, in words.
        is_mirrored: whether on mirror images too.
        compile_s: seconds of compiling, or of loading.
        from_cache: whether the program came from the cache on disk.
        evaluate_s: seconds from the launch to the end of the loop.
        wait_s: seconds of these that the loop waited for batches.
    """

    record: EvaluationRecord
    num_top1: int
    num_top5: int
    classes: tuple[ClassResult, ...]
    data: str
    is_mirrored: bool
    compile_s: float
    from_cache: bool
    evaluate_s: float
    wait_s: float
