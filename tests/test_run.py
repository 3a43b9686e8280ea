import json
import threading
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from engine import TrainConfig, train
from engine.feeder import FeederError
from engine.run import plan_run
from preprocess.shards import ShardError, ShardSplit
from tests.fake_source import fake_source, pack
from tests.toy import BATCH, CLASSES, SIZE, CountedBatches, Linear, toy_batch, toy_config


class FailingSink:
    """Takes records until `full_after`, then is full."""

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


def feedloop_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith(("feeder", "loss-stream", "worker"))]


def test_a_run_leaves_settings_losses_weights_and_its_end(tmp_path):
    config = toy_config(steps=4, run_dir=tmp_path / "run")
    result = train(config, model=Linear(), batches=toy_batch)
    recorded = json.loads((tmp_path / "run/config.json").read_text())
    assert TrainConfig.from_json(recorded["config"]) == config
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
    assert not feedloop_threads()


def test_a_source_that_raises_ends_the_run_with_its_own_exception_and_keeps_the_steps_before(tmp_path):
    batches = CountedBatches(raise_at=7)
    with pytest.raises(ConnectionResetError, match="the camera went away at step 7") as caught:
        train(toy_config(steps=1000, run_dir=tmp_path, prefetch=3), model=Linear(), batches=batches)
    assert caught.traceback[-1].name == "__call__"
    assert read_steps(tmp_path) == list(range(1, 8))
    assert load_file(tmp_path / "model.safetensors")["batch_stats.batches"] == 7
    end = json.loads((tmp_path / "result.json").read_text())
    assert (end["steps_done"], end["stopped_by"]) == (7, "error")
    assert "the camera went away" in end["error"]
    assert not feedloop_threads()


@pytest.mark.timeout(60)
def test_a_source_that_stalls_ends_the_run_within_the_limit(tmp_path):
    released = threading.Event()

    def stalling(step):
        if step == 2:
            released.wait(30)
        return toy_batch(step)

    started = time.monotonic()
    with pytest.raises(FeederError, match=r"step 3 must be there within 0\.5 s"):
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
        (lambda pixels, labels: (pixels, labels[:-1]), r"labels must be integers \[8\].* int64 \[7\] at step 3"),
        (lambda pixels, labels: (pixels[:, :2], labels), r"shape of the first, .* gave \(8, 2, 4\) at step 3"),
        (lambda pixels, labels: (pixels, labels + CLASSES), r"labels must lie in 0 … 2; .* at step 3"),
        (lambda pixels, labels: pixels, r"a tuple \(pixels, labels\); the source gave ndarray"),
    ],
)
def test_a_wrong_batch_in_mid_run_is_named(bad, message):
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
    assert train(config).steps_done == 5  # 40 positions: two epochs of 20, neither a multiple of 8
    images = [image for batch in read.values() for image in batch]
    assert sorted(images[:20]) == sorted(images[20:]) == list(range(20))
    assert images[:20] != images[20:]
    recorded = json.loads((tmp_path / "run/config.json").read_text())
    assert recorded["resolved"]["num_classes"] == 3
    assert recorded["manifest_sha256"]


def test_a_data_set_smaller_than_a_batch_trains(packed):
    _, data = packed
    assert train(TrainConfig(steps=2, batch=64, data=data, model="resnet8")).steps_done == 2


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
    with pytest.raises(ShardError, match=name):
        train(TrainConfig(steps=9, batch=4, data=data, model="resnet8", run_dir=tmp_path / "run"))
    done = json.loads((tmp_path / "run/result.json").read_text())["steps_done"]
    assert done < 5  # an epoch is five steps
    assert read_steps(tmp_path / "run") == list(range(1, done + 1))


def test_a_manifest_of_a_newer_version_is_refused(packed):
    _, data = packed
    manifest = data / "train/manifest.json"
    manifest.write_text(manifest.read_text().replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(ShardError, match="version 2"):
        train(TrainConfig(steps=1, data=data))


def test_an_earlier_run_is_not_overwritten_unless_asked(tmp_path):
    train(toy_config(run_dir=tmp_path, steps=2), model=Linear(), batches=toy_batch)
    with pytest.raises(ValueError, match=r"must be new.*--overwrite"):
        train(toy_config(run_dir=tmp_path), model=Linear(), batches=toy_batch)
    assert read_steps(tmp_path) == [1, 2]
    train(toy_config(run_dir=tmp_path, overwrite=True, steps=3), model=Linear(), batches=toy_batch)
    assert read_steps(tmp_path) == [1, 2, 3]


def test_a_plan_compiles_and_runs_nothing(tmp_path):
    batches = CountedBatches()
    plan = plan_run(toy_config(run_dir=tmp_path / "run"), model=Linear(), batches=batches)
    assert batches.calls == [0]  # for its shape
    assert not (tmp_path / "run").exists()
    assert plan.num_params == SIZE * SIZE * 3 * CLASSES + CLASSES
    assert plan.compiled.memory_bytes["arguments"] > plan.num_params * 8  # parameters and momentum
    # Forward and weight gradient of one matrix product are the least that a step does.
    assert plan.compiled.step_flops is not None
    assert plan.compiled.step_flops >= 4 * BATCH * SIZE * SIZE * 3 * CLASSES
    assert not feedloop_threads()


def test_a_model_of_your_own_may_be_called_like_one_of_the_registry(tmp_path):
    train(toy_config(run_dir=tmp_path), model=Linear(name="resnet18"), batches=toy_batch)
    assert "params.weights" in load_file(tmp_path / "model.safetensors")
