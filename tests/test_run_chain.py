"""A run folder whose files do not belong together: no launch continues it, nothing evaluates it, the file is named."""

import json
import re
import shutil
from dataclasses import replace

import pytest

from loopfeed import evaluate, replay_run, train
from loopfeed.engine.records.digests import sealed
from loopfeed.engine.records.recorded_run import read_recorded
from loopfeed.engine.records.snapshot import read_snapshot
from loopfeed.engine.replay.checked_files import check_files
from tests.chained_run import EVALUATED, LOGS, STEPS, holding, make_older, refusal, resume, run, without_digest
from tests.fake_source import fake_source, pack
from tests.toy import Linear, toy_batch, toy_config


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


def test_every_change_of_the_settings_is_refused(copied_run):
    path = copied_run / "config.json"
    text = path.read_bytes()
    everywhere = list(places(json.loads(text)))
    assert {("config", "seed"), ("earlier", 0, "until_step"), ("continues", 0), ("sha256",)} <= set(everywhere)
    for place in everywhere:
        with holding(path, changed(text, place)):
            assert "config.json has changed since run-train wrote it" in refusal(copied_run), place
            if len(place) > 1 and place[-1] != "seed":  # an evaluation makes the same check
                continue
            with pytest.raises(ValueError, match="give its option to train\\(…, resume=True\\)"):
                evaluate(copied_run, model=Linear(), evaluation=EVALUATED)


@pytest.mark.parametrize("missing", [["sha256"], ["continues"], ["continues", "sha256"]])
def test_settings_that_lost_their_digest_are_refused(copied_run, missing):
    path = copied_run / "config.json"
    values = {key: value for key, value in json.loads(path.read_text()).items() if key not in missing}
    path.write_text(json.dumps(values))
    assert f"{path} " in refusal(copied_run)


def test_settings_of_another_run_or_of_an_earlier_launch_are_refused(copied_run, tmp_path):
    path = copied_run / "config.json"
    before = json.loads(path.read_text())
    run(tmp_path / "other")
    shutil.copy(tmp_path / "other/config.json", path)
    refused = (
        rf"config\.json and {copied_run}/snapshots/6 are not of the same run: .* Restore it or, if the second is of"
    )
    assert re.search(refused, refusal(copied_run))
    (fault,) = check_files(copied_run).faults
    assert "config.json and " in fault
    # As a backup of the first launch's would be.
    first = {**before, "continues": [], "sha256": ""}
    path.write_text(json.dumps(sealed({key: value for key, value in first.items() if key != "sha256"})))
    assert "snapshots/6 are not of the same run" in refusal(copied_run)


@pytest.mark.parametrize("left", ["result", "snapshots", "the snapshot before"])
def test_settings_of_another_run_are_not_evaluated_with(copied_run, tmp_path, left):
    if left != "result":
        (copied_run / "result.json").unlink()
    if left == "the snapshot before":
        (copied_run / "snapshots/6/facts/metadata").write_text("damaged")
    assert evaluate(copied_run, model=Linear(), evaluation=EVALUATED).record.step == STEPS
    run(tmp_path / "other", seed=5)
    shutil.copy(tmp_path / "other/config.json", copied_run / "config.json")
    with pytest.raises(ValueError, match=r"config\.json and \S+ are not of the same run"):
        evaluate(copied_run, model=Linear(), evaluation=EVALUATED)


def test_weights_without_a_digest_are_not_those_of_a_run_that_writes_one(copied_run, tmp_path):
    path = copied_run / "model.safetensors"
    path.write_bytes(without_digest(path, tmp_path))
    (copied_run / "result.json").unlink()
    with pytest.raises(ValueError, match=r"must have a digest \(sha256\), .* but has none.*--weights FILE"):
        evaluate(copied_run, model=Linear(), evaluation=EVALUATED)


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
        assert "has changed since" in refusal(tmp_path)
    assert refusal(tmp_path) == ""


