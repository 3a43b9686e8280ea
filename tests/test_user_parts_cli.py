"""The user's own parts from the command line: what is loaded, the record, what a resume needs again, the errors."""

import hashlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from loopfeed import load_recipe
from loopfeed.engine.commands.cli import main as run_train
from loopfeed.engine.commands.eval_cli import main as run_eval
from loopfeed.engine.commands.user_parts import load_user_parts
from loopfeed.engine.commands.verify_cli import main as verify_run
from loopfeed.engine.named_parts import OWN_PARTS
from loopfeed.engine.parts import UserParts
from loopfeed.engine.records.digests import SEAL, sealed
from tests.small_resnets import small_resnets

ROOT = Path(__file__).parents[1]
MINE = """
import jax.numpy as jnp
from tests.toy import Linear, toy_batch

class Model(Linear):
    def __init__(self):
        super().__init__()

MODEL = Linear()

def make_loss():
    return squared

def squared(outputs, labels, weights):
    return jnp.square(outputs - jnp.eye(3)[labels]).sum(axis=1)

METRICS = {"largest": lambda outputs, labels: outputs.max(axis=1)}

def images():
    return toy_batch(99)

class Sized:
    def __init__(self, size, *, depth=2, more):
        pass

def nothing():
    return None

def fails():
    raise LookupError("no such thing")
"""
OPTIONS = [
    *("--model", "mine:Model", "--batches", "mine:toy_batch", "--loss", "mine:make_loss"),
    *("--metrics", "mine:METRICS", "--evaluation", "mine:images"),
]
SETTINGS = ["--steps", "4", "--batch", "8", "--num-classes", "3", "--learning-rate", "0.01", "--run-dir", "run"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the module `mine`, as the working directory of a command."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr("loopfeed.engine.commands.command_end.os._exit", sys.exit)
    yield tmp_path
    for name in ("mine", "package", "package.inner", "broken", "leaves"):
        sys.modules.pop(name, None)


def call(command, *arguments):
    done = CliRunner().invoke(command, list(map(str, arguments)))
    return done.exit_code, done.output


def forget(name="mine"):
    sys.modules.pop(name, None)


def test_a_run_with_own_parts_is_trained_resumed_evaluated_and_verified(place):
    code, output = call(run_train, *SETTINGS, *OPTIONS)
    assert (code, "largest" in output) == (0, True), output
    recorded = json.loads((place / "run/config.json").read_text())
    assert recorded["config"]["model"] == "auto"
    assert recorded["resolved"]["own_parts"] == {"loss": "mine.squared", "metrics": ["largest"]}
    named = recorded["resolved"]["named_parts"]
    assert {name: part["name"] for name, part in named.items()} == dict(
        zip([option.removeprefix("--") for option in OPTIONS[::2]], OPTIONS[1::2], strict=True)
    )
    mine = sys.modules["mine"]
    assert named["loss"]["sha256"] == hashlib.sha256(inspect.getsource(mine.make_loss).encode()).hexdigest()
    assert named["metrics"]["sha256"] == hashlib.sha256(MINE.encode()).hexdigest()

    code, output = call(run_train, "--resume", "--run-dir", "run", "--steps", "6")
    assert code == 2
    words = output.replace("\n", " ").replace(f"{Path.cwd()}/", "")
    assert "batches, a loss (mine.squared), metrics and evaluation images of your own, which must be given" in words
    assert "line `run-train --run-dir run --resume --model mine:Model --batches mine:toy_batch --loss mine:" in words
    code, output = call(
        run_train, "--resume", "--run-dir", "run", "--steps", "6", *OPTIONS[2:], "--model", "mine:MODEL"
    )
    assert code == 2
    assert "--model must be the one that the run was trained with, mine:Model, got mine:MODEL: give that one" in output

    (place / "mine.py").write_text(MINE.replace("return squared", "return squared  # the same"))
    forget()
    code, output = call(run_train, "--resume", "--run-dir", "run", "--steps", "6", *OPTIONS)
    assert code == 0, output
    # The source of the module stands for that of the dictionary in it.
    warned = [name for name in OWN_PARTS if f"warning: the source of --{name} mine:" in output]
    assert warned == ["loss", "metrics"]

    code, output = call(run_eval, "run", *OPTIONS[:2], *OPTIONS[4:])
    assert (code, "largest" in output) == (0, True), output
    code, output = call(run_eval, "run", *OPTIONS[:2], *OPTIONS[6:])
    assert code == 2
    assert "`run-eval run --loss mine:make_loss`" in output.replace("\n", " ")
    code, output = call(verify_run, "run", *OPTIONS)
    assert code == 0, output
    code, output = call(verify_run, "run", *OPTIONS[2:])
    assert code == 2
    assert "`verify-run run --model mine:Model`" in output.replace("\n", " ")


@pytest.mark.parametrize(
    ("option", "name", "message"),
    [
        ("model", "mine", "--model must be package.module:function, got 'mine': give the module's name"),
        ("model", "mine.py:Model:x", "--model must be package.module:function, got 'mine.py:Model:x'"),
        ("model", "../mine:Model", "--model must be package.module:function, got '../mine:Model'"),
        (
            "model",
            "yours:Model",
            r"there is no module yours \(sys.path\[0\] is '{place}'\): check",
        ),
        ("model", "mine.inner:Model", r"--model mine.inner:Model: there is no module mine.inner \(sys.path"),
        ("model", "mine:Modle", "--model mine:Modle: mine has no attribute Modle: did you mean Model?"),
        ("model", "mine:Model.build", "--model mine:Model.build: mine.Model has no attribute build: check it"),
        ("loss", "package.inner:x", r"importing package.inner raised ModuleNotFoundError: No module named 'absent' \("),
        (
            "loss",
            "broken:x",
            r"importing broken raised SyntaxError: .*broken.py, line 1\) \(--traceback",
        ),
        ("loss", "leaves:x", r"--loss leaves:x: importing leaves raised SystemExit: 3 \(--traceback"),
        ("loss", "mine:fails", "--loss mine:fails: calling it without arguments raised LookupError: no such thing"),
        (
            "model",
            "mine:Sized",
            r"--model mine:Sized: the class Sized cannot be built without arguments \(size, more\): name a function "
            "without parameters that builds and returns a model",
        ),
        ("batches", "mine:nothing", "--batches mine:nothing: it must return batches, but returned None"),
    ],
)
def test_a_name_without_a_part_is_one_clear_error(place, option, name, message):
    (place / "package").mkdir()
    (place / "package/inner.py").write_text("import absent")
    (place / "broken.py").write_text("x = (")
    (place / "leaves.py").write_text("raise SystemExit(3)")
    with pytest.raises(ValueError, match=message.replace("{place}", str(place))) as caught:
        load_user_parts({option: name})
    assert "\n" not in str(caught.value)


def test_the_part_is_what_is_named_or_what_it_returns_without_arguments(place):
    parts = load_user_parts({"model": "mine:Model", "batches": "mine:toy_batch", "loss": "mine:squared"})
    mine = sys.modules["mine"]
    assert sys.path[0] == str(place)
    assert isinstance(parts.model, mine.Model)
    assert parts.batches is mine.toy_batch
    assert parts.loss is mine.squared
    assert load_user_parts({"loss": "mine:make_loss"}).loss is mine.squared
    assert load_user_parts({"model": "mine:MODEL"}).model is mine.MODEL
    assert load_user_parts({"metrics": "mine:METRICS"}).metrics is mine.METRICS
    (place / "broken.py").write_text("def loss(*arguments): ...")
    assert load_user_parts({"loss": "broken:loss"}).loss is sys.modules["broken"].loss
    assert load_user_parts({}) == UserParts()


@pytest.mark.parametrize("option", ["optimizer", "schedule", "loss", "augment", "batches"])
def test_only_a_function_without_parameters_is_called_if_the_part_may_be_a_function(place, option):
    (place / "broken.py").write_text(
        "def part(first=1e-3, **more): return 5\n"
        "def made(): return part\n"
        "class Part:\n    def __init__(self, size=3): self.size = size\n"
        "class Any(Part):\n    def __init__(self, *values, **named): super().__init__(*values, **named)\n"
        "def build(width=3): return Part(width)\n"
    )
    for name in ("part", "made"):
        assert getattr(load_user_parts({option: f"broken:{name}"}), option) is sys.modules["broken"].part
    for name in ("Part", "Any"):
        assert getattr(load_user_parts({option: f"broken:{name}"}), option).size == 3
    model: Any = load_user_parts({"model": "broken:build"}).model
    assert model.size == 3


@pytest.mark.parametrize("name", ["models.py", "models/__init__.py"])
def test_a_module_whose_name_is_taken_is_named_with_the_other_one(place, monkeypatch, name):
    """That of the run is loaded, so that another one would need its name."""
    taken = place.parent / "taken.py"
    monkeypatch.setitem(sys.modules, "models", SimpleNamespace(__file__=str(taken)))
    taken.touch()
    (place / name).parent.mkdir(exist_ok=True)
    (place / name).write_text("def build_model(): ...\ndef Net(): ...")
    for part in ("models:Net", "models:build_model", "models.inner:Net"):
        with pytest.raises(
            ValueError,
            match=f"--model {part}: another module called models is loaded already, {taken}, so "
            f"{place / name} cannot be: rename that file or folder",
        ):
            load_user_parts({"model": part})


def test_the_working_directory_is_on_the_path_as_for_python_with_m(place):
    """A script, such as an installed command, has its own folder there instead; `python -P` wants neither."""
    script = place / "scripts/show.py"
    script.parent.mkdir()
    script.write_text(
        "from loopfeed.engine.commands.user_parts import load_user_parts as load\n"
        "print(load({'metrics': 'found:PLACE'}).metrics)"
    )
    (place / "found.py").write_text("PLACE = {'here': None}")
    for flags, expected in ([], "{'here': None}"), (["-P"], "there is no module found"):
        done = subprocess.run(
            [sys.executable, *flags, script],
            cwd=place,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert expected in done.stdout + done.stderr


@pytest.mark.parametrize("name", OWN_PARTS)
def test_a_recipe_that_names_code_is_refused_by_name(place, name):
    (place / "mine.toml").write_text(f'[settings]\nsteps = 3\n{name} = "mine:Model"\n')
    with pytest.raises(
        ValueError, match=f"a recipe must not name code, but has {name} = 'mine:Model': give --{name} on the command"
    ):
        load_recipe("mine.toml")
    code, output = call(run_train, *SETTINGS, "--recipe", "mine.toml")
    assert (code, "must not name code" in output) == (2, True)
    assert "mine" not in sys.modules


def forge(run, **changes):
    """Rewrite a run's `config.json` with other values, and with the digest that belongs to them."""
    values = json.loads((run / "config.json").read_text())
    values.pop(SEAL)
    for part, change in changes.items():
        values[part] |= change
    (run / "config.json").write_text(json.dumps(sealed(values)))


def test_no_file_of_a_run_names_code_that_is_loaded(place):
    with small_resnets():
        code, output = call(run_train, *SETTINGS, "--synthetic", "--image-size", "8", "--model", "resnet8")
    assert code == 0, output
    (place / "run/result.json").unlink()
    for snapshot in (place / "run/snapshots").iterdir():
        snapshot.rename(place / f"kept-{snapshot.name}")
    parts = {name: {"name": "mine:fails", "sha256": None} for name in OWN_PARTS}
    commands = [
        (run_train, ["--resume", "--run-dir", "run", "--steps", "9"]),
        (run_train, ["--recipe", "run/config.json", "--steps", "2"]),
        (run_eval, ["run"]),
        (verify_run, ["run"]),
    ]
    named = {"named_parts": parts, "own_parts": {"loss": "mine:fails", "metrics": ["mine:fails"]}}
    for changes, tried in (
        ({"config": {"model": "mine:fails"}}, commands),
        ({"resolved": {"model": "mine:fails", **named}}, commands),
        ({"resolved": {"model": "resnet8", "named_parts": ["mine:fails"]}}, commands[:1]),
    ):
        forge(place / "run", **changes)
        for command, arguments in tried:
            code, output = call(command, *arguments)
            assert code == 2, output
            assert "Traceback" not in output
            assert "no such thing" not in output
            assert "mine" not in sys.modules
