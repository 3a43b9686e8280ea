"""The lines that `run-train --step-check` prints. Must not know: jax, terminals."""

from collections.abc import Mapping
from textwrap import wrap
from typing import TYPE_CHECKING

from loopfeed.preprocess.printable import printable_line

if TYPE_CHECKING:
    from loopfeed.engine.run.differences import Difference
    from loopfeed.engine.run.step_check import StepCheck

_WIDTH = 80
_NAME_WIDTH = 32
_MOST_SCOPES = 24  # of more, those that are explained are joined by the first part of their path


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
    if not check.program:
        lines.append("not compared, because one step takes several batches (--accumulate-steps)")
    return [*lines, "", *wrap(verdict(check), _WIDTH, break_long_words=False, break_on_hyphens=False)]


def verdict(check: "StepCheck") -> str:
    """Return in a few sentences whether the step is right, and where it first is not."""
    from loopfeed.engine.run.differences import MARGIN

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
    from loopfeed.engine.run.differences import join

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
