"""The `run-train` command, which converts options to settings, trains, shows losses and reports errors in one line."""

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from loopfeed.engine.commands.command_end import describe_error, leave, notes_of, say_to_stderr
from loopfeed.engine.commands.look_options import check_look_options, is_look, look
from loopfeed.engine.commands.option_sources import (
    MergedOptions,
    OptionSource,
    command_line,
    merge_options,
)
from loopfeed.engine.commands.plan_options import check_plan_options, print_plan
from loopfeed.engine.commands.run_display import LossDisplay
from loopfeed.engine.commands.setting_options import option_names
from loopfeed.engine.commands.supervisor import keep_runtime_output, supervise, without_option
from loopfeed.engine.commands.train_options import EPILOG, FIRST_OPTIONS, option_groups, train_options
from loopfeed.engine.commands.user_parts import load_user_parts, take_part_names
from loopfeed.engine.compilation.garbage_collector import keeping_imports
from loopfeed.engine.config import NO_VALUE, SETTINGS, TrainConfig
from loopfeed.engine.owners import recorded_settings
from loopfeed.engine.peers import Peers, is_of_runtime, is_supervised
from loopfeed.engine.processes import check_address, join_as, leave_processes, this_process
from loopfeed.engine.recipes import LoadedRecipe, load_recipe
from loopfeed.engine.recipes.expected import expected_accuracy
from loopfeed.preprocess.commands.grouped_help import GroupedCommand
from loopfeed.preprocess.commands.guarded_output import show_only_on_stdout
from loopfeed.preprocess.storage_options import parse_text

if TYPE_CHECKING:
    from loopfeed.engine.parts import UserParts
    from loopfeed.engine.run.run import Run
    from loopfeed.engine.stream.sinks import Sink

_DONE, _FAILED, _WRONG_USAGE, _STOPPED = 0, 1, 2, 130
_RECORDED = "the recorded run"


@click.command(cls=GroupedCommand, option_groups=option_groups(), first_options=FIRST_OPTIONS, epilog=EPILOG)
@train_options
@click.pass_context
def main(context: click.Context, /, *, recipe: str | None, dry_run: bool, traceback: bool, **_options: Any) -> None:
    """Train an image classifier in one compiled program.

    Batches stream in and losses stream out while a single while-loop trains on the device. Exit codes: 0 done, 1
    the run failed, 2 wrong usage or data, 130 stopped by SIGINT, SIGTERM, SIGHUP (unless
    ignored, as under nohup) or control-run, after a last snapshot.
    """
    is_saved, has_parted, name_setting = True, True, option_names(context)
    peers: Peers | None = None
    try:
        if not (dry_run or context.params["step_check"]):
            show_only_on_stdout()
        check_plan_options(context.params)
        check_look_options(context.params)
        if (code := _supervise(context)) is not None:
            leave(code)
            return
        peers = _join(context.params)
        names = take_part_names(context.params, {name: each.default for name, each in SETTINGS.items()})
        loaded = None if recipe is None else load_recipe(recipe)
        display = LossDisplay(context.params["log_every"], is_quiet=context.params["quiet"])
        merged = _merge(context, loaded, display)
        if loaded is not None and not context.params["resume"]:
            name_setting = _naming_recipe(name_setting, loaded, merged)
        config = TrainConfig(**merged.settings)
        parts = load_user_parts(names)
        if dry_run:
            print_plan(config, parts, names, context.params)
            code = _DONE
        elif is_look(context.params):
            code = _DONE if look(config, parts, context.params) else _FAILED
        else:
            with _open_run(config, parts, peers, None if context.params["resume"] else loaded, display) as (run, sinks):
                from loopfeed.engine.run.train import train_run

                result = train_run(run, sinks, merged.origins)
            if this_process().index == 0:
                display.summarise(result, config)
            code, is_saved = _DONE if result.is_complete else _STOPPED, result.snapshot_step == result.steps_done
        has_parted = peers is None or leave_processes(peers)
    except KeyboardInterrupt as interrupt:
        how = str(interrupt) or "stopped at once; no weights were written"
        _tell(peers, interrupt, how)
        say_to_stderr(f"run-train: {how}{notes_of(interrupt)}")
        code = _STOPPED
    except Exception as error:
        _tell(peers, error, message := describe_error(error, name_setting))
        if traceback:
            raise
        say_to_stderr(f"run-train: {message}")
        code = _WRONG_USAGE if isinstance(error, ValueError) else _FAILED
    # If the last snapshot was not written, its thread may be blocked forever by the disk.
    leave(code, at_once=not (is_saved and has_parted))


