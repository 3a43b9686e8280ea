"""The time of whole processes, from start to end, or to the first line of a file that they write."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from protocol import Channel

TIMEOUT_S = 600.0
RUN_TRAIN = ("-c", "import sys; sys.argv[0] = 'run-train'; from loopfeed.engine.commands.cli import main; main()")
TRAINING = ("--synthetic", "--image-size", "64", "--model", "resnet50", "--batch", "16", "--steps", "2")


def run_process(*arguments: str, until: Path | None = None) -> float:
    """Run a process to its end, or kill it once there is a line in a file, and return the seconds until then."""
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    try:
        if until is None:
            if process.wait(TIMEOUT_S):
                raise RuntimeError(f"the process ended with exit code {process.returncode}")
            return time.perf_counter() - started
        while not (until.exists() and b"\n" in until.read_bytes()):
            if process.poll() is not None:
                raise RuntimeError(f"the process ended with exit code {process.returncode} before it wrote {until}")
            if time.perf_counter() - started > TIMEOUT_S:
                raise TimeoutError(f"nothing in {until} within {TIMEOUT_S:g} s")
            time.sleep(0.002)
        return time.perf_counter() - started
    finally:
        process.kill()
        process.wait()


def main(kind: str, *program: str) -> None:
    """Serve processes: a training to its first loss, "cached" or "cold", or a `program`."""
    channel = Channel()
    folder = Path.cwd() / "processes" / kind
    run, cache = folder / "run", folder / "cache"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    def once() -> float:
        if kind in ("python", "run-train"):
            return run_process(*(() if kind == "python" else RUN_TRAIN), *program)
        for old in (run, cache) if kind == "cold" else (run,):
            shutil.rmtree(old, ignore_errors=True)
        arguments = (*TRAINING, "--run-dir", str(run), "--compilation-cache", str(cache))
        return run_process(*RUN_TRAIN, *arguments, until=run / "loss.jsonl")

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
