"""XLA compiles a program for an NVIDIA card; no card is needed. scripts/test --integrations installs the compiler."""

import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from loopfeed.engine.sizing.absent_cards import COMPILER_FOLDER
from tests.card_compilation import CardCompiler
from tests.card_program import HOST_CALL, CardProgram

COMPILER = Path(sys.prefix) / COMPILER_FOLDER
CHUNK = 7
EVALUATION_CHUNK = 10  # `crossings.choose_chunk`
SETTINGS = {"steps": 100, "batch": 256, "image_size": 32, "precision": "bfloat16", "chunk_batches": CHUNK}
EVERYTHING = {
    "model": "convnet8",
    "batch": 8,
    "crop": "random",
    "crop_padding": 2,
    "padding_mode": "reflect",
    "flip": 0.5,
    "hue": 0.1,
    "cutmix": 1.0,
    "erasing": 0.3,
    "label_smoothing": 0.1,
    "ema_decay": 0.9,
    "clip_norm": 1.0,
    "accumulate_steps": 2,
    "optimizer": "lamb",
    "eval_mirror": True,
}

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        not (COMPILER / f".installed-{version('jaxlib')}").exists(),
        reason="XLA's compiler for NVIDIA cards is not here: scripts/test --integrations brings it, on Linux",
    ),
]


@pytest.fixture(scope="module", name="compiler")
def _compiler():
    with CardCompiler(COMPILER) as started:
        yield started


@pytest.mark.parametrize("values", [{"model": "resnet8"}, EVERYTHING], ids=["plain", "all"])
def test_a_program_for_a_card_runs_ahead_of_it(compiler, values):
    program = compiler.compile(SETTINGS | values)["hlo"]
    # Nobody waits for the predicate of a loop whose turns XLA knows: those over the batches of a pull.
    turns = [loop.turns for loop in CardProgram(program).loops() if HOST_CALL in loop.body]
    assert sorted(each for each in turns if each is not None) == [CHUNK, EVALUATION_CHUNK]
    # The others are those over the pulls.
    assert turns.count(None) == 2
    assert '"__cudnn$convForward"' in program
    assert '"__cublas$lt$matmul"' in program
    assert "gemm_fusion" not in program
    # What no library takes: slow, or of other bits each time.
    assert not re.search(r" (convolution|scatter|select-and-scatter)\(", program)


def test_eight_cards_reduce_once_an_update_and_once_a_pull(compiler):
    settings = SETTINGS | {"model": "resnet8", "batch": 64, "eval_every_steps": 5}
    program = compiler.compile(settings, number=8, stages=[1])["hlo"]
    found = re.findall(r"= \(*(\w+\[\d*\])\S*(?:, \S+)* (all-\w+|reduce-scatter|collective-\w+)(?:-start)?\(", program)
    control, gradients = "s32[5]", "f32[5403]"
    assert sorted(found) == sorted(
        [
            # Of an update, the gradients, the running statistics and the loss: 5,306, 96 and one number.
            (gradients, "all-reduce"),
            # The control words of a pull of training, and of one of an evaluation.
            (control, "all-reduce"),
            (control, "all-reduce"),
            # The counts of an evaluation.
            ("s32[8]", "all-gather"),
        ]
    )


def test_the_convolutions_of_a_card_take_bfloat16_and_channels_for_its_tensor_cores(compiler):
    step = CardProgram(compiler.compile(SETTINGS | {"model": "resnet8"})["hlo"]).training_step()
    convolutions = [kernel for kernel in step if kernel.target.startswith("__cudnn$conv")]
    assert convolutions
    for kernel in convolutions:
        *arrays, scratch = kernel.operands + kernel.results
        assert scratch[0] == "u8"
        assert {dtype for dtype, _ in arrays} == {"bf16"}
        # Tensor cores take channels by eights, and a photograph's by four.
        assert all(shape[-1] % 8 == 0 or shape[-1] == 4 for _, shape in arrays), kernel
