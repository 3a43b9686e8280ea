"""The kind ``calls``: file calls of packing, training, resuming, evaluating and verifying that fail or do less."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.torture_campaign.call_faults import CallFault, Calls, draw_call_fault, read_calls, watching
from scripts.torture_campaign.case import Case, Trial
from scripts.torture_campaign.commands import Finished
from scripts.torture_campaign.oracle import columns, read_tree, read_weights
from scripts.torture_campaign.sound_packs import EVALUATION_KEYS, LOSS_KEYS, draw_source
from scripts.torture_campaign.sound_run import accuracy_of
from scripts.torture_campaign.verdict import Judgement, Verdict, error_message, first_line, judge_exit

_FIRST_STEPS, _STEPS = 4, 8
_MODEL = ["--model", "scripts.torture_campaign.linear_model:make_model"]
_TRAINING = "--image-size 8 --batch 8 --flip 0.5 --eval-every 4 --snapshot-every 4 --keep 0"
_PACKING = "--size 8 --shard-images 32 --workers 2"
_SOUND_TIMEOUT_S = 300.0
_TIMEOUT_S = 60.0
_LOGS = {"loss.jsonl": LOSS_KEYS, "eval.jsonl": EVALUATION_KEYS}

# The folders that each operation starts with, in the state of the sound ones, and how often it is drawn.
OPERATIONS: dict[str, tuple[tuple[str, ...], int]] = {
    "pack": (("source",), 3),
    "pack-rest": (("source", "half"), 1),
    "train": (("pack",), 3),
    "resume": (("pack", "begun"), 4),
    "evaluate": (("pack", "run"), 2),
    "verify-run": (("pack", "run"), 1),
    "verify-pack": (("pack",), 1),
}
# The names of the folders while a command runs.
_PLACES = {"half": "pack", "begun": "run"}
# What a message may say only of these errors.
_CLAIMS = {
    r"make room|disk is full|No space left": ("ENOSPC",),
    r"does not exist|No such file": (),
    r"grant (?:write )?permission": (),
    r"not enough memory|smaller --batch|Cannot allocate": ("ENOMEM",),
    r"--overwrite|pack (?:it |the split )?again|damaged|truncated|has changed(?! or)|download": (),
}


@dataclass(frozen=True)
class Sound:
    """What an operation does without a fault.

    Attributes:
        calls: its file calls.
        result: what it leaves or says, as `CallKind.result` returns it.
    """

    calls: Calls
    result: Mapping[str, Any]


@dataclass
class CallKind:
    """Faults of file calls.

    Attributes:
        cache: folder of compiled programs, in which no call fails.
        sound: what each operation does without a fault.
    """

    cache: Path
    sound: dict[str, Sound] = field(default_factory=dict)
    name: str = "calls"
    _folder: Path = Path()

    def prepare(self, trial: Trial) -> None:
        """Draw the images, and run each operation without a fault, with its file calls recorded."""
        self._folder = trial.folder
        draw_source(trial.folder / "source", 0)
        for operation in OPERATIONS:
            disk = self._make_disk(trial.folder / f"of-{operation}", operation)
            log = trial.folder / f"{operation}.calls"
            command = self.command(operation, disk)
            finished = trial.run(command, timeout_s=_SOUND_TIMEOUT_S, environment=watching(disk, log))
            if finished.code != 0:
                raise RuntimeError(f"{' '.join(command)} failed without a fault: {finished.output}")
            self.sound[operation] = Sound(read_calls(log), self.result(operation, disk, finished))
            self._keep(operation, disk, trial)

    def _keep(self, operation: str, disk: Path, trial: Trial) -> None:
        """Keep what an operation leaves as the start of others."""
        if operation == "pack":
            shutil.copytree(disk / "pack", self._folder / "pack")
            shutil.copytree(disk / "pack", self._folder / "half")
            shutil.rmtree(self._folder / "half/val")
        if operation == "train":
            shutil.copytree(disk / "run", self._folder / "run")
            begun = self._make_disk(trial.folder / "begun-disk", operation)
            # With two snapshots, so that one can be lost without another result.
            command = [*self.command(operation, begun, steps=_FIRST_STEPS), "--snapshot-every", str(_FIRST_STEPS // 2)]
            finished = trial.run(command, timeout_s=_SOUND_TIMEOUT_S)
            if finished.code != 0:
                raise RuntimeError(f"the first steps failed without a fault: {finished.output}")
            shutil.copytree(begun / "run", self._folder / "begun")

    def _make_disk(self, disk: Path, operation: str) -> Path:
        for name in OPERATIONS[operation][0]:
            shutil.copytree(self._folder / name, disk / _PLACES.get(name, name))
        disk.mkdir(exist_ok=True)
        return disk

    def command(self, operation: str, disk: Path, *, steps: int = _STEPS) -> list[str]:
        """Return the command of an operation on the folders in ``disk``."""
        source, pack, run = str(disk / "source"), str(disk / "pack"), str(disk / "run")
        training = ["run-train", "--data", pack, "--run-dir", run, "--steps", str(steps), *_MODEL]
        cache = ["--compilation-cache", str(self.cache)]
        commands = {
            "pack": ["preprocess-imagenet", source, pack, *_PACKING.split()],
            "train": [*training, *_TRAINING.split(), *cache],
            "resume": [*training, "--resume", *cache],
            "evaluate": ["run-eval", run, "--data", pack, "--json", *_MODEL],
            "verify-run": ["verify-run", run, "--from", "0", "--data", pack, *_MODEL],
            "verify-pack": ["inspect-shards", pack, "--verify"],
        }
        return commands["pack" if operation == "pack-rest" else operation]

    def cases(self, seed: int, count: int) -> list[Case]:
        """Return drawn cases."""
        return [Case(self.name, f"random-{number}", seed) for number in range(count)]

    def attempt(self, trial: Trial) -> None:
        """Run an operation with a fault, and again without; judge the messages, what was kept, and the result."""
        draw = trial.case.draw()
        operation = draw.choice([name for name, (_, weight) in OPERATIONS.items() for _ in range(weight)])
        fault = draw_call_fault(self.sound[operation].calls, draw)
        self.attempt_fault(trial, operation, fault)

    def attempt_fault(self, trial: Trial, operation: str, fault: CallFault) -> None:
        """Run an operation with this fault, and judge it."""
        disk, log = self._make_disk(trial.folder / "disk", operation), trial.folder / "changed.calls"
        before = read_tree(disk)
        finished = trial.run(
            self.command(operation, disk), timeout_s=_TIMEOUT_S, environment=fault.environment(disk, log)
        )
        num_changed = sum(read_calls(log).values())
        trial.fault = f"{operation}: {fault} ({num_changed} calls changed)"
        trial.judge(judge_message(finished, fault, [str(disk), *(key.partition("/")[2] for key in before)]))
        trial.judge(judge_kept(finished.command[0], operation, disk, before))
        if finished.code == 0:
            trial.judge(self._compare(operation, disk, finished))
        # A run that is complete must be found to be so: what is compared here is not all of its record.
        if finished.code != 0 or operation in ("train", "resume"):
            self._repeat(trial, operation, disk)

    def _repeat(self, trial: Trial, operation: str, disk: Path) -> None:
        """Run the operation again without a fault: it must succeed, with the same result."""
        if operation == "train" and (disk / "run/config.json").exists():
            operation = "resume"
        finished = trial.run(self.command(operation, disk), timeout_s=_TIMEOUT_S)
        ended = judge_exit(finished, names=[str(disk)], refusals=(1, 2))
        if ended is not None and ended.verdict is Verdict.DETECTED:
            ended = Judgement(finished.command[0], Verdict.WRONG, f"did not succeed after the fault: {ended.why}")
        trial.judge(ended or self._compare(operation, disk, finished))

    def _compare(self, operation: str, disk: Path, finished: Finished) -> Judgement:
        sound, found = self.sound[operation].result, self.result(operation, disk, finished)
        differs = [name for name in {**sound, **found} if sound.get(name) != found.get(name)]
        if differs:
            why = f"{len(differs)} results differ from those without the fault, such as {sorted(differs)[0]}"
            return Judgement(finished.command[0], Verdict.WRONG, why)
        return Judgement(finished.command[0], Verdict.HARMLESS)

    def result(self, operation: str, disk: Path, finished: Finished) -> Mapping[str, Any]:
        """Return the result of a successful operation: the files of the pack, the records of the run, the accuracy."""
        if operation in ("pack", "pack-rest"):
            # What could not be removed of the journal and of locks is harmless.
            tree = read_tree(disk / "pack")
            return {key: tree[key] for key in tree if "/journal/" not in key and not key.endswith(".__lock")}
        if operation in ("train", "resume"):
            return records_of(disk / "run")
        if operation == "evaluate":
            return accuracy_of(finished.out)
        return {"verdict": b"the same bits" in finished.out or b"is as it was packed" in finished.out}


def records_of(run: Path) -> dict[str, Any]:
    """Return the weights, losses and evaluations of a run."""
    records: dict[str, Any] = {name: columns(run / name, *keys) for name, keys in _LOGS.items()}
    try:
        return records | read_weights(run / "model.safetensors")
    except Exception as error:  # noqa: BLE001 - any error means that the weights are missing or damaged
        return records | {"weights": str(error)}


def judge_message(finished: Finished, fault: CallFault, names: Sequence[str]) -> Judgement:
    """Judge how a command with a fault ended: a refusal must name a file, and claim nothing that is not so.

    Args:
        finished: the command.
        fault: its fault.
        names: the message must contain one of them.
    """
    name = finished.command[0]
    refusals = (2,) if name in ("preprocess-imagenet", "inspect-shards") else (1, 2)
    ended = judge_exit(finished, names=names, refusals=refusals)
    if ended is None:
        return Judgement(name, Verdict.HARMLESS)
    if ended.verdict is Verdict.DETECTED:
        words = error_message(finished)
        if name == "verify-run" and finished.out.startswith(b"differs"):
            return Judgement(name, Verdict.WRONG, f"said that the bits differ: {first_line(words)}")
        if fault.change == "delay":
            return Judgement(name, Verdict.WRONG, f"failed because of a delay: {first_line(words)}")
        for claim, errors in _CLAIMS.items():
            if fault.change not in errors and (found := re.search(claim, words)):
                return Judgement(name, Verdict.WRONG, f"says {found[0]!a} of {fault.change}: {first_line(words)}")
    return ended


def judge_kept(name: str, operation: str, disk: Path, before: Mapping[str, bytes]) -> Judgement:
    """Judge whether all that was complete is there: of a resumed run its snapshots, the lines of its logs, weights."""
    tree = read_tree(disk)
    kept = {key for key in before if key != "run/.lock"}
    if operation == "resume":
        kept = {key for key in kept if not key.startswith("run/") or key.startswith("run/snapshots/")}
    lost = sorted(key for key in kept if tree.get(key) != before[key])
    if lost:
        return Judgement(name, Verdict.WRONG, f"{len(lost)} files that were complete were lost or changed: {lost[0]}")
    if operation == "resume":
        if lines := _lost_lines(tree, before):
            return Judgement(name, Verdict.WRONG, f"lost lines of {lines}")
        if "weights" in records_of(disk / "run"):
            return Judgement(name, Verdict.WRONG, "left no readable weights")
    return Judgement(name, Verdict.HARMLESS)


def _lost_lines(tree: Mapping[str, bytes], before: Mapping[str, bytes]) -> str:
    return next((key for key in map("run/{}".format, _LOGS) if not tree.get(key, b"").startswith(before[key])), "")
