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
        while not ((run / "loss.jsonl").exists() and b"\n" in (run / "loss.jsonl").read_bytes()):
            if process.poll() is not None:
                raise RuntimeError(f"the training ended with exit code {process.returncode} before its first loss")
            if time.perf_counter() - started > TIMEOUT_S:
                raise TimeoutError(f"no loss within {TIMEOUT_S:g} s")
            time.sleep(0.002)
        return time.perf_counter() - started
    finally:
        process.kill()
        process.wait()


def main(kind: str, *program: str) -> None:
    """Serve processes: a training to its first loss, "cached" or "cold", or a `program`."""
    channel = Channel()
    folder = Path.cwd() / "processes" / kind
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    def once() -> float:
        if kind in ("python", "run-train"):
            return run_process([*program] if kind == "python" else ["-c", RUN_TRAIN, *program])
        if kind == "cold":
            shutil.rmtree(folder / "cache", ignore_errors=True)
        return first_loss(folder)

    # Run once before measuring, so that Python's files are in the page cache and programs in the compilation cache.
    if kind != "cold":
        once()
    channel.ready(1)
    channel.serve(lambda num_units: sum(once() for _ in range(num_units)))


if __name__ == "__main__":
    # An installed package has compiled Python files; without them imports would take 0.4 s longer.
    for name in ("JAX_COMPILATION_CACHE_DIR", "PYTHONDONTWRITEBYTECODE"):
        os.environ.pop(name, None)
    main(*sys.argv[1:])