def _naming_recipe(
    name_option: Callable[[str], str], recipe: LoadedRecipe, merged: MergedOptions
) -> Callable[[str], str]:
    """Return a function that names a setting by its key and recipe if the recipe gave it, else by its option."""

    def name_setting(name: str) -> str:
        if merged.origins.get(name) != f"recipe {recipe.name}" or name not in recipe.settings:
            return name_option(name)
        option = name_option(name)
        if not recipe.is_built_in:
            return f"{name} in {recipe.path} ({option} overrides it)"
        can_be_left_out = SETTINGS[name].is_optional and SETTINGS[name].kind in (int, float)
        how = f"{option} {NO_VALUE} leaves it out" if can_be_left_out else f"{option} overrides it"
        return f"{name} in the recipe {recipe.name} ({how})"

    return name_setting


def _merge(context: click.Context, recipe: LoadedRecipe | None, display: LossDisplay) -> MergedOptions:
    """Return the settings of the recipe or resumed run, overridden by the command line; also print the recipe."""
    if context.params["resume"]:
        return _resumed_options(context, recipe)
    if recipe is None:
        return merge_options(command_line(context))
    given = command_line(context)
    merged = merge_options(OptionSource(f"recipe {recipe.name}", recipe.settings_below(given.settings)), given)
    if recipe.unnamed_data and not (merged.settings["data"] or merged.settings["synthetic"]):
        raise ValueError(
            f"a recipe from a run must contain the location of its data, but {recipe.source} does not contain the "
            f"location of {recipe.unnamed_data}: give --data"
        )
    if recipe.recorded is not None:
        # Settings of the record that are the user's or the machine's, and so are not used unless they are given.
        line = recipe.recorded.describe_replaced(TrainConfig(**merged.settings), options=SETTINGS)
        if line is not None and this_process().index == 0:
            say_to_stderr(line)
    changed = ", ".join(merged.overrides)
    display.notify(f"recipe {recipe.name}" + f": the command line overrides {changed}" * bool(changed))
    return merged


def _resumed_options(context: click.Context, recipe: LoadedRecipe | None) -> MergedOptions:
    """Return the recorded settings of the run to resume, overridden by the command line."""
    from loopfeed.engine.records.recorded_run import read_recorded
    from loopfeed.engine.records.stored.reading import resumable_copy, settings_only

    run_dir = context.params["run_dir"]
    if run_dir is None:
        raise ValueError("--resume needs the folder of the run to continue, got none: give it with --run-dir")
    if context.params["overwrite"]:
        raise ValueError(
            "--resume continues a run and --overwrite replaces it, so only one is allowed, got both: leave one out"
        )
    with resumable_copy(run_dir, parse_text(context.params["storage_options"]), settings_only) as folder:
        recorded = read_recorded(folder)
    if recipe is not None and f"recipe {recipe.name}" not in recorded.origins.values():
        raise ValueError(
            f"a resumed run must keep its recipe, but {run_dir} was not started with {recipe.name}: leave --recipe out"
        )
    given = command_line(context)
    settings = recorded_settings(recorded.config, given.settings)
    if context.params["append_epochs"] is not None:
        del settings["learning_rate"]  # that of the cycles before
    merged = merge_options(OptionSource(_RECORDED, settings), given)
    origins = {
        name: recorded.origins.get(name, origin) if origin == _RECORDED else origin
        for name, origin in merged.origins.items()
    }
    return replace(merged, origins=origins)


