"""Which kernels a run uses: every program of a run has the calls that its setting means, and a resume keeps them."""

import os
import re
import shutil
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

from loopfeed import (
    DeviceRates,
    check_step,
    convolution,
    evaluate,
    explain_program,
    predict,
    replay_run,
    run_settings,
    train,
)
from loopfeed.engine.commands.eval_cli import main as run_eval
from loopfeed.engine.compilation import ahead_of_time as compilation
from loopfeed.engine.config import SettingError
from loopfeed.engine.inspection.step_check import _step_program
from loopfeed.engine.parts import UserParts
from loopfeed.engine.program.kernels import AUTO, describe_kernels, kernels_on, settle_kernels
from loopfeed.engine.run.train import set_up_run
from loopfeed.engine.sizing.planning import plan_here
from loopfeed.models.kernels import ONEDNN, XLA
from loopfeed.models.kernels.choice import kernels_in_use
from loopfeed.models.kernels.onednn.library import Isa, load_library
from tests.kernels import NO_LIBRARY, needs_onednn, onednn_for_all_shapes, without_library
from tests.toy import CLASSES, SIZE, Linear, toy_batch, toy_config

pytestmark = pytest.mark.kernels

RATES = DeviceRates(flops_per_s=1e11, bytes_per_s=1e10, dtype="float32", device="a device")
IMAGES = toy_batch(99)


@pytest.fixture(scope="module", autouse=True)
def _onednn_for_all_shapes():
    with onednn_for_all_shapes():
        yield


@dataclass
class Network:
    """A convolution and a dense layer."""

    name: str = "network"

    def init(self, key):
        shapes = {"kernel": (3, 3, 3, 4), "dense": (4, CLASSES)}
        return {name: 0.3 * jax.random.normal(key, shape) for name, shape in shapes.items()}, {}

    def apply(self, params, batch_stats, images, train):
        x = jnp.maximum(convolution(images, params["kernel"]), 0)
        return x.mean((1, 2)) @ params["dense"], batch_stats


def config_of(kernels, **values):
    return toy_config(kernels=kernels, transport="inplace", **{"steps": 3} | values)


@pytest.fixture
def applied(monkeypatch):
    """Return a list to which the kernels in use are added whenever a program that applies the model is traced."""
    kernels: list[str] = []
    apply = Network.apply

    def record(self, *arguments, **settings):
        kernels.append(kernels_in_use())
        return apply(self, *arguments, **settings)

    monkeypatch.setattr(Network, "apply", record)
    return kernels


