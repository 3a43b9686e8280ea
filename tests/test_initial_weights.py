"""Weights to start from: taken bit for bit, what may differ, and what is refused."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from loopfeed import TrainConfig, replay_run, train
from loopfeed.engine.commands.cli import main as run_train
from loopfeed.engine.commands.eval_cli import main as run_eval
from loopfeed.engine.commands.predict_cli import main as predict_images
from loopfeed.engine.records.initial_weights import load_initial_weights
from loopfeed.engine.records.weights import name_tensors
from loopfeed.engine.records.weights_metadata import describe_weights
from loopfeed.models.registry import build_model
from loopfeed.preprocess.shards.classes import ImageClass
from tests.fake_source import fake_source, pack
from tests.small_resnets import small_resnets
from tests.toy import Linear, toy_batch, toy_config

HERE = Path(__file__).parent


def torch_python():
    if importlib.util.find_spec("torch") is not None:
        return sys.executable
    if python := os.environ.get("LOOPFEED_TORCH_PYTHON"):
        return python
    pytest.skip("PyTorch is not installed here; name an interpreter that has it in LOOPFEED_TORCH_PYTHON")


def shapes_of(name, num_classes):
    return jax.eval_shape(build_model(name, num_classes=num_classes, image_size=32).init, jax.random.key(0))


def drawn(name, num_classes, seed=0):
    """Return a model's trees with different values."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: random.random(leaf.shape, np.float32), shapes_of(name, num_classes))


def saved(path, tensors, metadata=None):
    save_file({name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}, path, metadata)
    return path


@pytest.fixture
def resnet8(tmp_path):
    """Return the weights of a ResNet-8 with ten classes, and their file."""
    weights = drawn("resnet8", 10)
    return weights, saved(tmp_path / "w.safetensors", name_tensors("resnet8", *weights))


def assert_same(first, second):
    # Trees of another structure raise.
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_a_file_takes_the_place_of_what_was_drawn_or_of_its_shapes(resnet8):
    weights, path = resnet8
    for like in (shapes_of("resnet8", 10), drawn("resnet8", 10, seed=1)):
        loaded = load_initial_weights(path, "resnet8", *like)
        assert_same((loaded.params, loaded.batch_stats), weights)
        assert loaded.notes == ()
        assert not loaded.has_new_classifier


def zero_classifier(num_classes):
    return {"kernel": np.zeros((64, num_classes), np.float32), "bias": np.zeros(num_classes, np.float32)}


def test_another_number_of_classes_begins_with_a_classifier_of_zeros_and_says_so(resnet8):
    (params, batch_stats), path = resnet8
    for like in (shapes_of("resnet8", 3), drawn("resnet8", 3, seed=1)):
        loaded = load_initial_weights(path, "resnet8", *like)
        assert loaded.notes == ("the classifier is new, and zero: the file has 10 classes, the data have 3",)
        assert loaded.has_new_classifier
        assert_same((loaded.params, loaded.batch_stats), (params | {"fc": zero_classifier(3)}, batch_stats))


def classes(ids):
    return tuple(ImageClass(each, each.upper()) for each in ids)


def recorded(path, name, weights, ids):
    return saved(path, name_tensors(name, *weights), describe_classes(ids))


def describe_classes(ids):
    return describe_weights(model="resnet8", height=32, width=32, mean=(0.5,) * 3, std=(0.5,) * 3, classes=classes(ids))


def test_the_same_classes_in_another_order_keep_their_rows_of_the_classifier(tmp_path):
    params, batch_stats = drawn("resnet8", 4)
    path = recorded(tmp_path / "w.safetensors", "resnet8", (params, batch_stats), "acb")  # and one class without a name
    loaded = load_initial_weights(path, "resnet8", params, batch_stats, classes=classes("abc"))
    assert loaded.notes == ("the rows of the classifier are permuted: the file has the same classes in another order",)
    assert loaded.is_by_identifier
    wanted = {leaf: np.stack([value[..., row] for row in (0, 2, 1, 3)], -1) for leaf, value in params["fc"].items()}
    assert_same((loaded.params, loaded.batch_stats), (params | {"fc": wanted}, batch_stats))


@pytest.mark.parametrize(
    ("ids", "note"),
    [
        ("abz", "the file lacks 1 class (c)"),
        ("xyz", "the file lacks 3 classes (a, b, c)"),
        ("abcz", "the data lack 1 class (z)"),
    ],
)
def test_other_classes_of_equal_number_begin_with_a_classifier_of_zeros_and_say_so(tmp_path, ids, note):
    params, batch_stats = drawn("resnet8", 4)
    path = recorded(tmp_path / "w.safetensors", "resnet8", (params, batch_stats), ids)
    loaded = load_initial_weights(path, "resnet8", *drawn("resnet8", 4, seed=1), classes=classes("abc"))
    assert loaded.notes == (f"the classifier is new, and zero, because the classes differ: {note}",)
    assert_same(loaded.params, params | {"fc": zero_classifier(4)})


