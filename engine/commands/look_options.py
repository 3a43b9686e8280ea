"""The options of `run-train` that look into a run instead of training it, and the lines that `--step-check` prints."""

from collections.abc import Mapping
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import click

from loopfeed.engine.config import TrainConfig
from loopfeed.preprocess.commands.completion import complete_file
from loopfeed.preprocess.commands.sheet_path import check_sheet_path
from loopfeed.preprocess.printable import printable_line

if TYPE_CHECKING:
    from loopfeed.engine.inspection.differences import Difference
    from loopfeed.engine.inspection.step_check import StepCheck
    from loopfeed.engine.parts import UserParts

_WIDTH = 80
_NAME_WIDTH = 32
_MOST_SCOPES = 24  # of more, those that are explained are joined by the first part of their path

_NAMED = 3
LOOK_OPTIONS = ("show_batch", "step_check")
"""The parameter names of these options."""

OPTIONS = (
    click.option(
        "--show-batch",
        type=click.Path(path_type=Path),
        metavar="FILE.png",
        shell_complete=complete_file,
        show_default="train",
        help="Write pictures of the first batch, after augmentation, as the devices got it, but do not train; with "
        "--resume, of the batch that the run would take next.",
    ),
    click.option(
        "--step-check",
        is_flag=True,
        help="Make the next step in the compiled program and operation by operation, and print where they differ, but "
        "do not train.",
    ),
)


def check_look_options(params: Mapping[str, Any]) -> None:
    """Raise ValueError if two options that replace training are given, or the pictures cannot be written."""
    given = [f"--{name.replace('_', '-')}" for name in ("dry_run", *LOOK_OPTIONS) if params[name]]
    if len(given) > 1:
        raise ValueError(f"{given[0]} and {given[1]} both replace the training: give one of them")
    if given and params["requeue"]:
        raise ValueError(f"--requeue continues a training, and {given[0]} does not train: leave one out")
    for name in ("spawn", "coordinator"):
        if params["step_check"] and params[name] is not None:
            raise ValueError(f"--step-check runs in one process, got --{name}: leave it out")
    if params["show_batch"] is not None:
        check_sheet_path(params["show_batch"])


def is_look(params: Mapping[str, Any]) -> bool:
    """Return whether one of these options is given."""
    return any(params[name] for name in LOOK_OPTIONS)


def look(config: TrainConfig, parts: "UserParts", params: Mapping[str, Any]) -> bool:
    """Do what the given option says, and print it; return whether nothing is wrong."""
    from loopfeed.engine.crossing.devices import split_processor

    # Before the modules that use jax are imported.
    split_processor([config])
    if params["step_check"]:
        return _check_step(config, parts)
    _show_batch(config, parts, params["show_batch"])
    return True


def _show_batch(config: TrainConfig, parts: "UserParts", path: Path) -> None:
    from loopfeed.engine.inspection.show_batch import first_batch_of
    from loopfeed.engine.processes import this_process
    from loopfeed.engine.run.train import set_up_run

    is_first = this_process().index == 0
    with set_up_run(config, parts, click.echo if is_first else lambda _: None, is_dry=True) as run:
        shown = first_batch_of(run)
    if is_first:
        shown.save(path)
        click.echo(f"wrote {path}: {shown.facts} of step {shown.step:,}")


def _check_step(config: TrainConfig, parts: "UserParts") -> bool:
    from loopfeed.engine.inspection.step_check import check_step_of

    check = check_step_of(config, parts, click.echo)
    click.echo("\n".join(["", *report_lines(check)]))
    return check.is_right


