"""The command verify-run: its verdict, its exit codes, and errors in one line."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from loopfeed import TrainConfig, train
from loopfeed.engine.commands.verify_cli import main
from tests.fake_source import fake_source, files_of, pack
from tests.toy import Linear, toy_batch, toy_config

pytestmark = pytest.mark.usefixtures("small_resnets")

SMALL = f"""
import sys
sys.path.insert(0, {os.fspath(Path(__file__).parents[1])!r})
from loopfeed.engine.commands.verify_cli import main
from tests.small_resnets import small_resnets
with small_resnets(): main()
"""
COMMAND = [sys.executable, "-c", SMALL]


@pytest.fixture(scope="module")
def place(small_resnets, tmp_path_factory):
    """Return a folder with a data set, a run on it, a copy with a changed loss, and a run with batches of the user."""
    folder = tmp_path_factory.mktemp("place")
    pack(fake_source(20, size=8), folder / "data")
    pack(fake_source(11, size=8, seed=1, name="val"), folder / "data")
    config = TrainConfig(
        steps=4, batch=4, data=os.fspath(folder / "data"), model="resnet8", run_dir=os.fspath(folder / "run")
    )
    train(config)
    (folder / "changed").mkdir()
    for name, content in files_of(folder / "run").items():
        (folder / "changed" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "changed" / name).write_bytes(content)
    records = [json.loads(line) for line in (folder / "run/loss.jsonl").read_text().splitlines()]
    records[2]["loss"] = 0.25
    (folder / "changed/loss.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    train(toy_config(steps=1, run_dir=folder / "own"), model=Linear(), batches=toy_batch)
    return folder


def invoke(monkeypatch, place, *arguments):
    """Run the command in this process in the folder, and capture the exit code."""
    codes: list[int] = []
    monkeypatch.chdir(place)
    monkeypatch.setattr(os, "_exit", codes.append)
    result = CliRunner().invoke(main, list(map(str, arguments)))
    return (codes or [result.exit_code])[0], result.stdout, result.stderr


def test_it_reports_its_progress_and_identical_bits(monkeypatch, place):
    before = files_of(place / "run")
    code, said, told = invoke(monkeypatch, place, "run")
    assert code == 0, told
    assert said.startswith("the same bits: 4 losses, 1 evaluation, ")
    assert said.endswith(" arrays of the snapshot of step 4\n")
    assert told.splitlines()[:3] == [
        "checking the files of run",
        "files: 6 match their digests (a snapshot counts as one file)",
        "replaying steps 1 … 4 of run from the state before the first step",
    ]
    assert files_of(place / "run") == before


def test_a_changed_loss_is_reported(monkeypatch, place):
    code, said, _ = invoke(monkeypatch, place, "changed", "--to", 3)
    assert code == 1
    file, loss = said.splitlines()
    assert file.startswith(
        "not as written: changed/loss.jsonl has changed since it was recorded by the snapshot of step 4 ("
    )
    assert loss.startswith("differs: loss of step 3: recorded 0.25, replayed ")
    assert loss.endswith("; 1 of 3 losses differ, by at most 3.3e+00 of their value")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "a run folder must contain config.json, but nowhere does not exist: give"),
        (
            ["run", "--from", 2],
            "must be 0 or have a snapshot, and be before the last step to replay, 4, got 2: choose 0",
        ),
        (["run", "--to", 9], "(--to) must be a step in run/loss.jsonl, 1 … 4, got 9"),
        (["run", "--data", "elsewhere"], "elsewhere"),
        (["own"], "again: model=… and batches=… in Python; on the command line `verify-run own --model "),
        (["run", "--from", -1], "Invalid value for '--from'"),
    ],
)
def test_an_impossible_replay_is_refused_in_one_line(monkeypatch, place, arguments, message):
    code, said, told = invoke(monkeypatch, place, *arguments)
    assert (code, said) == (2, "")
    assert message in told
    assert "Traceback" not in told


def test_a_signal_stops_the_replay(place):
    process = subprocess.Popen(
        [*COMMAND, "run"], cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    assert process.stderr is not None
    while "replaying" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    said, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert "verify-run: stopped; nothing was written" in told
    assert said == ""
