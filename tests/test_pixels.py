"""The packed layout: one word a pixel, red highest, low byte 0."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as hnp

from loopfeed.preprocess.pixels import UNUSED_BITS, pack_rgb, unpack_rgb

RGB = hnp.arrays(np.uint8, hnp.array_shapes(min_dims=0, max_dims=3, max_side=5).map(lambda shape: (*shape, 3)))


@pytest.mark.parametrize(
    ("rgb", "word"),
    [
        ([0, 0, 0], 0x00000000),
        ([255, 0, 0], 0xFF000000),
        ([0, 255, 0], 0x00FF0000),
        ([0, 0, 255], 0x0000FF00),
        ([1, 2, 3], 0x01020300),
        ([255, 255, 255], 0xFFFFFF00),
    ],
)
def test_golden_words(rgb, word):
    assert pack_rgb(np.array(rgb, np.uint8)) == np.uint32(word)
    assert unpack_rgb(np.array(word, np.uint32)).tolist() == rgb


@given(RGB)
def test_unpacking_restores_the_pixels(rgb):
    words = pack_rgb(rgb)
    assert words.dtype == np.uint32
    assert words.shape == rgb.shape[:-1]
    assert not np.any(words & UNUSED_BITS)
    np.testing.assert_array_equal(unpack_rgb(words), rgb)


@given(RGB)
def test_packing_equals_the_shifts_of_the_contract(rgb):
    r, g, b = (rgb[..., channel].astype(np.uint32) for channel in range(3))
    np.testing.assert_array_equal(pack_rgb(rgb), r << 24 | g << 16 | b << 8)


@pytest.mark.parametrize("bad", [np.zeros((2, 3), np.int32), np.zeros((3, 4), np.uint8), np.uint8(3)])
def test_anything_but_rgb_bytes_is_refused(bad):
    with pytest.raises(ValueError, match=r"pack_rgb takes uint8 \[\.\.\., 3\]"):
        pack_rgb(np.asarray(bad))


def test_only_words_are_unpacked():
    with pytest.raises(ValueError, match="unpack_rgb takes uint32 words, got int64"):
        unpack_rgb(np.zeros(3, np.int64))