def test_classes_that_are_the_same_or_unknown_keep_the_classifier(tmp_path):
    weights = drawn("resnet8", 3)
    path = recorded(tmp_path / "w.safetensors", "resnet8", weights, "abc")
    for of_data in (classes("abc"), ()):
        loaded = load_initial_weights(path, "resnet8", *weights, classes=of_data)
        assert_same((loaded.params, loaded.batch_stats), weights)
        assert loaded.notes == ()
    path = saved(tmp_path / "other.safetensors", name_tensors("resnet8", *weights))
    loaded = load_initial_weights(path, "resnet8", *weights, classes=classes("abc"))
    assert loaded.notes == ("the file does not record its classes: they are taken to be those of the data, in order",)
    assert_same((loaded.params, loaded.batch_stats), weights)


@small_resnets()
def test_a_run_of_an_earlier_version_that_kept_rows_by_number_is_replayed_by_no_other_rule(tmp_path, monkeypatch):
    for name, ids in (("a", "abc"), ("b", "abd")):
        source = fake_source(8, size=8)
        pack(source.changed(classes=classes(ids)), tmp_path / name)
    settings: dict[str, Any] = {"steps": 1, "batch": 4, "model": "resnet8", "eval_split": "off"}
    train(TrainConfig(data=tmp_path / "a", run_dir=tmp_path / "first", **settings))
    given: dict[str, Any] = {"init_from": tmp_path / "first/model.safetensors", "data": tmp_path / "b"}
    told: list[str] = []
    now = train(TrainConfig(run_dir=tmp_path / "now", **given, **settings), notify=told.append)
    np.testing.assert_allclose(now.losses[0], np.log(3), rtol=1e-5)
    resolved = json.loads((tmp_path / "now/config.json").read_text())["resolved"]
    assert resolved["rules"]["the first classifier of a run from given weights of other classes"] == 2
    assert any("because the classes differ: the file lacks 1 class (d)" in each for each in told)
    assert replay_run(tmp_path / "now", from_step=0).differences == ()
    with monkeypatch.context() as earlier:
        earlier.setattr("loopfeed.engine.run.descriptions.rules_of", lambda *_: {})
        train(TrainConfig(run_dir=tmp_path / "then", **given, **settings))
    with pytest.raises(ValueError, match="the classifier of initial weights with other classes has changed since"):
        replay_run(tmp_path / "then", from_step=0)
    # A resume from a snapshot does not use the file, and keeps the rule in the record.
    for name in ("now", "then"):
        train(TrainConfig(run_dir=tmp_path / name, **given, **(settings | {"steps": 2}), resume=True))
    assert replay_run(tmp_path / "now", from_step=0).differences == ()


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float64])
def test_floats_of_another_width_become_float32_and_are_told(resnet8, tmp_path, dtype):
    (params, batch_stats), _ = resnet8
    named = name_tensors("resnet8", params, batch_stats)
    stored = {name: tensor.astype(dtype) if tensor.dtype == np.float32 else tensor for name, tensor in named.items()}
    loaded = load_initial_weights(saved(tmp_path / "o.safetensors", stored), "resnet8", params, batch_stats)
    count = sum(tensor.dtype == np.float32 for tensor in named.values())
    assert loaded.notes == (f"{count} {np.dtype(dtype)} tensors are converted to float32",)
    found = name_tensors("resnet8", loaded.params, loaded.batch_stats)
    for name, tensor in named.items():
        np.testing.assert_array_equal(found[name], tensor.astype(stored[name].dtype).astype(tensor.dtype), name)


