"""Exports of trained weights: what they compute beside `predict`, what they record, and where they must not be."""

import json
import os
import subprocess
import sys
import zipfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from loopfeed import export_model, max_pool, predict, read_weights, train
from loopfeed.engine.config import TrainConfig
from loopfeed.engine.evaluation.subject import Subject
from loopfeed.engine.export.exported_model import ExportedModel, export_weights_file
from loopfeed.engine.export.onnx_file import onnx_file
from loopfeed.engine.export.timm_folder import crop_share
from loopfeed.engine.records.given_weights import read_given_weights
from loopfeed.engine.updates.update import Weights
from loopfeed.preprocess.decoding.decode import ResizeRule
from scripts.benchmarks.drawn_weights import write_drawn_weights
from tests.page_programs import page_program
from tests.toy import Linear, toy_batch, toy_config

pytestmark = pytest.mark.usefixtures("small_resnets")

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), dtype=np.uint8)
# Before the page's program, which has jax alone, and after it.
WITHOUT_OTHERS = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("loopfeed", "onnx", "safetensors", "optax", "orbax", "flax", "equinox", "PIL"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
"""
SAVED = """
assert program.call(images[:1])["logits"].shape == (1, 3)
np.savez("found.npz", **found)
print(program.platforms, about["classes"][1]["name"], about["preprocessing"])
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "run"
    train(toy_config(steps=2, run_dir=folder), model=Linear(), batches=toy_batch)
    return folder


@pytest.fixture(scope="module")
def resnet18(tmp_path_factory):
    return write_drawn_weights(tmp_path_factory.mktemp("resnet18") / "resnet18.safetensors", "resnet18")


@pytest.fixture(scope="module")
def weights(tmp_path_factory, small_resnets):
    return write_drawn_weights(tmp_path_factory.mktemp("weights") / "resnet14.safetensors", "resnet14")


def predicted(source, pixels, **given):
    """Return the probabilities of `predict` in the order of the classes."""
    found = predict(source, pixels, top=100, **given)
    ordered = np.empty_like(found.probabilities)
    np.put_along_axis(ordered, found.labels, found.probabilities, axis=1)
    return ordered


def in_onnxruntime(content, pixels):
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(None, {"images": pixels}), strict=True)), session.get_modelmeta()


