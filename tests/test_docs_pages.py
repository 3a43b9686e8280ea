"""The pages of docs/: what they quote and name is in the code, and what the README links to is there."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.command_options import COMMAND_OPTIONS

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
PACKAGES = ("engine", "preprocess", "models")


def messages() -> list[str]:
    """Every string of the code, an ellipsis in the place of what is put in."""
    found = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


def pieces(message: str) -> list[str]:
    return [piece.strip() for piece in re.split("[…\n]", message) if len(piece.strip()) > 8]


def test_every_message_that_troubleshooting_quotes_is_one_of_the_code():
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    quoted = [words.strip("` ") for words in re.findall(r"^> `(.*)`$", text, re.MULTILINE)]
    assert len(quoted) > 30
    ours = messages()
    unknown = [words for words in quoted if not all(any(piece in one for one in ours) for piece in pieces(words))]
    assert unknown == []


def test_every_module_of_the_walk_is_there_and_named_once():
    text = (ROOT / "docs/walk.md").read_text(encoding="utf-8")
    names = re.findall(r"`((?:engine|preprocess|models)\.[\w.]+)`", text)
    assert len(names) > 25
    assert len(set(names)) == len(names)
    assert [name for name in names if find_spec(name) is None] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_option_in_a_command_is_one_of_that_command(page):
    commands = "|".join(COMMAND_OPTIONS)
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for command, line in re.findall(rf"({commands}) (.*)", text):
        for option in re.findall(r" (--[a-z0-9-]+)", line.split("#")[0].split("`")[0]):
            assert option in COMMAND_OPTIONS[command], (command, option)


def test_the_readme_is_short_and_its_links_lead_somewhere():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 160
    links = [link.partition("#")[0] for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text)]
    assert [link for link in links if not (ROOT / link).exists()] == []
