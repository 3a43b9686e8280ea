"""The run folder: an earlier run is kept unless overwriting is requested, and unrelated files always are."""

import json
import os
import platform
import subprocess
import sys
from contextlib import nullcontext, suppress
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from loopfeed import train
from loopfeed.engine.config import TrainConfig
from loopfeed.engine.control.request import ControlRequest
from loopfeed.engine.records.control_requests import CONTROL_FOLDER_NAME, send_request
from loopfeed.engine.records.digests import is_as_sealed
from loopfeed.engine.records.folder_lock import FolderLock, is_locked
from loopfeed.engine.records.run_folder import RESULT, RunFolder, check_folder
from tests.toy import Linear, toy_batch, toy_config

WRITTEN = ["config.json", "loss.jsonl", "model.safetensors", "result.json"]


def test_one_of_two_concurrent_runs_gets_an_empty_folder(tmp_path):
    with RunFolder(tmp_path, overwrite=False):
        for overwrite in (False, True):
            with pytest.raises(ValueError, match="is in use by process"):
                RunFolder(tmp_path, overwrite=overwrite)


@pytest.mark.parametrize("is_new", [True, False])
def test_an_abandoned_folder_is_restored(tmp_path, is_new):
    path = tmp_path / "run" if is_new else tmp_path
    if not is_new:
        (path / "notes.txt").write_text("mine")
    with RunFolder(path, overwrite=False) as folder:
        folder.clear()
        folder.write_config(TrainConfig(), {}, None, origins={})
    assert path.exists() is not is_new
    assert [each.name for each in tmp_path.iterdir()] == ([] if is_new else ["notes.txt"])


@pytest.mark.parametrize("how", [{"overwrite": True}, {"resume": True}, {}])
def test_a_refused_start_leaves_no_lock_beside_an_earlier_run(tmp_path, how):
    (tmp_path / "config.json").write_text("{}")
    with suppress(ValueError), RunFolder(tmp_path, **how):
        pass
    assert [each.name for each in tmp_path.iterdir()] == ["config.json"]


def test_a_folder_whose_lock_cannot_be_acquired_is_not_left_behind(tmp_path, monkeypatch):
    def fail(_):
        raise ValueError("no lock")

    monkeypatch.setattr(FolderLock, "acquire", fail)
    with pytest.raises(ValueError, match="no lock"):
        RunFolder(tmp_path / "runs/first")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("resume", [False, True])
def test_a_request_that_comes_as_soon_as_the_folder_is_locked_is_for_this_run(tmp_path, monkeypatch, resume):
    acquire = FolderLock.acquire

    def acquire_and_receive(lock):
        acquire(lock)
        send_request(tmp_path, ControlRequest("new", stop=True))

    if resume:
        (tmp_path / "config.json").write_text("{}")
        send_request(tmp_path, ControlRequest("old", stop=True))
    monkeypatch.setattr(FolderLock, "acquire", acquire_and_receive)
    with RunFolder(tmp_path, resume=resume):
        assert [path.name for path in (tmp_path / CONTROL_FOLDER_NAME).iterdir()] == ["new.json"]


def test_a_parent_that_another_refused_run_removes_is_made_again(tmp_path, monkeypatch):
    mkdir, calls = Path.mkdir, []

    def removed_at_first(path, *arguments, **named):
        calls.append(path)
        if len(calls) == 1:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        mkdir(path, *arguments, **named)

    monkeypatch.setattr(Path, "mkdir", removed_at_first)
    with RunFolder(tmp_path / "runs/first"):
        assert is_locked(tmp_path / "runs/first")


def test_a_folder_that_cannot_be_made_is_named_with_the_reason():
    with pytest.raises(ValueError, match=r"must be writable, but /proc/run cannot be created \(.*\): choose another"):
        RunFolder(Path("/proc/run"), overwrite=False)


