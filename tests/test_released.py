"""What a process keeps of a run after its end: nothing, however many runs there were before."""

import gc
import threading
import time
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from PIL import Image

from loopfeed import RunningStats, batch_norm, convolution, evaluate, predict, train
from loopfeed.models.layers.platform_forms import tracing_for
from tests.toy import CountedBatches, Linear, toy_batch, toy_config


def num_objects():
    """Return the number of objects that Python's collector knows, but for weak references: jax leaves dead ones."""
    gc.collect()
    return sum(type(each) is not weakref.ref for each in gc.get_objects())


@pytest.mark.parametrize("platform", ["cpu", "cuda", None])
def test_tracing_again_keeps_nothing_of_the_time_before(platform):
    x, running = jnp.ones((2, 4, 4, 3)), RunningStats(jnp.zeros(3), jnp.ones(3))

    def outputs(x, kernel):
        x = convolution(x, kernel, padding=((1, 1), (1, 1)), groups=3)
        return batch_norm(x, jnp.ones(3), jnp.zeros(3), running, train=True)[0].sum()

    def trace():
        with tracing_for(platform):
            jax.jit(jax.grad(lambda *arguments: outputs(*arguments), (0, 1))).trace(x, jnp.ones((3, 3, 1, 3)))
        return num_objects()

    *_, before, after = trace(), trace(), trace(), trace()
    assert after == before


def kept():
    """Return what this process keeps, without a collection."""
    files = Path("/proc/self/fd")
    return {
        "arrays": len(jax.live_arrays()),
        "programs": len(jax.devices()[0].client.live_executables()),
        "threads": sorted(each.name for each in threading.enumerate()),
        "descriptors": len(list(files.iterdir())) if files.is_dir() else None,
    }


def test_the_end_of_a_run_releases_its_program_arrays_threads_files_and_parts_at_once(tmp_path):
    config = toy_config(run_dir=tmp_path / "run", overwrite=True, eval_every_steps=2)
    plain = toy_config()
    watched = []

    def part():
        batches = CountedBatches()
        watched.append(weakref.ref(batches))
        return batches

    def fail():
        with pytest.raises(ConnectionResetError):
            # The frames of the error, which also its source refers to, wait for the collector.
            train(plain, model=Linear(), batches=CountedBatches(raise_at=3))

    runs = {
        "recorded": lambda: train(config, model=Linear(), batches=part(), evaluation=toy_batch(99)),
        "evaluated": lambda: evaluate(tmp_path / "run", model=Linear(), evaluation=toy_batch(99)),
        "own": lambda: train(plain, model=Linear(), batches=part()),
        "failed": fail,
    }
    for run in runs.values():
        run()
    num_objects()
    gc.disable()
    try:
        before = kept()
        for name, run in runs.items():
            watched.clear()
            run()
            assert (name, kept(), [each() for each in watched]) == (name, before, [None] * len(watched))
    finally:
        gc.enable()


def test_a_run_starts_no_thread_where_one_like_it_ended(tmp_path, monkeypatch):
    config = toy_config(run_dir=tmp_path / "run", overwrite=True, eval_every_steps=2)

    def run():
        train(config, model=Linear(), batches=toy_batch, evaluation=toy_batch(99))

    run()
    started, start = [], threading.Thread.start

    def note(thread):
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", note)
    run()
    assert started == []


def test_the_threads_of_a_prediction_end_with_it(tmp_path):
    train(toy_config(run_dir=tmp_path / "run"), model=Linear(), batches=toy_batch)
    photographs = [Image.new("RGB", (9, 9)), Image.new("RGB", (7, 8))]
    for _ in range(3):
        assert len(predict(tmp_path / "run", photographs, model=Linear()).labels) == 2
    deadline = time.monotonic() + 30
    while (left := [each for each in threading.enumerate() if each.name.startswith("photographs")]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.01)
    assert left == []
