"""A run folder of which anything was changed: no launch continues it, nothing evaluates it, and the file is named."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from engine import evaluate, replay_run, train
from engine.records.control_log import read_events
from engine.records.control_requests import ControlRequest, send_request
from engine.records.digests import RunningDigest, sealed
from engine.records.evaluation_log import EvaluationLog
from engine.records.folder_lock import FolderLock, is_locked, was_killed
from engine.records.json_lines import JsonLines
from engine.records.loss_log import LossLog, read_run_end, read_run_facts
from engine.records.recorded_end import read_result
from engine.records.recorded_run import read_recorded
from engine.records.run_folder import RunFolder
from engine.records.snapshot import read_snapshot, snapshot_steps, write_snapshot
from engine.records.weights import read_weights
from engine.replay.checked_files import check_files
from tests.toy import Linear, toy_batch, toy_config

STEPS = 6
EVALUATED = toy_batch(100)
LOGS = ("loss.jsonl", "eval.jsonl", "control.jsonl")


class Untraced(Linear):
    """Shows that a refusal comes before anything is compiled."""

    def apply(self, params, batch_stats, images, train):
        raise AssertionError("the program is traced: nothing was refused")


def settings(path, **values):
    several: dict[str, Any] = {"steps": STEPS, "snapshot_every_steps": 2, "eval_every_steps": 2, "prefetch": 1}
    return toy_config(run_dir=path, **(several | values))


def run(path, *, batches=toy_batch, **values):
    return train(settings(path, **values), model=Linear(), batches=batches, evaluation=EVALUATED)


def resume(path, *, model=None, notify=lambda _: None, **values):
    config = settings(path, resume=True, **values)
    return train(config, model=model or Linear(), batches=toy_batch, evaluation=EVALUATED, notify=notify)


def refusal(path, **values) -> str:
    """Return the words in which a resume is refused; empty where it is not."""
    try:
        resume(path, model=Untraced(), **values)
    except ValueError as error:
        return str(error)
    except AssertionError:
        return ""
    raise AssertionError("the run went on without a program")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two launches with other settings, a request and several snapshots."""
    path = tmp_path_factory.mktemp("finished") / "run"

    def batches(step):
        if step == 1:
            send_request(path, ControlRequest(learning_rate_factor=0.5))
            time.sleep(0.5)
        deadline = time.monotonic() + 60
        while step == 3 and 2 not in snapshot_steps(path / "snapshots"):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return toy_batch(step)

    run(path, batches=batches, steps=4)
    resume(path, learning_rate=0.05)
    assert snapshot_steps(path / "snapshots") == [2, 4, 6]
    assert all((path / name).stat().st_size for name in LOGS)
    assert read_recorded(path).changes() == (4,)
    return path


@pytest.fixture
def copied(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


@contextmanager
def holding(path: Path, content: bytes) -> Iterator[None]:
    """Let a file hold something else for a while."""
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)


