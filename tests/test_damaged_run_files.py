"""A changed, truncated, removed or replaced file of a run folder is named and refused."""

import json
import os
import shutil
from contextlib import suppress

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from loopfeed import evaluate, replay_run
from loopfeed.engine.records.control_log import read_events
from loopfeed.engine.records.digests import sealed
from loopfeed.engine.records.evaluation_log import EvaluationLog
from loopfeed.engine.records.folder_lock import FolderLock, is_locked, was_killed
from loopfeed.engine.records.loss_log import LossLog, read_run_end, read_run_facts
from loopfeed.engine.records.recorded_run import read_recorded, read_result
from loopfeed.engine.records.weights import read_weights
from loopfeed.engine.replay.checked_files import check_files
from tests.chained_run import EVALUATED, LOGS, Untraced, holding, make_older, refusal, resume, run, without_digest
from tests.toy import Linear, toy_batch


@pytest.mark.parametrize("name", LOGS)
def test_every_line_of_a_log_is_checked(copied_run, name):
    path = copied_run / name
    lines = path.read_bytes().splitlines(keepends=True)
    changes = [[*lines[:at], lines[at].replace(b"1", b"2", 1), *lines[at + 1 :]] for at in range(len(lines))]
    changes += [[*lines[:at], *lines[at + 1 :]] for at in range(len(lines))]
    changes += [[b'{"step": 1}\n'] * len(lines), []]
    for some in changes:
        assert some != lines
        with holding(path, b"".join(some)):
            said = refusal(copied_run)
            assert name in said, some
            assert "restore that file" in said
            assert "remove it if" not in said
            (fault,) = check_files(copied_run).faults
            assert name in fault


@pytest.mark.parametrize("kept", ["all", "snapshots", "result", "nothing", "an older run's"])
def test_to_remove_a_damaged_log_of_requests_is_advised_where_that_works(copied_run, tmp_path, kept):
    if kept == "an older run's":
        make_older(copied_run, tmp_path)
    if kept in ("snapshots", "nothing"):
        (copied_run / "result.json").unlink()
    if kept in ("result", "nothing"):
        shutil.rmtree(copied_run / "snapshots")
    path = copied_run / "control.jsonl"
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    said = refusal(copied_run)
    assert "control.jsonl is not a valid event" in said
    path.unlink()
    if kept in ("nothing", "an older run's"):
        assert said.endswith("restore that file, or remove it to resume without its requests")
        assert refusal(copied_run) == ""
    else:
        assert said.endswith("restore that file, or train the run again with overwrite=True")
        assert refusal(copied_run) != ""


def test_lines_after_the_end_of_a_run_are_reported_and_removed(copied_run):
    with (copied_run / "loss.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 1.0}\n')
    (fault,) = check_files(copied_run).faults
    assert "it is longer by 25 bytes" in fault
    assert refusal(copied_run) == ""  # the launch would cut them off
    with (copied_run / "control.jsonl").open("ab") as file:
        file.write((copied_run / "control.jsonl").read_bytes())
    assert "control.jsonl is not a valid event" in refusal(copied_run)


def test_a_change_of_any_byte_of_the_weights_file_is_detected(copied_run):
    path = copied_run / "model.safetensors"
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


def test_weights_that_were_changed_are_neither_evaluated_nor_started_from(copied_run, tmp_path):
    path = copied_run / "model.safetensors"
    whole = path.read_bytes()
    with holding(path, whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:]):
        with pytest.raises(ValueError, match=r"model\.safetensors has changed since it was written"):
            evaluate(copied_run, model=Linear(), evaluation=EVALUATED)
        with pytest.raises(ValueError, match="has changed since it was written"):
            run(tmp_path / "next", init_from=str(path))
        report = replay_run(copied_run, model=Linear(), batches=toy_batch, evaluation=EVALUATED)
        assert not report.is_same
        assert not report.differences
        assert str(report).startswith(f"not as written: {path} has changed since it was written")
    # Another run's whole file, or one without a digest, is not the one that the run wrote.
    run(tmp_path / "other", seed=5)
    for content in ((tmp_path / "other/model.safetensors").read_bytes(), without_digest(path, tmp_path)):
        with (
            holding(path, content),
            pytest.raises(ValueError, match=r"is not what the run wrote at its end .*--weights FILE"),
        ):
            evaluate(copied_run, model=Linear(), evaluation=EVALUATED)