def test_the_program_of_the_page_runs_stablehlo_with_jax_alone(weights, tmp_path):
    pixels = np.random.default_rng(1).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    np.save(tmp_path / "images.npy", pixels)
    export_model(weights, tmp_path / "photos.stablehlo")
    zeros = {"np.zeros((2, 224, 224, 3), np.uint8)": 'np.load("images.npy")'}
    program = WITHOUT_OTHERS + page_program("export.md", "deserialize", zeros) + SAVED
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    first, rest = done.stdout.split("\n", 1)
    assert first.startswith("name ")
    assert rest.startswith("('cpu', 'cuda', 'tpu') name 1 {'size': 32, 'resize': 37, 'resample': 'bilinear'")
    found = np.load(tmp_path / "found.npz")
    # XLA sums a convolution in another order than oneDNN.
    np.testing.assert_allclose(found["probabilities"], predicted(weights, pixels), rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(found["probabilities"], jax.nn.softmax(found["logits"]), rtol=1e-5)


def test_onnx_computes_what_predict_does_for_any_number_of_images(weights, tmp_path, monkeypatch, capsys):
    pixels = np.random.default_rng(1).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    written = export_model(weights, tmp_path / "a.onnx")
    content = (tmp_path / "a.onnx").read_bytes()
    assert written.num_bytes == len(content)
    onnx = pytest.importorskip("onnx")
    stored = onnx.load_from_string(content).graph.initializer
    # The weights once: a convolution's and the head's; what is left are norms and shapes.
    num_kernels = sum(each.size for each in read_given_weights(weights).stored.tensors.values() if each.ndim > 1)
    assert (
        sum(np.prod(each.dims) for each in stored if len(each.dims) in (2, 4) and 1 not in each.dims[:2]) <= num_kernels
    )
    found, about = in_onnxruntime(content, pixels)
    np.testing.assert_allclose(found["probabilities"], predicted(weights, pixels), rtol=2e-5, atol=1e-6)
    alone, _ = in_onnxruntime(content, pixels[:1])
    np.testing.assert_allclose(alone["logits"], found["logits"][:1], rtol=0, atol=1e-5 * np.abs(found["logits"]).max())
    described = about.custom_metadata_map
    assert json.loads(described["classes"])[2] == {"id": "n2", "name": "name 2"}
    assert json.loads(described["preprocessing"]) == {"size": 32, "resize": 37, "resample": "bilinear", "crop": 32}
    assert json.loads(described["mean"]) == [0.5, 0.4, 0.3]
    monkeypatch.chdir(tmp_path)
    exec(page_program("export.md", "InferenceSession", {"photos.onnx": "a.onnx", "224": "32"}), {})
    assert capsys.readouterr().out.startswith("name ")


def test_a_folder_of_timm_says_what_the_weights_need_and_is_read_back(resnet18, tmp_path):
    export_model(resnet18, tmp_path / "folder")
    config = json.loads((tmp_path / "folder/config.json").read_text())
    assert (config["architecture"], config["num_classes"]) == ("resnet18", 3)
    pretrained = config["pretrained_cfg"]
    assert (
        pretrained
        | {
            "input_size": [3, 32, 32],
            "interpolation": "bilinear",
            "mean": [0.5, 0.4, 0.3],
            "std": [0.2, 0.3, 0.1],
            "label_names": ["n0", "n1", "n2"],
            "first_conv": "conv1",
            "classifier": "fc",
        }
        == pretrained
    )
    assert int(32 / pretrained["crop_pct"]) == 37
    back, given = read_given_weights(tmp_path / "folder").stored, read_given_weights(resnet18).stored
    for name, tensor in given.tensors.items():
        np.testing.assert_array_equal(back.tensors[name], tensor)
    assert all(back.metadata[key] == value for key, value in given.metadata.items() if key not in ("digest", "sha256"))
    assert all(
        int(size / crop_share(size, resize)) == resize
        for resize in range(20, 600)
        for size in (19, 20, 224, 599)
        if size <= resize
    )


def test_a_model_of_your_own_that_reads_the_number_of_images_is_exported(run, tmp_path):
    saved = read_weights(run / "model.safetensors")
    mean, std = (np.array(list(map(float, saved.metadata[key].split()))) for key in ("mean", "std"))
    flat = ((PIXELS / 255 - mean) / std).reshape(len(PIXELS), -1)
    expected = flat @ saved.params["weights"] + saved.params["bias"]
    export_model(run, tmp_path / "a.onnx", model=Linear())
    found, _ = in_onnxruntime((tmp_path / "a.onnx").read_bytes(), PIXELS)
    np.testing.assert_allclose(found["logits"], expected, rtol=1e-5, atol=1e-5)
    export_model(run, tmp_path / "a.stablehlo", model=Linear())
    with zipfile.ZipFile(tmp_path / "a.stablehlo") as file:
        program = jax.export.deserialize(bytearray(file.read("program.bin")))
    np.testing.assert_allclose(program.call(PIXELS)["logits"], expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="timm has no network like linear: export it as ONNX or StableHLO"):
        export_model(run, tmp_path / "folder", model=Linear())
    with pytest.raises(ValueError, match=r"a model \(linear\) of your own, which must be given again: model=…$"):
        export_model(run, tmp_path / "b.onnx")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.onnx", "a.stablehlo"]


def squared(outputs, labels, weights):
    return jnp.square(outputs - labels).sum(axis=1)


@pytest.mark.parametrize(
    ("given", "link"), [({"loss": "binary-cross-entropy"}, lambda logits: 1 / (1 + np.exp(-logits))), ({}, None)]
)
def test_several_classes_per_image_and_numbers_have_outputs_of_their_own(tmp_path, given, link):
    def batches(step):
        pixels, labels = toy_batch(step)
        return pixels, np.eye(3, dtype=np.float32)[labels]

    run = tmp_path / "run"
    train(toy_config(steps=1, run_dir=run, **given), model=Linear(), batches=batches, loss=None if given else squared)
    export_model(run, tmp_path / "a.onnx", model=Linear())
    found, about = in_onnxruntime((tmp_path / "a.onnx").read_bytes(), PIXELS)
    assert about.custom_metadata_map["targets"] == ("classes" if given else "numbers")
    assert list(found) == (["logits", "probabilities"] if given else ["outputs"])
    if link is not None:
        np.testing.assert_allclose(found["probabilities"], link(found["logits"]), rtol=1e-5)


RANDOM = np.random.default_rng(2)
KERNEL: Any = RANDOM.normal(size=(3, 3, 4, 6)).astype(np.float32)
GROUPED: Any = RANDOM.normal(size=(3, 3, 1, 4)).astype(np.float32)
TWENTY = np.arange(20, dtype=np.float32)
SQUARE = RANDOM.normal(size=(4, 4)).astype(np.float32)
NHWC = ("NHWC", "HWIO", "NHWC")


def pooled(x, start, operation, padding="SAME"):
    return lax.reduce_window(x, start, operation, (1, 2, 3, 1), (1, 2, 1, 1), padding)


CHANNELS = RANDOM.uniform(0.5, 2, 6).astype(np.float32)


def convolved(x):
    return lax.conv_general_dilated(x, KERNEL, (1, 1), "SAME", dimension_numbers=NHWC)


OPERATIONS = {
    "elementwise": lambda x: jnp.expm1(x) + jnp.log1p(x**2) - jnp.tanh(x) * jnp.sign(x) / (1 + jnp.abs(x)),
    "few channels": lambda x: (jnp.broadcast_to(x[:, :1, :1], x.shape) * SQUARE[0])[:, 2:] - (x * SQUARE[1])[:, 2:],
    "powers": lambda x: x**3 + jnp.power(jnp.abs(x) + 1, 0.3) + lax.integer_pow(x, -2) * 1e-6 + lax.rsqrt(x * x + 1),
    "choices": lambda x: jnp.where((x > 0) & (x != 1) | ~(x <= -1), x, -x) + jnp.clip(x, -0.5, 0.5) + jnp.round(x),
    "shapes": lambda x: jnp.concatenate(
        [jnp.flip(x, 1)[:, :, 1:3:2], jnp.flip(x, (1, 2))[:, :, :1], x[:, -1:, :1] * x[:, :, :1]], 2
    ),
    "padding": lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 2), (0, 0)), constant_values=2.0),
    "indices": lambda x: jnp.argmax(x, 3) * x[:, 2, None, :, 0] + x[..., 1],
    "taken": lambda x: x[:, :, jnp.array([3, 0])].sum(1) + jnp.take(x, jnp.array([[1, 2]]), axis=1)[:, 0, :, :2].sum(1),
    "split": lambda x: sum(each.max(-1) for each in jnp.split(x, 2, axis=-1)),
    "reductions": lambda x: x.mean((1, 2)) + x.min((1, 2)) * x.prod(2).sum(1) + jax.nn.logsumexp(x, axis=(1, 2)),
    "convolution": lambda x: lax.conv_general_dilated(x, KERNEL, (2, 1), ((0, 1), (2, 1)), dimension_numbers=NHWC),
    "dilated": lambda x: lax.conv_general_dilated(
        x, KERNEL, (1, 1), "SAME", rhs_dilation=(2, 1), dimension_numbers=NHWC
    ),
    "depthwise": lambda x: lax.conv_general_dilated(
        x, GROUPED, (1, 1), "SAME", dimension_numbers=NHWC, feature_group_count=4
    ),
    "norm": lambda x: 2 - jax.nn.relu((convolved(x) - CHANNELS) * CHANNELS / 3 + 1) * (convolved(x) / CHANNELS),
    "scaled": lambda x: convolved(x) * jnp.arange(20.0).reshape(4, 5, 1) + convolved(x) ** 2,
    "read twice": lambda x: (
        jnp.minimum(convolved(x), 0.5)
        - (y := convolved(x) + 2) * y * y.mean((1, 2))[:, None, None]
        + ((z := convolved(x)) * CHANNELS - z)
    ),
    "hard": lambda x: x * (jnp.clip(3 + x, 0, 6) / 6) + jnp.clip(x + 3, 1, 6) / 6 + 6 / jnp.clip(x + 6, 5, 7) / 7,
    "nearly hard": lambda x: jnp.clip(x + 1, 0, 0.5) / 6 + jnp.clip(x + 1, 0.5, 6) / 6,
    "reversed": lambda x: (
        (2 - convolved(x)) * CHANNELS
        + CHANNELS / lax.conv_general_dilated(x * x + 1, np.abs(KERNEL), (1, 1), "SAME", dimension_numbers=NHWC)
    ),
    "equal bytes": lambda x: x * TWENTY.reshape(5, 4) + (x.swapaxes(2, 3) * TWENTY.reshape(4, 5)).swapaxes(2, 3),
    "largest": lambda x: pooled(x, -jnp.inf, lax.max) + max_pool(x, window=2, stride=1, padding=0)[:, :1, :1],
    "sums": lambda x: pooled(x, 0.0, lax.add),
    "products": lambda x: jnp.einsum("bhwc,cd,bhwe->bde", x, SQUARE, x) + jnp.einsum("bhwc,bhvc->bwv", x, x)[:, :4, :4],
    "matrices": lambda x: (x.reshape(-1, 4) @ SQUARE @ SQUARE[:, 1]).reshape(x.shape[:3]) * x[..., 0],
    "edges": lambda x: jnp.pad(x, ((0, 0), (2, 0), (0, 1), (0, 0)), mode="edge"),
    "checkpoint": jax.checkpoint(lambda x: jax.nn.gelu(x, approximate=False)),
    "counted": lambda x: pooled(x.reshape(len(x), 4, 5, 4), 0.0, lax.add) + pooled(x, -jnp.inf, lax.max),
    "half": lambda x: (x.astype(jnp.float16) @ SQUARE.astype(np.float16)).astype(jnp.float32),
    "narrow": lambda x: (x.astype(jnp.bfloat16) * 2).astype(jnp.float32),
    "attention": lambda x: jax.nn.softmax(jnp.einsum("bhwc,bhvc->bhwv", x, x), -1) @ jax.nn.gelu(x),
}


