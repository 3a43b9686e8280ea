"""Untrusted text on its way to a terminal: quoted in names, and escaped in all output of every command."""

import ast
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from loopfeed.preprocess.commands.guarded_output import (
    GuardedCommand,
    GuardedStream,
    show_only_on_stdout,
    terminal_of,
    write_data,
)
from loopfeed.preprocess.printable import (
    printable,
    printable_line,
    printable_name,
    printable_text,
    spreadsheet_cell,
)

HOSTILE = "a\x1b]0;owned\x07b\x1b[2Jc\x9b31md\u202ee\u2066f\x7fg\rh\udce9i\x00j"
BARE = HOSTILE.replace("\x00", "").replace("\udce9", os.fsdecode(b"\xe9"))
FORBIDDEN = [bytes([code]) for code in (*range(9), *range(11, 32), 127)]
FORBIDDEN += [chr(code).encode() for code in (*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))]
ROOT = Path(__file__).parents[1]
COMMANDS = {
    "preprocess-imagenet": "loopfeed.preprocess.commands.cli",
    "inspect-shards": "loopfeed.preprocess.commands.inspect_cli",
    "run-train": "loopfeed.engine.commands.cli",
    "tail-run": "loopfeed.engine.commands.tail_cli",
    "list-runs": "loopfeed.engine.commands.list_cli",
    "run-eval": "loopfeed.engine.commands.eval_cli",
    "control-run": "loopfeed.engine.commands.control_cli",
    "verify-run": "loopfeed.engine.commands.verify_cli",
    "predict-images": "loopfeed.engine.commands.predict_cli",
    "export-model": "loopfeed.engine.commands.export_cli",
    "explain-program": "loopfeed.engine.commands.explain_cli",
}


def is_harmless(output: bytes) -> bool:
    return not any(each in output for each in FORBIDDEN)


def run(module, *arguments, cwd, encoding="utf-8"):
    code = f"import sys; from {module} import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding},
    )


@given(st.text(alphabet=st.characters(exclude_categories=())))
def test_no_text_of_any_kind_keeps_a_control_character(text):
    for safe in (printable(text), printable_line(text), printable_text(text)):
        assert is_harmless(safe.encode())  # encodes: no lone surrogate is left
    assert "\n" not in printable(text) + printable_line(text)
    assert len(printable_line(text)) == len(text)


def test_bytes_are_text_and_guarded_too():
    behind = io.TextIOWrapper(io.BytesIO(), "utf-8")
    stream: Any = GuardedStream(behind)
    click.echo(HOSTILE.encode("utf-8", "surrogateescape"), file=stream)
    click.echo("–\tscript".encode(), file=stream)
    stream.flush()
    assert is_harmless(behind.buffer.getvalue())
    assert behind.buffer.getvalue().decode().endswith("\n–\tscript\n")
    with pytest.raises(TypeError, match="must be str, not int"):
        stream.write(3)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_guarded_stream_escapes_what_it_is_given(encoding):
    behind = io.TextIOWrapper(io.BytesIO(), encoding)
    stream: Any = GuardedStream(behind)
    click.echo(HOSTILE + "–\n", file=stream, color=True)
    stream.writelines([HOSTILE])
    stream.flush()
    assert is_harmless(behind.buffer.getvalue())
    assert rb"\x1b]0;owned\x07" in behind.buffer.getvalue()
    drawn_on: Any = terminal_of(stream)
    drawn_on.write("\x1b[2K█\n")
    drawn_on.flush()
    assert behind.buffer.getvalue().endswith("\x1b[2K█\n".encode(encoding, "replace"))
    assert terminal_of(behind) is behind
    assert not hasattr(stream, "buffer")


def test_all_output_of_a_command_is_guarded():
    @click.command(cls=GuardedCommand)
    @click.argument("how")
    def command(how):
        print(HOSTILE)
        click.echo(HOSTILE, err=True)
        if how == "click":
            raise click.UsageError(HOSTILE)

    for how in ("click", "fine"):
        result = CliRunner().invoke(command, [how])
        assert is_harmless(result.stdout_bytes)
        assert is_harmless(result.stderr_bytes)
        assert rb"a\x1b]0;owned" in result.stdout_bytes
        assert rb"a\x1b]0;owned" in result.stderr_bytes


