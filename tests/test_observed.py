"""What the program shows of its inside: histograms of weights and gradients, and images as the network sees them."""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopfeed import train
from tests.toy import BATCH, SIZE, CountedBatches, Linear, toy_batch, toy_config

ROOT = Path(__file__).parents[1]
PLAIN: dict[str, Any] = {"momentum": 0.0, "weight_decay": 0.0, "learning_rate": 0.5}


@dataclass
class Seen:
    """A sink that keeps what it takes."""

    histograms: list[Any] = field(default_factory=list)
    images: list[Any] = field(default_factory=list)
    order: list[Any] = field(default_factory=list)

    def open(self):
        pass

    def write(self, record):
        self.order.append(("loss", record.step))

    def write_evaluation(self, record):
        self.order.append(("evaluation", record.step))

    def write_histograms(self, histograms):
        self.histograms.append(histograms)
        self.order.append(("histograms", histograms.step))

    def write_images(self, images):
        self.images.append(images)
        self.order.append(("images", images.step))

    def close(self):
        pass


def run(model=None, batches=None, **values):
    seen = Seen()
    config = toy_config(**(PLAIN | values))
    return train(config, model=model or Linear(), batches=batches or CountedBatches(), sinks=[seen]), seen


@pytest.fixture(scope="module")
def plain():
    return run(steps=7)[0]


@pytest.fixture(scope="module")
def observed():
    return run(steps=7, histogram_every_steps=3, log_images_every_steps=2)


def gradient(params, batches):
    """Return the mean gradient of the toy model's loss over batches of the toy data, computed outside of the engine."""

    def loss_of(params):
        losses = []
        for pixels, labels in batches:
            levels = np.stack([pixels >> shift & 255 for shift in (24, 16, 8)], axis=-1)
            images = ((levels / 255 - 0.5) / 0.25).astype(np.float32).reshape(len(labels), -1)
            logits = images @ params["weights"] + params["bias"]
            losses.append(jnp.mean(jax.nn.logsumexp(logits, axis=1) - logits[np.arange(len(labels)), labels]))
        return sum(losses) / len(losses)

    return jax.device_get(jax.jit(jax.grad(loss_of))(params))


def assert_histogram_of(histogram, array, tolerance=0.0):
    """Assert that a histogram is that of an array, whose numbers may differ by a tolerance."""
    array = np.asarray(array)
    np.testing.assert_allclose(histogram.edges[[0, -1]], [array.min(), array.max()], rtol=0, atol=tolerance)
    np.testing.assert_allclose(histogram.mean, array.mean(), rtol=1e-5, atol=1e-7 + tolerance)
    np.testing.assert_allclose(histogram.std, array.std(), rtol=1e-5, atol=1e-7 + tolerance)
    below, above = (np.histogram(array + shift, [-np.inf, *histogram.edges[1:-1], np.inf])[0] for shift in
                    (-tolerance, tolerance))  # fmt: skip
    counted = np.cumsum(histogram.counts)
    assert np.all((np.cumsum(above) <= counted) & (counted <= np.cumsum(below)))
    assert histogram.num_nonfinite == 0


def test_the_run_is_the_same_bit_for_bit(plain, observed):
    result, _ = observed
    np.testing.assert_array_equal(result.losses, plain.losses)
    jax.tree.map(np.testing.assert_array_equal, (result.params, result.batch_stats), (plain.params, plain.batch_stats))


def test_each_arrives_once_after_its_step(observed):
    _, seen = observed
    assert seen.order == [
        ("loss", 1), ("loss", 2), ("images", 2), ("loss", 3), ("histograms", 3), ("loss", 4), ("images", 4),
        ("loss", 5), ("loss", 6), ("histograms", 6), ("images", 6), ("loss", 7),
    ]  # fmt: skip


def test_histograms_are_of_the_weights_after_the_update_and_of_its_gradient():
    start, _ = run(steps=0)
    result, seen = run(steps=1, histogram_every_steps=1)
    (pushed,) = seen.histograms
    assert list(pushed.histograms) == ["weights/bias", "weights/weights", "gradients/bias", "gradients/weights"]
    for name, leaf in result.params.items():
        assert_histogram_of(pushed.histograms[f"weights/{name}"], leaf)
    for name, leaf in gradient(start.params, [toy_batch(0)]).items():
        # The engine's matrix products round otherwise.
        assert_histogram_of(pushed.histograms[f"gradients/{name}"], leaf, tolerance=1e-6)


