"""What is displayed decides nothing: closed and full outputs, terminals that go away, encodings."""

import codecs
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from loopfeed import TrainConfig, train
from loopfeed.engine.commands.run_display import summarise
from loopfeed.engine.control.board import ControlBoard
from loopfeed.engine.stream import loss_stream
from loopfeed.engine.stream.loss_stream import LossStream
from loopfeed.engine.stream.sinks import PlainSink
from loopfeed.preprocess.commands.output_stream import OutputStream
from tests.pseudo_terminal import Terminal
from tests.test_loss_stream import RecordingSink, pushed
from tests.toy import Linear, toy_batch

TRAIN = [sys.executable, "-c", "from loopfeed.engine.commands.cli import main; main(prog_name='run-train')"]
TOY = ["--model", "tests.toy:Linear", "--batches", "tests.toy:toy_batch", "--num-classes", "3", "--batch", "8"]
RUN = [*TRAIN, *TOY, "--run-dir", "run"]
LIMIT_S = 120
HERE = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}


def end_of(folder):
    result = json.loads((folder / "run/result.json").read_text())
    lines = (folder / "run/loss.jsonl").read_text().splitlines()
    return result["stopped_by"], result["steps_done"], len(lines)


def shell(command, folder, **environment):
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=HERE | environment, capture_output=True, text=True, timeout=LIMIT_S
    )


GONE = "can no longer be written"


@pytest.mark.parametrize(
    ("redirected", "warning"),
    [
        ("| head -3", f"warning: <stdout> {GONE} (Broken pipe): nothing more is shown there, and the command goes on"),
        ("> /dev/full", f"warning: <stdout> {GONE} (No space left on device)"),
        (">&- 2>&- <&-", ""),
    ],
)
def test_an_output_that_cannot_be_written_is_one_warning_at_most_and_the_run_goes_on(tmp_path, redirected, warning):
    done = shell(f"{shlex.join(RUN)} --steps 300 {redirected}; echo ${{PIPESTATUS[0]}} > code", tmp_path)
    assert (tmp_path / "code").read_text() == "0\n", done.stderr
    assert end_of(tmp_path) == ("steps", 300, 300)
    warnings = done.stderr.splitlines()
    assert len(warnings) == bool(warning), done.stderr
    assert "".join(warnings).startswith(warning)
    # A closed descriptor was given to none of the files of the run.
    assert all(json.loads(line) for line in (tmp_path / "run/loss.jsonl").read_text().splitlines())


@pytest.mark.integration
def test_processes_that_train_together_go_on_without_the_reader_too(tmp_path):
    """Each has streams of its own, because the runtime's words go to a file."""
    command = f"{shlex.join([*RUN, '--spawn', '2', '--steps', '100'])} | head -1; echo ${{PIPESTATUS[0]}} > code"
    done = shell(command, tmp_path)
    assert (tmp_path / "code").read_text() == "0\n", done.stderr
    assert end_of(tmp_path) == ("steps", 100, 100)
    assert done.stderr.count(f"warning: <stdout> {GONE} (Broken pipe)") == 1, done.stderr


