"""Commands on several machines, played by this one: how all of them end if the process of one stops, dies or fails."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loopfeed.engine.commands import supervisor
from tests.process_runs import ROOT, TOY, own_processes, records, resumed, run, separately, words
from tests.waiting import wait_until

LOST = r"run-train: process {} on \S+ {} after step \d+, so the run ends: what was saved is intact"


@pytest.mark.integration
@pytest.mark.parametrize(
    ("victim", "number", "its_own", "other"),
    [
        (1, signal.SIGKILL, "was killed by SIGKILL", "was lost"),
        (0, signal.SIGKILL, "was killed by SIGKILL", r"no longer accepts connections \(.*\)"),
        (0, signal.SIGSTOP, r"has not answered for \d+ s \(--peer-timeout\)", r"has not answered for \d+ s .*"),
    ],
)
def test_a_lost_process_is_named_by_all_supervisors(tmp_path, victim, number, its_own, other):
    on_event = ["--on-event", f"echo $LOOPFEED_MESSAGE >> '{tmp_path}/told'"]
    with separately(tmp_path / "run", "--peer-timeout", "5", *on_event) as (commands, logs):
        (child,) = own_processes(tmp_path / "run", victim)
        os.kill(child, number)
        started = time.monotonic()
        codes = [command.wait(60) for command in commands]
        assert time.monotonic() - started < 30
        said = [log.read_text() for log in logs]
        assert codes == [1, 1], said
        for own, text in enumerate(said):
            assert re.search(LOST.format(victim, its_own if own == victim else other), text), text
            # One message, and nothing of the runtime.
            assert len(re.findall(r"^run-train: ", text, re.MULTILINE)) == 1, text
            assert not re.search(r"coordination|stack trace|Traceback", text), text
    if (victim, number) == (1, signal.SIGKILL):
        (told,) = (tmp_path / "told").read_text().splitlines()
        assert told.startswith("run: failed, perhaps because another process did")
        steps = len(records(tmp_path / "run")) + 3
        # The run that was interrupted saw the images of one that was not.
        run(*TOY, "--steps", str(steps), "--run-dir", str(tmp_path / "alone"))
        seen, alone = (
            [[each["step"], each["metrics"]] for each in losses]
            for losses in (resumed(tmp_path / "run", steps), records(tmp_path / "alone"))
        )
        assert seen == alone
        assert len(seen) == steps


@pytest.mark.integration
def test_a_process_that_fails_is_named_by_the_others_with_its_message(tmp_path):
    # In a pod of Kubernetes, nothing is asked of its server if the address is given.
    pod = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "9"}
    with separately(tmp_path / "run", "--infeed-timeout", "4", STALLED_PROCESS="1", **pod) as (commands, logs):
        assert [command.wait(60) for command in commands] == [1, 1], [log.read_text() for log in logs]
    message = "the batch of step 11 did not arrive within 4 s"
    assert f"run-train: {message}" in logs[1].read_text()
    assert not any("ubernetes" in log.read_text() for log in logs)
    assert re.search(rf"{LOST.format(1, 'failed')}.*\n  {message}", logs[0].read_text())
    assert json.loads((tmp_path / "run/result.json").read_text())["snapshot_step"] == 10


@pytest.mark.integration
def test_a_suspended_job_goes_on_and_a_scheduler_that_signals_all_of_one_of_two_commands_stops_both(tmp_path):
    with separately(tmp_path / "run", "--peer-timeout", "5") as (commands, logs):
        processes = [pid for number in (0, 1) for pid in own_processes(tmp_path / "run", number)]
        processes += [command.pid for command in commands]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in processes:
                os.kill(pid, number)
            steps = len(records(tmp_path / "run"))
            time.sleep(7 if number == signal.SIGSTOP else 1)
        assert [command.poll() for command in commands] == [None, None], [log.read_text() for log in logs]
        assert len(records(tmp_path / "run")) > steps
        # The supervisor passes it on to its child, which so gets it twice.
        for pid in (commands[1].pid, *own_processes(tmp_path / "run", 1)):
            os.kill(pid, signal.SIGTERM)
        assert [command.wait(60) for command in commands] == [130, 130], [log.read_text() for log in logs]
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["stopped_by"] == "another process"
    assert result["snapshot_step"] == result["steps_done"] == len(records(tmp_path / "run"))


@pytest.mark.integration
def test_a_process_whose_supervisor_is_killed_stops_all(tmp_path):
    with separately(tmp_path / "run") as (commands, logs):
        commands[1].kill()
        assert commands[0].wait(60) == 130, [log.read_text() for log in logs]
        wait_until(lambda: not own_processes(tmp_path / "run", 1))
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["snapshot_step"] == result["steps_done"] == len(records(tmp_path / "run"))


@pytest.mark.parametrize(
    ("codes", "steps", "passed_s", "is_cut_short"),
    [
        ([None, None], [0, 0], 9.0, False),  # they may still be compiling
        ([None, None], [0, None], 11.0, True),  # nothing would be lost
        ([None, None], [3, 2], 1000.0, False),  # a snapshot may take long
        ([None, 130], [0, 0], 2.0, False),
        ([None, 130], [0, 0], 4.0, True),  # the other can only wait for the one that is gone
        ([-signal.SIGHUP, None], [1, 0], 4.0, True),
        ([130, 130], [0, 0], 1000.0, False),  # all have ended
    ],
)
def test_a_stop_of_some_processes_is_one_of_all(codes, steps, passed_s, is_cut_short):
    children = [
        SimpleNamespace(process=SimpleNamespace(poll=lambda code=code: code), read=lambda step=step: {"step": step})
        for code, step in zip(codes, steps, strict=True)
    ]
    found = supervisor._Stop(cast(Any, children)).cut_short(passed_s)
    assert found == (("", 130) if is_cut_short else None)


@pytest.mark.integration
def test_a_signal_before_the_first_step_ends_all_processes(tmp_path):
    words_of_run = words(*TOY, "--steps", "500", "--spawn", "2", "--run-dir", str(tmp_path / "run"))
    command = subprocess.Popen(words_of_run, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_until(lambda: own_processes(tmp_path / "run", 0) and (tmp_path / "run").exists())
    command.terminate()
    said, _ = command.communicate(timeout=60)
    assert command.returncode == 130, said
    assert "Gloo" not in said


@pytest.mark.integration
def test_processes_whose_supervisor_is_killed_at_the_start_end_too(tmp_path):
    command = subprocess.Popen(
        words(*TOY, "--steps", "500", "--spawn", "2", "--run-dir", str(tmp_path / "run")), cwd=ROOT
    )
    wait_until(lambda: own_processes(tmp_path / "run", 0))
    command.kill()
    command.wait()
    wait_until(lambda: not any(own_processes(tmp_path / "run", number) for number in (0, 1)))


PYTHON = """
import sys
from loopfeed import join_processes, train
from tests.device_runs import slow_batches
from tests.toy import Linear, toy_config
join_processes(sys.argv[1], 2, int(sys.argv[2]), peer_timeout_s=5)
say = lambda record: print(record.step, flush=True)
train(toy_config(batch=12, steps=300), model=Linear(), batches=slow_batches, sinks=[say])
"""


@pytest.mark.integration
def test_python_programs_name_the_lost_process(tmp_path):
    with socket.create_server(("localhost", 0)) as free:
        address = f"localhost:{free.getsockname()[1]}"
    log, programs = tmp_path / "log", []
    try:
        for own in ("0", "1"):
            with log.with_suffix(f".{own}").open("w") as output:
                words = [sys.executable, "-c", PYTHON, address, own]
                programs.append(subprocess.Popen(words, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + 60
        while log.with_suffix(".0").read_text().count("\n") < 8:
            assert time.monotonic() < deadline, log.with_suffix(".0").read_text()
            time.sleep(0.1)
        programs[1].kill()
        assert programs[0].wait(40) == 1
    finally:
        for program in programs:
            program.kill()
            program.wait()
    assert f"loopfeed: process 1 on {socket.gethostname()} was lost" in log.with_suffix(".0").read_text()
