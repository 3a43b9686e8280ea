"""The text of a frame of `tail-run`, at every size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopfeed.engine.commands.binned_losses import BinnedLosses
from loopfeed.engine.commands.loss_chart import ASCII_GLYPHS, UNICODE_GLYPHS
from loopfeed.engine.commands.tail_frame import Picture, frame_lines
from loopfeed.engine.records.loss_log import LossRows, RunEnd, RunFacts
from loopfeed.preprocess.quantities import duration_text
from tests.chart_text import chart_text

NAN = float("nan")


def picture(losses, **changes) -> Picture:
    history = BinnedLosses(0.5)
    steps = np.arange(1, len(losses) + 1)
    fill = np.full(len(losses), 0.25, np.float64)
    times_s = np.array(100.0 + 2.0 * steps, np.float64)
    history.add(
        LossRows(steps, np.array(losses, float), fill, fill, fill, times_s, np.array([{}] * len(steps), object))
    )
    return Picture("run", history, changes.pop("facts", RunFacts(10, 4, "resnet18")), log_scale=False, **changes)


def status(shown: Picture, now_s: float) -> str:
    return chart_text(frame_lines([shown], 200, 12, UNICODE_GLYPHS, now_s)).split("\n")[-1]


def test_an_error_of_the_run_is_shown_without_its_control_characters():
    shown = picture([4.0], end=RunEnd(1, "error", "OSError: disk\x1b[2J full"), num_unreadable=2)
    assert status(shown, 0.0).endswith("run failed after 1 step: OSError: disk?[2J full  2 unreadable lines")


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (RunEnd(150, "steps"), "run done after 150 steps"),
        (RunEnd(8, "patience"), "run done, no better evaluation in time (--stop-patience), after 8 steps"),
        (RunEnd(1_500, "SIGTERM"), "run stopped by SIGTERM after 1,500 steps"),
        (RunEnd(3, "error", "OSError: full"), "run failed after 3 steps: OSError: full"),
        (RunEnd(None, None), "run ended"),
    ],
)
def test_the_end_of_a_run_is_described_with_its_reason(end, text):
    assert end.line() == text


@given(
    losses=st.lists(st.floats(-1e30, 1e30) | st.just(NAN), max_size=20),
    width=st.integers(1, 120),
    height=st.integers(1, 40),
    glyphs=st.sampled_from([UNICODE_GLYPHS, ASCII_GLYPHS]),
    model=st.text(max_size=30) | st.none(),
)
def test_a_frame_never_outgrows_the_terminal(losses, width, height, glyphs, model):
    shown = picture(losses, facts=RunFacts(None, 4, model))
    lines = chart_text(frame_lines([shown], width, height, glyphs, 150.0)).split("\n")
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3599, "59 min 59 s"),
        (7500, "2 h 05 min"),
        (90000, "1 d 01 h"),
    ],
)
def test_durations(seconds, text):
    assert duration_text(seconds) == text
