"""File systems that lack what a snapshot needs: refused at the start, or noticed at the first snapshot."""

import errno
import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts

from loopfeed import train
from loopfeed.engine.control.request import ControlRequest
from loopfeed.engine.records import snapshot as snapshot_module
from loopfeed.engine.records.control_requests import send_request
from loopfeed.engine.records.folder_lock import UNFINISHED, check_can_hold_snapshots
from loopfeed.engine.records.run_folder import RunFolder, check_folder
from loopfeed.engine.records.snapshot import read_snapshot, snapshot_steps, write_snapshot
from loopfeed.engine.records.snapshot_writer import SnapshotWriter, UnwritableFolderError
from tests.chained_run import STEPS, run
from tests.toy import Linear, toy_batch, toy_config

NOT_UTF8 = os.fsdecode(b"r\xe9sultats")


def test_a_folder_that_can_hold_snapshots_is_left_as_it_was(tmp_path):
    (tmp_path / UNFINISHED / "of a killed start").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    check_can_hold_snapshots(tmp_path)
    assert [each.name for each in tmp_path.rglob("*")] == ["notes.txt"]


def test_a_snapshot_is_whole_where_a_link_comes_before_dots(tmp_path):
    """The parent of a folder behind a link is another one than that of the link."""
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(Path("real") / "deep")
    path = tmp_path / "link" / ".." / "run"
    check_can_hold_snapshots(path.parent)
    run(path)
    assert run(path, resume=True, steps=STEPS + 1).steps_done == STEPS + 1
    assert read_snapshot(path / "snapshots", STEPS).leaves.keys() >= {"params.weights", "params.bias"}
    assert {each.name for each in tmp_path.iterdir()} == {"real", "link"}


def store_fails(code, monkeypatch):
    def write(*_):
        raise ValueError(f"UNKNOWN: Failed to lock fd [source locations='x'] [os_error_code='{code}']")

    monkeypatch.setattr(ts.KvStore, "write", write)


def folders_cannot_be_renamed(code, monkeypatch):
    real = Path.rename

    def rename(path, target):
        if path.is_dir():
            raise OSError(code, os.strerror(code))
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EXDEV])
@pytest.mark.parametrize(
    ("lacks", "found"),
    [
        (store_fails, "a file cannot be written, locked and synced"),
        (folders_cannot_be_renamed, "a folder cannot be renamed"),
    ],
)
def test_a_folder_that_can_hold_no_snapshot_is_refused_at_the_start_and_not_left_behind(
    tmp_path, monkeypatch, lacks, found, code
):
    lacks(code, monkeypatch)
    match = rf"must be able to hold snapshots, but in \S+ {found} \({os.strerror(code)}\): choose a folder on another"
    with pytest.raises(ValueError, match=match):
        train(toy_config(run_dir=tmp_path / "runs" / "first"), model=Linear(), batches=toy_batch)
    assert list(tmp_path.iterdir()) == []


def test_a_request_that_comes_while_the_folder_is_tried_is_kept(tmp_path, monkeypatch):
    def ask(*_):
        send_request(tmp_path, ControlRequest(stop=True))

    monkeypatch.setattr("loopfeed.engine.records.run_folder.check_can_hold_snapshots", ask)
    with RunFolder(tmp_path) as folder:
        assert len(list((folder.path / "control").iterdir())) == 1


@pytest.mark.parametrize("open_folder", [RunFolder, check_folder])
@pytest.mark.parametrize("is_above", [False, True])
def test_a_path_that_is_not_utf8_is_refused_before_anything_is_made(tmp_path, monkeypatch, open_folder, is_above):
    path = tmp_path / NOT_UTF8
    if is_above:
        path.mkdir()
        monkeypatch.chdir(path)
        path = Path("run")
    before = list(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"must be UTF-8, .*r\\udce9sultats.* choose another path \(--run-dir\)"):
        open_folder(path)
    assert list(tmp_path.rglob("*")) == before


def test_a_snapshot_that_was_moved_below_such_a_path_is_not_called_damaged(tmp_path):
    write_snapshot(tmp_path / "snapshots", 1, 1, {"a": np.zeros(2)})
    (tmp_path / "snapshots").rename(tmp_path / NOT_UTF8)
    with pytest.raises(ValueError, match=r"must be UTF-8, .* or rename that folder"):
        read_snapshot(tmp_path / NOT_UTF8, 1)


def failing(error, first=0):
    """Return a way to write snapshots that fails from the step `first` on."""

    def write(folder, step, pulls, tree, state=None):
        if step >= first:
            raise error
        write_snapshot(folder, step, pulls, tree, state)

    return partial(SnapshotWriter, write=write)


