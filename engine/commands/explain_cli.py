"""The `explain-program` command, which shows what is inside the compiled program of a run, and runs nothing.

jax and numpy are imported where they are first needed, so that `--help` answers at once.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from loopfeed.engine.commands.command_end import ending, say_to_stderr
from loopfeed.engine.commands.option_sources import OptionSource, command_line, merge_options
from loopfeed.engine.commands.setting_options import option_spelling
from loopfeed.engine.commands.train_options import describing_options, option_groups
from loopfeed.engine.commands.user_parts import load_user_parts, take_part_names
from loopfeed.engine.config import SETTINGS, TrainConfig
from loopfeed.engine.named_parts import (
    OWN_PARTS,
    compare_named,
    missing_parts,
)
from loopfeed.engine.owners import OF_AN_EVALUATION, recorded_settings
from loopfeed.engine.recipes import load_recipe
from loopfeed.engine.settings import Owner
from loopfeed.preprocess.commands.completion import complete_folder
from loopfeed.preprocess.commands.grouped_help import GroupedCommand
from loopfeed.preprocess.printable import printable_line
from loopfeed.preprocess.storage_options import parse_text

if TYPE_CHECKING:
    from loopfeed.engine.inspection.report import ProgramReport
    from loopfeed.engine.parts import UserParts
    from loopfeed.engine.records.recorded_run import RecordedRun
    from loopfeed.engine.sizing.device_rates import DeviceRates

_RECORDED = "the recorded run"
_REPORT = ("stage", "compare", "ir", "report_format", "depth", "top", "traceback")
# Where a run goes does not change its program.
_SETTINGS = tuple(name for name, each in SETTINGS.items() if each.owner is not Owner.LAUNCH or name == "dump_hlo")
# Click keeps the line breaks of a paragraph that begins with a backspace.
_EPILOG = """\b
Examples:
  explain-program --model resnet50 --batch 8 --synthetic
  explain-program runs/first
  explain-program --synthetic --compare "--model resnet18" "--model resnet50"
  explain-program --compare runs/first "runs/first --precision bfloat16"
  explain-program runs/first --ir hlo
