"""The kind ``runs``: damage of run folders before or while they are resumed, evaluated, replayed or followed."""

from __future__ import annotations

import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.torture_campaign.case import Case, Trial
from scripts.torture_campaign.commands import Finished, Running
from scripts.torture_campaign.oracle import columns, read_lines, read_tree, read_weights
from scripts.torture_campaign.pack_bases import EVALUATION_KEYS, LOSS_KEYS
from scripts.torture_campaign.run_bases import (
    RESUMED_STEPS,
    STEPS,
    RunBase,
    accuracy_of,
    eval_command,
    resume_command,
    run_base,
)
from scripts.torture_campaign.run_faults import LIVE_FAULTS, TOP_FILES, draw_run_fault, foreign_weights, named_faults
from scripts.torture_campaign.verdict import Judgement, Verdict, judge_end

_TRAINING_TIMEOUT_S = 40.0
_READING_TIMEOUT_S = 20.0
_REPLAYED_SHARE = 0.1
_LIVE = "live-"
_INTERRUPTED = "interrupted-weights-foreign"
_LIVE_STEPS = STEPS + 1000
"""So many that a fault of a run that is going comes long before its end."""
_STEPS_BEFORE = 70
"""More than an evaluation comes after: a log that is not open yet is missed by whoever opens it."""
_LIVE_TIMEOUT_S = 60.0
_LOOK_EVERY_S = 0.005
_LOGS = {"loss.jsonl": LOSS_KEYS, "eval.jsonl": EVALUATION_KEYS}


@dataclass
class RunKind:
    """Faults of run folders.

    Attributes:
        cache: folder of compiled programs.
        base: the sound run.
    """

    cache: Path
    base: RunBase | None = None
    name: str = "runs"

    def prepare(self, trial: Trial) -> None:
        """Train the sound run."""
        self.base = run_base(trial, self.cache)

    def cases(self, seed: int, count: int) -> list[Case]:
        """Return the named cases, then drawn ones up to ``count`` in all."""
        assert self.base is not None
        names = [*named_faults(self.base), *(f"{_LIVE}{fault}" for fault in LIVE_FAULTS), _INTERRUPTED]
        names += [f"random-{number}" for number in range(max(0, count - len(names)))]
        return [Case(self.name, name, seed) for name in names]

    def attempt(self, trial: Trial) -> None:
        """Damage a copy of the sound run, run the commands on it and judge them."""
        assert self.base is not None
        draw, base, run = trial.case.draw(), self.base, trial.folder / "run"
        shutil.copytree(base.folder, run)
        if trial.case.name.startswith(_LIVE):
            _attempt_live(trial, base, run, draw)
            return
        if trial.case.name == _INTERRUPTED:
            _attempt_interrupted(trial, base, run, draw)
            return
        if trial.case.number is None:
            trial.fault = named_faults(base)[trial.case.name](run, base, draw)
        else:
            trial.fault = draw_run_fault(run, base, draw)
        changed = changed_files(base, run)
        # A resume writes to the run folder, so it comes last.
        judge_tail(trial, run)
        is_replayed = bool(changed & {"config.json", "loss.jsonl", "eval.jsonl"}) or draw.random() < _REPLAYED_SHARE
        if changed & {"config.json", "model.safetensors", "result.json"} and not trial.has_hung:
            judge_evaluation(trial, base, run)
        if is_replayed and not trial.has_hung:
            judge_replay(trial, base, run)
        if not trial.has_hung:
            judge_resume(trial, base, run)


def changed_files(base: RunBase, run: Path) -> set[str]:
    """Return the files of a run that have changed."""
    tree = read_tree(run)
    return {key for key in {*tree, *base.tree} if tree.get(key) != base.tree.get(key)}


def _ended(finished: Any, run: Path) -> Judgement | None:
    names = (str(run), *TOP_FILES, "snapshot", "data", "RUN")
    return judge_end(finished, names=names, refusals=(1, 2))


def judge_tail(trial: Trial, run: Path) -> None:
    """Show what there is of the loss."""
    finished = trial.run(["tail-run", str(run), "--once"], timeout_s=_READING_TIMEOUT_S)
    trial.judge(_ended(finished, run) or Judgement("tail-run", Verdict.HARMLESS))


def judge_evaluation(trial: Trial, base: RunBase, run: Path) -> None:
    """Evaluate the run; its accuracy must be that of the sound one."""
    finished = trial.run(eval_command(run), timeout_s=_TRAINING_TIMEOUT_S)
    ended = _ended(finished, run)
    if ended is None and (found := accuracy_of(finished.out)) != base.accuracy:
        ours, theirs = ({key: each.get(key) for key in ("top1", "loss")} for each in (found, base.accuracy))
        ended = Judgement("run-eval", Verdict.WRONG, f"{ours}, and {theirs} of the sound run")
    trial.judge(ended or Judgement("run-eval", Verdict.HARMLESS))


