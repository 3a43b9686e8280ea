"""Details that a run guarantees, each of which was once broken."""

import gc
import json
import threading
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest

import loopfeed.engine.records.run_folder
from loopfeed import train
from loopfeed.engine.control.board import ControlBoard, encode_control
from loopfeed.engine.records.folder_lock import FolderLock
from loopfeed.engine.records.whole_file import write_whole
from loopfeed.engine.run import compiling, resume
from loopfeed.engine.run.train import plan_run
from tests.fake_source import fake_source, files_of, pack
from tests.toy import BATCH, SIZE, Linear, toy_batch, toy_config

IMAGE_BYTES = 4 * SIZE * SIZE
LABEL_BYTES = 4


class Records:
    """A sink that keeps every record, and signals the arrival of a step."""

    def __init__(self, awaited=0):
        self.losses, self.awaited, self.has_come = [], awaited, threading.Event()

    def open(self):
        pass

    def write(self, record):
        self.losses.append(record)
        if record.step == self.awaited:
            self.has_come.set()

    def write_evaluation(self, record):
        pass

    def close(self):
        pass


def run_and_record(**values):
    records = Records()
    result = train(toy_config(steps=12, **values), model=Linear(), batches=toy_batch, sinks=[records])
    return result.losses, np.array([record.lr for record in records.losses], np.float32)


def test_the_control_words_factor_multiplies_the_learning_rate_of_the_update_and_of_the_record(monkeypatch):
    whole_losses, whole_rates = run_and_record(learning_rate=0.1)
    half_losses, half_rates = run_and_record(learning_rate=0.05)
    monkeypatch.setattr(ControlBoard, "words", lambda _board, _pull, num_batches: encode_control(0, 0.5, num_batches))
    losses, rates = run_and_record(learning_rate=0.1)
    # To the bit: a half is a power of two.
    np.testing.assert_array_equal(losses, half_losses)
    np.testing.assert_array_equal(rates, half_rates)
    np.testing.assert_array_equal(rates, whole_rates / 2)
    assert losses[0] == whole_losses[0]
    assert not np.array_equal(losses, whole_losses)


def test_the_program_works_in_the_memory_of_the_state_that_it_is_given(monkeypatch):
    monkeypatch.setattr("loopfeed.engine.run.compiling._SAID_AFTER_S", 0.001)
    told: list[str] = []
    plan = plan_run(toy_config(), model=Linear(), batches=toy_batch, notify=told.append)
    assert "still compiling, after 0 s" in told
    # Float32 parameters at the least; the optimiser's state comes on top.
    assert plan.compiled.memory_bytes["reused"] >= 4 * plan.run.num_params


@pytest.mark.parametrize("level", [0, 255])
def test_blank_images_train(level, tmp_path):
    source = fake_source(12, size=SIZE)
    pack(source.changed(images=np.full_like(source.images, level)), tmp_path)
    config = toy_config(steps=6, data=tmp_path, num_classes=None)
    assert np.isfinite(train(config, model=Linear()).losses).all()


def test_all_64_bits_of_the_seed_have_an_effect():
    seeds = (5, 5 + 2**32, 5 + 2**62)
    first = [
        float(train(toy_config(steps=1, seed=seed), model=Linear(), batches=toy_batch).losses[0]) for seed in seeds
    ]
    assert len(set(first)) == len(seeds)


def test_the_wait_for_batches_is_reported_per_step_and_in_total():
    slow_step, sleep_s = 3, 0.5
    records = Records(awaited=slow_step)

    def sleeping(step):
        if step == slow_step:
            assert records.has_come.wait(30)  # the program is then at its next pull
            time.sleep(sleep_s)
        return toy_batch(step)

    result = train(toy_config(steps=5), model=Linear(), batches=sleeping, sinks=[records])
    by_step = {record.step: record.wait_ms for record in records.losses}
    # The rest is for a machine that is slow to go from the third update to its next pull.
    assert by_step[slow_step + 1] >= 200
    assert result.wait_s == pytest.approx(sum(by_step.values()) / 1e3)
    assert result.train_s >= sleep_s
    assert result.train_s >= result.wait_s


def test_weights_that_cannot_be_written_fail_an_otherwise_successful_run(tmp_path, monkeypatch):
    def full(path, content):
        if path.name == "model.safetensors":
            raise OSError(28, "No space left on device", str(path))
        write_whole(path, content)

    monkeypatch.setattr(loopfeed.engine.records.run_folder, "write_whole", full)
    with pytest.raises(OSError, match=r"No space left on device.*model\.safetensors"):
        train(toy_config(steps=3, run_dir=tmp_path / "run"), model=Linear(), batches=toy_batch)
    end = json.loads((tmp_path / "run/result.json").read_text())
    assert end["steps_done"] == 3
    assert "No space left on device" in end["error"]


