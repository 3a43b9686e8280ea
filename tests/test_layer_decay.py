"""Learning rates that decay from the classifier to the stem: which layer a parameter is in, and what an update does."""

import re
from typing import Any

import jax
import numpy as np
import pytest

from loopfeed import TrainConfig, train
from loopfeed.engine.recipes import load_recipe
from loopfeed.engine.settings import SettingError
from loopfeed.engine.updates.layer_decay import layers_of
from loopfeed.engine.updates.selection import dotted_path, dotted_paths
from loopfeed.models.registry import build_model
from tests.small_resnets import small_resnets
from tests.toy import Linear, toy_batch, toy_config


# The layers are those of timm 1.0.31's param_groups_layer_decay, all parameters of which were compared.
@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("resnet18", {"conv1.kernel": 0, "bn1.scale": 0, "layer1.0.conv1.kernel": 1, "layer2.0.downsample.0.kernel": 3,
                      "layer4.1.bn2.bias": 8, "fc.bias": 9}),
        ("convnext-tiny", {"stem.0.kernel": 0, "stages.0.blocks.0.gamma": 1, "stages.1.downsample.1.kernel": 4,
                           "stages.1.blocks.0.gamma": 4, "stages.3.blocks.2.gamma": 18, "head.norm.scale": 19}),
        ("vit-s16", {"cls_token": 0, "pos_embed": 0, "patch_embed.proj.kernel": 0, "blocks.0.norm1.scale": 1,
                     "blocks.11.mlp.fc2.bias": 12, "norm.scale": 12, "head.kernel": 13}),
    ],
)  # fmt: skip
def test_layers_are_those_of_timm(name, layers):
    shapes, _ = jax.eval_shape(build_model(name, num_classes=10, image_size=224).init, jax.random.key(0))
    paths = dotted_paths(shapes)
    found = dict(zip(paths, layers_of(paths), strict=True))
    assert {path: found[path] for path in layers} == layers
    assert {*found.values()} == {*range(max(layers.values()) + 1)}


def moved(run_dir, **settings):
    """Return how far one update of gradient descent moves each parameter."""
    config: dict[str, Any] = {"model": "resnet14", "synthetic": True, "image_size": None, "batch": 4, "num_classes": 3}
    config |= {"momentum": 0.0, "weight_decay": 0.0, "learning_rate": 0.5, "schedule": "constant"}
    before, after = (train(TrainConfig(**config, **settings, steps=steps)).params for steps in (0, 1))
    paths, _ = jax.tree_util.tree_flatten_with_path(jax.tree.map(lambda b, a: np.asarray(a - b), before, after))
    return {dotted_path(path): leaf for path, leaf in paths}


@small_resnets()
def test_an_update_moves_each_layer_by_its_share(tmp_path):
    whole, decayed = moved(tmp_path), moved(tmp_path, layer_decay=0.5, groups="fc.bias=learning_rate:3x")
    shares = {"conv1": 0.25, "bn1": 0.25, "layer1": 0.5, "fc.kernel": 1.0, "fc.bias": 3.0}
    for path, step in whole.items():
        share = next(each for start, each in shares.items() if path.startswith(start))
        # Two roundings of weights of about 1 apart.
        np.testing.assert_allclose(decayed[path], share * step, rtol=1e-5, atol=3e-7, err_msg=path)
        assert np.any(step)


def test_a_model_of_ones_own_has_no_known_layers():
    with pytest.raises(SettingError, match=r"layer_decay needs a network of the registry.*groups"):
        train(toy_config(layer_decay=0.5), model=Linear(), batches=toy_batch)


@pytest.mark.parametrize(
    "name", ["resnet18", "resnet50-d", "convnext-tiny", "vit-s16", "convnet8-wide", "efficientnet_b0"]
)
def test_the_recipe_trains_the_classifier_first_in_every_network_and_never_a_batch_norms_statistics(name):
    patterns, kept = (stage["freeze"] for stage in load_recipe("finetune").settings["stages"])
    shapes, stats = jax.eval_shape(build_model(name, num_classes=10, image_size=224).init, jax.random.key(0))

    trained = {path for path in dotted_paths(shapes) if not re.fullmatch(patterns, path)}
    layers = layers_of(dotted_paths(shapes))
    assert trained
    assert trained <= {path for path, layer in zip(dotted_paths(shapes), layers, strict=True) if layer == max(layers)}
    # A pattern that matches nothing is refused, also in a network without batch norms.
    stopped = {path for path in dotted_paths(shapes) if re.fullmatch(kept, path)}
    assert stopped
    assert stopped <= {path for path, layer in zip(dotted_paths(shapes), layers, strict=True) if layer == 0}
    assert all(re.fullmatch(each, path) for each in (patterns, kept) for path in dotted_paths(stats))