def test_the_gradient_is_that_of_the_whole_update_before_it_is_clipped():
    start, _ = run(steps=0)
    result, seen = run(steps=1, histogram_every_steps=1, accumulate_steps=2, clip_norm=1e-3)
    expected = gradient(start.params, [toy_batch(0), toy_batch(1)])
    assert np.abs(result.params["weights"] - start.params["weights"]).max() < 1e-3
    for name, leaf in expected.items():
        assert_histogram_of(seen.histograms[0].histograms[f"gradients/{name}"], leaf, tolerance=1e-6)


def rgb(step):
    pixels, labels = toy_batch(step)
    return np.stack([pixels >> shift & 255 for shift in (24, 16, 8)], axis=-1).astype(np.uint8), labels


def test_images_are_those_of_the_batch(observed):
    _, seen = observed
    for pushed in seen.images:
        pixels, labels = rgb(pushed.step - 1)
        np.testing.assert_array_equal(pushed.images, pixels)
        np.testing.assert_array_equal(pushed.labels, labels)
        assert pushed.mix_weights is None


def test_images_are_augmented_and_mixed():
    pixels, labels = rgb(0)
    _, seen = run(steps=1, log_images_every_steps=1, flip=1.0, mixup=1.0)
    (pushed,) = seen.images
    share = pushed.mix_weights[:, None, None, None]
    assert 0 < share.min() < share.max() < 1
    partners = pixels.reshape(BATCH // 2, 2, SIZE, SIZE, 3)[:, ::-1].reshape(pixels.shape)
    mixed = (share * pixels + (1 - share) * partners)[:, :, ::-1]
    np.testing.assert_allclose(pushed.images, mixed, rtol=0, atol=0.5 + 1e-4)  # rounded
    np.testing.assert_array_equal(pushed.labels, labels)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"transport": "callback"}, marks=pytest.mark.integration),
        {"transport": "cuda", "chunk_batches": 3, "accumulate_steps": 2},
    ],
    ids=["callback", "cuda-accumulated"],
)
def test_transports_and_chunks_push_the_same(how, observed, cards):
    cadences = {"histogram_every_steps": 3, "log_images_every_steps": 2}
    expected, _ = run(steps=7, **how)
    result, seen = run(steps=7, **cadences, **how)
    np.testing.assert_array_equal(result.losses, expected.losses)
    others = observed[1]
    assert [each for each in seen.order if each[0] != "loss"] == [each for each in others.order if each[0] != "loss"]
    assert all(each.histograms["gradients/weights"].counts.sum() == 144 for each in seen.histograms)
    num_pulls = how.get("accumulate_steps", 1)
    for pushed in seen.images:
        np.testing.assert_array_equal(pushed.images, rgb(num_pulls * pushed.step - 1)[0])


def test_a_resumed_run_goes_on_with_its_cadence(tmp_path, observed):
    settings = {"run_dir": tmp_path / "run", "histogram_every_steps": 3, "log_images_every_steps": 2}
    _, before = run(**settings, steps=4)
    _, after = run(**settings, steps=7, resume=True)
    assert [each.step for each in (*before.histograms, *after.histograms)] == [3, 6]
    assert [each.step for each in (*before.images, *after.images)] == [2, 4, 6]
    last = observed[1].histograms[-1]
    jax.tree.map(np.testing.assert_array_equal, after.histograms[0].histograms, last.histograms)


ON_TWO_DEVICES = """
import numpy as np
from tests.test_observed import run
for devices in ("cpu:2", "cpu:1"):
    result, seen = run(steps=4, devices=devices, histogram_every_steps=2, log_images_every_steps=2, accumulate_steps=2)
    plain, _ = run(steps=4, devices=devices, accumulate_steps=2)
    np.testing.assert_array_equal(result.losses, plain.losses)
    one, two = (each.histograms["gradients/weights"] for each in seen.histograms)
    numbers = (f"{number:.5f}" for number in (one.mean, one.std, two.std))
    print([each.step for each in seen.histograms], one.counts.sum(), *numbers)
    print([each.step for each in seen.images], [len(each.images) for each in seen.images])
"""


@pytest.mark.integration
def test_on_several_devices_the_gradient_is_that_of_all_and_images_are_of_the_first():
    """In a process of its own, because jax makes its devices only once."""
    command = [sys.executable, "-c", ON_TWO_DEVICES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    gradients, images, of_one, images_of_one = done.stdout.splitlines()
    assert gradients == of_one
    assert gradients.startswith("[2, 4] 144 ")
    assert (images, images_of_one) == ("[2, 4] [4, 4]", "[2, 4] [8, 8]")
