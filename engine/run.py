"""A run from its settings to its result: claim the folder, resolve, compile, launch, wait, raise or return.

Owns the order of these and what a run leaves behind; a launch of the program itself is `engine.launch`'s.
"""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from engine.batches import BatchFunction, BatchSource, EvaluationArrays, EvaluationSource
from engine.compilation import Compiled, caching_compilations
from engine.config import TrainConfig
from engine.epochs import settle_epochs
from engine.keys import plain_keys
from engine.launch import Launch, NonFiniteError
from engine.locations import with_absolute_paths
from engine.outfeed import PushedSnapshot
from engine.records.control_log import ControlEvent, ControlLog
from engine.records.control_requests import ControlMailbox
from engine.records.recorded_run import RecordedRun, read_recorded
from engine.records.run_folder import RunFolder
from engine.records.snapshot_writer import SnapshotWriter
from engine.records.weights import name_tensors
from engine.resolve import check_beginning, own_parts
from engine.result import DryRun, TrainResult
from engine.resume import (
    GIVEN_WEIGHTS,
    StartingPoint,
    check_data,
    check_given_weights,
    check_own,
    check_settings,
    check_steps,
    find_cuts,
    find_start,
    go_back,
    note_changes,
    told_changes,
    told_factor,
    told_versions,
)
from engine.sinks import RunFolderSink, Sink
from engine.train_state import TrainModel, TrainState
from preprocess.memory import host_memory_bytes

# How long the end of a run waits for its last snapshot.
_SNAPSHOT_TIMEOUT_S = 600.0


def train(
    config: TrainConfig,
    *,
    model: TrainModel | None = None,
    batches: BatchFunction | BatchSource | None = None,
    evaluation: EvaluationSource | EvaluationArrays | None = None,
    sinks: Sequence[Sink] = (),
    notify: Callable[[str], None] = lambda _: None,
    origins: Mapping[str, str] | None = None,
) -> TrainResult:
    """Trains a model in one compiled program.

    Args:
        config: the settings.
        model: your own, in place of one of the registry: `init(key)` gives (params, batch_stats), and
            `apply(params, batch_stats, images, train=True)` gives (logits [B, K], new batch_stats) for float32 images
            [B, H, W, 3]. Convolutions of `models.convolution` stay fast inside the loop on a CPU.
        batches: your own, in place of a packed data set: a function from the step (from 0) to (uint32 [B, H, W] packed
            pixels, integer [B] labels), called in order from one thread; or a `BatchSource`. A resumed run asks for
            the steps from where it goes on.
        evaluation: your own: a tuple of all the images to evaluate on (uint32 [N, H, W] packed pixels, integer [N]
            labels), or an `EvaluationSource`; in place of a split of the data set.
        sinks: further takers of the loss stream.
        notify: told in words what the run does before its first step and after its last.
        origins: where settings came from, by name, for `config.json`; None tells defaults from the rest.

    Returns:
        The trained model and its losses. SIGINT and SIGTERM, where the caller is the main thread, end the run at the
        next step and are named in `stopped_by`; a second one raises KeyboardInterrupt.

    Raises:
        ValueError: for settings that do not fit each other, the data or the run that is resumed; before any step.
        BaseException: whatever the batch source or a sink raised in mid-run, after the loop has ended cleanly and what
            was trained so far is in the run folder.
    """
    config = settle_epochs(config, own_batches=batches is not None, notify=notify)
    if config.run_dir is None:
        if config.resume or config.snapshot_every_steps:
            _named_folder(config, "resume" if config.resume else "snapshot_every_steps")
        return _train_unrecorded(config, model, batches, evaluation, sinks, notify)
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder(Path(config.run_dir), overwrite=config.overwrite, resume=config.resume))
        recorded, start = _find_start(config, notify, model, batches, evaluation)
        launch = Launch(config, stack, start, model=model, batches=batches, evaluation=evaluation, notify=notify)
        earlier: list[dict[str, Any]] = []
        cuts: dict[Path, int] = {}
        if recorded is not None:
            _check_continues(launch, recorded, notify)
            cuts = find_cuts(folder.path, start)
            earlier = note_changes(recorded, config, start.step)
        recording = stack.enter_context(_RecordingLaunch(config, launch, folder))
        compiled, state = _compile(config, launch)
        # Only now is anything taken from the run that is there: whatever could be refused is behind us.
        start = launch.start
        if recorded is None:
            folder.clear()
        else:
            go_back(folder, start, cuts)
        origins = _origins(config) if origins is None else origins
        resolved = {
            **launch.resolved.to_json(),
            **launch.crossings,
            "learning_rate": config.peak_learning_rate,
            GIVEN_WEIGHTS: _given_digest(launch, recorded),
        }
        folder.write_config(
            with_absolute_paths(config), resolved, launch.resolved.manifest_digest, origins=origins, earlier=earlier
        )
        return recording.run(compiled, state, sinks)


