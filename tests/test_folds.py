"""`--fold K/N`: the division of a split, and runs that are trained on a part of it and evaluated on the rest."""

import csv
import io
import re
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from loopfeed import evaluate, replay_run, train
from loopfeed.engine.data.folds import folds_of
from loopfeed.engine.data.open_data import open_data
from loopfeed.engine.evaluation.result import write_predictions
from loopfeed.engine.parts import NO_PARTS
from loopfeed.engine.records.recorded_run import read_recorded
from loopfeed.engine.report_page.evaluated import Decisions, EvaluatedWeights, evaluate_weights_of
from loopfeed.engine.sizing.planning import _count_images, _volumes
from tests.fake_source import pack
from tests.test_sampling import LABELS, METRICS, NUM_IMAGES, Colours, config, images_in, long_tail, seen
from tests.toy import SIZE, Linear, toy_batch, toy_config


@given(st.lists(st.integers(0, 4), min_size=1, max_size=80), st.integers(2, 12))
def test_each_class_and_the_whole_are_divided_evenly(labels, num_folds):
    classes = np.array(labels, np.int32)
    folds = folds_of(classes, None, num_folds)
    for chosen in (np.ones(len(classes), bool), *(classes == label for label in range(5))):
        counts = np.bincount(folds[chosen], minlength=num_folds)
        assert counts.max() - counts.min() <= 1
        assert len(counts) == num_folds


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=60), st.integers(2, 5))
@settings(max_examples=60)
def test_groups_are_never_divided(images, num_folds):
    classes, groups = (np.array(each) for each in zip(*images, strict=True))
    folds = folds_of(classes.astype(np.int32), groups.astype(np.uint32), num_folds)
    assert folds.min() >= 0
    assert folds.max() < num_folds
    for group in set(groups.tolist()):
        assert len(set(folds[groups == group].tolist())) == 1


def test_groups_are_divided_as_evenly_as_scikit_learn_does():
    """40 patients of one class each, with 1 to 4 images; the table is that of its StratifiedGroupKFold(5)."""
    classes = np.repeat([0, 1, 2, 3] * 10, np.repeat([1, 2, 3, 4], 10)).astype(np.int32)
    groups = np.repeat(np.arange(40), np.repeat([1, 2, 3, 4], 10)).astype(np.uint32)
    folds = folds_of(classes, groups, 5)
    counts = [np.bincount(folds[classes == label], minlength=5).tolist() for label in range(4)]
    assert counts == [[5, 5, 5, 5, 4], [5, 4, 5, 5, 5], [5, 5, 5, 5, 6], [5, 6, 5, 5, 5]]


# An image's fold is part of what a run was evaluated on.
def test_golden_folds():
    classes = np.array([0, 1, 0, 0, 2, 1, 0, 0, 1], np.int32)
    assert folds_of(classes, None, 3).tolist() == [0, 2, 1, 2, 2, 0, 0, 1, 1]
    groups = np.array([7, 7, 3, 3, 3, 9, 9, 1, 1], np.uint32)
    assert folds_of(classes, groups, 3).tolist() == [1, 1, 0, 0, 0, 2, 2, 0, 0]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folds")
    pack(long_tail(), folder)
    pack(long_tail("val"), folder)
    return folder


def test_a_run_is_trained_on_the_other_folds_and_evaluated_on_its_own(data, tmp_path):
    said: list[str] = []
    run = config(data, steps=6, eval_split=None, fold="2/3", run_dir=tmp_path / "run", eval_every_epochs=1)
    records: list[Any] = []
    result = train(run, model=Colours(), metrics=METRICS, sinks=[records.append], notify=said.append)
    held_out = np.flatnonzero(folds_of(np.array(LABELS, np.int32), None, 3) == 1).tolist()
    assert len(held_out) == 8
    line = "fold 2/3 of {}: evaluated on 8 images, trained on the other 16; no other split is evaluated"
    assert line.format(f"{data}/train") in said
    trained = [each for each in records if not hasattr(each, "num_images")]
    evaluated = [each for each in records if hasattr(each, "num_images")]
    drawn = {index for each in trained for index in images_in(each.metrics, run.batch)}
    # 36 positions are two epochs of 16 images, and a part.
    assert drawn == set(range(NUM_IMAGES)) - set(held_out)
    for each in evaluated:
        assert each.num_images == 8
        assert sorted(images_in(each.metrics, each.num_images).elements()) == held_out
    again = evaluate(tmp_path / "run", model=Colours(), notify=said.append, predictions=True, per_class=True)
    assert again.record.loss == result.evaluations[-1].loss
    assert again.record.top1 == result.evaluations[-1].top1
    assert again.data == f"fold 2/3 of {data}/train, 8 images"
    assert [each.num_images for each in again.classes] == [5, 2, 1]
    assert again.predictions is not None
    # What the weights were not trained on is what the run recorded, whatever the settings of the evaluation say.
    other = evaluate(replace(run, fold="1/3"), model=Colours())
    assert (other.data, other.record.loss) == (again.data, again.record.loss)
    write_predictions(tmp_path / "all.csv", again.predictions)
    rows = list(csv.DictReader((tmp_path / "all.csv").read_text().splitlines()))
    assert [int(row["index"]) for row in rows] == held_out
    assert [int(row["label"]) for row in rows] == [LABELS[index] for index in held_out]
    for split, num_said in (("train", 1), ("val", 0)):
        said.clear()
        whole = evaluate(replace(run, eval_split=split), model=Colours(), notify=said.append)
        assert whole.record.num_images == NUM_IMAGES
        assert sum(f"16 of the 24 images of {data}/train were trained on; without" in line for line in said) == num_said
    assert replay_run(tmp_path / "run", model=Colours(), metrics=METRICS).is_same
    with pytest.raises(ValueError, match="fold was '2/3', got '1/3'"):
        train(replace(run, steps=7, resume=True, fold="1/3"), model=Colours(), metrics=METRICS)
    pack(long_tail().changed(labels=LABELS[::-1]), tmp_path / "other")
    with pytest.raises(
        ValueError, match=r"fold 2/3 is a part of the split that the run was trained on.*\(eval_split\)"
    ):
        evaluate(replace(run, data=str(tmp_path / "other")), model=Colours())


