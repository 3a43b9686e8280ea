"""Shell completion, requested by click's protocol as a shell does."""

import contextlib
import importlib
import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

ROOT = Path(__file__).parents[1]
MODULES = {place.name: place.module for place in distribution("loopfeed").entry_points}


def ask(command, instruction, *words):
    """Return a command's completions of the last word, and whether it loaded jax."""
    source = (
        f"import sys; sys.argv[0] = {command!r}\n"
        "from atexit import register; register(lambda: print('jax' in sys.modules, file=sys.stderr))\n"
        f"from {MODULES[command]} import main; main()"
    )
    variable = f"_{command.replace('-', '_').upper()}_COMPLETE"
    asked = {variable: instruction, "COMP_WORDS": " ".join([command, *words]), "COMP_CWORD": str(len(words))}
    done = subprocess.run(
        [sys.executable, "-c", source], env=os.environ | asked, cwd=ROOT, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.stderr == "False\n"
    return done.stdout


def completed(command, *words):
    """(kind, value) of each completion of the last word."""
    main = importlib.import_module(MODULES[command]).main
    with contextlib.chdir(ROOT):
        found = ShellComplete(main, {}, command, "").get_completions(list(words[:-1]), words[-1])
    return [(each.type, each.value) for each in found]


def test_a_shell_gets_kinds_and_values():
    assert ask("run-train", "bash_complete", "--model", "convnet").split() == ["plain,convnet8", "plain,convnet8-wide"]
    assert ask("inspect-shards", "bash_complete", "ru").split() == ["dir,ru"]


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_the_completion_script_of_a_shell_is_printed(shell):
    script = ask("run-train", f"{shell}_source")
    assert "_RUN_TRAIN_COMPLETE" in script
    assert "\\x" not in script


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--model", "convnet"], [("plain", "convnet8"), ("plain", "convnet8-wide")]),
        (["--recipe", "imagenet"], [("plain", f"imagenet-{end}") for end in ("16", "90", "large")]),
        (["--recipe", "runs/first/con"], [("file", "runs/first/con")]),
        (["--schedule", "co"], [("plain", "constant"), ("plain", "cosine"), ("plain", "cosine-restarts")]),
        (["--data", "data/sh"], [("dir", "data/sh")]),
        (["--run-dir", "ru"], [("dir", "ru")]),
        (["--init-from", "w"], [("file", "w")]),
        (["--label-s"], [("plain", "--label-smoothing")]),
    ],
)
def test_run_train_completes_models_recipes_choices_paths_and_options(words, expected):
    assert completed("run-train", *words) == expected


@pytest.mark.parametrize("command", ["run-eval", "verify-run", "tail-run", "control-run", "inspect-shards"])
def test_runs_and_packs_are_completed_as_folders(command):
    assert completed(command, "ru") == [("dir", "ru")]
