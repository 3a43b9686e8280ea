"""A whole run: the files that it writes, and how each fault ends it."""

import gc
import json
import os
import signal
import threading
import time
import weakref
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from loopfeed import TrainConfig, train
from loopfeed.engine.crossing.transport import InplaceTransport
from loopfeed.engine.feed.feeder import FeederError
from loopfeed.engine.program.kernels import settle_kernels
from loopfeed.engine.records.snapshot_writer import SnapshotWriter
from loopfeed.engine.run import compiling
from loopfeed.engine.run.run import Run
from loopfeed.engine.run.train import plan_run
from loopfeed.preprocess.shards.reader import ShardError, ShardSplit
from loopfeed.preprocess.stop_signals import BURST_S
from tests.fake_source import fake_source, pack
from tests.small_resnets import small_resnets
from tests.toy import BATCH, CLASSES, SIZE, CountedBatches, Linear, toy_batch, toy_config


class FailingSink:
    """A sink that accepts records up to `full_after`, and then fails."""

    def __init__(self, full_after):
        self.full_after, self.taken, self.closed = full_after, [], False

    def open(self):
        pass

    def write(self, record):
        if len(self.taken) == self.full_after:
            raise OSError(28, "No space left on device", "/mnt/logs")
        self.taken.append(record.step)

    def write_evaluation(self, record):
        pass

    def close(self):
        self.closed = True


def read_steps(run_dir):
    return [json.loads(line)["step"] for line in (run_dir / "loss.jsonl").read_text().splitlines()]


_THREADS = ("feeder", "loss-stream", "worker", "snapshot-writer", "control-mailbox", "notices")


@pytest.fixture
def left_threads():
    """Return the threads that a run left; a source that an earlier test left stuck may end in its own time."""
    before = threading.enumerate()
    return lambda: [
        thread for thread in threading.enumerate() if thread.name.startswith(_THREADS) and thread not in before
    ]


def test_a_run_writes_settings_losses_weights_and_its_result(tmp_path, left_threads):
    config = toy_config(steps=4, run_dir=tmp_path / "run")
    result = train(config, model=Linear(), batches=toy_batch)
    recorded = json.loads((tmp_path / "run/config.json").read_text())
    assert TrainConfig.from_json(recorded["config"]) == settle_kernels(config, "cpu")
    assert recorded["resolved"]["model"] == "linear"
    assert recorded["resolved"]["height"] == SIZE
    assert recorded["versions"]["jax"]
    lines = [json.loads(line) for line in (tmp_path / "run/loss.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert np.array_equal(np.array([line["loss"] for line in lines], np.float32), result.losses)
    assert {line["lr"] for line in lines} == {0.1}
    weights = load_file(tmp_path / "run/model.safetensors")
    assert np.array_equal(weights["params.weights"], result.params["weights"])
    assert weights["batch_stats.batches"] == 4
    end = json.loads((tmp_path / "run/result.json").read_text())
    assert (end["steps_done"], end["stopped_by"], end["error"]) == (4, "steps", None)
    assert not left_threads()


def test_a_source_that_raises_ends_the_run_with_its_own_exception_and_keeps_the_steps_before(tmp_path, left_threads):
    batches = CountedBatches(raise_at=7)
    with pytest.raises(ConnectionResetError, match="the camera went away at step 7") as caught:
        train(toy_config(steps=1000, run_dir=tmp_path, prefetch=3), model=Linear(), batches=batches)
    assert caught.traceback[-1].name == "__call__"
    assert read_steps(tmp_path) == list(range(1, 8))
    assert load_file(tmp_path / "model.safetensors")["batch_stats.batches"] == 7
    end = json.loads((tmp_path / "result.json").read_text())
    assert (end["steps_done"], end["stopped_by"]) == (7, "error")
    assert "the camera went away" in end["error"]
    assert not left_threads()


@pytest.mark.timeout(60)
def test_a_source_that_stalls_ends_the_run_within_the_limit(tmp_path):
    released = threading.Event()

    def stalling(step):
        if step == 2:
            released.wait(30)
        return toy_batch(step)

    started = time.monotonic()
    with pytest.raises(FeederError, match=r"step 3 did not arrive within 0\.5 s"):
        train(toy_config(run_dir=tmp_path, infeed_timeout_s=0.5), model=Linear(), batches=stalling)
    assert time.monotonic() - started < 25  # the 30 s of the stalled source were not waited for
    released.set()
    assert read_steps(tmp_path) == [1, 2]


@pytest.mark.timeout(60)
def test_a_full_disk_under_a_sink_ends_the_run_and_the_other_sinks_get_every_loss(tmp_path):
    sink = FailingSink(full_after=5)
    with pytest.raises(OSError, match="No space left on device"):
        train(toy_config(steps=2_000_000, run_dir=tmp_path), model=Linear(), batches=toy_batch, sinks=[sink])
    assert sink.taken == [1, 2, 3, 4, 5]
    assert sink.closed
    end = json.loads((tmp_path / "result.json").read_text())
    assert end["steps_done"] >= 6
    assert read_steps(tmp_path) == list(range(1, end["steps_done"] + 1))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda pixels, labels: (pixels.astype(np.int64), labels), r"pixels must be uint32 .* int64 \[8, 4, 4\]"),
        (lambda pixels, labels: (pixels, labels[:-1]), r"labels must be integers \[8\].* int64 \[7\] for batch 3"),
        (lambda pixels, labels: (pixels[:, :2], labels), r"shape of the first, .* returned \(8, 2, 4\) for batch 3"),
        (lambda pixels, labels: (pixels, labels + CLASSES), r"labels must lie in 0 … 2, but .* for batch 3"),
        (lambda pixels, labels: pixels, r"but the source returned uint32 \[8, 4, 4\]"),
    ],
)
def test_a_wrong_batch_during_the_run_is_named(bad, message):
    def batches(step):
        good = toy_batch(step)
        return bad(*good) if step == 3 else good

    with pytest.raises(ValueError, match=message):
        train(toy_config(), model=Linear(), batches=batches)


