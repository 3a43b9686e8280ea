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

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from loopfeed.engine.records.versions import version_of
from loopfeed.engine.report_page import number_text, tables
from loopfeed.engine.report_page.absent import Absent
from loopfeed.engine.report_page.run_on_page import RunOnPage
from loopfeed.engine.report_page.training_charts import TrainingCharts
from loopfeed.preprocess.printable import printable_text
from loopfeed.preprocess.quantities import quantity

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
        settings=tables.Settings(runs),
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
    environment.globals |= {"quantity": quantity, "results": tables.results, "evaluations": tables.evaluations}
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