def changed(tensors, change):
    tensors = dict(tensors)
    change(tensors)
    return tensors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layer1.0.conv1.weight"), r"w\.safetensors: .* resnet8: missing layer1\.0\.conv1\.weight;"),
        (lambda t: t.update(head=np.zeros(2, np.float32)), "unexpected head; choose another model"),
        (lambda t: t.update({"bn1.weight": np.zeros(3, np.float32)}), r"bn1\.weight is \(3,\) instead of \(16,\)"),
        (lambda t: t.update({"fc.weight": np.zeros((10, 3), np.float32)}), r"fc\.weight is \(10, 3\) instead of"),
        (lambda t: t.pop("fc.bias"), r"needs a vector fc\.bias"),
        (
            lambda t: t.update({"bn1.bias": np.zeros(16, np.int8)}),
            r"bn1\.bias is int8, not a float type; save it in float32",
        ),
        (lambda t: t.update({"bn1.bias": np.full(16, np.nan, np.float32)}), r"must be finite, but bn1\.bias is not"),
        (lambda t: t.update({"bn1.bias": np.full(16, 1e300)}), r"must be finite, but bn1\.bias is not"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_tensors_that_do_not_fit_the_model_are_refused_by_name(resnet8, tmp_path, change, message):
    weights, _ = resnet8
    tensors = changed(name_tensors("resnet8", *weights), change)
    with pytest.raises(ValueError, match=message):
        load_initial_weights(saved(tmp_path / "w.safetensors", tensors), "resnet8", *weights)


def test_another_model_is_named_where_the_file_names_it(resnet8, tmp_path):
    weights, _ = resnet8
    path = saved(tmp_path / "w.safetensors", name_tensors("resnet8", *weights), {"model": "resnet8"})
    message = (
        r"w\.safetensors: the weights are those of the model resnet8, not of resnet14: give --model resnet8, or other"
    )
    with pytest.raises(ValueError, match=message):
        load_initial_weights(path, "resnet14", *shapes_of("resnet14", 10))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"", "must be a complete safetensors file"),
        (b"PK\x03\x04 and more of what PyTorch writes", "need PyTorch|must be the tensors of a complete PyTorch file"),
    ],
)
def test_a_file_that_is_not_safetensors_is_refused(tmp_path, content, message):
    path = tmp_path / "w.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_initial_weights(path, "resnet8", *shapes_of("resnet8", 3))
    with pytest.raises(ValueError, match=r"is a folder without config\.json: give a file or a run"):
        load_initial_weights(tmp_path, "resnet8", *shapes_of("resnet8", 3))


class Keyed(Linear):
    """A model that draws in its forward pass: its statistics hold a generator's key and a count."""

    def init(self, key):
        params, stats = super().init(key)
        return params, stats | {"key": jax.random.key(5, impl="rbg"), "count": jnp.int32(3)}


def test_a_model_of_your_own_is_taken_by_its_paths(tmp_path):
    params, stats = Keyed().init(jax.random.key(0))
    path = saved(tmp_path / "w.safetensors", name_tensors(None, params, stats))
    for like in ((params, stats), jax.eval_shape(Keyed().init, jax.random.key(0))):
        loaded = load_initial_weights(path, None, *like)
        assert loaded.batch_stats["key"] == stats["key"]
        assert loaded.batch_stats["count"].dtype == np.int32
        assert_same(loaded.params, params)
    other = {"weights": params["weights"][:, :2], "scale": params["bias"]}
    with pytest.raises(
        ValueError,
        match=r"missing params\.scale; unexpected params\.bias; params\.weights is \(48, 3\) instead of \(48, 2\)",
    ):
        load_initial_weights(path, None, other, stats)
    with pytest.raises(ValueError, match=r"batch_stats\.count is int32 instead of float32"):
        load_initial_weights(path, None, params, stats | {"count": jnp.float32(3)})


def test_the_weights_of_a_run_are_loaded_bit_for_bit(tmp_path):
    result = train(toy_config(steps=3, run_dir=tmp_path / "own"), model=Linear(), batches=toy_batch)
    shapes = jax.eval_shape(Linear().init, jax.random.key(0))
    loaded = load_initial_weights(tmp_path / "own/model.safetensors", None, *shapes)
    assert_same((loaded.params, loaded.batch_stats), (result.params, result.batch_stats))
    config = toy_config(
        steps=2, synthetic=True, model="resnet8", image_size=8, ema_decay=0.9, run_dir=os.fspath(tmp_path / "run")
    )
    with small_resnets():
        result = train(config)
        loaded = load_initial_weights(tmp_path / "run/model.safetensors", "resnet8", *shapes_of("resnet8", 3))
    assert_same((loaded.params, loaded.batch_stats), (result.params, result.batch_stats))