def judge_replay(trial: Trial, base: RunBase, run: Path) -> None:
    """Replay the run; if its record differs from that of the sound run, the replay must not report the same bits."""
    finished = trial.run(["verify-run", str(run), "--from", "0"], timeout_s=_TRAINING_TIMEOUT_S)
    ended = _ended(finished, run)
    if finished.code == 1 and finished.out.startswith(b"differs"):
        ended = Judgement("verify-run", Verdict.DETECTED, "differs")
    if ended is None and (where := other_records(base, run)):
        ended = Judgement("verify-run", Verdict.WRONG, f"found the same bits, and {where}")
    trial.judge(ended or Judgement("verify-run", Verdict.HARMLESS))


def other_records(base: RunBase, run: Path) -> str:
    """Return where the logs of a run differ from those of the sound run; a truncated end is not a difference."""
    for name, keys in _LOGS.items():
        sound = base.losses if name == "loss.jsonl" else base.evaluations
        found = columns(run / name, *keys)
        for number, (ours, theirs) in enumerate(zip(found, sound, strict=False), start=1):
            if ours != theirs:
                return f"line {number} of {name} is not that of the sound run"
    return ""


def judge_resume(trial: Trial, base: RunBase, run: Path) -> None:
    """Resume the run; its weights, losses and evaluations must equal those of the sound run."""
    finished = trial.run(resume_command(run, steps=RESUMED_STEPS), timeout_s=_TRAINING_TIMEOUT_S)
    ended = _ended(finished, run)
    if ended is not None:
        trial.judge(ended)
        return
    trial.judge(_compare(base, run))


def _attempt_live(trial: Trial, base: RunBase, run: Path, draw: random.Random) -> None:
    """Do a fault while the run goes on; that must end it, and what it has learnt must be there."""
    running = _go_on(trial, run)
    trial.fault = f"while it goes on, {LIVE_FAULTS[trial.case.name.removeprefix(_LIVE)](run, base, draw)}"
    finished = running.wait(_LIVE_TIMEOUT_S)
    trial.log.append(finished)
    trial.judge(judge_live(finished, run))


def _attempt_interrupted(trial: Trial, base: RunBase, run: Path, draw: random.Random) -> None:
    """Go on with a run that has another's weights, and kill it before it writes its own; then evaluate it."""
    trial.fault = f"{foreign_weights(run, base, draw)}, and the run is killed while it goes on"
    running = _go_on(trial, run)
    if not running.is_over():
        running.kill()
    finished = running.wait(_LIVE_TIMEOUT_S)
    trial.log.append(finished)
    if not finished.killed and (ended := _ended(finished, run)) is not None:
        trial.judge(ended)
    judge_evaluation(trial, base, run)


def _go_on(trial: Trial, run: Path) -> Running:
    """Begin to go on with a run; return once it has made some steps, or has ended."""
    where = trial.folder / "trainer"
    where.mkdir()
    running = trial.commands.start(resume_command(run, steps=_LIVE_STEPS), where)
    deadline = time.monotonic() + _LIVE_TIMEOUT_S
    while len(read_lines(run / "loss.jsonl")) < STEPS + _STEPS_BEFORE:
        if running.is_over() or time.monotonic() > deadline:
            break
        time.sleep(_LOOK_EVERY_S)
    return running


def judge_live(finished: Finished, run: Path) -> Judgement:
    """Judge a run whose folder was no longer its own before the end: it may not end as if nothing were lost."""
    name = "run-train"
    ended = _ended(finished, run)
    if ended is None:
        return Judgement(name, Verdict.WRONG, "ended well, and its folder had lost files meanwhile")
    if ended.verdict is not Verdict.DETECTED:
        return ended
    try:
        read_weights(run / "model.safetensors")
    except Exception as error:  # noqa: BLE001 - whatever it is, the weights are lost
        return Judgement(name, Verdict.WRONG, f"ended with a message, and left no weights: {error}")
    return ended


def _compare(base: RunBase, run: Path) -> Judgement:
    name = "run-train"
    try:
        weights = read_weights(run / "model.safetensors")
    except Exception as error:  # noqa: BLE001 - whatever it is, the weights are damaged
        return Judgement(name, Verdict.WRONG, f"left weights that cannot be read: {error}")
    if weights != base.weights:
        count = sum(weights.get(key) != digest for key, digest in base.weights.items())
        return Judgement(name, Verdict.WRONG, f"resumed to other weights, {count} of {len(base.weights)} arrays differ")
    losses = columns(run / "loss.jsonl", *LOSS_KEYS)
    evaluations = columns(run / "eval.jsonl", *EVALUATION_KEYS)
    for log, found, sound in (("loss.jsonl", losses, base.losses), ("eval.jsonl", evaluations, base.evaluations)):
        if found != sound:
            same = [ours == theirs for ours, theirs in zip(found, sound, strict=False)]
            line = [*same, False].index(False) + 1
            return Judgement(name, Verdict.WRONG, f"resumed, and {log} differs from line {line} on")
    return Judgement(name, Verdict.HARMLESS)