"""

_FIRST = (
    *("recipe", "data", "model", "image_size", "batch", "precision", "kernels", "devices", "chunk_batches"),
    *("optimizer", "accumulate_steps"),
)


def _groups() -> dict[str, tuple[str, ...]]:
    """Return the headings of `--help`: those of `run-train` without what only a run needs."""
    known = {*_SETTINGS, *OWN_PARTS, "recipe"}
    found = {title: tuple(name for name in names if name in known) for title, names in option_groups().items()}
    return {"Report": _REPORT, **{title: names for title, names in found.items() if names}}


@click.command(
    cls=GroupedCommand,
    option_groups=_groups(),
    first_options=(*_REPORT, *_FIRST),
    epilog=_EPILOG,
)
@click.argument("run", required=False, shell_complete=complete_folder)
@click.option(
    "--compare",
    nargs=2,
    metavar="A B",
    default=None,
    show_default="off",
    help="Print only what differs between two programs, each a quoted RUN, options, or both.",
)
@click.option(
    "--ir",
    type=click.Choice(["stablehlo", "hlo"]),
    metavar="stablehlo|hlo",
    default=None,
    show_default="off",
    help="Print the body of the loop over batches with source lines: before or after XLA's optimisation.",
)
@click.option(
    "--format",
    "report_format",
    type=click.Choice(["plain", "json"]),
    default="plain",
    metavar="plain|json",
    help="Format of the report.",
)
@click.option(
    "--depth", type=click.IntRange(1, 9), default=1, metavar="N", help="Levels of the model's layers in a row's name."
)
@click.option(
    "--stage", type=click.IntRange(min=1), default=1, metavar="N", help="Stage of a run with stages (--stages) to show."
)
@click.option("--top", type=click.IntRange(min=1), default=10, metavar="N", help="Rows of a list, the largest first.")
@describing_options(_SETTINGS)
@click.pass_context
def main(
    context: click.Context,
    /,
    *,
    compare: tuple[str, str] | None,
    ir: str | None,
    report_format: str,
    depth: int,
    stage: int,
    top: int,
    traceback: bool,
    **_options: Any,
) -> None:
    """Show what is inside the compiled program of the run in folder RUN, or of a run with these options.

    The program is compiled, or loaded from the cache, but not run, and no run folder is written. Shown are the
    work by phase, action and layer, the convolutions and their forms, memory, the carry of the loop, and what is slower
    than it has to be. RUN may be the URL of a run in an object store; options override
    its settings. The report goes to stdout, all other messages go to stderr.

    Exit codes: 0 done, 1 the program could not be compiled, 2 wrong usage or data, 130 stopped by SIGINT,
    SIGTERM or SIGHUP.
    """
    with ending("explain-program", "stopped", traceback=traceback):
        _check_options(compare, ir, report_format, context.params["run"])
        view = _View(depth, stage)
        if compare is not None:
            text = _comparison(context, compare, report_format, view)
        else:
            text = _explanation(_described(context, _take_part_names(context)), ir, report_format, view, top)
        click.echo(text)


class _View(NamedTuple):
    """How many levels of layers a report distinguishes, and the stage that it shows."""

    depth: int
    stage: int


@dataclass(frozen=True)
class _Described:
    """A run to explain: what it is called, its settings and its parts."""

    name: str
    config: TrainConfig
    parts: "UserParts"


def _check_options(compare: tuple[str, str] | None, ir: str | None, report_format: str, run: str | None) -> None:
    if compare is not None and run is not None:
        raise ValueError(f"--compare names both programs, got RUN {run} as well: leave it out, or put it into quotes")
    if ir is not None and compare is not None:
        raise ValueError("--ir prints one program and --compare compares two, got both: leave one out")
    if ir is not None and report_format == "json":
        raise ValueError("--ir prints text, got --format json as well: leave one out")


def _explanation(described: _Described, ir: str | None, report_format: str, view: _View, top: int) -> str:
    from loopfeed.engine.inspection.plain import hlo_lines, report_lines, stablehlo_lines
    from loopfeed.engine.inspection.steps import Steps

    report = _explain(described, view, None)
    if ir == "hlo":
        lines = hlo_lines(Steps(report.program))
    elif ir == "stablehlo":
        lines = stablehlo_lines(report.lowered.compiler_ir("stablehlo"))
    elif report_format == "json":
        return json.dumps(report.to_json(), indent=2, allow_nan=False)
    else:
        lines = report_lines(report, most=top)
    return "\n".join(map(printable_line, lines))


def _comparison(context: click.Context, texts: tuple[str, str], report_format: str, view: _View) -> str:
    from loopfeed.engine.crossing.devices import split_processor
    from loopfeed.engine.inspection.plain import compare_reports, comparison_lines

    names, outer = _take_part_names(context), command_line(context)
    found = []
    parsed = [_parsed(context, text) for text in texts]
    for inner in parsed:
        own = _take_part_names(inner)
        replaced = {*own, *command_line(inner).settings}
        inner.params["recipe"] = inner.params["recipe"] or context.params["recipe"]
        both = OptionSource(outer.name, {name: value for name, value in outer.settings.items() if name not in own})
        kept = {name: each for name, each in names.items() if name not in replaced}
        found.append(_described(inner, kept | own, both))
    one, other = found
    split_processor([one.config, other.config])
    # Each may be another stage of the same run.
    stages = [inner.params["stage"] for inner in parsed]
    views = [view._replace(stage=view.stage if stage == 1 else stage) for stage in stages]
    first = _explain(one, views[0], None)
    rows = compare_reports(first, _explain(other, views[1], first.rates))
    if report_format == "json":
        return json.dumps([row._asdict() for row in rows], indent=2, allow_nan=False)
    return "\n".join(map(printable_line, comparison_lines(rows, (one.name, other.name))))


def _parsed(context: click.Context, text: str) -> click.Context:
    """Parse what stands in quotes behind --compare as the command's own arguments."""
    try:
        arguments = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"--compare {text!r} cannot be split into arguments ({error}): check its quotes") from None
    try:
        inner = main.make_context(context.info_name, arguments)
    except click.UsageError as error:
        raise ValueError(f"--compare {text!r}: {error.format_message()}") from None
    if given := [name for name in ("compare", "ir") if inner.params[name] is not None]:
        raise ValueError(f"--compare {text!r} must describe one program, got --{given[0]} in it: leave that out")
    return inner


