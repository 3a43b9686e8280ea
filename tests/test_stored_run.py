"""Runs whose folder is in a store: trained, stopped, resumed and read there, with the results of a run in a folder.

Most tests use a store on the disk, which takes the same path as S3; those on a server are in
`tests/test_stored_run_on_a_server.py`.
"""

import json
import shutil
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from click.testing import CliRunner

import loopfeed
from loopfeed import train
from loopfeed.engine.commands.control_cli import main as control_run
from loopfeed.engine.commands.tail_cli import main as tail_run
from loopfeed.engine.export.export import export_model
from loopfeed.engine.records.given_weights import Origin, read_given_weights
from loopfeed.engine.records.stored import mirror
from loopfeed.engine.records.stored.lease import LEASE, Lease
from loopfeed.engine.records.stored.reading import download
from loopfeed.engine.records.stored.state import StoredRunError
from loopfeed.engine.records.stored.stored_run import StoredRun
from loopfeed.engine.records.stored.working_copy import WorkingCopy, working_copies
from loopfeed.engine.run.train import plan_run
from loopfeed.preprocess.shards.location import Location, ShardError, open_location
from tests.fake_source import files_of
from tests.toy import Linear, toy_batch, toy_config

EVALUATED = toy_batch(10_000, batch=20)
PIXELS = np.zeros((2, 4, 4, 3), np.uint8)
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def url(tmp_path, cache_folder, monkeypatch):
    # The programs stay in the cache of all tests; working copies do not.
    (tmp_path / "cache/loopfeed").mkdir(parents=True)
    (tmp_path / "cache/loopfeed/xla").symlink_to(cache_folder / "xla")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return f"file://{tmp_path}/bucket/run"


def run(run_dir, *, batches=toy_batch, notify=lambda _: None, **values):
    settings = {"steps": 8, "snapshot_every_steps": 4, "eval_every_steps": 4, "keep_snapshots": 0} | values
    return train(
        toy_config(run_dir=str(run_dir), **settings),
        model=Linear(),
        batches=batches,
        evaluation=EVALUATED,
        notify=notify,
    )


def slow_batch(step):
    time.sleep(0.004)
    return toy_batch(step)


def copied(url, place) -> Path:
    download(open_location(url), place)
    return place