def other(value):
    """Return another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):
        return [*value, 1]
    return 1


def places(values, *above):
    """Return the keys to every value in nested JSON."""
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        yield (*above, key)
        yield from places(value, *above, key)


def changed(text: bytes, place) -> bytes:
    values = inner = json.loads(text)
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = other(inner[place[-1]]) if not isinstance(inner[place[-1]], dict) else {}
    return json.dumps(values, indent=2).encode()


def test_nothing_is_wrong_with_a_run_that_nobody_touched(finished):
    checked = check_files(finished)
    assert (checked.faults, checked.unchecked) == ((), ())
    assert checked.num_checked == 9  # config, result, weights, three logs, three snapshots
    assert refusal(finished) == ""


def test_every_change_of_the_settings_is_refused(copied):
    path = copied / "config.json"
    text = path.read_bytes()
    everywhere = list(places(json.loads(text)))
    assert {("config", "seed"), ("earlier", 0, "until_step"), ("continues", 0), ("sha256",)} <= set(everywhere)
    for place in everywhere:
        with holding(path, changed(text, place)):
            assert "config.json must be what run-train wrote, and was changed since" in refusal(copied), place
            with pytest.raises(ValueError, match="give its option to run-train --resume instead"):
                evaluate(copied, model=Linear(), evaluation=EVALUATED)


@pytest.mark.parametrize("missing", [["sha256"], ["continues"], ["continues", "sha256"]])
def test_settings_that_lost_their_digest_are_refused(copied, missing):
    path = copied / "config.json"
    values = {key: value for key, value in json.loads(path.read_text()).items() if key not in missing}
    path.write_text(json.dumps(values))
    assert f"{path} must be " in refusal(copied)


def test_settings_of_another_run_or_of_an_earlier_launch_are_refused(copied, tmp_path):
    path = copied / "config.json"
    before = json.loads(path.read_text())
    run(tmp_path / "other")
    shutil.copy(tmp_path / "other/config.json", path)
    assert "config.json must be of the run whose files lie beside it" in refusal(copied)
    (fault,) = check_files(copied).faults
    assert "config.json must be of the run" in fault
    # As a backup of the first launch's would be.
    first = {**before, "continues": [], "sha256": ""}
    path.write_text(json.dumps(sealed({key: value for key, value in first.items() if key != "sha256"})))
    assert "for the snapshot of step 6" in refusal(copied)


def test_a_run_without_a_snapshot_is_guarded_by_its_settings_own_digest(tmp_path):
    def failing(step):
        if step == 1:
            raise ConnectionResetError("cut off")
        return toy_batch(step)

    with pytest.raises(ConnectionResetError):
        run(tmp_path, batches=failing, snapshot_every_steps=0, eval_every_steps=0)
    shutil.rmtree(tmp_path / "snapshots", ignore_errors=True)
    path = tmp_path / "config.json"
    with holding(path, path.read_bytes().replace(b'"seed": 0', b'"seed": 1')):
        assert "was changed since" in refusal(tmp_path)
    assert refusal(tmp_path) == ""


@pytest.mark.parametrize("name", LOGS)
def test_every_line_of_a_log_is_what_was_written(copied, name):
    path = copied / name
    lines = path.read_bytes().splitlines(keepends=True)
    changes = [[*lines[:at], lines[at].replace(b"1", b"2", 1), *lines[at + 1 :]] for at in range(len(lines))]
    changes += [[*lines[:at], *lines[at + 1 :]] for at in range(len(lines))]
    changes += [[b'{"step": 1}\n'] * len(lines), []]
    for some in changes:
        assert some != lines
        with holding(path, b"".join(some)):
            said = refusal(copied)
            assert name in said, some
            assert "restore that file" in said or "delete it if the run" in said
            (fault,) = check_files(copied).faults
            assert name in fault


@pytest.mark.parametrize("name", LOGS)
def test_a_log_that_is_gone_is_missed(copied, name):
    (copied / name).unlink()
    assert f"{name} must hold what it held for the snapshot of step 6" in refusal(copied)
    assert "it is missing" in refusal(copied)
    (fault,) = check_files(copied).faults
    assert "it is missing" in fault


def test_lines_behind_the_end_of_a_run_are_told_and_cut(copied):
    with (copied / "loss.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 1.0}\n')
    (fault,) = check_files(copied).faults
    assert "25 bytes were appended" in fault
    assert refusal(copied) == ""  # the launch would cut them off
    with (copied / "control.jsonl").open("ab") as file:
        file.write((copied / "control.jsonl").read_bytes())
    assert "control.jsonl must hold an event a line, line 2 does not" in refusal(copied)


def test_a_killed_run_is_held_against_its_newest_snapshot(copied):
    (copied / "result.json").unlink()
    with (copied / "loss.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 1.0}\n{"step"')
    assert check_files(copied).faults == ()
    assert refusal(copied) == ""
    text = (copied / "eval.jsonl").read_bytes()
    (copied / "eval.jsonl").write_bytes(text.replace(b'"top1": ', b'"top1": 1', 1))
    said = refusal(copied)
    assert f"or remove {copied}/snapshots/6 to go on from the snapshot before it" in said
    shutil.copy(copied / "eval.jsonl", copied / "changed")
    (copied / "eval.jsonl").write_bytes(text)
    assert refusal(copied) == ""


def test_every_byte_of_the_weights_file_counts(copied):
    path = copied / "model.safetensors"
    whole, before = path.read_bytes(), read_weights(path)
    assert before.digest is not None
    for at in range(len(whole)):
        content = bytearray(whole)
        content[at] ^= 1 << at % 8
        path.write_bytes(content)
        found = read_whole(path)
        if found is None:
            continue
        # Blanks of the header say nothing.
        assert found.metadata == before.metadata, at
        assert found.tensors.keys() == before.tensors.keys(), at
        assert all(np.array_equal(found.tensors[name], before.tensors[name]) for name in found.tensors), at


def read_whole(path):
    """Return weights that are what was written, None where they are refused."""
    with suppress(ValueError):
        return read_weights(path)
    return None


def test_weights_that_were_changed_are_neither_evaluated_nor_started_from(copied, tmp_path):
    path = copied / "model.safetensors"
    whole = path.read_bytes()
    with holding(path, whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:]):
        with pytest.raises(ValueError, match=r"model\.safetensors must hold what was written, and was changed since"):
            evaluate(copied, model=Linear(), evaluation=EVALUATED)
        with pytest.raises(ValueError, match="and was changed since"):
            run(tmp_path / "next", init_from=str(path))
        report = replay_run(copied, model=Linear(), batches=toy_batch, evaluation=EVALUATED)
        assert not report.is_same
        assert not report.differences
        assert str(report).startswith(f"not as written: {path} must hold what was written")
    # Another run's whole file, or one without a digest, is not the one that the run wrote.
    run(tmp_path / "other", seed=5)
    for content in ((tmp_path / "other/model.safetensors").read_bytes(), without_digest(path, tmp_path)):
        with (
            holding(path, content),
            pytest.raises(ValueError, match=r"must be what the run wrote at its end, and is not .*--weights FILE"),
        ):
            evaluate(copied, model=Linear(), evaluation=EVALUATED)


def without_digest(path: Path, folder: Path) -> bytes:
    with safe_open(path, framework="np") as file:
        metadata = {key: value for key, value in file.metadata().items() if key not in ("digest", "sha256")}
    save_file(load_file(path), folder / "plain.safetensors", metadata)
    return (folder / "plain.safetensors").read_bytes()


def test_the_digest_of_weights_is_of_their_content_and_not_of_the_file(copied, tmp_path):
    path = copied / "model.safetensors"
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
    save_file(dict(reversed(load_file(path).items())), tmp_path / "saved.safetensors", metadata)
    assert read_weights(tmp_path / "saved.safetensors").digest == read_weights(path).digest
    end = read_result(copied)
    assert end is not None
    assert read_weights(path).digest == end.weights_digest


def test_every_change_of_the_result_is_refused(copied):
    path = copied / "result.json"
    text = path.read_bytes()
    for place in places(json.loads(text)):
        with holding(path, changed(text, place)):
            said = refusal(copied)
            assert f"{path} must be what the run wrote at its end, and is not" in said, place
            assert "or remove it to go on from the newest snapshot" in said
            (fault,) = check_files(copied).faults
            assert "result.json" in fault
    path.unlink()
    assert refusal(copied) == ""


def test_every_file_of_a_snapshot_counts(copied):
    folder = copied / "snapshots/6"
    for file in sorted(each for each in folder.rglob("*") if each.is_file()):
        content = file.read_bytes()
        with holding(file, content[: len(content) // 2]):
            told: list[str] = []
            with pytest.raises(AssertionError, match="is traced"):
                resume(copied, model=Untraced(), notify=told.append)
            is_passed_over = told[0].startswith("warning: a snapshot must be whole")
            # Orbax keeps other files that nothing is read from; every array has its digest in the facts.
            is_needed = str(file.relative_to(folder)).startswith(("facts/metadata", "state/manifest.ocdbt", "state/d/"))
            assert is_passed_over or not is_needed, file
            assert bool(check_files(copied).faults) == is_passed_over


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["config.json", "result.json", "model.safetensors", *LOGS])
def test_a_pipe_or_a_device_in_the_place_of_a_file_is_an_error_at_once(copied, name):
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (copied / name).unlink()
        make(copied / name)
        if name != "model.safetensors":  # which a resume does not read
            assert name in refusal(copied)
        (fault,) = [each for each in check_files(copied).faults if name in each]
        assert "a pipe, not a file" in fault or "a device, not a file" in fault


@pytest.mark.timeout(60)
def test_a_pipe_in_a_snapshot_is_no_snapshot(copied):
    for name in ("facts/metadata", "state/manifest.ocdbt", "_CHECKPOINT_METADATA"):
        (copied / "snapshots/6" / name).unlink()
        os.mkfifo(copied / "snapshots/6" / name)
        told: list[str] = []
        with pytest.raises(AssertionError, match="is traced"):
            resume(copied, model=Untraced(), notify=told.append)
        assert told[0].startswith(f"warning: a snapshot must be whole, and in {copied}/snapshots/6 ")
        assert "it is a pipe, not a file" in told[0]


@pytest.mark.parametrize("name", ["config.json", "result.json"])
def test_records_that_are_nested_deep_or_endless_are_an_error(copied, name):
    (copied / name).write_text("[" * 200_000)
    assert name in refusal(copied)
    with (copied / name).open("wb") as file:
        file.truncate(3 << 30)
    assert "larger than the 16,777,216 bytes allowed" in refusal(copied)


def make_older(path: Path, folder: Path) -> None:
    """Take from a run all that tells what its files held, as the runs of before had none of it."""
    for name in ("config.json", "result.json"):
        values = json.loads((path / name).read_text())
        for key in ("sha256", "continues", "files"):
            values.pop(key, None)
        (path / name).write_text(json.dumps(values))
    (path / "model.safetensors").write_bytes(without_digest(path / "model.safetensors", folder))
    for step in snapshot_steps(path / "snapshots"):
        snapshot = read_snapshot(path / "snapshots", step)
        nested: dict[str, Any] = {}
        for name, leaf in snapshot.leaves.items():
            *above, last = name.split(".")
            inner = nested
            for part in above:
                inner = inner.setdefault(part, {})
            inner[last] = leaf
        shutil.rmtree(path / "snapshots" / str(step))
        write_snapshot(path / "snapshots", step, snapshot.pulls, nested)


def test_a_run_of_before_there_were_digests_is_told_apart_and_goes_on(copied, finished, tmp_path):
    make_older(copied, tmp_path)
    checked = check_files(copied)
    assert checked.faults == ()
    assert set(checked.unchecked) == {"config.json", "result.json", "model.safetensors", *LOGS}
    told: list[str] = []
    assert evaluate(copied, model=Linear(), evaluation=EVALUATED, notify=told.append).record.step == STEPS
    assert "made before files carried digests: unchecked" in told[0]
    resume(copied, learning_rate=0.05, steps=8, notify=told.append)
    assert "this run was made before a run's files carried digests: whether they were changed cannot be checked" in told
    # From here on it has them.
    assert check_files(copied).faults == ()
    assert check_files(copied).unchecked == ()
    (copied / "eval.jsonl").write_bytes((finished / "eval.jsonl").read_bytes()[::-1])
    assert "eval.jsonl" in refusal(copied, steps=8)


def test_the_chain_holds_over_launches_and_lost_snapshots(copied):
    for steps, rate in ((7, 0.1), (9, 0.2), (9, 0.3)):
        resume(copied, steps=steps, learning_rate=rate)
        checked = check_files(copied)
        assert (checked.faults, checked.unchecked) == ((), ())
    assert len(read_recorded(copied).continued) == 4
    shutil.rmtree(copied / "snapshots/9")
    resume(copied, steps=9, learning_rate=0.1)
    assert check_files(copied).faults == ()
    report = replay_run(copied, model=Linear(), batches=toy_batch, evaluation=EVALUATED)
    assert report.is_same, report


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


@pytest.mark.timeout(60)
def test_who_follows_a_run_does_not_wait_for_a_pipe(tmp_path):
    for name in (*LOGS, "config.json", "result.json", ".lock"):
        os.mkfifo(tmp_path / name)
    for look in (
        LossLog(tmp_path / "loss.jsonl").read,
        EvaluationLog(tmp_path / "eval.jsonl").read,
        lambda: read_events(tmp_path / "control.jsonl"),
        lambda: read_run_facts(tmp_path),
        lambda: is_locked(tmp_path),
        FolderLock(tmp_path).acquire,
    ):
        with pytest.raises((OSError, ValueError), match="it is a pipe, not a file"):
            look()
    assert not was_killed(tmp_path)
    (tmp_path / ".lock").unlink()
    with pytest.raises(OSError, match="it is a pipe, not a file"):
        read_run_end(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json must be what run-train wrote.*it is a pipe, not a file"):
        read_recorded(tmp_path)


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
