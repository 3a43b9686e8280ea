"""The replay of a range of updates of a recorded run, and its comparison with the record.

Owns the order of the steps of a replay. Writes nothing into the run's folder and needs no lock on it.
"""

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Unpack

import jax
import numpy as np

from loopfeed.engine.config import OFF
from loopfeed.engine.control.board import ControlBoard, ControlWords
from loopfeed.engine.control.signals import StopSignals, ignore_message
from loopfeed.engine.crossing.choice import this_platform
from loopfeed.engine.crossing.devices import devices, split_processor
from loopfeed.engine.data.dataset import DATA_LOCATION, data_of_record
from loopfeed.engine.keys import plain_keys
from loopfeed.engine.named_parts import compare_named, missing_parts
from loopfeed.engine.owners import OF_AN_EVALUATION, STORAGE, TABLES, with_given
from loopfeed.engine.parts import PartArguments, UserParts, changed_sources, take_parts
from loopfeed.engine.program.kernels import settle_kernels
from loopfeed.engine.program.train_state import TrainState
from loopfeed.engine.records.machine import describe_promise, machine_differences
from loopfeed.engine.records.recorded_run import read_recorded, recorded_user_parts
from loopfeed.engine.records.run_folder import CONFIG, SNAPSHOTS
from loopfeed.engine.records.snapshot import Snapshot, snapshot_steps
from loopfeed.engine.records.stored.reading import local_copy, naming_in
from loopfeed.engine.replay.checked_files import CheckedFiles, check_files, describe_check
from loopfeed.engine.replay.recorded_stretch import Piece, RecordedStretch, read_stretch
from loopfeed.engine.replay.report import Comparison, ReplayReport
from loopfeed.engine.run.changes import are_tables, machine_of, thread_rule, versions_warning
from loopfeed.engine.run.compiling import compile_program, compiling, prepare, trace_program, warn_of_memory
from loopfeed.engine.run.descriptions import check_is_as_recorded, describe_run
from loopfeed.engine.run.resolve import check_arguments
from loopfeed.engine.run.run import NonFiniteError, Run
from loopfeed.engine.settings import SettingError
from loopfeed.engine.stream.sinks import Sink
from loopfeed.preprocess.regular_file import IrregularFileError
from loopfeed.preprocess.storage_options import as_text

_END = "the end of the replay"


def replay_run(
    run: str | Path,
    *,
    from_step: int | None = None,
    to_step: int | None = None,
    data: str | os.PathLike[str] | None = None,
    sampling: str | os.PathLike[str] | None = None,
    class_weights: str | os.PathLike[str] | None = None,
    notify: Callable[[str], None] = lambda _: None,
    display: Callable[[int, int], Sink] | None = None,
    storage_options: Mapping[str, str] | None = None,
    **parts: Unpack[PartArguments],
) -> ReplayReport:
    """Repeat the updates `from_step` + 1 … `to_step` of a recorded run, and compare them with the record bit by bit.

    First, every file of the run is checked against its recorded digest (`loopfeed.engine.replay.checked_files`). Then
    the replay compares every loss and learning rate of `loss.jsonl`, every evaluation of `eval.jsonl` and, if the run
    has a snapshot of `to_step`, every array of the state. Requests that took effect in the run are repeated, and
    settings that changed at a resume change at the same step.

    Args:
        run: the folder or URL of the run, which is only read; the run may still be in progress.
        from_step: a step with a snapshot, or 0, the state before the first update; None selects the oldest snapshot
            before `to_step` or, without one, 0.
        to_step: the last update; None selects the last one recorded.
        data: the current location of the packed data set; None uses the recorded one, and sends no keys to a server
            that only the record names.
        sampling, class_weights: the current locations of the run's tables; None uses the recorded ones.
        model, batches, evaluation, loss, metrics, optimizer, schedule, augment: the user-defined parts that were passed
            to `loopfeed.train`.
        notify: called with one-line messages about the replay.
        display: called with (last step, images per step); returns another sink for the losses.
        storage_options: how to reach the store of a URL, of the run and of the data, see
            `loopfeed.preprocess.storage_options.STORAGE_OPTIONS`; None uses the recorded address for the data.

    Returns:
        What was compared, and the first difference of each kind. If the caller is the main thread, SIGINT, SIGTERM and
        SIGHUP stop the replay at the next step and are named in `stopped_by`.

    Raises:
        ValueError: if the run does not fit the data or the user-defined parts, a line is missing, or there is no
            snapshot to start from.
        KeyboardInterrupt: on a signal before the first step, or on a second one.
        BaseException: whatever the batch source raised.

    Example:
        >>> report = replay_run("run", model=model)
        >>> report.num_losses, report.differences
        (20, ())
    """
    places = {"data": data, "sampling": sampling, "class_weights": class_weights}
    given = {name: None if place is None else os.fspath(place) for name, place in places.items()}
    return replay_parts(run, (from_step, to_step), take_parts(parts), notify, display, given, storage_options or {})