def train_network(config, **parts):
    return train(config, model=Network(), batches=toy_batch, evaluation=IMAGES, **parts)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the folders of two finished runs, by their kernels."""
    folder = tmp_path_factory.mktemp("runs")
    for kernels in (XLA, ONEDNN):
        train_network(config_of(kernels, run_dir=folder / kernels, snapshot_every_steps=2))
    return {kernels: folder / kernels for kernels in (XLA, ONEDNN)}


def trace_step(kernels):
    """Trace the step that `check_step` makes, which it does not lower as a whole."""
    with set_up_run(config_of(kernels), UserParts(model=Network(), batches=toy_batch), print, is_dry=True) as run:
        program = _step_program(run)
        return compilation.trace_ahead(program.looped, jnp.int32(1), *program.arguments, platform="cpu")


# What applies the model, given the kernels and the folder of a run that was trained with them.
APPLY = {
    "training": lambda kernels, _: train_network(config_of(kernels)),
    "evaluation": lambda _, run: evaluate(run, model=Network(), evaluation=IMAGES, per_class=True),
    "predictions": lambda _, run: predict(run, np.zeros((2, SIZE, SIZE, 3), np.uint8), model=Network()),
    "replay": lambda _, run: replay_run(run, model=Network(), batches=toy_batch, evaluation=IMAGES),
    "check of a step": lambda kernels, _: trace_step(kernels),
    "plan": lambda kernels, _: plan_here(
        config_of(kernels), UserParts(model=Network(), batches=toy_batch), lambda _: None, device_rate=1e3
    ),
    "explanation": lambda kernels, _: explain_program(
        config_of(kernels), model=Network(), batches=toy_batch, rates=RATES
    ),
}


@needs_onednn
@pytest.mark.parametrize(("what", "kernels"), [("training", XLA), *((what, ONEDNN) for what in APPLY)])
def test_every_program_that_applies_the_model_has_the_kernels_of_its_run(applied, runs, what, kernels):
    APPLY[what](kernels, runs[kernels])
    assert set(applied) == {kernels}


@needs_onednn
@pytest.mark.integration
def test_rounding_explains_how_a_step_in_a_loop_differs_from_its_operations():
    found = check_step(config_of(ONEDNN), model=Network(), batches=toy_batch)
    assert found.is_explained
    assert found.program


def settled(kernels, platform="cpu", **values):
    return settle_kernels(toy_config(kernels=kernels), platform, **values).kernels


def test_auto_is_xla_where_the_library_is_missing(monkeypatch):
    without_library(monkeypatch)
    assert settled(AUTO) == XLA
    result = train_network(config_of(AUTO))
    assert len(result.losses) == 3


@pytest.mark.parametrize(
    ("platform", "is_kept", "message"),
    [
        ("cpu", False, r"(kernels) cannot be used here: onednn-cpu-gomp is not installed: pip install 'loopfeed[kern"),
        ("cpu", True, r"(kernels), which the run has used from its beginning, cannot be used here: onednn-cpu-gomp"),
        ("cuda", False, r"(kernels) cannot be used here: they are for CPUs, and jax runs on cuda: set the environment"),
    ],
)
def test_kernels_that_cannot_be_used_are_refused_with_the_remedy(monkeypatch, platform, is_kept, message):
    without_library(monkeypatch)
    with pytest.raises(SettingError, match=re.escape(message)):
        settled(ONEDNN, platform, is_kept=is_kept)


def test_a_run_goes_on_with_its_setting_on_a_device_where_it_has_no_effect(monkeypatch):
    without_library(monkeypatch)
    assert settled(ONEDNN, "cuda", is_kept=True) == ONEDNN
    assert kernels_on(toy_config(kernels=ONEDNN), "cuda") == XLA
    assert kernels_on(toy_config(kernels=ONEDNN), "cpu") == ONEDNN


@needs_onednn
def test_a_resumed_run_keeps_its_kernels_by_name(runs, tmp_path, applied):
    for kernels in (XLA, ONEDNN):
        path = shutil.copytree(runs[kernels], tmp_path / kernels)
        assert run_settings(path).kernels == kernels
        applied.clear()
        train_network(config_of(AUTO, run_dir=path, resume=True, steps=4))
        assert set(applied) == {kernels}
        assert run_settings(path).kernels == kernels
        other = XLA if kernels == ONEDNN else ONEDNN
        with pytest.raises(SettingError, match=f"kernels was '{kernels}', got '{other}'"):
            train_network(config_of(other, run_dir=path, resume=True, steps=5))


@needs_onednn
def test_a_resume_says_that_onednn_rounds_otherwise_on_this_processor(runs, tmp_path, monkeypatch):
    path = shutil.copytree(runs[ONEDNN], tmp_path / "run")
    said: list[str] = []
    train_network(config_of(AUTO, run_dir=path, resume=True, steps=4), notify=said.append)
    assert not [line for line in said if "other rounding" in line]
    other = replace(load_library(), version="9.7.0")
    monkeypatch.setattr("loopfeed.engine.program.kernels.load_library", lambda: other)
    train_network(config_of(AUTO, run_dir=path, resume=True, steps=5), notify=said.append)
    (line,) = (line for line in said if "other rounding" in line)
    assert re.fullmatch(r"the run used oneDNN .* and goes on with oneDNN 9\.7\.0 .*: .*", line)


@needs_onednn
def test_a_run_is_not_resumed_or_replayed_without_its_kernels_but_is_evaluated(runs, tmp_path, monkeypatch):
    path = shutil.copytree(runs[ONEDNN], tmp_path / "run")
    before = evaluate(path, model=Network(), evaluation=IMAGES)
    without_library(monkeypatch)
    match = (
        "which the run has used from its beginning, cannot be used here: .*: pip install .* start another run from its"
    )
    with pytest.raises(SettingError, match=match):
        train_network(config_of(AUTO, run_dir=path, resume=True, steps=4))
    with pytest.raises(SettingError, match=match):
        replay_run(path, model=Network(), batches=toy_batch, evaluation=IMAGES)
    said: list[str] = []
    found = evaluate(path, model=Network(), evaluation=IMAGES, notify=said.append)
    assert found.record.loss == pytest.approx(before.record.loss, rel=1e-5)  # sums of 27 products in another order
    assert [line for line in said if line.startswith("the run used oneDNN's kernels, which cannot be used here (")]


@needs_onednn
def test_an_evaluation_refuses_missing_kernels_only_if_it_names_them(runs, monkeypatch):
    """The notice about those of the run comes before the error about a model that no command was given."""
    without_library(monkeypatch)
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    images = np.zeros((2, SIZE, SIZE, 3), np.uint8)
    for path in runs.values():
        found = CliRunner().invoke(run_eval, [str(path), "--kernels", ONEDNN])
        assert codes.pop() == 2
        refused = "oneDNN's kernels (--kernels) cannot be used here: onednn-cpu-gomp is not installed: pip"
        assert found.stderr.startswith(f"run-eval: {refused}")
        assert found.stderr.count("\n") == 1
        with pytest.raises(SettingError, match=r"oneDNN's kernels \(kernels\) cannot be used here: onednn-cpu-gomp"):
            predict(path, images, model=Network(), settings={"kernels": ONEDNN})
    said: list[str] = []
    predict(runs[ONEDNN], images, model=Network(), notify=said.append)
    assert [line for line in said if line.startswith("the run used oneDNN's kernels, which cannot be used here (")]
    for kernels in (AUTO, XLA):
        predict(runs[ONEDNN], images, model=Network(), settings={"kernels": kernels}, notify=said.append)
    assert len([line for line in said if line.startswith("the run used oneDNN's kernels")]) == 1


@needs_onednn
@pytest.mark.parametrize("has_amx", [False, True])
def test_a_run_says_which_kernels_it_uses(monkeypatch, has_amx):
    library = replace(load_library(), isa=Isa.AMX if has_amx else Isa.AVX512)
    monkeypatch.setattr("loopfeed.engine.program.kernels.load_library", lambda: library)
    said: list[str] = []
    train(config_of(AUTO), model=Linear(), batches=toy_batch, notify=said.append)
    (line,) = (each for each in said if each.startswith("kernels: "))
    kernels = f"kernels: oneDNN 3.2.0 ({'AMX' if has_amx else 'AVX-512'})"
    assert line == kernels  # a model of one's own has a precision of its own
    more = "; only bfloat16 uses AMX: --precision bfloat16 is faster" if has_amx else ""
    assert describe_kernels(config_of(ONEDNN), "cpu") == kernels + more
    half = replace(config_of(ONEDNN), precision="bfloat16")
    assert describe_kernels(half, "cpu") == f"{kernels}, in bfloat16"
    assert describe_kernels(config_of(XLA), "cpu") == (
        "kernels: XLA's; on this processor oneDNN's are faster: start a run with --kernels onednn"
    )
    assert describe_kernels(config_of(XLA), "cuda") is describe_kernels(config_of(ONEDNN), "cuda") is None


def test_a_run_says_how_to_get_the_faster_kernels_where_they_can_be_had(monkeypatch):
    without_library(monkeypatch)
    assert describe_kernels(config_of(XLA), "cpu") == (
        "kernels: XLA's; on this processor oneDNN's are faster: pip install 'loopfeed[kernels]'"
    )
    monkeypatch.setattr(NO_LIBRARY, "remedy", "")
    assert describe_kernels(config_of(XLA), "cpu") is None
