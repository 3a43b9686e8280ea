"""Runs of small networks of timm's families: classes, image sizes, weight decay, evaluation and resumption."""

import os
from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from loopfeed import TrainConfig, evaluate, evaluate_weights, read_weights, train
from loopfeed.engine.records.initial_weights import load_initial_weights
from loopfeed.engine.records.weights import name_tensors
from loopfeed.engine.run import run as run_module
from loopfeed.engine.run.program_settings import compiled_settings_of_stages
from loopfeed.engine.updates.optim import kernels_only
from loopfeed.engine.updates.settings import CompiledSettings
from loopfeed.models import registry
from loopfeed.models.families.convnext import ConvNeXt
from loopfeed.models.families.vision_transformer import VisionTransformer
from loopfeed.models.registry import build_model, resize_params
from loopfeed.models.torchvision_names import from_torchvision, to_torchvision
from tests.fake_source import fake_source, pack

pytestmark = pytest.mark.integration  # whole programs, or large networks

VIT, CONVNEXT = "vit-s16", "convnext-tiny"


@pytest.fixture(autouse=True)
def _small_networks(monkeypatch):
    """Give two names of the registry small networks of their families."""
    small = {
        VIT: VisionTransformer(width=12, depth=1, num_heads=3),
        CONVNEXT: ConvNeXt(depths=(1, 1), widths=(4, 8)),
    }
    monkeypatch.setattr(registry, "networks", lambda: small)


def shapes_of(name, num_classes=3, image_size=32):
    model = build_model(name, num_classes=num_classes, image_size=image_size)
    return jax.eval_shape(model.init, jax.random.key(0))


def drawn(name, *sizes):
    random = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: random.random(leaf.shape, np.float32), shapes_of(name, *sizes))


def saved(path, name, weights):
    save_file({key: np.ascontiguousarray(tensor) for key, tensor in name_tensors(name, *weights).items()}, path)
    return path


def assert_same(first, second):
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize(
    ("name", "head", "num_tensors"), [(VIT, "head", 4 + 12 + 4), (CONVNEXT, "head.fc", 4 + 22 + 4)]
)
def test_tensors_have_timms_names_and_layouts(name, head, num_tensors):
    params, _ = drawn(name)
    tensors = to_torchvision(name, params, {})
    assert len(tensors) == num_tensors
    assert tensors[f"{head}.bias"].shape == (3,)
    assert all(tensor.flags.c_contiguous for tensor in tensors.values())
    assert_same(from_torchvision(name, tensors), (params, {}))
    if name == VIT:
        assert tensors["pos_embed"].shape == (1, 5, 12)
        assert tensors["cls_token"].shape == (1, 1, 12)
        assert tensors["patch_embed.proj.weight"].shape == (12, 3, 16, 16)
        qkv = params["blocks"]["0"]["attn"]["qkv"]["kernel"]
        assert tensors["blocks.0.attn.qkv.weight"][20, 5] == qkv[5, 20]
    else:
        block = params["stages"]["1"]["blocks"]["0"]
        assert tensors["stages.1.blocks.0.conv_dw.weight"].shape == (8, 1, 7, 7)
        assert tensors["stages.1.blocks.0.conv_dw.weight"][5, 0, 2, 6] == block["conv_dw"]["kernel"][2, 6, 0, 5]
        np.testing.assert_array_equal(tensors["stages.1.blocks.0.gamma"], block["gamma"])
    without = {key: tensor for key, tensor in tensors.items() if key != f"{head}.bias"}
    with pytest.raises(ValueError, match=rf"{name} needs a vector {head}\.bias, whose length"):
        from_torchvision(name, without)


