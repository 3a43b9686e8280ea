"""Changes to a run folder during its run: emptied, replaced, on a full disk."""

import errno
import hashlib
import json
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

import pytest

from loopfeed.engine.control.request import ControlEvent
from loopfeed.engine.records.control_log import ControlLog, read_events
from loopfeed.engine.records.digests import RunningDigest
from loopfeed.engine.records.file_errors import LostFileError
from loopfeed.engine.records.json_lines import JsonLines
from loopfeed.engine.records.run_folder import RunFolder
from loopfeed.engine.records.snapshot import read_folder_state, snapshot_steps
from loopfeed.engine.records.weights import read_weights
from tests.chained_run import STEPS, run
from tests.toy import toy_batch


class Emptying:
    """Toy batches in whose midst something happens to the run folder."""

    def __init__(self, happen):
        self._happen = happen

    def __call__(self, step):
        if step == 4:
            time.sleep(0.3)  # the lines before it are on disk
            self._happen()
        return toy_batch(step)


@pytest.mark.parametrize("what", ["all", "config.json", "loss.jsonl", "folder"])
def test_a_folder_emptied_during_the_run_is_an_error_and_the_weights_are_written(tmp_path, what):
    path = tmp_path / "run"

    def empty():
        if what == "folder":
            shutil.rmtree(path)
        for entry in list(path.iterdir()) if what != "folder" else []:
            if what in ("all", entry.name):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    name = "config.json" if what == "config.json" else "loss.jsonl"
    with pytest.raises(OSError, match=f"{name} was removed or replaced in the run folder {path} during the run"):
        run(path, batches=Emptying(empty), snapshot_every_steps=0, eval_every_steps=0)
    assert read_weights(path / "model.safetensors").digest is not None
    assert "was removed or replaced" in json.loads((path / "result.json").read_text())["error"]


def test_a_run_that_fails_after_its_folder_was_removed_is_not_said_to_be_resumable(tmp_path):
    path = tmp_path / "run"

    def fail():
        while not snapshot_steps(path / "snapshots"):
            time.sleep(0.01)
        time.sleep(0.1)
        shutil.rmtree(path, ignore_errors=True)
        raise ConnectionResetError("the camera went away")

    with pytest.raises(ConnectionResetError) as caught:
        run(path, batches=Emptying(fail), snapshot_every_steps=1, eval_every_steps=0)
    notes = "\n".join(getattr(caught.value, "__notes__", ()))
    assert f"files of the run folder {path} were removed during the run, so it cannot be resumed" in notes
    assert "resume from it" not in notes


def test_files_of_another_run_in_the_folder_are_unchanged(tmp_path):
    path = tmp_path / "run"
    later: list[RunFolder] = []

    def taken():
        shutil.rmtree(path)
        later.append(RunFolder(path))
        (path / "config.json").write_text("another's")

    with pytest.raises(OSError, match="was removed or replaced"):
        run(path, batches=Emptying(taken), snapshot_every_steps=0, eval_every_steps=0)
    assert sorted(each.name for each in path.iterdir()) == [".lock", "config.json"]
    assert (path / "config.json").read_text() == "another's"
    later[0].__exit__()


@pytest.mark.parametrize("name", ["config.json", "loss.jsonl", "result.json", "model.safetensors"])
def test_a_full_disk_is_reported_with_the_file_and_the_remedy(tmp_path, monkeypatch, name):
    real_open, real_write = os.open, os.write
    refused: set[int] = set()

    def noted_open(path, *arguments, **values):
        handle = real_open(path, *arguments, **values)
        if name in os.fspath(path):
            refused.add(handle)
        else:
            refused.discard(handle)
        return handle

    def full(handle):
        if handle in refused:
            raise OSError(28, "No space left on device")

    def write(handle, content):
        full(handle)
        return real_write(handle, content)

    monkeypatch.setattr(os, "open", noted_open)
    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/{name}'\n") as caught:
        run(tmp_path, snapshot_every_steps=0, eval_every_steps=0)
    assert (
        f"{tmp_path}/{name} cannot be written (No space left on device): make room on its disk"
        in caught.value.__notes__
    )


