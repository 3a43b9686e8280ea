"""RandAugment and TrivialAugment against an independent reference in NumPy, against Pillow, and in any batch."""

import math
from dataclasses import replace
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from loopfeed import train
from loopfeed.engine.images.augment import augment_images
from loopfeed.engine.images.auto_augment import (
    Operation,
    apply_rows,
    auto_augment,
    draw_rows,
    make_row,
    ranges_of,
    table_rows,
)
from loopfeed.engine.images.positions import Positions, image_keys
from loopfeed.engine.images.settings import Augmentation
from loopfeed.engine.images.unpack import PixelScale
from loopfeed.engine.run.program_settings import compiled_settings
from loopfeed.preprocess.pixels import pack_rgb, unpack_rgb
from tests.test_resample import photograph
from tests.threefry_reference import index, words_at
from tests.toy import Linear, toy_batch, toy_config

pytestmark = pytest.mark.usefixtures("llvms_optimiser")

HEIGHT, WIDTH = 21, 26
AUTO_AUGMENT = 11
# In the order of torchvision's tables, which is that of the numbers of the operations.
NAMES = [
    *("identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "colour", "contrast"),
    *("sharpness", "posterize", "solarize", "autocontrast", "equalize"),
]
LARGEST = {
    "randaugment": {
        "shear": 0.3, "translate_x": 150 / 331 * WIDTH, "translate_y": 150 / 331 * HEIGHT, "rotate": 30.0,
        "factor": 0.9, "posterize": 4,
    },
    "trivialaugment": {
        "shear": 0.99, "translate_x": 32.0, "translate_y": 32.0, "rotate": 135.0, "factor": 0.99, "posterize": 6,
    },
}  # fmt: skip
POLICIES = list(LARGEST)
TRIVIAL_PIXELS = [*range(16), *range(17, 31), 32]
"""The translations of torchvision's TrivialAugmentWide (0.29), whose float32 `linspace` is 15.999998 at strength 15."""


def an_image(seed):
    """A photograph with a narrow range of levels in one channel, so that autocontrast and equalize have work."""
    image = photograph(seed)
    image = np.tile(image, (3, 3, 1))[:HEIGHT, :WIDTH]
    image[..., 1] = 40 + image[..., 1] // 3
    return np.ascontiguousarray(image)


def grey_of(image):
    red, green, blue = (image[..., channel].astype(np.int64) for channel in range(3))
    return (19595 * red + 38470 * green + 7471 * blue + 2**15) >> 16


def blurred(image):
    result = image.astype(np.int64)
    for y in range(1, image.shape[0] - 1):
        for x in range(1, image.shape[1] - 1):
            window = image[y - 1 : y + 2, x - 1 : x + 2].astype(np.int64).sum(axis=(0, 1)) + 4 * image[y, x].astype(int)
            result[y, x] = [math.floor(Fraction(int(total), 13) + Fraction(1, 2)) for total in window]
    return result


def equalized(channel):
    counts = np.bincount(channel.ravel(), minlength=256)
    step = (channel.size - counts[channel.max()]) // 255
    if step == 0:
        return channel
    sums = step // 2 + np.concatenate([[0], np.cumsum(counts)[:-1]])
    return np.minimum(sums // step, 255)[channel]


def stretched(channel):
    low, high = int(channel.min()), int(channel.max())
    return channel if low == high else (channel.astype(np.int64) - low) * 255 // (high - low)


def moved(image, source):
    """Take pixel (x, y) from `source(x + 1/2, y + 1/2)`, in coefficients of 16 fractional bits; outside is black."""
    (a, b, c), (d, e, f) = source
    (a, b, c), (d, e, f) = (
        [math.floor(value * 65536 + 0.5) for value in (p, q, r + p * 0.5 + q * 0.5)]
        for p, q, r in ((a, b, c), (d, e, f))
    )
    result = np.zeros_like(image)
    for y in range(image.shape[0]):
        for x in range(image.shape[1]):
            from_x, from_y = (a * x + b * y + c) // 65536, (d * x + e * y + f) // 65536
            if 0 <= from_x < image.shape[1] and 0 <= from_y < image.shape[0]:
                result[y, x] = image[from_y, from_x]
    return result


def matrix_of(name, amount, height=HEIGHT, width=WIDTH):
    """The map from the result to the source, in pixels, whose corners are whole numbers."""
    if name == "rotate":
        cosine, sine = (round(part(math.radians(-amount)), 15) for part in (math.cos, math.sin))
        x, y = width / 2, height / 2
        return (cosine, sine, x - cosine * x - sine * y), (-sine, cosine, y + sine * x - cosine * y)
    return {
        "shear_x": ((1, amount, 0), (0, 1, 0)),
        "shear_y": ((1, 0, 0), (amount, 1, 0)),
        "translate_x": ((1, 0, -int(amount)), (0, 1, 0)),
        "translate_y": ((1, 0, 0), (0, 1, -int(amount))),
    }[name]


def amount_of(policy, name, magnitude, sign):
    """The strength of an operation, from the published tables."""
    largest, share = LARGEST[policy], magnitude / 30
    if name in ("brightness", "colour", "contrast", "sharpness"):
        return sign * share * largest["factor"]
    if name == "posterize":
        return 8 - round(share * largest["posterize"])
    if name == "solarize":
        return 255 - 8.5 * magnitude
    if policy == "trivialaugment" and name.startswith("translate"):
        return sign * TRIVIAL_PIXELS[magnitude]
    return sign * share * largest.get(name, largest["shear"])


def reference(image, policy, name, magnitude, sign):
    """Apply one operation to a uint8 [H, W, 3] image."""
    amount = amount_of(policy, name, magnitude, sign)
    if name.startswith(("shear", "translate", "rotate")):
        return moved(image, matrix_of(name, amount))
    if name in ("brightness", "colour", "contrast", "sharpness"):
        grey = grey_of(image)
        mean = (2 * int(grey.sum()) + grey.size) // (2 * grey.size)
        others = {"brightness": 0, "colour": grey[..., None], "contrast": mean, "sharpness": blurred(image)}
        factor = 4096 + round(amount * 4096)
        return np.clip((factor * image.astype(np.int64) + (4096 - factor) * others[name] + 2048) >> 12, 0, 255)
    if name == "posterize":
        return image // 2 ** (8 - amount) * 2 ** (8 - amount)
    if name == "solarize":
        return np.where(image < amount, image, 255 - image)
    remap = {"autocontrast": stretched, "equalize": equalized}.get(name)
    return image if remap is None else np.stack([remap(image[..., channel]) for channel in range(3)], axis=-1)


def with_pillow(image, policy, name, magnitude, sign):
    """The same with Pillow, as torchvision calls it."""
    amount, given = amount_of(policy, name, magnitude, sign), Image.fromarray(image)
    if name == "rotate":
        return np.asarray(given.rotate(amount))
    if name.startswith(("shear", "translate")):
        matrix = [float(value) for row in matrix_of(name, amount) for value in row]
        return np.asarray(given.transform(given.size, Image.Transform.AFFINE, matrix))
    enhancers = {
        "brightness": ImageEnhance.Brightness, "colour": ImageEnhance.Color, "contrast": ImageEnhance.Contrast,
        "sharpness": ImageEnhance.Sharpness,
    }  # fmt: skip
    if name in enhancers:
        return np.asarray(enhancers[name](given).enhance(1 + amount))
    others = {
        "identity": lambda: given,
        "posterize": lambda: ImageOps.posterize(given, amount),
        "solarize": lambda: ImageOps.solarize(given, amount),
        "autocontrast": lambda: ImageOps.autocontrast(given),
        "equalize": lambda: ImageOps.equalize(given),
    }
    return np.asarray(others[name]())


run_rows = jax.jit(apply_rows)


def applied(images, policy, choices):
    """Apply (operation, magnitude, sign) to each uint8 image; return uint8 of the same shape."""
    table = table_rows(policy, *images.shape[1:3])
    rows = [(operation * 31 + magnitude) * 2 + (sign < 0) for operation, magnitude, sign in choices]
    return unpack_rgb(np.asarray(run_rows(jnp.asarray(pack_rgb(images)), jnp.asarray(table[rows]))))


CHOICES = [
    (operation, magnitude, sign)
    for operation in range(len(NAMES))
    for magnitude, sign in ((0, 1), (3, -1), (9, 1), (17, -1), (20, 1), (30, 1), (30, -1))
]


@pytest.fixture(scope="module", params=POLICIES)
def all_applied(request):
    images = np.stack([an_image(number % 5) for number in range(len(CHOICES))])
    return request.param, images, applied(images, request.param, CHOICES)


def test_every_operation_equals_the_reference_bit_for_bit(all_applied):
    policy, images, found = all_applied
    assert [operation.name.lower() for operation in Operation] == NAMES
    num_changed = 0
    for image, result, (operation, magnitude, sign) in zip(images, found, CHOICES, strict=True):
        expected = reference(image, policy, NAMES[operation], magnitude, sign)
        np.testing.assert_array_equal(result, expected, err_msg=f"{NAMES[operation]} {magnitude} {sign}")
        num_changed += not np.array_equal(result, image)
    assert num_changed > 0.7 * len(CHOICES)


def test_every_operation_equals_pillow(all_applied):
    """Exactly, or within one level where Pillow computes in floats and cuts off the fraction."""
    policy, images, found = all_applied
    for image, result, (operation, magnitude, sign) in zip(images, found, CHOICES, strict=True):
        name = NAMES[operation]
        expected = with_pillow(image, policy, name, magnitude, sign)
        most = 1 if name in ("brightness", "colour", "contrast", "sharpness", "autocontrast") else 0
        difference = np.abs(result.astype(int) - expected.astype(int)).max()
        assert difference <= most, (name, magnitude, sign)


@pytest.mark.parametrize("shape", [(1, 1), (2, 5), (3, 3)])
def test_small_and_flat_images_survive_every_operation(shape):
    images = np.stack([np.full((*shape, 3), 7, np.uint8) for _ in NAMES])
    found = applied(images, "trivialaugment", [(operation, 0, 1) for operation in range(len(NAMES))])
    np.testing.assert_array_equal(np.delete(found, 11, axis=0), np.delete(images, 11, axis=0))


def pixels_of(policy, height, width):
    """The pixels by which each magnitude moves an image to the right and down."""
    rows = table_rows(policy, height, width).reshape(len(Operation), 31, 2, -1)
    moves = [
        [(2**15 - rows[operation, :, side, column]) / 2**16 * (1 - 2 * side) for side in (0, 1)]
        for operation, column in ((Operation.TRANSLATE_X, 3), (Operation.TRANSLATE_Y, 6))
    ]
    for there, back in moves:
        np.testing.assert_array_equal(there, back)
    return [there.tolist() for there, _ in moves]


def test_translations_are_those_of_torchvision():
    assert pixels_of("trivialaugment", 64, 48) == [TRIVIAL_PIXELS, TRIVIAL_PIXELS]
    # Images of a multiple of 331 pixels are moved by a whole number of them, which rounding must not pass by.
    right, down = pixels_of("randaugment", 662, 331)
    assert right == [5 * magnitude for magnitude in range(31)]
    assert down == [10 * magnitude for magnitude in range(31)]
    assert pixels_of("randaugment", 32, 224)[0][9:12] == [30, 33, 37]
    assert pixels_of("randaugment", 32, 224)[1][9:12] == [4, 4, 5]


def test_a_map_of_the_largest_images_does_not_overflow():
    """Of 2**14 pixels a side, the farthest corner that an operation reads stays within 32 bits."""
    side = 2**14
    for policy in POLICIES:
        ranges = ranges_of(policy, side, side)
        for operation in list(Operation)[1:6]:
            for sign in (1, -1):
                for magnitude in (10, 20, 30):
                    a, b, c, d, e, f = make_row(operation, magnitude, sign, ranges, side, side).affine
                    corners = [(p * x + q * y + r) for p, q, r in ((a, b, c), (d, e, f)) for x in (0, side - 1)
                               for y in (0, side - 1)]  # fmt: skip
                    assert max(map(abs, corners)) < 2**31


AUGMENTATIONS = {
    "randaugment": Augmentation(auto_augment="randaugment"),
    "one op": Augmentation(auto_augment="randaugment", auto_augment_ops=1, auto_augment_magnitude=14),
    "trivialaugment": Augmentation(auto_augment="trivialaugment"),
}
SEED = 5 + 2**33
run_auto = jax.jit(auto_augment, static_argnums=0)


def at_positions(start, num):
    keys = image_keys(
        jnp.array([SEED >> 32, SEED & 0xFFFFFFFF], jnp.uint32),
        Positions(jnp.zeros(num, jnp.uint32), jnp.arange(start, start + num, dtype=jnp.uint32)),
    )
    return jnp.asarray(pack_rgb(np.stack([an_image(number) for number in range(start, start + num)]))), keys


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_the_draws_of_a_position_choose_its_operations(name):
    augmentation = AUGMENTATIONS[name]
    policy, num = augmentation.auto_augment, 24
    found = unpack_rgb(np.asarray(run_auto(augmentation, *at_positions(0, num))))
    drawn = set()
    for number in range(num):
        image = an_image(number)
        for block in range(1 if policy == "trivialaugment" else augmentation.auto_augment_ops):
            first, second = words_at(SEED, number, AUTO_AUGMENT, block)
            operation, magnitude = index(first, 14), augmentation.auto_augment_magnitude
            is_negative = index(second, 2)
            if policy == "trivialaugment":
                magnitude, is_negative = divmod(index(second, 62), 2)
            drawn.add(operation)
            image = reference(image, policy, NAMES[operation], magnitude, -1 if is_negative else 1).astype(np.uint8)
        np.testing.assert_array_equal(found[number], image, err_msg=str(number))
    assert len(drawn) > 8


def test_every_row_is_drawn_equally_often():
    words = jax.random.bits(jax.random.key(0), (100_000, 1, 2), jnp.uint32)
    for magnitude, num in ((None, 14 * 62), (9, 28)):
        rows, counts = np.unique(np.asarray(draw_rows(words, magnitude)), return_counts=True)
        assert len(rows) == num
        # Six standard deviations of a count.
        assert np.abs(counts - 1e5 / num).max() < 6 * math.sqrt(1e5 / num)
        assert rows.max() < 14 * 62


def test_it_follows_the_flip_and_precedes_the_colours():
    scale = PixelScale(jnp.zeros(3), jnp.ones(3))
    augmentation = Augmentation(horizontal_flip=1.0, auto_augment="trivialaugment")
    pixels, keys = at_positions(0, 12)
    at = Positions(jnp.zeros(12, jnp.uint32), jnp.arange(12, dtype=jnp.uint32))
    seed = jnp.array([SEED >> 32, SEED & 0xFFFFFFFF], jnp.uint32)
    found, _ = jax.jit(augment_images, static_argnums=0)(augmentation, pixels, at, seed, scale)
    expected = unpack_rgb(np.asarray(run_auto(AUGMENTATIONS["trivialaugment"], pixels[:, :, ::-1], keys)))
    np.testing.assert_array_equal(np.round(np.asarray(found) * 255), expected)


def test_the_settings_reach_the_program():
    given = compiled_settings(toy_config(auto_augment="randaugment", auto_augment_ops=3, auto_augment_magnitude=25))
    assert given.augmentation == Augmentation(auto_augment="randaugment", auto_augment_ops=3, auto_augment_magnitude=25)
    off, on = (
        train(toy_config(steps=1, auto_augment=policy), model=Linear(), batches=toy_batch).losses
        for policy in ("off", "trivialaugment")
    )
    assert off[0] != on[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"auto_augment": "autoaugment"}, "auto_augment must be one of off, randaugment, trivialaugment, got"),
        ({"auto_augment_ops": 0}, "auto_augment_ops must be an integer from 1 to 16, got 0"),
        ({"auto_augment_magnitude": 31}, "auto_augment_magnitude must be an integer from 0 to 30, got 31"),
        (
            {"auto_augment": "trivialaugment", "auto_augment_ops": 3},
            "auto_augment_ops requires auto_augment randaugment, got auto_augment_ops 3 with auto_augment triv",
        ),
        ({"auto_augment_magnitude": 5}, "magnitude 5 with auto_augment off: set auto_augment to randaugment, or"),
    ],
)
def test_unfit_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        replace(Augmentation(), **settings)
