"""A run from its first check to its result: the stages of "Around it" in docs/walk.md, in their order.

`train` and the command go through all stages; `plan_run`, `check_step`, `show_batch` and `explain_program` go through
those of `set_up_run`. `loopfeed.engine.run.run` has the parts, `loopfeed.engine.run.resume` what a resumed run reads,
`loopfeed.engine.run.listeners` who else is told, and `loopfeed.engine.run.recorder` what is written.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Literal, Unpack, overload

from loopfeed.engine.compilation.ahead_of_time import Compiled
from loopfeed.engine.compilation.cache_place import check_cache_places
from loopfeed.engine.compilation.freed_memory import return_freed_memory
from loopfeed.engine.config import TrainConfig
from loopfeed.engine.control.board import ControlBoard
from loopfeed.engine.crossing.choice import this_platform
from loopfeed.engine.crossing.devices import Placement, settle_devices, split_processor
from loopfeed.engine.loggers.choice import check_loggers
from loopfeed.engine.parts import PartArguments, UserParts, take_parts
from loopfeed.engine.processes import exchange, this_process, wait_for_processes
from loopfeed.engine.program.kernels import settle_kernels
from loopfeed.engine.program.train_state import TrainState
from loopfeed.engine.python_calls import in_python_words
from loopfeed.engine.records.run_folder import RunFolder, check_folder
from loopfeed.engine.run.background import BackgroundRun, check_is_alone
from loopfeed.engine.run.callbacks import Callback, Callbacks, RunHandle, as_callbacks
from loopfeed.engine.run.changes import (
    check_manifest,
    check_same_everywhere,
    check_steps,
    versions_warning,
)
from loopfeed.engine.run.compiling import DryRun, compiling, plan_program, prepare, trace_program, warn_of_memory
from loopfeed.engine.run.cycles import append_cycle, check_cycle
from loopfeed.engine.run.descriptions import check_is_as_recorded, describe_resume, describe_run
from loopfeed.engine.run.epochs import describe_cadence, settle_epochs, settle_evaluations
from loopfeed.engine.run.interrupted import train_interruptibly
from loopfeed.engine.run.launch_monitor import start_monitor
from loopfeed.engine.run.listeners import telling
from loopfeed.engine.run.notebook import ending_display, notebook_display
from loopfeed.engine.run.recorder import Recorder
from loopfeed.engine.run.resolve import check_arguments, check_best_metrics, settle_stop_metric, warn_of_settings
from loopfeed.engine.run.result import TrainResult, result_of
from loopfeed.engine.run.resume import Resume, complete_notice, resume_run, unchecked_notice
from loopfeed.engine.run.run import Run
from loopfeed.engine.run.run_place import check_has_folder, naming_run, open_place
from loopfeed.engine.runtime.record import LaunchState
from loopfeed.engine.stream.function_sink import RecordFunction, as_sinks
from loopfeed.engine.stream.notices import outliving_display
from loopfeed.engine.stream.sinks import Sink


@overload
def train(
    config: TrainConfig,
    *,
    background: Literal[True],
    sinks: Sequence[Sink | RecordFunction] = (),
    notify: Callable[[str], None] | None = None,
    origins: Mapping[str, str] | None = None,
    callbacks: Sequence[Callback | RecordFunction] = (),
    progress: bool | None = None,
    **parts: Unpack[PartArguments],
) -> BackgroundRun: ...


@overload
def train(
    config: TrainConfig,
    *,
    background: Literal[False] = False,
    sinks: Sequence[Sink | RecordFunction] = (),
    notify: Callable[[str], None] | None = None,
    origins: Mapping[str, str] | None = None,
    callbacks: Sequence[Callback | RecordFunction] = (),
    progress: bool | None = None,
    **parts: Unpack[PartArguments],
) -> TrainResult: ...


def train(
    config: TrainConfig,
    *,
    background: bool = False,
    sinks: Sequence[Sink | RecordFunction] = (),
    notify: Callable[[str], None] | None = None,
    origins: Mapping[str, str] | None = None,
    callbacks: Sequence[Callback | RecordFunction] = (),
    progress: bool | None = None,
    **parts: Unpack[PartArguments],
) -> TrainResult | BackgroundRun:
    """Train a model in one compiled program.

    Args:
        config: the settings.
        model: a user-defined model instead of one of the registry: `init(key)` returns (params, batch_stats), and
            `apply(params, batch_stats, images, train=True)` returns (logits [B, K], new batch_stats) for float32 images
            [B, H, W, 3]. Convolutions of `loopfeed.models.layers.convolution` stay fast inside the loop on a CPU. If
            `apply` has a parameter `key`, it gets PRNG keys [B] in training, one per image by (seed, position),
            otherwise None.
        batches: user-defined batches instead of a packed data set: a function from the step (from 0) to (uint32
            [B, H, W] packed pixels, integer [B] labels), called in order from one thread; or a `BatchSource`. A
            function of (step, rows) returns only these rows, a range; of several processes, each asks for its own. A
            resumed run asks only for the remaining steps. The cross entropy also takes target distributions, float
            [B, K]; every other loss takes labels that are any pytree of arrays [B, …] of fixed shapes and dtypes.
        indices: a part of the training split: indices of images, integers [n], or a pure function from the epoch (from
            0) to them, the same number for each epoch. An epoch is n draws; an index that is given twice is drawn
            twice. A function is called once an epoch, from another thread.
        evaluation: user-defined evaluation images instead of a split of the data set: a tuple of all of them (uint32
            [N, H, W] packed pixels, integer [N] labels, or labels as those of `batches`), or an `EvaluationSource`.
        loss: a user-defined loss instead of that of the setting `loss`: (outputs of the model, labels, float32 [B]
            weights) → float [B], the loss of each example; see `loopfeed.engine.objective.losses`.
        metrics: user-defined metrics by name: a `Metric`, or a function (outputs, labels) → [B] whose mean is taken.
            They are computed in every step and evaluation; numbers appear in the logs, arrays only in `eval.jsonl`.
        optimizer: a user-defined optimizer instead of that of the setting `optimizer`: an optax transformation with its
            own learning rate, or a function from a learning rate (float32 [], traced) to a transformation, such as
            `optax.adabelief`, which receives that of the schedule. The learning-rate factor of `control-run` applies
            to both. Clipping, accumulation, averages and skipped updates are unchanged.
        schedule: a user-defined schedule instead of that of the setting `schedule`: a traceable function from the
            number of updates before this one (int32 []) to the learning rate, such as an optax schedule.
        augment: a user-defined augmentation, applied to training batches after those of the settings: (float32
            [B, H, W, 3] normalised images, [B] PRNG keys by position) → images of the same shape and dtype.
        background: whether to return at once, with a handle of the run, which trains on a thread of its own. Signals
            then do not stop it. Another run is refused meanwhile.
        sinks: additional sinks of the loss stream, each with a thread of its own; or functions, called with each
            `LossRecord` and `EvaluationRecord`.
        notify: called with a line of text about what the run does before its first step, and about what is unusual
            later, such as a request or a snapshot that is skipped. None shows it in the display of a notebook.
        origins: where settings came from, by name, for `config.json`; None distinguishes only defaults from others.
        callbacks: called in order on one thread of their own, each an `loopfeed.Callback` or a function of each record;
            they may ask for snapshots, evaluations, another learning rate and the end of the run.
        progress: whether a notebook shows the progress and the curves in one output, which is updated in place; None is
            True. Elsewhere it has no effect.

    Returns:
        The trained model and its losses; with `background`, the handle of the run. If the caller is the main thread,
        SIGINT, SIGTERM and SIGHUP (unless ignored) stop the run at the next step and are named in `stopped_by`; a
        second signal raises KeyboardInterrupt.

    Raises:
        ValueError: the settings do not fit each other, the data or the resumed run; raised before any step.
        RuntimeError: another run trains in the background of this process.
        RunInterrupted: in a notebook or at a prompt, a signal stopped the run as above: a notebook that runs all its
            cells then does not go on.
        BaseException: the error of the batch source, a sink or a callback during the run, raised after the loop has
            ended cleanly and the weights trained so far are in the run folder.

    Example:
        >>> config = TrainConfig(data="data", steps=20, batch=4, learning_rate=1, run_dir="run")
        >>> result = train(config, model=model)
        >>> round(float(result.losses[0]), 4)  # ln 2: all weights of the example of `Model` are 0
        0.6931
        >>> result.evaluations[-1].top1
        1.0
    """
    user_sinks, user_callbacks, user_parts = as_sinks(sinks), as_callbacks(callbacks), take_parts(parts)
    check_is_alone()
    board, display = ControlBoard(), notebook_display(progress, at_once=background)
    if notify is None:
        notify = (lambda _: None) if display is None else lambda line: display.say(in_python_words(line))
    shown = user_sinks if display is None else [*user_sinks, display]
    told = notify

    def launch(note: Callable[[Run | None], None]) -> TrainResult:
        with ExitStack() as last:
            last.callback(return_freed_memory)
            with ending_display(display) as end, set_up_run(config, user_parts, told, board=board) as run:
                last.callback(run.release)
                note(run)
                try:
                    return end(train_run(run, shown, origins, user_callbacks))
                finally:
                    note(None)

    if background:
        return BackgroundRun(board, launch)
    return train_interruptibly(lambda: launch(lambda _: None))


def plan_run(
    config: TrainConfig,
    *,
    notify: Callable[[str], None] = lambda _: None,
    **parts: Unpack[PartArguments],
) -> DryRun:
    """Resolve and compile what `train` would run or resume, without running it.

    The arguments and errors are those of `train`.
    """
    with set_up_run(config, take_parts(parts), notify, is_dry=True) as run:
        return plan_program(run)


@contextmanager
def set_up_run(
    config: TrainConfig,
    parts: UserParts,
    notify: Callable[[str], None],
    *,
    is_dry: bool = False,
    placement: Placement | None = None,
    board: ControlBoard | None = None,
    first_step: int = 1,
) -> Iterator[Run]:
    """Set up a run, up to its program, which is not compiled yet.

    Args:
        config, notify: as `train` takes them.
        parts: the user-defined parts.
        is_dry: whether the run folder is only read.
        placement: the devices of a program that is only compiled; None chooses those of this machine.
        board: the board of requests to the program; None makes one.
        first_step: the update at which a run that is only looked at begins, from 1, with the state of a new run.

    Raises:
        ValueError: as `train`.
    """
    # ---- Check the settings
    notify = outliving_display(notify)
    check_arguments(config, parts)
    check_cache_places(config)
    split_processor([config], has_user_source=parts.has_user_source)
    check_has_folder(config, is_dry=is_dry)
    config = settle_devices(config)
    # Not before the processor is split: `this_process` makes jax's devices.
    if this_process().index == 0:
        check_loggers(config)
    with ExitStack() as stack:
        # ---- Claim the folder
        path, stored = stack.enter_context(open_place(config, notify, is_dry=is_dry))
        notify, folder = naming_run(config, path, notify), None
        # Of several processes, the first alone writes.
        if path is not None and this_process().index == 0:
            how = {"overwrite": config.overwrite, "resume": config.resume}
            if is_dry:
                check_folder(path, **how)
            else:
                folder = stack.enter_context(RunFolder(path, **how))

        # ---- Read the starting point
        start = Resume(first_step - 1, (first_step - 1) * config.accumulate_steps)
        if config.resume and path is not None:
            config, start = resume_run(config, path, parts, notify)
        config = settle_stop_metric(config)

        # ---- Open the data
        platform = this_platform() if placement is None else placement.platform
        is_kept = start.recorded is not None or placement is not None
        config = settle_kernels(config, platform, is_kept=is_kept)
        run = Run(config, parts, notify, stack, start, board=board, placement=placement)
        run.path, run.folder, run.stored = path, folder, stored
        # The run releases the snapshot once its arrays are on the device; this frame lives as long as the run.
        del start
        run.open_data()

        # ---- Convert epochs to steps
        config, cadence = _settle_steps(run, is_dry=is_dry)

        # ---- Open the program's parts
        run.open_program(config)
        for message in filter(None, (*describe_run(run), cadence)):
            notify(message)
        if run.start.recorded is not None:
            check_is_as_recorded(run)
            for message in filter(None, describe_resume(run, run.start.recorded)):
                notify(message)
        # No process may change the run folder before all have read it.
        wait_for_processes("opened")
        yield run


def _settle_steps(run: Run, *, is_dry: bool) -> tuple[TrainConfig, str | None]:
    """Return the settings with all numbers of steps, and a line about the cadences that follow from the data."""
    config, data, start, notify = run.config, run.data, run.start, run.notify
    recorded, num_images = start.recorded, data.num_images
    if recorded is not None:
        # Before anything that is computed from the data, such as the steps of an epoch.
        check_manifest(data, recorded)
        config = append_cycle(config, recorded.config, start.step, num_images, data.description, notify)
    if recorded is not None or not is_dry:
        check_cycle(config, start.step, is_new=recorded is None)
    run.given_config = given = config
    config = settle_epochs(config, num_images, data.description, notify)
    is_evaluated, has_folder = data.evaluation is not None, run.path is not None
    # Of several processes, the first alone has the run folder.
    is_kept = exchange("run folder", str(config.run_dir is not None or is_dry))[0] == str(True)
    is_compared = config.stop_patience is not None
    config = settle_evaluations(config, num_images, is_evaluated=is_evaluated and (is_kept or is_compared))
    check_same_everywhere(config, data.manifest_digest, data.digests)
    if recorded is None:
        warn_of_settings(config, data, notify, has_user_loss=run.parts.loss is not None)
    else:
        check_steps(config, recorded.config, start.step)
        complete = complete_notice(config, start)
        for message in filter(None, (complete, versions_warning(recorded), unchecked_notice(recorded, start))):
            notify(message)
    check_best_metrics(config, run.parts, data)
    return config, describe_cadence(config, given, num_images, is_evaluated=is_evaluated, has_folder=has_folder)


def train_run(
    run: Run,
    sinks: Sequence[Sink] = (),
    origins: Mapping[str, str] | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainResult:
    """Compile the program of an open run, execute it and record it; arguments and errors are those of `train`."""
    config, called = run.config, Callbacks(callbacks, _handle(run))
    on_snapshot = called.snapshot_written if callbacks else lambda *_: None
    with telling(run, sinks) as (sinks, tell_end):
        with nullcontext() if run.folder is None else Recorder(run, run.folder, on_snapshot) as recorder:
            # ---- Compile the program
            # A profile needs the scopes of this program, not of an older one with the same instructions.
            with compiling(run, config.compilation_cache, by_metadata=config.profile):
                compiled, state = prepare(run, trace_program(run))
            warn_of_memory(run, compiled)

            # ---- Call it once
            sinks = [*sinks, called] if callbacks else sinks
            if recorder is None:
                result = _execute_unrecorded(run, compiled, state, sinks)
            else:
                recorder.begin(_origins(run.given_config) if origins is None else origins)
                result = recorder.record(compiled, state, sinks)
        if callbacks:
            called.end(result)
        tell_end(result)
    return result


def _handle(run: Run) -> RunHandle:
    return RunHandle(
        run.config,
        run.board,
        run_dir=run.path,
        step=run.start.step,
        num_images=run.data.num_images,
        is_evaluated=run.data.evaluation is not None,
        events=run.start.events,
    )


def _execute_unrecorded(run: Run, compiled: Compiled, state: TrainState, sinks: Sequence[Sink]) -> TrainResult:
    """Execute the program without writing to disk."""
    monitor = start_monitor(run, compiled)
    try:
        state = run.execute(compiled, state, sinks)
    except BaseException:
        monitor.finish("failed")
        raise
    failure = run.failure(state)
    result = result_of(run, compiled, state, failure, monitor.so_far())
    end: LaunchState = "failed" if failure is not None else "done" if result.is_complete else "stopped"
    result = replace(result, runtime=monitor.finish(end))
    if failure is not None:
        raise failure
    return result


def _origins(config: TrainConfig) -> dict[str, str]:
    default, given = TrainConfig().to_json(), config.to_json()
    return {name: "default" if given[name] == default[name] else "caller" for name in given}
