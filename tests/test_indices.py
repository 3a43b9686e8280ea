"""`train(config, indices=…)`: runs on a part of a packed split, with everything that the whole split has."""

import hashlib
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from loopfeed import replay_run, train
from tests.fake_source import pack
from tests.test_sampling import LABELS, METRICS, NUM_IMAGES, Colours, config, long_tail, seen
from tests.toy import Linear, toy_batch, toy_config


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("indices")
    pack(long_tail(), folder)
    pack(long_tail("val"), folder)
    return folder


SUBSET = [3, 23, 5, 17, 17, 0, 1, 22, 20, 9, 10, 11]


def curriculum(epoch):
    """A pure function: images from the front in the first epochs, later ones then."""
    return np.arange(12) + 6 * min(epoch, 2)


def test_each_image_of_a_subset_is_seen_once_an_epoch_and_epochs_are_its_own(data):
    """Two epochs of 12 images are 4 steps; the whole validation split is evaluated."""
    said: list[str] = []
    given = config(data, steps=4, eval_split="val", eval_every_epochs=1)
    epochs, _ = seen(given, indices=SUBSET, notify=said.append)
    assert sum(epochs, Counter()) == Counter({index: 2 * SUBSET.count(index) for index in SUBSET})
    assert any("from" in line and "12 of 24 images" in line for line in said)
    in_epochs = replace(given, steps=1000, epochs=3)
    result = train(in_epochs, model=Colours(), metrics=METRICS, indices=np.array(SUBSET))
    assert len(result.losses) == 6
    assert [each.num_images for each in result.evaluations] == [NUM_IMAGES] * 3


def test_a_function_of_the_epoch_is_a_curriculum_that_resumes_and_replays(data, tmp_path):
    calls: list[int] = []

    def images(epoch):
        calls.append(epoch)
        return curriculum(epoch)

    given = config(data, steps=8, run_dir=tmp_path / "whole")
    _, losses = seen(given, indices=images)
    assert sorted(calls) == sorted(set(calls))
    for step in (3, 5, 8):
        how = replace(given, steps=step, run_dir=tmp_path / "parts", resume=step > 3)
        resumed = seen(how, indices=images)[1]
        np.testing.assert_array_equal(resumed[-1], losses[step - 1])
    assert replay_run(tmp_path / "parts", from_step=5, model=Colours(), metrics=METRICS, indices=images).is_same
    with pytest.raises(ValueError, match=r"was trained with indices .*of your own, .* again: indices=…$"):
        seen(replace(given, steps=9, resume=True))


def test_a_subset_with_sampling_is_balanced_within_itself(data):
    """SUBSET has 7, 4 and 1 images of the classes 0, 1 and 2: 4 draws each."""
    epochs, _ = seen(config(data, steps=4, sampling="balanced"), indices=SUBSET)
    both = sum(epochs, Counter())
    of_class = [sum(both[index] for index in set(SUBSET) if LABELS[index] == label) for label in range(3)]
    assert of_class == [8, 8, 8]
    changing, _ = seen(config(data, steps=4, sampling="balanced"), indices=lambda epoch: [0, 1, 2, 23 - epoch] * 3)
    assert sum(changing, Counter())[23] == 6
    assert sum(changing, Counter())[22] == 6


def test_other_indices_are_refused_by_a_resume(data, tmp_path, monkeypatch):
    given = config(data, steps=2, run_dir=tmp_path)
    compared: list[str] = []

    def exchange(_subject, text):
        compared.append(text)
        return [text]

    with monkeypatch.context() as patched:
        patched.setattr("loopfeed.engine.run.changes.exchange", exchange)
        train(given, model=Linear(), indices=SUBSET)
    # Processes compare them too.
    assert hashlib.sha256(np.array(SUBSET, "<i8").tobytes()).hexdigest() in compared[0]
    train(replace(given, steps=3, resume=True), model=Linear(), indices=np.array(SUBSET, np.uint16))
    with pytest.raises(ValueError, match=r"must keep the indices of the images that it draws \(indices=…\)"):
        train(replace(given, steps=4, resume=True), model=Linear(), indices=SUBSET[::-1])


@pytest.mark.parametrize(
    ("indices", "fault"),
    [
        ([], "the indices must be integers [n] of at least one image"),
        (np.ones(NUM_IMAGES, bool), "give numpy.flatnonzero(mask)"),
        ([0.0, 1.0], "give the numbers of the images, from 0"),
        (
            ["n1/1.png"],
            "got a list of 1 of text: give the numbers of the images with these names, which loopfeed.open_sp",
        ),
        ([0, -1], "the indices must lie in 0 … 23, the images of DATA/train, got -1: correct them"),
        ([0, 24], "the indices must lie in 0 … 23, the images of DATA/train, got 24: correct them"),
        (lambda epoch: "ab", "the indices of epoch 0 must be integers [n] of at least one image"),
        (lambda epoch: range(6 + epoch), "the indices of epoch 1 must be as many as those of epoch 0, 6, got 7"),
    ],
)
def test_indices_that_are_none_of_the_split_are_refused(data, indices, fault):
    with pytest.raises(ValueError, match=re.escape(fault.replace("DATA", str(data)))):
        train(config(data, steps=4), model=Linear(), indices=indices)


def test_indices_need_a_packed_split_in_the_random_order(data):
    with pytest.raises(ValueError, match="indices choose among the images of a packed data set"):
        train(toy_config(), model=Linear(), batches=toy_batch, indices=[0])
    with pytest.raises(ValueError, match=r"order windowed .* must not be given with indices of your own"):
        train(config(data, order="windowed"), model=Linear(), indices=[0])
