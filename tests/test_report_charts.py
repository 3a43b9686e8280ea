"""Charts of the report page: round axes, lines with gaps, labels that do not overlap."""

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loopfeed.engine.charts.charts import Chart, Line, spread
from loopfeed.engine.report_page.report import open_templates
from loopfeed.preprocess.quantities import round_numbers
from tests.report_pages import parse

STEPS = np.arange(1.0, 6.0)


def line(*y, x=STEPS, name="value", label="", **values):
    return Line(name, label, x, np.array(y, np.float64), values.pop("index", 0), **values)


def draw(chart):
    source = '{% import "macros.html" as m %}{% import "chart.html" as chart with context %}{{ chart.draw(shown) }}'
    return open_templates().from_string(source).render(runs=[], alone=True, shown=chart)


@given(low=st.floats(-1e4, 1e4), length=st.floats(1e-3, 1e9), most=st.integers(2, 8))
def test_ticks_are_few_round_numbers_within_the_axis(low, length, most):
    high = low + length
    ticks = round_numbers(low, high, most)
    assert len(ticks) <= most + 1
    room = 1e-6 * length
    assert all(low - room <= tick <= high + room for tick in ticks)
    gaps = np.diff(ticks)
    assert np.all(gaps > 0)
    if len(gaps) and ticks != [low, high]:  # both ends stand for no round number
        lead = gaps[0] / 10 ** math.floor(math.log10(gaps[0]) + 1e-9)
        assert min(abs(lead - each) for each in (1, 2, 5, 10)) < 1e-3


@given(st.lists(st.floats(0, 1), max_size=13))
def test_labels_stay_in_order_apart_and_on_the_chart(places):
    places = sorted(places)
    moved = spread(places)
    between = min(0.075, 1 / max(len(places), 1))
    assert all(after - before > between - 1e-9 for before, after in itertools.pairwise(moved))
    assert all(-1e-9 <= place <= 1 for place in moved)


def test_lines_differ_without_colour():
    lines = [
        line(1, 2, 3, 4, index, name=name, label=name, index=index, is_marked=True) for index, name in enumerate("ABC")
    ]
    page = parse(draw(Chart("Top-1", lines)))
    labels = [each.text for each in page.all("text") if (each.attributes.get("class") or "").startswith("label")]
    assert sorted(labels) == ["A", "B", "C"]
    classes = [str(each.attributes["class"]) for each in page.all("path")]
    assert {f"l l{index}" for index in range(3)} <= set(classes)  # of which the style sheet makes dashes
    assert classes.count("d l2") == 2  # the dots of the line, and that of the legend
    plot = page.one("svg", class_="plot")
    assert plot.attributes["role"] == "img"
    assert "A: 0, B: 1, C: 2" in str(plot.attributes["aria-label"])