def test_overwriting_removes_the_earlier_run_and_nothing_else(tmp_path):
    strangers = ["notes.txt", "config.yaml", "old.loss.jsonl", ".hidden"]
    for name in [*WRITTEN, *strangers]:
        (tmp_path / name).write_text(name)
    (tmp_path / "plots").mkdir()
    with RunFolder(tmp_path, overwrite=True) as folder:
        assert (tmp_path / "model.safetensors").exists()  # nothing is lost before the new run is known to be sound
        folder.clear()
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*strangers, "plots", ".lock"])
    for name in strangers:
        assert (tmp_path / name).read_text() == name


def test_an_interrupted_overwriting_still_asks_for_overwriting(tmp_path, monkeypatch):
    for name in WRITTEN:
        (tmp_path / name).write_text(name)
    unlink = type(tmp_path).unlink
    removed: list[str] = []

    def interrupted(path, missing_ok=False):
        if not path.exists():
            return
        if len(removed) == 3:
            raise KeyboardInterrupt
        removed.append(path.name)
        unlink(path)

    with monkeypatch.context() as patched:
        patched.setattr(type(tmp_path), "unlink", interrupted)
        with pytest.raises(KeyboardInterrupt), RunFolder(tmp_path, overwrite=True) as folder:
            folder.clear()
    # The mark of a finished run goes first, the mark of any run last.
    assert removed[0] == RESULT
    with pytest.raises(ValueError, match=r"contains config\.json of an earlier run"):
        RunFolder(tmp_path, overwrite=False)


BELOW = {
    "run7/loss.jsonl": "run7",
    "pixels/zarr.json": "pixels",
    "train/pixels/zarr.json": "train/pixels",
    "demo/val/pixels/zarr.json": "demo/val/pixels",
}


def write_below(folder, name):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("{}")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(("below", "found"), BELOW.items())
def test_a_folder_of_runs_or_data_is_no_run_folder(tmp_path, below, found, overwrite):
    write_below(tmp_path, below)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(ValueError, match=rf"must contain only its run, but .* contains {found}: choose a folder in it"):
        RunFolder(tmp_path, overwrite=overwrite)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def refusal(act, path, how):
    """The message with which a start or its check refuses a folder, None if it does not."""
    try:
        with act(path, **how) or nullcontext():
            return None
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("how", [{}, {"overwrite": True}, {"resume": True}])
@pytest.mark.parametrize("state", ["free", "missing", "foreign", "run", "locked", "locked run", "runs", "file", "pipe"])
def test_the_check_of_a_folder_refuses_what_a_start_refuses_and_changes_nothing(tmp_path, state, how):
    path = tmp_path / "run"
    if state == "file":
        path.write_text("mine")
    elif state != "missing":
        path.mkdir()
    if state == "foreign":
        (path / "notes.txt").write_text("mine")
    elif state.endswith("run"):
        (path / "config.json").write_text("{}")
    elif state == "runs":
        write_below(path, "first/loss.jsonl")
    elif state == "pipe":
        os.mkfifo(path / ".lock")
    with FolderLock(path) if "locked" in state else nullcontext():
        before = {each: each.stat().st_mtime_ns for each in (tmp_path, *tmp_path.rglob("*"))}
        checked = refusal(check_folder, path, how)
        assert {each: each.stat().st_mtime_ns for each in (tmp_path, *tmp_path.rglob("*"))} == before
        assert checked == refusal(RunFolder, path, how)


@pytest.mark.parametrize("resume", [False, True])
def test_what_a_kill_left_half_written_goes_when_the_folder_is_used_again(resume, tmp_path):
    if resume:
        (tmp_path / "config.json").write_text("{}")
    for name in (".model.safetensors.0123abcd", ".config.json.0123abcd", ".result.json.0123abcd", ".notes.0123abcd"):
        (tmp_path / name).write_text("half")
    with RunFolder(tmp_path, resume=resume):
        left = {path.name for path in tmp_path.iterdir()}
    assert left == {".lock", ".notes.0123abcd"} | ({"config.json"} if resume else set())


