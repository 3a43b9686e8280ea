"""The README: its examples run, and what it names exists."""

import re
from pathlib import Path

import pytest

from engine.commands.cli import main as run_train
from engine.commands.control_cli import main as control_run
from engine.commands.eval_cli import main as run_eval
from engine.commands.tail_cli import main as tail_run
from engine.commands.verify_cli import main as verify_run
from preprocess.commands.cli import main as preprocess_imagenet
from preprocess.commands.inspect_cli import main as inspect_shards

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_python_example_runs(number, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[number], f"README block {number}", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.split()[1:] == ["20", "steps"]


def test_every_file_and_option_that_the_readme_names_exists():
    text = README.read_text(encoding="utf-8")
    root = README.parent
    for path in set(re.findall(r"`((?:engine|models|preprocess|scripts)/[\w./]+)`", text)):
        assert (root / path).exists(), path
    commands = (control_run, inspect_shards, preprocess_imagenet, run_eval, run_train, tail_run, verify_run)
    options = {"--help"}.union(*(param.opts + param.secondary_opts for each in commands for param in each.params))
    scripts = "".join(path.read_text(encoding="utf-8") for path in root.glob("scripts/**/*cli.py"))
    for option in set(re.findall(r"(?<=[` ])--[a-z0-9-]+", text)):
        assert option in options or f'"{option}"' in scripts, option
