"""scripts/torture itself: every verdict is reachable, and correct and wrong results are told apart.

The campaign is not run here; `.ci/run` runs it.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from scripts.torture_campaign import __main__ as cli
from scripts.torture_campaign import damage, image_files
from scripts.torture_campaign.case import Case, Judgement, Verdict, judge_exit
from scripts.torture_campaign.commands import SERVER, Finished, Running
from scripts.torture_campaign.image_oracle import decode
from scripts.torture_campaign.images import judge_crop
from scripts.torture_campaign.oracle import read_logs, read_split, read_tree
from scripts.torture_campaign.pack_oracle import SoundPack
from scripts.torture_campaign.packs import EXEMPTIONS, PACK_FAULTS, judge_losses, judge_read, judge_verify
from scripts.torture_campaign.runs import compare_records, judge_evaluation, judge_live, judge_replay, records_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the campaign needs Linux")

ROOT = Path(__file__).parents[1]
SHARD = "train/pixels/c/0/0/0"
WITHOUT_CHECKSUMS, _, SPLIT_GONE, SPLIT_RENAMED = EXEMPTIONS


def finished(name="read-pack", code=0, out="", err="", **more):
    return Finished((name,), code, out.encode(), err.encode(), 1.0, 100.0, **more)


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
    return SoundPack("raw", pack, {split: read_split(pack / split) for split in ("train", "val")}, read_tree(pack))


@pytest.fixture
def pack(sound, tmp_path):
    return Path(shutil.copytree(sound.folder, tmp_path / "pack"))


def test_each_verdict_is_reached_by_a_command_with_that_fault(tmp_path):
    expected = {
        "hang": (Verdict.HANG, "did not end within"),
        "crash": (Verdict.CRASH, "signal 7"),
        "memory": (Verdict.CRASH, "MB"),
        "too-much-memory": (Verdict.TRACEBACK, "Traceback"),
        "traceback": (Verdict.TRACEBACK, "Traceback"),
        "escape": (Verdict.WRONG, "control character"),
        "escape-byte": (Verdict.WRONG, "control character"),
        "refuse": (Verdict.DETECTED, "not valid JSON"),
        "vague": (Verdict.WRONG, "does not name a damaged file"),
        "silent": (Verdict.WRONG, "without a message"),
        "strange-code": (Verdict.WRONG, "exit code 7"),
        "nothing": (None, ""),
        "at-exit": (Verdict.CRASH, "signal 6"),
    }
    SERVER.set_forkserver_preload(["tests.planted_command"])  # which needs nothing of the project
    running = {}
    for fault in expected:
        (tmp_path / fault).mkdir()
        running[fault] = Running(["tests.planted_command", fault], tmp_path / fault)
    for fault, (verdict, reason) in reversed(expected.items()):
        limit_s = 0.1 if fault == "hang" else 60.0  # from its start, which is the first
        ended = judge_exit(running[fault].wait(limit_s), names=["manifest.json"], max_mb=450.0)
        assert (ended and ended.verdict, reason in (ended.why if ended else "")) == (verdict, True), (fault, ended)


def read_as(sound, dest, changes=(), without=()):
    """Write what `read-pack` writes of the sound pack, with changes; return the file."""
    found = {
        split: {what: [] if split in without else list(enumerate(values)) for what, values in contents.items()}
        for split, contents in sound.contents.items()
    }
    for split, what, index, value in changes:
        found[split][what][index] = (index, value)
    dest.write_text(json.dumps(found))
    return dest


def test_wrong_images_and_labels_of_a_reader_are_found(sound, pack, tmp_path):
    def judged(answer, *changes, without=()):
        return judge_read(answer, read_as(sound, tmp_path / "read", changes, without), sound, pack)

    refused, wrong = finished(code=2, err=f"read-pack: {SHARD} is damaged"), ("val", "images", 0, "0" * 64)
    assert judged(finished()).verdict is Verdict.HARMLESS
    assert "1 wrong images of val" in judged(finished(), wrong).why
    assert "1 wrong labels of val" in judged(finished(), ("val", "labels", 1, 9)).why
    assert judged(refused, without=["train"]).verdict is Verdict.DETECTED
    # A refusal of one split does not excuse wrong pixels of the other.
    assert judged(refused, wrong, without=["train"]).verdict is Verdict.WRONG
    assert "read as 0 images" in judged(finished(), without=["val"]).why


def test_only_pixels_without_checksums_may_be_wrong(sound, pack, tmp_path):
    bare = SoundPack("bare", sound.folder, sound.contents, sound.tree)
    dest = read_as(sound, tmp_path / "read", [("train", "images", 2, "0" * 64)])
    (pack / SHARD).write_bytes(b"?")
    assert judge_read(finished(), dest, bare, pack).why == WITHOUT_CHECKSUMS
    assert judge_read(finished(), dest, sound, pack).verdict is Verdict.WRONG
    (pack / "train/labels/c/0").write_bytes(b"?")
    assert judge_read(finished(), dest, bare, pack).verdict is Verdict.WRONG


@pytest.mark.parametrize("key", ["train/manifest.json", "val/failures.jsonl", "train/labels/zarr.json"])
def test_a_verification_that_passes_a_changed_file_is_wrong(sound, pack, key):
    passed = finished("inspect-shards", out="train: every byte is as it was packed.")
    (pack / "notes.txt").write_text("mine")
    verdicts = [judge_verify(passed, sound, pack).verdict]
    damage.flip_bit(data := bytearray((pack / key).read_bytes()), random.Random(0))
    (pack / key).write_bytes(data)
    verdicts.append(judge_verify(passed, sound, pack).verdict)
    damage.replace(pack / key, "pipe")
    verdicts.append(judge_verify(passed, sound, pack).verdict)
    assert verdicts == [Verdict.HARMLESS, Verdict.WRONG, Verdict.WRONG]


def test_missing_and_renamed_splits_are_documented(sound, pack):
    passed = finished("inspect-shards")
    PACK_FAULTS["splits-swapped"](pack, random.Random(0))
    reasons = [judge_verify(passed, sound, pack).why]
    PACK_FAULTS["splits-swapped"](pack, random.Random(0))
    shutil.rmtree(pack / "val")
    assert [*reasons, judge_verify(passed, sound, pack).why] == [SPLIT_RENAMED, SPLIT_GONE]
    (pack / "train/manifest.json").unlink()
    assert judge_verify(passed, sound, pack).verdict is Verdict.WRONG


LOSSES = [(step, 1 / step, 0.1) for step in (1, 2, 3)]
EVALUATION = (3, 4, 0.5, 1.0, 0.25)


def test_recorded_losses_must_equal_those_on_the_sound_pack(sound):
    def verdict(losses, answer, evaluations=(EVALUATION,)):
        found, whole = ({"loss.jsonl": list(one), "eval.jsonl": list(other)}
                        for one, other in ((losses, evaluations), (LOSSES, [EVALUATION])))  # fmt: skip
        return judge_losses(answer, found, whole, sound, sound.folder).verdict

    done, refused = finished("run-train"), finished("run-train", 2, err=f"run-train: {SHARD} is damaged")
    assert verdict(LOSSES, done) is Verdict.HARMLESS
    assert verdict(LOSSES[:2], done) is Verdict.WRONG
    assert verdict(LOSSES, done, ()) is Verdict.WRONG
    assert verdict(LOSSES, finished("run-train", out="val is not finished: no evaluation"), ()) is Verdict.HARMLESS
    assert verdict(LOSSES, done, [(*EVALUATION[:4], 0.75)]) is Verdict.WRONG
    assert verdict(LOSSES[:1], refused, ()) is Verdict.DETECTED
    assert verdict([(1, 2.0, 0.1)], refused, ()) is Verdict.WRONG


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    save_file({"weight": np.arange(6, dtype=np.float32)}, folder / "model.safetensors")
    lines = [dict(zip(("step", "loss", "lr"), line, strict=True)) for line in LOSSES]
    (folder / "loss.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "eval.jsonl").write_text('{"step": 3, "num_images": 4, "top1": 0.5, "top5": 1.0, "loss": 0.25}\n')
    return folder


def test_a_wrong_weight_loss_evaluation_or_accuracy_of_a_run_is_found(run):
    sound = records_of(run)
    assert compare_records("run-train", sound, run).verdict is Verdict.HARMLESS
    accuracies = [finished("run-eval", out=f'{{"top1": {top1}, "time": 7}}') for top1 in (0.5, 0.6)]
    verdicts = [judge_evaluation(each, {"top1": 0.5}, run).verdict for each in accuracies]
    assert verdicts == [Verdict.HARMLESS, Verdict.WRONG]
    same = finished("verify-run", out="the same bits: 3 losses")
    assert judge_replay(same, sound, run).verdict is Verdict.HARMLESS
    text = (run / "loss.jsonl").read_text()
    (run / "loss.jsonl").write_text(text.replace("0.5", "0.75"))
    assert "line 2" in compare_records("run-train", sound, run).why
    assert judge_replay(same, sound, run).verdict is Verdict.WRONG
    (run / "loss.jsonl").write_text(text)
    save_file({"weight": np.zeros(6, np.float32)}, run / "model.safetensors")
    assert "weights differ" in compare_records("run-train", sound, run).why
    (run / "model.safetensors").write_bytes(b"?")
    assert "unreadable" in compare_records("run-train", sound, run).why


def test_a_run_that_ignores_the_loss_of_its_folder_or_leaves_no_weights_is_wrong(run):
    refused = finished("run-train", 1, err=f"run-train: the run folder {run} must stay as it is")
    assert judge_live(refused, run).verdict is Verdict.DETECTED
    assert judge_live(finished("run-train"), run).verdict is Verdict.WRONG
    (run / "model.safetensors").unlink()
    assert "left no readable weights" in judge_live(refused, run).why


def test_a_log_that_is_not_json_has_lines_without_values(run):
    (run / "loss.jsonl").write_bytes(b'{"step": 1}\n[]\n\xff\n' + b"[" * 100_000 + b'\n{"step": 2')
    assert read_logs(run)["loss.jsonl"] == [(1, None, None), *[(None, None, None)] * 3]


def test_images_are_compared_with_pillow(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    reference = decode(tmp_path / "a.png", 8)
    assert judge_crop(pixels, reference).verdict is Verdict.HARMLESS
    assert "levels" in judge_crop(pixels ^ 8, reference).why
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes()[:100])
    assert judge_crop(pixels, decode(tmp_path / "b.png", 8)).verdict is Verdict.WRONG
    text = image_files.png_chunk(b"zTXt", b"a\0\0" + b"?") * 3
    image_files.write_png(tmp_path / "c.png", 8, 8, row=bytes(24), before=text)
    assert decode(tmp_path / "c.png", 8) == bytes(192).hex()


def test_the_same_seed_draws_the_same_faults(sound, tmp_path):
    def faults(seed):
        applied = []
        for number in range(40):
            pack = Path(shutil.copytree(sound.folder, tmp_path / f"{seed}-{number}-{len(list(tmp_path.iterdir()))}"))
            draw = Case("packs", f"random-{number}", seed).draw()
            key = draw.choice(sorted(sound.tree))
            applied.append((key, damage.damage(pack / key, draw), image_files.draw_image_fault(draw)))
        return applied

    assert faults(1) == faults(1) != faults(2)


def test_each_change_of_json_is_a_change(sound):
    text = sound.tree["train/manifest.json"].decode()
    for name, change in damage.JSON_CHANGES.items():
        assert change(text, random.Random(0)) != text.encode(), name


def test_the_table_counts_the_worst_verdicts_and_only_failures_fail_the_campaign(tmp_path):
    class Planted:
        heavy = ("slow",)

        def prepare(self, trial):
            raise AssertionError

        def names(self, count):
            return []

        def attempt(self, trial):
            for verdict in trial.case.name.split(","):
                trial.judge(Judgement("read-pack", Verdict(verdict)))

    def table_of(*names):
        kinds: dict[str, Any] = {"packs": Planted()}
        campaign = cli.Campaign(tmp_path / names[-1], kinds)
        campaign.base.mkdir()
        assert campaign.run([Case("packs", name, 0) for name in names], deadline_s=float("inf")) == 0
        return campaign.table().splitlines()[1].split(), campaign.has_failed

    assert table_of("harmless,detected", "documented") == (["packs", "2", "0", "1", "1", "0", "0", "0", "0"], False)
    for verdict in ("wrong", "traceback", "hang", "crash", "no-verdict"):
        assert table_of("detected", f"detected,{verdict}")[1], verdict


def test_a_case_is_repeated_by_its_id_and_shown():
    command = [sys.executable, "-m", "scripts.torture_campaign", "--case", "archives/leads-out"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(words in done.stdout for words in ("$ preprocess-imagenet", "DETECTED", "1 cases"))


def test_wrong_usage_is_refused(capsys):
    for arguments in (["--only", "pakcs"], ["--case", "pakcs/raw:pipe"], ["--keep", str(ROOT)]):
        with pytest.raises(SystemExit) as ended:
            cli.parse_arguments(arguments)
        assert ended.value.code == 2
        assert "must be" in capsys.readouterr().err.replace("must begin with", "must be")
