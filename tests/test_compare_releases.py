"""scripts/compare-releases: what counts as a difference. Whole comparisons with a release are made by hand."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from loopfeed.engine.records.snapshot import read_snapshot, snapshot_steps
from scripts.compare_releases import (
    Release,
    RunComparisons,
    Table,
    compare_folders,
    forget_end,
    parse_arguments,
)

ROOT = Path(__file__).parents[1]


@pytest.fixture
def other(chained_run, tmp_path):
    """Return a copy of the finished run."""
    return Path(shutil.copytree(chained_run, tmp_path / "other"))


def test_a_run_is_the_same_as_its_copy(chained_run, other):
    differences, extent = compare_folders(other, chained_run)
    assert differences == []
    assert extent.startswith("6 lines of loss.jsonl, ")
    assert " arrays of snapshot 6" in extent


def test_the_last_bit_of_a_loss_or_a_weight_is_a_difference_and_a_measured_time_is_not(chained_run, other):
    lines = [json.loads(line) for line in (other / "loss.jsonl").read_text().splitlines()]
    lines[0]["wait_ms"] += 1.0
    lines[3]["loss"] *= 1 + 2e-16
    (other / "loss.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tensors = load_file(other / "model.safetensors")
    tensors["params.bias"].view("uint32")[0] ^= 1
    save_file(tensors, other / "model.safetensors")
    differences, _ = compare_folders(other, chained_run)
    assert differences == ["loss.jsonl from line 4", "1 array of model.safetensors, such as params.bias"]


def test_forget_end_removes_the_last_snapshot_and_the_result(other):
    forget_end(other)
    assert snapshot_steps(other / "snapshots") == [2, 4]
    assert not (other / "result.json").exists()


class Replaying(Release):
    """A release whose verify-run prints `verdict`."""

    verdict = ""

    def run(self, name, *arguments):
        assert (name, arguments[1:]) == ("verify-run", ("--from", "0"))
        return f"{self.verdict}\n"


def test_a_replay_of_the_resumed_run_must_compare_all_of_it(chained_run, tmp_path):
    shutil.copytree(chained_run, tmp_path / "new/resumed")
    new = Replaying("new", ROOT, tmp_path)
    comparisons = RunComparisons(Release("old", ROOT, tmp_path), new, chained_run, steps=4)
    num_arrays = len(read_snapshot(chained_run / "snapshots", 6).leaves)
    whole = f"the same bits: 6 losses, 3 evaluations, {num_arrays} arrays of the snapshot of step 6"
    partial = whole.replace("6 losses", "4 losses"), whole.replace("3 ", "2 "), whole.partition(", ")[0], ""
    for verdict in (whole, *partial):
        object.__setattr__(new, "verdict", verdict)
        differences, extent = comparisons.replaying_more()
        assert bool(differences) == (verdict != whole)
        assert extent == verdict
    assert "expected 'the same bits: 6 losses, " in differences[0]


def test_a_command_that_fails_is_a_difference(tmp_path, capsys):
    release, table = Release("new", ROOT, tmp_path), Table()
    table.add("reading", lambda: ([], release.run("inspect-shards", tmp_path / "nowhere")))
    table.add("nothing", lambda: ([], "nothing"))
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("DIFFERS reading ")
    assert "the new code's inspect-shards " in first
    assert " ended with exit code 2: " in first
    assert second.split() == ["same", "nothing", "nothing"]
    assert (table.num_same, table.differing) == (1, ["reading"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["."], "OLD_CHECKOUT must be a checkout of this project, and "),
        ([str(ROOT), "--steps", "9"], "--steps must be 60 or more and --demo-steps 0 or more, got 9 and 150"),
        ([str(ROOT), "--keep", str(ROOT)], "--keep must be new or empty, and "),
    ],
)
def test_wrong_usage_is_refused(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["scripts/compare-releases", *arguments])
    with pytest.raises(SystemExit) as ended:
        parse_arguments()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
