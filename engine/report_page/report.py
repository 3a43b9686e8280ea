"""The steps of making the page: runs are read, their weights evaluated, and the page and its tables written whole.

In the templates everything is escaped, and the head of the page forbids all network. Whatever comes from a run is
untrusted. Only this module says what is markup: its own style, script and data.
"""

import base64
import hashlib
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from loopfeed.engine.charts import number_text
from loopfeed.engine.charts.number_text import duration, number
from loopfeed.engine.config import SETTINGS, describe_value
from loopfeed.engine.objective.best_metric import parse_metric
from loopfeed.engine.objective.losses import Loss
from loopfeed.engine.objective.metrics import Metric, PerExample
from loopfeed.engine.owners import OF_AN_EVALUATION, STORAGE, recorded_settings
from loopfeed.engine.program.train_state import TrainModel
from loopfeed.engine.records.evaluation_log import value_text
from loopfeed.engine.records.machine import version_of
from loopfeed.engine.records.recorded_run import RecordedRun
from loopfeed.engine.records.stored.reading import local_copy, naming_in, with_weights
from loopfeed.engine.records.whole_file import check_can_write, write_whole
from loopfeed.engine.report_page.absent import Absent
from loopfeed.engine.report_page.data_card import read_data_card
from loopfeed.engine.report_page.evaluated import evaluate_weights_of
from loopfeed.engine.report_page.run_on_page import RunOnPage, read_run
from loopfeed.engine.report_page.training_charts import MOST_METRICS, TrainingCharts, metric_of
from loopfeed.engine.run.run_stages import describe_stages
from loopfeed.engine.settings import Owner
from loopfeed.engine.stream.sinks import EvaluationRecord
from loopfeed.preprocess.printable import printable_text
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.storage_options import as_text

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
    environment.globals |= {"quantity": quantity, "results": results, "evaluations": evaluations, "stages": stages}
    names = ("number", "whole", "percent", "duration", "brief", "moment")
    environment.filters |= {name: getattr(number_text, name) for name in names}
    environment.filters |= {"commas": "{:,}".format, "base64": _base64, "shades": _shades, "path": _path}
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
    summary = run.summary
    model = summary.resolved.get("model") or summary.settings.get("model")  # the resolved one replaces "auto"
    found = {"state": summary.state, "model": str(model or "–")}
    if isinstance(curves, Absent):
        found |= dict.fromkeys(("step", "loss, smoothed", "images/s, median", "wall time"), "–")
    else:
        planned = "" if summary.steps is None else f" / {summary.steps:,}"
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
    best = "–"
    if summary.best_metric is not None and summary.best_value is not None:
        metric = parse_metric(summary.best_metric)
        best = f"{metric.title} {value_text(metric, summary.best_value)} (step {summary.best_step:,})"
    return found | {
        "best evaluation": best,
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


def stages(run: RunOnPage) -> list[list[str]]:
    """Return a row for each stage of a run with several: its steps, what it has of its own, and its images/s so far."""
    if isinstance(run.recorded, Absent) or not run.recorded.config.stages:
        return []
    config = run.recorded.config
    made = [
        each for launch in ([] if isinstance(run.runtime, Absent) else run.runtime.launches) for each in launch.stages
    ]
    rows = []
    for index, line in enumerate(describe_stages(config)):
        times = [each for each in made if config.step_ranges.stage_of(each.start_step) == index]
        seconds, num_images = (sum(getattr(each, name) for each in times) for name in ("seconds", "num_images"))
        name, _, own = line.partition(": ")
        first = duration(times[0].first_step_s) if times else "–"
        rows.append([name, own, number(num_images / seconds) if seconds else "–", first])
    return rows


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


MOST_RUNS = 26
"""The largest number of runs on a page: each is called by a letter."""

# For a page of a megabyte with seven long runs, and of two with 26.
_MOST_POINTS, _POINTS_OF_ALL, _LEAST_POINTS = 1000, 3000, 100
_MOST_PICTURES, _PICTURES_OF_ALL, _LEAST_PICTURES = 24, 96, 6
_NOT_EVALUATED = Absent("the weights were not evaluated, as was requested (--no-evaluate)")


def report_run(
    runs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    path: str | os.PathLike[str],
    *,
    evaluate: bool = True,
    data: str | os.PathLike[str] | None = None,
    split: str | None = None,
    model: TrainModel | None = None,
    loss: Loss | None = None,
    metrics: Mapping[str, Metric | PerExample] | None = None,
    overwrite: bool = False,
    notify: Callable[[str], None] = lambda _: None,
    storage_options: Mapping[str, str] | None = None,
) -> Path:
    """Write a self-contained HTML page about one or several runs, and return its path.

    Runs may still be in progress, have failed, or lack files: the page then says what is missing and why. The weights
    of each run are evaluated if its data set is there.

    Args:
        runs: folders or URLs of runs, at most 26.
        path: the file to write.
        evaluate: whether to evaluate the weights, for confusions, the accuracy of each class and mistakes.
        data: where the data set of the runs is now; None is where each run found it.
        split: the split to evaluate on; None is the one that each run was evaluated on.
        model, loss, metrics: your own, if the runs trained with them, as for `loopfeed.evaluate`.
        overwrite: whether to replace an existing file.
        notify: called with one-line messages.
        storage_options: how to reach the store of a URL, of a run and of its data, see
            `loopfeed.preprocess.storage_options.STORAGE_OPTIONS`; no keys are sent to a server that only a record
            names.

    Raises:
        ValueError: if a folder is not that of a run, or the file exists or cannot be there.
        OSError: if the file cannot be written.
        KeyboardInterrupt: on SIGINT, SIGTERM or SIGHUP during an evaluation, if the caller is the main thread.

    Example:
        >>> report_run("run", "report.html", model=model).name
        'report.html'
    """
    given = [os.fspath(each) for each in ([runs] if isinstance(runs, str | os.PathLike) else runs)]
    if not 1 <= len(given) <= MOST_RUNS:
        raise ValueError(f"runs must be 1 to {MOST_RUNS} run folders, got {len(given)}: make several pages")
    out = Path(path)
    check_can_write(out, "the page", overwrite=overwrite)
    own, place = {"model": model, "loss": loss, "metrics": metrics}, None if data is None else os.fspath(data)
    found_runs = []
    for index, run in enumerate(given):
        with local_copy(run, storage_options, with_weights(None)) as folder:
            say = naming_in(notify, folder, run)
            found = read_run(index, folder, run, max(_LEAST_POINTS, min(_MOST_POINTS, _POINTS_OF_ALL // len(given))))
            if isinstance(found.recorded, RecordedRun):
                recorded = _reached(found.recorded, place, storage_options, say)
                found = replace(found, card=read_data_card(recorded, place, split), weights=_NOT_EVALUATED)
                if evaluate:
                    num_pictures = max(_LEAST_PICTURES, min(_MOST_PICTURES, _PICTURES_OF_ALL // len(given)))
                    weights = evaluate_weights_of(folder, recorded, place, split, own, num_pictures, say)
                    found = replace(found, weights=weights)
            found_runs.append(found)
    write_whole(out, page(found_runs).encode())
    return out


def _reached(
    recorded: RecordedRun, data: str | None, storage_options: Mapping[str, str] | None, notify: Callable[[str], None]
) -> RecordedRun:
    """Return the record of a run with the way to reach the store of its data; say what that replaces."""
    how = as_text(storage_options or {}) or recorded_settings(recorded.config, {"data": data})[STORAGE]
    config = replace(recorded.config, storage_options=how)
    if (line := recorded.describe_replaced(config, OF_AN_EVALUATION, (STORAGE,))) is not None:
        notify(line)
    return replace(recorded, config=config)
