"""Runs of several processes on this machine, for `tests/test_processes.py` and `tests/test_supervisors.py`."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROGRAM = "from loopfeed.engine.commands.cli import main; main(prog_name='run-train')"
MODULE = "tests.device_runs"
OWN = ["--model", f"{MODULE}:Showing", "--batches", f"{MODULE}:slow_batches", "--metrics", f"{MODULE}:METRICS"]
# The metrics show which images the model saw.
TOY = [*OWN, "--batch", "12", "--num-classes", "3", "--flip", "0.5", "--erasing", "0.5"]


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
            is_child = b"LOOPFEED_BEAT_FILE" in (path.parent / "environ").read_bytes()
        except OSError:
            continue
        if is_child and str(folder) in line and line[line.index("--process-id") + 1] == str(number):
            found.append(int(path.parent.name))
    return found


def resumed(folder: Path, steps: int) -> list[dict[str, Any]]:
    """Continue a run in one process, and return its losses."""
    run(*OWN, "--run-dir", str(folder), "--resume", "--steps", str(steps))
    return records(folder)
