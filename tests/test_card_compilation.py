"""XLA compiles a program for an NVIDIA card; no card is needed. scripts/test --integrations installs the compiler."""

import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from loopfeed.engine.sizing.card_compiler import COMPILER_FOLDER
from tests.card_compilation import CardCompiler
from tests.card_program import HOST_CALL, CardProgram, size_of

COMPILER = Path(sys.prefix) / COMPILER_FOLDER
CHUNK = 7
EVALUATION_CHUNK = 10  # `crossings.choose_chunk`
# How much more the oldest supported XLA reads and writes, as it fuses less.
OLDER = 1.12 if version("jaxlib").startswith("0.11.") else 1.0
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
    # A pull, a turn's batch and an emission in training; the same in an evaluation, and a snapshot.
    assert program.count(HOST_CALL) == 7
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


def test_a_non_deterministic_program_may_leave_the_order_of_sums_to_the_card(compiler):
    settings = SETTINGS | {"model": "resnet8", "batch": 8, "deterministic": False}
    program = compiler.compile(settings, stages=[1])["hlo"]
    assert program.count(HOST_CALL) == 7
    # Kernels of XLA's own for products, which it chooses by trying; a deterministic program has cuBLAS's.
    assert "gemm_fusion" in program


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


@pytest.mark.parametrize(
    ("values", "options", "most_kernels", "most_passes"),
    [
        ({"model": "resnet8"}, {}, 172, 16.4),  # compiled for the test above
        ({"model": "convnet8-wide"}, {"is_evaluated": False}, 150, 13.5),
        # Of ResNet-50, the first block of each stage, which differs from those behind it, and one of the latter.
        (
            {"model": "resnet50", "image_size": 224, "num_classes": 1000},
            {"is_evaluated": False, "stages": [2, 1, 1, 1]},
            405,
            15.1,
        ),
    ],
    ids=["resnet8", "convnet8-wide", "resnet50"],
)
def test_a_step_on_a_card_is_few_kernels_and_few_passes_over_memory(
    compiler, values, options, most_kernels, most_passes
):
    """What XLA makes of the models' code, as it was when this was written and a little more, as its fusions may change.

    A pass is one over what the convolutions give. With batch norm behind each, and nothing pooled, it takes 14:

    - forward, the convolution gives it (1), batch norm's sums read it (1), it is read and normalised (2), and the next
      convolution reads that (1);
    - backward, the sums read it and its gradient (2), these are read and give the gradient before the norm (3), which
      is read for the kernel's gradient, as the input is (2), and for the input's, which is given (2).

    What a shortcut adds comes on top.
    """
    step = CardProgram(compiler.compile(SETTINGS | values, **options)["hlo"]).training_step()
    convolutions = [kernel for kernel in step if kernel.target.startswith("__cudnn$conv")]
    filter_gradients = [kernel for kernel in convolutions if kernel.target == "__cudnn$convBackwardFilter"]
    given = sum(size_of(kernel.operands[1:2]) for kernel in filter_gradients)
    assert len(step) <= most_kernels
    assert sum(kernel.num_bytes for kernel in step) <= OLDER * most_passes * given
    for kernel in convolutions:
        *arrays, scratch = kernel.operands + kernel.results
        assert scratch[0] == "u8"
        assert {dtype for dtype, _ in arrays} == {"bf16"}
        # Tensor cores take channels by eights, and a photograph's by four.
        assert all(shape[-1] % 8 == 0 or shape[-1] == 4 for _, shape in arrays), kernel