def _supervise(context: click.Context) -> int | None:
    """Train in children of this process if there are several processes, and return the exit code."""
    params = context.params
    if is_supervised():
        return None
    coordinator = params["coordinator"]
    if coordinator is None:
        given = [name for name in ("num_processes", "process_id") if params[name] is not None]
        if given:
            raise ValueError(f"--{given[0].replace('_', '-')} needs --coordinator HOST:PORT: give it too")
        if params["spawn"] is None and not params["requeue"]:
            return None
    elif params["spawn"] is not None:
        raise ValueError("--spawn starts processes that --coordinator joins, got both: leave one out")
    else:
        check_address(*_address(params))
    arguments = without_option(sys.argv[1:], "--spawn")
    if not params["requeue"]:
        return supervise(arguments, params["spawn"], params["peer_timeout"]).code
    from loopfeed.engine.commands.requeue import STOPS, check_requeue, has_run, requeue_job

    run_dir = params["run_dir"]
    check_requeue(run_dir, overwrite=params["overwrite"])
    if has_run(run_dir) and not params["resume"]:
        arguments.append("--resume")
    code, signals = supervise(arguments, params["spawn"], params["peer_timeout"], STOPS)
    # Slurm may end the processes that are left when the first of the others has ended.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return requeue_job(code, signals, params["process_id"])


def _address(params: dict[str, Any]) -> tuple[str | None, int | None, int | None]:
    coordinator = params["coordinator"]
    return None if coordinator == "auto" else coordinator, params["num_processes"], params["process_id"]


def _join(params: dict[str, Any]) -> Peers | None:
    """Show the supervisor that this process is alive, and join the other processes, if there are any."""
    if not is_supervised():
        return None
    peers = Peers(params["peer_timeout"], _leave_because)
    if params["coordinator"] is None:
        return peers
    if not params["traceback"]:
        keep_runtime_output()
    # The watch and the supervisor act first: their messages name the process.
    join_as(peers, *_address(params), 4 * params["peer_timeout"], params["join_timeout"])
    return peers


def _leave_because(message: str) -> None:
    say_to_stderr(f"run-train: {message}")
    leave(_FAILED)


def _tell(peers: Peers | None, error: BaseException, message: str) -> None:
    """Tell the other processes why this one fails; does not return if it is another one that failed."""
    if peers is not None:
        # The supervisor passes on what a scheduler may have sent to this process already.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with suppress(KeyboardInterrupt):
            peers.fail(message, is_by_others=is_of_runtime(error))


@contextmanager
def _open_run(
    config: TrainConfig, parts: "UserParts", peers: Peers | None, recipe: LoadedRecipe | None, display: LossDisplay
) -> Iterator[tuple["Run", list["Sink"]]]:
    """Open the run, and yield it with the display of its losses; `recipe` is that of a new run."""
    with keeping_imports():
        from loopfeed.engine.crossing.devices import split_processor
        from loopfeed.engine.run.train import set_up_run

    split_processor([config], has_user_source=parts.has_user_source)
    # Of several processes, the first alone has the run folder and the terminal; a resume reads the folder in all.
    is_first = this_process().index == 0
    with ExitStack() as stack:
        if is_first:
            config = replace(config, run_dir=stack.enter_context(run_dir_of(config.run_dir)))
        elif not config.resume:
            config = replace(config, run_dir=None)
        run = stack.enter_context(set_up_run(config, parts, display.notify if is_first else lambda _: None))
        if peers is not None:
            peers.follow(lambda: run.steps_begun)
        if is_first and recipe is not None and parts.determine_nothing and this_process().count == 1:
            for note in expected_accuracy(recipe, config, run.data.contents_digest):
                display.notify(note)
        yield run, display.make_sinks(run.config) if is_first else []


@contextmanager
def run_dir_of(named: str | None) -> Iterator[str]:
    """Yield the given folder or, if there is none, a new one named after the current time.

    A new folder is removed at the end of the block if it is still empty.
    """
    if named is not None:
        yield named
        return
    is_first = not Path("runs").exists()
    created = _make_run_dir()
    try:
        yield os.fspath(created)
    finally:
        with suppress(OSError):
            created.rmdir()
            if is_first:
                created.parent.rmdir()


def _make_run_dir() -> Path:
    """Create a folder under runs/, with a number appended if another run started in the same second."""
    stem = time.strftime("%Y%m%d-%H%M%S")
    Path("runs").mkdir(exist_ok=True)
    for number in itertools.count(1):
        path = Path("runs", stem if number == 1 else f"{stem}-{number}")
        with suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError
