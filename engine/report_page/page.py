"""The page as a whole: its templates, in which everything is escaped, and its head, which forbids all network.

Whatever comes from a run is untrusted. Only this module says what is markup: its own style, script and data.
"""

import base64
import hashlib
import math
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from loopfeed.engine.config import SETTINGS, describe_value
from loopfeed.engine.records.machine import version_of
from loopfeed.engine.records.recorded_run import RecordedRun
from loopfeed.engine.report_page import number_text
from loopfeed.engine.report_page.absent import Absent
from loopfeed.engine.report_page.number_text import duration, number, percent
from loopfeed.engine.report_page.run_on_page import RunOnPage
from loopfeed.engine.report_page.training_charts import MOST_METRICS, TrainingCharts, metric_of
from loopfeed.engine.settings import Owner
from loopfeed.engine.stream.sinks import EvaluationRecord
from loopfeed.preprocess.printable import printable_text
from loopfeed.preprocess.quantities import quantity

# Where a run is written and how it is started say nothing about what it computed.
_OF_A_RUN = tuple(name for name, each in SETTINGS.items() if each.owner is not Owner.LAUNCH)

_LONGEST_TEXT = 2000
_SECTIONS = {
    "results": "Results", "loss": "Loss", "evaluations": "Evaluations", "rate": "Learning rate", "speed": "Throughput",
    "goodput": "Goodput", "profile": "Profile", "weights": "Evaluation of the weights",
    "confusion": "Confusion matrix", "classes": "Classes", "mistakes": "Mistakes", "settings": "Settings",
    "data": "Data set", "environment": "Environment",
}  # fmt: skip


def page(runs: Sequence[RunOnPage]) -> str:
    """Return the page about one or several runs."""
    environment = open_templates()
    assert environment.loader is not None
    style, script = (environment.loader.get_source(environment, name)[0] for name in ("page.css", "page.js"))
    names = ", ".join(run.name for run in runs[:3]) + (", …" if len(runs) > 3 else "")
    return environment.get_template("page.html").render(
        runs=runs,
        alone=len(runs) == 1,
        title=f"Report of {names}",
        sections=_SECTIONS,
        charts=TrainingCharts(runs),
        settings=Settings(runs),
        policy=_policy(style, script),
        style=Markup(style),
        script=Markup(script),
        now=time.time(),
        version=version_of("loopfeed"),
    )


