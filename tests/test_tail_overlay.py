"""`tail-run` with several runs: the chart, the legend, the lines, and the ways in which runs begin and end."""

import json
import os
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from loopfeed.engine.commands.binned_losses import BinnedLosses
from loopfeed.engine.commands.loss_chart import ASCII_GLYPHS, LETTERS, UNICODE_GLYPHS, LossCurve, draw_chart
from loopfeed.engine.commands.run_names import shorten_names
from loopfeed.engine.commands.tail_cli import main
from loopfeed.engine.commands.tail_frame import Picture, frame_lines
from loopfeed.engine.records.folder_lock import LOCK_NAME
from loopfeed.engine.records.loss_log import LossRows, RunFacts
from tests.chart_text import chart_text
from tests.pseudo_terminal import Terminal, plain
from tests.test_tail_cli import COMMAND, add_steps, end_run, evaluate_at, tail, write_run

NAN = float("nan")
FAST = ("--interval", "0.05", "--timeout-s", "30")


def curve_of(losses, first=1):
    values = np.array(losses, float)
    return LossCurve(np.arange(first, first + len(values), dtype=float), values, values, values, np.isnan(values) * 1)


def overlay(*curves, glyphs=UNICODE_GLYPHS):
    return chart_text(draw_chart(curves, 60, 12, glyphs=glyphs))


# --- the chart


@pytest.mark.parametrize("glyphs", [UNICODE_GLYPHS, ASCII_GLYPHS])
def test_each_curve_ends_at_its_letter_on_common_axes(glyphs):
    lines = overlay(curve_of(np.linspace(4, 3, 100)), curve_of(np.linspace(2, 0, 50)), glyphs=glyphs).split("\n")
    plot = [line[line.index(max("│┤|+", key=line.find)) + 1 :].ljust(58) for line in lines[:-2]]
    (a_end,) = {row for row, line in enumerate(plot) if line.rstrip().endswith("A") and len(line.rstrip()) > 50}
    assert a_end == round((4 - 3) / 4 * 9)  # of ten rows, the loss axis from 4 to 0
    b_rows = [row for row, line in enumerate(plot) if "B" in line]
    assert max(b_rows) == 9
    # Half as many steps take half of the width.
    assert abs(plot[9].rindex("B") - len(plot[9].rstrip("\n")) / 2) < 3


# --- names and the legend


def shown(name, losses, steps=10, **states) -> Picture:
    history = BinnedLosses(0.0)
    count = np.arange(1, len(losses) + 1)
    numbers = np.full(len(losses), 64.0)
    times = np.array(100.0 + 2 * count, np.float64)
    history.add(
        LossRows(count, np.array(losses, float), numbers, numbers, numbers, times, np.array([{}] * len(losses)))
    )
    return Picture(name, history, RunFacts(steps), log_scale=False, **states)


@given(
    losses=st.lists(st.lists(st.floats(-1e30, 1e30) | st.just(NAN), max_size=9), min_size=2, max_size=26),
    width=st.integers(1, 100),
    height=st.integers(1, 40),
    glyphs=st.sampled_from([UNICODE_GLYPHS, ASCII_GLYPHS]),
)
def test_a_frame_never_outgrows_the_terminal(losses, width, height, glyphs):
    runs = [shown(f"run-{index}", each) for index, each in enumerate(losses)]
    lines = chart_text(frame_lines(runs, width, height, glyphs, 150.0)).split("\n")
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


# --- lines


def test_on_a_pipe_each_run_has_the_lines_that_it_has_alone(tmp_path):
    runs = [write_run(tmp_path / "first", 5), write_run(tmp_path / "second", 9)]
    evaluate_at(runs[1], 4)
    both = tail(*runs, "--last", "7")
    for run in runs:
        alone = tail(run, "--last", "7")
        for name in ("stdout", "stderr"):
            lines = getattr(both, name).splitlines()
            own = [line.removeprefix(f"{run.name}: ") for line in lines if line.startswith(f"{run.name}: ")]
            assert own == getattr(alone, name).splitlines()
    assert both.exit_code == 0


