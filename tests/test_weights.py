"""The names of the exported tensors."""

import jax
import numpy as np
import pytest

from loopfeed.engine.records.weights import name_tensors
from loopfeed.models.registry import build_model
from tests.toy import Linear


def test_a_model_of_your_own_is_named_by_its_paths():
    params, stats = Linear().init(jax.random.key(0))
    tensors = name_tensors(None, params, stats)
    assert set(tensors) == {"params.weights", "params.bias", "batch_stats.batches"}
    assert np.array_equal(tensors["params.weights"], params["weights"])


@pytest.mark.parametrize("name", ["resnet18", "resnet8"])
def test_resnets_of_the_registry_have_torchvisions_names_and_layouts(name):
    shapes = jax.eval_shape(build_model(name, num_classes=5, image_size=64).init, jax.random.key(0))
    random = np.random.default_rng(0)
    params, stats = jax.tree.map(lambda leaf: random.random(leaf.shape, np.float32), shapes)
    tensors = name_tensors(name, params, stats)
    kernel = np.asarray(params["layer1"]["0"]["conv1"]["kernel"])
    assert np.array_equal(tensors["layer1.0.conv1.weight"], kernel.transpose(3, 2, 0, 1))
    assert np.array_equal(tensors["fc.weight"], np.asarray(params["fc"]["kernel"]).T)
    assert tensors["bn1.running_var"].shape == params["bn1"]["scale"].shape
