"""Channel sums are exact for every grouping of the images."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from loopfeed.preprocess.packing.channels import ChannelSums, channel_sums
from loopfeed.preprocess.pixels import LAYOUTS, to_words

IMAGES = st.lists(hnp.arrays(np.uint8, (3, 4, 3)), min_size=1, max_size=5)


@given(IMAGES, st.sampled_from(list(LAYOUTS)))
def test_mean_and_std_are_numpys_over_all_pixels(images, layout):
    rows = channel_sums(to_words(np.stack(images), layout), layout)
    sums = sum((ChannelSums.from_array(12, row) for row in rows), ChannelSums())
    assert sums == ChannelSums.from_array(12 * len(images), rows.sum(axis=0))
    scaled = np.stack(images).reshape(-1, 3) / 255
    assert sums.num_pixels == len(scaled)
    # numpy sums floats: 75 roundings of 1e-16 each.
    np.testing.assert_allclose(sums.mean(), scaled.mean(axis=0), atol=1e-14)
    np.testing.assert_allclose(sums.std(), scaled.std(axis=0), atol=1e-8)


def test_std_is_exact_where_floats_cancel():
    # One pixel in 10^12 is 1 brighter: the squares agree in 12 digits, which a float sum loses.
    n = 10**12
    sums = ChannelSums(n, (255 * n - 1,) * 3, (255**2 * (n - 1) + 254**2,) * 3)
    assert sums.std()[0] == pytest.approx(math.sqrt((n - 1) / n**2) / 255, rel=1e-12)