def test_a_run_that_appears_later_is_followed_to_its_end(tmp_path):
    first = write_run(tmp_path / "first", 3)
    begins = threading.Timer(0.3, lambda: write_run(tmp_path / "second", 4))
    begins.start()
    result = tail(first, tmp_path / "second", *FAST)
    begins.join()
    assert result.exit_code == 0
    assert result.stdout.count("second: step") == 4
    assert result.stderr == "".join(
        f"{name}: run done after {count} steps\n" for name, count in (("first", 3), ("second", 4))
    )


def kill(run: Path) -> None:
    (run / LOCK_NAME).write_text(json.dumps({"pid": 1, "host": os.uname().nodename}))


def test_a_killed_run_and_a_silent_one_are_named_at_the_end(tmp_path):
    runs = [write_run(tmp_path / name, 2, ended=name == "well") for name in ("well", "dead", "mute")]
    kill(runs[1])
    result = tail(*runs, "--interval", "0.05", "--timeout-s", "0.3")
    assert result.exit_code == 1
    assert f"the process of {runs[1]} died after step 2 without a result" in result.stderr
    assert f"{runs[2]} has written nothing for 0.3 s" in result.stderr


# --- errors


def test_what_is_no_run_is_named(tmp_path):
    run = write_run(tmp_path / "run", 2)
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    refused = partial(CliRunner().invoke, main)
    for other, message in [
        ("file", "is a file; give the folder that contains it"),
        ("nowhere", "does not exist; give the --run-dir of run-train"),
        ("empty", "contains no loss.jsonl; give"),
        (".", "contains 1 run folder; give one, such as the newest"),
        ("run/", "is given twice: leave one out"),
    ]:
        result = refused([str(run), f"{tmp_path}/{other}", "--once"])
        assert result.exit_code == 2, other
        assert message in result.stderr
        assert not result.stdout
    result = refused([f"run{number}" for number in range(len(LETTERS) + 1)])
    assert (result.exit_code, "at most 26 runs" in result.stderr) == (2, True)


# --- on a terminal


def test_on_a_terminal_both_curves_are_drawn_and_stay(tmp_path):
    runs = write_run(tmp_path / "first", 40), write_run(tmp_path / "second", 20, ended=False)
    terminal = Terminal(COMMAND, [*runs, *FAST])
    try:
        terminal.read_until("B second +step 20/1000")
        end_run(runs[1], 20, "SIGTERM")
        code = terminal.finish()
    finally:
        terminal.process.kill()
    last = plain(terminal.output).split("smoothed loss of 2 runs")[-1]
    lines = last.strip("\n").split("\n")
    assert code == 0
    assert len(lines) <= 22
    assert max(map(len, lines)) <= 80
    assert lines[-2].startswith("A first")
    assert lines[-2].endswith("done")
    assert lines[-1].endswith("stopped")


def test_an_ended_run_that_is_resumed_is_followed_on(tmp_path):
    first, second = write_run(tmp_path / "first", 3), write_run(tmp_path / "second", 2, ended=False)

    def go_on():
        (first / "result.json").unlink()
        add_steps(first, 4, 6)
        end_run(first, 5)
        end_run(second, 2)

    resumes = threading.Timer(0.3, go_on)
    resumes.start()
    result = tail(first, second, *FAST)
    resumes.join()
    assert result.stdout.count("first: step") == 5
    assert "first: run done after 5 steps" in result.stderr
    assert result.exit_code == 0


def test_long_names_keep_what_differs():
    names = [f"imagenet-resnet50-lr0.{n}-batch256-seed{n}" for n in (1, 2)] + ["later"]
    assert shorten_names(names, 25) == ["~lr0.1-batch256-seed1", "~lr0.2-batch256-seed2", "later"]
    assert shorten_names(names, 32)[0] == "~resnet50-lr0.1-batch256-seed1"
    assert shorten_names(names, 9) == ["~lr0~eed1", "~lr0~eed2", "later"]
    assert shorten_names(["abc", "abd"], 3) == ["abc", "abd"]
