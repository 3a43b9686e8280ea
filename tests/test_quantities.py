"""Numbers of things in words."""

import math

import pytest

from engine.stream.sinks import loss_number
from preprocess.quantities import quantity


@pytest.mark.parametrize(
    ("count", "noun", "words"),
    [
        (0, "image", "0 images"),
        (1, "image", "1 image"),
        (1, "class", "1 class"),
        (2, "class", "2 classes"),
        (1200, "step", "1,200 steps"),
    ],
)
def test_a_noun_follows_its_number(count, noun, words):
    assert quantity(count, noun) == words


def test_a_loss_of_negative_zero_has_no_sign():
    assert loss_number(-0.0) == "0.0000"
    assert loss_number(-0.25) == "-0.2500"
    assert math.copysign(1, -0.0) == -1
