"""The whole augmentation: the result at a position does not depend on its neighbours."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from loopfeed.engine.images.augment import prepare_for_evaluation
from loopfeed.engine.images.positions import Positions, Purpose, positions
from loopfeed.engine.images.settings import Augmentation
from loopfeed.engine.images.unpack import PixelScale, unpack_pixels
from loopfeed.preprocess.pixels import pack_rgb, unpack_rgb
from tests.augment_batch import augment_batch
from tests.threefry_reference import index, words_at

pytestmark = pytest.mark.usefixtures("llvms_optimiser")

K = 7
SCALE = PixelScale(
    mean=jnp.array([0.485, 0.456, 0.406], jnp.float32), std=jnp.array([0.229, 0.224, 0.225], jnp.float32)
)
EVERYTHING = Augmentation(
    crop="resized", size=14, horizontal_flip=0.5, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1,
    mixup_alpha=0.4, cutmix_alpha=1.0, erasing=0.5,
)  # fmt: skip
CIFAR = Augmentation(crop="random", crop_padding=2, horizontal_flip=0.5)
AUGMENTATIONS = {
    "cifar": CIFAR,
    "reflected": dataclasses.replace(CIFAR, padding_mode="reflect", size=13),
    "resized": Augmentation(crop="resized", horizontal_flip=0.5),
    "colours": Augmentation(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1),
    "mixup": Augmentation(mixup_alpha=0.2),
    "cutmix": Augmentation(cutmix_alpha=1.0),
    "erasing": Augmentation(erasing=0.5),
    "everything": EVERYTHING,
}


def seed_words(seed):
    return jnp.array([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32)


def stream(start, num, side=16):
    """Packed pixels and labels, functions of the position alone."""
    pixels = np.stack([
        pack_rgb(np.random.default_rng(number).integers(256, size=(side, side, 3), dtype=np.uint8))
        for number in range(start, start + num)
    ])  # fmt: skip
    return jnp.asarray(pixels), jnp.arange(start, start + num, dtype=jnp.int32) % K


compiled_augment = jax.jit(augment_batch, static_argnums=(0, 6))


def augment(augmentation, pixels, labels, at, seed=3):
    return compiled_augment(augmentation, pixels, labels, at, seed_words(seed), SCALE, K)


def augment_stream(augmentation, start, num, seed=3):
    """Positions start … start + num - 1 in one batch; most tests use one size, whose program is compiled once."""
    at = Positions(jnp.zeros(num, jnp.uint32), jnp.arange(start, start + num, dtype=jnp.uint32))
    pixels, labels = stream(start, num)
    return augment(augmentation, pixels, labels, at, seed)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_augmentation_changes_the_images_and_keeps_their_shapes(name):
    augmentation = AUGMENTATIONS[name]
    images, targets = augment_stream(augmentation, 0, 64)
    assert images.shape == (64, *augmentation.output_shape(16, 16), 3)
    assert targets.shape == (64, K)
    np.testing.assert_array_equal(targets.sum(axis=1), np.ones(64))
    plain = augment_stream(Augmentation(), 0, 64)[0]
    assert images.shape != plain.shape or not np.array_equal(images, plain)
    assert np.isfinite(images).all()


@pytest.mark.parametrize("name", ["reflected", "everything"])
def test_batch_size_and_shards_change_no_bit(name):
    whole = augment_stream(AUGMENTATIONS[name], 0, 64)
    # Of four, whose program the loop below is compared with too.
    parts = [augment_stream(AUGMENTATIONS[name], start, 4) for start in range(0, 64, 4)]
    for found, expected in zip(zip(*parts, strict=True), whole, strict=True):
        np.testing.assert_array_equal(np.concatenate(found), expected)


ROOT = Path(__file__).parents[1]
ON_SO_MANY_DEVICES = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec
from tests.augment_batch import augment_batch
from loopfeed.engine.images.positions import positions
from tests.test_augment import EVERYTHING, K, SCALE, seed_words, stream

def run(num_devices):
    count = 32 // num_devices
    def on_each(pixels, labels):
        at = positions(jnp.int32(5), 32, jax.lax.axis_index("data") * count, count)
        return augment_batch(EVERYTHING, pixels, labels, at, seed_words(1), SCALE, K)
    mesh, spec = Mesh(jax.devices()[:num_devices], "data"), PartitionSpec("data")
    return jax.jit(jax.shard_map(on_each, mesh=mesh, in_specs=spec, out_specs=spec))(*stream(0, 32))

alone = run(1)
for num_devices in (2, 8):
    for one, other in zip(alone, run(num_devices), strict=True):
        np.testing.assert_array_equal(one, other)
"""