class Paused(io.StringIO):
    """A stream whose reader is away until the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def write(self, text: str) -> int:
        self.gate.wait()
        return super().write(text)


def test_the_summary_waits_for_a_slow_reader_unless_a_signal_stopped_the_run(monkeypatch):
    result = train(TrainConfig(steps=2, batch=8, num_classes=3), model=cast(Any, Linear()), batches=toy_batch)
    slow, gone = Paused(), Paused()
    threading.Timer(2.0, slow.gate.set).start()
    monkeypatch.setattr(sys, "stdout", slow)
    summarise(result)
    assert slow.getvalue().startswith("done: 2 steps")
    monkeypatch.setattr(sys, "stdout", gone)
    monkeypatch.setattr("loopfeed.engine.commands.run_display._READER_S", 1e6)
    summarise(replace(result, stopped_by="SIGTERM"))
    assert gone.getvalue() == ""
    gone.gate.set()
    # A terminal that is narrow gets lines that end between words, but for what is copied from it.
    narrow = io.StringIO()
    monkeypatch.setattr(narrow, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", narrow)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((40, 24)))
    summarise(replace(result, stopped_by="SIGTERM", snapshot_step=2, run_dir="a/" * 40))
    lines = narrow.getvalue().splitlines()
    assert [line for line in lines if len(line) > 40] == [
        f"run folder: {'a/' * 40}",
        f"to resume: run-train --run-dir {'a/' * 40} --resume",
    ]
    assert " ".join(" ".join(lines).split()).startswith("stopped by SIGTERM: 2 steps in ")


def test_a_terminal_that_lacks_characters_shows_others(tmp_path):
    environment = {"PYTHONIOENCODING": "", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    options = [*TOY, "--steps", 300, "--run-dir", tmp_path / "run"]
    terminal = Terminal(TRAIN, options, **environment)
    terminal._decoder = codecs.getincrementaldecoder("latin-1")()  # type: ignore[assignment]
    assert terminal.finish() == 0, terminal.output
    assert end_of(tmp_path) == ("steps", 300, 300)
    assert "done: 300 steps" in terminal.output
    assert "codec" not in terminal.output
    assert "Traceback" not in terminal.output


class Failing(RecordingSink):
    """A display that raises at its third record."""

    is_display = True


def test_a_display_that_fails_is_left_out_with_one_warning():
    board, said = ControlBoard(), list[str]()
    failing, kept = Failing(write_error=LookupError("no  such\nthing"), write_error_at=3), RecordingSink()
    unopened = Failing(open_error=OSError(5, "Input/output error"))
    stream = LossStream(batch=8, wait_of=lambda _: 0.0, board=board, warn=said.append)
    stream.start([unopened, failing, kept])
    for step in range(1, 7):
        stream.receive(pushed(step))
    stream.close()
    assert (stream.failure, board.stop_reason) == (None, None)
    assert (failing.calls[-1], len(failing.calls), kept.steps) == ("close", 5, [1, 2, 3, 4, 5, 6])
    assert said == [
        "warning: Failing shows nothing more (Input/output error); the run is not affected",
        "warning: Failing shows nothing more (no such thing); the run is not affected",
    ]


def test_a_display_that_hangs_fails_no_run(monkeypatch):
    monkeypatch.setattr(loss_stream, "_PUSH_TIMEOUT_S", 0.2)
    monkeypatch.setattr("loopfeed.engine.stream.lane.MOST_QUEUED", 3)
    gate, said, board = threading.Event(), list[str](), ControlBoard()
    stream = LossStream(batch=8, wait_of=lambda _: 0.0, board=board, warn=said.append)
    full, late, kept = Failing(gate=gate), Failing(gate=gate), RecordingSink()
    stream.start([full, kept])
    for step in range(1, 9):
        stream.receive(pushed(step))
    stream.close(0.2)
    other = LossStream(batch=8, wait_of=lambda _: 0.0, board=board, warn=said.append)
    other.start([late])
    other.receive(pushed(1))
    other.close(0.2)
    gate.set()
    assert (stream.failure, other.failure, board.stop_reason) == (None, None, None)
    assert kept.steps == [1, 2, 3, 4, 5, 6, 7, 8]
    # The second names how long it waited, which may be more than it was to.
    assert ["did not accept" in each or "within 0.2 s" in each for each in said] == [True, True], said


def test_a_stream_that_is_a_display_is_given_up_once():
    class Terminal(io.StringIO):
        def flush(self) -> None:
            raise OSError(5, "Input/output error")

    said: list[str] = []
    stream: Any = OutputStream(Terminal(), is_display=True, warn=said.append)
    for _ in range(3):
        stream.write("a")
        stream.flush()
    assert len(said) == 1
    assert "Input/output error" in said[0]
    closed = io.StringIO()
    closed.close()
    OutputStream(closed, is_display=True).write("a")
    with pytest.raises(ValueError, match="closed file"):
        OutputStream(closed).write("a")


@pytest.mark.parametrize(
    ("encoding", "text", "shown"),
    [("koi8-r", "шаг × …", "шаг ? ?"), ("iso8859-2", "5 µs · é", "5 ?s ? é"), ("latin-1", "5 µs …", "5 µs ?")],
)
def test_only_what_an_alphabet_lacks_is_replaced(encoding, text, shown):
    behind = io.TextIOWrapper(io.BytesIO(), encoding)
    stream = OutputStream(behind)
    stream.write(text)
    stream.flush()
    assert behind.buffer.getvalue().decode(encoding) == shown


def test_a_call_of_train_outlives_its_sink_of_lines_and_its_notices():
    def notify(_: str) -> None:
        raise OSError(5, "Input/output error")

    closed = io.StringIO()
    closed.close()
    config = TrainConfig(steps=5, batch=8, num_classes=3, learning_rate=0.1)
    sinks: Any = [PlainSink(closed, steps=5)]
    result = train(config, model=cast(Any, Linear()), batches=toy_batch, sinks=sinks, notify=notify)
    assert (result.stopped_by, result.steps_done) == ("steps", 5)
    assert np.isfinite(result.losses).all()
