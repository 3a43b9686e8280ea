"""Verdicts on commands that read a damaged pack, by comparison with an independent reading of the sound pack."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.torture_campaign.case import Trial
from scripts.torture_campaign.commands import Finished
from scripts.torture_campaign.documented import BITS_WITHOUT_EFFECT, find_reading_exemption, find_verification_exemption
from scripts.torture_campaign.oracle import columns, read_split, read_tree
from scripts.torture_campaign.sound_packs import EVALUATION_KEYS, LOSS_KEYS, SPLITS, SoundPack, Training, train_command
from scripts.torture_campaign.verdict import Judgement, Verdict, judge_exit

READER_TIMEOUT_S = 20.0
"""Each read has a limit of 3 s, and 10 s more to find the damaged image."""
VERIFY_TIMEOUT_S = 15.0
TRAINING_TIMEOUT_S = 60.0
_NAMES = ("manifest.json", "failures.jsonl", "zarr.json", "pixels", "labels", "checksums", "train", "val")

_WEAKER_CLAIM = "every pixel and label is as it was packed"
# The message that a training must print about a val split that it cannot evaluate on.
_WITHOUT_EVALUATION = re.compile(
    r"\bval\b.*\b(?:not|no|un\w+|without|missing|damaged)\b|\b(?:no|not|without)\b.*\bval\b"
)


def changed_files(base: SoundPack, pack: Path) -> list[str]:
    """Return the files of a pack that differ from the sound pack, including missing and added ones."""
    tree = read_tree(pack)
    return sorted(key for key in {*tree, *base.tree} if tree.get(key) != base.tree.get(key))


def names_of(pack: Path) -> tuple[str, ...]:
    """Return the names of which a message about a pack must contain one."""
    return (str(pack), *_NAMES)


def judge_reader(trial: Trial, base: SoundPack, pack: Path) -> None:
    """Read every image by the public reader and compare."""
    dest = trial.folder / "read.json"
    finished = trial.run(["read-pack", str(pack), str(dest)], timeout_s=READER_TIMEOUT_S)
    trial.judge(judge_read(judge_pack_exit(finished, pack), dest, base, read_tree(pack)))


def judge_pack_exit(finished: Finished, pack: Path, refusals: tuple[int, ...] = (2,)) -> Judgement | None:
    """Judge the exit of a command on a pack."""
    return judge_exit(finished, names=names_of(pack), refusals=refusals)


def judge_read(ended: Judgement | None, dest: Path, base: SoundPack, tree: dict[str, bytes]) -> Judgement:
    """Judge the reader's output: an image or label that differs from the sound pack is wrong in any case."""
    if ended is not None and ended.verdict is not Verdict.DETECTED:
        return ended
    found = json.loads(dest.read_text(encoding="utf-8"))
    if wrong := _describe_differences(found, base):
        if exemption := find_reading_exemption(tree, base.tree, has_checksums=base.has_checksums):
            return Judgement("read-pack", Verdict.DOCUMENTED, exemption.name)
        return Judgement("read-pack", Verdict.WRONG, wrong)
    if ended is not None:
        return ended
    for split in SPLITS:
        if len(found[split]["images"]) != len(base.contents[split].images):
            return Judgement("read-pack", Verdict.WRONG, f"{split} read as {len(found[split]['images'])} images")
    return Judgement("read-pack", Verdict.HARMLESS)


def _describe_differences(found: dict[str, Any], base: SoundPack) -> str:
    """Return a description of the images and labels that differ from the sound pack."""
    words = []
    for split, sound in base.contents.items():
        images = [index for index, digest in found[split]["images"] if digest != _at(sound.images, index)]
        labels = [index for index, label in found[split]["labels"] if label != _at(sound.labels, index)]
        if labels:
            words.append(f"{len(labels)} wrong labels of {split}, such as of image {labels[0]}")
        if images:
            words.append(f"the wrong pixels of {len(images)} images of {split}, such as {images[0]}")
    return "; ".join(words)


def _at(values: tuple[Any, ...], index: int) -> Any:
    return values[index] if index < len(values) else None


