"""The command control-run beside a running process: its output, its files and its exit codes."""

import errno
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from loopfeed.engine.commands import control_cli
from loopfeed.engine.commands.control_cli import main
from loopfeed.engine.control.request import ControlEvent, ControlRequest
from loopfeed.engine.records.control_log import CONTROL_LOG_NAME, ControlLog, read_events
from loopfeed.engine.records.control_requests import CONTROL_FOLDER_NAME, ControlMailbox, send_request
from loopfeed.engine.records.folder_lock import FolderLock
from tests.waiting import wait_until

LIMIT_S = 60
COMMAND = [sys.executable, "-c", "from loopfeed.engine.commands.control_cli import main; main()"]


class FakeRun:
    """A process at work in a run folder, played by threads: it holds the lock, and logs what it is asked for.

    Args:
        folder: of the run.
        pull: at which requests take effect.
        takes_up: False leaves requests where they are; "silently" takes them and logs nothing.
    """

    def __init__(self, folder: Path, pull: int = 512, takes_up: bool | str = True) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}")
        self.folder, self.pull, self.takes_up = folder, pull, takes_up
        self.requests: list[ControlRequest] = []
        self._log = ControlLog(folder / CONTROL_LOG_NAME)
        self._lock = FolderLock(folder)
        self._mailbox = ControlMailbox(folder, self._take_up)

    def __enter__(self) -> "FakeRun":
        self._lock.acquire()
        if self.takes_up:
            self._mailbox.start()
        return self

    def __exit__(self, *_) -> None:
        self._mailbox.close()
        self._log.close()
        self.end()

    def end(self) -> None:
        self._lock.release()

    def _take_up(self, request: ControlRequest) -> None:
        self.requests.append(request)
        if self.takes_up != "silently":
            self.log(request)

    def log(self, request: ControlRequest) -> None:
        asked = (request.learning_rate_factor, request.snapshot, request.evaluate, request.stop)
        self._log.append(ControlEvent(self.pull, self.pull + 1, *asked, request.id, time.time()))


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch):
    monkeypatch.setattr("loopfeed.engine.records.control_requests._POLL_EVERY_S", 0.005)
    monkeypatch.setattr("loopfeed.engine.commands.control_cli._POLL_EVERY_S", 0.005)


def control(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


def left(run: Path) -> list[str]:
    folder = run / CONTROL_FOLDER_NAME
    return [path.name for path in folder.iterdir()] if folder.exists() else []


# --- what takes effect


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (["--learning-rate-factor", "0.1"], ["learning-rate factor 0.1 from step 513"]),
        (["--learning-rate-factor", "0"], ["learning-rate factor 0 from step 513"]),
        (["--learning-rate-factor", "2"], ["learning-rate factor 2 from step 513"]),
        (["--snapshot"], ["snapshot after step 513"]),
        (["--evaluate"], ["evaluation after step 513"]),
        (["--stop"], ["stopping before step 513"]),
        (
            ["--evaluate", "--snapshot", "--learning-rate-factor", "1e-5"],
            ["learning-rate factor 1e-05 from step 513", "snapshot after step 513", "evaluation after step 513"],
        ),
    ],
)
def test_the_step_at_which_a_request_took_effect_is_printed(tmp_path, options, lines):
    with FakeRun(tmp_path) as run:
        result = control(tmp_path, *options)
        assert (result.stdout.splitlines(), result.stderr, result.exit_code) == (lines, "", 0)
        (request,) = run.requests
    assert request.learning_rate_factor == (float(options[-1]) if "--learning-rate-factor" in options else None)
    assert (request.snapshot, request.evaluate, request.stop) == tuple(
        option in options for option in ("--snapshot", "--evaluate", "--stop")
    )
    assert [event.request for event in read_events(tmp_path / CONTROL_LOG_NAME)] == [request.id]
    assert left(tmp_path) == []


