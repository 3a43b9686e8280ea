"""Random erasing: a rectangle as torchvision draws it becomes the mean colour."""

import math

import jax
import numpy as np

from loopfeed.engine.images.augment import BLOCKS_OF_ERASING, draw_erased
from tests.threefry_reference import index, unit

erased_of = jax.jit(draw_erased, static_argnums=(1, 2, 3))


def random_words(num, seed=0):
    return np.random.default_rng(seed).integers(2**32, size=(num, BLOCKS_OF_ERASING, 2), dtype=np.uint32)


def reference(words, height, width, probability):
    """torchvision's RandomErasing in its own terms, height / width in 0.3 … 3.3; bool [height, width]."""
    inside = np.zeros((height, width), bool)
    if unit(int(words[0, 0])) >= probability:
        return inside
    for share, stretch in words[1:-1].tolist():
        area = height * width * (0.02 + unit(share) * (0.33 - 0.02))
        # The stretch runs from wide to high here and the other way there: the same law.
        aspect = math.exp(math.log(0.3) + (1 - unit(stretch)) * (math.log(3.3) - math.log(0.3)))
        rows, columns = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if rows < height and columns < width:
            top, left = (index(int(word), room + 1) for word, room in
                         zip(words[-1], (height - rows, width - columns), strict=True))  # fmt: skip
            inside[top : top + rows, left : left + columns] = True
            return inside
    return inside


def test_equals_the_reference():
    words = random_words(300)
    erased = erased_of(words, 32, 24, 0.6)
    np.testing.assert_array_equal(erased, np.stack([reference(each, 32, 24, 0.6) for each in words]))


def test_rates():
    erased = np.asarray(erased_of(random_words(4000, seed=1), 64, 64, 0.25))
    happened = erased.any(axis=(1, 2))
    # Four standard deviations of 4000 coins of 1/4.
    assert abs(happened.mean() - 0.25) < 0.028
    areas = erased[happened].mean(axis=(1, 2))
    assert areas.min() > 0.018
    assert areas.max() < 0.34
    assert abs(areas.mean() - 0.175) < 0.012
    assert not erased_of(random_words(100), 64, 64, 0.0).any()
    assert erased_of(random_words(100), 64, 64, 1.0).any(axis=(1, 2)).all()
