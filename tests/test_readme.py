"""The README: its examples run, and what it names exists."""

import re
from pathlib import Path

import pytest

from tests.command_options import COMMAND_OPTIONS

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
@pytest.mark.usefixtures("small_resnets")
def test_every_python_example_runs(number, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[number], f"README block {number}", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.split()[1:] == ["20", "steps"]


def test_every_file_and_option_that_the_readme_names_exists():
    text = README.read_text(encoding="utf-8")
    root = README.parent
    for path in set(re.findall(r"`((?:engine|models|preprocess|scripts)/[\w./]+)`", text)):
        assert (root / path).exists(), path
    options = set().union(*COMMAND_OPTIONS.values())
    scripts = "".join(path.read_text(encoding="utf-8") for path in root.glob("scripts/**/*cli.py"))
    for option in set(re.findall(r"(?<=[` ])--[a-z0-9-]+", text)):
        assert option in options or f'"{option}"' in scripts, option