def comparable(folder: Path) -> dict[str, object]:
    """Return what a run computed, without times and speeds."""
    lines = {
        name: [
            {key: value for key, value in json.loads(line).items() if key not in ("time", "images_per_s", "wait_ms")}
            for line in (folder / name).read_text().splitlines()
        ]
        for name in ("loss.jsonl", "eval.jsonl")
    }
    return {**lines, "weights": (folder / "model.safetensors").read_bytes()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 16 steps in a folder."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(folder, steps=16)
    return folder


def test_a_run_in_a_store_is_resumed_and_read_there(tmp_path, url, whole):
    said: list[str] = []
    result = run(url, notify=said.append)
    copy = WorkingCopy(open_location(url))
    assert f"working copy: {copy.run}, uploaded at each snapshot, every 10 s, and at the end" in said
    assert result.run_dir == url
    assert not working_copies().exists()
    assert open_location(url).read(LEASE) is None

    said.clear()
    run(url, steps=16, resume=True, notify=said.append)
    assert f"resuming {url} from the snapshot of step 8" in said
    assert not working_copies().exists()
    assert comparable(copied(url, tmp_path / "copy")) == comparable(whole)

    config = loopfeed.run_settings(url)
    assert config.run_dir == url
    assert json.loads((tmp_path / "copy/config.json").read_text())["config"]["run_dir"] == url
    parts = {"model": Linear(), "evaluation": EVALUATED}
    for stored, local in ((url, whole), (config, replace(config, run_dir=str(whole)))):
        records = [loopfeed.evaluate(each, **parts, notify=said.append).record for each in (stored, local)]
        assert replace(records[0], time=0.0) == replace(records[1], time=0.0)
    assert f"weights: {url}, linear after 16 steps" in said
    said.clear()
    for given in (url, f"{url}@16"):
        assert loopfeed.predict(given, PIXELS, model=Linear(), notify=said.append).labels.shape == (2, 3)
    assert [each for each in said if "weights: " in each or "loopfeed-" in each] == [
        f"weights: {url}, linear after 16 steps",
        f"weights: {url}, linear after 16 steps (a snapshot)",
    ]
    assert loopfeed.replay_run(url, from_step=8, batches=toy_batch, **parts).is_same
    done = export_model(url, tmp_path / "stored.safetensors", snapshot=16)
    assert done.digest == export_model(whole, tmp_path / "local.safetensors", snapshot=16).digest
    of_run, of_file = (read_given_weights(each) for each in (url, f"{url}/model.safetensors"))
    assert of_run.origin == Origin(url, None, of_file.origin.sha256)
    assert of_run.stored.digest == of_file.stored.digest == done.digest
    assert read_given_weights(f"{url}@16").stored.digest is None
    with pytest.raises(ShardError, match=r"run/none.safetensors does not exist"):
        read_given_weights(f"{url}/none.safetensors")
    shown = CliRunner().invoke(tail_run, [url, "--once"])
    assert shown.exit_code == 0
    assert shown.output.count("step ") == CliRunner().invoke(tail_run, [str(whole), "--once"]).output.count("step ")
    refused = CliRunner().invoke(control_run, [url, "--stop"])
    assert (refused.exit_code, "on the machine where it runs" in refused.output) == (2, True)
    # Nothing of all this is left on this machine or changes the store.
    assert not working_copies().exists()


class Outage:
    """Makes the store fail from a certain write on."""

    def __init__(self, monkeypatch, after):
        self._write, self.left = Location.write, after
        monkeypatch.setattr(mirror, "_PATIENCE_S", 0.0)
        monkeypatch.setattr(Location, "write", lambda location, key, value: self._fail(location, key, value))

    def _fail(self, location, key, value):
        self.left -= 1
        if self.left < 0:
            raise ShardError(f"{location.display}: can't write {key}: the store does not answer")
        self._write(location, key, value)


@pytest.fixture
def outage(url, tmp_path, monkeypatch):
    """A run whose store failed in the middle, and what it said."""
    monkeypatch.setattr(mirror, "UPLOAD_EVERY_S", 0.02)
    outage, steps = Outage(monkeypatch, 40), 100_000
    with pytest.raises(ShardError, match=r"bucket/run/: can't write objects/.*: the store does not answer") as caught:
        run(url, steps=steps, batches=slow_batch, eval_every_steps=0, keep_snapshots=2, snapshot_every_steps=20)
    outage.left = 10**9
    return caught.value.__notes__


def test_a_store_that_fails_stops_the_run_and_keeps_the_working_copy(tmp_path, url, outage):
    copy = WorkingCopy(open_location(url))
    kept = copied(url, tmp_path / "kept")
    steps = sorted(int(path.name) for path in (kept / "snapshots").iterdir())
    notes = "\n".join(outage)
    assert f"{url} holds the run's last whole state, with the snapshot of step {steps[-1]}; the working copy" in notes
    goes_on = f"train(replace(run_settings('{url}'), resume=True))"
    assert f"is kept in {copy.run}. To continue when the store can be reached: {goes_on}" in notes
    done = int((copy.run / "loss.jsonl").read_text().count("\n"))
    assert done > steps[-1]
    settings = {"eval_every_steps": 0, "keep_snapshots": 2, "snapshot_every_steps": 20, "steps": done + 10}
    run(tmp_path / "whole", **settings)
    for name in ("bucket-2", "bucket-3"):
        shutil.copytree(tmp_path / "bucket", tmp_path / name)

    with pytest.raises(ShardError, match=r"must be new, but file://.*/run/ contains state.json of an earlier"):
        run(url)
    said: list[str] = []
    shutil.copytree(copy.folder, tmp_path / "left-behind")
    run(url, **settings, resume=True, notify=said.append)
    assert f"continuing the working copy {copy.run}, whose last state is in the store now" in said
    assert f"resuming {url} from the snapshot of step {done}" in said
    # Elsewhere, from the store alone.
    other = url.replace("/bucket/", "/bucket-2/")
    run(other, **settings, resume=True, notify=said.append)
    assert f"resuming {other} from the snapshot of step {steps[-1]}" in said
    for number, each in enumerate((url, other)):
        found = copied(each, tmp_path / f"copy-{number}")
        wanted = tmp_path / "whole"
        assert (found / "model.safetensors").read_bytes() == (wanted / "model.safetensors").read_bytes()
        assert losses(found) == losses(wanted)
    assert not working_copies().exists()
    # A working copy that the store is ahead of is of no use.
    shutil.copytree(tmp_path / "left-behind", copy.folder)
    run(url, **(settings | {"steps": done + 12}), resume=True, notify=said.append)
    assert f"resuming {url} from the snapshot of step {done + 10}" in said
    # Nor is one from which somebody removed what the store has.
    shutil.rmtree(tmp_path / "bucket")
    shutil.copytree(tmp_path / "bucket-3", tmp_path / "bucket")
    shutil.copytree(tmp_path / "left-behind", copy.folder)
    shutil.rmtree(copy.run / "snapshots")
    said.clear()
    run(url, **(settings | {"steps": steps[-1] + 1}), resume=True, notify=said.append)
    assert f"warning: {copy.run}/snapshots/{steps[-1]} was removed, so the working copy is replaced by" in said[0]
    assert f"resuming {url} from the snapshot of step {steps[-1]}" in said


def losses(folder: Path) -> list[tuple[int, float]]:
    records = map(json.loads, (folder / "loss.jsonl").read_text().splitlines())
    return [(record["step"], record["loss"]) for record in records]


def test_a_run_that_never_reached_its_store_is_resumed_from_the_working_copy(tmp_path, url, whole, monkeypatch):
    outage = Outage(monkeypatch, 0)
    with pytest.raises(ShardError, match="the store does not answer") as caught:
        run(url, steps=16)
    outage.left = 10**9
    assert f"{url} holds no state of the run; the working copy is kept in" in "\n".join(caught.value.__notes__)
    copy = WorkingCopy(open_location(url))
    with pytest.raises(
        ShardError, match=rf"working copy of an earlier run at .* is kept in {copy.run}: choose another"
    ):
        run(url)
    said: list[str] = []
    run(f"{url}-2", notify=said.append)
    assert any(
        line.startswith("1 working copy of another run that was not uploaded completely: 0 MB in") for line in said
    )
    run(url, steps=16, resume=True)
    assert comparable(copied(url, tmp_path / "copy"))["weights"] == comparable(whole)["weights"]


def test_what_stands_at_a_url_is_refused_or_replaced(tmp_path, url):
    with pytest.raises(
        ShardError,
        match=r"there is no run at file://.*/run/, which contains no state.json: give the URL .* without resume=True",
    ):
        run(url, resume=True)
    run(url)
    for attempt in (run, lambda each: plan_run(toy_config(run_dir=each), model=Linear(), batches=toy_batch)):
        with pytest.raises(ShardError, match=r"contains state.json of an earlier run: choose another URL"):
            attempt(url)
    before = files_of(tmp_path / "bucket")
    plan = {"model": Linear(), "batches": toy_batch, "evaluation": EVALUATED}
    values = {"snapshot_every_steps": 4, "eval_every_steps": 4, "keep_snapshots": 0, "run_dir": url}
    plan_run(toy_config(**values, steps=9, resume=True), **plan)
    plan_run(toy_config(**values, steps=9, overwrite=True), **plan)
    assert files_of(tmp_path / "bucket") == before
    # Objects of the same content are written again, because those there may be damaged.
    damaged = [path for path in (tmp_path / "bucket/run/objects").iterdir() if path.write_bytes(b"x")]
    with pytest.raises(ShardError, match=r"changed since the run wrote it .* or train the run again with --overwrite"):
        copied(url, tmp_path / "damaged")
    run(url, overwrite=True)
    copied(url, tmp_path / "whole")
    assert {path.name for path in (tmp_path / "bucket/run/objects").iterdir()} & {path.name for path in damaged}
    run(url, steps=2, snapshot_every_steps=0, overwrite=True)
    found = copied(url, tmp_path / "copy")
    assert [path.name for path in (found / "snapshots").iterdir()] == ["2"]
    assert len((found / "loss.jsonl").read_text().splitlines()) == 2
    # Of the run that was replaced, nothing is left.
    state = json.loads((tmp_path / "bucket/run/state.json").read_text())
    listed = {digest for parts in state["files"].values() for digest, _ in parts}
    assert {path.name for path in (tmp_path / "bucket/run/objects").iterdir()} == listed


def test_two_runs_at_one_url_are_refused(url):
    first = Lease(open_location(url))
    first.acquire(pytest.fail)
    try:
        for values in ({}, {"overwrite": True}, {"resume": True}):
            with pytest.raises(
                ShardError, match=r"bucket/run/ is in use by process \d+ on host .*: wait for it to end"
            ):
                run(url, **values)
        with pytest.raises(ShardError, match="is in use by process"):
            plan_run(toy_config(run_dir=url), model=Linear(), batches=toy_batch)
    finally:
        first.release()
    assert not working_copies().exists()


def test_a_run_that_loses_its_lease_stops(url, monkeypatch):
    monkeypatch.setattr(mirror, "UPLOAD_EVERY_S", 0.02)

    def batches(step):
        if step == 30:
            location = open_location(url)
            holder = json.loads(location.read(LEASE) or b"")
            location.write(LEASE, json.dumps(holder | {"launch": "another", "host": "another", "pid": 5}).encode())
        return slow_batch(step)

    with pytest.raises(ShardError, match="is in use by process 5 on host another"):
        run(url, steps=100_000, batches=batches)
    assert json.loads(open_location(url).read(LEASE) or b"")["pid"] == 5


def test_an_error_of_the_run_is_raised_after_its_last_state_is_stored(tmp_path, url):
    def batches(step):
        if step == 6:
            raise ConnectionResetError("the camera went away")
        return toy_batch(step)

    with pytest.raises(ConnectionResetError, match="the camera went away") as caught:
        run(url, batches=batches)
    assert not working_copies().exists()
    assert (
        f"resume from it: train with replace(loopfeed.run_settings({url!r}), resume=True)" in caught.value.__notes__[0]
    )
    found = copied(url, tmp_path / "copy")
    assert "the camera went away" in (found / "result.json").read_text()
    run(url, resume=True)


@pytest.mark.parametrize("values", [{}, {"image_size": 99}])
def test_the_next_run_finds_no_working_copy_that_is_being_removed(url, monkeypatch, values):
    release, kept = Lease.release, []

    def observed(lease):
        kept.append(working_copies().exists())
        release(lease)

    monkeypatch.setattr(Lease, "release", observed)
    with pytest.raises(ValueError, match="image_size") if values else nullcontext():
        run(url, steps=2, **values)
    assert kept == [False]
    assert open_location(url).read(LEASE) is None


def test_a_run_that_is_refused_leaves_nothing(tmp_path, url):
    with pytest.raises(ValueError, match="image_size must be at most"):
        run(url, image_size=99)
    assert not working_copies().exists()
    assert files_of(tmp_path / "bucket") == {}


def test_a_failed_upload_stops_a_run_during_its_evaluation_too():
    class Failed:
        def check(self):
            raise StoredRunError("lost")

    watch: Any = StoredRun(Path(), cast(Any, Failed())).watch()
    for name in ("write", "write_evaluation", "write_progress"):
        with pytest.raises(StoredRunError, match="lost"):
            getattr(watch, name)(None)
