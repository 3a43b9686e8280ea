"""What is wrong with a model of the user's is said before the program is compiled, by the model's name."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest

from loopfeed import convolution, train
from loopfeed.engine.feed.batches import FunctionBatches
from loopfeed.engine.program.checked_model import CheckedModel, size_refusal
from loopfeed.engine.program.kernels import count_lax_convolutions
from loopfeed.engine.updates.update import Weights
from loopfeed.models.kernels import XLA
from loopfeed.models.registry import build_model
from tests.toy import CLASSES, Linear, toy_batch, toy_config


class Net(Linear):
    """A linear network with faults: what init and apply return is changed by functions."""

    def __init__(self, init=lambda drawn: drawn, apply=lambda given: given):
        super().__init__(name="Net")
        self.change_init, self.change_apply = init, apply

    def init(self, key):
        return self.change_init(super().init(key))

    def apply(self, params, batch_stats, images, train):
        return self.change_apply(super().apply(params, batch_stats, images, train))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            Net(lambda drawn: drawn[0]),
            r"that of Net returned a dict with the keys .*: return \(params, {}\) if the model has no running",
        ),
        (Net(lambda drawn: (*drawn, 1)), r"init must return a tuple \(params, batch_stats\), .* returned a tuple of 3"),
        (
            Net(lambda drawn: {"params": drawn[0], "batch_stats": drawn[1]}),
            r"Net returned Flax's variables, a dict of params and batch_stats: return \(variables\[\"params\"\]",
        ),
        (Net(lambda drawn: (drawn[0] | {"kind": "conv"}, {})), "that of Net returned str as params.kind: make it an"),
        (Net(apply=lambda given: given[0]), r"that of Net returned float32 \[8, 3\]: return \(logits, batch"),
        (Net(apply=lambda given: (*given, 1)), r"apply must return a tuple .* that of Net returned a tuple of 3"),
    ],
)
def test_a_fault_of_a_model_is_named_before_anything_compiles(model, message):
    lines: list[str] = []
    with pytest.raises(ValueError, match=message):
        train(toy_config(), model=model, batches=toy_batch, notify=lines.append)
    assert not [line for line in lines if line.startswith("compiled")]


def test_more_logits_than_classes_are_mentioned_once():
    lines: list[str] = []
    wider = Net(apply=lambda given: (jnp.pad(given[0], ((0, 0), (0, 2))), given[1]))
    train(toy_config(steps=1), model=wider, batches=toy_batch, notify=lines.append)
    expected = f"Net returns {CLASSES + 2} logits per image for {CLASSES} classes; no label has the last 2"
    assert [line for line in lines if "logits" in line] == [expected]


class Keyed(Linear):
    """A linear network on the mean pixel, whose `apply` takes keys; its training alone fails at 8 px."""

    def init(self, key):
        return {"bias": jnp.zeros(CLASSES)}, {}

    def apply(self, params, batch_stats, images, train, key=None):
        assert (key is None) != train
        if train and images.shape[1] == 8:
            raise KeyError(8)
        return images.mean((1, 2)) @ jnp.ones((3, CLASSES)) + params["bias"], batch_stats


@pytest.mark.parametrize(
    ("model", "size", "train", "refusal"),
    [
        (Linear(), 4, False, None),
        (Linear(), 5, False, r"TypeError: dot_general requires contracting dimensions .* got \(75,\) and \(48,\)"),
        (Keyed(), 8, False, None),
        (Keyed(), 4, True, None),
        (Keyed(), 8, True, r"KeyError: 8$"),
        (build_model("resnet8", num_classes=CLASSES, image_size=32), 19, True, None),
        (build_model("vit-s16", num_classes=CLASSES, image_size=32), 48, True, None),
        (
            build_model("vit-s16", num_classes=CLASSES, image_size=32),
            40,
            False,
            r"^images for a vision transformer must .* got 40 × 40 px: choose an image size of 32 or 48 px$",
        ),
        (build_model("convnext-tiny", num_classes=CLASSES, image_size=32), 31, False, "at least 32 × 32 px to be"),
    ],
)
def test_whether_a_model_takes_images_of_a_size_is_known_from_its_shapes(model, size, train, refusal):
    checked = CheckedModel(model, CLASSES, FunctionBatches(toy_batch, num_classes=CLASSES), XLA)
    weights = Weights(*jax.eval_shape(model.init, jax.random.key(0)))
    found = size_refusal(checked, weights, size, batch=2, train=train)
    assert found is None if refusal is None else re.search(refusal, str(found))


class Slow(Linear):
    """A linear network after two of `lax`'s convolutions."""

    def init(self, key):
        params, batch_stats = super().init(key)
        return params | {"kernels": 0.1 * jax.random.normal(key, (2, 3, 3, 3, 3))}, batch_stats

    def apply(self, params, batch_stats, images, train):
        for kernel in params["kernels"]:
            numbers = ("NHWC", "HWIO", "NHWC")
            images = jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=numbers)
        return super().apply(params, batch_stats, images, train)


def test_convolutions_that_are_slow_in_the_loop_are_counted():
    lines: list[str] = []
    train(toy_config(steps=1), model=Slow(), batches=toy_batch, notify=lines.append)
    (warning,) = (line for line in lines if line.startswith("warning: "))
    assert warning.startswith("warning: 2 convolutions of the model are jax.lax.conv_general_dilated, whose gradients")
    plain: list[str] = []
    train(toy_config(steps=1), model=Linear(), batches=toy_batch, notify=plain.append)
    assert not [line for line in plain if "convolution" in line]


def test_a_folder_of_the_user_with_the_name_of_ours_is_not_ours(tmp_path):
    path = tmp_path / "mine/models/layers/c.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import jax\n"
        "def convolve(images, kernel):\n"
        "    numbers = ('NHWC', 'HWIO', 'NHWC')\n"
        "    return jax.lax.conv_general_dilated(images, kernel, (1, 1), 'SAME', dimension_numbers=numbers)\n"
    )
    spec = importlib.util.spec_from_file_location("convolve_of_the_user", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def count(convolve):
        images, kernel = jnp.ones((1, 4, 4, 3)), jnp.ones((3, 3, 3, 2))
        gradient = jax.make_jaxpr(jax.grad(lambda kernel: convolve(images, kernel).sum()))
        return count_lax_convolutions(gradient(kernel).jaxpr)

    assert count(module.convolve) == 1
    assert count(convolution) == 0
