"""What XLA's compiler for NVIDIA cards makes of a run's program; it needs no card, and scripts/test brings it."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

COMPILER = Path(sys.prefix) / "card-compiler"
CHUNK = 7
EVALUATION_CHUNK = 10  # `crossings.choose_chunk`
SETTINGS = {"steps": 100, "batch": 8, "image_size": 32, "precision": "bfloat16", "chunk_batches": CHUNK}
EVERYTHING = {
    "model": "convnet8",
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

pytestmark = pytest.mark.skipif(
    not (COMPILER / f".installed-{version('jaxlib')}").exists(),
    reason="XLA's compiler for NVIDIA cards is not here: scripts/test brings it, on Linux",
)


def compiled_for_a_card(**values):
    """The optimised program, as HLO."""
    command = [sys.executable, "-m", "tests.card_compilation", str(COMPILER), json.dumps(SETTINGS | values)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def bodies_of_loops(program):
    """The text of each computation that is the body of a loop, and the number of its turns where XLA knows it."""
    computations = {text.split(" ", 1)[0]: text for text in re.split(r"\n(?=%|ENTRY )", program)}
    for line in program.splitlines():
        if found := re.search(r" while\(.*body=(%[\w.\-]+)", line):
            turns = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
            yield computations[found[1]], None if turns is None else int(turns[1])


@pytest.mark.parametrize("values", [{"model": "resnet8"}, EVERYTHING], ids=["plain", "all"])
def test_a_program_for_a_card_runs_ahead_of_it(values):
    program = compiled_for_a_card(**values)
    calls = program.count('custom_call_target="xla_buffer_python_gpu_callback"')
    # A pull, a turn's batch and an emission in training; the same in an evaluation, and a snapshot.
    assert calls == 7
    # Nobody waits for the predicate of a loop whose turns XLA knows: those over the batches of a pull.
    turns = [turns for body, turns in bodies_of_loops(program) if "xla_buffer_python_gpu_callback" in body]
    assert sorted(each for each in turns if each is not None) == [CHUNK, EVALUATION_CHUNK]
    # The others are those over the pulls.
    assert turns.count(None) == 2
    assert '"__cudnn$convForward"' in program
    assert '"__cublas$lt$matmul"' in program
    assert "gemm_fusion" not in program
    # What no library takes: slow, or of other bits each time.
    assert not re.search(r" (convolution|scatter|select-and-scatter)\(", program)


def test_a_program_may_leave_the_order_of_sums_to_the_card():
    program = compiled_for_a_card(model="resnet8", deterministic=False)
    assert program.count('custom_call_target="xla_buffer_python_gpu_callback"') == 7
    # Kernels of XLA's own for products, which it chooses by trying; a deterministic program has cuBLAS's.
    assert "gemm_fusion" in program
