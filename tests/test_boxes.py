"""Rectangles by area and aspect: plain Python with the same words, and the distribution they should have."""

import math

import jax
import numpy as np
import pytest

from loopfeed.engine.images.boxes import BLOCKS_OF_BOX, BoxRule, draw_boxes
from tests.threefry_reference import index, unit

pytestmark = pytest.mark.usefixtures("llvms_optimiser")


def random_words(num, seed=0):
    return np.random.default_rng(seed).integers(2**32, size=(num, BLOCKS_OF_BOX, 2), dtype=np.uint32)


def reference(words, rule, height, width):
    """One image: (top, left, height, width), or None where nothing fits."""
    for share, stretch in words[:-1].tolist():
        low, high = rule.area_range
        area = height * width * (low + unit(share) * (high - low))
        low, high = map(math.log, rule.ratio_range)
        ratio = math.exp(low + unit(stretch) * (high - low))
        rows, columns = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < rows <= rule.longest[0] and 0 < columns <= rule.longest[1]:
            top, left = words[-1].tolist()
            return index(top, height - rows + 1), index(left, width - columns + 1), rows, columns
    return None


RULES = {
    "resized crop": (BoxRule((0.08, 1.0), (3 / 4, 4 / 3), (48, 64)), 48, 64),
    "erasing": (BoxRule((0.02, 0.33), (1 / 3.3, 1 / 0.3), (31, 31)), 32, 32),
    "never": (BoxRule((1.0, 1.0), (2.0, 3.0), (40, 40)), 40, 40),
    "often not": (BoxRule((0.97, 1.0), (3.1, 4.0), (32, 100)), 32, 100),
}


@pytest.mark.parametrize("name", RULES)
def test_equals_the_reference(name):
    rule, height, width = RULES[name]
    words = random_words(600)
    boxes, found = jax.jit(draw_boxes, static_argnums=(1, 2, 3))(words, rule, height, width)
    expected = [reference(each, rule, height, width) for each in words]
    assert found.tolist() == [box is not None for box in expected]
    drawn = [tuple(box) for box, exists in zip(np.stack(boxes, axis=1).tolist(), found, strict=True) if exists]
    # float64 against float32: a side within 1e-6 of a half may be rounded the other way, none of these is.
    assert drawn == [box for box in expected if box is not None]
    if name == "often not":
        assert 0.2 < np.mean(found) < 0.999
    if name == "never":
        assert not found.any()


def test_areas_are_uniform_and_ratios_are_log_uniform():
    rule = BoxRule((0.1, 0.3), (1 / 2, 2.0), (1000, 1000))
    boxes, found = draw_boxes(random_words(20_000, seed=1), rule, 1000, 1000)
    assert found.all()
    areas = np.asarray(boxes.height * boxes.width) / 1e6
    stretches = np.log2(np.asarray(boxes.width) / np.asarray(boxes.height))
    # Ten bins of 2000 each: five standard deviations are 212.
    np.testing.assert_allclose(np.histogram(areas, 10, (0.1, 0.3))[0], 2000, atol=212)
    np.testing.assert_allclose(np.histogram(stretches, 10, (-1, 1))[0], 2000, atol=212)
    places = np.asarray(boxes.top) / (1000 - np.asarray(boxes.height))
    np.testing.assert_allclose(np.histogram(places, 10, (0, 1))[0], 2000, atol=212)
    assert abs(np.corrcoef(areas, stretches)[0, 1]) < 0.03
