"""The results of a run and of a dry run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.profile.table import Profile
from loopfeed.engine.run.compilation import Compiled, Traced
from loopfeed.engine.run.resolve import Resolved
from loopfeed.engine.runtime.record import RuntimeReport
from loopfeed.engine.stream.sinks import EvaluationRecord


@dataclass(frozen=True)
class TrainResult:
    """The trained model of a run, its losses, and how the run ended.

    Attributes:
        params, batch_stats: the trained model's pytrees; with ema_decay, their average.
        losses: float32 [updates done by this call], each step's mean loss.
        evaluations: the evaluations of this call, in order. If the lists among their metrics have more than a million
            numbers together, those of the oldest are left out; `eval.jsonl` has them all.
        steps_done: updates done.
        stopped_by: "steps" if all steps were done, "top1" at `stop_at_top1`, else the signal's name, "control-run",
            "callback" or "another process".
        num_params: number of learnable parameters.
        num_skipped: updates skipped because a gradient, or a weight that it would make, was NaN or infinite.
        compile_s: seconds to compile the program or to load it from the cache.
        from_cache: whether the program came from the cache on disk.
        train_s: seconds from the launch to the end of the loop.
        wait_s: seconds of these that the loop waited for batches.
        run_dir: the run folder, None without one; its URL as text if it is in a store.
        snapshot_step: the step of the newest snapshot, None if there is none.
        runtime: what the runtime did in all launches of the run.
        profile: how long each phase and action took, None without the setting `profile`.
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
    run_dir: Path | str | None
    runtime: RuntimeReport
    snapshot_step: int | None = None
    profile: Profile | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the run did all its steps or reached `stop_at_top1` without being stopped first."""
        return self.stopped_by in ("steps", "top1")


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run before its program is compiled.

    Attributes:
        config: the settings, with `epochs` converted to `steps`.
        resolved: what the settings resolve to.
        num_params: number of learnable parameters.
        state_bytes: size of the training state in bytes; each device has a copy.
        ring_bytes: host memory of this process for the batches read ahead, in bytes.
        num_devices, num_own_devices: number of devices of all processes, and of this one.
        start_step: number of updates done before.
    """

    config: TrainConfig
    resolved: Resolved
    num_params: int
    state_bytes: int
    ring_bytes: int
    num_devices: int
    num_own_devices: int
    start_step: int


@dataclass(frozen=True)
class DryRun:
    """The compiled program of a run that is not started.

    Attributes:
        compiled: the program, with XLA's analysis of memory and work.
        facts: what the run needs beside it.
        traced: the program before XLA optimised it.
        in_all_forms: the jaxpr of the program with layers in their forms for all platforms, if it was asked for.
    """

    compiled: Compiled
    facts: RunFacts
    traced: Traced
    in_all_forms: Any = None
