"""`tail-run` on a pipe and on a pseudo-terminal: what it prints, when it ends, with which exit code."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from engine.binned_losses import BinnedLosses
from engine.loss_chart import ASCII_GLYPHS, UNICODE_GLYPHS, chart_text
from engine.loss_log import LossRows, RunEnd, RunFacts
from engine.tail_cli import _Picture, duration_text, frame_lines, main, pack_fields, plain_lines
from tests.pseudo_terminal import LIMIT_S, Terminal, plain

NAN = float("nan")
COMMAND = [sys.executable, "-c", "from engine.tail_cli import main; main()"]


def write_run(run: Path, steps_done: int, steps: int = 1000, ended: bool = True) -> Path:
    run.mkdir(exist_ok=True)
    settings = {"config": {"steps": steps, "batch": 128, "model": "auto"}, "resolved": {"model": "resnet50"}}
    (run / "config.json").write_text(json.dumps(settings))
    add_steps(run, 1, steps_done + 1)
    if ended:
        end_run(run, steps_done)
    return run


def add_steps(run: Path, start: int, stop: int) -> None:
    with (run / "loss.jsonl").open("a") as file:
        for step in range(start, stop):
            row = {"step": step, "loss": 2.5 / step, "lr": 0.05, "images_per_s": 812.4, "wait_ms": 0.12}
            file.write(json.dumps(row | {"time": time.time() - 1000 + step}) + "\n")


def end_run(run: Path, steps_done: int, stopped_by: str = "steps") -> None:
    (run / "result.json").write_text(json.dumps({"steps_done": steps_done, "stopped_by": stopped_by}))


def tail(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture
def open_terminal():
    """Opens a `Terminal`; its process does not outlive the test."""
    opened = []

    def open_one(*arguments, **settings) -> Terminal:
        opened.append(Terminal(COMMAND, *arguments, **settings))
        return opened[-1]

    yield open_one
    for terminal in opened:
        terminal.process.kill()
        terminal.process.wait(LIMIT_S)


@pytest.fixture
def start():
    """Starts a process with text pipes; it does not outlive the test."""
    with contextlib.ExitStack() as stack:

        def start_one(arguments) -> subprocess.Popen[str]:
            process = stack.enter_context(
                subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            return process

        yield start_one


# --- on a pipe


def test_piped_it_prints_a_line_a_step_and_ends_with_the_run(tmp_path):
    result = tail(write_run(tmp_path / "run", 12))
    lines = result.stdout.splitlines()
    assert len(lines) == 12
    assert lines[11] == "step 12/1000  loss 0.2083  lr 0.05  812 images/s  wait 0.1 ms"
    assert result.stderr == "run ended after 12 steps, stopped by steps\n"
    assert result.exit_code == 0


def test_last_begins_with_the_last_steps(tmp_path):
    result = tail(write_run(tmp_path / "run", 12), "--last", 3)
    assert [line.split()[1] for line in result.stdout.splitlines()] == ["10/1000", "11/1000", "12/1000"]
    assert len(tail(tmp_path / "run", "--last", 100).stdout.splitlines()) == 12


def test_last_counts_steps_over_many_reads(tmp_path):
    run = write_run(tmp_path / "run", 5000)  # some 600 kB: more than one chunk
    lines = tail(run, "--last", 2500).stdout.splitlines()
    assert [line.split()[1] for line in lines] == [f"{step}/1000" for step in range(2501, 5001)]


def test_once_does_not_wait_for_the_end(tmp_path):
    result = tail(write_run(tmp_path / "run", 2, ended=False), "--once")
    assert (len(result.stdout.splitlines()), result.exit_code) == (2, 0)


def test_what_a_row_lacks_is_left_out_but_never_its_loss():
    blank = np.array([NAN])
    rows = LossRows(np.array([7]), blank, blank, blank, blank, blank)
    assert list(plain_lines(rows, None)) == ["step 7  loss nan"]


def test_unreadable_lines_are_reported_beside_the_steps(tmp_path):
    run = write_run(tmp_path / "run", 2, ended=False)
    with (run / "loss.jsonl").open("a") as file:
        file.write("half a li\n")
    result = tail(run, "--once")
    assert len(result.stdout.splitlines()) == 2
    assert result.stderr == "left out 1 unreadable line(s) of loss.jsonl, the last one line 3\n"


def test_steps_come_as_they_are_written_and_a_new_log_is_announced(tmp_path, start):
    run = write_run(tmp_path / "run", 1, ended=False)
    process = start([*COMMAND, str(run), "--interval", "0.05"])
    assert process.stdout is not None
    assert process.stdout.readline().startswith("step 1/1000")
    add_steps(run, 2, 3)
    assert process.stdout.readline().startswith("step 2/1000")
    (run / "loss.jsonl").unlink()
    add_steps(run, 1, 2)
    assert process.stdout.readline().startswith("step 1/1000")
    end_run(run, 1, "SIGINT")
    out, err = process.communicate(timeout=LIMIT_S)
    assert (out, err) == ("", "loss.jsonl began anew\nrun ended after 1 steps, stopped by SIGINT\n")
    assert process.returncode == 0


def test_the_end_of_an_earlier_run_does_not_end_a_resumed_one(tmp_path):
    run = write_run(tmp_path / "run", 5)
    end_run(run, 3)
    result = tail(run, "--timeout-s", 0.2, "--interval", 0.05)
    assert result.exit_code == 1
    assert "a run must write something every --timeout-s 0.2 s" in result.stderr
    assert "silent since step 5" in result.stderr


def test_a_run_without_a_step_is_waited_for_and_then_given_up(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    result = tail(run, "--timeout-s", 0.2, "--interval", 0.05)
    assert result.exit_code == 1
    assert "silent since before its first step" in result.stderr


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda run: None, "does not exist; give the --run-dir"),
        (lambda run: run.mkdir(), "holds no loss.jsonl; give the --run-dir"),
        (lambda run: run.write_text(""), "is a file; give the folder that holds it"),
    ],
)
@pytest.mark.parametrize("options", [["--once"], ["--timeout-s", "0.2"]])
def test_what_is_no_run_is_an_error(tmp_path, prepare, message, options):
    prepare(tmp_path / "run")
    result = tail(tmp_path / "run", *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_a_log_that_is_no_file_is_an_error_in_one_line(tmp_path):
    (tmp_path / "run" / "loss.jsonl").mkdir(parents=True)
    result = tail(tmp_path / "run")
    assert result.exit_code == 2
    assert re.fullmatch(r"Error: RUN must be readable, .*loss\.jsonl: Is a directory; check .*\n", result.stderr)


def test_a_run_that_is_just_starting_is_waited_for(tmp_path, start):
    process = start([*COMMAND, str(tmp_path / "run")])
    assert process.stderr is not None
    assert process.stderr.readline().startswith("waiting up to 5 s for")
    write_run(tmp_path / "run", 1)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert (len(out.splitlines()), process.returncode) == (1, 0)


@pytest.mark.parametrize("option", ["--interval", "--smoothing", "--timeout-s"])
@pytest.mark.parametrize("value", ["nan", "-1"])
def test_numbers_out_of_range_are_usage_errors(tmp_path, option, value):
    result = tail(tmp_path, option, value)
    assert result.exit_code == 2
    assert option in result.stderr


def test_a_reader_that_leaves_ends_it_quietly(tmp_path, start):
    run = write_run(tmp_path / "run", 3000, ended=False)
    process = start([*COMMAND, str(run), "--interval", "0.05"])
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    add_steps(run, 3001, 6000)
    assert process.stderr.read() == ""
    assert process.wait(LIMIT_S) == 0


def test_ctrl_c_on_a_pipe_ends_it_quietly(tmp_path, start):
    run = write_run(tmp_path / "run", 1, ended=False)
    process = start([*COMMAND, str(run)])
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_S)
    assert (out, err, process.returncode) == ("", "", 130)


# --- on a terminal


def test_a_finished_run_leaves_its_chart_on_the_screen(tmp_path, open_terminal):
    terminal = open_terminal([write_run(tmp_path / "run", 300), "--height", 16])
    assert terminal.finish() == 0
    before, after = terminal.output.rsplit("\x1b[?1049l", 1)
    assert "\x1b[?1049h" in before
    lines = plain(after).rstrip("\n").split("\n")
    assert lines[0] == "resnet50  batch 128  run"
    assert any("┤" in line for line in lines)
    assert re.search("[\u2801-\u28ff]", after)
    assert "step 300/1000  loss 0.0083" in after
    assert "run ended after 300 steps, stopped by steps" in after
    assert len(lines) <= 15
    assert max(map(len, lines)) <= 80


def test_once_prints_one_chart_and_no_second_screen(tmp_path, open_terminal):
    terminal = open_terminal([write_run(tmp_path / "run", 30, ended=False), "--once"])
    assert terminal.finish() == 0
    assert "\x1b[?1049" not in terminal.output
    assert plain(terminal.output).count("└") == 1


def test_it_draws_new_steps_follows_a_resize_and_obeys_ctrl_c(tmp_path, open_terminal):
    run = write_run(tmp_path / "run", 40, ended=False)
    terminal = open_terminal([run, "--interval", "0.05"], columns=100, lines=20)
    terminal.read_until("step 40/1000")
    add_steps(run, 41, 61)
    terminal.read_until("step 60/1000")
    terminal.resize(50, 12)
    terminal.read_until("\n[^\n]{0,8}└[^\n]{0,49}\n")  # an axis that ends within 50 columns
    seen = len(terminal.output)
    terminal.read_until("step 60/1000", start=seen)
    os.write(terminal.master, b"\x03")
    # The terminal is a controlling one only for a session leader that opened it, so the signal is sent as well.
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.finish() == 130
    assert "Traceback" not in terminal.output
    assert "Aborted" not in terminal.output
    assert terminal.output.rindex("\x1b[?25h") > terminal.output.rindex("\x1b[?25l")  # the cursor is back
    assert max(map(len, plain(terminal.output.rsplit("\x1b[?1049l", 1)[1]).split("\n"))) <= 50


def test_sigterm_gives_the_terminal_back(tmp_path, open_terminal):
    terminal = open_terminal([write_run(tmp_path / "run", 4, ended=False)])
    terminal.read_until("step 4/1000")
    terminal.process.terminate()
    assert terminal.finish() == 128 + signal.SIGTERM
    assert "\x1b[?1049l" in terminal.output
    assert "Traceback" not in terminal.output


def test_a_silent_run_says_how_long_ago_its_last_step_was(tmp_path, open_terminal):
    terminal = open_terminal([write_run(tmp_path / "run", 4, ended=False), "--once"])
    assert terminal.finish() == 0
    assert re.search(r"last step 16 min \d\d s ago", plain(terminal.output))


def test_a_terminal_without_utf8_gets_ascii(tmp_path, open_terminal):
    run = write_run(tmp_path / "rün", 30)
    terminal = open_terminal([run, "--once"], PYTHONIOENCODING="ascii:surrogateescape")
    assert terminal.finish() == 0
    assert terminal.output.isascii()
    assert "+--" in terminal.output
    assert "r?n" in terminal.output


def test_a_dumb_terminal_gets_plain_lines(tmp_path, open_terminal):
    terminal = open_terminal([write_run(tmp_path / "run", 3)], TERM="dumb")
    assert terminal.finish() == 0
    assert "\x1b" not in terminal.output
    assert terminal.output.startswith("step 1/1000")


# --- what a frame says


def picture(tmp_path, losses, **changes) -> _Picture:
    history = BinnedLosses(0.5)
    steps = np.arange(1, len(losses) + 1)
    fill = np.full(len(losses), 0.25, np.float64)
    history.add(LossRows(steps, np.array(losses, float), fill, fill, fill, np.array(100.0 + 2.0 * steps, np.float64)))
    return _Picture(tmp_path, history, changes.pop("facts", RunFacts(10, 4, "resnet18")), log_scale=False, **changes)


def status(shown: _Picture, now_s: float) -> str:
    return chart_text(frame_lines(shown, 200, 12, UNICODE_GLYPHS, now_s)).split("\n")[-1]


def test_the_status_line_has_every_number(tmp_path):
    assert status(picture(tmp_path, [4.0, 2.0]), 104.5) == (
        "step 2/10  loss 2.0000  smoothed 2.6667  lr 0.25  0.25 images/s  wait 0.2 ms  left 16 s"
    )


def test_a_pause_takes_the_place_of_the_time_left(tmp_path):
    shown = picture(tmp_path, [4.0, 2.0])
    assert status(shown, 104 + 10.0).endswith("left 16 s")  # five steps' worth: a pause this long is usual
    assert status(shown, 104 + 11.0).endswith("last step 11 s ago")


def test_an_error_of_the_run_is_shown_without_its_control_characters(tmp_path):
    shown = picture(tmp_path, [4.0], end=RunEnd(1, "error", "OSError: disk\x1b[2J full"), num_unreadable=2)
    assert status(shown, 0.0).endswith(
        "run ended after 1 steps, stopped by error: OSError: disk?[2J full  2 unreadable line(s)"
    )


def test_before_the_first_step_it_says_what_it_waits_for(tmp_path):
    assert status(picture(tmp_path, []), 0.0) == "waiting for the first step"


@given(
    losses=st.lists(st.floats(-1e30, 1e30) | st.just(NAN), max_size=20),
    width=st.integers(1, 120),
    height=st.integers(1, 40),
    glyphs=st.sampled_from([UNICODE_GLYPHS, ASCII_GLYPHS]),
    model=st.text(max_size=30) | st.none(),
)
def test_a_frame_never_outgrows_the_terminal(losses, width, height, glyphs, model):
    shown = picture(Path("run"), losses, facts=RunFacts(None, 4, model))
    lines = chart_text(frame_lines(shown, width, height, glyphs, 150.0)).split("\n")
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


@given(fields=st.lists(st.text("abc", min_size=1, max_size=20), max_size=8), width=st.integers(1, 40))
def test_fields_are_packed_in_order_into_as_few_lines_as_they_need(fields, width):
    lines = pack_fields(fields, width)
    assert all(0 < len(line) <= width for line in lines)
    assert "  ".join(lines).split("  ") == [text[:width] for text in fields] or not fields
    for line, following in itertools.pairwise(lines):
        assert len(line) + 2 + len(following.split("  ")[0]) > width or len(following) == width


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
