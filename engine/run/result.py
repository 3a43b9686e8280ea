"""The result of a run, and what describes its weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopfeed.engine.charts.card import html_card, text_card
from loopfeed.engine.charts.figure import Figure
from loopfeed.engine.charts.history import History, history_in_memory, read_history
from loopfeed.engine.compilation.ahead_of_time import Compiled
from loopfeed.engine.feed.batches import image_shape
from loopfeed.engine.owners import storage_options_of
from loopfeed.engine.processes import this_process
from loopfeed.engine.profile.table import Profile
from loopfeed.engine.program.train_state import TrainState
from loopfeed.engine.python_calls import in_python_words
from loopfeed.engine.records.evaluation_log import describe_evaluations
from loopfeed.engine.records.loss_log import COMPLETE_ENDS, end_words
from loopfeed.engine.records.stored.reading import local_copy, logs_only
from loopfeed.engine.records.weights_metadata import describe_weights, without_classes
from loopfeed.engine.run.run import Run
from loopfeed.engine.runtime.record import RuntimeReport
from loopfeed.engine.stream.sinks import SHOWN_MEAN_STEPS, EvaluationRecord
from loopfeed.preprocess.quantities import quantity


@dataclass(frozen=True, repr=False)
class TrainResult:
    """The trained model of a run, its losses, and how the run ended; printed, and in a notebook, it is a short card.

    Attributes:
        params, batch_stats: the trained model's pytrees; with ema_decay, their average.
        losses: float32 [updates done by this call], each step's mean loss.
        evaluations: the evaluations of this call, in order. If the lists among their metrics have more than a million
            numbers together, those of the oldest are left out; `eval.jsonl` has them all.
        steps_done: updates done.
        stopped_by: "steps" if all steps were done, "top1" at `stop_at_top1`, "patience" by `stop_patience`, else the
            signal's name, "control-run", "callback" or "another process".
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
    _storage_options: Mapping[str, str] | None = None
    _keep_best: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the run did all its steps, or its evaluations ended it, without being stopped first."""
        return self.stopped_by in COMPLETE_ENDS

    @property
    def history(self) -> History:
        """All steps and evaluations of all launches of the run, read from its folder; without one, those of this call.

        Raises:
            OSError: the folder cannot be read.
            ValueError: the store of a URL cannot be read.
        """
        if self.run_dir is None:
            first = self.steps_done - len(self.losses) + 1
            return history_in_memory(self.losses, first, self.evaluations)
        with local_copy(self.run_dir, self._storage_options, logs_only) as folder:
            return read_history(folder, self.steps_done)

    def plot(self) -> Figure:
        """Return charts of `history`, which a notebook shows; `save` writes them to an SVG file."""
        return self.history.plot()

    def __repr__(self) -> str:
        return text_card(*self._card)

    def _repr_html_(self) -> str:
        """Return the card as a notebook shows it."""
        return html_card(*self._card)

    @property
    def _card(self) -> tuple[str, list[tuple[str, str]]]:
        """The title of the card and its lines."""
        done = f"run {in_python_words(end_words(self.stopped_by))}: {quantity(self.steps_done, 'step')}"
        if len(self.losses) != self.steps_done:
            done += f", {len(self.losses):,} of them"
        facts = [] if not len(self.losses) else [("loss", described_losses(self.losses))]
        if self.evaluations:
            launch = " of this launch" * (len(self.losses) != self.steps_done)
            facts.append(("evaluation", f"{describe_evaluations(self.evaluations, self._keep_best)}{launch}"))
        if self.num_skipped:
            facts.append(("skipped", f"{quantity(self.num_skipped, 'update')} that would have been NaN or infinite"))
        facts.append(("parameters", f"{self.num_params:,}"))
        if self.run_dir is not None:
            facts.append(("folder", str(self.run_dir)))
            if not self.is_complete and self.snapshot_step is not None:
                facts.append(("snapshot", f"of step {self.snapshot_step:,}: train with resume=True to go on"))
        verdict = self.runtime.verdict
        if verdict is not None and len(self.losses):
            facts.append(("verdict", in_python_words(verdict.line)))
        return f"{done} in {self.train_s:.1f} s", facts


def described_losses(losses: NDArray[np.float32]) -> str:
    """Return the last of some losses and the mean that a progress line ends with, as text; there must be one."""
    last = losses[-SHOWN_MEAN_STEPS:]
    return f"{losses[-1]:z.4f} (mean of the last {len(last)}: {last.mean(dtype=np.float64):z.4f})"


# The names of 20,000 classes take about 1 MB.
_MOST_METADATA_CHARACTERS = 1 << 22


def result_of(
    run: Run,
    compiled: Compiled,
    state: TrainState,
    failure: BaseException | None,
    runtime: RuntimeReport,
) -> TrainResult:
    """Return the result of a run; `failure` is its error, None if it has none."""
    config, steps_done, top1 = run.config, int(state.step), float(state.top1)
    if config.stop_at_top1 is not None and top1 >= np.float32(config.stop_at_top1):
        stopped_by = "top1"
    else:
        # After a stop during the last evaluation, that evaluation is still due.
        is_done = steps_done >= config.steps and not bool(state.owes_evaluation)
        others = "another process" if this_process().count > 1 else "steps"
        stopped_by = "steps" if is_done else run.board.stop_reason or others
        num_worse = 0 if state.patience is None else int(state.patience.num_worse)
        if config.stop_patience is not None and num_worse >= config.stop_patience and not is_done:
            stopped_by = "patience"
    return TrainResult(
        params=state.evaluated.params,
        batch_stats=state.evaluated.batch_stats,
        losses=run.stream.losses,
        evaluations=tuple(run.stream.evaluations),
        steps_done=steps_done,
        stopped_by=stopped_by if failure is None else "error",
        num_params=run.num_params,
        num_skipped=int(state.update.skips.total),
        compile_s=compiled.compile_s,
        from_cache=compiled.from_cache,
        train_s=run.train_s,
        wait_s=run.stream.wait_s,
        run_dir=None if run.folder is None else run.folder.path if run.stored is None else run.config.run_dir,
        runtime=runtime,
        profile=run.profiling.profile,
        _storage_options=storage_options_of(run.config),
        _keep_best=run.config.keep_best,
    )


def metadata_of(run: Run) -> dict[str, str]:
    """Return the metadata of the weights of a run, whichever step they are from."""
    data, size = run.data, run.config.eval_image_size or run.config.image_size
    return describe_weights(
        model=run.model_name,
        height=size or image_shape(data.source)[0],
        width=size or image_shape(data.source)[1],
        mean=data.mean,
        std=run.std,
        num_classes=data.num_classes,
        classes=data.classes,
        resize_rule=data.resize_rule,
        targets=data.targets,
        loss=run.config.loss if run.parts.loss is None else None,
    )


def recorded_metadata(run: Run) -> dict[str, str]:
    """Return the metadata to record in `config.json`, whose size is limited: without class names if they are long."""
    metadata = metadata_of(run)
    return metadata if sum(map(len, metadata.values())) <= _MOST_METADATA_CHARACTERS else without_classes(metadata)