def test_a_killed_run_is_checked_against_its_newest_snapshot(copied_run):
    (copied_run / "result.json").unlink()
    with (copied_run / "loss.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 1.0}\n{"step"')
    assert check_files(copied_run).faults == ()
    assert refusal(copied_run) == ""
    text = (copied_run / "eval.jsonl").read_bytes()
    (copied_run / "eval.jsonl").write_bytes(text.replace(b'"top1": ', b'"top1": 1', 1))
    said = refusal(copied_run)
    assert f"or remove {copied_run}/snapshots/6 to resume from the snapshot before it" in said
    shutil.copy(copied_run / "eval.jsonl", copied_run / "changed")
    (copied_run / "eval.jsonl").write_bytes(text)
    assert refusal(copied_run) == ""


def test_every_change_of_the_result_is_refused(copied_run):
    path = copied_run / "result.json"
    text = path.read_bytes()
    for place in places(json.loads(text)):
        with holding(path, changed(text, place)):
            said = refusal(copied_run)
            assert f"{path} is not what the run wrote at its end" in said, place
            assert "or remove it to resume from the newest snapshot" in said
            (fault,) = check_files(copied_run).faults
            assert "result.json" in fault
    path.unlink()
    assert refusal(copied_run) == ""


def test_a_run_without_digests_is_recognised_and_resumed(copied_run, chained_run, tmp_path):
    make_older(copied_run, tmp_path)
    checked = check_files(copied_run)
    assert checked.faults == ()
    assert set(checked.unchecked) == {"config.json", "result.json", "model.safetensors", *LOGS}
    told: list[str] = []
    assert evaluate(copied_run, model=Linear(), evaluation=EVALUATED, notify=told.append).record.step == STEPS
    assert "(no digest: unchecked)" in told[0]
    resume(copied_run, learning_rate=0.05, steps=8, notify=told.append)
    assert "this run has no digests of its files, so changes to them cannot be detected" in told
    # From here on it has them.
    assert check_files(copied_run).faults == ()
    assert check_files(copied_run).unchecked == ()
    (copied_run / "eval.jsonl").write_bytes((chained_run / "eval.jsonl").read_bytes()[::-1])
    assert "eval.jsonl" in refusal(copied_run, steps=8)


def test_the_chain_holds_over_launches_and_lost_snapshots(copied_run):
    for steps, rate in ((7, 0.1), (9, 0.2), (9, 0.3)):
        resume(copied_run, steps=steps, learning_rate=rate)
        checked = check_files(copied_run)
        assert (checked.faults, checked.unchecked) == ((), ())
    assert len(read_recorded(copied_run).continued) == 4
    shutil.rmtree(copied_run / "snapshots/9")
    resume(copied_run, steps=9, learning_rate=0.1)
    assert check_files(copied_run).faults == ()
    report = replay_run(copied_run, model=Linear(), batches=toy_batch, evaluation=EVALUATED)
    assert report.is_same, report


def test_a_finished_run_with_other_weights_is_resumed_once_they_are_removed(copied_run, tmp_path):
    path = copied_run / "model.safetensors"
    run(tmp_path / "other", seed=5)
    shutil.copy(tmp_path / "other/model.safetensors", path)
    assert f"{path} is not what the run wrote at its end" in refusal(copied_run, steps=STEPS + 1)
    path.unlink()
    assert refusal(copied_run, steps=STEPS + 1) == ""


def test_a_split_to_evaluate_on_that_lost_its_manifest_is_named(tmp_path):
    pack(fake_source(12), tmp_path / "data")
    pack(fake_source(12, seed=1, name="val"), tmp_path / "data")
    path = tmp_path / "run"
    settings = toy_config(data=str(tmp_path / "data"), num_classes=None, steps=2, batch=4, run_dir=str(path))
    train(settings, model=Linear())
    (tmp_path / "data/val/manifest.json").unlink()
    said = r"must have a manifest.json, but .*/val has none"
    with pytest.raises(ValueError, match=said):
        evaluate(path, model=Linear())
    with pytest.raises(ValueError, match=said):
        train(replace(settings, steps=4, resume=True), model=Linear())
    with pytest.raises(ValueError, match=said):
        replay_run(path, model=Linear())


def test_a_replay_reports_what_it_checks_and_reads_the_snapshots_at_its_ends_once(chained_run, monkeypatch):
    read: list[int] = []

    def noted(folder, step):
        read.append(step)
        return read_snapshot(folder, step)

    for module in ("checked_files", "recorded_stretch"):
        monkeypatch.setattr(f"loopfeed.engine.replay.{module}.read_snapshot", noted)
    told: list[str] = []
    report = replay_run(chained_run, model=Linear(), batches=toy_batch, evaluation=EVALUATED, notify=told.append)
    assert report.is_same
    assert report.file_faults == ()
    assert (read.count(2), read.count(6)) == (1, 1)
    assert set(read) == {2, 4, 6}
    assert re.fullmatch(rf"checking the files of {chained_run} and 1 further snapshot \(0\.\d MB\)", told[0])
    assert told[1] == "files: 9 match their digests (a snapshot counts as one file)"


@pytest.mark.usefixtures("uncached_replays")
def test_a_replay_takes_its_program_from_no_cache(chained_run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert replay_run(chained_run, model=Linear(), batches=toy_batch, evaluation=EVALUATED).is_same
    assert not list(tmp_path.rglob("*-cache"))


@pytest.mark.parametrize("going", [(True, False), (False, True)])
def test_lines_of_a_launch_that_begins_or_ends_during_the_check_are_no_fault(copied_run, monkeypatch, going):
    with (copied_run / "loss.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 1.0}\n')
    answers = iter(going)
    monkeypatch.setattr("loopfeed.engine.replay.checked_files.is_locked", lambda _: next(answers))
    assert check_files(copied_run).faults == ()