def test_a_lack_of_memory_for_the_weights_is_reported_with_the_file(tmp_path, monkeypatch):
    def refuse(*_):
        raise MemoryError

    monkeypatch.setattr("loopfeed.engine.records.weights.save", refuse)
    with pytest.raises(
        MemoryError, match=r"model\.safetensors needs 0 MB of memory, more than is free.*\(resume=True\)"
    ):
        run(tmp_path, eval_every_steps=0)


def test_a_log_that_was_modified_during_the_run_is_refused(tmp_path):
    path = tmp_path / "loss.jsonl"
    begun = RunningDigest()
    lines = JsonLines(path, begun)
    lines.open()
    lines.append('{"step": 1}')
    assert lines.state() == (12, hashlib.sha256(b'{"step": 1}\n').hexdigest())
    lines.close()
    again = JsonLines(path)
    again.open()
    assert again.state() == lines.state()
    again.close()
    path.write_text("{}\n")
    with pytest.raises(ValueError, match="must contain the 12 bytes that this run wrote to it, but contains 3"):
        JsonLines(path, begun).open()


def refuse_to_sync(monkeypatch, path: Path, code: int) -> list[int]:
    """Have the disk refuse to sync a file; return a list that takes the size of each refusal."""
    real, refused = os.fsync, []

    def fsync(handle):
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                refused.append(path.stat().st_size)
                raise OSError(code, os.strerror(code))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    return refused


@pytest.mark.parametrize("name", ["loss.jsonl", "eval.jsonl"])
def test_a_log_that_the_disk_does_not_keep_ends_the_run_and_no_record_counts_on_it(tmp_path, monkeypatch, name):
    refused = refuse_to_sync(monkeypatch, tmp_path / name, errno.EIO)
    with pytest.raises(OSError, match=f"'{tmp_path}/{name}'") as caught:
        run(tmp_path)
    advice = "try again; if it fails again, check the disk or the network"
    assert f"{tmp_path}/{name} cannot be written (Input/output error): {advice}" in caught.value.__notes__
    assert len(refused) == 1  # at the next call a disk reports success
    assert snapshot_steps(tmp_path / "snapshots") == []
    assert json.loads((tmp_path / "result.json").read_text())["files"] is None


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_a_file_still_holds_a_run(tmp_path, monkeypatch, code):
    refused = refuse_to_sync(monkeypatch, tmp_path / "loss.jsonl", code)
    assert run(tmp_path).snapshot_step == STEPS
    assert refused


def test_a_request_that_is_logged_while_the_disk_syncs_is_not_in_the_snapshot(tmp_path, monkeypatch):
    synced: list[int] = []
    real = ControlLog.sync

    def sync(log):
        real(log)
        synced.append(log.state().num_bytes)
        if len(synced) == 1:
            log.append(ControlEvent(0, 1, None, snapshot=False, evaluate=False, stop=False, request="late", time=1.0))

    monkeypatch.setattr(ControlLog, "sync", sync)
    run(tmp_path, keep_snapshots=0)
    first = snapshot_steps(tmp_path / "snapshots")[0]
    state = read_folder_state(tmp_path / "snapshots", first)
    assert state is not None
    assert state.logs["control.jsonl"].num_bytes == synced[0] == 0
    assert read_events(tmp_path / "control.jsonl")[0].request == "late"


def test_what_an_earlier_launch_logged_is_brought_to_the_disk_too(tmp_path, monkeypatch):
    path = tmp_path / "control.jsonl"
    path.write_text("{}\n")
    begun = RunningDigest()
    begun.update(path.read_bytes())
    refused = refuse_to_sync(monkeypatch, path, errno.EIO)
    lines = JsonLines(path, begun)
    for _ in range(2):
        with pytest.raises(OSError, match=r"control\.jsonl"):
            lines.sync()
    assert refused == [3]
    path.unlink()
    with pytest.raises(LostFileError, match="was removed or replaced"):
        JsonLines(path, begun).sync()
