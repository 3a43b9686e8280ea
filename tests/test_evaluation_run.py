"""Evaluation of trained weights outside the loop: the same numbers as in the loop, and refused combinations."""

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from loopfeed import TrainConfig, evaluate, evaluate_weights, run_settings, train
from loopfeed.engine.feed.feeder import FeederError
from loopfeed.engine.records.folder_lock import FolderLock
from loopfeed.engine.records.weights import with_digest
from loopfeed.preprocess.shards.classes import ImageClass
from loopfeed.preprocess.shards.reader import open_split
from tests.fake_source import fake_source, pack
from tests.test_tally import evaluation_set
from tests.toy import BATCH, Linear, toy_batch, toy_config

pytestmark = pytest.mark.usefixtures("small_resnets")

NUM_IMAGES = 2 * BATCH + 3
NUM_EVALUATED = 11


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Packed images of 8 px: 20 to train on, 11 and 7 to evaluate on, so that every last batch is padded."""
    folder = tmp_path_factory.mktemp("data")
    pack(fake_source(20, size=8), folder)
    pack(fake_source(NUM_EVALUATED, size=8, seed=1, name="val"), folder)
    pack(fake_source(7, size=8, seed=2, name="other"), folder)
    return folder


@pytest.fixture(scope="module")
def trained(data, small_resnets, tmp_path_factory):
    """Return the folder and the last evaluation of a run with crops and averaged weights."""
    run = tmp_path_factory.mktemp("runs") / "run"
    config = TrainConfig(
        steps=3, batch=4, data=os.fspath(data), model="resnet8", image_size=6, ema_decay=0.5, run_dir=os.fspath(run)
    )
    (found,) = train(config).evaluations
    return run, found


def numbers(record):
    return record.num_images, record.top1, record.loss


@pytest.mark.usefixtures("cards")
@pytest.mark.parametrize("transport", ["inplace", "callback", "cuda"])
def test_an_evaluation_equals_the_last_one_of_the_run(trained, transport):
    run, found = trained
    result = evaluate(replace(run_settings(run), transport=transport))
    assert numbers(result.record) == numbers(found)
    assert result.record.step == found.step == 3
    assert result.num_top1 == found.top1 * NUM_EVALUATED
    assert result.num_top5 is None  # of three classes
    assert result.classes == ()


@pytest.mark.usefixtures("cards")
@pytest.mark.parametrize("transport", ["inplace", "cuda"])
def test_an_evaluation_of_a_model_of_your_own_equals_that_of_its_run(tmp_path, transport):
    config = toy_config(steps=7, learning_rate=0.02, run_dir=tmp_path, ema_decay=0.8, transport=transport)
    (found,) = train(config, model=Linear(), batches=toy_batch, evaluation=evaluation_set(NUM_IMAGES)).evaluations
    model = Linear()
    result = evaluate(tmp_path, model=model, evaluation=evaluation_set(NUM_IMAGES))
    assert numbers(result.record) == numbers(found)
    assert model.traces == [False]


def test_weights_that_are_older_than_the_run_are_reported(tmp_path):
    config = toy_config(steps=2, run_dir=tmp_path)
    train(config, model=Linear(), batches=toy_batch)

    def told():
        notices: list[str] = []
        evaluate(tmp_path, model=Linear(), evaluation=evaluation_set(NUM_IMAGES), notify=notices.append)
        return [each for each in notices if "continued" in each]

    assert told() == []
    # As if the run had been resumed and killed: it first removes its result, and the last line may be torn.
    (tmp_path / "result.json").unlink()
    assert told() == []
    log = tmp_path / "loss.jsonl"
    row = json.loads(log.read_text().splitlines()[-1])
    with log.open("a") as file:
        file.write(json.dumps(row | {"step": 3}) + "\n" + json.dumps(row | {"step": 4})[:20])
    expected = "warning: the weights are those of step 2, but the run continued to step 3 and has written none since: "
    assert told() == [f"{expected}resume it with train(…, resume=True) to get its last weights"]
    with FolderLock(tmp_path):
        assert told() == [f"{expected}wait for it to end to get its last weights"]
    log.unlink()
    assert told() == []


def test_classes_are_counted_one_by_one(trained, data):
    run, found = trained
    result = evaluate(run, per_class=True)
    assert numbers(result.record) == numbers(found)
    assert [each.id for each in result.classes] == ["n1", "n2", "n3"]
    assert [each.name for each in result.classes] == ["tench", "goldfish", "great white shark"]
    assert [each.num_images for each in result.classes] == [4, 4, 3]
    assert sum(each.num_top1 for each in result.classes) == result.num_top1


def test_another_split_can_be_named_and_the_training_split_too(trained):
    run, _ = trained
    told: list[str] = []
    for split, count in (("other", 7), ("train", 20)):
        result = evaluate(replace(run_settings(run), eval_split=split), notify=told.append)
        assert result.record.num_images == count
    assert not [words for words in told if "warning" in words]


def test_moved_data_are_accepted_and_different_data_are_reported(trained, data, tmp_path):
    run, found = trained
    moved = tmp_path / "moved"
    moved.symlink_to(data)
    told: list[str] = []
    result = evaluate(replace(run_settings(run), data=os.fspath(moved)), notify=told.append)
    assert numbers(result.record) == numbers(found)
    assert not [words for words in told if "warning" in words]

    pack(fake_source(20, size=8, seed=9), tmp_path / "others")
    pack(fake_source(5, size=8, seed=8, name="val"), tmp_path / "others")
    result = evaluate(replace(run_settings(run), data=os.fspath(tmp_path / "others")), notify=told.append)
    assert result.record.num_images == 5
    (warning,) = [words for words in told if words.startswith("warning")]
    assert "others/val is not known to belong to the data that the weights were trained on" in warning


def test_other_classes_and_sizes_are_refused(trained, data, tmp_path):
    run, _ = trained
    settings = run_settings(run)
    pack(fake_source(20, size=8), tmp_path)
    other = fake_source(6, size=8, name="other")
    pack(other.changed(classes=(*other.classes[:2], ImageClass("n9", "zebra"))), tmp_path)
    with pytest.raises(ValueError, match=r"must have only classes that .* but .*/other has 1 class \(n9\) besides"):
        evaluate(replace(settings, data=os.fspath(tmp_path), eval_split="other"))
    pack(fake_source(6, size=4, name="small"), tmp_path)
    with pytest.raises(ValueError, match=r"must have the size used in training, 6 × 6 px, .* got 4 × 4 px"):
        evaluate(replace(settings, data=os.fspath(tmp_path), eval_split="small"))


def test_classes_are_compared_by_identifier(trained, data, tmp_path):
    """Fewer classes, and classes in another order, give the same decisions on the same images."""
    run, _ = trained
    own = fake_source(NUM_EVALUATED, size=8, seed=1, name="val")
    pack(fake_source(20, size=8), tmp_path)
    expected = evaluate(run, per_class=True, predictions=True)
    turned = own.changed(classes=tuple(reversed(own.classes)), labels=[2 - label for label in own.labels])
    pack(turned, tmp_path)
    told: list[str] = []
    for place in (replace(run_settings(run), data=os.fspath(tmp_path)), None):
        if place is None:
            config = TrainConfig(data=tmp_path, batch=4, image_size=6)
            found = evaluate_weights(
                run / "model.safetensors", config, per_class=True, predictions=True, notify=told.append
            )
        else:
            found = evaluate(place, per_class=True, predictions=True, notify=told.append)
        assert numbers(found.record) == numbers(expected.record)
        assert found.classes == expected.classes
        assert found.predictions is not None
        assert expected.predictions is not None
        np.testing.assert_array_equal(found.predictions.labels, expected.predictions.labels)
    assert sum("has 3 of the 3 classes of the weights, in another order" in each for each in told) == 2

    kept = [index for index, label in enumerate(own.labels) if label]
    fewer = own.changed(
        images=own.images[kept], labels=[own.labels[index] - 1 for index in kept], classes=own.classes[1:], name="fewer"
    )
    pack(fewer, tmp_path)
    found = evaluate(
        replace(run_settings(run), data=os.fspath(tmp_path), eval_split="fewer"), per_class=True, notify=told.append
    )
    assert [each.num_images for each in found.classes] == [0, *(each.num_images for each in expected.classes[1:])]
    assert found.num_top1 == sum(each.num_top1 for each in expected.classes[1:])
    assert any("fewer has 2 of the 3 classes of the weights" in each and "order" not in each for each in told)


def test_weights_without_a_record_of_classes_are_taken_by_number_in_one_line(trained, data, tmp_path):
    run, found = trained
    tensors = load_file(run / "model.safetensors")
    save_file(tensors, tmp_path / "w.safetensors")
    told: list[str] = []
    config = TrainConfig(data=data, batch=4, image_size=6, model="resnet8")
    result = evaluate_weights(tmp_path / "w.safetensors", config, notify=told.append)
    assert result.record.num_images == found.num_images
    assert sum("do not record their classes" in each for each in told) == 1


def test_larger_images_are_cropped_to_those_of_the_training(data, tmp_path):
    config = TrainConfig(steps=2, batch=4, data=os.fspath(data), model="resnet8", run_dir=os.fspath(tmp_path / "run"))
    (found,) = train(config).evaluations
    with open_split(os.fspath(data), "val") as split:
        pixels, labels = np.empty((NUM_EVALUATED, 8, 8), np.uint32), np.empty(NUM_EVALUATED, np.int32)
        split.read_into(np.arange(NUM_EVALUATED), pixels, labels, timeout_s=10)
    framed = np.pad(pixels, ((0, 0), (2, 2), (2, 2)))
    result = evaluate(tmp_path / "run", evaluation=(framed, labels))
    assert numbers(result.record) == numbers(found)


def test_the_model_must_be_the_runs(trained, tmp_path):
    run, _ = trained
    with pytest.raises(ValueError, match=r"with the registry model resnet8: leave out the model argument"):
        evaluate(run, model=Linear())
    train(toy_config(steps=1, run_dir=tmp_path), model=Linear(), batches=toy_batch)
    with pytest.raises(ValueError, match=r"a model \(linear\) of your own, which must be given again: model=…$"):
        evaluate(tmp_path, evaluation=evaluation_set(3))
    remedy = "give data=DIR, or images of your own with evaluation"
    with pytest.raises(ValueError, match=f"must be given, because .* on batches of your own: {remedy}$"):
        evaluate(tmp_path, model=Linear())

    class Other(Linear):
        def init(self, key):
            params, stats = super().init(key)
            return {"kernel": params["weights"], "bias": params["bias"]}, stats

    with pytest.raises(ValueError, match=r"missing params\.kernel; unexpected params\.weights"):
        evaluate(tmp_path, model=Other(), evaluation=evaluation_set(3))


def test_weights_from_any_source_are_evaluated(trained, data, tmp_path):
    run, found = trained
    config = TrainConfig(data=os.fspath(data), batch=4)
    told: list[str] = []
    # Those of a run name all that is needed: model, size, scale and step.
    result = evaluate_weights(run / "model.safetensors", config, notify=told.append)
    assert numbers(result.record) == numbers(found)
    assert result.record.step == 3
    assert not [words for words in told if "ImageNet" in words]

    bare = tmp_path / "bare.safetensors"
    save_file(load_file(run / "model.safetensors"), bare)
    with pytest.raises(ValueError, match=r"bare\.safetensors does not record which model"):
        evaluate_weights(bare, config)
    named = replace(config, model="resnet8", image_size=6)
    evaluate_weights(bare, named, notify=told.append)
    assert "normalised with mean 0.485 0.456 0.406 and std 0.229 0.224 0.225" in "".join(told)
    with open_split(os.fspath(data), "train") as split:
        mean, std = split.manifest.channel_mean, split.manifest.channel_std
    result = evaluate_weights(bare, named, mean=mean, std=std)
    assert numbers(result.record) == numbers(found)
    assert result.record.step == 0
    with pytest.raises(ValueError, match=r"bare\.safetensors: the tensors are not those of resnet14"):
        evaluate_weights(bare, replace(named, model="resnet14"))
    with pytest.raises(ValueError, match=r"model must be auto or a name .*, got 'resnet9'"):
        evaluate_weights(bare, replace(named, model="resnet9"))
    with pytest.raises(ValueError, match="image_size must be at most the size of the images, 8 × 8 px, got 9"):
        evaluate_weights(bare, replace(named, image_size=9))


class Waiting:
    """An evaluation set whose second batch is held back until it is released."""

    batch, height, width, thread_safe, num_batches = BATCH, 4, 4, True, 3

    def __init__(self):
        self.reached, self.released = threading.Event(), threading.Event()

    def fill(self, step, rows, pixels, labels, *, timeout_s):
        if step == 1:
            self.reached.set()
            self.released.wait(30)
        pixels[...], labels[...] = toy_batch(step)


@pytest.fixture
def linear_run(tmp_path):
    train(toy_config(steps=1, run_dir=tmp_path), model=Linear(), batches=toy_batch)
    return run_settings(tmp_path)


@pytest.mark.timeout(60)
def test_a_stalled_source_ends_the_evaluation_within_the_limit(linear_run):
    source, started = Waiting(), time.monotonic()
    with pytest.raises(FeederError, match=r"evaluation pull 2 of 3 did not arrive within 0\.3 s"):
        evaluate(replace(linear_run, infeed_timeout_s=0.3), model=Linear(), evaluation=source)
    source.released.set()
    assert time.monotonic() - started < 25  # the 30 s of the stalled source were not waited for


@pytest.mark.timeout(60)
def test_a_signal_ends_the_evaluation_at_once_and_its_threads_soon(linear_run):
    source = Waiting()

    def interrupt():
        source.reached.wait(20)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        evaluate(linear_run, model=Linear(), evaluation=source)
    assert signal.getsignal(signal.SIGINT) is before
    source.released.set()
    deadline = time.monotonic() + 20
    while any(thread.name.startswith(("worker", "feeder")) for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_nan_weights_are_reported(linear_run):
    path = f"{linear_run.run_dir}/model.safetensors"
    tensors = load_file(path)
    metadata = {"mean": "0.5 0.5 0.5", "std": "0.25 0.25 0.25"}
    tensors = {name: np.full_like(tensor, np.nan) for name, tensor in tensors.items()}
    save_file(tensors, path, with_digest(tensors, metadata))
    Path(path).with_name("result.json").unlink()  # it tells of the weights that were there
    record = evaluate(linear_run, model=Linear(), evaluation=evaluation_set(5)).record
    assert (record.num_images, record.top1) == (5, 0)
    assert json.loads(record.to_json())["loss"] is None