def judge_verify(trial: Trial, base: SoundPack, pack: Path) -> None:
    """Verify every byte; a pack with a changed file must not pass."""
    finished = trial.run(["inspect-shards", str(pack), "--verify"], timeout_s=VERIFY_TIMEOUT_S)
    ended = judge_pack_exit(finished, pack)
    changed = [key for key in changed_files(base, pack) if not _is_outside_splits(key)]
    if ended is None and changed and (exemption := find_verification_exemption(read_tree(pack), base.tree)):
        ended = Judgement("inspect-shards", Verdict.DOCUMENTED, exemption.name)
    elif (
        ended is None and changed and _WEAKER_CLAIM in finished.output and _decodes_to_same_pixels(base, pack, changed)
    ):
        ended = Judgement("inspect-shards", Verdict.DOCUMENTED, BITS_WITHOUT_EFFECT.name)
    elif ended is None and changed:
        why = f"passed a pack in which {len(changed)} files have changed, such as {changed[0]!a}"
        ended = Judgement("inspect-shards", Verdict.WRONG, why)
    trial.judge(ended or Judgement("inspect-shards", Verdict.HARMLESS))


def _decodes_to_same_pixels(base: SoundPack, pack: Path, changed: Sequence[str]) -> bool:
    """Return whether only shards of compressed images without checksums changed, and no pixel as read by zarr."""
    if base.has_checksums or "blosc" not in base.name or not all("/pixels/c/" in key for key in changed):
        return False
    return {split: read_split(pack / split) for split in SPLITS} == base.contents


def _is_outside_splits(key: str) -> bool:
    """Return whether a file is outside both splits; the folder of a pack may contain other files."""
    return not key.startswith(tuple(f"{split}/" for split in SPLITS)) and key not in SPLITS


def judge_training(trial: Trial, base: SoundPack, pack: Path, sound: Training, cache: Path) -> None:
    """Train on the pack; the recorded losses must equal those on the sound pack, as far as they go."""
    run = trial.folder / "run"
    command = train_command(pack, run, cache, steps=sound.steps, batch=sound.batch)
    finished = trial.run(command, timeout_s=TRAINING_TIMEOUT_S)
    trial.judge(judge_losses(finished, pack, run, sound, base))


def judge_losses(finished: Finished, pack: Path, run: Path, sound: Training, base: SoundPack) -> Judgement:
    """Judge the losses that a training recorded, whether it completed or not."""
    ended = judge_pack_exit(finished, pack, refusals=(1, 2))
    if ended is not None and ended.verdict is not Verdict.DETECTED:
        return ended
    losses = columns(run / "loss.jsonl", *LOSS_KEYS)
    evaluations = columns(run / "eval.jsonl", *EVALUATION_KEYS)
    differs = [ours for ours, theirs in zip(losses, sound.losses, strict=False) if ours != theirs]
    others = [ours for ours, theirs in zip(evaluations, sound.evaluations, strict=False) if ours != theirs]
    tree = read_tree(pack)
    if differs or others:
        if exemption := find_reading_exemption(tree, base.tree, has_checksums=base.has_checksums):
            return Judgement("run-train", Verdict.DOCUMENTED, exemption.name)
        where = f"step {differs[0][0]}" if differs else "the evaluation"
        return Judgement(
            "run-train", Verdict.WRONG, f"losses that differ from those on the sound pack, from {where} on"
        )
    if ended is None and len(losses) != len(sound.losses):
        return Judgement("run-train", Verdict.WRONG, f"succeeded after {len(losses)} of {len(sound.losses)} steps")
    if ended is None and len(evaluations) != len(sound.evaluations):
        if exemption := find_verification_exemption(tree, base.tree):
            return Judgement("run-train", Verdict.DOCUMENTED, exemption.name)
        if not _WITHOUT_EVALUATION.search(finished.output):
            return Judgement("run-train", Verdict.WRONG, "succeeded, and skipped the evaluation without a message")
    return ended or Judgement("run-train", Verdict.HARMLESS)
