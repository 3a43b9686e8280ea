"""scripts/torture itself: every verdict is reachable, and correct and wrong results are told apart.

The campaign is not run here; `.ci/run` runs it.
"""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from scripts.torture_campaign import cli, file_faults, image_faults, json_faults
from scripts.torture_campaign.case import Case, Outcome, Trial
from scripts.torture_campaign.commands import Commands, CommandServer, Finished
from scripts.torture_campaign.documented import PIXELS_WITHOUT_CHECKSUM
from scripts.torture_campaign.image_kind import _judge_crop
from scripts.torture_campaign.image_reference import decode
from scripts.torture_campaign.oracle import columns, read_split, read_tree, read_weights
from scripts.torture_campaign.pack_judging import judge_losses, judge_reader, judge_verify
from scripts.torture_campaign.report import is_clean, table
from scripts.torture_campaign.run_kind import compare_with_sound_run, judge_evaluation, judge_live, judge_replay
from scripts.torture_campaign.sound_packs import SoundPack, Training
from scripts.torture_campaign.sound_run import SoundRun
from scripts.torture_campaign.verdict import Judgement, Verdict, judge_exit

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the campaign needs Linux")

CASE = Case("packs", "random-3", 0)


def finished(name="read-pack", code=0, out="", err="", **more):
    return Finished((name,), code, out.encode(), err.encode(), 1.0, 100.0, **more)


class FakeCommands(Commands):
    """Commands that return a fixed result after a call of `does`."""

    def __init__(self, answer, does=lambda command: None):
        super().__init__()
        self.answer, self.does = answer, does

    def run(self, command, folder, *, timeout_s, environment=None):
        self.does(command)
        return self.answer


def trial_of(tmp_path, answer, does=lambda command: None):
    folder = tmp_path / "trial"
    folder.mkdir()
    return Trial(CASE, folder, FakeCommands(answer, does))