class Own:
    """A model of one operation on four channels, whose results it flattens."""

    def __init__(self, operation):
        self.operation = operation

    def init(self, _):
        return {}, {}

    def apply(self, params, batch_stats, images, train):
        x = jnp.concatenate([images, images[..., :1] * images[..., 1:2]], axis=-1)
        y = self.operation(x)
        return y.reshape(x.shape[0], -1), batch_stats


def exported(model):
    subject = Subject(model, Weights({}, {}), TrainConfig(), (0.5,) * 3, (0.3,) * 3, None, 0, "own")
    return ExportedModel(subject, (4, 5), ResizeRule(size=5, resize=5), "numbers", {}, "own")


def test_norms_are_part_of_convolutions_what_onnx_has_is_one_node_and_equal_constants_are_stored_once(weights):
    onnx = pytest.importorskip("onnx")

    def twice(x):
        return (convolved(x) - CHANNELS) * CHANNELS + (convolved(jnp.flip(x, 2)) - CHANNELS) * CHANNELS

    network = export_weights_file(str(weights), None, None, print, None)
    for model, wanted in (
        (network, {"Conv": 3, "Relu": 3, "Add": 2, "Mul": 0, "Sub": 2}),
        (exported(Own(twice)), {"Conv": 2, "Add": 1, "Mul": 1, "Sub": 1}),
        (exported(Own(lambda x: max_pool(jax.nn.hard_swish(x)))), {"HardSigmoid": 1, "MaxPool": 1, "Div": 2}),
        # Its kernel would be infinite.
        (exported(Own(lambda x: convolved(x) * 1e30 * 1e30)), {"Conv": 1, "Mul": 3}),
    ):
        graph = onnx.load_from_string(onnx_file(model)).graph
        kinds = [each.op_type for each in graph.node]
        assert {kind: kinds.count(kind) for kind in wanted} == wanted
        stored = [onnx.numpy_helper.to_array(each) for each in graph.initializer]
        assert len({(each.dtype, each.shape, each.tobytes()) for each in stored}) == len(stored)
        assert (1, 1, 1, 3) not in {each.shape for each in stored}  # which ONNX Runtime adds slowly


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_of_lax_is_that_of_onnx(name):
    model = Own(OPERATIONS[name])
    pixels = np.random.default_rng(3).integers(0, 256, (3, 4, 5, 3), dtype=np.uint8)
    found, _ = in_onnxruntime(onnx_file(exported(model)), pixels)
    expected, _ = model.apply(
        {}, {}, jnp.asarray((pixels / np.float32(255) - np.float32(0.5)) / np.float32(0.3)), False
    )
    # bfloat16 is computed in float32, of which it keeps eight bits.
    tolerance = 0.01 if name in ("narrow", "half") else 2e-5
    np.testing.assert_allclose(found["outputs"], expected, rtol=tolerance, atol=tolerance)