@pytest.fixture
def packed(tmp_path):
    source = fake_source(20, size=8)
    pack(source, tmp_path / "packed")
    return source, tmp_path / "packed"


def test_training_reads_every_image_of_a_packed_split_once_an_epoch(packed, tmp_path, monkeypatch):
    _, data = packed
    read: dict[int, list[int]] = {}
    read_into = ShardSplit.read_into

    def spy(split, indices, pixels, labels, *, timeout_s):
        read_into(split, indices, pixels, labels, timeout_s=timeout_s)
        read[len(read)] = indices.tolist()

    monkeypatch.setattr(ShardSplit, "read_into", spy)
    config = TrainConfig(steps=5, batch=8, data=data, model="resnet8", run_dir=tmp_path / "run", reader_threads=1)
    with small_resnets():
        assert train(config).steps_done == 5  # 40 positions: two epochs of 20, neither a multiple of 8
    images = [image for batch in read.values() for image in batch]
    assert sorted(images[:20]) == sorted(images[20:]) == list(range(20))
    assert images[:20] != images[20:]
    recorded = json.loads((tmp_path / "run/config.json").read_text())
    assert recorded["resolved"]["num_classes"] == 3
    assert recorded["manifest_sha256"]


def damage(shard, how):
    if how == "missing":
        shard.unlink()
    elif how == "flipped":
        content = bytearray(shard.read_bytes())
        content[10] ^= 4
        shard.write_bytes(content)
    else:
        shard.write_bytes(shard.read_bytes()[:50])


@pytest.mark.parametrize("how", ["missing", "flipped", "truncated"])
def test_a_damaged_shard_ends_the_run_naming_the_file(packed, how, tmp_path):
    _, data = packed
    shard = sorted(path for path in (data / "train/pixels").rglob("*") if path.is_file() and path.name != "zarr.json")[
        2
    ]
    damage(shard, how)
    name = shard.relative_to(data / "train").as_posix()
    with small_resnets(), pytest.raises(ShardError, match=name):
        train(TrainConfig(steps=9, batch=4, data=data, model="resnet8", run_dir=tmp_path / "run"))
    done = json.loads((tmp_path / "run/result.json").read_text())["steps_done"]
    assert done < 5  # an epoch is five steps
    assert read_steps(tmp_path / "run") == list(range(1, done + 1))


def test_an_earlier_run_is_not_overwritten_unless_asked(tmp_path):
    train(toy_config(run_dir=tmp_path, steps=2), model=Linear(), batches=toy_batch)
    with pytest.raises(ValueError, match=r"must be new.*overwrite=True"):
        train(toy_config(run_dir=tmp_path), model=Linear(), batches=toy_batch)
    assert read_steps(tmp_path) == [1, 2]
    train(toy_config(run_dir=tmp_path, overwrite=True, steps=3), model=Linear(), batches=toy_batch)
    assert read_steps(tmp_path) == [1, 2, 3]


