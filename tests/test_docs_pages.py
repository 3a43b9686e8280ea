"""The pages of docs/: their quotes, options and links agree with the program."""

import ast
import gzip
import importlib
import os
import re
import shutil
import tarfile
import tomllib
import zipfile
from functools import cache
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from tests.command_options import COMMAND_OPTIONS

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
PACKAGES = ("engine", "preprocess", "models")


def template(node: ast.expr) -> str:
    """Return the text of an expression of strings, with an ellipsis in place of each value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"\{\w+[^{}]*\}", "…", node.value)  # a field of str.format
    if isinstance(node, ast.JoinedStr):
        return "".join(map(template, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    return "…"


@cache
def messages() -> set[str]:
    """Return the text of every expression of strings in the code."""
    found = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
                    found.add(collapse(template(node)))
    return found


def test_every_option_that_a_message_names_is_one_of_a_command():
    known = {"--version"}.union(*COMMAND_OPTIONS.values())
    others = {"--no-", "--pretrained", "--xla", "--option", "--signal", "--no-deps", "--ignore-zeros"}  # not ours
    commands = "|".join(COMMAND_OPTIONS)
    for message in messages():
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", message)) <= known | others, message
        for command, option in re.findall(rf"\b({commands})\b[^`;:,.…()]*?(--[a-z][a-z0-9-]+)", message):
            assert option in COMMAND_OPTIONS[command] | {"--version"}, message


def collapse(message: str) -> str:
    return re.sub("…+", "…", message).strip()


def quoted_messages() -> list[str]:
    """Return the messages that the page on troubleshooting quotes."""
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    return [words.strip() for _, words in re.findall(r"^> (`+)(.*)\1$", text, re.MULTILINE)]


def test_every_quoted_message_equals_one_in_the_code_from_end_to_end() -> None:
    quoted = quoted_messages()
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    assert len(quoted) == len(re.findall("^>", text, re.MULTILINE)) > 50
    ours = messages()
    assert [words for words in quoted if collapse(words) not in ours] == []


def refuse_to_trace(*_: object, **__: object) -> NoReturn:
    raise ValueError("no program is traced here")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory: a finished run and its data, images of one class, and broken archives."""
    with zipfile.ZipFile(ROOT / "tests/recorded/run_3218942.zip") as recorded:
        recorded.extractall(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "_exit", lambda _: None)
    # What the messages are about is found before a program is traced.
    monkeypatch.setattr("loopfeed.engine.run.compiling.trace_ahead", refuse_to_trace)
    (tmp_path / "empty").mkdir()
    (tmp_path / "deep/train").mkdir(parents=True)
    (tmp_path / "single/class").mkdir(parents=True)
    for number in range(4):
        Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(tmp_path / f"single/class/{number}.png")
    shutil.copytree(tmp_path / "single/class", tmp_path / "deep/train/class")
    shutil.copytree(tmp_path / "single", tmp_path / "stray")
    shutil.copy(tmp_path / "single/class/0.png", tmp_path / "stray")
    (tmp_path / "photos.tar.gz").write_bytes(gzip.compress(b"photos"))
    with tarfile.open(tmp_path / "photos.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
        archive.add("single/class", "class")
    (tmp_path / "cut.tar").write_bytes((tmp_path / "photos.tar").read_bytes()[:1030])
    content = (tmp_path / "photos.tar").read_bytes()
    (tmp_path / "damaged.tar").write_bytes(content[:512] + b"?" + content[513:])
    (tmp_path / "foreign/train").mkdir(parents=True)
    (tmp_path / "foreign/train/notes.txt").write_text("mine")
    shutil.copytree(tmp_path / "data", tmp_path / "incomplete")
    (tmp_path / "incomplete/train/manifest.json").unlink()
    shutil.copytree(tmp_path / "run", tmp_path / "runs/going")
    (tmp_path / "runs/going/model.safetensors").unlink()
    shutil.rmtree(tmp_path / "runs/going/snapshots")
    return tmp_path


PACK, TRAIN, CONTROL, EVALUATE, TAIL = "preprocess-imagenet", "run-train", "control-run", "run-eval", "tail-run"
SMALL = ["--size", "8"]


@pytest.mark.parametrize(
    ("command", "arguments", "quote"),
    [
        (PACK, ["empty", "dest", *SMALL], "… is not a data set: "),
        (PACK, ["stray", "dest", *SMALL], "… has … outside any class folder"),
        (PACK, ["single", "dest", *SMALL], "warning: all images of … belong to one class"),
        (PACK, ["photos.tar.gz", "dest", *SMALL], "… is …, so its images "),
        (PACK, ["cut.tar", "dest", *SMALL], "… is truncated: it ends at byte "),
        (PACK, ["damaged.tar", "dest", *SMALL], "… is damaged: no tar header "),
        (PACK, ["single", "foreign", *SMALL], "… contains files but no pack "),
        (TRAIN, ["--data", "nowhere"], "… does not exist; "),
        (TRAIN, ["--data", "data/train"], "… is itself a split; "),
        (TRAIN, ["--data", "data", "--run-dir", "run"], "the run folder must be new, "),
        (TRAIN, ["--data", "data", "--run-dir", "run", "--resume"], "the run is already complete, "),
        (TRAIN, ["--data", "data", "--run-dir", "run", "--resume", "--steps", "6"], "the steps of a resumed run "),
        (TRAIN, ["--data", "data", "--run-dir", "run", "--resume", "--steps", "20", "--seed", "9"], "a resumed run "),
        (CONTROL, ["run", "--stop", "--evaluate"], "--stop cannot be combined with "),
        (EVALUATE, ["runs/going", "--data", "data"], "RUN must contain "),
        (TAIL, ["runs", "--once"], "RUN must be a run folder, "),
    ],
)
def test_a_command_prints_the_quoted_message(place: Path, command: str, arguments: list[str], quote: str) -> None:
    (expected,) = (words for words in quoted_messages() if words.startswith(quote))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, function = project["scripts"][command].partition(":")
    result = CliRunner().invoke(getattr(importlib.import_module(module), function), arguments)
    pattern = ".+?".join(map(re.escape, expected.split("…")))
    printed = [line.removeprefix(f"{command}: ").removeprefix("Error: ") for line in result.output.splitlines()]
    assert any(re.fullmatch(pattern, line) for line in printed), result.output


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_option_in_a_command_is_one_of_that_command(page):
    commands = "|".join(COMMAND_OPTIONS)
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for command, line in re.findall(rf"({commands}) (.*)", text):
        # A command ends with its line, a comment, the end of code or a closing bracket around it.
        for option in re.findall(r" (--[a-z0-9-]+)", re.split("[#`)]", line)[0]):
            assert option in COMMAND_OPTIONS[command], (command, option)


def test_the_readme_is_short_and_its_links_lead_somewhere():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 160
    links = [link.partition("#")[0] for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text)]
    assert [link for link in links if not (ROOT / link).exists()] == []
