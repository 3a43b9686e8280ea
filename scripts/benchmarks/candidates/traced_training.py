"""A training on a card under jax's profiler: `WARM_STEPS`, then `TRACED_STEPS` that are traced, then `LAST_STEPS`.

A gate holds back the source, so that the profiler starts and stops while the program waits for batches, and only whole
steps are traced, each from its first kernel on. A process traces once. With the word "rehearse" the profile is only
listed, because a processor's has no streams of kernels.
"""

import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
from gated_training import LONG_S, GatedBatches, LastLoss
from pulls import ReadyBatches

from loopfeed import TrainConfig, train
from loopfeed.engine.crossing.cuda.driver import CudaDriver
from scripts.benchmarks.card_trace import Waits, describe, read_trace

WARM_STEPS, TRACED_STEPS, LAST_STEPS = 40, 60, 20


def count_waits() -> dict[str, Waits]:
    """Make the driver record each wait for an event, by the thread that waits; return the records."""
    waits: dict[str, Waits] = {}
    synchronize = CudaDriver.synchronize
    names = {"cuda-copies": "the thread that copies", "cuda-collector": "the thread that collects losses"}

    def timed_synchronize(driver: CudaDriver, event: int) -> None:
        started_ns = time.perf_counter_ns()
        synchronize(driver, event)
        name = names.get(threading.current_thread().name, "the program, for what it asks the host")
        before = waits.get(name, Waits(0, 0.0))
        waits[name] = Waits(before.count + 1, before.total_ns + time.perf_counter_ns() - started_ns)

    CudaDriver.synchronize = timed_synchronize  # type: ignore[method-assign, assignment]
    return waits


def main(model: str, size: int, batch: int, num_classes: int, precision: str, rehearse: str = "") -> None:
    """Train, trace, and print the results of the trace."""
    waits = count_waits()
    gate, sink, ended = GatedBatches(ReadyBatches(batch, size)), LastLoss(), threading.Event()
    settings: dict[str, Any] = {"model": model, "num_classes": num_classes, "precision": precision, "eval_split": "off"}
    # The gate blocks the program for as long as the profiler takes.
    settings |= {"batch": batch, "learning_rate": 1e-3, "infeed_timeout_s": LONG_S}
    config = TrainConfig(steps=WARM_STEPS + TRACED_STEPS + LAST_STEPS, **settings)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            train(config, batches=gate, sinks=[sink])
        except BaseException as error:
            failures.append(error)
            raise
        finally:
            ended.set()

    def make_steps(first: int, last: int) -> None:
        sink.begin(first, last)
        gate.open_to(last)
        sink.wait(ended)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    make_steps(1, WARM_STEPS)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 3
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        waits.clear()
        make_steps(WARM_STEPS + 1, WARM_STEPS + TRACED_STEPS)
        seen = dict(waits)
        jax.profiler.stop_trace()
        make_steps(WARM_STEPS + TRACED_STEPS + 1, config.steps)
        thread.join()
        if failures:
            raise failures[0]
        (written,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(written))
        if rehearse:
            print(
                f"rehearsal: the profile of {TRACED_STEPS} steps has {', '.join(each.name for each in profile.planes)}"
            )
            return
        trace = read_trace(profile)
    print(f"trace of {model} {size} px b{batch} {precision}, batches at hand")
    for line in describe(trace, seen, TRACED_STEPS):
        print(f"  {line}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
