"""The costs of the networks: against published figures, and as `run-train --list-models` prints them."""

import pytest
from click.testing import CliRunner

from loopfeed.engine.commands.cli import main
from loopfeed.models.registry import model_names, summarise_models

# Billions of multiply-accumulates: torchvision's `_ops` for its ResNets, convnext_tiny and vit_b_16, PyTorch
# for timm's mobile networks (385,814,752, 385,187,552 and 216,589,760), and models/registry.py for the convnets.
PUBLISHED = {
    "resnet18": 1.814,
    "resnet34": 3.664,
    "resnet50": 4.089,
    "resnet101": 7.801,
    "resnet152": 11.514,
    "convnext-tiny": 4.456,
    "vit-b16": 17.564,
    "efficientnet_b0": 0.386,
    "tf_efficientnet_lite0": 0.385,
    "mobilenetv3_large_100": 0.217,
    "convnet8": 0.065,
    "convnet8-wide": 0.118,
}


@pytest.fixture(scope="module")
def summaries():
    return {each.name: each for each in summarise_models()}


def test_multiply_accumulates_are_the_published_ones(summaries):
    assert {name: round(summaries[name].num_products / 1e9, 3) for name in PUBLISHED} == PUBLISHED


def test_a_vision_transformer_is_counted_by_hand(summaries):
    """197 tokens of 384 numbers in 12 blocks: four dense layers of 12·384² weights, and two products of attention."""
    block = 197 * 12 * 384**2 + 2 * 197**2 * 384
    assert summaries["vit-s16"].num_products == 196 * 768 * 384 + 12 * block + 384 * 1000


def test_the_list_of_models_has_a_line_for_each(summaries):
    result = CliRunner().invoke(main, ["--list-models", "--steps", "nonsense"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(model_names()) == list(summaries)
    (resnet50,) = (line for line in lines if line.startswith("resnet50 "))
    assert " ".join(resnet50.split()) == (
        "resnet50 25,557,032 parameters 4,089.2 million multiply-accumulates at 224 px, 1,000 classes"
    )
