"""A run on the page, with everything that the page shows of it."""

from dataclasses import dataclass

from loopfeed.engine.report_page.absent import Absent
from loopfeed.engine.report_page.data_card import DataCard
from loopfeed.engine.report_page.evaluated import EvaluatedWeights
from loopfeed.engine.report_page.facts import RunFacts


@dataclass(frozen=True)
class Subject:
    """A run on the page.

    Attributes:
        letter: its name in charts and tables, "A" for the first run.
        style: its colour, dashes and markers in charts.
        facts: the content of its folder.
        card: its data set.
        weights: the evaluation of its weights.
    """

    letter: str
    style: int
    facts: RunFacts
    card: DataCard | Absent
    weights: EvaluatedWeights | Absent