def test_a_run_whose_first_snapshot_fails_stops_there(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "loopfeed.engine.run.recorder.SnapshotWriter", failing(OSError(errno.EREMOTEIO, "Remote I/O error"))
    )
    words = rf"^no snapshot could be written in {tmp_path}/snapshots, so .*: Remote I/O error$"
    with pytest.raises(UnwritableFolderError, match=words) as caught:
        run(tmp_path, steps=1_000_000)
    assert not isinstance(caught.value, ValueError)  # exit code 1
    end = json.loads((tmp_path / "result.json").read_text())
    assert (end["stopped_by"], end["snapshot_step"]) == ("error", None)
    assert end["steps_done"] < 1_000_000
    assert (tmp_path / "model.safetensors").exists()


def test_a_run_on_a_full_disk_goes_on_and_says_at_its_end_that_it_has_no_snapshot(tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("loopfeed.engine.run.recorder.SnapshotWriter", failing(full))
    with pytest.raises(UnwritableFolderError, match="No space left on device"):
        run(tmp_path)
    assert json.loads((tmp_path / "result.json").read_text())["steps_done"] == STEPS


@pytest.mark.parametrize("error", [OSError(errno.EREMOTEIO, "Remote I/O error"), OSError(errno.ENOSPC, "full")])
def test_a_failure_that_passes_or_follows_a_good_snapshot_does_not_end_a_run(tmp_path, error):
    hopeless: list[int | None] = []
    fails = {1, 3}

    def write(folder, step, pulls, tree, state=None):
        if step in fails:
            raise error
        (folder / str(step)).mkdir(parents=True)

    writer = SnapshotWriter(
        tmp_path, keep=0, say=lambda _: None, write=write, on_hopeless=lambda: hopeless.append(writer.last_step)
    )
    writer.start()
    for step in (1, 2, 3):
        writer.submit(step, step, None)
        while writer.unwritten_step is not None:
            pass
    assert not writer.close(20)
    assert hopeless == ([] if error.errno == errno.ENOSPC else [None])
    assert writer.failure is None


def test_a_first_snapshot_that_fails_once_is_written_at_once(tmp_path):
    tries = []

    def write(folder, step, pulls, tree, state=None):
        tries.append(step)
        if len(tries) == 1:
            raise OSError(errno.EIO, "Input/output error")
        write_snapshot(folder, step, pulls, tree, state)

    hopeless: list[str] = []
    writer = SnapshotWriter(
        tmp_path, keep=0, say=hopeless.append, write=write, on_hopeless=lambda: hopeless.append("hopeless")
    )
    writer.start()
    writer.submit(1, 1, {"weights": np.zeros(2)})
    assert writer.close(20)
    assert (tries, hopeless, writer.failure, writer.last_step) == ([1, 1], [], None, 1)


def test_what_a_snapshot_needs_has_its_place_on_the_disk_before_the_snapshot_has_its_name(tmp_path, monkeypatch):
    """On a strictly POSIX file system, a new file is lost in a power failure until its folder is synced."""
    synced: dict[Path, set[str]] = {}
    real, put_in_place = os.fsync, snapshot_module._put_in_place
    path = tmp_path / "runs" / "first"
    seen = []

    def fsync(handle):
        real(handle)
        place = Path(f"/proc/self/fd/{handle}").readlink()
        if place.is_dir():
            synced[place] = {each.name for each in place.iterdir()}

    def put(source, target):
        assert {"config.json", "loss.jsonl", "eval.jsonl", "snapshots"} <= synced[path]
        assert "first" in synced[path.parent]
        assert "runs" in synced[tmp_path]
        put_in_place(source, target)
        seen.append(target.name)
        assert target.name in synced[target.parent]

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(snapshot_module, "_put_in_place", put)
    run(path, keep_snapshots=0)
    assert seen[-1] == str(STEPS)
    # A resume from an earlier step cuts the logs: what recorded their length must be gone before.
    newest = snapshot_steps(path / "snapshots")[-1]
    (path / "snapshots" / str(newest) / "facts").rename(tmp_path / "facts")
    truncate, cut = os.ftruncate, []

    def truncating(file, length):
        place = Path(f"/proc/self/fd/{file}").readlink()
        if place.suffix == ".jsonl":
            cut.append(place.name)
            assert "result.json" not in synced[path]
            assert str(newest) not in synced[path / "snapshots"]
        truncate(file, length)

    monkeypatch.setattr(os, "ftruncate", truncating)
    run(path, resume=True)
    assert "loss.jsonl" in cut