@pytest.mark.parametrize(
    ("name", "encoding"), [("preprocess-imagenet", "utf-8"), ("tail-run", "utf-8"), ("run-train", "ascii")]
)
def test_a_command_given_a_hostile_name_prints_no_control_character(tmp_path, name, encoding):
    found = run(
        COMMANDS[name], BARE, *(["x"] if name == "preprocess-imagenet" else []), cwd=tmp_path, encoding=encoding
    )
    assert found.returncode in (1, 2)
    assert found.stderr
    assert is_harmless(found.stdout)
    assert is_harmless(found.stderr)


def test_names_in_a_pack_are_harmless_in_every_listing(tmp_path):
    from PIL import Image

    for label in (BARE, "plain\nname"):
        folder = tmp_path / "set" / label
        folder.mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / "x.png")
        (folder / BARE).write_bytes(b"no image")
    (tmp_path / "set" / "classes.txt").write_text("plain \x1b]0;owned\x07 of \u202e", encoding="utf-8")
    packed = run(COMMANDS["preprocess-imagenet"], "set", "shards", "--size", 8, cwd=tmp_path)
    assert packed.returncode == 0, packed.stderr
    shown = run(COMMANDS["inspect-shards"], "shards", cwd=tmp_path)
    exact = run(COMMANDS["inspect-shards"], "shards", "--json", cwd=tmp_path)
    for found in (packed, shown, exact):
        assert is_harmless(found.stdout)
        assert is_harmless(found.stderr)
    classes = json.loads(exact.stdout)["splits"]["train"]["manifest"]["classes"]
    assert {each["id"] for each in classes} == {BARE, "plain\nname"}


def test_every_command_is_guarded():
    for module in COMMANDS.values():
        assert isinstance(__import__(module, fromlist=["main"]).main, GuardedCommand)


def test_only_terminal_drawing_and_csv_bypass_the_guard():
    around = {
        (path.name, node.func.id)
        for folder in ("preprocess", "engine")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    drawing = {name for name, function in around if function in ("terminal_of", "Console")}
    assert drawing == {"progress.py", "run_display.py", "verify_cli.py", "tail_cli.py", "guarded_output.py"}
    assert {name for name, function in around if function == "write_data"} == {"predict_cli.py", "list_cli.py"}


@pytest.mark.parametrize("is_terminal", [False, True])
def test_data_are_exact_in_a_file_and_escaped_on_a_terminal(monkeypatch, is_terminal):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr(sys, "stdout", GuardedStream(stream))
    write_data(BARE + "\ud800\n")
    sys.stdout.flush()
    written = stream.buffer.getvalue()
    if is_terminal:
        assert is_harmless(written)
    else:
        assert written == BARE.encode("utf-8", "surrogateescape") + b"\\ud800\n"


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        *(
            (text, f"'{text}")
            for text in ("=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(1)", "\t=1", "\rx", "\n=1", "  =1", "＝1")
        ),
        *((text, text) for text in ("tench", "", " ", "-1", "+3.5", "a=b", "great white shark", "'=1", "n01440764")),
    ],
)
def test_a_cell_is_no_formula(text, cell):
    assert spreadsheet_cell(text) == cell


def test_a_name_in_a_line_has_no_control_characters():
    assert printable_name("a\x1b[2J\tb\nc\rd\u202ee") == "a\\x1b[2J\\tb\\nc\\rd\\u202ee"
    assert printable_name("café ½") == "café ½"


def test_a_command_without_streams_goes_on_if_they_are_only_a_display(monkeypatch):
    seen: list[bool] = []

    @click.command(cls=GuardedCommand)
    def command():
        show_only_on_stdout()
        print("to nobody")
        click.echo("to nobody", err=True)
        write_data("a,b\n")
        sys.stdout.flush()
        seen.append(sys.stdout.isatty() or sys.stderr.isatty())

    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    command.main([], standalone_mode=False)
    assert (seen, sys.stdout, sys.stderr) == ([False], None, None)


@pytest.mark.parametrize("printed", ["click.echo('a result')", "write_data('a,b')"])
@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("> /dev/full", "No space left on device): make room on its disk"),
        (">&-", "Bad file descriptor): start the command without closing it, or give it a file"),
    ],
)
def test_a_result_that_cannot_be_printed_is_an_error_in_one_line(printed, where, reason):
    program = (
        "import click; from loopfeed.preprocess.commands.guarded_output import GuardedCommand, write_data; "
        f"click.command(cls=GuardedCommand)(lambda: {printed})(prog_name='show')"
    )
    done = subprocess.run(
        ["bash", "-c", f'exec "$0" -c "$1" {where}', sys.executable, program], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (1, f"show: <stdout> cannot be read or written ({reason}\n")
