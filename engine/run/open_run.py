"""The stages of a run: lock the folder, resolve the settings, compile, launch, wait, and return or raise.

Owns the order of these steps. `loopfeed.engine.run.launch` launches the program itself, and
`loopfeed.engine.run.recorded_launch` records its results.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from loopfeed.engine.config import SETTINGS, TrainConfig
from loopfeed.engine.control.event import factor_before
from loopfeed.engine.crossing.choice import this_platform
from loopfeed.engine.crossing.devices import settle_devices, split_processor
from loopfeed.engine.locations import with_absolute_paths
from loopfeed.engine.loggers.choice import check_loggers, make_loggers, unused_cadences_warning
from loopfeed.engine.named_parts import compare_named
from loopfeed.engine.processes import exchange, this_process, wait_for_processes
from loopfeed.engine.program.kernels import AUTO, changed_kernels_notice, settle_kernels
from loopfeed.engine.program.train_state import TrainState
from loopfeed.engine.records.machine import MACHINE, machine_warning
from loopfeed.engine.records.recorded_run import RecordedRun, read_recorded
from loopfeed.engine.records.run_folder import RunFolder, check_folder
from loopfeed.engine.records.topology import Topology
from loopfeed.engine.records.weights_metadata import WEIGHTS_METADATA
from loopfeed.engine.run.cache_place import check_cache_places
from loopfeed.engine.run.callbacks import Callback, Callbacks, RunHandle
from loopfeed.engine.run.changed_rules import RULES, check_rules, rules_of
from loopfeed.engine.run.changes import (
    check_same_everywhere,
    check_settings,
    check_steps,
    describe_changes,
    note_changes,
    thread_rule,
    versions_warning,
)
from loopfeed.engine.run.compilation import Compiled, caching_compilations
from loopfeed.engine.run.cycles import append_cycle, check_cycle, describe_rate_change
from loopfeed.engine.run.data import open_data
from loopfeed.engine.run.dataset import DATA_LOCATION, data_of_record
from loopfeed.engine.run.described_sinks import describe_run, finishing
from loopfeed.engine.run.epochs import describe_cadence, settle_epochs, settle_evaluations
from loopfeed.engine.run.host_side import ELSEWHERE, HostSide, Placement
from loopfeed.engine.run.launch import Launch
from loopfeed.engine.run.launch_monitor import read_rollback, record_rollback, start_monitor
from loopfeed.engine.run.parts import OwnParts, changed_sources
from loopfeed.engine.run.recorded_launch import RecordedLaunch, recorded_metadata, result_of
from loopfeed.engine.run.resolve import check_arguments, check_best_metric, resolve, warn_of_settings
from loopfeed.engine.run.result import DryRun, RunFacts, TrainResult
from loopfeed.engine.run.resume import (
    GIVEN_WEIGHTS,
    StartingPoint,
    check_chain,
    check_data,
    check_given_weights,
    check_manifest,
    check_own,
    describe_factor,
    find_cuts,
    find_start,
    rewind_run,
    unchecked_notice,
)
from loopfeed.engine.run.run_place import RunPlace, open_place
from loopfeed.engine.runtime.record import LaunchState
from loopfeed.engine.settings import SettingError
from loopfeed.engine.stream.notices import outliving_display
from loopfeed.engine.stream.sinks import Sink
from loopfeed.preprocess.quantities import quantity


@contextmanager
def open_run(
    config: TrainConfig,
    parts: OwnParts,
    notify: Callable[[str], None],
    *,
    is_dry: bool = False,
    placement: Placement | None = None,
) -> Iterator["OpenRun"]:
    """Set up the parts of a run in this order: folder, starting point, data, steps, model, launch.

    Args:
        config, notify: as `train` takes them.
        parts: the user-defined parts.
        is_dry: whether the run folder is only read.
        placement: the devices of a program that is only compiled; None chooses those of this machine.

    Raises:
        ValueError: as `train`.
    """
    notify = outliving_display(notify)
    check_arguments(config, parts)
    check_cache_places(config)
    split_processor([config], has_own_source=parts.has_own_source)
    _check_has_folder(config, is_dry=is_dry)
    config = settle_devices(config)
    # Not before the processor is split: `this_process` makes jax's devices.
    if this_process().index == 0:
        check_loggers(config)
    with ExitStack() as stack:
        folder = None
        place = stack.enter_context(open_place(config, notify, is_dry=is_dry))
        notify = place.naming(notify)
        # Of several processes, the first alone writes.
        if place.path is not None and this_process().index == 0:
            how = {"overwrite": config.overwrite, "resume": config.resume}
            if is_dry:
                check_folder(place.path, **how)
            else:
                folder = stack.enter_context(RunFolder(place.path, **how))
        config, recorded, start = _find_start(config, place.path, parts, notify)
        platform = this_platform() if placement is None else ELSEWHERE
        config = settle_kernels(config, platform, is_kept=recorded is not None or placement is not None)
        host = stack.enter_context(HostSide(config, notify, placement=placement))
        data = open_data(config, parts, stack, notify, first_pull=start.pulls, is_new=recorded is None)
        if recorded is not None:
            # Before anything that is computed from the data, such as the steps of an epoch.
            check_manifest(data, recorded)
            config = append_cycle(config, recorded.config, start.step, data.num_images, data.description, notify)
        if recorded is not None or not is_dry:
            check_cycle(config, start.step, is_new=recorded is None)
        given = config
        config = settle_epochs(config, data.num_images, data.description, notify)
        is_evaluated, has_folder = data.evaluation is not None, place.path is not None
        # Of several processes, the first alone has the run folder.
        is_kept = exchange("run folder", str(config.run_dir is not None or is_dry))[0] == str(True)
        config = settle_evaluations(config, data.num_images, is_evaluated=is_evaluated and is_kept)
        check_same_everywhere(config, data.manifest_digest)
        if recorded is None:
            warn_of_settings(config, data, notify, has_own_loss=parts.loss is not None)
        else:
            _check_length(config, recorded, start, notify)
        resolved = resolve(config, parts, data)
        check_best_metric(config, parts, data)
        launch = Launch(config, resolved, host, stack, start, notify)
        cadence = describe_cadence(config, given, data.num_images, is_evaluated=is_evaluated, has_folder=has_folder)
        if cadence is not None:
            notify(cadence)
        # The launch releases the snapshot once its arrays are on the device; this frame lives as long as the run.
        del start
        if recorded is not None:
            _check_continues(launch, recorded, notify)
        # No process may change the run folder before all have read it.
        wait_for_processes("opened")
        yield OpenRun(launch, place, folder, recorded, notify, given)


class OpenRun:
    """A run that is set up but not yet compiled.

    Args:
        launch: the launch of the run.
        place: where its folder is.
        folder: the locked run folder; None if nothing is recorded.
        recorded: the record of the resumed run, None for a new run.
        notify: called with a warning about the compilation.
        given: the settings before epochs were converted to steps.

    Attributes:
        config: the settings, with `epochs` converted to `steps`.
    """

    def __init__(
        self,
        launch: Launch,
        place: RunPlace,
        folder: RunFolder | None,
        recorded: RecordedRun | None,
        notify: Callable[[str], None],
        given: TrainConfig,
    ) -> None:
        self.config, self._notify, self._given = launch.config, notify, given
        self._launch, self._place, self._folder, self._recorded = launch, place, folder, recorded

    @property
    def contents_digest(self) -> str | None:
        """The digest of the images and labels of the run; see `RunData`."""
        return self._launch.resolved.data.contents_digest

    def train(
        self,
        sinks: Sequence[Sink] = (),
        origins: Mapping[str, str] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> TrainResult:
        """Compile and run the program; arguments, result and errors are those of `train`."""
        # Of several processes, the first alone logs.
        loggers = [] if this_process().index else make_loggers(self.config, self._place.path)
        sinks = [*sinks, *loggers]
        if not this_process().index and (warning := unused_cadences_warning(self.config, sinks)):
            self._notify(warning)
        describe_run(self._launch, self._place.path, sinks)
        with finishing(sinks):
            if not callbacks:
                return self._train(sinks, origins, lambda *_: None)
            called = Callbacks(callbacks, self._handle())
            result = self._train([*sinks, called], origins, called.snapshot_written)
            called.end(result)
            return result

    def _handle(self) -> RunHandle:
        launch, data = self._launch, self._launch.resolved.data
        return RunHandle(
            self.config,
            launch.board,
            run_dir=self._place.path,
            step=launch.start.step,
            num_images=data.num_images,
            is_evaluated=data.evaluation is not None,
            events=launch.start.events,
        )

    def _train(
        self,
        sinks: Sequence[Sink],
        origins: Mapping[str, str] | None,
        on_snapshot: Callable[[int, Path], None],
    ) -> TrainResult:
        if self._folder is None:
            return self._train_unrecorded(sinks)
        folder, launch, recorded = self._folder, self._launch, self._recorded
        cuts = None if recorded is None else find_cuts(folder.path, launch.start)
        earlier = [] if recorded is None else _note_changes(launch, recorded)
        with RecordedLaunch(self.config, launch, folder, cuts, on_snapshot) as recording:
            compiled, state = self._compile()
            # Modify an existing run only now, after every check that could refuse.
            if cuts is None:
                folder.clear()
            else:
                recording.rollback = read_rollback(folder.path, launch.start.step, cuts, self._notify)
                # Before the lines are cut off: what they took is known from them alone.
                record_rollback(launch, folder, recording.rollback)
                rewind_run(folder, launch.start, cuts)
            resolved = {
                **launch.resolved.to_json(),
                **launch.crossings,
                **({RULES: rules} if (rules := _rules(launch, recorded)) else {}),
                "learning_rate": self.config.peak_learning_rate,
                GIVEN_WEIGHTS: _given_digest(launch, recorded),
                WEIGHTS_METADATA: recorded_metadata(launch),
            }
            folder.write_config(
                with_absolute_paths(self.config),
                resolved,
                launch.resolved.data.manifest_digest,
                origins=_origins(self._given) if origins is None else origins,
                earlier=earlier,
                continued=() if recorded is None else recorded.seals,
            )
            if (stored := self._place.stored) is None:
                return recording.run(compiled, state, sinks)
            stored.begin()
            result = recording.run(compiled, state, [*sinks, stored.watch()])
            return replace(result, run_dir=self._place.url)

    @property
    def launch(self) -> Launch:
        """The launch of the run."""
        return self._launch

    @property
    def steps_begun(self) -> int:
        """The number of updates whose batches the program has asked for, also while it runs."""
        return (self._launch.board.last_pull + 1) // self.config.accumulate_steps

    @property
    def facts(self) -> RunFacts:
        """What is known of the run before its program is compiled."""
        launch = self._launch
        return RunFacts(
            config=self.config,
            resolved=launch.resolved,
            num_params=launch.num_params,
            state_bytes=launch.state_bytes,
            ring_bytes=launch.ring_bytes,
            num_devices=len(launch.team.devices),
            num_own_devices=len(launch.team.own),
            start_step=launch.start.step,
        )

    def plan(self, *, is_explained: bool = False) -> DryRun:
        """Compile the program, and return it together with what the run needs beside it.

        Args:
            is_explained: whether the program is to be read: a program in the cache must then have the same scopes and
                source lines, and the program is traced once more with layers in their forms for all platforms, one of
                which says what they compute.
        """
        launch = self._launch
        if self._recorded is not None and self._place.path is not None:
            find_cuts(self._place.path, launch.start)
        with caching_compilations(self.config.compilation_cache, self._notify, by_metadata=is_explained):
            traced = launch.trace()
            compiled = launch.compile(traced)
        return DryRun(compiled, self.facts, traced, launch.trace_all_forms() if is_explained else None)

    def _train_unrecorded(self, sinks: Sequence[Sink]) -> TrainResult:
        """Run the program without writing to disk."""
        launch = self._launch
        compiled, state = self._compile()
        monitor = start_monitor(launch, compiled)
        try:
            state = launch.run(compiled, state, sinks)
        except BaseException:
            monitor.finish("failed")
            raise
        failure = launch.failure(state)
        result = result_of(launch, compiled, state, None, failure, monitor.so_far())
        end: LaunchState = "failed" if failure is not None else "done" if result.is_complete else "stopped"
        result = replace(result, runtime=monitor.finish(end))
        if failure is not None:
            raise failure
        return result

    def _compile(self) -> tuple[Compiled, TrainState]:
        # A profile needs the scopes of this program, not of an older one with the same instructions.
        by_metadata = self.config.profile
        with caching_compilations(self.config.compilation_cache, self._notify, by_metadata=by_metadata):
            compiled, state = self._launch.prepare()
        self._launch.warn_of_memory(compiled)
        return compiled, state


def _check_has_folder(config: TrainConfig, *, is_dry: bool) -> None:
    """Raise SettingError if a setting needs a run folder and none is given; snapshots need no folder in a dry run."""
    if this_process().index > 0:
        return
    needs_one = {
        "resume": config.resume,
        "snapshot_every_steps": (config.snapshot_every_steps or config.snapshot_every_epochs) and not is_dry,
        "keep_best": config.keep_best is not None and not is_dry,
        "tensorboard": config.tensorboard and not is_dry,
    }
    if config.run_dir is None and any(needs_one.values()):
        raise SettingError(
            next(name for name, is_needed in needs_one.items() if is_needed),
            "the setting {setting} needs a run folder, got none: give one with TrainConfig(run_dir=…)",
        )


def _check_continues(launch: Launch, recorded: RecordedRun, notify: Callable[[str], None]) -> None:
    """Raise ValueError if data, model or initial weights changed; report changed settings and learning-rate factors."""
    check_data(launch.resolved, recorded)
    check_rules(launch.config, launch.resolved, recorded.resolved, launch.given)
    check_given_weights(launch.given_digest, recorded)
    for message in (
        describe_changes(launch.config, recorded.config),
        describe_factor(launch.start),
        describe_rate_change(
            launch.config, recorded.config, launch.start.step, factor_before(launch.start.events, launch.start.pulls)
        ),
        changed_kernels_notice(recorded.resolved, launch.crossings),
        machine_warning(
            recorded.machines,
            launch.crossings[MACHINE],
            thread_rule(launch.config, is_own_model=launch.resolved.registry_name is None),
        ),
    ):
        if message is not None:
            notify(message)
    if (before := Topology.from_json(recorded.resolved)) != launch.topology:
        depends = "" if launch.norms_are_fixed else "; batch norms average over the images of each device"
        notify(f"the run was on {before} and goes on with {launch.topology}: the same images, other rounding{depends}")


def _find_start(
    config: TrainConfig, path: Path | None, parts: OwnParts, notify: Callable[[str], None]
) -> tuple[TrainConfig, RecordedRun | None, StartingPoint]:
    """Return the settings, the record of the resumed run (None for a new run) and the starting point of the launch.

    A resumed run keeps its kernels, unless the settings name others, which is refused.
    """
    if not config.resume or path is None:
        return config, None, StartingPoint()
    config, recorded = _with_recorded_data(config, read_recorded(path), parts)
    if config.kernels == AUTO:
        config = replace(config, kernels=recorded.config.kernels)
    check_own(recorded, path, parts)
    for warning in compare_named(recorded.resolved, parts.named):
        notify(warning)
    check_settings(config, recorded.config)
    if (line := recorded.describe_replaced(config, options=SETTINGS)) is not None:
        notify(line)
    start = find_start(path, notify)
    check_chain(path, recorded, start)
    where = f"the snapshot of step {start.step:,}" if start.snapshot else "its beginning, because it has no snapshot"
    notify(f"resuming {path} from {where}")
    for warning in changed_sources(recorded.resolved, parts):
        notify(warning)
    return config, recorded, start


def _with_recorded_data(config: TrainConfig, recorded: RecordedRun, parts: OwnParts) -> tuple[TrainConfig, RecordedRun]:
    """Return the settings and the record with the place of the data, wherever the run is resumed."""
    if parts.batches is not None or config.synthetic:
        return config, recorded
    place = data_of_record(config.data, recorded.resolved.get(DATA_LOCATION))
    if config.data is None:
        recorded = replace(recorded, config=replace(recorded.config, data=place))
    return replace(config, data=place), recorded


def _check_length(
    config: TrainConfig, recorded: RecordedRun, start: StartingPoint, notify: Callable[[str], None]
) -> None:
    """Raise ValueError if `steps` was changed to a number already reached; report what the resume cannot guarantee."""
    check_steps(config, recorded.config, start.step)
    if start.snapshot and start.step >= config.steps:
        notify(
            f"the run is already complete, with {quantity(config.steps, 'step')}; give a larger --steps, or "
            "append a cycle of the schedule (--append-epochs), to train further"
        )
    for message in (versions_warning(recorded), unchecked_notice(recorded, start)):
        if message is not None:
            notify(message)


def _note_changes(launch: Launch, recorded: RecordedRun) -> list[dict[str, Any]]:
    return note_changes(recorded, launch.config, launch.start.step, launch.topology, launch.crossings[MACHINE])


def _rules(launch: Launch, recorded: RecordedRun | None) -> dict[str, int]:
    """Return the numbers of the run's rules; one that only its beginning used is taken from the record."""
    before = {} if recorded is None else recorded.resolved.get(RULES, {})
    return before | rules_of(launch.config, launch.resolved, launch.given)


def _given_digest(launch: Launch, recorded: RecordedRun | None) -> str | None:
    """Return the digest of the initial weights, taken from the record if the launch resumes from a snapshot."""
    return launch.given_digest or (recorded.resolved.get(GIVEN_WEIGHTS) if recorded else None)


def _origins(config: TrainConfig) -> dict[str, str]:
    default, given = TrainConfig().to_json(), config.to_json()
    return {name: "default" if given[name] == default[name] else "caller" for name in given}
