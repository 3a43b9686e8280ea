"""A program that calls oneDNN is loaded from the compilation cache by another process, and gives the same losses."""

import json
import subprocess
import sys

import pytest

from models.kernels import ONEDNN, XLA
from models.kernels.onednn.library import Isa
from tests.kernels import needs_instructions

RUN = "import sys; sys.argv[0] = 'run-train'; from engine.commands.cli import main; main()"
SETTINGS = ["--synthetic", "--model", "resnet8", "--image-size", "16", "--num-classes", "3", "--batch", "8"]


def train(folder, name, *options):
    """Train in a process of its own, and return the losses and what was compiled."""
    words = [*SETTINGS, "--steps", "3", "--run-dir", folder / name, "--compilation-cache", folder / "cache", *options]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *map(str, words)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line)["loss"] for line in (folder / name / "loss.jsonl").read_text().splitlines()]
    (launch,) = json.loads((folder / name / "runtime.json").read_text())["launches"]
    programs = {each["name"]: each["from_cache"] for each in launch["programs"]}
    return losses, programs["training"], launch["compilations"]["cache_misses"]


@pytest.mark.integration
@pytest.mark.parametrize(
    "precision",
    [
        pytest.param("float32", marks=needs_instructions(Isa.AVX512)),
        pytest.param("bfloat16", marks=needs_instructions(Isa.AVX512_BF16)),
    ],
)
def test_another_process_compiles_nothing_and_gives_the_same_losses(tmp_path, precision):
    how = ("--kernels", ONEDNN, "--precision", precision)
    losses, is_cached, _ = train(tmp_path, "first", *how)
    assert not is_cached
    assert train(tmp_path, "second", *how) == (losses, True, 0)
    # Its kernels are part of a program, so other ones are another entry.
    of_xla, is_cached, _ = train(tmp_path, "third", "--kernels", XLA, "--precision", precision)
    assert not is_cached
    assert of_xla == pytest.approx(losses, rel=0.05)  # three steps of a small network, also in bfloat16
