"""The progress line: fits its terminal, says what it should, and keeps the course of the loss in bounded memory."""

import io
import math
import re

import pytest
from rich.console import Console

from loopfeed.engine.commands.terminal import ProgressSink, sparkline
from loopfeed.engine.stream.sinks import LossRecord

ESCAPES = re.compile(r"\x1b\[[0-9?;]*[A-Za-z]")


def record(step, **changes):
    values = {"loss": 6.9 - step / 250, "lr": 0.05, "images_per_s": 100.0, "wait_ms": 12.34, "time": 1e9 + step * 0.01}
    return LossRecord(step=step, **(values | changes))


def make_sink(width=80, steps=1000, batch=128):
    drawn = io.StringIO()
    # A fixed size and no colours, whatever terminal runs the tests.
    console = Console(
        file=drawn, force_terminal=True, color_system=None, width=width, legacy_windows=False, _environ={}
    )
    return ProgressSink(console, steps=steps, image_at=lambda step: step * batch), drawn


def lines_of(drawn):
    """Return every line that was drawn, without control codes."""
    return [line for line in re.split(r"[\r\n]", ESCAPES.sub("", drawn.getvalue())) if line.strip()]


def run_sink(*records, **settings):
    sink, drawn = make_sink(**settings)
    sink.open()
    for each in records:
        sink.write(each)
    sink.close()
    return lines_of(drawn)


def test_the_last_line_names_how_the_run_ended():
    last = run_sink(*(record(step) for step in range(1, 1001)), width=120)[-1]
    assert last.startswith("1000/1000 ")
    # The mean of the last 50 losses, and the rate over their 49 intervals of 10 ms.
    assert "loss 2.9980 " in last
    assert "█" in last
    assert "▁  lr 0.05  12,800 img/s  wait 12.3 ms" in last
    assert "00:00" in last


def test_a_run_that_ends_early_leaves_its_line_and_the_cursor():
    sink, drawn = make_sink(steps=10)
    sink.open()
    sink.write(record(1))
    sink.close()
    assert lines_of(drawn)[-1].startswith(" 1/10 ")
    assert drawn.getvalue().endswith("\x1b[?25h")
    sink.close()


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        ([], 5, ""),
        ([1.0], 5, "▁"),
        ([1.0, 2.0], 0, ""),
        ([0.0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([0.0, 1, 2, 3, 4, 5, 6, 7], 4, "▁▃▆█"),
        ([0.0, 0, 3, 3, 3], 2, "▁█"),
        ([3.0, 3, 3], 3, "▁▁▁"),
        ([1.0, math.nan, 0.0], 3, "█ ▁"),
        ([math.nan, math.inf], 2, "  "),
    ],
)
def test_golden_sparklines(values, width, expected):
    assert sparkline(values, width) == expected


def test_the_time_left_of_a_resumed_run_does_not_count_the_steps_before_it(monkeypatch):
    clock = [100.0]
    sink, _ = make_sink(steps=1000)
    monkeypatch.setattr(sink._progress, "get_time", lambda: clock[0])
    sink.open()
    for step in range(901, 911):
        sink.write(record(step))
        clock[0] += 1.0
    sink.close()
    (task,) = sink._progress.tasks
    # Ninety steps are left at one a second; counted from step 0 it would be a tenth of a second.
    assert task.time_remaining == pytest.approx(90, rel=0.2)
