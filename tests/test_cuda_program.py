"""The program as it is handed to XLA for a card, which needs no card to be looked at."""

import re
from typing import Any

import pytest

from tests.card_compilation import traced_program

pytestmark = pytest.mark.integration  # whole programs, or large networks

CHUNK = 20


def lowered_for_a_card(**values: Any) -> str:
    """Return the StableHLO of a run's program."""
    settings = {"steps": 100, "batch": 6, "image_size": 32, "precision": "bfloat16", "chunk_batches": CHUNK}
    function, arguments = traced_program(settings | values)
    return function.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


AUGMENTED = {
    "crop": "random",
    "crop_padding": 2,
    "flip": 0.5,
    "brightness": 0.2,
    "contrast": 0.2,
    "saturation": 0.2,
    "hue": 0.1,
    "mixup": 0.2,
    "cutmix": 1.0,
    "erasing": 0.3,
    "label_smoothing": 0.1,
}
RESIZED = AUGMENTED | {"crop": "resized", "crop_padding": 0}
UPDATED = {"ema_decay": 0.9, "clip_norm": 1.0, "accumulate_steps": 2, "optimizer": "lamb", "schedule": "cosine"}


# A random crop once: what is done to images and updates is the same for every model.
@pytest.mark.parametrize(
    ("model", "values"),
    [("resnet8", AUGMENTED), *((model, RESIZED | UPDATED) for model in ("resnet8", "resnet50", "convnet8"))],
    ids=["resnet8-plain", "resnet8-all", "resnet50-all", "convnet8-all"],
)
def test_no_operation_of_the_program_gives_other_bits_when_it_is_run_again(model, values):
    """XLA refuses select-and-scatter, and makes loops of other scatters, where all is to be deterministic."""
    text = lowered_for_a_card(model=model, num_classes=3, **values)
    assert re.findall(r"stablehlo\.(?:select_and_)?scatter|stablehlo\.rng\b", text) == []
    assert "stablehlo.convolution" in text  # cuDNN's, not the products that are fast on a CPU
