"""Several processes on this machine: the same inputs and losses, and how they end if one stops, dies or stalls."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from engine import join_processes, this_process
from engine.commands.cli import main
from engine.commands.supervisor import _PROGRAM, without_option
from engine.feed.own_rows import rows_of
from tests.device_runs import rows_alone
from tests.toy import toy_batch

ROOT = Path(__file__).parents[1]
PROGRAM = "from engine.commands.cli import main; main(prog_name='run-train')"
VERIFY = "from engine.commands.verify_cli import main; main(prog_name='verify-run')"
MODULE = "tests.device_runs"
TOY = ["--model", "tests.toy:Linear", "--batches", f"{MODULE}:slow_batches", "--batch", "12", "--num-classes", "3"]
EVERYTHING = [
    *("--model", f"{MODULE}:Showing", "--metrics", f"{MODULE}:METRICS", "--evaluation", f"{MODULE}:evaluation"),
    *("--batch", "12", "--num-classes", "3", "--steps", "8", "--eval-every", "4", "--learning-rate", "0.05"),
    *("--crop", "random", "--crop-padding", "1", "--flip", "0.5", "--erasing", "0.3", "--auto-augment", "randaugment"),
    *("--accumulate-steps", "2", "--ema-decay", "0.9", "--snapshot-every", "4"),
]


def words(*options: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM, *options]


def run(*options: str) -> str:
    done = subprocess.run(words(*options), cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def records(folder: Path, name: str = "loss.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@contextmanager
def going(folder: Path, *options: str, **environment: str):
    """A run in two processes that has done a few steps, with its lines in a file."""
    log = folder.with_suffix(".log")
    arguments = [*TOY, "--steps", "500", "--snapshot-every", "2", "--spawn", "2", "--run-dir", str(folder), *options]
    with log.open("w") as output:
        process = subprocess.Popen(
            words(*arguments), cwd=ROOT, env=os.environ | environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            deadline = time.monotonic() + 120
            while not (folder / "loss.jsonl").exists() or len(records(folder)) < 8:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            yield process, log
        finally:
            for number in (0, 1):
                for pid in own_processes(folder, number):
                    os.kill(pid, signal.SIGKILL)
            process.kill()
            process.wait()


@contextmanager
def separately(folder: Path, *options: str, **environment: str):
    """The same run as two commands, as on two machines; yields them, and what each of them printed."""
    with socket.create_server(("localhost", 0)) as free:
        address = f"localhost:{free.getsockname()[1]}"
    arguments = [*TOY, "--steps", "500", "--snapshot-every", "2", "--run-dir", str(folder), *options]
    logs = [folder.with_suffix(f".{number}.log") for number in (0, 1)]
    commands: list[subprocess.Popen[bytes]] = []
    try:
        for number, log in enumerate(logs):
            own = ["--coordinator", address, "--num-processes", "2", "--process-id", str(number)]
            with log.open("w") as output:
                commands.append(
                    subprocess.Popen(
                        words(*arguments, *own),
                        cwd=ROOT,
                        env=os.environ | environment,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        deadline = time.monotonic() + 120
        while not (folder / "loss.jsonl").exists() or len(records(folder)) < 8:
            assert all(command.poll() is None for command in commands), "".join(log.read_text() for log in logs)
            assert time.monotonic() < deadline, "".join(log.read_text() for log in logs)
            time.sleep(0.1)
        yield commands, logs
    finally:
        for number in (0, 1):
            for pid in own_processes(folder, number):
                os.kill(pid, signal.SIGKILL)
        for command in commands:
            command.kill()
            command.wait()


def own_processes(folder: Path, number: int) -> list[int]:
    """Return the processes of this number that train: not their supervisors."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().decode(errors="replace").split("\0")
            is_child = b"FEEDLOOP_BEAT_FILE" in (path.parent / "environ").read_bytes()
        except OSError:
            continue
        if is_child and str(folder) in line and line[line.index("--process-id") + 1] == str(number):
            found.append(int(path.parent.name))
    return found


