"""The page as a whole: its head, which forbids all network, and its sections in order."""

import base64
import hashlib
import time
from collections.abc import Sequence
from importlib.resources import files

from loopfeed.engine.records.versions import version_of
from loopfeed.engine.report_page.markup import Html, join, paragraph, tag
from loopfeed.engine.report_page.number_text import moment
from loopfeed.engine.report_page.overview_section import overview_section
from loopfeed.engine.report_page.record_sections import data_section, environment_section, settings_section
from loopfeed.engine.report_page.subject import Subject
from loopfeed.engine.report_page.time_sections import goodput_section, profile_section
from loopfeed.engine.report_page.training_sections import evaluation_section, loss_section, rate_section, speed_section
from loopfeed.engine.report_page.weights_sections import (
    classes_section,
    confusion_section,
    evaluated_section,
    mistakes_section,
)
from loopfeed.preprocess.quantities import quantity

_SECTIONS = (
    ("results", "Results", overview_section),
    ("loss", "Loss", loss_section),
    ("evaluations", "Evaluations", evaluation_section),
    ("rate", "Learning rate", rate_section),
    ("speed", "Throughput", speed_section),
    ("goodput", "Goodput", goodput_section),
    ("profile", "Profile", profile_section),
    ("weights", "Evaluation of the weights", evaluated_section),
    ("confusion", "Confusion matrix", confusion_section),
    ("classes", "Classes", classes_section),
    ("mistakes", "Mistakes", mistakes_section),
    ("settings", "Settings", settings_section),
    ("data", "Data set", data_section),
    ("environment", "Environment", environment_section),
)


def page(subjects: Sequence[Subject]) -> str:
    """Return the page about one or several runs."""
    names = ", ".join(each.facts.name for each in subjects[:3]) + (", …" if len(subjects) > 3 else "")
    title = f"Report of {names}"
    style, script = (files(__package__).joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", title),
        Html(f"<style>{style}</style>"),
    )
    made = paragraph(
        f"{quantity(len(subjects), 'run')}, read at {moment(time.time())} by Loopfeed {version_of('loopfeed')}. "
        "This page loads nothing from a network.",
        class_="note",
    )
    links = (join(tag("a", name, href=f"#{place}"), " ") for place, name, _ in _SECTIONS)
    body = tag(
        "body",
        tag("header", tag("h1", title), made, tag("nav", links, aria_label="Sections")),
        tag("main", (render(subjects) for _, _, render in _SECTIONS)),
        Html(f"<script>{script}</script>"),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _policy(style: str, script: str) -> str:
    """Return a policy that allows this style, this script and embedded pictures, and nothing else."""
    digests = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in (style, script)]
    return (
        f"default-src 'none'; style-src 'sha256-{digests[0]}'; script-src 'sha256-{digests[1]}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