def test_a_run_without_steps_writes_its_result_and_no_weights(tmp_path):
    result = train(toy_config(steps=0, run_dir=tmp_path / "run"), model=Linear(), batches=toy_batch)
    assert result.steps_done == 0
    assert json.loads((tmp_path / "run/result.json").read_text())["steps_done"] == 0
    assert not (tmp_path / "run/model.safetensors").exists()


@pytest.mark.parametrize(("prefetch", "depth", "evaluation_depth"), [(1, 1, 1), (3, 3, 3), (None, 4, 64)])
def test_the_memory_of_the_batches_read_ahead_is_reported_exactly(prefetch, depth, evaluation_depth):
    batch_bytes = BATCH * (IMAGE_BYTES + LABEL_BYTES)
    config = toy_config(prefetch=prefetch)
    assert plan_run(config, model=Linear(), batches=toy_batch).run.ring_bytes == depth * batch_bytes
    evaluated = plan_run(config, model=Linear(), batches=toy_batch, evaluation=toy_batch(0, batch=20))
    assert evaluated.run.ring_bytes == (depth + evaluation_depth) * batch_bytes


def test_a_state_that_cannot_be_made_while_the_program_is_compiled_ends_the_run_with_its_own_error(
    tmp_path, monkeypatch
):
    def fail(_launch):
        raise MemoryError("no room for the state")

    monkeypatch.setattr(compiling, "starting_state", fail)
    with pytest.raises(MemoryError, match="no room for the state"):
        train(toy_config(run_dir=tmp_path / "run"), model=Linear(), batches=toy_batch)
    # Nothing goes on behind it.
    assert not [thread for thread in threading.enumerate() if thread.name == "worker"]


def test_a_dry_run_with_snapshots_needs_no_folder():
    assert plan_run(toy_config(snapshot_every_steps=2), model=Linear(), batches=toy_batch).run.num_params
    with pytest.raises(ValueError, match="the setting snapshot_every_steps needs a run folder"):
        train(toy_config(snapshot_every_steps=2), model=Linear(), batches=toy_batch)


def test_a_dry_run_refuses_the_folder_that_the_run_would_refuse(tmp_path):
    config = toy_config(run_dir=tmp_path / "run")
    plan_run(config, model=Linear(), batches=toy_batch)
    assert list(tmp_path.iterdir()) == []
    train(config, model=Linear(), batches=toy_batch)
    before = files_of(tmp_path)
    with pytest.raises(ValueError, match=r"the run folder must be new, but .* contains config\.json of an earlier run"):
        plan_run(config, model=Linear(), batches=toy_batch)
    again = replace(config, overwrite=True)
    plan_run(again, model=Linear(), batches=toy_batch)
    assert files_of(tmp_path) == before
    with FolderLock(tmp_path / "run"):
        for refused in (again, replace(config, resume=True)):
            with pytest.raises(ValueError, match="is in use by process"):
                plan_run(refused, model=Linear(), batches=toy_batch)


def test_the_snapshot_that_a_run_is_resumed_from_is_released_before_its_first_step(tmp_path, monkeypatch):
    config = toy_config(steps=3, run_dir=tmp_path / "run")
    train(config, model=Linear(), batches=toy_batch)
    read, held = resume.start_at, []

    def start_at(snapshot, events):
        held.append(weakref.ref(snapshot))
        return read(snapshot, events)

    def batches(step):
        gc.collect()
        if step > 3:  # asked for by the loop; the first batch is asked for while the run is set up
            released.append(held[0]() is None)
        return toy_batch(step)

    released: list[bool] = []
    monkeypatch.setattr(resume, "start_at", start_at)
    train(replace(config, steps=6, resume=True), model=Linear(), batches=batches)
    assert released
    assert all(released)


def test_a_run_without_a_split_to_evaluate_on_says_so_at_its_start(tmp_path):
    pack(fake_source(12, size=SIZE), tmp_path)
    config = toy_config(data=tmp_path, num_classes=None)
    heard: list[str] = []
    plan_run(config, model=Linear(), notify=heard.append)
    (told,) = [line for line in heard if "--holdout" in line]
    assert told.startswith(f"{tmp_path} has no val or test split, so the run will not be evaluated")
    for eval_split in "off", "train":
        heard.clear()
        plan_run(replace(config, eval_split=eval_split), model=Linear(), notify=heard.append)
        assert "--holdout" not in "\n".join(heard)