def replay_parts(
    run: str | Path,
    steps: tuple[int | None, int | None],
    parts: UserParts,
    notify: Callable[[str], None],
    display: Callable[[int, int], Sink] | None,
    places: Mapping[str, str | None],
    storage_options: Mapping[str, str],
) -> ReplayReport:
    """Replay a run with the user's parts; see `replay_run`.

    Its `from_step` and `to_step` are `steps`; `places` has its `data`, `sampling` and `class_weights`.
    """
    named = {**places, STORAGE: as_text(storage_options)}
    given = {name: value for name, value in named.items() if value is not None}
    with local_copy(run, storage_options) as folder:
        notify = naming_in(notify, folder, run)
        try:
            stretch = _read_stretch(folder, *steps)
        except ValueError as error:
            for fault in _check_files(folder, (), notify).faults:
                if fault not in str(error):
                    error.add_note(f"not as written: {fault}")
            raise
        ends = [snapshot for snapshot in (stretch.start.snapshot, stretch.snapshot) if snapshot is not None]
        files = _check_files(folder, ends, notify)
        resolved = stretch.recorded.resolved
        _check_user(stretch, parts)
        _check_tables(stretch, given)
        # A launch handles signals while it is open; before the first and between two, they stop the replay at once.
        with StopSignals(ControlBoard(), ignore_message):
            begin = stretch.start.step
            origin = f"the snapshot of step {begin:,}" if begin else "the state before the first step"
            notify(f"replaying {_steps(begin + 1, stretch.to_step)} of {folder} from {origin}")
            others = [*compare_named(resolved, parts.named), *changed_sources(resolved, parts)]
            doubts = ["another source of its own parts"] if others else []
            if (other_versions := versions_warning(stretch.recorded)) is not None:
                others.append(other_versions)
                doubts.append("other versions")
            for warning in others:
                notify(warning)
            doubts = _check_places(stretch, doubts, notify)
            config = with_given(stretch.recorded.config, given)
            if line := stretch.recorded.describe_replaced(config, OF_AN_EVALUATION, (STORAGE,)):
                notify(line)
            report = _replay(stretch, parts, notify, given, display)
        return replace(report, file_faults=files.faults, doubts=tuple(doubts))


def _check_places(stretch: RecordedStretch, doubts: Sequence[str], notify: Callable[[str], None]) -> list[str]:
    """Say where each piece was recorded and what its replay promises; return all that makes the bits doubtful.

    Raises:
        ValueError: devices are missing here.
    """
    here, first = devices(), stretch.start.step + 1
    recorded, machine, found = stretch.recorded, machine_of(jax.devices()[0]), list(doubts)
    threads = thread_rule(recorded.config, is_user_model="model" in recorded_user_parts(recorded.resolved))
    ends = [piece.stop_step for piece in stretch.pieces]
    for (topology, before), steps in groupby(
        ends, lambda step: (recorded.topology_at(step), recorded.machine_at(step))
    ):
        if topology.num_devices > len(here):
            raise ValueError(
                f"a replay needs as many devices as its record, {topology}, but jax has {len(here)} here "
                f"({here[0].kind}): replay it on such a machine"
            )
        last = max(steps)
        is_all = (first, last) == (stretch.start.step + 1, stretch.to_step)
        differences = [*doubts, *machine_differences(before, machine, threads)]
        num_parts = len(here) if here[0].platform == "cpu" else 0
        is_known = before is not None or differences
        promise = describe_promise(topology, here[0].kind, num_parts, differences if is_known else None)
        notify(("" if is_all else f"{_steps(first, last)}: ") + promise)
        found += [each for each in differences if each not in found]
        first = last + 1
    return found


def _steps(first: int, last: int) -> str:
    return f"step {first:,}" if first == last else f"steps {first:,} … {last:,}"


def _read_stretch(run: Path, from_step: int | None, to_step: int | None) -> RecordedStretch:
    try:
        # Snapshots are read with jax. The devices of other launches would change the work of these, see `Topology`.
        begin = min(snapshot_steps(run / SNAPSHOTS), default=0) if from_step is None else from_step
        split_processor(read_recorded(run).replayed_configs(begin, to_step))
        return read_stretch(run, from_step, to_step)
    except IrregularFileError as error:
        raise ValueError(
            f"{error.filename} must be a regular file, but is not ({error.strerror}): restore that file"
        ) from error


def _check_files(run: Path, read: Sequence[Snapshot], notify: Callable[[str], None]) -> CheckedFiles:
    """Check every file of a run except snapshots already read; report how many match and which lack a digest."""
    if not (run / CONFIG).exists():
        return CheckedFiles(0, (), ())  # not a run: the error is raised later
    notify(describe_check(run, read))
    files = check_files(run, read)
    if files.num_checked:
        matches = "matches its digest" if files.num_checked == 1 else "match their digests"
        notify(f"files: {files.num_checked} {matches} (a snapshot counts as one file)")
    if files.unchecked:
        have = "it has" if len(files.unchecked) == 1 else "they have"
        notify(f"files: {', '.join(files.unchecked)} cannot be checked: {have} no digest (yet)")
    return files


