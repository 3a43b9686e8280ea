"""The kind ``calls``: file calls of packing, training, resuming, evaluating and verifying that fail or do less."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from scripts.torture_campaign.call_faults import CallFault, Calls, draw_call_fault, read_calls, watching
from scripts.torture_campaign.case import Judgement, Trial, Verdict, error_message, first_line, judge_exit
from scripts.torture_campaign.commands import Finished
from scripts.torture_campaign.oracle import LOGS, read_tree
from scripts.torture_campaign.pack_oracle import draw_source
from scripts.torture_campaign.runs import accuracy_of, records_of

_FIRST_STEPS, _STEPS = 4, 8
_MODEL = ["--model", "scripts.torture_campaign.linear_model:make_model"]
_TRAINING = "--image-size 8 --batch 8 --flip 0.5 --eval-every 4 --snapshot-every 4 --keep 0"
_PACKING = "--size 8 --shard-images 32 --workers 2"
_TIMEOUT_S = 60.0

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


@dataclass
class CallKind:
    """Faults of file calls.

    Attributes:
        cache: folder of compiled programs, in which no call fails.
        calls: the file calls of each operation without a fault.
        results: what each leaves or says then, as `result` returns it.
    """

    cache: Path
    calls: dict[str, Calls] = field(default_factory=dict)
    results: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    heavy: ClassVar[tuple[str, ...]] = ()
    _folder: Path = Path()

    def prepare(self, trial: Trial) -> None:
        """Draw the images, and run each operation without a fault, with its file calls recorded."""
        self._folder = trial.folder
        draw_source(trial.folder / "source", 0)
        for operation in OPERATIONS:
            disk = self._make_disk(trial.folder / f"of-{operation}", operation)
            log = trial.folder / f"{operation}.calls"
            finished = trial.run_soundly(self.command(operation, disk), environment=watching(disk, log))
            self.calls[operation], self.results[operation] = read_calls(log), result(operation, disk, finished)
            if operation == "pack":
                for name in ("pack", "half"):
                    shutil.copytree(disk / "pack", trial.folder / name)
                shutil.rmtree(trial.folder / "half/val")
            if operation == "train":
                shutil.copytree(disk / "run", trial.folder / "run")
                begun = self._make_disk(trial.folder / "begun-disk", operation)
                # With two snapshots, so that one can be lost without another result.
                first = [*self.command(operation, begun, _FIRST_STEPS), "--snapshot-every", str(_FIRST_STEPS // 2)]
                trial.run_soundly(first)
                shutil.copytree(begun / "run", trial.folder / "begun")

    def _make_disk(self, disk: Path, operation: str) -> Path:
        for name in OPERATIONS[operation][0]:
            shutil.copytree(self._folder / name, disk / _PLACES.get(name, name))
        disk.mkdir(exist_ok=True)
        return disk

    def command(self, operation: str, disk: Path, steps: int = _STEPS) -> list[str]:
        """Return the command of an operation on the folders in ``disk``."""
        source, pack, run = (str(disk / name) for name in ("source", "pack", "run"))
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

    def names(self, count: int) -> list[str]:
        """Return drawn cases."""
        return [f"random-{number}" for number in range(count)]

    def attempt(self, trial: Trial) -> None:
        """Run an operation with a fault, and again without; judge the messages, what was kept, and the result."""
        draw = trial.case.draw()
        operation = draw.choice([name for name, (_, weight) in OPERATIONS.items() for _ in range(weight)])
        fault = draw_call_fault(self.calls[operation], draw)
        disk, log = self._make_disk(trial.folder / "disk", operation), trial.folder / "changed.calls"
        before = read_tree(disk)
        finished = trial.run(self.command(operation, disk), _TIMEOUT_S, fault.environment(disk, log))
        trial.fault = f"{operation}: {fault} ({sum(read_calls(log).values())} calls changed)"
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
        finished = trial.run(self.command(operation, disk), _TIMEOUT_S)
        trial.judge(judge_last(finished, disk, "the fault") or self._compare(operation, disk, finished))

    def _compare(self, operation: str, disk: Path, finished: Finished) -> Judgement:
        sound, found = self.results[operation], result(operation, disk, finished)
        differs = sorted(name for name in {**sound, **found} if sound.get(name) != found.get(name))
        if differs:
            why = f"{len(differs)} results differ from those without the fault, such as {differs[0]}"
            return Judgement(finished.command[0], Verdict.WRONG, why)
        return Judgement(finished.command[0], Verdict.HARMLESS)


def judge_last(finished: Finished, folder: Path, after: str) -> Judgement | None:
    """Judge the exit of a command that must succeed now; return None if it does."""
    ended = judge_exit(finished, names=[str(folder)], refusals=(1, 2))
    if ended is not None and ended.verdict is Verdict.DETECTED:
        return Judgement(finished.command[0], Verdict.WRONG, f"did not succeed after {after}: {ended.why}")
    return ended


def result(operation: str, disk: Path, finished: Finished) -> Mapping[str, Any]:
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
    if ended is None or ended.verdict is not Verdict.DETECTED:
        return ended or Judgement(name, Verdict.HARMLESS)
    words, why = error_message(finished), ""
    if name == "verify-run" and finished.out.startswith(b"differs"):
        why = "said that the bits differ"
    elif fault.change == "delay":
        why = "failed because of a delay"
    for claim, errors in _CLAIMS.items():
        if fault.change not in errors and (found := re.search(claim, words)):
            why = why or f"says {found[0]!a} of {fault.change}"
    return Judgement(name, Verdict.WRONG, f"{why}: {first_line(words)}") if why else ended


def judge_kept(name: str, operation: str, disk: Path, before: Mapping[str, bytes]) -> Judgement:
    """Judge whether all that was complete is there: of a resumed run its snapshots, the lines of its logs, weights."""
    tree = read_tree(disk)
    kept = {key for key in before if key != "run/.lock"}
    if operation == "resume":
        kept = {key for key in kept if not key.startswith("run/") or key.startswith("run/snapshots/")}
    lost = sorted(key for key in kept if tree.get(key) != before[key])
    why = f"{len(lost)} files that were complete were lost or changed: {lost[0]}" if lost else ""
    if operation == "resume":
        for key in map("run/{}".format, LOGS):
            if not tree.get(key, b"").startswith(before[key]):
                why = why or f"lost lines of {key}"
        if "unreadable" in records_of(disk / "run")["weights"]:
            why = why or "left no readable weights"
    return Judgement(name, Verdict.WRONG if why else Verdict.HARMLESS, why)
