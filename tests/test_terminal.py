"""The progress line: fits its terminal, says what it should, and keeps the course of the loss in bounded memory."""

import io
import math
import re

import numpy as np
import pytest
from rich.console import Console

from loopfeed.engine.commands.terminal import ProgressSink, sparkline
from loopfeed.engine.run.result import described_losses
from loopfeed.engine.stream.sinks import EvaluationRecord, LossRecord, RunDescription

ESCAPES = re.compile(r"\x1b\[[0-9?;]*[A-Za-z]")


def record(step, **changes):
    values = {"loss": 6.9 - step / 250, "lr": 0.05, "images_per_s": 100.0, "wait_ms": 12.34, "time": 1e9 + step * 0.01}
    return LossRecord(step=step, **(values | changes))


def make_sink(width=80, steps=1000, batch=128, epoch_images=None):
    drawn = io.StringIO()
    # A fixed size and no colours, whatever terminal runs the tests.
    console = Console(
        file=drawn, force_terminal=True, color_system=None, width=width, legacy_windows=False, _environ={}
    )
    sink = ProgressSink(console, steps=steps, image_at=lambda step: step * batch)
    if epoch_images:
        epoch_at = lambda step: step * batch / epoch_images  # noqa: E731
        sink.describe_run(RunDescription({"keep_best": None}, {}, None, 0, None, print, epoch_at))
    return sink, drawn


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
    # The summary below it has the same mean.
    losses = np.array([record(step).loss for step in range(1, 1001)], np.float32)
    assert described_losses(losses) == "2.9000 (mean of the last 50: 2.9980)"
    assert described_losses(losses[:3]) == "6.8880 (mean of the last 3: 6.8920)"
    assert "█" in last
    assert "▁  12,800 img/s  wait 12.3 ms  lr 0.05" in last
    assert "00:00" in last


def evaluation(step, top1, loss=2.0, num_images=50_000):
    return EvaluationRecord(step, num_images, top1, top1 and 0.9876 + 0 * top1, loss, 1e9)


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (60, ["loss 3.4740", "epoch 8.8/10.0"]),
        (80, ["loss 3.4740", "epoch 8.8/10.0", "best 61.50 %", "12,800 img/s"]),
        (120, ["loss 3.4740", "▁", "epoch 8.8/10.0", "best 61.50 %", "12,800 img/s", "wait 12.3 ms"]),
    ],
)
def test_the_line_has_the_epoch_and_the_best_evaluation_as_far_as_there_is_room(width, expected):
    sink, drawn = make_sink(width=width, epoch_images=128 * 100)
    sink.open()
    for step in range(1, 881):
        sink.write(record(step))
        if step in (400, 600, 800):
            sink.write_evaluation(evaluation(step, {400: 0.5, 600: 0.615, 800: 0.58}[step]))
    sink.write(record(881, loss=6.9 - 881 / 250))
    line = sink.summary(width - (2 * 4 + 1 + (10 if width >= 100 else 5) + 8 + 3)).plain
    sink.close()
    lines = lines_of(drawn)
    assert [part for part in expected if part not in line] == [], line
    assert max(map(len, lines)) <= width
    assert any(each.startswith("evaluation at step 600: top-1 61.50 %") for each in lines)


@pytest.mark.parametrize(
    ("first", "second", "keep_best", "best"),
    [
        (math.nan, math.nan, None, "best loss 1.5000"),
        (0.5, 0.25, None, "50.00 %"),
        (0.5, 0.75, "loss", "best loss 1.5000"),
        (0.5, 0.75, "top5", "best top-5 98.76 %"),
    ],
)
def test_the_best_of_a_resumed_run_counts_the_evaluations_before_it(tmp_path, first, second, keep_best, best):
    lines = [evaluation(10, first, 1.5), evaluation(20, 0.99 if best[0] == "5" else math.nan, 0.1)]
    (tmp_path / "eval.jsonl").write_text("".join(each.to_json() + "\n" for each in lines))
    sink, _ = make_sink()
    sink.describe_run(RunDescription({"keep_best": keep_best}, {}, tmp_path, 15, None, print))
    sink.write(record(16))
    sink.write_evaluation(evaluation(30, second, 1.75))
    assert best in sink.summary().plain


@pytest.mark.parametrize(("step", "expected"), [(4, " 4/10 .* waiting for the first"), (10, "10/10 .* all steps are")])
def test_a_resumed_run_begins_with_the_steps_that_are_done(step, expected):
    sink, drawn = make_sink(steps=10)
    sink.describe_run(RunDescription({"keep_best": None}, {}, None, step, None, print))
    sink.open()
    sink.close()
    assert re.match(expected, lines_of(drawn)[-1])


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
