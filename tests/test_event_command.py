"""The user's command at the events of a run: what it is given, and that nothing that it does harms the run."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from loopfeed import Callback, train
from loopfeed.engine.loggers.event_command import EventCommand
from loopfeed.engine.stream.sinks import EvaluationRecord, RunDescription, loss_number
from tests.toy import Linear, toy_batch, toy_config


def train_telling(tmp_path, command, *, batches=toy_batch, callbacks=(), **values):
    """Train with a command in `tmp_path`, and return what the run said."""
    said: list[str] = []
    config = toy_config(on_event=f"cd '{tmp_path}'; {command}", run_dir=tmp_path / "run", **values)
    train(config, model=Linear(), batches=batches, evaluation=toy_batch(99), notify=said.append, callbacks=callbacks)
    return [line for line in said if "--on-event" in line]


def told(tmp_path):
    return [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]


KEEP = 'cat >> told; echo "$LOOPFEED_EVENT $LOOPFEED_STEP $LOOPFEED_RUN_DIR" >> variables'


class StopAtOnce(Callback):
    """Stops a run before its first step."""

    def on_fit_begin(self, run):
        run.request(stop=True)


def test_a_command_is_told_of_each_best_evaluation_and_of_the_end(tmp_path):
    for values in ({}, {"resume": True}):  # a run that is complete is not done a second time
        assert train_telling(tmp_path, KEEP, steps=4, eval_every_steps=2, keep_best="loss", **values) == []
    # But it is stopped where it was to be continued.
    train_telling(tmp_path, KEEP, callbacks=[StopAtOnce()], steps=8, eval_every_steps=2, keep_best="loss", resume=True)
    *best, done, stopped = told(tmp_path)
    assert (stopped["event"], stopped["step"]) == ("stopped", 4)
    assert [each["event"] for each in best] == ["new-best"] * len(best)
    assert done.items() >= {"event": "done", "step": 4, "metric": "loss"}.items()
    assert done["message"].startswith(f"run: done at step 4, best loss {loss_number(done['value'])} at step ")
    assert done["run_dir"] == str(tmp_path / "run")
    assert {each["metric"] for each in best} <= {"loss"}
    assert f"done 4 {tmp_path / 'run'}" in (tmp_path / "variables").read_text().splitlines()


@pytest.mark.parametrize(
    ("raised", "event", "message"),
    [
        (ConnectionResetError("no camera\0"), "failed", "failed: no camera"),
        (KeyboardInterrupt(), "stopped", "interrupted"),
    ],
)
def test_a_command_is_told_of_a_failure_and_of_a_loss_that_is_no_number(tmp_path, raised, event, message):
    def batches(step):
        if step == 3:
            raise raised
        return toy_batch(step)

    with pytest.raises(type(raised)):
        train_telling(tmp_path, KEEP, batches=batches, learning_rate=1e38, skip_nonfinite=99)
    assert "non-finite" in [each["event"] for each in told(tmp_path)]
    assert told(tmp_path)[-1]["event"] == event
    assert message in told(tmp_path)[-1]["message"]


@pytest.mark.parametrize(
    ("command", "warning"),
    [
        ("sleep 1000", "it was killed after"),
        ("exec 0<&-; exit 3", "exit status 3"),
        ("sleep 1000 & exit 0", None),
        ("trap '' TERM INT HUP; kill -9 0", "signal 9"),
        ("yes; true", "it was killed after"),
        ("yes 1>&2", "it was killed after"),
        ("no-such-command-1", "exit status 127: .*not found"),
        ("/etc/passwd", "exit status 126: .*ermission denied"),
        ("kill -INT $$", "signal 2"),
    ],
)
def test_no_command_harms_the_run_or_keeps_it_for_long(command, warning, tmp_path, monkeypatch):
    monkeypatch.setattr("loopfeed.engine.loggers.event_command._END_LIMIT_S", 0.3)
    said: list[str] = []
    sink = EventCommand(command, None)
    sink.describe_run(RunDescription({}, {}, None, 0, None, said.append))
    num_open = len([*Path("/proc/self/fd").iterdir()])
    sink.write_evaluation(EvaluationRecord(1, 1, 0.5, 1.0, 0.5, 0.0))
    began = time.monotonic()
    sink.end("done", "done")
    assert time.monotonic() - began < 5
    assert len([*Path("/proc/self/fd").iterdir()]) == num_open
    assert len(said) == (warning is not None)
    assert warning is None or re.search(warning, said[0])


def test_events_that_wait_are_bounded_and_the_last_one_is_always_told(tmp_path):
    said: list[str] = []
    sink = EventCommand(f"sleep 0.3; echo $LOOPFEED_EVENT >> '{tmp_path}/told'", None)
    sink.describe_run(RunDescription({}, {}, None, 0, None, said.append))
    for number in range(999):
        sink.write_evaluation(EvaluationRecord(number, 1, number / 999, 1.0, 0.5, 0.0))
    sink.end("done", "done")
    assert (tmp_path / "told").read_text().split()[-1] == "done"
    assert len(said) == 1
    assert "16 events wait" in said[0]


def test_a_stall_is_told_while_the_program_waits(tmp_path):
    def batches(step):
        deadline = time.monotonic() + 20
        while step == 2 and time.monotonic() < deadline and "stalled" not in read(tmp_path / "told"):
            time.sleep(0.02)
        return toy_batch(step)

    assert train_telling(tmp_path, KEEP, batches=batches, stall_warn_s=0.2) == []
    stalled = next(each for each in told(tmp_path) if each["event"] == "stalled")
    assert "no step for 0." in stalled["message"]


def read(path):
    return path.read_text() if path.exists() else ""


PAGE = Path(__file__).parents[1] / "docs/howto/events.md"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_chat_of_the_page_gets_the_message(tmp_path):
    got = []

    class Chat(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    script = re.search(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert script is not None
    with HTTPServer(("127.0.0.1", 0), Chat) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        variables = {"WEBHOOK": f"http://127.0.0.1:{server.server_port}/", "LOOPFEED_MESSAGE": 'a "b" \\ $(c)'}
        subprocess.run(["sh", "-c", script[1]], env=os.environ | variables, timeout=30, check=True)
        server.shutdown()
    assert got == [{"text": 'a "b" \\ $(c)'}]


def test_the_tracker_of_the_page_gets_an_evaluation(tmp_path):
    script = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert script is not None
    (tmp_path / "mlflow.py").write_text(
        "from contextlib import nullcontext\n"
        "start_run = lambda run_name: nullcontext(print(run_name))\n"
        "set_tag = log_metric = lambda *a, **k: print(*a, *k.values())\n"
    )
    (tmp_path / "tracker.py").write_text(script[1])
    event = {"event": "new-best", "run_dir": "runs/a", "step": 4, "metric": "top1", "value": 0.5}
    command = [sys.executable, tmp_path / "tracker.py"]
    said = subprocess.run(command, input=json.dumps(event), capture_output=True, text=True, timeout=30, check=True)
    assert said.stdout.split() == ["a", "event", "new-best", "top1", "0.5", "4"]