def test_an_operation_that_onnx_lacks_here_is_named():
    for operation, message in (
        (lax.sort, r"the primitive sort\."),
        (lambda x: x * (jnp.argmax(x, 3, keepdims=True) & 1), "the primitive and of whole numbers"),
        (lambda x: x[:, :, jnp.array([0, 9])], "gather at the index 9 of an axis of 5"),
        (lambda x: x + jax.random.normal(jax.random.key(0), (4,)), "PRNGKey"),
        (lambda x: jnp.abs(x + 1j), "complex64"),
        (lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 1, 1, 2), (1, 1, 1, 1), "VALID"), "a pool with the window"),
    ):
        with pytest.raises(ValueError, match=f"own has an operation that cannot be exported to ONNX: .*{message}"):
            onnx_file(exported(Own(operation)))


@pytest.mark.parametrize(
    "mixing",
    [lambda x: x.reshape(len(x), -1) - x.mean(), lambda x: x.reshape(len(x), -1) @ jnp.ones((80, len(x)))[:, :2]],
)
def test_a_model_that_mixes_the_images_of_a_batch_is_refused(mixing):
    with pytest.raises(ValueError, match=r"its outputs for an image depend on the others in the batch.*: make its"):
        onnx_file(exported(Own(mixing)))


def test_a_snapshot_is_exported_and_a_suffix_chooses_the_format(run, tmp_path):
    done = export_model(run, tmp_path / "w.safetensors", snapshot=2)
    assert (done.step, done.format) == (2, "safetensors")
    assert export_model(tmp_path / "w.safetensors", tmp_path / "again.safetensors").digest == done.digest
    assert export_model(f"{run}@2", tmp_path / "at.safetensors").digest == done.digest
    with pytest.raises(ValueError, match=r"one snapshot of .* can be given, got 2 and best: leave one out"):
        export_model(f"{run}@2", tmp_path / "b.onnx", snapshot="best")
    for out, message in (
        ("w.pt", r"OUT must end in \.safetensors, \.onnx or \.stablehlo, or have no suffix .* or give format"),
        ("w.zip", "OUT must end in"),
    ):
        with pytest.raises(ValueError, match=message):
            export_model(run, tmp_path / out)
    with pytest.raises(ValueError, match="a snapshot can be given only with a run, got the weights"):
        export_model(tmp_path / "w.safetensors", tmp_path / "b.onnx", snapshot=2)


