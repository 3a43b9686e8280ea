"""Names of models: what each stands for, counted, and what is refused."""

import jax
import pytest

from loopfeed.models.names import TIMM_NAMES, find_timm_model
from loopfeed.models.registry import build_model, count_params, model_names

# With 1000 classes: what torchvision documents (vit_b_16 and convnext_tiny too), what XLA.jl's ResNet-50 has, what
# PyTorch counts for timm's vit_small_patch16_224 and the three mobile networks, and timm's resnet50d, which timm's
# tables (results/*.csv) round to 25.58 million: below it is counted by hand.
PUBLISHED = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "resnet50-xlajl": 25_583_464,
    "resnet50-d": 25_576_264,
    "convnext-tiny": 28_589_128,
    "vit-s16": 22_050_664,
    "vit-b16": 86_567_656,
    "efficientnet_b0": 5_288_548,
    "tf_efficientnet_lite0": 4_652_008,
    "mobilenetv3_large_100": 5_483_032,
}


def params_of(name, num_classes):
    return jax.eval_shape(build_model(name, num_classes=num_classes, image_size=224).init, jax.random.key(0))[0]


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_of_parameters_are_the_published_ones(name):
    assert count_params(params_of(name, 1000)) == PUBLISHED[name]


def test_xlajls_count_is_the_standard_one_with_biases_and_without_the_stems_norm():
    """26,560 channels leave convolutions, each now with a bias; the stem's 64 lose scale and bias of their norm."""
    assert PUBLISHED["resnet50-xlajl"] == PUBLISHED["resnet50"] + 26_560 - 2 * 64


def test_resnet_ds_count_is_the_standard_one_with_its_stem():
    """Three 3×3 convolutions to 32, 32 and 64 channels with two norms more, for a 7×7 one to 64."""
    of_stem = 9 * (3 * 32 + 32 * 32 + 32 * 64) + 2 * 2 * 32
    assert PUBLISHED["resnet50-d"] == PUBLISHED["resnet50"] + of_stem - 49 * 3 * 64


@pytest.mark.parametrize("depth", [8, 14, 20, 32, 44, 56, 110])
def test_cifar_networks_have_6n_and_2_layers(depth):
    """Counted by hand: stem; n blocks of two 3×3 convolutions a stage, two of them projected; classifier."""
    n, total = (depth - 2) // 6, 27 * 16 + 2 * 16 + 64 * 10 + 10
    for C, K in ((16, 16), (16, 32), (32, 64)):
        total += 9 * C * K + (2 * n - 1) * 9 * K * K + 2 * n * 2 * K
        total += (C * K + 2 * K) if C != K else 0
    params = params_of(f"resnet{depth}", 10)
    assert count_params(params) == total
    convs = sum(
        key.startswith("conv") for stage in "123" for block in params[f"layer{stage}"].values() for key in block
    )
    assert convs + 2 == depth


def test_wrong_requests_are_refused():
    with pytest.raises(
        ValueError,
        match=r"^model must be auto or a name that loopfeed\.model_names\(\) returns and run-train --help lists, "
        r"got 'resnet9': did you mean resnet\d+ or resnet\d+ or resnet\d+\?$",
    ):
        build_model("resnet9", num_classes=10, image_size=32)
    for name in ("timm/resnet18.a1_in1k", "resnet18.tv_in1k"):
        with pytest.raises(
            ValueError, match=r"did you mean resnet18\? Weights of timm are given beside the model, with"
        ):
            build_model(name, num_classes=10, image_size=32)
    with pytest.raises(ValueError, match="got 'zzz': run-train --list-models describes them"):
        build_model("zzz", num_classes=10, image_size=32)
    with pytest.raises(ValueError, match="at least 1, got 0 and 32"):
        build_model("resnet8", num_classes=0, image_size=32)
    assert len(model_names()) == 22


def test_each_name_in_timm_leads_back_to_its_network():
    """With the tag of its weights, and for a vision transformer with any image size."""
    for name, timm in TIMM_NAMES.items():
        assert timm is None or find_timm_model(timm) == find_timm_model(f"{timm}.a1_in1k") == name
    assert find_timm_model("vit_base_patch16_384.augreg_in21k_ft_in1k") == "vit-b16"
    assert find_timm_model("resnet18d") is find_timm_model("vit-b16") is find_timm_model("") is None