def test_concurrent_calls_are_all_answered(tmp_path):
    with FakeRun(tmp_path):
        arguments = [*COMMAND, str(tmp_path), "--learning-rate-factor"]
        factors = ["0.5", "0.25", "0.125"]
        processes = [
            subprocess.Popen([*arguments, factor], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for factor in factors
        ]
        outputs = [process.communicate(timeout=LIMIT_S) for process in processes]
    assert outputs == [(f"learning-rate factor {factor} from step 513\n", "") for factor in factors]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(read_events(tmp_path / CONTROL_LOG_NAME)) == 3


# --- what does not


def test_a_run_that_has_ended_is_refused_at_once(tmp_path):
    with FakeRun(tmp_path):
        pass
    result = control(tmp_path, "--snapshot", "--timeout", "inf")
    assert result.stderr == (
        f"Error: the run in {tmp_path} must still be training, but it has ended; resume it with run-train --resume\n"
    )
    assert (result.stdout, result.exit_code, left(tmp_path)) == ("", 1, [])
    assert not (tmp_path / CONTROL_FOLDER_NAME).exists()


@pytest.mark.parametrize(
    ("prepare", "found"),
    [
        (lambda run: None, "does not exist"),
        (lambda run: run.mkdir(), "contains no config.json"),
        (lambda run: run.write_text(""), "is a file"),
    ],
)
def test_a_folder_that_is_not_a_run_is_wrong_usage(tmp_path, prepare, found):
    prepare(tmp_path / "run")
    result = control(tmp_path / "run", "--stop")
    assert result.exit_code == 2
    assert result.stderr == (
        f"Error: RUN must be a run folder, but {tmp_path / 'run'} {found}; "
        "give the --run-dir of a run that is still training\n"
    )


def test_a_request_that_is_not_accepted_is_withdrawn(tmp_path):
    with FakeRun(tmp_path, takes_up=False):
        result = control(tmp_path, "--stop", "--timeout", "0.02")
    assert result.exit_code == 1
    assert result.stderr == (
        f"Error: {tmp_path} did not accept the request within 0.02 s (--timeout), so it was withdrawn from control/: "
        "check whether the run still makes progress, or raise --timeout\n"
    )
    assert (result.stdout, left(tmp_path)) == ("", [])


def test_a_request_that_waits_in_the_run_is_reported_as_waiting(tmp_path, monkeypatch):
    def send_and_wait(folder, request):
        send_request(folder, request)
        wait_until(lambda: run.requests)

    monkeypatch.setattr(control_cli, "send_request", send_and_wait)
    with FakeRun(tmp_path, takes_up="silently") as run:
        result = control(tmp_path, "--stop", "--timeout", "0.01")
    assert result.exit_code == 1
    assert result.stderr == (
        f"Error: {tmp_path} accepted the request, but did not start a step or chunk within 0.01 s (--timeout). The "
        "request takes effect at the next one (see control.jsonl); raise --timeout to wait longer\n"
    )


@pytest.mark.parametrize("takes_up", [False, "silently"])
def test_waiting_stops_when_the_run_ends(tmp_path, monkeypatch, takes_up):
    def send_and_end(folder, request):
        send_request(folder, request)
        if takes_up:
            wait_until(lambda: run.requests)
        run.end()

    monkeypatch.setattr(control_cli, "send_request", send_and_end)
    with FakeRun(tmp_path, takes_up=takes_up) as run:
        result = control(tmp_path, "--snapshot", "--timeout", "inf")
    assert result.exit_code == 1
    assert result.stderr == (
        f"Error: {tmp_path} ended before the request took effect: resume the run with run-train --resume\n"
    )
    assert (result.stdout, left(tmp_path)) == ("", [])


def test_a_request_accepted_before_the_end_took_effect(tmp_path, monkeypatch):
    def send_and_end(folder, request):
        send_request(folder, request)
        wait_until(lambda: read_events(folder / CONTROL_LOG_NAME))
        run.end()

    monkeypatch.setattr(control_cli, "send_request", send_and_end)
    with FakeRun(tmp_path) as run:
        result = control(tmp_path, "--stop")
    assert (result.stdout, result.exit_code) == ("stopping before step 513\n", 0)


def test_an_unreadable_log_is_refused_before_a_request_is_sent(tmp_path):
    with FakeRun(tmp_path) as run:
        (tmp_path / CONTROL_LOG_NAME).write_text("half a li\n")
        result = control(tmp_path, "--stop")
        assert run.requests == []
    assert result.exit_code == 1
    assert re.fullmatch(r"Error: .*line 1 of .*control\.jsonl is not a valid event .*\n", result.stderr)
    assert left(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_named_in_one_line(tmp_path):
    with FakeRun(tmp_path):
        (tmp_path / CONTROL_FOLDER_NAME).write_text("")
        result = control(tmp_path, "--stop")
    assert result.exit_code == 1
    assert re.fullmatch(
        r"Error: .*control.* cannot be read or written \(.*\): choose another path, .*\n", result.stderr
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            [],
            "a request is needed, got none: give at least one of "
            "--learning-rate-factor, --snapshot, --evaluate, --stop",
        ),
        (["--timeout", "5"], "a request is needed, got none"),
        (["--stop", "--snapshot"], "--stop cannot be combined with --snapshot, "),
        (["--stop", "--evaluate"], "--stop cannot be combined with --evaluate, "),
        (["--stop", "--learning-rate-factor", "1"], "--stop cannot be combined with --learning-rate-factor, "),
        (["--learning-rate-factor", "nan"], "must be 0 or from 1.2e-38 to 3.4e38, got nan; 1 restores the schedule"),
        (["--learning-rate-factor", "-0.1"], "must be 0 or from 1.2e-38 to 3.4e38, got -0.1"),
        (["--learning-rate-factor", "1e39"], "must be 0 or from 1.2e-38 to 3.4e38, got 1e+39"),
        (["--learning-rate-factor", "x"], "'x' is not a valid float"),
        (["--stop", "--timeout", "nan"], "must be a number, got nan"),
        (["--stop", "--timeout", "0"], "0.0 is not in the range x>0"),
    ],
)
def test_wrong_usage_sends_no_request(tmp_path, options, message):
    with FakeRun(tmp_path) as run:
        result = control(tmp_path, *options)
        assert run.requests == []
    assert (result.stdout, result.exit_code) == ("", 2)
    assert message in " ".join(result.stderr.split())
    assert left(tmp_path) == []