def open_templates() -> Environment:
    """Return the environment of the page's templates: every value is shown as text, escaped, and none is missing."""
    environment = Environment(
        loader=PackageLoader(__package__, "templates"),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.tests["absent"] = lambda value: isinstance(value, Absent)
    environment.globals |= {"quantity": quantity, "results": results, "evaluations": evaluations}
    names = ("number", "whole", "percent", "duration", "brief", "moment")
    environment.filters |= {name: getattr(number_text, name) for name in names}
    environment.filters |= {"commas": _commas, "base64": _base64, "shades": _shades, "path": _path}
    return environment


def _shown(value: Any) -> Any:
    """Return a value of a template as the page shows it: no None, no control characters, no text that is very long."""
    if value is None or isinstance(value, Markup):
        return "" if value is None else value
    text, half = str(value), _LONGEST_TEXT // 2
    return printable_text(text if len(text) <= _LONGEST_TEXT else f"{text[:half]} … {text[-half:]}")


def _policy(style: str, script: str) -> str:
    """Return a policy that allows this style, this script and embedded pictures, and nothing else."""
    digests = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in (style, script)]
    return (
        f"default-src 'none'; style-src 'sha256-{digests[0]}'; script-src 'sha256-{digests[1]}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _commas(count: float) -> str:
    return f"{count:,}"


def _path(data: str) -> Markup:
    """Return <path> data, which are not shortened."""
    assert re.fullmatch("[-0-9 .MLhz]*", data)
    return Markup(data)


def _base64(content: bytes) -> Markup:
    """Return a file as text, which is not shortened."""
    return Markup(base64.b64encode(content).decode())


def _shades(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return each count of a row with its share of the row, 0 … 9."""
    total = max(sum(counts), 1)
    return [(count, math.ceil(9 * count / total)) for count in counts]


def results(run: RunOnPage) -> dict[str, str]:
    """Return the results of a run by their names."""
    curves, evaluations = run.curves, run.evaluations
    found = {"state": run.summary.state, "model": run.known.model or "–"}
    if isinstance(curves, Absent):
        found |= dict.fromkeys(("step", "loss, smoothed", "images/s, median", "wall time"), "–")
    else:
        planned = "" if run.known.steps is None else f" / {run.known.steps:,}"
        smoothed = curves.smoothed[np.isfinite(curves.smoothed)]
        speeds = curves.images_per_s[np.isfinite(curves.images_per_s)]
        # Without a record of the launches, the time from the first loss to the last.
        wall_s = curves.wall_s if isinstance(run.runtime, Absent) else run.runtime.goodput.total
        found |= {
            "step": f"{curves.step[-1]:,.0f}{planned}",
            "loss, smoothed": number(float(smoothed[-1])) if len(smoothed) else "NaN",
            "images/s, median": number(float(np.median(speeds))) if len(speeds) else "–",
            "wall time": duration(wall_s),
        }
    best = None if isinstance(evaluations, Absent) else evaluations.best
    return found | {
        "best top-1": "–" if best is None else f"{percent(best.top1)} (step {best.step:,})",
        "last evaluation loss": "–" if isinstance(evaluations, Absent) else number(evaluations.records[-1].loss),
    }


def evaluations(records: Sequence[EvaluationRecord]) -> tuple[list[str], list[list[str]], list[str]]:
    """Return the columns and the rows of some evaluations, and the names of metrics that are arrays."""
    own = list(dict.fromkeys(name for record in records for name in record.metrics))[:MOST_METRICS]
    scalar = [name for name in own if any(math.isfinite(metric_of(record, name)) for record in records)]
    columns = {"top-1 %": [100 * record.top1 for record in records]}
    if any(math.isfinite(record.top5) for record in records):
        columns["top-5 %"] = [100 * record.top5 for record in records]
    columns["loss"] = [record.loss for record in records]
    columns |= {name: [metric_of(record, name) for record in records] for name in scalar}
    rows = [
        [f"{record.step:,}", *(number(column[index]) for column in columns.values()), f"{record.num_images:,}"]
        for index, record in enumerate(records)
    ]
    return ["step", *columns, "images"], rows, [name for name in own if name not in scalar]


class Settings:
    """The settings of the runs whose settings can be read."""

    def __init__(self, runs: Sequence[RunOnPage]) -> None:
        self.runs = [(run.letter, run.recorded) for run in runs if not isinstance(run.recorded, Absent)]

    @property
    def differing(self) -> list[list[str]]:
        """The name and the values of each setting that differs among the runs."""
        rows = [[name, *(describe_value(run.value_of(name)) for _, run in self.runs)] for name in _OF_A_RUN]
        return [row for row in rows if len(set(row[1:])) > 1]

    @property
    def columns(self) -> list[str]:
        """The headings of `chosen` and `all`."""
        if len(self.runs) == 1:
            return ["setting", "value", "origin"]
        return ["setting", *(text for letter, _ in self.runs for text in (letter, f"origin of {letter}"))]

    @property
    def chosen(self) -> list[list[str]]:
        """The rows of `all` that some run does not leave at the default."""
        return [row for row in self.all if any(_is_chosen(run, row[0]) for _, run in self.runs)]

    @property
    def all(self) -> list[list[str]]:
        """The name of each setting and, for each run, its value and where it came from."""
        return [
            [
                name,
                *(text for _, run in self.runs for text in (_value(run, name), str(run.origins.get(name, "unknown")))),
            ]
            for name in SETTINGS
        ]

    def earlier(self, run: RecordedRun) -> list[tuple[str, str]]:
        """Return what differed in each earlier launch of a run."""
        rows = []
        for launch in run.earlier:
            changed = "; ".join(f"{name} {describe_value(value)}" for name, value in launch["settings"].items())
            until = f"up to step {launch['until_step']:,}"
            rows.append((until, changed or "the same settings, on other devices"))
        return rows


def _is_chosen(run: RecordedRun, name: str) -> bool:
    value, origin = run.value_of(name), run.origins.get(name)
    if origin is None:
        return value != SETTINGS[name].default
    return value is not None and origin != "default"


def _value(run: RecordedRun, name: str) -> str:
    """Return the value of a setting, and what it resolved to if it was left open."""
    value = run.value_of(name)
    text = describe_value(value)
    resolved = run.resolved.get("data_location" if name == "data" else name)
    if (value is None or value == "auto") and isinstance(resolved, int | float | str):
        return f"{text} → {describe_value(resolved)}"
    return text