def _described(context: click.Context, part_names: Mapping[str, str], outer: OptionSource | None = None) -> _Described:
    """Return the run that a command line describes.

    Args:
        context: the parsed command line.
        part_names: the names of the user's own parts.
        outer: the settings that are given for both of two programs, below those of the command line.
    """
    parts = load_user_parts(part_names)
    own = command_line(context)
    sources = [own] if outer is None else [outer, own]
    all_given = {name: value for each in sources for name, value in each.settings.items()}
    run, recipe = context.params["run"], context.params["recipe"]
    if run is not None and recipe is not None:
        raise ValueError(f"RUN has its own settings, got --recipe {recipe} as well: leave one out")
    record = None
    if run is not None:
        record = _recorded(run, context, parts)
        sources.insert(0, OptionSource(_RECORDED, recorded_settings(record.config, all_given)))
    elif recipe is not None:
        loaded = load_recipe(recipe)
        sources.insert(0, OptionSource(f"recipe {loaded.name}", loaded.settings_below(all_given)))
        record = loaded.recorded
    config = TrainConfig(**merge_options(*sources).settings)
    if record is not None and (line := record.describe_replaced(config, OF_AN_EVALUATION, SETTINGS)) is not None:
        say_to_stderr(line)
    given = [f"{option_spelling(name)} {part_names.get(name, value)}" for name, value in own.settings.items()]
    return _Described(" ".join(filter(None, (run, recipe, *given))) or "the default settings", config, parts)


def _take_part_names(context: click.Context) -> dict[str, str]:
    return take_part_names(context.params, {name: each.default for name, each in SETTINGS.items()})


def _recorded(run: str, context: click.Context, parts: "UserParts") -> "RecordedRun":
    """Return the record of a run; raise ValueError if it needs a part of the user's own that is not given."""
    from loopfeed.engine.data.dataset import DATA_LOCATION, data_of_record
    from loopfeed.engine.records.recorded_run import read_recorded, recorded_user_parts
    from loopfeed.engine.records.stored.reading import local_copy, settings_only
    from loopfeed.engine.records.trained_run import check_folder

    with local_copy(run, parse_text(context.params["storage_options"]), settings_only) as folder:
        check_folder(folder)
        recorded = read_recorded(folder)
    missing = [name for name in recorded_user_parts(recorded.resolved) if getattr(parts, name, None) is None]
    if missing:
        raise missing_parts(run, missing, recorded.resolved, f"explain-program {shlex.quote(run)}")
    for warning in compare_named(recorded.resolved, parts.named):
        say_to_stderr(warning)
    if context.params.get("data") is None and (found_at := recorded.resolved.get(DATA_LOCATION)) is not None:
        place = data_of_record(recorded.config.data, found_at)
        recorded = replace(recorded, config=replace(recorded.config, data=place))
    return recorded


def _explain(described: _Described, view: _View, rates: "DeviceRates | None") -> "ProgramReport":
    from loopfeed.engine.inspection.explain import explain_parts

    what = described.config, described.parts, partial(say_to_stderr)
    return explain_parts(*what, rates=rates, depth=view.depth, stage=view.stage)