def test_a_plan_compiles_and_runs_nothing(tmp_path, left_threads):
    batches = CountedBatches()
    plan = plan_run(toy_config(run_dir=tmp_path / "run"), model=Linear(), batches=batches)
    assert batches.calls == [0]  # for its shape
    assert isinstance(plan.compiled.keeps, InplaceTransport)
    assert not (tmp_path / "run").exists()
    assert plan.run.num_params == SIZE * SIZE * 3 * CLASSES + CLASSES
    assert plan.compiled.memory_bytes["arguments"] > plan.run.num_params * 8  # parameters and momentum
    # Forward and weight gradient of one matrix product are the least that a step does.
    assert plan.compiled.step_flops is not None
    assert plan.compiled.step_flops >= 4 * BATCH * SIZE * SIZE * 3 * CLASSES
    assert not left_threads()


class FalsyError(Exception):
    """An exception whose truth value is False."""

    def __len__(self):
        return 0


def test_a_failure_whose_truth_value_is_false_is_a_failure():
    def batches(step):
        if step == 2:
            raise FalsyError
        return toy_batch(step)

    with pytest.raises(FalsyError):
        train(toy_config(steps=9), model=Linear(), batches=batches)


class Returning(Linear):
    """A model whose `apply` returns an invalid value."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def apply(self, params, batch_stats, images, train):
        return self.change(*super().apply(params, batch_stats, images, train))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda logits, _: logits,
            r"a tuple \(logits, batch_stats\), but that of linear returned float32 \[8, 3\]: return",
        ),
        (
            lambda logits, stats: (logits[0], stats),
            r"logits must be a float array \[8, K\], but apply of \w+ returned float32 \[3\]",
        ),
        (
            lambda logits, stats: ((logits, logits), stats),
            r"logits must be .* of linear returned a tuple of 2 in",
        ),
        (lambda logits, stats: ([logits, logits], stats), r"logits must be .* apply of linear returned a list of 2 in"),
        (lambda logits, stats: (logits.argmax(1), stats), r"logits must be a float array .* returned int32 \[8\]"),
        (lambda logits, stats: (logits[:, :2], stats), r"at least 3 logits per image, .*, but returns 2: change its"),
        (lambda logits, _: (logits, {}), "batch statistics with the keys, shapes and dtypes of its argument"),
        (lambda logits, _: (logits, {"batches": logits}), r"got .*'float32\[\]'.* returned .*'float32\[8, 3\]'"),
    ],
)
def test_a_model_that_returns_something_else_is_refused(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(toy_config(run_dir=tmp_path / "run"), model=Returning(change), batches=toy_batch)
    assert not (tmp_path / "run").exists()  # nothing was launched


def test_labels_are_held_to_the_models_classes_where_nothing_else_tells_them():
    def batches(step):
        pixels, labels = toy_batch(step)
        return pixels, labels + (step >= when)

    for when in (0, 3):
        with pytest.raises(ValueError, match=rf"labels must lie in 0 … 2, but .* 3 for batch {when}"):
            train(toy_config(num_classes=None), model=Linear(), batches=batches)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "resnet8"}, r"a model must have the functions init and apply, got str: .*TrainConfig\(model=…\)"),
        ({"batches": iter([])}, "batches must be a function from the step .* got list_iterator"),
        (
            {"batches": SimpleNamespace(fill=lambda step, pixels, labels, *, timeout_s: None)},
            r"fill of the source of batches, SimpleNamespace, must take \(batch_index, .* takes \(step, pixels",
        ),
        ({"config": {"steps": 1}}, r"the settings must be a TrainConfig, got dict"),
        ({"config": toy_config(model="resnet8")}, "the setting model must not be given .* got 'resnet8'"),
        ({"config": toy_config(data="data/shards")}, "the setting data must not be given .* got 'data/shards'"),
        ({"config": toy_config(synthetic=True)}, "the setting synthetic must not be given .* got True"),
    ],
)
def test_arguments_of_another_kind_or_without_effect_are_refused(arguments, message):
    given = {"config": toy_config(), "model": Linear(), "batches": toy_batch} | arguments
    with pytest.raises(ValueError, match=message):
        train(given.pop("config"), **given)


def test_a_failure_before_the_launch_leaves_the_folder_as_it_was(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")

    def stats_differ(logits, stats):
        return logits, {"other": 1.0}

    with pytest.raises(ValueError, match="batch statistics"):
        train(toy_config(run_dir=tmp_path), model=Returning(stats_differ), batches=toy_batch)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    train(toy_config(run_dir=tmp_path), model=Linear(), batches=toy_batch)


def test_a_program_that_fails_leaves_its_end_and_its_losses(tmp_path):
    def fail(step):
        if step == 3:
            raise ArithmeticError("the model's own callback")

    class Failing(Linear):
        def apply(self, params, batch_stats, images, train):
            logits, stats = super().apply(params, batch_stats, images, train)
            jax.debug.callback(fail, batch_stats["batches"])
            return logits, stats

    with pytest.raises(Exception, match="the model's own callback") as caught:
        train(toy_config(steps=9, run_dir=tmp_path), model=Failing(), batches=toy_batch)
    end = json.loads((tmp_path / "result.json").read_text())
    assert end["stopped_by"] == "error"
    assert "the model's own callback" in end["error"]
    assert end["steps_done"] == len(read_steps(tmp_path))
    assert end["snapshot_step"] is None
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("transport", ["inplace", "callback", "cuda"])
def test_no_memory_of_a_failed_run_remains_after_its_error_is_released(transport, cards):
    batches = CountedBatches(raise_at=3)
    watched = weakref.ref(batches)
    with pytest.raises(ConnectionResetError):
        train(toy_config(steps=9, transport=transport), model=Linear(), batches=batches)
    del batches
    gc.collect()
    assert watched() is None


def test_a_failed_program_writes_the_pending_snapshot_and_says_how_to_resume(tmp_path, monkeypatch):
    def run(launch, compiled, state, sinks):
        launch_run(launch, compiled, state, sinks)
        raise ArithmeticError("the card fell off the bus")

    def write_late(writer, submitted):
        # Whoever does not wait for it misses it.
        time.sleep(0.3)
        return write(writer, submitted)

    launch_run, write = Run.execute, SnapshotWriter._write_one
    monkeypatch.setattr(Run, "execute", run)
    monkeypatch.setattr(SnapshotWriter, "_write_one", write_late)
    with pytest.raises(ArithmeticError, match="off the bus") as caught:
        train(toy_config(steps=6, run_dir=tmp_path, snapshot_every_steps=4), model=Linear(), batches=toy_batch)
    assert json.loads((tmp_path / "result.json").read_text())["snapshot_step"] == 4
    assert "from step 4; resume from it: train with replace(loopfeed.run_settings(" in caught.value.__notes__[0]


def test_an_abandoned_run_names_the_reason_and_how_to_resume(tmp_path):
    go_on = threading.Event()

    def compute_for_long(step):
        if step == 6:
            deadline = time.monotonic() + 60
            while not (tmp_path / "snapshots/4").exists() and time.monotonic() < deadline:
                time.sleep(0.005)
            for _ in range(2):
                time.sleep(2 * BURST_S)
                os.kill(os.getpid(), signal.SIGINT)
            go_on.wait(60)

    class Long(Linear):
        def apply(self, params, batch_stats, images, train):
            jax.debug.callback(compute_for_long, batch_stats["batches"])
            return super().apply(params, batch_stats, images, train)

    config = toy_config(steps=50, run_dir=tmp_path, snapshot_every_steps=4)
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            train(config, model=Long(), batches=toy_batch)
    finally:
        go_on.set()
    end = json.loads((tmp_path / "result.json").read_text())
    assert (end["stopped_by"], end["error"], end["snapshot_step"]) == ("SIGINT", None, 4)
    assert caught.value.__notes__[0].startswith(
        "the last good snapshot is from step 4; resume from it: train with replace("
    )


def test_interrupting_the_last_snapshot_of_a_failed_program_still_shows_the_failure(tmp_path, monkeypatch):
    go_on, told = threading.Event(), []

    def run(launch, compiled, state, sinks):
        def fail(*_):
            run_loop(launch, compiled, state, launch.values())
            raise ArithmeticError("the card fell off the bus")

        monkeypatch.setattr(Run, "_run_loop", fail)
        return launch_run(launch, compiled, state, sinks)

    def notify(words):
        told.append(words)
        if "waiting for the snapshot" in words:
            os.kill(os.getpid(), signal.SIGINT)

    launch_run, run_loop = Run.execute, Run._run_loop
    monkeypatch.setattr(Run, "execute", run)
    monkeypatch.setattr(SnapshotWriter, "_write_one", lambda *_: go_on.wait(60))
    config = toy_config(steps=6, run_dir=tmp_path, snapshot_every_steps=4)
    try:
        with pytest.raises(ArithmeticError, match="off the bus"):
            train(config, model=Linear(), batches=toy_batch, notify=notify)
        assert told[-1] == "ArithmeticError: waiting for the snapshot of step 4; press Ctrl-C to abandon it"
        assert "off the bus" in json.loads((tmp_path / "result.json").read_text())["error"]
        # What writes it still must meet nobody else there.
        with pytest.raises(ValueError, match="in use by"):
            train(toy_config(run_dir=tmp_path, resume=True), model=Linear(), batches=toy_batch)
    finally:
        go_on.set()


def test_weights_that_cannot_be_exported_do_not_hide_the_failure_before_them(tmp_path, monkeypatch):
    def refuse(*_):
        raise TypeError("no such dtype on disk")

    monkeypatch.setattr("loopfeed.engine.run.recorder.name_tensors", refuse)
    with pytest.raises(ConnectionResetError) as caught:
        train(toy_config(steps=9, run_dir=tmp_path), model=Linear(), batches=CountedBatches(raise_at=3))
    unwritten, goes_on, _ = caught.value.__notes__
    assert "no such dtype on disk" in unwritten
    assert goes_on == (
        f"the last good snapshot is from step 3; resume from it: train with replace(loopfeed.run_settings("
        f"'{tmp_path}'), resume=True) and the same model and batches"
    )
    assert json.loads((tmp_path / "result.json").read_text())["steps_done"] == 3
    with pytest.raises(TypeError, match="no such dtype on disk"):
        train(toy_config(run_dir=tmp_path, overwrite=True), model=Linear(), batches=toy_batch)
    assert json.loads((tmp_path / "result.json").read_text())["steps_done"] == 5


def test_a_key_in_the_statistics_is_exported_as_its_numbers(tmp_path):
    class Random(Linear):
        def init(self, key):
            params, _ = super().init(key)
            return params, {"batches": jax.numpy.zeros(()), "key": key}

        def apply(self, params, batch_stats, images, train):
            logits, stats = super().apply(params, {"batches": batch_stats["batches"]}, images, train)
            return logits, stats | {"key": jax.random.split(batch_stats["key"])[0]}

    train(toy_config(run_dir=tmp_path), model=Random(), batches=toy_batch)
    assert load_file(tmp_path / "model.safetensors")["batch_stats.key"].dtype == np.uint32


def test_two_tensors_of_one_name_are_refused_before_the_run():
    class Doubled(Linear):
        def init(self, key):
            params, stats = super().init(key)
            return params | {"a.b": params["bias"], "a": {"b": params["bias"]}}, stats

    with pytest.raises(ValueError, match=r"two are called params\.a\.b"):
        train(toy_config(), model=Doubled(), batches=toy_batch)


def test_two_concurrent_runs_in_one_process_restore_the_jax_settings():
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    results = []
    threads = [
        threading.Thread(
            target=lambda seed=seed: results.append(train(toy_config(seed=seed), model=Linear(), batches=toy_batch))
        )
        for seed in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [result.steps_done for result in results] == [5, 5, 5]
    after = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    assert after == before


def test_a_process_in_64_bit_mode_trains():
    jax.config.update("jax_enable_x64", True)
    try:
        result = train(toy_config(steps=3), model=Linear(), batches=toy_batch)
    finally:
        jax.config.update("jax_enable_x64", False)
    assert result.losses.dtype == np.float32
    assert np.isfinite(result.losses).tolist() == [True, True, True]


def test_the_collector_waits_until_the_program_runs_and_collects_in_the_run(monkeypatch):
    seen = []
    starting_state, run = compiling.starting_state, Run.execute

    def look(launch):
        seen.append(gc.isenabled())
        return starting_state(launch)

    def look_again(launch, *arguments):
        seen.append(gc.isenabled())
        return run(launch, *arguments)

    def batches(step):
        if step == 7:
            wait_for_collector()
        seen.append(gc.isenabled())
        return toy_batch(step)

    def wait_for_collector():
        deadline = time.monotonic() + 60
        while not gc.isenabled() and time.monotonic() < deadline:
            time.sleep(0.01)

    monkeypatch.setattr(compiling, "starting_state", look)
    monkeypatch.setattr(Run, "execute", look_again)
    train(toy_config(steps=8, prefetch=1), model=Linear(), batches=batches)
    assert seen[:3] == [True, False, False]  # the first batch is asked for ahead, for its shape
    assert seen[-1]  # the last batch is read after the first loss


@pytest.mark.parametrize("steps", [1, 2])
def test_the_collector_collects_after_a_short_or_failed_run(monkeypatch, steps):
    def fail(_):
        raise OSError("no memory for the state")

    train(toy_config(steps=steps), model=Linear(), batches=toy_batch)
    assert gc.isenabled()
    monkeypatch.setattr(compiling, "starting_state", fail)
    with pytest.raises(OSError, match="no memory for the state"):
        train(toy_config(steps=steps), model=Linear(), batches=toy_batch)
    assert gc.isenabled()