@pytest.fixture
def start():
    """Starts the command beside this process; it does not outlive the test."""
    started = []

    def start_one(*arguments) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [*COMMAND, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
        return started[-1]

    yield start_one
    for process in started:
        process.kill()
        process.communicate(timeout=LIMIT_S)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("takes_up", "words"),
    [(False, ""), ("silently", "too late to withdraw the request: the run has already accepted it\n")],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_an_interrupt_during_sending_reports_the_request(tmp_path, monkeypatch, number, takes_up, words, is_late):
    def send_and_break(folder, request):
        if not is_late:
            signal.raise_signal(number)
        send_request(folder, request)
        if takes_up:
            wait_until(lambda: run.requests)
        if is_late:
            signal.raise_signal(number)

    monkeypatch.setattr(control_cli, "send_request", send_and_break)
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with FakeRun(tmp_path, takes_up=takes_up) as run:
        result = control(tmp_path, "--stop")
    assert (result.stdout, result.stderr) == ("", words)
    assert result.exit_code == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    assert left(tmp_path) == []
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def test_an_interrupt_during_a_disk_failure_reports_no_request(tmp_path, monkeypatch):
    def fail(_folder, _request):
        signal.raise_signal(signal.SIGINT)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(control_cli, "send_request", fail)
    with FakeRun(tmp_path):
        result = control(tmp_path, "--stop")
    assert (result.stdout, result.stderr, result.exit_code) == ("", "", 130)


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_an_interrupt_withdraws_the_request(tmp_path, start, number, exit_code):
    with FakeRun(tmp_path, takes_up=False):
        process = start(tmp_path, "--stop")
        wait_until(lambda: left(tmp_path) and left(tmp_path)[0].endswith(".json"))
        process.send_signal(number)
        out, err = process.communicate(timeout=LIMIT_S)
    assert (out, err, process.returncode) == ("", "", exit_code)
    assert left(tmp_path) == []


# --- how it starts
