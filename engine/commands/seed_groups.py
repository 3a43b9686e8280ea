"""Runs that differ in their seed alone: the mean and the standard deviation of what they reached.

Must not know: files, terminals.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from loopfeed.engine.commands.run_table import comparable_setting, setting_of
from loopfeed.engine.config import SETTINGS
from loopfeed.engine.named_parts import OWN_FUNCTIONS, USER_SOURCES
from loopfeed.engine.objective.best_metric import parse_metric
from loopfeed.engine.records.run_summary import RunSummary
from loopfeed.engine.settings import Owner

_SEED = "seed"


class Spread(NamedTuple):
    """The mean of numbers, and their sample standard deviation, with n - 1 in the denominator."""

    mean: float
    std: float


class SeedGroup(NamedTuple):
    """Runs that are done and differ in their seed alone.

    Attributes:
        members: their indices among all runs.
        spreads: by name, of the numbers that all of them have: best_value, last_value, loss, duration_s.
        metric: what says which evaluation is best, None without evaluations.
    """

    members: tuple[int, ...]
    spreads: dict[str, Spread]
    metric: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the group as JSON values."""
        found: dict[str, Any] = {"num_runs": len(self.members), "best_metric": self.metric}
        return found | {name: spread._asdict() for name, spread in self.spreads.items()}


_NUMBERS: dict[str, Callable[[RunSummary], float | None]] = {
    "best_value": lambda run: run.best_value,
    "last_value": lambda run: run.last_value,
    "loss": lambda run: run.loss,
    "duration_s": lambda run: run.duration_s,
}


def group_by_seed(runs: Sequence[RunSummary]) -> list[SeedGroup]:
    """Return the groups of at least two runs with different seeds, in the order of their first runs."""
    names = [name for name, each in SETTINGS.items() if each.owner is not Owner.LAUNCH and name != _SEED]
    unknown = sorted({name for run in runs for name in run.settings} - SETTINGS.keys())
    found: dict[tuple[Any, ...], list[int]] = {}
    for index, run in enumerate(runs):
        if run.state == "done" and run.settings:
            key = tuple(comparable_setting(setting_of(run, name)) for name in [*names, *unknown])
            own = (str(run.resolved.get(each)) for each in (OWN_FUNCTIONS, USER_SOURCES))
            found.setdefault((*key, *own, run.best_metric), []).append(index)
    groups = []
    for members in found.values():
        seeds = {comparable_setting(setting_of(runs[index], _SEED)) for index in members}
        if len(seeds) == len(members) > 1:
            spreads = _spreads([runs[index] for index in members])
            groups += [SeedGroup(tuple(members), spreads, runs[members[0]].best_metric)] if spreads else []
    return groups


def _spreads(runs: Sequence[RunSummary]) -> dict[str, Spread]:
    found = {}
    for name, number_of in _NUMBERS.items():
        numbers = [number for run in runs if (number := number_of(run)) is not None]
        if len(numbers) == len(runs):
            found[name] = Spread(statistics.fmean(numbers), statistics.stdev(numbers))
    return found


def group_line(group: SeedGroup, names: Sequence[str]) -> str:
    """Return a line such as `3 seeds (a, b, c): best top-1 73.60 ± 0.96 %, last top-1 …, loss 0.9121 ± 0.0042`."""
    loss = parse_metric("loss")
    metric, parts = loss if group.metric is None else parse_metric(group.metric), []
    for name, each, title in (
        ("best_value", metric, f"best {metric.title}"),
        ("last_value", metric, f"last {metric.title}"),
        ("loss", loss, "loss"),
    ):
        if name in group.spreads:
            mean, std = group.spreads[name]
            text = f"{100 * mean:.2f} ± {100 * std:.2f} %" if each.is_accuracy else f"{mean:.4f} ± {std:.4f}"
            parts.append(f"{title} {text}")
    return f"{len(group.members)} seeds ({', '.join(names[index] for index in group.members)}): {', '.join(parts)}"
