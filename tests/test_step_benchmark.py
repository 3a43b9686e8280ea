"""The benchmark of the training step: its cases, the bytes of a perfect step, and the rates that it is timed by."""

import importlib
from pathlib import Path

import pytest

from loopfeed.models.kernels import ONEDNN, XLA, MissingKernelsError
from scripts.benchmarks import cases
from scripts.benchmarks.bench import Settings

CANDIDATES = Path(__file__).parents[1] / "scripts/benchmarks/candidates"


@pytest.fixture
def candidate(monkeypatch):
    """Import the script of a candidate."""
    monkeypatch.syspath_prepend(CANDIDATES)
    return importlib.import_module


def test_each_network_has_a_case_in_each_precision(tmp_path):
    (step,) = (bench for bench in cases.BENCHES if bench.name == "step")
    found = {case.name: case for case in step.chosen_cases(Settings(tmp_path, peers=True))}
    networks = (
        *("resnet50 224 px b8", "resnet50 64 px b16", "resnet18 64 px b16"),
        *("resnet8 32 px b128", "resnet20 32 px b128", "convnet8 32 px b128"),
    )
    for network in networks:
        for dtype in ("float32", "bfloat16"):
            names = {each.name for each in found[f"{network} {dtype}"].candidates}
            compared = {"torch channels_last, memory kept", "torch compile channels_last, memory kept"}
            assert names >= {"loopfeed", "loopfeed, kernels xla", "limit: memory and products"} | compared
            for each in found[f"{network} {dtype}"].candidates:
                assert (each.name == "loopfeed, float32") == ("float32" in each.arguments and dtype == "bfloat16")


def test_the_bytes_of_a_step_are_those_of_each_layer(candidate):
    work_of = candidate("work_of_models").work_of
    # Elements of the activations of ResNet-8's three stages, and of one image.
    a, b, c, image = 32 * 32 * 16, 16 * 16 * 32, 8 * 8 * 64, 32 * 32 * 3
    stem = (2 * image + 2 * a) + 5 * a
    first = 4 * 5 * a + 6 * a  # two convolutions, two norms, a sum
    second = 2 * (3 * a + 2 * b) + 3 * 5 * b + 5 * b + 6 * b  # of which the first convolution and the projection read a
    third = 2 * (3 * b + 2 * c) + 3 * 5 * c + 5 * c + 6 * c
    head = (2 * c + 2 * 64) + (3 * 64 + 2 * 10)
    work = work_of("resnet8", 32, 10)
    assert work.image_elements == stem + first + second + third + head
    assert work.num_params == 78_042


def test_an_amount_takes_its_part_of_the_pieces_that_contain_it(candidate, monkeypatch):
    roofline, now, done = candidate("roofline"), [5.0], []
    monkeypatch.setattr(roofline.time, "perf_counter", lambda: now[0])

    def work(num_pieces):
        done.append(num_pieces)
        now[0] += 4.0 * num_pieces

    assert roofline.seconds_for(25.0, 10.0, work) == 10.0
    assert done == [3]


def test_without_the_library_kernels_are_xlas_unless_it_was_asked_for(candidate, monkeypatch):
    step_jax = candidate("step_jax")

    def missing():
        raise MissingKernelsError("no library")

    monkeypatch.setattr(step_jax, "load_library", missing)
    assert step_jax.chosen_kernels("auto") == (XLA, {})
    assert step_jax.chosen_kernels(XLA) == (XLA, {})
    with pytest.raises(MissingKernelsError, match="no library"):
        step_jax.chosen_kernels(ONEDNN)


@pytest.mark.parametrize(("name", "gflop"), [("resnet50", 6 * 4.09), ("resnet18", 6 * 1.81)])
def test_the_work_of_a_network_counts_every_block(candidate, name, gflop):
    # Multiply-adds of one image forward as torchvision's documentation of its weights states them ("GFLOPS").
    first_input_gradient = 2e-9 * 112 * 112 * 64 * 7 * 7 * 3
    found = candidate("work_of_models").work_of(name, 224, 1000).image_flop / 1e9
    # Two decimals stand there.
    assert found == pytest.approx(gflop - first_input_gradient, rel=3e-3)