@pytest.fixture(scope="module")
def server():
    """Return a command server that has imported the packing commands."""
    server = CommandServer("packing")
    yield server
    server.close()


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Return a small pack with both splits, packed by the project and read by zarr."""
    folder = tmp_path_factory.mktemp("sound")
    random_ = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 4)):
        for number in range(count):
            path = folder / "source" / split / f"class-{number % 2}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random_.integers(0, 256, (9, 8, 3)).astype(np.uint8)).save(path)
    pack = folder / "pack"
    code = "from loopfeed.preprocess.commands.cli import main; main()"
    command = [sys.executable, "-c", code, str(folder / "source"), str(pack), "--size", "8", "--shard-images", "4"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    contents = {split: read_split(pack / split) for split in ("train", "val")}
    return SoundPack("raw", pack, True, contents, read_tree(pack), None)


@pytest.fixture
def pack(sound, tmp_path):
    return Path(shutil.copytree(sound.folder, tmp_path / "pack"))


def writes_result(sound, **changes):
    """Return a function that writes the result of reading the sound pack, with changes."""

    def write(command):
        found: dict[str, dict[str, Any]] = {}
        for split, each in sound.contents.items():
            images, labels = (list(map(list, enumerate(values))) for values in (each.images, each.labels))
            found[split] = {"images": images, "labels": labels}
        for (split, name), (place, value) in changes.get("at", {}).items():
            found[split][name][place][1] = value
        for split in changes.get("without", ()):
            found[split] = {"images": [], "labels": [], "error": "refused"}
        Path(command[2]).write_text(json.dumps(found))

    return write


@pytest.mark.parametrize(
    ("fault", "verdict", "reason"),
    [
        ("hang", Verdict.HANG, "did not end within"),
        ("crash", Verdict.CRASH, "signal 7"),
        ("memory", Verdict.CRASH, "MB"),
        ("too-much-memory", Verdict.TRACEBACK, "Traceback"),
        ("traceback", Verdict.TRACEBACK, "Traceback"),
        ("escape", Verdict.WRONG, "control character"),
        ("escape-byte", Verdict.WRONG, "control character"),
        ("refuse", Verdict.DETECTED, "not valid JSON"),
        ("vague", Verdict.WRONG, "does not name a damaged file"),
        ("silent", Verdict.WRONG, "without a message"),
        ("strange-code", Verdict.WRONG, "exit code 7"),
    ],
)
def test_each_verdict_is_reached_by_a_command_with_that_fault(server, tmp_path, fault, verdict, reason):
    folder = tmp_path / "cwd"
    folder.mkdir()
    running = server.start(["tests.planted_command", fault], folder)
    ended = judge_exit(running.wait(2.0 if fault == "hang" else 60.0), names=["manifest.json"], max_mb=300.0)
    assert ended is not None
    assert ended.verdict is verdict
    assert reason in ended.why


def test_wrong_images_and_labels_of_a_reader_are_found(sound, pack, tmp_path):
    def verdict(number, answer, **changes):
        trial = trial_of(tmp_path / str(number), answer, writes_result(sound, **changes))
        judge_reader(trial, sound, pack)
        return trial.judgements[0]

    for number in range(6):
        (tmp_path / str(number)).mkdir()
    refused = finished(code=2, err="read-pack: train/pixels/c/0/0/0 is damaged")
    assert verdict(0, finished()).verdict is Verdict.HARMLESS
    assert "pixels of 1 images" in verdict(1, finished(), at={("train", "images"): (2, "0" * 64)}).why
    assert "wrong labels" in verdict(2, finished(), at={("val", "labels"): (1, 9)}).why
    assert verdict(3, refused, without=["train"]).verdict is Verdict.DETECTED
    # A refusal of one split does not excuse wrong pixels of the other.
    wrong = {("val", "images"): (0, "0" * 64)}
    assert verdict(4, refused, without=["train"], at=wrong).verdict is Verdict.WRONG
    assert "read as 0 images" in verdict(5, finished(), without=["val"]).why


def test_only_pixels_without_checksums_may_be_wrong(sound, pack, tmp_path):
    bare = SoundPack("bare", sound.folder, False, sound.contents, sound.tree, None)
    wrong = writes_result(sound, at={("train", "images"): (2, "0" * 64)})
    (pack / "train/pixels/c/0/0/0").write_bytes(b"?")
    for number, (base, verdict) in enumerate([(bare, Verdict.DOCUMENTED), (sound, Verdict.WRONG)]):
        (tmp_path / str(number)).mkdir()
        trial = trial_of(tmp_path / str(number), finished(), wrong)
        judge_reader(trial, base, pack)
        assert trial.judgements[0].verdict is verdict
    (pack / "train/labels/c/0").write_bytes(b"?")
    trial = trial_of(tmp_path, finished(), wrong)
    judge_reader(trial, bare, pack)
    assert trial.judgements[0].verdict is Verdict.WRONG
    assert PIXELS_WITHOUT_CHECKSUM.reason


@pytest.mark.parametrize("key", ["train/manifest.json", "val/failures.jsonl", "train/labels/zarr.json"])
def test_a_verification_that_passes_a_changed_file_is_wrong(sound, pack, tmp_path, key):
    passed = finished("inspect-shards", out="train: every byte is as it was packed.")
    trial = trial_of(tmp_path, passed)
    judge_verify(trial, sound, pack)
    file_faults.flip_bit(pack / key, random.Random(0))
    judge_verify(trial, sound, pack)
    file_faults.PLACE_FAULTS["pipe"](pack / key, random.Random(0))
    judge_verify(trial, sound, pack)
    assert [each.verdict for each in trial.judgements] == [Verdict.HARMLESS, Verdict.WRONG, Verdict.WRONG]


def test_a_file_beside_the_splits_and_a_link_to_a_copy_are_not_damage(sound, pack, tmp_path):
    (pack / "notes.txt").write_text("mine")
    shard, copy = pack / "train/pixels/c/0/0/0", tmp_path / "copy"
    shard.rename(copy)
    shard.symlink_to(copy)
    trial = trial_of(tmp_path, finished("inspect-shards"))
    judge_verify(trial, sound, pack)
    assert trial.judgements[0].verdict is Verdict.HARMLESS


def test_recorded_losses_must_equal_those_on_the_sound_pack(sound, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    lines = [{"step": step, "loss": 1 / step, "lr": 0.1} for step in (1, 2, 3)]
    evaluation = {"step": 3, "num_images": 4, "top1": 0.5, "top5": 1.0, "loss": 0.25}
    sound_training = Training(
        3, 8, tuple((e["step"], e["loss"], e["lr"]) for e in lines), (tuple(evaluation.values()),)
    )

    def verdict(losses, answer, evaluations=(evaluation,)):
        (run / "loss.jsonl").write_text("".join(json.dumps(line) + "\n" for line in losses))
        (run / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evaluations))
        return judge_losses(answer, sound.folder, run, sound_training, sound).verdict

    done, refused = finished("run-train"), finished("run-train", 2, err="run-train: train/pixels/c/0/0/0 is damaged")
    assert verdict(lines, done) is Verdict.HARMLESS
    assert verdict(lines[:2], done) is Verdict.WRONG
    assert verdict(lines, done, ()) is Verdict.WRONG
    assert verdict(lines, finished("run-train", out="val is not finished: no evaluation"), ()) is Verdict.HARMLESS
    assert verdict(lines, done, [evaluation | {"top1": 0.75}]) is Verdict.WRONG
    assert verdict(lines[:1], refused, ()) is Verdict.DETECTED
    assert verdict([lines[0] | {"loss": 2.0}], refused, ()) is Verdict.WRONG


@pytest.fixture
def run(tmp_path):
    from safetensors.numpy import save_file

    folder = tmp_path / "run"
    folder.mkdir()
    save_file({"weight": np.arange(6, dtype=np.float32)}, folder / "model.safetensors")
    lines = [{"step": step, "loss": 1 / step, "lr": 0.1} for step in (1, 2, 3)]
    (folder / "loss.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "eval.jsonl").write_text('{"step": 3, "num_images": 4, "top1": 0.5, "top5": 1.0, "loss": 0.25}\n')
    return folder


@pytest.fixture
def run_base(run, tmp_path):
    folder = Path(shutil.copytree(run, tmp_path / "sound-run"))
    losses = columns(run / "loss.jsonl", "step", "loss", "lr")
    evaluations = columns(run / "eval.jsonl", "step", "num_images", "top1", "top5", "loss")
    weights = read_weights(run / "model.safetensors")
    return SoundRun(folder, folder, read_tree(run), losses, evaluations, weights, {"top1": 0.5})


def test_a_resume_with_different_weights_or_records_is_wrong(run, run_base):
    from safetensors.numpy import save_file

    assert compare_with_sound_run(run_base, run).verdict is Verdict.HARMLESS
    text = (run / "loss.jsonl").read_text()
    (run / "loss.jsonl").write_text(text.replace('"loss": 0.5', '"loss": 0.6'))
    assert compare_with_sound_run(run_base, run).verdict is Verdict.WRONG
    (run / "loss.jsonl").write_text(text)
    save_file({"weight": -np.arange(6, dtype=np.float32)}, run / "model.safetensors")
    assert "the weights differ" in compare_with_sound_run(run_base, run).why


def test_a_wrong_accuracy_and_a_replay_that_passes_an_altered_record_are_wrong(run, run_base, tmp_path):
    answers = [
        finished("run-eval", out='{"top1": 0.5, "time": 7}'),
        finished("run-eval", out='{"top1": 0.6, "time": 7}'),
    ]
    verdicts = []
    for number, answer in enumerate(answers):
        (tmp_path / str(number)).mkdir()
        trial = trial_of(tmp_path / str(number), answer)
        judge_evaluation(trial, run_base, run)
        verdicts.append(trial.judgements[0].verdict)
    assert verdicts == [Verdict.HARMLESS, Verdict.WRONG]
    trial = trial_of(tmp_path, finished("verify-run", out="the same bits: 3 losses"))
    judge_replay(trial, run_base, run)
    (run / "loss.jsonl").write_text((run / "loss.jsonl").read_text().replace("1.0", "1.5"))
    judge_replay(trial, run_base, run)
    assert [each.verdict for each in trial.judgements] == [Verdict.HARMLESS, Verdict.WRONG]


def test_a_run_that_ignores_the_loss_of_its_folder_or_leaves_no_weights_is_wrong(run):
    refused = finished("run-train", 1, err=f"run-train: the run folder {run} must stay as it is")
    assert judge_live(refused, run).verdict is Verdict.DETECTED
    assert judge_live(finished("run-train"), run).verdict is Verdict.WRONG
    (run / "model.safetensors").unlink()
    assert "left no readable weights" in judge_live(refused, run).why


def test_images_are_compared_with_pillow(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    reference = decode(tmp_path / "a.png", 8)
    assert _judge_crop(pixels, reference).verdict is Verdict.HARMLESS
    assert "levels" in _judge_crop(pixels ^ 8, reference).why
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes()[:100])
    assert _judge_crop(pixels, decode(tmp_path / "b.png", 8)).verdict is Verdict.WRONG
    image_faults.write_png(
        tmp_path / "c.png", 8, 8, bits=8, colour=2, row=bytes(24),
        before=image_faults.png_chunk(b"zTXt", b"a\0\0" + b"?") * 3,
    )  # fmt: skip
    assert decode(tmp_path / "c.png", 8) == bytes(192).hex()


def test_the_same_seed_draws_the_same_faults(sound, tmp_path):
    def faults(seed):
        applied = []
        for number in range(12):
            pack = Path(shutil.copytree(sound.folder, tmp_path / f"{seed}-{number}-{len(list(tmp_path.iterdir()))}"))
            draw = Case("packs", f"random-{number}", seed).draw()
            key = draw.choice(sorted(sound.tree))
            fault = draw.choice(json_faults.JSON_FAULTS) if key.endswith(".json") else file_faults.draw_file_fault(draw)
            applied.append((key, fault(pack / key, draw), image_faults.draw_image_fault(draw)))
            assert read_tree(pack) != sound.tree
        return applied

    assert faults(1) == faults(1) != faults(2)


def test_the_table_counts_the_worst_verdicts_and_only_failures_fail_the_campaign():
    def outcome(*verdicts):
        judgements = tuple(Judgement("read-pack", verdict) for verdict in verdicts)
        return Outcome(CASE, "fault", max(judgements, key=lambda each: each.verdict.severity), judgements)

    good = [outcome(Verdict.HARMLESS, Verdict.DETECTED), outcome(Verdict.DOCUMENTED)]
    assert is_clean(good)
    assert table(good).splitlines()[1].split() == ["packs", "2", "1", "0", "1", "0", "0", "0", "0"]
    for verdict in (Verdict.WRONG, Verdict.TRACEBACK, Verdict.HANG, Verdict.CRASH):
        assert not is_clean([*good, outcome(Verdict.DETECTED, verdict)])


def test_a_case_is_repeated_by_its_id_and_shown(capsys):
    assert cli.main(["--case", "archives/leads-out"]) == 0
    output = capsys.readouterr().out
    assert "$ preprocess-imagenet" in output
    assert "DETECTED" in output
    assert "1 cases" in output


def test_wrong_usage_is_refused(capsys):
    for arguments in (["--only", "pakcs"], ["--case", "pakcs/raw:pipe"]):
        with pytest.raises(SystemExit) as ended:
            cli.parse_arguments(arguments)
        assert ended.value.code == 2
        assert "packs, runs, images, archives, kills" in capsys.readouterr().err
