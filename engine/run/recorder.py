"""The recorder of a run: its settings, losses, snapshots, weights and result, in the run folder.

Owns what a run writes, however it ends.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from loopfeed.engine.compilation.ahead_of_time import Compiled
from loopfeed.engine.control.board import END_OF_PROCESS
from loopfeed.engine.control.recording import Confirm, EventRecorder
from loopfeed.engine.control.request import ControlEvent, origin_of
from loopfeed.engine.crossing.pushed import PushedSnapshot
from loopfeed.engine.keys import plain_keys
from loopfeed.engine.named_parts import options_of
from loopfeed.engine.objective.best_metric import parse_metric
from loopfeed.engine.owners import with_absolute_paths
from loopfeed.engine.profile.formats import to_csv
from loopfeed.engine.program.train_state import TrainState
from loopfeed.engine.records.control_log import CONTROL_LOG_NAME, ControlLog
from loopfeed.engine.records.control_requests import ControlMailbox
from loopfeed.engine.records.digests import RunningDigest
from loopfeed.engine.records.evaluation_log import EvaluationLog, best_step
from loopfeed.engine.records.file_errors import LostFileError
from loopfeed.engine.records.folder_state import FolderState
from loopfeed.engine.records.machine import MACHINE
from loopfeed.engine.records.recorded_run import FILES, WEIGHTS_DIGEST, RecordedRun, recorded_user_parts
from loopfeed.engine.records.run_folder import PROFILE, RunFolder
from loopfeed.engine.records.run_folder_sink import RunFolderSink
from loopfeed.engine.records.snapshot_writer import SnapshotWriter
from loopfeed.engine.records.weights import name_tensors
from loopfeed.engine.records.weights_metadata import STEPS_DONE, WEIGHTS_METADATA
from loopfeed.engine.run.changes import note_changes
from loopfeed.engine.run.descriptions import RULES, crossings_of, resolved_of, rules_of_run, topology_of
from loopfeed.engine.run.epochs import SnapshotChoice
from loopfeed.engine.run.launch_monitor import record_rollback, start_monitor
from loopfeed.engine.run.result import TrainResult, metadata_of, recorded_metadata, result_of
from loopfeed.engine.run.resume import find_cuts, rewind_run
from loopfeed.engine.run.run import NonFiniteError, Run
from loopfeed.engine.run.starting_weights import GIVEN_WEIGHTS, ORIGIN
from loopfeed.engine.runtime.goodput import Rollback
from loopfeed.engine.runtime.monitor import RuntimeMonitor
from loopfeed.engine.runtime.record import LaunchState, RuntimeReport
from loopfeed.engine.spans import END, SNAPSHOT_PUSH
from loopfeed.engine.stream.sinks import Sink
from loopfeed.preprocess.quantities import listed, quantity
from loopfeed.preprocess.system_errors import error_text

# Longest wait for the last snapshot at the end of a run.
_SNAPSHOT_TIMEOUT_S = 600.0
# Longest waits for the last `runtime.json`, at the end of a run and after it was interrupted.
_RUNTIME_TIMEOUT_S, _QUIT_TIMEOUT_S = 10.0, 1.0


class Recorder:
    """Writes the settings, losses, snapshots, weights and result of a run to its folder.

    Args:
        run: the run, not compiled yet.
        folder: its locked folder.
        on_snapshot: called from another thread with the step and the path of each snapshot on the disk.

    Raises:
        ValueError: the logs of a resumed run are not what it wrote.
    """

    def __init__(self, run: Run, folder: RunFolder, on_snapshot: Callable[[int, Path], None] = lambda *_: None) -> None:
        self._config, self._run, self._folder = run.config, run, folder
        config, say = run.config, run.notices.say
        recorded = run.start.recorded
        self._cuts = None if recorded is None else find_cuts(folder.path, run.start)
        self._earlier = [] if recorded is None else self._note_changes(recorded)
        self._snapshots = SnapshotWriter(
            folder.snapshots,
            keep=config.keep_snapshots,
            say=say,
            find_best=self._find_best_snapshot,
            on_written=self._note_snapshot,
            on_hopeless=lambda: run.board.request_stop("no snapshot can be written"),
            on_ended=lambda write_s: self._choice.ended(write_s),
        )
        self._choice = SnapshotChoice(
            config, run.start.events, self._snapshots.is_best, lambda: run.spans[SNAPSHOT_PUSH].total_s
        )
        self._evaluations = EvaluationLog(folder.evaluation_log)
        self._on_snapshot = on_snapshot
        self._monitor: RuntimeMonitor | None = None
        self._rollback = Rollback()
        logs = (folder.loss_log, folder.evaluation_log, folder.control_log)
        begun = {path: RunningDigest() for path in logs} if self._cuts is None else self._cuts
        self._sink = RunFolderSink(
            folder.loss_log,
            folder.evaluation_log,
            self._take_snapshot,
            self._leave_out,
            begun,
            needs_snapshots=config.keeps_best_evaluation,
        )
        self._control_log = ControlLog(folder.control_log, begun[folder.control_log])
        self._recorder = EventRecorder(self._record_event, self._note_late)
        self._mailbox = ControlMailbox(folder.path, run.board.request)

    def __enter__(self) -> Self:
        # Before anything slow: a request during compilation takes effect at the first step.
        self._mailbox.start()
        self._recorder.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._mailbox.close()
        self._recorder.close()
        self._control_log.close()
        # After a normal end, these are already closed; otherwise do not wait.
        self._snapshots.close(0)
        if self._monitor is not None:
            self._finish_monitor(self._monitor, "failed", 0)

    def begin(self, origins: Mapping[str, str]) -> None:
        """Write `config.json`, and remove what an earlier run left, or what a resumed one wrote after its snapshot.

        Called after every check that could refuse the run: only now is an earlier one modified.

        Args:
            origins: where each setting came from.
        """
        run, folder, recorded = self._run, self._folder, self._run.start.recorded
        if self._cuts is None:
            folder.clear()
        else:
            # Before the lines are cut off: what they took is known from them alone.
            self._rollback = record_rollback(run, folder, self._cuts)
            rewind_run(folder, run.start, self._cuts)
        before = {} if recorded is None else recorded.resolved
        # A rule that only the beginning of the run used is taken from the record, as are its initial weights.
        rules = before.get(RULES, {}) | rules_of_run(run)
        resolved = {
            **resolved_of(run),
            **crossings_of(run),
            **({RULES: rules} if rules else {}),
            "learning_rate": self._config.peak_learning_rate,
            GIVEN_WEIGHTS: run.given_digest or before.get(GIVEN_WEIGHTS),
            **({} if (origin := run.given_origin or before.get(ORIGIN)) is None else {ORIGIN: origin}),
            WEIGHTS_METADATA: recorded_metadata(run),
        }
        folder.write_config(
            with_absolute_paths(self._config),
            resolved,
            run.data.manifest_digest,
            origins=origins,
            earlier=self._earlier,
            continued=() if recorded is None else recorded.seals,
        )
        if run.stored is not None:
            run.stored.begin()

    def _note_changes(self, recorded: RecordedRun) -> list[dict[str, Any]]:
        run = self._run
        return note_changes(recorded, self._config, run.start.step, topology_of(run), crossings_of(run)[MACHINE])

    def record(self, compiled: Compiled, state: TrainState, sinks: Sequence[Sink]) -> TrainResult:
        """Run the program and write the run's files; if the run failed, raise its error."""
        run, start = self._run, self._run.start
        run.board.prepare(
            first_batch=start.batch_index,
            batches_per_step=self._config.accumulate_steps,
            replayed=start.events,
            record=self._recorder.begin,
            is_snapshot_due=self._choice.is_due,
            keeps_evaluated=self._config.keeps_best_evaluation,
        )
        watch = [] if run.stored is None else [run.stored.watch()]
        self._choice.start()
        self._folder.launched()
        self._snapshots.start()
        self._monitor = monitor = start_monitor(
            run, compiled, snapshots=self._snapshots, folder=self._folder, rollback=self._rollback
        )
        try:
            state = run.execute(compiled, state, [self._sink, *sinks, *watch])
        except BaseException as error:
            # Another thread can set any exception for this one, which then waits no longer for the program.
            if not isinstance(error, Exception) or any(each.is_at_work for each in run.workers):
                self._leave_at_once(error, monitor)
                raise
            self._await_snapshot(error)
            self._finish_monitor(monitor, "failed")
            self._record_end(error)
            raise
        failure = run.failure(state)
        result = result_of(run, compiled, state, failure, monitor.so_far())
        self._write_profile(result)
        failure = self._keep_state(state, failure) or self._snapshots.failure
        end: LaunchState = "failed" if failure is not None else "done" if result.is_complete else "stopped"
        runtime = self._finish_monitor(monitor, end)
        stopped_by = result.stopped_by if failure is None else "error"
        result = replace(result, stopped_by=stopped_by, snapshot_step=self._snapshots.last_step, runtime=runtime)
        failure = self._write_end(result, failure)
        if failure is not None:
            self._add_resume_note(failure, result.snapshot_step)
            raise failure
        return result

    def _leave_at_once(self, error: BaseException, monitor: RuntimeMonitor) -> None:
        """Record the end of a run whose program and sinks may still be at work, and unlock the folder once they end."""
        self._run.board.request_stop(type(error).__name__)
        self._finish_monitor(monitor, "stopped", _QUIT_TIMEOUT_S)
        self._record_end(error)
        self._snapshots.close(0)
        self._folder.unlock_after([*self._run.workers, self._snapshots.worker])
        self._add_resume_note(error, self._snapshots.last_step)

    def _write_profile(self, result: TrainResult) -> None:
        if result.profile is None:
            return
        try:
            self._folder.write_monitoring(PROFILE, to_csv(result.profile).encode())
        except OSError as error:
            self._run.notices.say(f"warning: the profile was not written ({error_text(error)})")

    def _finish_monitor(
        self, monitor: RuntimeMonitor, state: LaunchState, timeout_s: float = _RUNTIME_TIMEOUT_S
    ) -> RuntimeReport:
        self._monitor = None
        return monitor.finish(state, timeout_s)

    def _note_snapshot(self, step: int, path: Path) -> None:
        self._on_snapshot(step, path)
        if (monitor := self._monitor) is not None:
            monitor.write_soon()

    def _leave_out(self, step: int) -> None:
        self._snapshots.skip(step, "the disk is too slow for the logs of the run")

    def _find_best_snapshot(self, steps: list[int]) -> int | None:
        """Return which of the snapshots was evaluated best, according to `eval.jsonl`; None without `keep_best`."""
        if self._config.keep_best is None:
            return None
        return best_step(self._evaluations.read(), steps, parse_metric(self._config.keep_best))

    def _take_snapshot(self, snapshot: PushedSnapshot) -> None:
        if self._choice.is_written(snapshot.step):
            self._snapshots.submit(snapshot.step, snapshot.batch_index, snapshot.state, self._synced_state())

    def _synced_state(self) -> FolderState:
        """Sync the run's logs to the disk, and return the state of the folder; raise OSError if the sync fails."""
        # The states first: a request that is logged during the sync may not be on the disk yet.
        logs = {**self._sink.states(), self._folder.control_log.name: self._control_log.state()}
        self._sink.sync()
        self._control_log.sync()
        return FolderState(self._folder.config_digest, logs)

    def _record_event(self, event: ControlEvent, confirm: Confirm) -> None:
        """Record an event; runs on the recorder's thread."""
        self._folder.check_kept()
        self._choice.note_event(event)
        if self._control_log.append(event, confirm):
            self._run.notices.say(f"{origin_of(event.request)}: {event.describe()}")

    def _note_late(self, event: ControlEvent) -> None:
        self._run.notices.say(
            f"{origin_of(event.request)}: a request has no effect until the disk accepts it in {CONTROL_LOG_NAME}"
        )

    def _keep_state(self, state: TrainState, failure: BaseException | None) -> BaseException | None:
        """Write a last snapshot, from which the run can resume; return `failure` or, if None, an error of a log."""
        try:
            self._folder.check_kept()
            if late := self._run.board.record_late(int(state.batch_index)):
                them = "it" if len(late) == 1 else "them"
                self._run.notices.say(
                    f"{quantity(len(late), 'request')} of callbacks came after the last step: a run that is resumed "
                    f"from here applies {them}"
                )
            folder_state = self._synced_state()
        except (OSError, ValueError) as error:
            failure, folder_state = failure or error, None
        # After NaN or infinite gradients, the last good snapshot is the place to retry with another learning rate. And
        # if log lines are missing, a run that resumed after them would never write them.
        sink, start = self._sink, self._run.start
        written_step = start.step if sink.last_step is None else sink.last_step
        is_whole = (written_step, start.num_evaluations + sink.num_evaluations) == (
            int(state.step),
            int(state.num_evaluations),
        )
        # A state that may depend on changed data is not worth resuming from either.
        is_worth_it = not isinstance(failure, NonFiniteError | LostFileError) and not self._run.has_changed_data
        is_worth_it &= self._run.board.stop_reason != END_OF_PROCESS
        if folder_state is not None and is_whole and is_worth_it:
            tree = jax.tree.map(np.asarray, plain_keys(state))
            self._snapshots.submit(int(state.step), int(state.batch_index), tree, folder_state)
        self._await_disk()
        return failure

    def _await_disk(self) -> None:
        """Wait until the submitted snapshots are on the disk."""
        self._run.spans[END].begin()
        self._snapshots.close(_SNAPSHOT_TIMEOUT_S)
        self._run.spans[END].end()

    def _await_snapshot(self, failure: Exception) -> None:
        """Wait for the snapshot that is being written, because after a failure it may be the only result.

        Ctrl-C ends the wait; the failure is still raised.
        """
        step, name = self._snapshots.unwritten_step, type(failure).__name__
        if step is not None:
            self._run.notices.say(f"{name}: waiting for the snapshot of step {step}; press Ctrl-C to abandon it")
        try:
            self._await_disk()
        except KeyboardInterrupt:
            self._folder.unlock_after([self._snapshots.worker])
        self._add_resume_note(failure, self._snapshots.last_step)

    def _add_resume_note(self, failure: BaseException, snapshot_step: int | None) -> None:
        # After a LostFileError there is nothing to resume from, and its message describes the folder.
        if snapshot_step is None or isinstance(failure, LostFileError):
            return
        path = str(self._folder.path)
        if not self._folder.can_resume_from(snapshot_step):
            failure.add_note(
                f"files of the run folder {path} were removed during the run, so it cannot be resumed: start another "
                "run (--run-dir)"
            )
            return
        own = recorded_user_parts(resolved_of(self._run))
        options = options_of(self._run.parts.named, own)
        if own and options is None:
            how = f"train with replace(loopfeed.run_settings({path!r}), resume=True) and the same {listed(own)}"
        else:
            how = f"run-train --run-dir {shlex.quote(path)} --resume {options}".rstrip()
        if self._run.has_changed_data:
            failure.add_note(
                f"no snapshot of the last step was written. If the newest snapshot, of step {snapshot_step}, was "
                f"written after the data changed, remove it from {self._folder.snapshots}. "
                f"Then resume from the newest remaining snapshot: {how}"
            )
            return
        failure.add_note(f"the last good snapshot is from step {snapshot_step}; resume from it: {how}")

    def _write_end(self, result: TrainResult, failure: BaseException | None) -> BaseException | None:
        """Write the weights and `result.json`; return `failure` or, if None, any error from writing the weights."""
        try:
            if result.steps_done:
                name = self._run.registry_name
                tensors = name_tensors(name, result.params, result.batch_stats)
                self._folder.write_weights(tensors, self._weights_metadata(result))
        except Exception as error:  # noqa: BLE001 - a user-defined model may have any leaves; record the end first
            if failure is None:
                failure = error
            else:
                failure.add_note(f"the weights could not be written either: {error_text(error)}")
        self._record_end(failure, result)
        return failure

    def _weights_metadata(self, result: TrainResult) -> dict[str, str]:
        """Return the metadata needed to use the weights; all values are strings, as safetensors requires."""
        return {**metadata_of(self._run), STEPS_DONE: str(result.steps_done)}

    def _record_end(self, failure: BaseException | None, result: TrainResult | None = None) -> None:
        """Write `result.json`; if that fails, add a note to `failure`, or raise the error if there is no failure."""
        stream = self._run.stream
        nonfinite = [] if stream.first_nonfinite_step is None else [stream.first_nonfinite_step]
        if isinstance(failure, NonFiniteError):
            nonfinite.append(failure.first_step)
        is_interrupted = isinstance(failure, KeyboardInterrupt)
        interrupted_by = self._run.board.stop_reason or "KeyboardInterrupt" if is_interrupted else "error"
        end: dict[str, Any] = {
            "steps_done": result.steps_done if result else self._run.start.step + stream.num_losses,
            "stopped_by": result.stopped_by if result else interrupted_by,
            "error": None if failure is None or is_interrupted else f"{type(failure).__name__}: {failure}",
            "first_nonfinite_step": min(nonfinite, default=None),
            "num_params": self._run.num_params,
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
            self._folder.write_result({**end, FILES: self._files_at_end(failure)})
        except OSError as error:
            if failure is None:
                raise
            failure.add_note(f"the run folder could not be completed either: {error_text(error)}")

    def _files_at_end(self, failure: BaseException | None) -> dict[str, Any] | None:
        """Return the state of the run's files, or None if a file is lost, is not synced, or may still be written to."""
        if failure is not None and (not isinstance(failure, Exception) or isinstance(failure, LostFileError)):
            return None
        try:
            return {**self._synced_state().to_json(), WEIGHTS_DIGEST: self._folder.weights_digest}
        except OSError:
            return None  # `result.json` records the failure that ends the run