@pytest.mark.integration
def test_every_number_of_devices_gets_the_same_images():
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", ON_SO_MANY_DEVICES]
    assert subprocess.run(command, check=False, timeout=240, env=environment, cwd=ROOT).returncode == 0


def test_cifar_equals_numpy():
    pixels, _ = stream(0, 64)
    expected = []
    for number, image in enumerate(np.asarray(pixels)):
        row, column = words_at(3, number, Purpose.CROP, 0)
        top, left = index(row, 5), index(column, 5)
        crop = np.pad(image, 2)[top : top + 16, left : left + 16]
        expected.append(crop[:, ::-1] if words_at(3, number, Purpose.FLIP, 0)[0] < 2**31 else crop)
    images, _ = augment_stream(CIFAR, 0, 64)
    np.testing.assert_array_equal(images, jax.jit(unpack_pixels)(jnp.asarray(np.stack(expected)), SCALE))


def test_enabling_one_augmentation_keeps_the_draws_of_the_others():
    # Two programs may contract the normalisation differently: a few roundings of float32 of values up to 3.
    def is_close(one, other):
        return np.isclose(one, other, rtol=0, atol=2e-6).all(axis=-1)

    plain = augment_stream(CIFAR, 0, 64)[0]
    erased = augment_stream(dataclasses.replace(CIFAR, erasing=0.9), 0, 64)[0]
    np.testing.assert_array_equal(is_close(erased, plain), (erased != 0).any(axis=-1))
    # The same crop and flip, then whichever colours: where the padding is black, brightness shows nothing.
    black = (0 - SCALE.mean) / SCALE.std
    padding = is_close(plain, black)
    assert 0.05 < padding.mean() < 0.3
    brighter = augment_stream(dataclasses.replace(CIFAR, brightness=0.1), 0, 64)[0]
    np.testing.assert_array_equal(is_close(brighter, black), padding)
    mixed = augment_stream(AUGMENTATIONS["mixup"], 0, 64)[1]
    with_more = augment_stream(dataclasses.replace(CIFAR, mixup_alpha=0.2, erasing=0.5), 0, 64)[1]
    np.testing.assert_array_equal(mixed, with_more)


def test_a_loop_equals_single_calls_and_traces_once():
    num_traces = 0
    pixels, labels = stream(0, 4)

    def one_step(step, words):
        nonlocal num_traces
        num_traces += 1
        return augment_batch(EVERYTHING, pixels, labels, positions(step, 4, 0, 4), words, SCALE, K)

    @jax.jit
    def run(start, stop, words):
        def body(carry):
            step, _, _ = carry
            return step + 1, *one_step(step, words)

        shape = (4, *EVERYTHING.output_shape(16, 16), 3)
        return lax.while_loop(lambda carry: carry[0] < stop, body, (start, jnp.zeros(shape), jnp.zeros((4, K))))

    for start, stop, seed in ((0, 3, 3), (2**31 - 5, 2**31 - 3, 2**40)):
        step, images, targets = run(jnp.int32(start), jnp.int32(stop), seed_words(seed))
        expected = augment(EVERYTHING, pixels, labels, positions(step - 1, 4, 0, 4), seed)
        np.testing.assert_array_equal(images, expected[0])
        np.testing.assert_array_equal(targets, expected[1])
    assert num_traces == 1


@pytest.mark.parametrize("size", [None, 16, 11, 1])
def test_evaluation_crops_the_centre(size):
    pixels, _ = stream(0, 3)
    images = prepare_for_evaluation(Augmentation(size=size), pixels, SCALE)
    side, start = size or 16, round((16 - (size or 16)) / 2)
    middle = unpack_rgb(np.asarray(pixels))[:, start : start + side, start : start + side]
    levels = np.asarray(images) * np.asarray(SCALE.std) + np.asarray(SCALE.mean)
    np.testing.assert_array_equal(np.round(levels * 255), middle)


def test_evaluation_of_images_too_small():
    with pytest.raises(ValueError, match="must fit into the stored image, got 17×17 px out of 16×16 px"):
        prepare_for_evaluation(Augmentation(size=17), stream(0, 1)[0], SCALE)
