"""What runs record of their runtime: a slow part of each kind is named, and launches add up."""

import io
import json
import os
import re
import shutil
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from loopfeed import train
from loopfeed.engine.feed.batches import ArrayBatches
from loopfeed.engine.feed.feed_meter import FeedMeter, WaitNow
from loopfeed.engine.feed.feeder import FeederError
from loopfeed.engine.records.run_folder import RUNTIME, STALLS, WRITTEN_HERE
from loopfeed.engine.records.stored.capture import FolderCapture
from loopfeed.engine.records.stored.state import Part
from loopfeed.engine.run import recorder
from loopfeed.engine.run.launch_meter import LaunchMeter
from loopfeed.engine.runtime.record import Goodput
from loopfeed.engine.runtime.runtime_file import encode_runtime, read_runtime
from loopfeed.engine.spans import EVALUATION, LOOP, PUSH, SNAPSHOT, Spans
from loopfeed.engine.stream import lane
from loopfeed.engine.stream.sinks import PlainSink
from loopfeed.preprocess.read_meter import CHECK, ReadMeter
from loopfeed.preprocess.shards import mapped_shards
from loopfeed.preprocess.shards.mapped_images import MappedImages
from tests.fake_source import fake_source, pack
from tests.toy import Linear, toy_batch, toy_config

pytestmark = pytest.mark.timeout(120)
STEPS, SLOW_S = 60, 0.02


def run(**values):
    parts: dict[str, Any] = {"model": Linear(), "batches": toy_batch}
    parts |= {
        name: values.pop(name)
        for name in ("model", "batches", "evaluation", "sinks", "callbacks", "notify")
        if name in values
    }
    return train(toy_config(**({"steps": STEPS, "chunk_batches": 1} | values)), **parts)


def slow_batch(step):
    time.sleep(SLOW_S)
    return toy_batch(step)


def recorded(folder):
    report = read_runtime(folder)
    assert report is not None
    return report


def check_adds_up(runtime):
    for launch in runtime.launches:
        assert np.isclose(launch.goodput.total, launch.wall_s, atol=0.2)
        assert all(seconds >= 0 for seconds in vars(launch.goodput).values())


@pytest.fixture(scope="module")
def slept(tmp_path_factory):
    """A run whose source sleeps at every step, with its folder."""
    folder = tmp_path_factory.mktemp("runs") / "slept"
    result = run(batches=slow_batch, run_dir=str(folder), snapshot_every_steps=20, keep_snapshots=0)
    return SimpleNamespace(result=result, folder=folder, launch=result.runtime.last)


def test_a_sleep_in_the_source_appears_step_for_step(slept):
    launch = slept.launch
    assert launch.verdict.bound_by == "source"
    line = r"the run was bound by the source of its batches: the loop waited \d\d % .* your own batches.*"
    assert re.fullmatch(line, launch.verdict.line)
    assert launch.pulls.count == launch.pulls.waits.count == STEPS
    # A step takes a small part of the sleep, also on a busy machine, so nearly every step waits.
    assert 0.2 * STEPS * SLOW_S < launch.pulls.waits.total_s < launch.wall_s
    assert np.isclose(launch.pulls.wait_s_by_stage["source"], launch.pulls.waits.total_s)
    assert launch.reader.source_s > (STEPS - 1) * SLOW_S
    assert launch.reader.bytes == launch.pulls.bytes == STEPS * 8 * (4 * 4 + 1) * 4
    assert len(launch.stalls) == 20
    assert {(stall.stage, stall.shard) for stall in launch.stalls} == {("source", None)}
    assert all(1 <= stall.step <= STEPS for stall in launch.stalls)


def test_a_resumed_run_adds_a_launch_and_counts_what_it_makes_again(slept, tmp_path):
    """The folder is as after a kill between steps 40 and 60."""
    folder = tmp_path / "killed"
    shutil.copytree(slept.folder, folder)
    for name in ("result.json", "model.safetensors"):
        (folder / name).unlink()
    shutil.rmtree(folder / "snapshots/60")
    before = recorded(folder)
    killed = replace(before.last, state="running", verdict=None, ended=before.last.ended - 0.1)
    (folder / RUNTIME).write_bytes(encode_runtime(replace(before, launches=(killed,))))
    lines = [json.loads(line) for line in (folder / "loss.jsonl").read_text().splitlines()]
    runtime = run(batches=toy_batch, run_dir=str(folder), resume=True).runtime
    first, second = runtime.launches
    assert (first.state, second.state, second.start_step, second.end_step) == ("running", "done", 40, 60)
    assert second.lost_steps == runtime.goodput.lost_steps == 20
    assert np.isclose(second.lost_s, lines[59]["time"] - lines[39]["time"], atol=0.01)
    assert runtime.goodput.gaps > 0
    assert np.isclose(runtime.goodput.total, first.wall_s + second.wall_s, atol=0.3)
    assert (folder / RUNTIME).read_bytes() == encode_runtime(runtime)