def test_the_content_of_config_json(tmp_path):
    folder = RunFolder(tmp_path, overwrite=False)
    config = TrainConfig(steps=7, data="shards", learning_rate=0.25)
    folder.write_config(
        config, {"model": "resnet8", "mean": (0.5, 0.25, 0.125)}, "abc123", origins={"steps": "command line"}
    )
    text = (tmp_path / "config.json").read_text()
    values = json.loads(text)
    assert text.endswith("}\n")
    keys = ["config", "origins", "resolved", "manifest_sha256", "versions", "earlier", "continues", "sha256"]
    assert list(values) == keys
    assert is_as_sealed(values)
    assert values["sha256"] == folder.config_digest
    assert TrainConfig.from_json(values["config"]) == config
    assert values["resolved"] == {"model": "resnet8", "mean": [0.5, 0.25, 0.125]}
    assert values["manifest_sha256"] == "abc123"
    assert values["origins"] == {"steps": "command line"}
    assert values["earlier"] == []
    names = ("jax", "jaxlib", "numpy", "optax", "tensorstore")
    ours = {"python": platform.python_version(), "feedloop": version("loopfeed")}
    assert values["versions"] == ours | {name: version(name) for name in names}


def test_snapshots_and_requests_of_an_earlier_run_are_removed_and_unrelated_files_kept(tmp_path):
    for path in (
        "snapshots/3/state",
        "snapshots/.unfinished/x",
        "snapshots/mine/x",
        "control/1-a.json",
        "control/notes",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x")
    with pytest.raises(ValueError, match="contains snapshots of an earlier run"):
        RunFolder(tmp_path, overwrite=False)
    with RunFolder(tmp_path, overwrite=True) as folder:
        folder.clear()
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert found == ["control/notes", "snapshots/mine/x"]
    with RunFolder(tmp_path, overwrite=False):  # what is left is none of a run's
        pass


def test_weights_are_the_same_bytes_in_every_process(tmp_path):
    metadata = {f"key{number}": "value" for number in range(20)}
    script = (
        "import sys, numpy as np, pathlib; from loopfeed.engine.records.run_folder import RunFolder\n"
        f"RunFolder(pathlib.Path(sys.argv[1])).write_weights({{'b': np.arange(3.0), 'a': np.eye(2)}}, {metadata})"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "first")], check=True, timeout=60)
    RunFolder(tmp_path / "second").write_weights({"b": np.arange(3.0), "a": np.eye(2)}, metadata)
    contents = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second")]
    # The library alone orders the metadata by a hash that each process draws.
    assert contents[0] == contents[1]
    assert contents[0].index(b"key0") < contents[0].index(b"key1") < contents[0].index(b"key9")


def test_weights_are_read_back(tmp_path):
    folder = RunFolder(tmp_path, overwrite=False)
    counted = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    tensors = {
        "plain": counted,
        "transposed": counted.transpose(2, 0, 1),
        "strided": counted[:, ::2, ::-1],
        "fortran": np.asfortranarray(counted[0]),
        "scalar": np.array(7, np.int64),
        "empty": np.zeros((0, 3), np.float32),
        "half": counted.astype(np.float16),
    }
    path = folder.write_weights(tensors, {"model": "resnet8", "steps_done": "3"})
    assert path == tmp_path / "model.safetensors"
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        np.testing.assert_array_equal(found[name], tensor, strict=True)
    with safe_open(path, framework="numpy") as file:
        digest = {"digest": "sha256", "sha256": folder.weights_digest}
        assert file.metadata() == {"model": "resnet8", "steps_done": "3"} | digest


def test_a_run_that_changes_the_working_directory_stays_in_its_folder(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    def moving_batch(step):
        os.chdir("/" if step else tmp_path / "elsewhere")
        return toy_batch(step)

    result = train(toy_config(steps=4, run_dir="run", snapshot_every_steps=2), model=Linear(), batches=moving_batch)
    assert result.run_dir == tmp_path / "run"
    assert {*WRITTEN, "snapshots"} <= {each.name for each in (tmp_path / "run").iterdir()}
    assert not list((tmp_path / "elsewhere").iterdir())