def resumed(folder: Path, steps: int) -> list[dict[str, Any]]:
    """Continue a run in one process, and return its losses."""
    run(*TOY[:4], "--run-dir", str(folder), "--resume", "--steps", str(steps))
    return records(folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one process."""
    folder = tmp_path_factory.mktemp("processes") / "1"
    run(*EVERYTHING, "--batches", f"{MODULE}:rows_alone", "--run-dir", str(folder))
    return folder


@pytest.mark.integration
@pytest.mark.parametrize(("number", "devices"), [(2, ()), (3, ()), (2, ("--devices", "cpu:2"))])
def test_processes_train_on_the_same_bits_to_the_same_losses(alone, tmp_path, number, devices):
    folder = tmp_path / "run"
    printed = run(
        *EVERYTHING, "--batches", f"{MODULE}:rows_alone", "--run-dir", str(folder), "--spawn", str(number), *devices
    )
    one, several = records(alone), records(folder)
    assert [each["metrics"] for each in several] == [each["metrics"] for each in one]
    np.testing.assert_allclose([each["loss"] for each in several], [each["loss"] for each in one], rtol=1e-6)
    evaluations = [[[each["loss"], each["top1"]] for each in records(where, "eval.jsonl")] for where in (alone, folder)]
    np.testing.assert_allclose(evaluations[1], evaluations[0], rtol=1e-5)
    assert len(re.findall(r"^step 1/8 ", printed, re.MULTILINE)) == 1
    # The run of several processes goes on in one, and the other way round.
    shutil.copytree(folder, tmp_path / "copy")
    parts = [*EVERYTHING[:6], "--batches", f"{MODULE}:rows_alone"]
    run(*parts, "--run-dir", str(tmp_path / "copy"), "--resume", "--steps", "10", "--devices", "1")
    assert [each["step"] for each in records(tmp_path / "copy")] == list(range(1, 11))
    if number == 2:
        return
    done = subprocess.run(
        [sys.executable, "-c", VERIFY, *EVERYTHING[:6], "--batches", f"{MODULE}:rows_alone", str(tmp_path / "copy")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "steps 5 … 8: recorded on 3 devices (cpu) in 3 processes, replayed in one process: sums" in done.stderr
    assert "steps 9 … 10: recorded and replayed on one device (cpu): the same bits are expected" in done.stderr
    # Rounding alone, if anything: what the message promises.
    assert done.returncode == 0 or float(re.findall(r"by at most (\S+) of", done.stdout)[0]) < 1e-5


@pytest.mark.integration
def test_sigterm_to_one_process_stops_all_with_a_snapshot(tmp_path):
    with going(tmp_path / "run") as (process, log):
        (other,) = own_processes(tmp_path / "run", 1)
        os.kill(other, signal.SIGTERM)
        assert process.wait(60) == 130, log.read_text()
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["stopped_by"] == "another process"
    assert result["snapshot_step"] == result["steps_done"] == len(records(tmp_path / "run"))


@pytest.mark.integration
def test_sigterm_in_an_evaluation_stops_all_with_a_snapshot_and_a_resume_evaluates(tmp_path):
    folder, mark = tmp_path / "run", tmp_path / "mark"
    options = ["--evaluation", f"{MODULE}:MarkedEvaluation", "--eval-every", "9"]
    with going(folder, *options, EVALUATION_MARK=str(mark)) as (process, log):
        deadline = time.monotonic() + 60
        while not mark.exists():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        (other,) = own_processes(folder, 1)
        os.kill(other, signal.SIGTERM)
        assert process.wait(60) == 130, log.read_text()
    result = json.loads((folder / "result.json").read_text())
    assert (result["steps_done"], result["snapshot_step"], result["stopped_by"]) == (9, 9, "another process")
    assert not (folder / "eval.jsonl").exists()
    run(*TOY[:4], *options[:2], "--run-dir", str(folder), "--resume", "--steps", "10")
    assert [each["step"] for each in records(folder, "eval.jsonl")] == [9, 10]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("number", "message"), [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "has not answered for")]
)
def test_a_lost_process_ends_the_others_and_is_named(tmp_path, number, message):
    with going(tmp_path / "run", "--peer-timeout", "5") as (process, log):
        (other,) = own_processes(tmp_path / "run", 1)
        os.kill(other, number)
        started = time.monotonic()
        assert process.wait(60) == 1, log.read_text()
        assert time.monotonic() - started < 30
        assert re.search(rf"run-train: process 1 on \S+ {message} .*after step \d+, so the run ends", log.read_text())
        assert not own_processes(tmp_path / "run", 0)
    steps = len(records(tmp_path / "run")) + 5
    losses = resumed(tmp_path / "run", steps)
    assert [each["step"] for each in losses] == list(range(1, steps + 1))


@pytest.mark.integration
def test_a_stalled_source_of_one_process_ends_the_run(tmp_path):
    with going(tmp_path / "run", "--infeed-timeout", "4", STALLED_PROCESS="1") as (process, log):
        assert process.wait(60) == 1, log.read_text()
    assert "process 1: run-train: the batch of step 11 did not arrive within 4 s" in log.read_text()
    assert "the newest snapshot is intact" in log.read_text()
    assert json.loads((tmp_path / "run/result.json").read_text())["steps_done"] == 10


LOST = r"run-train: process {} on \S+ {} after step \d+, so the run ends: the newest snapshot is intact"


@pytest.mark.integration
@pytest.mark.parametrize(
    ("victim", "number", "its_own", "other"),
    [
        (1, signal.SIGKILL, "was killed by SIGKILL", "was lost"),
        (1, signal.SIGSTOP, r"has not answered for \d+ s \(--peer-timeout\)", r"has not answered for \d+ s .*"),
        (0, signal.SIGKILL, "was killed by SIGKILL", r"no longer accepts connections \(.*\)"),
        (0, signal.SIGSTOP, r"has not answered for \d+ s \(--peer-timeout\)", r"has not answered for \d+ s .*"),
    ],
)
def test_a_lost_process_is_named_by_all_supervisors(tmp_path, victim, number, its_own, other):
    with separately(tmp_path / "run", "--peer-timeout", "5") as (commands, logs):
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
        steps = len(records(tmp_path / "run")) + 3
        assert [each["step"] for each in resumed(tmp_path / "run", steps)] == list(range(1, steps + 1))


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
def test_a_scheduler_that_signals_every_process_of_one_of_two_commands_stops_both(tmp_path):
    with separately(tmp_path / "run") as (commands, logs):
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
        deadline = time.monotonic() + 30
        while own_processes(tmp_path / "run", 1):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["snapshot_step"] == result["steps_done"] == len(records(tmp_path / "run"))


PYTHON = """
import sys
from engine import join_processes, train
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
    assert f"feedloop: process 1 on {socket.gethostname()} was lost" in log.with_suffix(".0").read_text()


@pytest.mark.integration
def test_a_coordinator_that_cannot_be_reached_is_an_error(tmp_path):
    options = ["--coordinator", "localhost:9", "--num-processes", "2", "--process-id", "1", "--join-timeout", "5"]
    done = subprocess.run(
        words(*TOY, "--run-dir", str(tmp_path), *options),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert "run-train: the coordinator localhost:9 cannot be reached" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-processes", "2"], "--num-processes needs --coordinator HOST:PORT"),
        (["--coordinator", "here:1", "--num-processes", "2"], "belong together, got here:1, 2 and None"),
        (["--coordinator", "here", "--num-processes", "2", "--process-id", "0"], "must be HOST:PORT, got 'here'"),
        (["--coordinator", "here:1", "--num-processes", "2", "--process-id", "2"], "must lie in 0 … 1, got 2"),
        (["--spawn", "2", "--coordinator", "here:1"], "--spawn starts processes that --coordinator joins, got both"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message, monkeypatch):
    monkeypatch.setattr("engine.commands.cli.leave", lambda code, **_: sys.exit(code))
    done = CliRunner().invoke(main, ["--synthetic", *options])
    assert done.exit_code == 2
    assert message in done.output


def test_modules_of_the_working_directory_do_not_hide_those_of_python(tmp_path):
    (tmp_path / "pathlib.py").write_text("raise RuntimeError('the wrong one')")
    child = [sys.executable, "-c", _PROGRAM, "--version"]
    done = subprocess.run(child, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("run-train, version"), done.stderr


def test_an_option_is_left_out_with_its_value():
    assert without_option(["--a", "1", "--spawn", "2", "--b"], "--spawn") == ["--a", "1", "--b"]
    assert without_option(["--spawn=2", "--b"], "--spawn") == ["--b"]


def test_this_process_is_alone_and_a_wrong_address_is_refused():
    assert (this_process().index, this_process().count) == (0, 1)
    with pytest.raises(ValueError, match="belong together"):
        join_processes("localhost:1")


class Whole:
    """Batches of four images that can only be filled whole."""

    batch, height, width, thread_safe = 4, 4, 4, True

    def fill(self, batch_index, pixels, labels, *, timeout_s):
        del timeout_s
        pixels[...], labels[...] = toy_batch(batch_index, batch=4)


def test_the_rows_of_a_source_are_those_of_the_whole_batch():
    pixels, labels = np.zeros((2, 4, 4), np.uint32), np.zeros(2, np.int32)
    source = rows_of(Whole(), range(2, 4))
    source.fill(3, pixels, labels, timeout_s=1)
    expected = toy_batch(3, batch=4)
    np.testing.assert_array_equal(pixels, expected[0][2:])
    np.testing.assert_array_equal(labels, expected[1][2:])
    whole = Whole()
    assert rows_of(whole, range(4)) is whole
    np.testing.assert_array_equal(rows_alone(3, range(2, 5))[1], toy_batch(3, batch=12)[1][2:5])