@pytest.mark.parametrize("name", ["resnet18"])
def test_pytorch_gives_the_same_logits_both_ways(name, tmp_path):
    reference = tmp_path / "reference.npz"
    subprocess.run([torch_python(), HERE / "torch_resnet_reference.py", name, reference], check=True, timeout=240)
    with np.load(reference) as arrays:
        images, wanted = arrays["images"], arrays["logits_eval"]
        theirs = {
            key.removeprefix("weight/"): np.ascontiguousarray(arrays[key]) for key in arrays if key.startswith("weight")
        }
    model = build_model(name, num_classes=10, image_size=64)
    apply = jax.jit(partial(model.apply, train=False))

    loaded = load_initial_weights(saved(tmp_path / "theirs.safetensors", theirs), name, *shapes_of(name, 10))
    logits, _ = apply(loaded.params, loaded.batch_stats, images.transpose(0, 2, 3, 1))
    # 18 float32 layers of sums in another order: 1e-4 of the largest logit.
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())

    ours = jax.tree.map(lambda leaf: leaf * np.float32(1.01), (loaded.params, loaded.batch_stats))
    saved(tmp_path / "ours.safetensors", name_tensors(name, *ours))
    np.savez(tmp_path / "ours.npz", images=images)
    script = [HERE / "torch_weights_reference.py", name, tmp_path / "ours.safetensors", tmp_path / "ours.npz"]
    subprocess.run([torch_python(), *script], check=True, timeout=240)
    with np.load(tmp_path / "ours.npz") as arrays:
        wanted = arrays["logits"]
    logits, _ = apply(*ours, images.transpose(0, 2, 3, 1))
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("ema_decay", [None, 0.9])
def test_a_run_starts_from_the_weights_of_another(tmp_path, ema_decay):
    trained = train(toy_config(steps=3, run_dir=tmp_path / "first"), model=Linear(), batches=toy_batch)
    told: list[str] = []
    config = toy_config(steps=0, ema_decay=ema_decay, init_from=tmp_path / "first/model.safetensors", seed=7)
    begun = train(config, model=Linear(), batches=toy_batch, notify=told.append)
    # With an average it is that which is given back: it too begins with the file's weights, not with drawn ones.
    for ours, theirs in zip(jax.tree.leaves(begun.params), jax.tree.leaves(trained.params), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert float(begun.batch_stats["batches"]) == 3
    assert any("first/model.safetensors" in line for line in told)
    further = train(replace(config, steps=2), model=Linear(), batches=toy_batch)
    fresh = train(replace(config, steps=2, init_from=None), model=Linear(), batches=toy_batch)
    assert further.losses[0] < fresh.losses[0] / 2


def test_a_run_from_given_weights_is_begun_again_or_replayed_with_no_others(tmp_path):
    path, weights = tmp_path / "run", tmp_path / "first/model.safetensors"
    train(toy_config(steps=3, run_dir=tmp_path / "first"), model=Linear(), batches=toy_batch)
    train(toy_config(steps=4, run_dir=tmp_path / "other"), model=Linear(), batches=toy_batch)
    config = toy_config(steps=2, run_dir=path, init_from=weights, seed=7)
    train(config, model=Linear(), batches=toy_batch)
    first = weights.read_bytes()
    weights.write_bytes((tmp_path / "other/model.safetensors").read_bytes())
    resumed = replace(config, resume=True, steps=4)
    # The snapshot holds all that the run goes on from: the file is not read, and its digest is not forgotten.
    train(resumed, model=Linear(), batches=toy_batch)
    other_weights = partial(
        pytest.raises, ValueError, match=r"those of .*first/model\.safetensors differ \(their digest was [0-9a-f]{12}"
    )
    with other_weights():
        replay_run(path, from_step=0, model=Linear(), batches=toy_batch)
    shutil.rmtree(path / "snapshots")
    lines = (path / "loss.jsonl").read_bytes()
    with other_weights():
        train(resumed, model=Linear(), batches=toy_batch)
    assert (path / "loss.jsonl").read_bytes() == lines
    weights.write_bytes(first)
    train(resumed, model=Linear(), batches=toy_batch)
    assert (path / "loss.jsonl").read_text().count("\n") == 4
    assert replay_run(path, from_step=0, model=Linear(), batches=toy_batch).is_same


@pytest.mark.parametrize("command", [run_train, run_eval, predict_images])
def test_whoever_asks_for_pretrained_weights_is_told_how_they_come_in(command, tmp_path, monkeypatch):
    shown = CliRunner().invoke(command, ["--pretrained"])
    assert (shown.exit_code, shown.output.count("run-train --init-from hf-hub:timm/resnet18.a1_in1k --model")) == (2, 1)
    with pytest.raises(TypeError, match=r"no setting 'pretrained': Weights are taken by name .*init_from="):
        TrainConfig(pretrained=True)  # type: ignore[call-arg]
    monkeypatch.chdir(tmp_path)
    for guess in ("imagenet", "IMAGENET1K_V2", "timm/resnet18.a1_in1k"):
        with pytest.raises(ValueError, match=rf"{guess} does not exist: check the path\. Weights are taken by name"):
            load_initial_weights(guess, "resnet8", *shapes_of("resnet8", 3))