def test_the_report_of_a_fold_shows_its_mistakes_by_their_numbers_and_pixels_in_the_split(data, tmp_path):
    run = config(data, steps=1, eval_split=None, fold="2/3", run_dir=tmp_path / "run")
    train(run, model=Linear())
    found = evaluate_weights_of(
        tmp_path / "run", read_recorded(tmp_path / "run"), None, None, {"model": Linear()}, 8, lambda _: None
    )
    assert isinstance(found, EvaluatedWeights)
    assert isinstance(found.decisions, Decisions)
    mistakes = found.decisions.mistakes
    assert mistakes
    held_out = np.flatnonzero(folds_of(np.array(LABELS, np.int32), None, 3) == 1)
    assert {each.index for each in mistakes} <= set(held_out.tolist())
    for each in mistakes:
        assert each.label == LABELS[each.index]
        assert each.name == f"n{each.label + 1}/{each.index}.png"
        pixels = np.asarray(Image.open(io.BytesIO(each.picture)))
        assert (pixels == long_tail().images[each.index]).all()


def test_groups_of_the_pack_stay_together_and_classes_are_balanced_within_the_folds(tmp_path):
    groups = np.array([index // 2 for index in range(NUM_IMAGES)], np.uint32)
    pack(long_tail().changed(groups=groups), tmp_path)
    epochs, _ = seen(config(tmp_path, steps=9, eval_split=None, fold="1/4", sampling="balanced"))
    drawn = {index for epoch in epochs for index in epoch}
    assert {index // 2 for index in drawn}.isdisjoint(index // 2 for index in set(range(NUM_IMAGES)) - drawn)
    assert len(drawn) == 18


@pytest.mark.parametrize("fold", ["0/5", "6/5", "1/1", "1", "2/05", "-1/5"])
def test_a_fold_is_counted_from_1(fold):
    rule = f"fold must be K/N, fold K of N, counted from 1, with N of at least 2, got {fold!r}"
    with pytest.raises(ValueError, match=re.escape(rule)):
        toy_config(fold=fold)


def test_what_a_fold_does_not_go_with_is_refused_and_missing_classes_are_said(data):
    given = config(data, fold="1/3", eval_split=None, steps=1)
    with pytest.raises(ValueError, match="must not be given with indices of your own: leave one out"):
        train(given, model=Linear(), indices=[1])
    with pytest.raises(ValueError, match="fold 1/3 is the evaluation set, so it must not be given with eval_split val"):
        train(replace(given, eval_split="val"), model=Linear())
    with pytest.raises(ValueError, match=r"order windowed .* must not be given with fold 1/3"):
        train(replace(given, order="windowed"), model=Linear())
    with pytest.raises(ValueError, match=r"fold 30/40 of .* has 0 of 24 images: give fewer folds"):
        train(replace(given, fold="30/40"), model=Linear())
    own = (np.zeros((4, SIZE, SIZE), np.uint32), np.zeros(4, np.int32))
    with pytest.raises(ValueError, match="must not be given with an evaluation of your own: leave one out"):
        train(given, model=Linear(), evaluation=own)
    assert train(replace(given, eval_split="off"), model=Linear(), evaluation=own).evaluations[-1].num_images == 4
    with pytest.raises(ValueError, match="fold needs the labels of a packed data set"):
        train(toy_config(fold="1/2"), model=Linear(), batches=toy_batch)
    said: list[str] = []
    train(replace(given, fold="1/4"), model=Linear(), notify=said.append)
    assert "warning: fold 1/4 has no evaluation images of 1 class: give fewer folds" in said


def test_a_plan_counts_the_split_of_a_fold_once(data):
    with ExitStack() as stack:
        given = config(data, fold="1/3", eval_split=None)
        opened: Any = SimpleNamespace(config=given, data=open_data(given, NO_PARTS, stack, lambda _: None))
        assert [name for name, _ in _volumes(opened)] == ["train"]
        assert _count_images(opened) == 8