def report_lines(check: "StepCheck") -> list[str]:
    """Return the table of a check and its verdict, at most 80 characters wide."""
    lines = [
        f"step {check.step:,}, {check.num_operations:,} operations: in a compiled loop, against one by one",
        f"{'values that leave a scope':<{_NAME_WIDTH}}{'values':>7}{'largest':>10}{'ULP':>9}{'rms':>10}{'allowed':>10}",
        *(_row(name, each) for name, each in _shortened(check.scopes).items()),
        "results of the loop",
        *(_row(name, each) for name, each in check.results.items()),
        "results of the training program",
        *(_row(name, each) for name, each in check.program.items()),
    ]
    if check.names:
        more = f" and {len(check.names) - _NAMED:,} more images" if len(check.names) > _NAMED else ""
        lines += wrap(f"batch: {', '.join(map(printable_line, check.names[:_NAMED]))}{more}", _WIDTH)
    if not check.program:
        lines.append("not compared, because one step takes several batches (--accumulate-steps)")
    return [*lines, "", *wrap(verdict(check), _WIDTH, break_long_words=False, break_on_hyphens=False)]


def verdict(check: "StepCheck") -> str:
    """Return in a few sentences whether the step is right, and where it first is not."""
    from loopfeed.engine.inspection.differences import MARGIN

    rule = (
        f"Allowed is {MARGIN:g} times the change (root mean square) that random rounding of each operation makes, "
        "because another order of the same operations rounds no worse."
    )
    if check.unstable:
        name, size = next(iter(check.unstable.items()))
        num_others = len(check.unstable) - 1
        others = f" and {num_others} more part{'s' * (num_others > 1)}" if num_others else ""
        how_far = "to NaN or infinity" if size == float("inf") else f"by {size:.0%} of its norm"
        return (
            f"UNSTABLE in {printable_line(name)}{others}: rounding alone moves what leaves it {how_far}, and no "
            "switch of a ReLU explains it. Either numbers cancel there, or a derivative compares numbers that XLA may "
            "compute a second time with another rounding, as x == x.max() does: take the derivative at a stored index "
            "(jnp.argmax, loopfeed.max_pool)."
        )
    if check.is_explained:
        return f"Rounding explains all differences. {rule}"
    first = check.first_unexplained
    if first is not None:
        found = check.scopes[first]
        what = (
            f"differs by {found.measured:.1e}, of which rounding explains {found.allowed:.1e}"
            if found.is_finite
            else "has NaN or infinity where the other has none"
        )
        return f"WRONG in {printable_line(first)}: what leaves it in the loop {what}. {rule}"
    parts = {"loop": check.results, "training program": check.program}
    where, names = next(
        (part, [name for name, each in found.items() if not each.is_explained])
        for part, found in parts.items()
        if not all(each.is_explained for each in found.values())
    )
    others = ", although every scope in the loop is right" if where == "training program" else ""
    return f"WRONG: the {where} gives another {' and '.join(names)}{others}. {rule}"


def _shortened(scopes: "Mapping[str, Difference]") -> "dict[str, Difference]":
    """Return the scopes, if there are many those that are explained joined by action and first part of the path."""
    from loopfeed.engine.inspection.differences import join

    if len(scopes) <= _MOST_SCOPES:
        return dict(scopes)
    groups: dict[str, dict[str, Difference]] = {}
    for name, each in scopes.items():
        groups.setdefault("/".join(name.split("/")[:2]), {})[name] = each
    shown: dict[str, Difference] = {}
    for group, members in groups.items():
        if all(each.is_explained for each in members.values()):
            shown[group] = join(list(members.values()))
        else:
            shown |= members
    return shown


def _row(name: str, found: "Difference") -> str:
    name = printable_line(name)
    if len(name) > _NAME_WIDTH - 3:
        name = f"~{name[-(_NAME_WIDTH - 4) :]}"
    start = f"  {name:<{_NAME_WIDTH - 2}}{found.num_values:>7}"
    if found.is_identical:
        return f"{start}{'identical':>10}"
    if not found.is_finite:
        return f"{start}{'NaN or infinity in one of them: WRONG':>40}"
    numbers = f"{found.largest:>10.1e}{found.ulp:>9.3g}{found.measured:>10.1e}{found.allowed:>10.1e}"
    return start + numbers + ("" if found.is_explained else "!")
