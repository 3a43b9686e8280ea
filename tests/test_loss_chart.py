"""The chart: never larger than asked, every loss on the dot its formula says, honest about what can't be drawn."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopfeed.engine.commands.loss_chart import (
    ASCII_GLYPHS,
    RAW,
    UNICODE_GLYPHS,
    LossCurve,
    draw_chart,
)
from tests.chart_text import chart_text

NAN = float("nan")
GLYPHS = st.sampled_from([UNICODE_GLYPHS, ASCII_GLYPHS])


def curve_of(losses, smoothed=None, steps=None) -> LossCurve:
    """One point a loss, at steps 1, 2, …; without a smoothed curve unless one is given."""
    loss = np.array(losses, np.float64)
    finite = np.where(np.isfinite(loss), loss, NAN)
    return LossCurve(
        step=np.arange(1.0, len(loss) + 1) if steps is None else np.array(steps, np.float64),
        low=finite,
        high=finite,
        smoothed=np.full(len(loss), NAN) if smoothed is None else np.array(smoothed, np.float64),
        num_broken=(~np.isfinite(loss)).astype(np.int64),
    )


def dots_of(lines, style: str, gutter: int) -> set[tuple[int, int]]:
    """Dots (row, column) of one style, read back from the braille characters bit by bit."""
    bit_rows_columns = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (3, 1)]
    dots = set()
    for y, line in enumerate(lines):
        x = -gutter
        for span in line:
            for character in span.text:
                code = ord(character) - 0x2800
                if span.style == style and 0 < code < 256:
                    dots |= {(4 * y + r, 2 * x + c) for bit, (r, c) in enumerate(bit_rows_columns) if code >> bit & 1}
                x += 1
    return dots


@given(
    losses=st.lists(st.floats(), max_size=60),
    smoothed=st.lists(st.floats(), min_size=60, max_size=60),
    width=st.integers(1, 90),
    height=st.integers(1, 30),
    log_scale=st.booleans(),
    glyphs=GLYPHS,
)
def test_any_losses_fit_any_size(losses, smoothed, width, height, log_scale, glyphs):
    curve = curve_of(losses, smoothed[: len(losses)])
    lines = draw_chart([curve], width, height, log_scale=log_scale, glyphs=glyphs)
    texts = chart_text(lines).split("\n")
    assert len(texts) == height
    assert max(map(len, texts)) <= width
    if glyphs is ASCII_GLYPHS:
        assert chart_text(lines).isascii()


@given(
    losses=st.lists(st.floats(-1e6, 1e6) | st.just(NAN), min_size=1, max_size=300),
    width=st.integers(1, 7),
    height=st.integers(1, 3),
)
def test_dots_equal_those_of_a_plain_formula(losses, width, height):
    # So small a chart has no axes: its dots are the whole plot.
    finite = [loss for loss in losses if math.isfinite(loss)]
    lines = draw_chart([curve_of(losses)], width, height)
    if not finite:
        assert dots_of(lines, RAW, 0) == set()
        return
    R, C, low, high = 4 * height, 2 * width, min(finite), max(finite)
    if low / 2 == high / 2:
        low, high = low - (abs(low) * 0.05 or 1.0), high + (abs(low) * 0.05 or 1.0)
    spans: dict[int, list[int]] = {}
    for index, loss in enumerate(losses):
        if math.isfinite(loss):
            column = min(C - 1, int((index + 0.5) * (C / len(losses))))
            exact = (1 - (loss / 2 - low / 2) / (high / 2 - low / 2)) * (R - 1)
            spans.setdefault(column, []).append(round(exact))
    expected = {(row, c) for c, rows in spans.items() for row in range(min(rows), max(rows) + 1)}
    assert dots_of(lines, RAW, 0) == expected


def test_golden_ascii_chart_with_axes_and_a_broken_loss():
    losses = [4.0, 3.5, 3.0, NAN, 2.5, 2.0, 1.5, 1.25, 1.0, 1.0]
    smoothed = [4.0, 3.75, 3.4, 3.4, 2.9, 2.5, 2.0, 1.6, 1.3, 1.15]
    text = chart_text(draw_chart([curve_of(losses, smoothed)], 22, 9, glyphs=ASCII_GLYPHS))
    assert "\n".join(line.rstrip() for line in text.split("\n")) == GOLDEN


GOLDEN = """\
4+ **
 |   *****
 |     .  **
 |         .**
2+           .***
 |             . ***
 |               . .**
 +-------x-+---------+
           5        10"""


@pytest.mark.parametrize("others", [[], [[]]])
@pytest.mark.parametrize(
    ("losses", "log_scale", "message"),
    [([], False, "no loss yet"), ([NAN, math.inf], False, "no finite loss yet"), ([0.0, -1.0], True, "no finite loss")],
)
def test_an_empty_chart_has_a_message(losses, log_scale, message, others):
    curves = [curve_of(each) for each in (losses, *others)]
    assert message in chart_text(draw_chart(curves, 40, 5, log_scale=log_scale)).strip()
