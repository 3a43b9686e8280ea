"""The time of whole processes, from start to end, or to the first line of a file that they write."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from protocol import Channel

TIMEOUT_S = 600.0
RUN_TRAIN = "import sys; sys.argv[0] = 'run-train'; from loopfeed.engine.commands.cli import main; main()"
TRAINING = ("--synthetic", "--image-size", "64", "--model", "resnet50", "--batch", "16", "--steps", "2")


def run_process(arguments: list[str]) -> float:
    """Run a process to its end and return the seconds."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, timeout=TIMEOUT_S, check=True)
    return time.perf_counter() - started


def first_loss(folder: Path) -> float:
    """Start a training, wait for its first loss on disk, kill it, and return the seconds until then."""
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    arguments = [*TRAINING, "--run-dir", str(run), "--compilation-cache", str(folder / "cache")]
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", RUN_TRAIN, *arguments], stdout=subprocess.DEVNULL)
    try:
        while not has_line(run / "loss.jsonl"):
            if process.poll() is not None:
                raise RuntimeError(f"the training ended with exit code {process.returncode} before its first loss")
            if time.perf_counter() - started > TIMEOUT_S:
                raise TimeoutError(f"no loss within {TIMEOUT_S:g} s")
            time.sleep(0.002)
        return time.perf_counter() - started
    finally:
        process.kill()
        process.wait()


def has_line(path: Path) -> bool:
    """Return whether a file has a complete line."""
    return path.exists() and b"\n" in path.read_bytes()


def main(kind: str) -> None:
    """Serve processes."""
    channel = Channel()
    folder = Path.cwd() / "processes" / kind
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    def cold(num_units: int) -> float:
        seconds = 0.0
        for _ in range(num_units):
            shutil.rmtree(folder / "cache", ignore_errors=True)
            seconds += first_loss(folder)
        return seconds

    def cached(num_units: int) -> float:
        return sum(first_loss(folder) for _ in range(num_units))

    def processes(*arguments: str) -> float:
        return run_process(list(arguments))

    runs = {
        "nothing": lambda num_units: sum(processes("-c", "pass") for _ in range(num_units)),
        "jax": lambda num_units: sum(processes("-c", "import jax") for _ in range(num_units)),
        "engine": lambda num_units: sum(processes("-c", "import loopfeed") for _ in range(num_units)),
        "train": lambda num_units: sum(processes("-c", "from loopfeed import train") for _ in range(num_units)),
        "help": lambda num_units: sum(processes("-c", RUN_TRAIN, "--help") for _ in range(num_units)),
        "cold": cold,
        "cached": cached,
    }
    # Run once before measuring, so that Python's files are in the page cache and programs in the compilation cache.
    if kind != "cold":
        runs[kind](1)
    channel.ready(1)
    channel.serve(runs[kind])


if __name__ == "__main__":
    # An installed package has compiled Python files; without them imports would take 0.4 s longer.
    for name in ("JAX_COMPILATION_CACHE_DIR", "PYTHONDONTWRITEBYTECODE"):
        os.environ.pop(name, None)
    main(sys.argv[1])
