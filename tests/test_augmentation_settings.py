"""The settings of the augmentation: what is allowed, and what shape they give."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest

from loopfeed.engine.images.settings import Augmentation


def test_numbers_become_python_numbers():
    numbers: Any = {
        "size": np.int64(8),
        "horizontal_flip": 1,
        "hue": np.float32(0.5),
        "area_range": [np.float64(0.5), 1],
    }
    given = Augmentation(**numbers)
    assert json.dumps(dataclasses.asdict(given))
    assert type(given.size) is int
    assert type(given.horizontal_flip) is float
    assert given.area_range == (0.5, 1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"crop": "center"}, "crop must be one of centre, random, resized, got 'center'"),
        ({"padding_mode": "edge"}, "padding_mode must be one of zeros, reflect, got 'edge'"),
        ({"size": 0}, "size must be an integer from 1 to 16384, got 0"),
        ({"size": 1.5}, "size must be an integer"),
        ({"size": True}, "size must be an integer"),
        ({"crop_padding": -1, "crop": "random"}, "crop_padding must be an integer from 0"),
        (
            {"crop": "random", "padding_mode": "reflect"},
            "padding_mode reflect requires crop_padding above 0, got crop_padding 0: set",
        ),
        ({"crop_padding": 4}, "crop_padding requires crop random, got crop_padding 4 with crop centre: set"),
        ({"horizontal_flip": 1.01}, r"horizontal_flip must be a number in 0 … 1, got 1.01"),
        ({"horizontal_flip": True}, "horizontal_flip must be a number"),
        ({"brightness": -0.1}, "brightness must be a number in 0 … 10"),
        ({"contrast": "0.4"}, "contrast must be a number"),
        ({"saturation": math.nan}, "saturation must be a number"),
        ({"hue": 0.6}, "hue must be a number in 0 … 0.5"),
        ({"mixup_alpha": math.inf}, "mixup_alpha must be a number"),
        ({"mixup_alpha": 10**400}, "mixup_alpha must be a number"),
        ({"cutmix_alpha": -1}, "cutmix_alpha must be a number"),
        ({"erasing": 2}, "erasing must be a number in 0 … 1"),
        ({"area_range": (0.0, 1.0)}, "area_range must satisfy 0 < least ≤ largest ≤ 1, got 0.0 … 1.0"),
        ({"area_range": (0.5, 0.4)}, "area_range must satisfy"),
        ({"area_range": (0.5, 1.1)}, "area_range must satisfy"),
        ({"area_range": 0.5}, "area_range must be two numbers"),
        ({"ratio_range": (0.5, 1.0, 2.0)}, "ratio_range must be two numbers"),
        ({"ratio_range": (1.0, math.nan)}, "ratio_range must"),
    ],
)
def test_refused_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        Augmentation(**settings)


@pytest.mark.parametrize(
    ("settings", "stored", "shape"),
    [
        ({}, (30, 40), (30, 40)),
        ({"size": 24}, (30, 40), (24, 24)),
        ({"crop": "random", "size": 30}, (30, 40), (30, 30)),
        ({"crop": "random", "crop_padding": 4}, (32, 32), (32, 32)),
        ({"crop": "random", "crop_padding": 4, "size": 40}, (33, 40), (40, 40)),
        ({"crop": "resized"}, (30, 40), (30, 40)),
        ({"crop": "resized", "size": 224}, (30, 40), (224, 224)),
    ],
)
def test_output_shapes(settings, stored, shape):
    assert Augmentation(**settings).output_shape(*stored) == shape


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 33}, "a centre crop must fit into the stored image, got size 33 for 32×32 px: set a smaller"),
        ({"crop": "random", "size": 41, "crop_padding": 4}, "a random crop must fit .* px with 4 px of padding"),
        ({"crop": "random"}, "needs more than one possible place, got size 32×32 .* set crop_padding"),
        ({"crop": "random", "crop_padding": 32, "padding_mode": "reflect"}, "narrower than the image, got crop_pad"),
    ],
)
def test_images_that_do_not_fit(settings, message):
    with pytest.raises(ValueError, match=message):
        Augmentation(**settings).output_shape(32, 32)


def test_mixing_needs_pairs():
    Augmentation().check_batch(3)
    for augmentation in (Augmentation(mixup_alpha=0.2), Augmentation(cutmix_alpha=1.0)):
        assert augmentation.mixes
        augmentation.check_batch(4)
        with pytest.raises(ValueError, match="batch of each device must be even, got 3: choose an even batch"):
            augmentation.check_batch(3)
    assert not Augmentation().mixes