def test_a_resume_that_is_killed_after_the_rewind_has_recorded_what_it_takes_back(slept, tmp_path, monkeypatch):
    folder = tmp_path / "killed"
    shutil.copytree(slept.folder, folder)
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "snapshots/60")

    def die(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(recorder, "rewind_run", die)
        with pytest.raises(KeyboardInterrupt):
            run(run_dir=str(folder), resume=True)
    begun = recorded(folder).last
    assert (begun.state, begun.start_step, begun.end_step, begun.lost_steps) == ("running", 40, 40, 20)
    assert begun.lost_s > 0
    # The lines are still there, and are not counted again.
    runtime = run(run_dir=str(folder), resume=True).runtime
    assert [each.lost_steps for each in runtime.launches] == [0, 20, 0]
    assert runtime.goodput.lost_steps == 20
    assert runtime.goodput.lost == begun.lost_s


@pytest.mark.parametrize("content", [None, b"{}"], ids=["without", "damaged"])
def test_a_run_of_an_earlier_release_resumes(slept, tmp_path, content):
    folder = tmp_path / "run"
    said: list[str] = []
    shutil.copytree(slept.folder, folder)
    (folder / RUNTIME).unlink()
    if content is not None:
        (folder / RUNTIME).write_bytes(content)
    runtime = run(run_dir=str(folder), resume=True, steps=STEPS + 2, notify=said.append).runtime
    assert [(each.start_step, each.end_step) for each in runtime.launches] == [(STEPS, STEPS + 2)]
    assert any("is not a record of launches" in line for line in said) == (content is not None)
    assert runtime.last.verdict.bound_by == "unknown"


def test_a_stored_run_has_the_files(slept, tmp_path):
    contents: dict[Part, bytes] = {}

    def put(content):
        contents[Part.of(content)] = content
        return Part.of(content)

    files = FolderCapture(slept.folder, None).take(put)
    assert b"".join(contents[part] for part in files[RUNTIME]) == (slept.folder / RUNTIME).read_bytes()
    assert {RUNTIME, STALLS} <= set(WRITTEN_HERE)


class SlowModel(Linear):
    """A linear model after which the device computes for long."""

    def apply(self, params, batch_stats, images, train):
        logits, stats = super().apply(params, batch_stats, images, train)
        waste = lax.fori_loop(0, 40, lambda _, x: jnp.tanh(x @ x / 200), jnp.full((200, 200), logits[0, 0]))
        return logits + 1e-30 * waste[0, 0], stats


@pytest.mark.integration  # compiling it takes seconds
def test_a_slow_model_names_the_device():
    launch = run(model=SlowModel(), steps=40).runtime.last
    assert launch.verdict.bound_by == "device", launch.verdict.line
    check_adds_up(SimpleNamespace(launches=[launch]))


def test_slow_snapshots_name_the_disk(tmp_path, monkeypatch):
    sync = os.fsync

    def slow_sync(handle):
        time.sleep(0.1)  # snapshots of less than a second in all name nothing
        sync(handle)

    monkeypatch.setattr(os, "fsync", slow_sync)
    launch = run(run_dir=str(tmp_path / "run"), snapshot_every_steps=5).runtime.last
    assert launch.verdict.bound_by == "snapshots", launch.verdict.line
    assert "disk" in launch.verdict.advice
    assert launch.snapshots.num_skipped > 0
    assert launch.snapshots.end_wait_s > 0.2 * launch.goodput.snapshots


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    data = tmp_path_factory.mktemp("packed")
    pack(fake_source(200), data, shard_images=100)
    return data


@pytest.mark.parametrize(
    ("owner", "name", "noun", "stage"),
    [(MappedImages, "copy", "reading", "read"), (mapped_shards, "crc32c", "checking", "check")],
)
def test_a_throttled_reader_is_named(packed, monkeypatch, owner, name, noun, stage):
    fast = getattr(owner, name)
    # Long enough for a verdict, however fast the machine is.
    delay_s = 2 * SLOW_S if name == "copy" else SLOW_S / 4

    def slow(*arguments):
        time.sleep(delay_s)
        return fast(*arguments)

    monkeypatch.setattr(owner, name, slow)
    # Three epochs would check no image twice.
    launch = run(batches=None, data=str(packed), reader_threads=1, steps=25, loss="cross-entropy").runtime.last
    assert launch.verdict.bound_by == noun, launch.verdict.line
    assert f"({stage} " in launch.verdict.evidence
    assert max(launch.pulls.wait_s_by_stage, key=launch.pulls.wait_s_by_stage.__getitem__) == stage
    shards = {stall.shard for stall in launch.stalls if stall.shard is not None}
    assert shards <= {f"{packed}/train/pixels/c/{shard}/0/0" for shard in (0, 1)}
    assert shards


def test_a_blocked_terminal_is_named(monkeypatch):
    monkeypatch.setattr(lane, "MOST_QUEUED", 1)

    class SlowTerminal(io.StringIO):
        def write(self, text):
            time.sleep(SLOW_S)
            return super().write(text)

    launch = run(sinks=[PlainSink(SlowTerminal(), steps=STEPS)], steps=40).runtime.last
    assert launch.verdict.bound_by == "terminal", launch.verdict.line
    assert launch.pushes.blocked_by == "PlainSink"
    assert launch.goodput.waiting >= launch.pushes.blocked_s > 0.3


def test_a_source_that_blocks_is_named_with_the_stacks_of_all_threads(tmp_path):
    released, continues = threading.Event(), threading.Event()
    said: list[str] = []

    def say(line):
        said.append(line)
        # The second warning comes after twice the time.
        if sum("the batch of step 9" in each for each in said) == 2:
            released.set()
        if "the run continues" in line and released.is_set():
            continues.set()

    def source_that_blocks(step):
        if step == 8:
            assert released.wait(60)
        if step == 12:
            assert continues.wait(60)
        return toy_batch(step)

    result = run(batches=source_that_blocks, steps=20, stall_warn_s=0.2, run_dir=str(tmp_path / "run"), notify=say)
    assert result.steps_done == 20
    # On a busy machine other steps may take as long.
    warnings = [line for line in said if "the batch of step 9" in line]
    assert len(warnings) >= 2
    assert all(
        re.fullmatch(
            r"warning: no step for [\d.]+ s: the loop waits for the batch of step 9: the source of the batches has "
            r"taken [\d.]+ s so far \(thread feeder-0\)",
            line,
        )
        for line in warnings
    )
    assert any(re.fullmatch(r"the run continues after [\d.]+ s without a step", line) for line in said)
    text = (tmp_path / "run" / STALLS).read_text()
    assert text.count("=" * 80) == sum("no step for" in line for line in said)
    for part in ("Thread feeder-0 (", "source_that_blocks", "Thread MainThread (", "the batch of step 9"):
        assert part in text
    stall = result.runtime.last.stalls[0]
    assert (stall.step, stall.stage) == (9, "source")
    assert stall.wait_s > 0.3


def test_a_wait_that_ends_the_run_is_waiting(tmp_path):
    released = threading.Event()

    def source_that_hangs(step):
        if step == 12:
            released.wait(30)
        return toy_batch(step)

    said: list[str] = []
    with pytest.raises(FeederError):
        run(batches=source_that_hangs, run_dir=str(tmp_path / "run"), infeed_timeout_s=1, stall_warn_s=0.2,
            notify=said.append)  # fmt: skip
    released.set()
    launch = recorded(tmp_path / "run").last
    assert launch.goodput.waiting > 0.9
    assert launch.pulls.wait_s_by_stage["source"] > 0.9
    assert (launch.stalls[0].step, launch.stalls[0].stage) == (13, "source")
    check_adds_up(SimpleNamespace(launches=[launch]))
    warned = [at for at, line in enumerate(said) if "no step for 0." in line]
    assert not any("continues" in line for line in said[warned[-1] :])


def test_the_waits_of_evaluations_are_theirs(monkeypatch):
    fill = ArrayBatches.fill

    def slow_fill(*arguments, **values):
        time.sleep(SLOW_S)
        fill(*arguments, **values)

    monkeypatch.setattr(ArrayBatches, "fill", slow_fill)
    # Training waits for its first batch as well, which may take long on a busy machine.
    launch = run(evaluation=toy_batch(99), eval_every_steps=2, prefetch=1).runtime.last
    pulls = launch.pulls
    assert (
        pulls.evaluation_wait_s
        == sum(pulls.evaluation_wait_s_by_stage.values())
        > 0.2 * SLOW_S * pulls.evaluation_count
    )
    stalls = [stall for stall in launch.stalls if stall.phase == "evaluation"]
    assert stalls
    assert all(stall.stage == "source" and stall.step % 2 == 0 for stall in stalls)
    assert launch.verdict.bound_by == "source"
    assert "for the evaluation's data (source" in launch.verdict.evidence


def test_what_runs_is_described_by_whom_it_waits_for():
    """The parts of a launch as they are in each situation, without a program."""
    spans, outfeed = Spans(), SimpleNamespace(step=7)
    spans[LOOP].begin()
    stream = SimpleNamespace(blocked_by=None, unfinished=list)
    infeed = SimpleNamespace(num_together=4)
    transport = SimpleNamespace(runs_ahead=False)
    config, profiling = toy_config(steps=20, accumulate_steps=2), SimpleNamespace(is_collecting=False)
    train, evaluation = FeedMeter(ReadMeter()), FeedMeter(ReadMeter())
    meter: Any = LaunchMeter.__new__(LaunchMeter)
    meter._launch = SimpleNamespace(
        outfeed=outfeed,
        stream=stream,
        infeed=infeed,
        transport=transport,
        config=config,
        profiling=profiling,
    )
    meter._training, meter._meters = SimpleNamespace(num_ready=0), {"train": train, "evaluation": evaluation}
    meter._snapshots, meter._spans = None, spans
    meter._num_pulled, meter._pulled_at = 0, 0.0
    assert meter.describe() == "the device has been computing steps 8 to 9 (--chunk) for 0.0 s"
    infeed.num_together = 1
    assert meter.describe() == "the device has been computing step 8 for 0.0 s"
    train.waiting = WaitNow(15, time.perf_counter())
    assert meter.describe() == "the loop waits for the batch of step 8, which no thread is reading"
    reading = train.readings.here()
    reading.begin(15)
    reading.enter(CHECK)
    reading.visit("c/3")
    assert meter.describe().startswith("the loop waits for the batch of step 8: checking images of c/3 has taken 0.0 s")
    train.waiting = None
    evaluation.waiting = WaitNow(3, time.perf_counter())
    assert meter.describe().startswith("the loop waits for the batch of an evaluation, which no thread")
    spans[PUSH].begin()
    assert meter.describe() == "the outfeed has been receiving for 0.0 s"
    stream.blocked_by = "PlainSink"
    assert meter.describe() == "the loop waits until the sink PlainSink accepts losses"
    spans[LOOP].end()
    meter._snapshots = SimpleNamespace(unwritten_step=20)
    assert meter.describe() == "the steps are done, and the run waits until the snapshot of step 20 is on the disk"
    profiling.is_collecting = True
    assert meter.describe() == "the steps are done, and the run waits until the profile is collected"
    profiling.is_collecting = False
    stream.unfinished = lambda: ["RunFolderSink"]
    assert meter.describe().endswith("waits until the sink RunFolderSink has accepted all losses")


def test_the_ring_is_sampled_while_the_loop_pulls():
    spans, feeder = Spans(), SimpleNamespace(start_index=5, stop_index=8, num_taken=0, num_ready=2)
    meter: Any = LaunchMeter.__new__(LaunchMeter)
    meter._spans, meter._training = spans, feeder
    assert meter.sample_ring() is None
    spans[LOOP].begin()
    assert meter.sample_ring().num_ready == 2
    feeder.num_taken = 3
    assert meter.sample_ring() is None
    feeder.num_taken = 2
    spans[LOOP].end()
    assert meter.sample_ring() is None


def test_batches_are_progress_and_pushes_without_a_step_are_none():
    spans, outfeed = Spans(), SimpleNamespace(step=3)
    stream = SimpleNamespace(num_evaluation_pulls=0, num_taken=9)
    meter: Any = LaunchMeter.__new__(LaunchMeter)
    meter._launch, meter._spans = SimpleNamespace(outfeed=outfeed, stream=stream), spans
    meter._training, meter._snapshots = SimpleNamespace(num_taken=16), None
    meter._num_pulled, meter._pulled_at = 16, 0.0
    before = meter.progress()
    spans[PUSH].add(1.0)
    assert meter.progress() == before
    for name in (EVALUATION, SNAPSHOT):
        spans[name].add(1.0)
        assert meter.progress() != before
        before = meter.progress()
    outfeed.step += 1
    assert meter.progress() != before
    before = meter.progress()
    meter._training.num_taken += 1
    assert meter.progress() != before
    assert meter._pulled_at > 0


def test_a_run_folder_that_refuses_the_record_warns_once(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "loopfeed.engine.records.run_folder.RunFolder.write_monitoring",
        lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")),
    )
    said: list[str] = []
    result = run(steps=5, run_dir=str(tmp_path / "run"), notify=said.append)
    assert result.stopped_by == "steps"
    assert [line for line in said if RUNTIME in line] == [
        "warning: runtime.json could not be written (No space left on device); the run continues without it"
    ]
    assert isinstance(result.runtime.last.goodput, Goodput)