def test_a_folder_of_something_else_is_never_replaced(resnet18, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").touch()
    with pytest.raises(ValueError, match=r"OUT must be a new folder, or hold only config\.json and model\.safetensors"):
        export_model(resnet18, tmp_path / "mine", overwrite=True)
    export_model(resnet18, tmp_path / "folder")
    with pytest.raises(ValueError, match=r"folder exists: choose another path, or replace it \(overwrite=True\)"):
        export_model(resnet18, tmp_path / "folder")
    export_model(resnet18, tmp_path / "folder", overwrite=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder", "mine"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "new.safetensors", "snapshots/new.safetensors"])
def test_a_file_in_the_folder_of_a_run_is_refused(run, tmp_path, name):
    before = {each: each.read_bytes() for each in run.rglob("*") if each.is_file()}
    (tmp_path / "link").symlink_to(run)
    (tmp_path / "file").symlink_to(run / name)
    for out in (run / name, tmp_path / "link" / name, tmp_path / "file"):
        with pytest.raises(ValueError, match=r"OUT must not be in the folder of a run, .* is in .*: choose another"):
            export_model(run, out, snapshot=2, format="safetensors", overwrite=True)
    assert {each: each.read_bytes() for each in run.rglob("*") if each.is_file()} == before


def test_a_file_outside_is_written_and_replaced_only_on_request(run, tmp_path):
    out = tmp_path / "w.safetensors"
    digest = export_model(run, out, snapshot=2, format="safetensors").digest
    with pytest.raises(
        ValueError, match=r"w\.safetensors exists: choose another path, or replace it \(overwrite=True\)"
    ):
        export_model(run, out, snapshot=2, format="safetensors")
    out.write_text("damaged")
    assert export_model(run, out, snapshot=2, format="safetensors", overwrite=True).digest == digest
    with pytest.raises(ValueError, match="OUT must not be in the folder of a run"):
        export_model(out, run / "w.safetensors")
    with pytest.raises(ValueError, match="OUT must not be in the folder of a run"):
        export_model(run, run.parent / "run" / ".." / "run" / "x", snapshot=2, format="safetensors")


@pytest.mark.parametrize("overwrite", [False, True])
def test_other_places_are_refused_with_a_remedy_that_helps(run, tmp_path, overwrite):
    (tmp_path / "file").touch()
    for out, message in (
        (os.devnull, "OUT must be a regular file, but /dev/null is not: choose another path"),
        (tmp_path, f"OUT must be a file, but {tmp_path} is a folder: choose another path"),
        (tmp_path / "no/w", f"OUT must be in an existing folder, but {tmp_path}/no is missing: create it"),
        (tmp_path / "file/w", f"OUT must be in an existing folder, but {tmp_path}/file is a file: choose another path"),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            export_model(run, out, snapshot=2, format="safetensors", overwrite=overwrite)
        assert str(caught.value) == message