def test_the_digest_of_weights_is_of_their_content_and_not_of_the_file(copied_run, tmp_path):
    path = copied_run / "model.safetensors"
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
    save_file(dict(reversed(load_file(path).items())), tmp_path / "saved.safetensors", metadata)
    assert read_weights(tmp_path / "saved.safetensors").digest == read_weights(path).digest
    end = read_result(copied_run)
    assert end is not None
    assert read_weights(path).digest == end.weights_digest


def test_a_change_of_any_file_of_a_snapshot_is_detected(copied_run):
    folder = copied_run / "snapshots/6"
    for file in sorted(each for each in folder.rglob("*") if each.is_file()):
        content = file.read_bytes()
        with holding(file, content[: len(content) // 2]):
            told: list[str] = []
            with pytest.raises(AssertionError, match="was traced"):
                resume(copied_run, model=Untraced(), notify=told.append)
            is_passed_over = any(line.startswith("warning: the snapshot ") for line in told)
            # Orbax keeps other files that nothing is read from; every array has its digest in the facts.
            is_needed = str(file.relative_to(folder)).startswith(("facts/metadata", "state/manifest.ocdbt", "state/d/"))
            assert is_passed_over or not is_needed, file
            assert bool(check_files(copied_run).faults) == is_passed_over


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["config.json", "result.json", "model.safetensors", *LOGS])
def test_a_pipe_or_a_device_in_the_place_of_a_file_is_an_error_at_once(copied_run, name):
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (copied_run / name).unlink()
        make(copied_run / name)
        if name != "model.safetensors":  # which a resume does not read
            assert name in refusal(copied_run)
        (fault,) = [each for each in check_files(copied_run).faults if name in each]
        assert "a pipe, not a file" in fault or "a device, not a file" in fault


@pytest.mark.parametrize("name", ["config.json", "result.json"])
def test_records_that_are_nested_deep_or_endless_are_an_error(copied_run, name):
    (copied_run / name).write_text("[" * 200_000)
    assert name in refusal(copied_run)
    with (copied_run / name).open("wb") as file:
        file.truncate(3 << 30)
    assert "larger than the 16,777,216 bytes allowed" in refusal(copied_run)


@pytest.mark.timeout(60)
def test_tail_run_does_not_wait_for_a_pipe(tmp_path):
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
    with pytest.raises(ValueError, match=r"config\.json cannot be read \(.*it is a pipe, not a file"):
        read_recorded(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("model", value) for value in (3, 1.5, [0], True, None)),
        *(("num_classes", value) for value in ("x", 0, -1, 2**64, 10**4000, 1.5, True, [3])),
        *((name, value) for name in ("height", "width", "num_devices", "num_processes") for value in ("8", 2**64)),
        *((name, value) for name in ("mean", "std") for value in ("0", [0.5], [0.5, 0.5, "x"], [2**64] * 3)),
    ],
)
def test_resolved_values_that_no_run_records_are_refused_before_they_are_used(copied_run, name, value):
    path = copied_run / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(sealed({**values, "resolved": values["resolved"] | {name: value}})))
    with pytest.raises(ValueError, match=rf"config.json cannot be read \(resolved {name} must be "):
        read_recorded(copied_run)


@pytest.mark.parametrize(
    "change",
    [
        *({"resolved": {"device": value}} for value in (None, 3)),
        *({"resolved": {"num_devices": value}} for value in (None, [1])),
        {"earlier": [{"until_step": 1, "settings": {}, "versions": [1]}]},
        *(
            {"earlier": [{"until_step": 1, "settings": {}, "topology": value}]}
            for value in (None, 3, {}, {"device": 3})
        ),
    ],
)
def test_devices_that_no_run_records_are_refused_with_the_record(copied_run, change):
    path = copied_run / "config.json"
    values = json.loads(path.read_text())
    if "resolved" in change:
        change = {"resolved": values["resolved"] | change["resolved"]}
    path.write_text(json.dumps(sealed(values | change)))
    with pytest.raises(ValueError, match=r"config.json cannot be read \(.*: restore the file as run-train wrote it"):
        read_recorded(copied_run)
