"""`tail-run` on a pipe and on a pseudo-terminal: what it prints, when it ends, with which exit code."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from loopfeed.engine.commands import followed_run
from loopfeed.engine.commands.tail_cli import LinePrinter, main
from loopfeed.engine.commands.tail_frame import Tick
from loopfeed.engine.records.folder_lock import LOCK_NAME, FolderLock
from loopfeed.engine.records.loss_log import LossBatch, LossRows, RunFacts
from loopfeed.engine.records.run_folder_sink import RunFolderSink
from loopfeed.engine.stream.sinks import EvaluationRecord, LossRecord, PlainSink
from tests.pseudo_terminal import LIMIT_S, Terminal, plain

NAN = float("nan")
COMMAND = [sys.executable, "-c", "from loopfeed.engine.commands.tail_cli import main; main()"]


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


def tail(*arguments, every=1):
    options = ["--log-every", str(every)] * (every is not None)
    return CliRunner().invoke(main, [*options, *map(str, arguments)], catch_exceptions=False)


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


FLOATS = st.floats(0, 1e6, width=32)
STREAM = st.lists(
    st.tuples(FLOATS | st.just(NAN), FLOATS, st.floats(0, 1e5) | st.just(NAN), st.floats(0, 1e5)), max_size=9
)


@given(numbers=STREAM, evaluated=st.sets(st.integers(0, 9)))
def test_it_prints_what_the_run_printed(tmp_path_factory, numbers, evaluated):
    run = tmp_path_factory.mktemp("run")
    (run / "config.json").write_text(json.dumps({"config": {"steps": 9}}))
    printed = io.StringIO()
    sinks = RunFolderSink(run / "loss.jsonl", run / "eval.jsonl"), PlainSink(printed, steps=9)
    for sink in sinks:
        sink.open()
        for step in range(len(numbers) + 1):
            if step:
                loss, rate, images_per_s, wait_ms = numbers[step - 1]
                sink.write(LossRecord(step, loss, rate, images_per_s, wait_ms, 1.0))
            if step in evaluated:
                sink.write_evaluation(EvaluationRecord(step, 37, step / 37, 1.0, 0.5, 1.0))
        sink.close()
    assert tail(run, "--once").stdout == printed.getvalue()


@pytest.mark.parametrize(
    ("options", "every", "expected"),
    [
        (["--once"], None, [1, 6, 11, 12]),
        (["--once"], 4, [1, 4, 8, 12]),
        (["--once", "--last", "3"], None, [10, 11, 12]),
        ([], None, [1, 6, 11, 12]),
    ],
)
def test_a_line_comes_every_five_seconds_unless_told_otherwise(tmp_path, options, every, expected):
    run = write_run(tmp_path / "run", 12)
    printed = tail(run, *options, every=every).stdout
    assert first_words(printed) == [f"step {step}" for step in expected]


def evaluate_at(run: Path, *steps: int) -> None:
    with (run / "eval.jsonl").open("a") as file:
        for step in steps:
            file.write(EvaluationRecord(step, 50, 0.5, 0.75, 1.25, 1.0).to_json() + "\n")


def first_words(text: str) -> list[str]:
    return [line.split(":")[0].split("/")[0].split("  ")[0] for line in text.splitlines()]


def test_evaluations_come_as_they_are_written_and_never_before_their_step(tmp_path, start):
    run = write_run(tmp_path / "run", 1, ended=False)
    evaluate_at(run, 2)
    process = start([*COMMAND, str(run), "--log-every", "1", "--interval", "0.05"])
    assert process.stdout is not None
    assert process.stdout.readline().startswith("step 1/1000")
    add_steps(run, 2, 4)
    lines = "".join(process.stdout.readline() for _ in range(3))
    assert first_words(lines) == ["step 2", "evaluation at step 2", "step 3"]
    evaluate_at(run, 3)
    assert process.stdout.readline().startswith("evaluation at step 3:")
    end_run(run, 3)
    assert process.communicate(timeout=LIMIT_S)[0] == ""


def test_the_evaluations_of_a_run_that_took_over_the_folder_are_its_own(capsys):
    def tick(*steps, restarted):
        blank = np.full(len(steps), NAN)
        rows = LossRows(np.array(steps), blank, blank, blank, blank, blank, np.array([{}] * len(steps), object))
        batch = LossBatch(rows, restarted)
        evaluations = tuple(EvaluationRecord(step, 50, 0.5, 0.75, 1.25, 1.0) for step in steps)
        return Tick(batch, RunFacts(), None, evaluations, caught_up=True)

    printer = LinePrinter(last=None, once=False)
    for restarted in (False, True):
        printer.print(tick(1, 2, restarted=restarted))
    first = ["step 1", "evaluation at step 1", "step 2", "evaluation at step 2"]
    assert first_words(capsys.readouterr().out) == first * 2


def test_a_folder_of_runs_names_the_one_that_began_last(tmp_path):
    for age_s, name in ((30, "a"), (10, "c"), (20, "b")):
        config = write_run(tmp_path / name, 1) / "config.json"
        os.utime(config, (time.time() - age_s,) * 2)
    for options in ([], ["--once"]):
        result = tail(tmp_path, *options)
        assert result.exit_code == 2
        assert result.stderr == (
            f"Error: RUN must be a run folder, but {tmp_path} contains 3 run folders; give one, such as the newest, "
            f"{tmp_path / 'c'}\n"
        )


def test_unreadable_lines_are_reported_beside_the_steps(tmp_path):
    run = write_run(tmp_path / "run", 2, ended=False)
    with (run / "loss.jsonl").open("a") as file:
        file.write("half a li\n")
    result = tail(run, "--once")
    assert len(result.stdout.splitlines()) == 2
    assert result.stderr == "skipped 1 unreadable line(s) of loss.jsonl, the last of them line 3\n"


def test_steps_come_as_they_are_written_and_a_new_log_is_announced(tmp_path, start):
    run = write_run(tmp_path / "run", 1, ended=False)
    process = start([*COMMAND, str(run), "--log-every", "1", "--interval", "0.05"])
    assert process.stdout is not None
    assert process.stdout.readline().startswith("step 1/1000")
    add_steps(run, 2, 3)
    assert process.stdout.readline().startswith("step 2/1000")
    (run / "loss.jsonl").unlink()
    add_steps(run, 1, 2)
    assert process.stdout.readline().startswith("step 1/1000")
    end_run(run, 1, "SIGINT")
    out, err = process.communicate(timeout=LIMIT_S)
    assert (out, err) == (
        "",
        "loss.jsonl was replaced; reading it from the start\nrun stopped by SIGINT after 1 step\n",
    )
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda run: None, "does not exist; give the --run-dir"),
        (lambda run: run.mkdir(), "contains no loss.jsonl; give the --run-dir"),
        (lambda run: run.write_text(""), "is a file; give the folder that contains it"),
    ],
)
@pytest.mark.parametrize("options", [["--once"], ["--timeout-s", "0.2"]])
def test_a_folder_that_is_not_a_run_is_an_error(tmp_path, prepare, message, options):
    prepare(tmp_path / "run")
    result = tail(tmp_path / "run", *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_a_log_that_is_not_a_file_is_an_error_in_one_line(tmp_path):
    (tmp_path / "run" / "loss.jsonl").mkdir(parents=True)
    result = tail(tmp_path / "run")
    assert result.exit_code == 2
    said = r"Error: RUN must be readable, but .*loss\.jsonl is not: it is a folder, not a file; check .*\n"
    assert re.fullmatch(said, result.stderr)


def test_a_run_that_compiles_is_waited_for_as_long_as_for_a_step(tmp_path, monkeypatch):
    monkeypatch.setattr(followed_run, "_START_WAIT_S", 0.0)
    run = tmp_path / "run"
    run.mkdir()
    lock = FolderLock(run)

    def begin_and_end():
        write_run(run, 1)
        lock.release()

    with lock:
        result = tail(run, "--timeout-s", "0.3")
        assert result.exit_code == 2
        assert "RUN must have started to train, " in result.stderr
        assert "is still compiling; try again later" in result.stderr
        assert "is still compiling" in tail(run, "--once").stderr
        begins = threading.Timer(0.3, begin_and_end)
        begins.start()
        result = tail(run, "--timeout-s", "30", "--interval", "0.05")
        begins.join()
    assert result.exit_code == 0
    assert result.stderr.startswith(f"{run} is starting or compiling; waiting up to 30 s\n")
    assert len(result.stdout.splitlines()) == 1


def test_a_closed_pipe_ends_it_quietly(tmp_path, start):
    run = write_run(tmp_path / "run", 3000, ended=False)
    process = start([*COMMAND, str(run), "--log-every", "1", "--interval", "0.05"])
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    add_steps(run, 3001, 6000)
    assert process.stderr.read() == ""
    assert process.wait(LIMIT_S) == 0


# --- on a terminal


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
    terminal.press("\x03")
    assert terminal.finish() == 130
    assert "Traceback" not in terminal.output
    assert "Aborted" not in terminal.output
    assert terminal.output.rindex("\x1b[?25h") > terminal.output.rindex("\x1b[?25l")  # the cursor is back
    assert max(map(len, plain(terminal.output.rsplit("\x1b[?1049l", 1)[1]).split("\n"))) <= 50


def test_sigterm_restores_the_terminal(tmp_path, open_terminal):
    terminal = open_terminal([write_run(tmp_path / "run", 4, ended=False)])
    terminal.read_until("step 4/1000")
    terminal.process.terminate()
    assert terminal.finish() == 128 + signal.SIGTERM
    assert "\x1b[?1049l" in terminal.output
    assert "Traceback" not in terminal.output


def test_a_terminal_without_utf8_gets_ascii(tmp_path, open_terminal):
    run = write_run(tmp_path / "rün", 30)
    terminal = open_terminal([run, "--once"], PYTHONIOENCODING="ascii:surrogateescape")
    assert terminal.finish() == 0
    assert terminal.output.isascii()
    assert "+--" in terminal.output
    assert "r?n" in terminal.output


def test_a_run_whose_process_was_killed_is_not_waited_for(tmp_path):
    run = write_run(tmp_path, 3, ended=False)
    (run / LOCK_NAME).write_text(json.dumps({"pid": 1, "host": os.uname().nodename}))
    result = tail(run)
    assert result.exit_code == 1
    assert len(result.stdout.splitlines()) == 3
    assert "died after step 3 without a result: resume the run with run-train --resume" in result.stderr
    once = tail(run, "--once")
    assert (once.exit_code, once.stdout) == (0, result.stdout)
    assert once.stderr == result.stderr.removeprefix("Error: ")
    end_run(run, 3)
    assert tail(run).exit_code == 0


def test_evaluations_follow_their_step_and_those_before_the_last_steps_are_omitted(tmp_path):
    run = write_run(tmp_path / "run", 6)
    evaluate_at(run, 2, 4, 6)
    lines = tail(run).stdout.splitlines()
    assert lines[2] == "evaluation at step 2: top-1 50.00 %  top-5 75.00 %  loss 1.2500  (50 images)"
    wanted = ["step 4", "evaluation at step 4", "step 5", "step 6", "evaluation at step 6"]
    assert first_words(tail(run, "--last", 3).stdout) == wanted


def test_the_end_of_an_earlier_run_does_not_end_a_resumed_one(tmp_path):
    run = write_run(tmp_path / "run", 5)
    end_run(run, 3)
    result = tail(run, "--timeout-s", 0.2, "--interval", 0.05)
    assert result.exit_code == 1
    assert "has written nothing for 0.2 s (--timeout-s) after step 5" in result.stderr