def _replay(
    stretch: RecordedStretch,
    parts: UserParts,
    notify: Callable[[str], None],
    given: Mapping[str, str],
    display: Callable[[int, int], Sink] | None,
) -> ReplayReport:
    """Replay a range of updates piece by piece, keeping the state in memory, and return the comparison."""
    comparison, state, start = Comparison(stretch), None, stretch.start
    for piece in stretch.pieces:
        config = with_given(piece.config, given)
        if (found_at := stretch.recorded.resolved.get(DATA_LOCATION)) is not None:
            config = replace(config, data=data_of_record(config.data, found_at))
        config = settle_kernels(config, this_platform(), is_kept=True)
        check_arguments(config, parts)
        board = _StopAfterPieceBoard(piece)
        with ExitStack() as stack:
            run = Run(config, parts, notify, stack, start, board=board)
            run.open_data()
            run.open_program(config)
            for message in describe_run(run):
                notify(message)
            check_is_as_recorded(run)
            sinks = [comparison, *([] if display is None else [display(piece.stop_step, config.images_per_step)])]
            state = _replay_piece(run, state, sinks)
        step, batch_index, num_evaluations = map(int, (state.step, state.batch_index, state.num_evaluations))
        start = replace(start, step=step, batch_index=batch_index, num_evaluations=num_evaluations, snapshot=None)
        if board.was_stopped or start.step < piece.stop_step:
            break
    if start.step == stretch.to_step and start.batch_index == stretch.pieces[-1].stop_batch and state is not None:
        comparison.compare_state(jax.tree.map(np.asarray, plain_keys(state)))
    return comparison.report(board.stop_reason if board.was_stopped else None)


class _StopAfterPieceBoard(ControlBoard):
    """A control board that stops the loop at the end of a piece of the replay, so that nothing after the piece is run.

    The loop cannot simply be left to end, because its end includes an evaluation, which the run may not have done.
    """

    def __init__(self, piece: Piece) -> None:
        super().__init__()
        self._piece = piece
        self._is_last_chunk = False

    @property
    def was_stopped(self) -> bool:
        """Whether the stop was requested for a reason other than the end of the piece."""
        return self.stop_reason not in (None, _END)

    def words(self, batch_index: int, num_batches: int) -> ControlWords:
        """Return the control words for a pull of training batches; request a stop after the last batch of the piece."""
        left = self._piece.stop_batch - batch_index
        if left <= 0:
            self.request_stop(_END)
        words = super().words(batch_index, min(num_batches, left))
        self._is_last_chunk = words[2] == left
        return words

    def stop_words(self, num_batches: int) -> ControlWords:
        """Return the control words for a pull in an evaluation; request a stop if the piece ends before the evaluation.

        The stop is not requested sooner, because it would end the wait for the batches of the last steps.
        """
        if self._is_last_chunk and self._piece.cuts_evaluation:
            self.request_stop(_END)
        return super().stop_words(num_batches)


def _replay_piece(run: Run, state: TrainState | None, sinks: list[Sink]) -> TrainState:
    """Replay a piece and return the final state; if `state` is None, start from the initial state of the run."""
    # Compiled afresh: a program in a cache may be another one, which agrees with the record because it wrote it.
    with compiling(run, OFF):
        traced = trace_program(run)
        compiled, state = prepare(run, traced) if state is None else (compile_program(run, traced), state)
    warn_of_memory(run, compiled)
    run.board.prepare(
        first_batch=run.start.batch_index,
        batches_per_step=run.config.accumulate_steps,
        replayed=run.start.events,
        record=lambda _: None,
    )
    state = run.execute(compiled, state, sinks)
    failure = run.failure(state)
    # The run itself may have stopped on a NaN too; if not, the missing steps show it.
    if failure is not None and not isinstance(failure, NonFiniteError):
        raise failure
    return state


def _check_tables(stretch: RecordedStretch, given: Mapping[str, str]) -> None:
    """Raise SettingError if a place is given of a table that the run has not; its digest is compared later."""
    for name in filter(given.__contains__, TABLES):
        before = getattr(stretch.recorded.config, name)
        if not are_tables(name, before, given[name]):
            raise SettingError(
                name,
                "{setting} can only say where the table of the run is now, but the run has {before!r}, got {found!r}: "
                "leave it out",
                before=before,
                found=given[name],
            )


def _check_user(stretch: RecordedStretch, parts: UserParts) -> None:
    """Raise ValueError if a user-defined part that the run used is missing, or if one that it did not use is given."""
    resolved = stretch.recorded.resolved
    own = recorded_user_parts(resolved)
    names = ("model", "batches", "indices", "loss", "metrics", "optimizer", "schedule", "augment")
    needed = {name: name in own for name in names}
    needed["evaluation"] = stretch.is_evaluated and resolved.get("eval_manifest_sha256") is None
    missing = [name for name, is_needed in needed.items() if is_needed and getattr(parts, name) is None]
    if missing:
        raise missing_parts(stretch.run, missing, resolved, f"verify-run {shlex.quote(str(stretch.run))}")
    for name, is_needed in needed.items():
        if getattr(parts, name) is not None and not is_needed and name != "evaluation":
            raise ValueError(f"{stretch.run} was trained without your own {name}: leave out the {name} argument")
