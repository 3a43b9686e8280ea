"""What a run gives back, and what is known of it before it is made."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.run.compilation import Compiled
from engine.run.resolve import Resolved
from engine.stream.sinks import EvaluationRecord


@dataclass(frozen=True)
class TrainResult:
    """What a run gives back.

    Attributes:
        params, batch_stats: the trained model's pytrees; with ema_decay, their average.
        losses: float32 [updates made by this call], each step's mean loss.
        evaluations: of this call, in order.
        steps_done: updates done.
        stopped_by: "steps" when all were made, "top1" at `stop_at_top1`, else the signal's name or "control-run".
        num_params: learnable numbers.
        num_skipped: updates that were not made because a gradient was not finite.
        compile_s: seconds of compiling, or of loading.
        from_cache: whether the program came from the cache on disk.
        train_s: seconds from the launch to the end of the loop.
        wait_s: seconds of these that the loop waited for batches.
        run_dir: the run folder, None where none was asked for.
        snapshot_step: of its newest snapshot, None where there is none.
    """

    params: Any
    batch_stats: Any
    losses: NDArray[np.float32]
    evaluations: tuple[EvaluationRecord, ...]
    steps_done: int
    stopped_by: str
    num_params: int
    num_skipped: int
    compile_s: float
    from_cache: bool
    train_s: float
    wait_s: float
    run_dir: Path | None
    snapshot_step: int | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the run came to its own end, and was not stopped."""
        return self.stopped_by in ("steps", "top1")


@dataclass(frozen=True)
class DryRun:
    """What is known of a run before it is made.

    Attributes:
        compiled: the program, with XLA's account of memory and work.
        num_params: learnable numbers.
        resolved: the settings' meaning.
        ring_bytes: host memory of the batches read ahead.
        host_bytes: memory of this machine, None where it cannot be told.
    """

    compiled: Compiled
    num_params: int
    resolved: Resolved
    ring_bytes: int
    host_bytes: int | None
