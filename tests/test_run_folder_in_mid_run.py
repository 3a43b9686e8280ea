"""What happens to a run folder while its run is going: emptied, replaced, its disk full."""

import hashlib
import json
import os
import shutil
import time

import pytest

from engine.records.digests import RunningDigest
from engine.records.json_lines import JsonLines
from engine.records.run_folder import RunFolder
from engine.records.weights import read_weights
from tests.chained_run import run
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
def test_a_folder_that_is_emptied_in_mid_run_is_an_error_and_the_weights_are_there(tmp_path, what):
    path = tmp_path / "run"

    def empty():
        if what == "folder":
            shutil.rmtree(path)
        for entry in list(path.iterdir()) if what != "folder" else []:
            if what in ("all", entry.name):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    name = "config.json" if what == "config.json" else "loss.jsonl"
    with pytest.raises(OSError, match=f"the run folder {path} must stay as it is .*{name} was removed or replaced"):
        run(path, batches=Emptying(empty), snapshot_every_steps=0, eval_every_steps=0)
    assert read_weights(path / "model.safetensors").digest is not None
    assert "was removed or replaced" in json.loads((path / "result.json").read_text())["error"]


def test_a_log_that_is_replaced_in_mid_run_is_an_error(tmp_path):
    def replaced():
        content = (tmp_path / "loss.jsonl").read_bytes()
        (tmp_path / "loss.jsonl").unlink()
        (tmp_path / "loss.jsonl").write_bytes(content)

    with pytest.raises(OSError, match=r"loss\.jsonl was removed or replaced"):
        run(tmp_path, batches=Emptying(replaced), snapshot_every_steps=0, eval_every_steps=0)


def test_what_another_run_has_in_the_folder_by_now_is_left_alone(tmp_path):
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
def test_a_disk_that_is_full_is_told_with_the_file_and_the_remedy(tmp_path, monkeypatch, name):
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
    assert f"{tmp_path}/{name} cannot be written: make room on its disk" in caught.value.__notes__


def test_weights_for_which_there_is_no_memory_are_told_with_the_file(tmp_path, monkeypatch):
    def refuse(*_):
        raise MemoryError

    monkeypatch.setattr("safetensors.numpy.save", refuse)
    with pytest.raises(MemoryError, match=r"model\.safetensors needs 0 MB of memory to be written.*\(--resume\)"):
        run(tmp_path, eval_every_steps=0)


def test_a_log_that_somebody_wrote_to_meanwhile_is_refused(tmp_path):
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
    with pytest.raises(ValueError, match="must hold the 12 bytes that this run left there, and holds 3"):
        JsonLines(path, begun).open()