def plan_run(
    config: TrainConfig,
    *,
    model: TrainModel | None = None,
    batches: BatchFunction | BatchSource | None = None,
    evaluation: EvaluationSource | EvaluationArrays | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> DryRun:
    """Resolves and compiles what `train` would run or resume, and runs nothing; arguments and errors as there."""
    config = settle_epochs(config, own_batches=batches is not None, notify=notify)
    recorded, start = _find_start(config, notify, model, batches, evaluation)
    with ExitStack() as stack:
        launch = Launch(config, stack, start, model=model, batches=batches, evaluation=evaluation, notify=notify)
        if recorded is not None:
            _check_continues(launch, recorded, notify)
        with caching_compilations(config.compilation_cache):
            compiled = launch.compile()
        return DryRun(compiled, launch.num_params, launch.resolved, launch.ring_bytes, host_memory_bytes())


def _train_unrecorded(
    config: TrainConfig,
    model: TrainModel | None,
    batches: BatchFunction | BatchSource | None,
    evaluation: EvaluationSource | EvaluationArrays | None,
    sinks: Sequence[Sink],
    notify: Callable[[str], None],
) -> TrainResult:
    """Runs without a trace on disk."""
    _, start = _find_start(config, notify, model, batches, evaluation)
    with ExitStack() as stack:
        launch = Launch(config, stack, start, model=model, batches=batches, evaluation=evaluation, notify=notify)
        compiled, state = _compile(config, launch)
        state = launch.run(compiled, state, sinks)
        if (failure := launch.failure(state)) is not None:
            raise failure
        return _result(launch, compiled, state, None)


def _named_folder(config: TrainConfig, setting: str) -> Path:
    if config.run_dir is None:
        raise ValueError(f"the setting {setting} needs a run folder, got none: name it, TrainConfig(run_dir=…)")
    return Path(config.run_dir)


def _check_continues(launch: Launch, recorded: RecordedRun, notify: Callable[[str], None]) -> None:
    """Raises ValueError where what was opened is not the run's; else says what the resume changes and what holds."""
    check_data(launch.resolved, recorded)
    check_given_weights(launch.given_digest, recorded)
    for told in (told_changes(launch.config, recorded.config), told_factor(launch.start)):
        if told is not None:
            notify(told)


def _find_start(
    config: TrainConfig, notify: Callable[[str], None], model: object, batches: object, evaluation: object
) -> tuple[RecordedRun | None, StartingPoint]:
    if not config.resume:
        check_beginning(config, notify, own_batches=batches is not None, own_evaluation=evaluation is not None)
        return None, StartingPoint()
    path = _named_folder(config, "resume")
    recorded = read_recorded(path)
    check_own(recorded, path, model=model, batches=batches)
    check_settings(config, recorded.config)
    start = find_start(path, notify)
    check_steps(config, recorded.config, start.step)
    where = f"the snapshot of step {start.step:,}" if start.snapshot else "its beginning, as it has no snapshot"
    notify(f"resuming {path} from {where}")
    if start.snapshot and start.step >= config.steps:
        notify(f"no step is left to make: the run is to have {config.steps:,}; give --steps more to go further")
    if warning := told_versions(recorded):
        notify(warning)
    return recorded, start


def _given_digest(launch: Launch, recorded: RecordedRun | None) -> str | None:
    """What the run began with; a launch that goes on from a snapshot does not read it again."""
    return launch.given_digest or (recorded.resolved.get(GIVEN_WEIGHTS) if recorded else None)


def _compile(config: TrainConfig, launch: Launch) -> tuple[Compiled, TrainState]:
    with caching_compilations(config.compilation_cache):
        compiled, state = launch.prepare()
    launch.warn_of_memory(compiled)
    return compiled, state


def _origins(config: TrainConfig) -> dict[str, str]:
    default, given = TrainConfig().to_json(), config.to_json()
    return {name: "default" if given[name] == default[name] else "caller" for name in given}


def _result(launch: Launch, compiled: Compiled, state: TrainState, folder: RunFolder | None) -> TrainResult:
    config, steps_done, top1 = launch.config, int(state.step), float(state.top1)
    if config.stop_at_top1 is not None and top1 >= np.float32(config.stop_at_top1):
        stopped_by = "top1"
    else:
        # A stop in the midst of the last evaluation leaves that to be made.
        is_done = steps_done >= config.steps and not bool(state.owes_evaluation)
        stopped_by = "steps" if is_done else launch.board.stop_reason or "steps"
    return TrainResult(
        params=state.evaluated.params,
        batch_stats=state.evaluated.batch_stats,
        losses=np.array(launch.stream.losses, np.float32),
        evaluations=tuple(launch.stream.evaluations),
        steps_done=steps_done,
        stopped_by=stopped_by if launch.failure(state) is None else "error",
        num_params=launch.num_params,
        num_skipped=int(state.update.skips.total),
        compile_s=compiled.compile_s,
        from_cache=compiled.from_cache,
        train_s=launch.train_s,
        wait_s=launch.stream.wait_s,
        run_dir=folder.path if folder else None,
    )


class _RecordingLaunch:
    """A launch whose losses, snapshots, weights and end go to a run folder."""

    def __init__(self, config: TrainConfig, launch: Launch, folder: RunFolder) -> None:
        self._config, self._launch, self._folder = config, launch, folder
        say = launch.notices.say
        self._snapshots = SnapshotWriter(folder.snapshots, keep=config.keep_snapshots, say=say)
        self._sink = RunFolderSink(
            folder.loss_log,
            folder.evaluation_log,
            self._take_snapshot,
            lambda step: say(f"snapshot of step {step} left out: the disk is slower than the run's lines"),
        )
        self._control_log = ControlLog(folder.control_log)
        self._mailbox = ControlMailbox(folder.path, launch.board.request)

    def __enter__(self) -> Self:
        # Before anything takes long: what is asked for while the program is compiled takes effect at its first step.
        self._mailbox.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._mailbox.close()
        self._control_log.close()
        # Where the run ended well it is closed already, and where it did not nothing is waited for.
        self._snapshots.close(0)

    def run(self, compiled: Compiled, state: TrainState, sinks: Sequence[Sink]) -> TrainResult:
        """Runs the program, writes what the run leaves, and raises what went wrong."""
        launch, start = self._launch, self._launch.start
        launch.board.prepare(
            first_pull=start.pulls,
            pulls_a_step=self._config.accumulate_steps,
            replayed=start.events,
            record=self._record_event,
        )
        self._folder.launched()
        self._snapshots.start()
        try:
            state = launch.run(compiled, state, [self._sink, *sinks])
        except BaseException as error:
            self._record_end(error)
            if not isinstance(error, Exception):
                # The program and its sinks may be at work still, and must meet nobody else in the folder.
                self._folder.keep_locked()
                self._note_how_to_go_on(error, self._snapshots.last_step)
                raise
            self._await_snapshot(error)
            self._record_end(error)
            raise
        failure = launch.failure(state)
        result = _result(launch, compiled, state, self._folder)
        self._keep_state(state, failure)
        result = replace(result, snapshot_step=self._snapshots.last_step)
        failure = self._leave(result, failure)
        if failure is not None:
            self._note_how_to_go_on(failure, result.snapshot_step)
            raise failure
        return result

    def _take_snapshot(self, snapshot: PushedSnapshot) -> None:
        self._control_log.sync()
        self._snapshots.submit(snapshot.step, snapshot.pulls, snapshot.state)

    def _record_event(self, event: ControlEvent) -> None:
        self._control_log.append(event)
        self._launch.notices.say(f"control-run: {_in_words(event)}")

    def _keep_state(self, state: TrainState, failure: BaseException | None) -> None:
        """Writes one more snapshot, so that the run can go on from where it ended."""
        # After gradients that are no numbers the last good snapshot is where another rate may help. And lines that the
        # folder did not get would be missing for ever in a run that went on behind them.
        sink, start = self._sink, self._launch.start
        written_step = start.step if sink.last_step is None else sink.last_step
        is_whole = (written_step, start.num_evaluations + sink.num_evaluations) == (
            int(state.step),
            int(state.num_evaluations),
        )
        if is_whole and not isinstance(failure, NonFiniteError):
            tree = jax.tree.map(np.asarray, plain_keys(state))
            self._control_log.sync()
            self._snapshots.submit(int(state.step), int(state.pulls), tree)
        self._snapshots.close(_SNAPSHOT_TIMEOUT_S)

    def _await_snapshot(self, failure: Exception) -> None:
        """Waits for the snapshot under way: of a program that failed by itself it may be all that is left.

        Who does not want to wait interrupts; it is the failure that is raised then too.
        """
        step, name = self._snapshots.unwritten_step, type(failure).__name__
        if step is not None:
            self._launch.notices.say(f"{name}: the snapshot of step {step} is waited for; Ctrl-C leaves it")
        try:
            self._snapshots.close(_SNAPSHOT_TIMEOUT_S)
        except KeyboardInterrupt:
            self._folder.keep_locked()
        self._note_how_to_go_on(failure, self._snapshots.last_step)

    def _note_how_to_go_on(self, failure: BaseException, snapshot_step: int | None) -> None:
        if snapshot_step is None:
            return
        path = str(self._folder.path)
        if own := own_parts(self._launch.resolved.to_json()):
            how = f"train with TrainConfig(run_dir={path!r}, resume=True) and the same {' and '.join(own)}"
        else:
            how = f"run-train --run-dir {shlex.quote(path)} --resume"
        failure.add_note(f"the last good snapshot is that of step {snapshot_step}: {how} goes on from it")

    def _leave(self, result: TrainResult, failure: BaseException | None) -> BaseException | None:
        """Writes the weights and the run's end; gives the failure, which what cannot be written must not hide."""
        try:
            if result.steps_done:
                name = self._launch.resolved.registry_name
                tensors = name_tensors(name, result.params, result.batch_stats)
                self._folder.write_weights(tensors, self._weights_metadata(result))
        except Exception as error:  # noqa: BLE001 - a model of the user's own may hold anything; the end is told first
            if failure is None:
                failure = error
            else:
                failure.add_note(f"the weights could not be written either: {error}")
        self._record_end(failure, result)
        return failure

    def _weights_metadata(self, result: TrainResult) -> dict[str, str]:
        """What is needed to use the weights: safetensors takes text alone."""
        resolved, size = self._launch.resolved, self._config.image_size
        return {
            "model": resolved.model_name,
            "steps_done": str(result.steps_done),
            "image_size": f"{size or resolved.source.height}x{size or resolved.source.width}",
            "mean": " ".join(map(str, resolved.mean)),
            "std": " ".join(map(str, self._launch.std)),
        }

    def _record_end(self, failure: BaseException | None, result: TrainResult | None = None) -> None:
        """Writes `result.json`; where that fails, the failure that it was to tell goes first."""
        losses, first_step = self._launch.stream.losses, self._launch.start.step + 1
        nonfinite = [step for step, loss in enumerate(losses, first_step) if not math.isfinite(loss)]
        if isinstance(failure, NonFiniteError):
            nonfinite.append(failure.first_step)
        is_interrupted = isinstance(failure, KeyboardInterrupt)
        given_up_by = self._launch.board.stop_reason or "KeyboardInterrupt" if is_interrupted else "error"
        end: dict[str, Any] = {
            "steps_done": result.steps_done if result else self._launch.start.step + len(losses),
            "stopped_by": result.stopped_by if result else given_up_by,
            "error": None if failure is None or is_interrupted else f"{type(failure).__name__}: {failure}",
            "first_nonfinite_step": min(nonfinite, default=None),
            "num_params": self._launch.num_params,
            "snapshot_step": result.snapshot_step if result else self._snapshots.last_step,
        }
        if result is not None:
            end |= {
                "num_skipped": result.num_skipped,
                "compile_s": round(result.compile_s, 3),
                "from_cache": result.from_cache,
                "train_s": round(result.train_s, 3),
                "wait_s": round(result.wait_s, 3),
            }
        try:
            self._folder.write_result(end)
        except OSError as error:
            if failure is None:
                raise
            failure.add_note(f"the run folder could not be completed either: {error}")


def _in_words(event: ControlEvent) -> str:
    parts = []
    if event.learning_rate_factor is not None:
        parts.append(f"learning-rate factor {event.learning_rate_factor:g} from step {event.step}")
    if event.evaluate:
        parts.append(f"evaluation after step {event.step}")
    if event.snapshot:
        parts.append(f"snapshot after step {event.step}")
    if event.stop:
        parts.append(f"stopping before step {event.step}")
    return ", ".join(parts)
