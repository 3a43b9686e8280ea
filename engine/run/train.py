"""A run from its settings to its result: claim the folder, resolve, compile, launch, wait, raise or return.

Owns the order of these; a launch of the program itself is `engine.run.launch`'s, what it leaves
`engine.run.recorded_launch`'s.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from engine.config import TrainConfig
from engine.feed.batches import BatchFunction, BatchSource, EvaluationArrays, EvaluationSource
from engine.locations import with_absolute_paths
from engine.program.train_state import TrainModel, TrainState
from engine.records.digests import RunningDigest
from engine.records.recorded_run import RecordedRun, read_recorded
from engine.records.run_folder import RunFolder
from engine.run.compilation import Compiled, caching_compilations
from engine.run.epochs import settle_epochs
from engine.run.launch import Launch
from engine.run.recorded_launch import RecordedLaunch, result_of
from engine.run.resolve import check_beginning
from engine.run.result import DryRun, TrainResult
from engine.run.resume import (
    GIVEN_WEIGHTS,
    StartingPoint,
    check_chain,
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
    unchecked_words,
)
from engine.stream.sinks import Sink
from preprocess.memory import host_memory_bytes


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
            [B, H, W, 3]. Convolutions of `models.layers.convolution` stay fast inside the loop on a CPU.
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
        cuts: dict[Path, RunningDigest] | None = None
        continued: tuple[str, ...] = ()
        if recorded is not None:
            _check_continues(launch, recorded, notify)
            cuts = find_cuts(folder.path, start)
            earlier = note_changes(recorded, config, start.step)
            continued = recorded.seals
        recording = stack.enter_context(RecordedLaunch(config, launch, folder, cuts))
        compiled, state = _compile(config, launch)
        # Only now is anything taken from the run that is there: whatever could be refused is behind us.
        start = launch.start
        if cuts is None:
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
            with_absolute_paths(config),
            resolved,
            launch.resolved.manifest_digest,
            origins=origins,
            earlier=earlier,
            continued=continued,
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
            find_cuts(_named_folder(config, "resume"), start)
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
        return result_of(launch, compiled, state, None, None)


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
    check_chain(path, recorded, start)
    check_steps(config, recorded.config, start.step)
    where = f"the snapshot of step {start.step:,}" if start.snapshot else "its beginning, as it has no snapshot"
    notify(f"resuming {path} from {where}")
    if start.snapshot and start.step >= config.steps:
        notify(f"no step is left to make: the run is to have {config.steps:,}; give --steps more to go further")
    for words in (told_versions(recorded), unchecked_words(recorded, start)):
        if words is not None:
            notify(words)
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
