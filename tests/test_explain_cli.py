"""The command explain-program: a run, options, two programs, the loop's body, and errors in one line."""

import json
import os
import sys

import pytest
from click.testing import CliRunner

from loopfeed import train
from loopfeed.engine.commands import explain_cli
from loopfeed.engine.commands.explain_cli import main
from loopfeed.engine.sizing.device_rates import DeviceRates
from tests.fake_source import fake_source, files_of, pack
from tests.toy import Linear, toy_config

RATES = DeviceRates(1e11, 1e10, "float32", "cpu")
MODEL = "import tests.toy\nmodel = tests.toy.Linear\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with a data set, a run of the user's own model on it, and that model's module."""
    folder = tmp_path_factory.mktemp("place")
    pack(fake_source(20, size=4), folder / "data")
    pack(fake_source(11, size=4, seed=1, name="val"), folder / "data")
    config = toy_config(steps=1, batch=4, num_classes=None, data=str(folder / "data"), run_dir=str(folder / "run"))
    train(config, model=Linear())
    (folder / "explained.py").write_text(MODEL)
    yield folder
    sys.modules.pop("explained", None)


def invoke(monkeypatch, place, *arguments):
    """Run the command in this process in the folder, and capture the exit code; the device is not measured."""
    codes: list[int] = []
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr("loopfeed.engine.inspection.explain.measure_device", lambda *_, **__: RATES)
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return (codes or [result.exit_code])[0], result.stdout, result.stderr


def test_a_run_is_explained_and_only_read(monkeypatch, place):
    before = files_of(place / "run")
    code, said, told = invoke(monkeypatch, place, "run", "--model", "explained:model", "--format", "json")
    assert code == 0, told
    report = json.loads(said)
    assert report["model"] == "linear"
    assert report["settings"]["batch"] == 4
    assert {row["action"] for row in report["scopes"] if row["phase"] == "valid"} >= {"draw", "predict", "push"}
    assert report["traced"]["forward_products"] == 4 * 48 * 3
    assert report["rates"]["flops_per_s"] == 1e11
    assert files_of(place / "run") == before


@pytest.mark.integration  # compiles more programs
def test_options_override_the_run_and_two_programs_are_compared(monkeypatch, place):
    code, said, told = invoke(monkeypatch, place, "--model", "explained:model", "--compare", "run", "run --batch 2")
    assert code == 0, told
    lines = said.splitlines()
    assert lines[:2] == ["A  run", "B  run --batch 2"]
    assert [line.split() for line in lines if line.startswith("  batch ")] == [["batch", "4", "2"]]
    assert any(line.split()[:2] == ["train/forward,", "FLOP"] for line in lines)
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "RUN must be a run folder, but nowhere does not exist"),
        (["."], "contains 1 run folder; the latest is run"),
        (
            ["run"],
            "on the command line `explain-program run --model package.module:function`",
        ),
        (["run", "--recipe", "demo"], "RUN has its own settings, got --recipe demo as well"),
        (["run", "--compare", "a", "b"], "--compare names both programs, got RUN run as well"),
        (["--compare", "run", "run --ir hlo"], "--compare 'run --ir hlo' must describe one program, got --ir"),
        (["--compare", "run", "--batch x"], "--compare '--batch x': Invalid value for '--batch'"),
        (["--compare", "run", "'"], "cannot be split into arguments"),
        (["--ir", "hlo", "--format", "json"], "--ir prints text, got --format json as well"),
        (["--ir", "hlo", "--compare", "a", "b"], "--ir prints one program and --compare compares two"),
        (["--synthetic", "--model", "resnet9"], "--model must be auto or a name"),
        (["--depth", "0"], "Invalid value for '--depth'"),
        (["--run-dir", "x"], "No such option"),
    ],
)
def test_wrong_usage_is_refused_in_one_line(monkeypatch, place, arguments, message):
    code, said, told = invoke(monkeypatch, place, *arguments)
    assert (code, said) == (2, "")
    assert message in told
    assert "Traceback" not in told


def test_a_recipe_and_an_own_part_of_one_program(monkeypatch, place):
    """What one of two programs names takes the place of what is given for both."""
    seen = []

    def explain(described, depth, rates):
        seen.append(described)
        raise KeyboardInterrupt

    monkeypatch.setattr(explain_cli, "_explain", explain)
    arguments = ["--recipe", "demo", "--model", "explained:model", "--compare", "--model resnet14", "--batch 4"]
    code, _, told = invoke(monkeypatch, place, *arguments)
    assert (code, told) == (130, "explain-program: stopped\n")
    assert seen[0].name == "demo --model resnet14"
    assert (seen[0].config.model, seen[0].parts.model) == ("resnet14", None)
    invoke(monkeypatch, place, "--recipe", "demo", "--compare", "--model explained:model --batch 4", "--batch 4")
    assert seen[1].name == "demo --model explained:model --batch 4"
