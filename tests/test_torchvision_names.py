"""The models under torchvision's names: against a PyTorch reference, there and back, and what is refused."""

import importlib.util
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from loopfeed.models.registry import build_model, find_network, model_names
from loopfeed.models.torchvision_names import from_torchvision, to_torchvision

REFERENCE = Path(__file__).with_name("torch_resnet_reference.py")


def torch_python():
    if importlib.util.find_spec("torch") is not None:
        return sys.executable
    if python := os.environ.get("LOOPFEED_TORCH_PYTHON"):
        return python
    pytest.skip("PyTorch is not installed here; name an interpreter that has it in LOOPFEED_TORCH_PYTHON")


def drawn(name):
    """Parameters and batch statistics with a different value everywhere: a swapped pair cannot pass."""
    shapes = jax.eval_shape(build_model(name, num_classes=10, image_size=32).init, jax.random.key(0))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.random(leaf.shape, np.float32), shapes)


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnet50-d"])
def test_a_pytorch_network_gives_the_same_logits_and_running_statistics(name, tmp_path):
    out = tmp_path / "reference.npz"
    subprocess.run([torch_python(), REFERENCE, name, out], check=True, timeout=240)
    with np.load(out) as arrays:
        reference = dict(arrays)
    weights = {key.removeprefix("weight/"): value for key, value in reference.items() if key.startswith("weight/")}
    params, batch_stats = from_torchvision(name, weights)
    model = build_model(name, num_classes=10, image_size=64)
    images = reference["images"].transpose(0, 2, 3, 1)

    for train, wanted in ((False, reference["logits_eval"]), (True, reference["logits_train"])):
        logits, after = jax.jit(partial(model.apply, train=train))(params, batch_stats, images)
        # 50 float32 layers of sums in another order: 1e-4 of the largest logit.
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())
    tensors = to_torchvision(name, params, after)
    moved = [key for key in tensors if "running" in key]
    assert len(moved) == sum("after/" in key for key in reference)
    for key in moved:
        wanted = reference[f"after/{key}"]
        np.testing.assert_allclose(tensors[key], wanted, rtol=0, atol=1e-4 * np.abs(wanted).max(), err_msg=key)


def paths(tree):
    return [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


@pytest.mark.parametrize(
    "name", ["resnet8", "resnet18", "resnet50", "resnet50-xlajl", "resnet50-d", "convnet8", "convnet8-wide"]
)
def test_there_and_back_changes_nothing(name):
    params, batch_stats = drawn(name)
    back = from_torchvision(name, to_torchvision(name, params, batch_stats))
    assert paths(back) == paths((params, batch_stats))
    jax.tree.map(np.testing.assert_array_equal, back, (params, batch_stats))


def test_the_d_variant_has_timms_names():
    params, batch_stats = drawn("resnet50-d")
    tensors = to_torchvision("resnet50-d", params, batch_stats)
    assert len(tensors) == 320 + 2 * 6  # two more convolutions, each with a norm of five tensors
    assert tensors["conv1.0.weight"].shape == (32, 3, 3, 3)
    assert tensors["conv1.4.running_var"].shape == (32,)
    assert tensors["conv1.6.weight"].shape == (64, 32, 3, 3)
    assert tensors["layer1.0.downsample.1.weight"].shape == (256, 64, 1, 1)
    assert tensors["layer1.0.downsample.2.running_mean"].shape == (256,)


def test_a_network_that_torchvision_has_not_goes_by_its_own_paths_in_the_same_layouts():
    params, batch_stats = drawn("convnet8")
    tensors = to_torchvision("convnet8", params, batch_stats)
    assert len(tensors) == 7 * 5 + 2  # seven convolutions, each with a norm of four tensors; a classifier of two
    kernel = params["stage2"]["1"]["conv"]["kernel"]
    assert tensors["stage2.1.conv.weight"][5, 7, 0, 2] == kernel[0, 2, 7, 5]
    assert tensors["stem.norm.running_mean"].shape == (24,)
    assert tensors["fc.weight"].shape == (10, 256)
    with pytest.raises(ValueError, match=r"not those of convnet8: missing stage1\.0\.norm\.bias; choose"):
        from_torchvision("convnet8", {key: value for key, value in tensors.items() if key != "stage1.0.norm.bias"})


def test_every_model_can_be_exported():
    for name in model_names():
        if name == "vit-b16":
            continue  # vit-s16 with four times as many numbers
        model = build_model(name, num_classes=3, image_size=32)
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        params, batch_stats = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
        assert to_torchvision(name, params, batch_stats)[f"{find_network(name).head}.bias"].shape == (3,)


def test_tensors_that_are_not_the_models_are_refused_by_name():
    params, batch_stats = drawn("resnet8")
    tensors = to_torchvision("resnet8", params, batch_stats)
    without = {key: value for key, value in tensors.items() if key != "layer1.0.conv1.weight"}
    with pytest.raises(ValueError, match=r"not those of resnet8: missing layer1\.0\.conv1\.weight; choose"):
        from_torchvision("resnet8", without)
    with pytest.raises(ValueError, match=r"unexpected head\.weight"):
        from_torchvision("resnet8", tensors | {"head.weight": np.zeros(3)})
    with pytest.raises(ValueError, match=r"bn1\.weight is \(3,\) instead of \(16,\)"):
        from_torchvision("resnet8", tensors | {"bn1.weight": np.zeros(3)})
    with pytest.raises(ValueError, match=r"resnet18: missing .* and \d+ more"):
        to_torchvision("resnet18", params, batch_stats)
    with pytest.raises(ValueError, match=r"needs a vector fc\.bias"):
        from_torchvision("resnet8", {})
    with pytest.raises(ValueError, match=r"model must be auto or a name .*, got 'resnet9'"):
        from_torchvision("resnet9", tensors)
