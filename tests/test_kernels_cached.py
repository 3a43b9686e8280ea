"""A program that calls oneDNN is loaded from the compilation cache by another process, and gives the same losses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from loopfeed.models.kernels import ONEDNN, XLA
from loopfeed.models.kernels.onednn.library import Isa, load_library
from tests.kernels import needs_instructions

ROOT = Path(__file__).parents[1]
NEEDED = {"float32": Isa.AVX512, "bfloat16": Isa.AVX512_BF16}
# Several launches in one process, each with its own words. The subject is the cache: the network is small, and compiled
# without LLVM's optimiser.
RUNS = """
import json, sys
from loopfeed.engine.commands.cli import main
from tests.kernels import onednn_for_all_shapes
from tests.small_resnets import small_resnets
sys.argv[0] = "run-train"
with small_resnets(), onednn_for_all_shapes():
    for words in json.loads(sys.argv[1]):
        main(words, standalone_mode=False)
"""
SETTINGS = ["--synthetic", "--model", "resnet8", "--image-size", "16", "--num-classes", "3", "--batch", "8"]


def train(folder, names):
    """Train in a process of its own, once for each KERNELS-PRECISION of the names."""
    every = []
    for name in names:
        kernels, precision = name.rpartition("/")[2].split("-")
        words = [*SETTINGS, "--steps", "3", "--kernels", kernels, "--precision", precision]
        every.append([*words, "--run-dir", str(folder / name), "--compilation-cache", str(folder / "cache")])
    done = subprocess.run(
        [sys.executable, "-c", RUNS, json.dumps(every)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def result(folder):
    """Return a run's losses, whether its program is from the cache, and what was compiled."""
    losses = [json.loads(line)["loss"] for line in (folder / "loss.jsonl").read_text().splitlines()]
    (launch,) = json.loads((folder / "runtime.json").read_text())["launches"]
    programs = {each["name"]: each["from_cache"] for each in launch["programs"]}
    return losses, programs["training"], launch["compilations"]["cache_misses"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The runs of two processes, "first/…" and "second/…", which also has those with XLA's kernels."""
    folder = tmp_path_factory.mktemp("kernels")
    precisions = [name for name, isa in NEEDED.items() if load_library().has(isa)]
    train(folder, [f"first/{ONEDNN}-{each}" for each in precisions])
    train(folder, [f"second/{kernels}-{each}" for each in precisions for kernels in (ONEDNN, XLA)])
    return folder


@pytest.mark.integration
@pytest.mark.parametrize(
    "precision", [pytest.param(name, marks=needs_instructions(isa)) for name, isa in NEEDED.items()]
)
def test_another_process_compiles_nothing_and_gives_the_same_losses(folder, precision):
    losses, is_cached, _ = result(folder / f"first/{ONEDNN}-{precision}")
    assert not is_cached
    assert result(folder / f"second/{ONEDNN}-{precision}") == (losses, True, 0)
    # Its kernels are part of a program, so other ones are another entry.
    of_xla, is_cached, _ = result(folder / f"second/{XLA}-{precision}")
    assert not is_cached
    assert of_xla == pytest.approx(losses, rel=0.05)  # three steps of a small network, also in bfloat16
