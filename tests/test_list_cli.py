"""`list-runs`: runs of every state, damaged and foreign folders, settings that differ, and the width of the table."""

import json
import math
import os
import re
import shutil
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import loopfeed
from loopfeed.engine.commands.list_cli import main
from loopfeed.engine.commands.run_table import differing_settings, table_lines
from loopfeed.engine.config import TrainConfig
from loopfeed.engine.records import run_search
from loopfeed.engine.records.digests import sealed
from loopfeed.engine.records.folder_lock import LOCK_NAME, FolderLock
from loopfeed.engine.records.run_search import find_runs
from loopfeed.engine.records.run_summary import summarise_run
from loopfeed.engine.stream.sinks import EvaluationRecord
from tests.toy import Linear, toy_batch, toy_config

NOW = 1_700_000_000.0


def listed(*arguments):
    return CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)


def objects(*arguments):
    return {Path(each["run"]).name: each for each in map(json.loads, listed(*arguments, "--json").stdout.splitlines())}


def make_run(run: Path, num_rows=3, result=None, changed_s=NOW, own_parts=None, **settings) -> Path:
    """Write what a run writes, with its last change at `changed_s`."""
    run.mkdir(parents=True)
    config = TrainConfig(**({"steps": 9} | settings)).to_json()
    resolved = {"model": "resnet8"} | ({} if own_parts is None else {"own_parts": own_parts})
    (run / "config.json").write_text(json.dumps(sealed({"config": config, "resolved": resolved})))
    with (run / "loss.jsonl").open("w") as log:
        for step in range(1, num_rows + 1):
            log.write(json.dumps({"step": step, "loss": 4 / step, "lr": 0.1, "images_per_s": 100.0 * step}) + "\n")
    if result is not None:
        (run / "result.json").write_text(json.dumps(sealed({"steps_done": num_rows} | result)))
    for path in run.iterdir():
        os.utime(path, (changed_s, changed_s))
    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the run of a toy model."""
    root = tmp_path_factory.mktemp("runs")
    config = toy_config(run_dir=str(root / "toy"), eval_every_steps=2, learning_rate=0.25)
    result = loopfeed.train(config, model=Linear(), batches=toy_batch, evaluation=toy_batch(99, batch=20))
    return root, result


def test_a_real_run_is_listed_with_what_it_returned(trained):
    root, result = trained
    (line,) = listed(root, "--json").stdout.splitlines()
    found = json.loads(line)
    best = max(result.evaluations, key=lambda each: each.top1)
    logged = [json.loads(row) for row in (root / "toy/loss.jsonl").read_text().splitlines()]
    assert found["state"] == "done"
    assert (found["step"], found["steps"]) == (5, 5)
    assert found["loss"] == logged[-1]["loss"]
    assert found["best_value"] == pytest.approx(best.top1)
    assert found["settings"]["learning_rate"] == 0.25
    assert found["result"]["stopped_by"] == "steps"
    assert found["evaluation"]["step"] == 5
    assert found["changed_s"] == pytest.approx(time.time(), abs=600)
    # The run itself can be given, too.
    assert listed(root / "toy").stdout.split("\n")[1].split()[:3] == ["toy", "done", "5/5"]


def test_every_state(tmp_path):
    now_s = time.time()
    make_run(tmp_path / "done", result={"stopped_by": "steps"})
    make_run(tmp_path / "accurate", result={"stopped_by": "top1"})
    make_run(tmp_path / "failed", result={"stopped_by": "error", "error": "OSError: full"})
    make_run(tmp_path / "stopped", result={"stopped_by": "SIGTERM"})
    make_run(tmp_path / "abandoned")
    make_run(tmp_path / "elsewhere", changed_s=now_s - 60)  # its lock is not seen here
    (make_run(tmp_path / "killed", changed_s=now_s) / LOCK_NAME).write_text(
        json.dumps({"pid": 1, "host": os.uname().nodename})
    )
    held = make_run(tmp_path / "held"), make_run(tmp_path / "resumed", result={"stopped_by": "SIGINT"})
    (tmp_path / "new").mkdir()
    with FolderLock(held[0]), FolderLock(held[1]), FolderLock(tmp_path / "new"):
        found = {name: each["state"] for name, each in objects(tmp_path).items()}
    assert found == {
        "done": "done",
        "accurate": "done",
        "failed": "failed",
        "stopped": "stopped",
        "abandoned": "killed",
        "elsewhere": "running",
        "killed": "killed",
        "held": "running",
        "resumed": "running",
        "new": "starting",
    }


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("config.json", b"{", "config.json cannot be read"),
        ("config.json", b"\xff\x00", "config.json cannot be read"),
        ("config.json", b"[" * 100_000, "config.json cannot be read"),
        ("config.json", b'{"config": ' + b"[" * 99 + b"]" * 99 + b"}", "config.json cannot be read: it is nested"),
        ("config.json", b'{"architectures": []}', "config.json is not that of a run"),
        ("config.json", b'{"config": {"steps": 9}, "sha256": "0"}', "config.json has changed since"),
        ("config.json", None, "config.json is missing"),
        ("loss.jsonl", b"\0" * 4096 + b"\n", "the last lines of loss.jsonl are not those of a run"),
        ("loss.jsonl", b'{"step": "one"}\n', "the last lines of loss.jsonl are not those of a run"),
    ],
)
def test_a_damaged_run_is_listed_as_such_beside_the_others(tmp_path, name, content, fault):
    make_run(tmp_path / "sound", result={"stopped_by": "steps"})
    damaged = make_run(tmp_path / "hurt", result={"stopped_by": "steps"})
    (damaged / name).unlink() if content is None else (damaged / name).write_bytes(content)
    found = objects(tmp_path)
    assert found["sound"]["state"] == "done"
    assert found["hurt"]["state"] == "damaged"
    assert fault in found["hurt"]["fault"]
    result = listed(tmp_path)
    assert result.exit_code == 0
    assert f"hurt: {fault}" in result.stderr


@given(content=st.binary(max_size=60), name=st.sampled_from(["config.json", "loss.jsonl", "eval.jsonl", "result.json"]))
def test_no_content_of_a_file_stops_the_list(tmp_path_factory, content, name):
    run = make_run(tmp_path_factory.mktemp("runs") / "run")
    (run / name).write_bytes(content)
    found = summarise_run(run, NOW)
    json.dumps(found.to_json(), allow_nan=False)
    assert table_lines([found], ["run"], NOW, 80)


def test_runs_that_differ_in_their_seed_alone_are_summarised_together(tmp_path):
    for seed, top1 in enumerate((0.5, 0.6, 0.76)):
        run = make_run(tmp_path / f"s{seed}", num_rows=3 + seed, result={"stopped_by": "steps"}, seed=seed)
        lines = [EvaluationRecord(1, 9, 0.9, 1.0, 1.0, NOW), EvaluationRecord(2, 9, top1, 1.0, 1.0, NOW)]
        (run / "eval.jsonl").write_text("".join(each.to_json() + "\n" for each in lines))
        launches = [{"started": NOW, "ended": NOW + 30}, {"started": NOW + 90, "ended": NOW + 100 + 10 * seed}]
        (run / "runtime.json").write_text(json.dumps({"launches": launches}))
    make_run(tmp_path / "other", result={"stopped_by": "steps"}, seed=3, batch=7)
    make_run(tmp_path / "unfinished", result={"stopped_by": "SIGTERM"}, seed=4)
    make_run(tmp_path / "damaged", result={"stopped_by": "steps"}, seed=5)
    (tmp_path / "damaged/loss.jsonl").write_text("?\n")
    found = objects(tmp_path)
    over = found["s0"]["over_seeds"]
    assert over == found["s1"]["over_seeds"] == found["s2"]["over_seeds"]
    assert [found[name]["over_seeds"] for name in ("other", "unfinished", "damaged")] == [None] * 3
    assert over["num_runs"] == 3
    # Of 0.5, 0.6 and 0.76: their mean is 0.62, and the root of (0.0144 + 0.0004 + 0.0196) / 2 is 0.131149.
    assert over["last_value"] == {"mean": pytest.approx(0.62), "std": pytest.approx(0.1311488)}
    assert over["best_value"] == {"mean": pytest.approx(0.9), "std": pytest.approx(0, abs=1e-12)}
    assert over["duration_s"] == {"mean": pytest.approx(50), "std": pytest.approx(10)}
    table = listed(tmp_path).stdout
    assert "3 seeds (s0, s1, s2): best top-1 90.00 ± 0.00 %, last top-1 62.00 ± 13.11 %, loss 1.0444 ± 0.2694" in table
    header, *rows = table.splitlines()
    assert header.index("best top-1") < header.index("last top-1") < header.index("duration")
    assert any("90.00 %     50.00 %" in row and " 40 s" in row for row in rows)


def test_runs_are_compared_by_what_each_of_them_kept_as_best(tmp_path):
    lines = [
        EvaluationRecord(1, 9, 0.9, 0.95, 0.25, NOW, metrics={"f1": 0.5}),
        EvaluationRecord(2, 9, 0.5, 1.0, 0.125, NOW, metrics={"f1": 0.75}),
        EvaluationRecord(3, 9, 0.6, 0.9, 1.0, NOW, metrics={"f1": math.nan}),
    ]
    for name, keep_best in (("none", None), ("loss", "loss"), ("top5", "top5"), ("own", "f1:max"), ("wrong", "?")):
        run = make_run(tmp_path / f"{name}/{name}", result={"stopped_by": "steps"}, keep_best=keep_best)
        (run / "eval.jsonl").write_text("".join(each.to_json() + "\n" for each in lines))
    names = ("best_metric", "best_value", "best_step", "last_value")
    found = objects(tmp_path)
    assert {run: tuple(each[name] for name in names) for run, each in found.items()} == {
        "none": ("top1", 0.9, 1, 0.6),
        "wrong": ("top1", 0.9, 1, 0.6),
        "loss": ("loss", 0.125, 2, 1.0),
        "top5": ("top5", 1.0, 2, 0.9),
        "own": ("f1:max", 0.75, 2, None),
    }
    # One metric stands in the titles; several do in the cells.
    for name, titles, cells in (("loss", "best loss  last loss", "0.1250     1.0000"), ("own", "best f1", "0.7500")):
        header, row = listed(tmp_path / name).stdout.splitlines()
        assert f"loss  {titles}  images/s" in " ".join(header.split(" "))
        assert row.split("1.3333")[1].split()[: len(cells.split())] == cells.split()
    header, *rows = listed(tmp_path).stdout.splitlines()
    assert "loss            best           last  images/s" in header
    assert any("top-5 100.00 %  top-5 90.00 %" in row for row in rows)
    assert any("loss 0.1250    loss 1.0000" in row for row in rows)


def test_the_model_is_the_one_that_was_trained_and_own_functions_tell_runs_apart(trained, tmp_path):
    shutil.copytree(trained[0] / "toy", tmp_path / "own")
    for seed, own in enumerate((None, {"loss": "mine.squared"}, {"loss": "mine.squared"})):
        make_run(tmp_path / f"r{seed}", result={"stopped_by": "steps"}, seed=seed, own_parts=own)
    table = listed(tmp_path).stdout
    assert re.findall("linear|resnet8", table) == ["resnet8"] * 3 + ["linear"]
    assert "2 seeds (r1, r2)" in table


def test_runs_are_sorted_by_a_column_the_best_at_the_end(tmp_path):
    for name, keep_best, top1, loss, started, lasted in (
        ("a", None, 0.5, 0.1, 30, 50), ("b", None, 0.75, 0.2, 10, 90), ("c", "loss", 0.6, 0.4, 20, 70),
        ("d", "loss", 0.6, 0.3, 40, 60), ("e", None, math.nan, math.nan, 0, 0),
    ):  # fmt: skip
        run = make_run(tmp_path / name, changed_s=NOW + ord(name), keep_best=keep_best)
        if name != "e":
            lines = [EvaluationRecord(1, 9, top1, 1.0, loss, NOW), EvaluationRecord(2, 9, top1 / 2, 1.0, 1 - loss, NOW)]
            (run / "eval.jsonl").write_text("".join(each.to_json() + "\n" for each in lines))
            launches = [{"started": NOW + started, "ended": NOW + started + lasted}]
            (run / "runtime.json").write_text(json.dumps({"launches": launches}))
            os.utime(run / "eval.jsonl", (NOW, NOW))

    def order(*options):
        return "".join(line.split()[0] for line in listed(tmp_path, *options).stdout.splitlines()[1:])

    assert order() == "abcde"
    assert order("--sort", "started") == "ebcad"
    assert order("--sort", "duration") == "eadcb"
    assert order("--sort", "best") == "ecdab"
    assert order("--sort", "last") == "edcab"
    assert [*objects(tmp_path, "--sort", "best")] == [*"ecdab"]


# --- the search


def test_the_search_enters_folders_and_links_once_but_no_run_pack_or_hidden_folder(tmp_path):
    for name in ("a/b/c", "d", "d/snapshots/inner", ".hidden/run", "pack/run"):
        make_run(tmp_path / "runs" / name)
    (tmp_path / "runs/pack/zarr.json").write_text("{}")
    make_run(tmp_path / "not-below")
    (tmp_path / "runs/loop").symlink_to(tmp_path / "runs")
    (tmp_path / "runs/above").symlink_to(tmp_path)
    (tmp_path / "runs/another-d").symlink_to("d")
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "runs/a", tmp_path / "elsewhere/a")
    (tmp_path / "runs/link").symlink_to(tmp_path / "elsewhere")
    notes: list[str] = []
    found = [str(path.relative_to(tmp_path / "runs")) for path in find_runs(tmp_path / "runs", notes.append)]
    assert sorted(found) == ["d", "link/a/b/c"]
    assert not notes


def test_the_search_is_bounded_and_says_what_it_left_out(tmp_path, monkeypatch):
    make_run(tmp_path / "/".join("abcdefghij"))
    notes: list[str] = []
    assert list(find_runs(tmp_path, notes.append)) == []
    assert "folders more than 8 levels below" in notes[0]
    for number in range(30):
        make_run(tmp_path / f"many/{number:02}")
    monkeypatch.setattr(run_search, "MOST_ENTRIES", 20)
    notes.clear()
    assert len(list(find_runs(tmp_path / "many", notes.append))) < 30
    assert "the search stopped in" in notes[0]


def test_runs_are_named_by_their_paths_in_the_folder(tmp_path, monkeypatch):
    for name in ("r1", "u/r1"):
        make_run(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    for folder in (".", "./", str(tmp_path)):
        assert {line.split()[0] for line in listed(folder).stdout.splitlines()} == {"run", "r1", "u/r1"}
    for folder in ("r1", "r1/", "./r1", "./u/r1"):
        assert listed(folder).stdout.splitlines()[1].split()[0] == "r1"


def test_what_cannot_be_listed(tmp_path):
    (tmp_path / "file").write_text("")
    for name, found in [("file", "is a file"), ("nowhere", "does not exist")]:
        result = listed(tmp_path / name)
        assert result.exit_code == 2
        assert f"DIR must be a folder that contains runs, but {tmp_path / name} {found}" in result.stderr
    (tmp_path / "file").unlink()
    empty = listed(tmp_path)
    assert (empty.exit_code, empty.stdout, empty.stderr) == (0, "", f"there are no runs in {tmp_path}\n")


def test_runs_in_a_store_are_listed(tmp_path):
    config = toy_config(run_dir=f"file://{tmp_path}/bucket/runs/one", steps=3)
    loopfeed.train(config, model=Linear(), batches=toy_batch)
    (tmp_path / "bucket/runs/two").mkdir()
    (tmp_path / "bucket/runs/two/state.json").write_text("{}")
    found = objects(f"file://{tmp_path}/bucket/runs")
    assert (found["one"]["state"], found["one"]["step"], found["one"]["run"][:7]) == ("done", 3, "file://")
    assert found["two"]["state"] == "damaged"
    table = listed(f"file://{tmp_path}/bucket/runs").stdout.splitlines()
    assert {line.split()[0] for line in table} == {"run", "one", "two"}


# --- the table


def test_only_the_settings_that_differ_are_shown(tmp_path):
    make_run(tmp_path / "first", learning_rate=0.1, run_dir="a", seed=1, changed_s=NOW - 7200)
    make_run(tmp_path / "second", learning_rate=0.2, run_dir="b", seed=1)
    older = make_run(tmp_path / "third", learning_rate=0.2, seed=1, changed_s=NOW - 86400 * 3)
    config = json.loads((older / "config.json").read_text())
    del config["config"]["label_smoothing"]  # recorded before there was such a setting
    (older / "config.json").write_text(json.dumps(sealed({key: config[key] for key in ("config", "resolved")})))
    os.utime(older / "config.json", (NOW - 86400 * 3,) * 2)
    runs = [summarise_run(tmp_path / name, NOW) for name in ("third", "first", "second")]
    assert differing_settings(runs) == ["learning_rate"]
    assert table_lines(runs, ["third", "first", "second"], NOW, None) == [
        "run     state    step    loss  images/s  changed  learning_rate",
        "third   killed    3/9  1.3333       200  3 d ago  0.2",
        "first   killed    3/9  1.3333       200  2 h ago  0.1",
        "second  running   3/9  1.3333       200  0 s ago  0.2",
    ]
    listing = listed(tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in listing] == ["run", "third", "first", "second"]


def test_runs_are_listed_while_one_trains(tmp_path):
    states = []

    def batches(step):
        if step == 3:
            found = objects(tmp_path)["live"]
            states.append((found["state"], found["steps"]))
        return toy_batch(step)

    loopfeed.train(toy_config(run_dir=str(tmp_path / "live")), model=Linear(), batches=batches)
    # The feeder may be ahead of the first loss.
    assert states in ([("running", 5)], [("starting", 5)])
    assert objects(tmp_path)["live"]["state"] == "done"
    assert math.isfinite(objects(tmp_path)["live"]["loss"])
