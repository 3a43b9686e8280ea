"""Numbers of things in words."""

import math

import pytest

from loopfeed.engine.stream.sinks import EvaluationRecord, LossRecord, evaluation_words, loss_fields, loss_number
from loopfeed.preprocess.quantities import listed, quantity


@pytest.mark.parametrize(
    ("count", "noun", "words"),
    [
        (0, "image", "0 images"),
        (1, "image", "1 image"),
        (1, "class", "1 class"),
        (2, "class", "2 classes"),
        (2, "batch", "2 batches"),
        (2, "epoch", "2 epochs"),
        (2, "launch", "2 launches"),
        (2, "entry", "2 entries"),
        (2, "array", "2 arrays"),
        (1200, "step", "1,200 steps"),
    ],
)
def test_a_noun_follows_its_number(count, noun, words):
    assert quantity(count, noun) == words


def test_a_list_has_commas_and_one_and():
    words = ["a model", "batches", "a loss"]
    assert [listed(words[:count]) for count in range(4)] == [
        "",
        "a model",
        "a model and batches",
        "a model, batches and a loss",
    ]


def test_a_loss_of_negative_zero_has_no_sign():
    assert loss_number(-0.0) == "0.0000"
    assert loss_number(-0.25) == "-0.2500"
    assert math.copysign(1, -0.0) == -1


def test_no_number_of_a_line_is_negative_zero():
    record = LossRecord(3, -0.0, -0.0, 12.0, -0.0, 0.0, {"margin": -0.0})
    assert loss_fields(record, 9) == [
        *("step 3/9", "loss 0.0000", "lr 0", "12.0 images/s", "wait 0.00 ms", "margin 0.0000"),
    ]
    evaluation = EvaluationRecord(3, 1, math.nan, math.nan, -1e-9, 0.0, {})
    assert evaluation_words(evaluation) == "evaluation at step 3: loss 0.0000  (1 image)"