@pytest.mark.parametrize(("name", "head"), [(VIT, ("head",)), (CONVNEXT, ("head", "fc"))])
def test_another_number_of_classes_replaces_only_the_classifier(name, head, tmp_path):
    params, stats = drawn(name, 10)
    path = saved(tmp_path / "w.safetensors", name, (params, stats))
    loaded = load_initial_weights(path, name, *shapes_of(name, 3))
    assert loaded.notes == ("the classifier is new, and zero: the file has 10 classes, the data have 3",)
    branch, given = loaded.params, params
    for key in head:
        assert {other: branch[other] for other in branch if other != key}.keys() == given.keys() - {key}
        branch, given = branch[key], given[key]
    assert branch["bias"].shape == (3,)
    assert not branch["bias"].any()
    assert not branch["kernel"].any()
    if name == CONVNEXT:
        assert_same(loaded.params["head"]["norm"], params["head"]["norm"])
    # The same file with the names of a wrapper: timm's `head.fc` stays as it is.
    tensors = {f"module.{key}": tensor for key, tensor in load_file(path).items()}
    save_file(tensors, path)
    again = load_initial_weights(path, name, *shapes_of(name, 10))
    assert again.notes == ("the prefix 'module.' of the tensors' names is left out",)
    assert_same(again.params, params)


def test_another_image_size_interpolates_the_position_embedding(tmp_path):
    params, stats = drawn(VIT, 3, 64)
    path = saved(tmp_path / "w.safetensors", VIT, (params, stats))
    loaded = load_initial_weights(path, VIT, *shapes_of(VIT, 3, 32))
    assert loaded.notes == (
        "the position embedding is interpolated: the file is for images of 64 × 64 px, the data have 32 × 32 px",
    )
    assert_same(loaded.params, resize_params(VIT, params, 32))
    assert loaded.params["pos_embed"].shape == (1, 5, 12)


@pytest.mark.parametrize("name", [VIT, CONVNEXT])
def test_only_kernels_are_decayed(name):
    params, _ = shapes_of(name)
    model = build_model(name, num_classes=3, image_size=32)
    mask = kernels_only(params, undecayed=model.undecayed)
    decayed = {path[-1].key for path, chosen in jax.tree_util.tree_leaves_with_path(mask) if chosen}
    others = {path[-1].key for path, chosen in jax.tree_util.tree_leaves_with_path(mask) if not chosen}
    assert decayed == {"kernel"}
    assert others == {"scale", "bias"} | ({"cls_token", "pos_embed"} if name == VIT else {"gamma"})


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Packed images of 32 px to train and evaluate on, and of 48 px."""
    folder = tmp_path_factory.mktemp("data")
    pack(fake_source(8, size=32), folder)
    pack(fake_source(5, size=32, seed=1, name="val"), folder)
    pack(fake_source(5, size=48, seed=1, name="larger"), folder)
    return folder


def config_of(name, data, run, **settings):
    return TrainConfig(
        **({"steps": 2, "batch": 4, "data": os.fspath(data), "model": name, "run_dir": os.fspath(run)} | settings)
    )


def test_a_vision_transformer_is_trained_evaluated_and_resumed(data, tmp_path, monkeypatch):
    made: list[CompiledSettings] = []

    def spy(*given):
        stages = compiled_settings_of_stages(*given)
        made.extend(stages)
        return stages

    monkeypatch.setattr(run_module, "compiled_settings_of_stages", spy)
    config = config_of(VIT, data, tmp_path / "run", snapshot_every_steps=1)
    (found,) = train(config).evaluations
    assert {each.undecayed for each in made} == {("cls_token", "pos_embed")}
    assert evaluate(tmp_path / "run").record.loss == found.loss
    assert evaluate(tmp_path / "run", snapshot=2).record.loss == found.loss
    more = train(replace(config, steps=3, resume=True))
    assert len(more.losses) == 1

    weights = tmp_path / "run/model.safetensors"
    assert_same(read_weights(weights).params, more.params)
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(weights), bare)
    larger = TrainConfig(data=os.fspath(data), eval_split="larger", model=VIT, batch=4)
    lines: list[str] = []
    loss = evaluate_weights(bare, larger, notify=lines.append).record.loss
    sizes = "the weights are for images of 32 × 32 px, these have 48 × 48 px"
    assert f"the position embedding is interpolated: {sizes}" in lines
    resized = saved(tmp_path / "resized.safetensors", VIT, (resize_params(VIT, more.params, 48), {}))
    # Products in float32 and in float64.
    assert loss == pytest.approx(evaluate_weights(resized, larger).record.loss, rel=1e-5)
