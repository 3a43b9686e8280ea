"""The kind ``runs``: damage to run folders before or during a resume, an evaluation, a replay or `tail-run`."""

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
from scripts.torture_campaign.run_faults import LIVE_FAULTS, TOP_FILES, draw_run_fault, named_faults, replace_weights
from scripts.torture_campaign.sound_packs import EVALUATION_KEYS, LOSS_KEYS
from scripts.torture_campaign.sound_run import (
    RESUMED_STEPS,
    STEPS,
    SoundRun,
    accuracy_of,
    eval_command,
    make_sound_run,
    resume_command,
)
from scripts.torture_campaign.verdict import Judgement, Verdict, judge_exit

_TRAINING_TIMEOUT_S = 40.0
_READING_TIMEOUT_S = 20.0
_REPLAYED_SHARE = 0.1
_LIVE = "live-"
_INTERRUPTED = "interrupted-weights-foreign"
_LIVE_STEPS = STEPS + 1000
"""Enough that a fault during the run occurs long before its end."""
_STEPS_BEFORE_FAULT = 70
"""Late enough that an evaluation has been logged: a log that is removed before it is opened is found missing anyway."""
_LIVE_TIMEOUT_S = 60.0
_POLL_EVERY_S = 0.005
_LOGS = {"loss.jsonl": LOSS_KEYS, "eval.jsonl": EVALUATION_KEYS}


@dataclass
class RunKind:
    """Faults of run folders.

    Attributes:
        cache: folder of compiled programs.
        base: the sound run.
    """

    cache: Path
    base: SoundRun | None = None
    name: str = "runs"

    def prepare(self, trial: Trial) -> None:
        """Train the sound run."""
        self.base = make_sound_run(trial, self.cache)

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


def changed_files(base: SoundRun, run: Path) -> set[str]:
    """Return the files of a run that have changed."""
    tree = read_tree(run)
    return {key for key in {*tree, *base.tree} if tree.get(key) != base.tree.get(key)}


def _judge_run_exit(finished: Any, run: Path) -> Judgement | None:
    names = (str(run), *TOP_FILES, "snapshot", "data", "RUN")
    return judge_exit(finished, names=names, refusals=(1, 2))


def judge_tail(trial: Trial, run: Path) -> None:
    """Run tail-run and judge its exit."""
    finished = trial.run(["tail-run", str(run), "--once"], timeout_s=_READING_TIMEOUT_S)
    trial.judge(_judge_run_exit(finished, run) or Judgement("tail-run", Verdict.HARMLESS))


def judge_evaluation(trial: Trial, base: SoundRun, run: Path) -> None:
    """Evaluate the run; its accuracy must equal that of the sound run."""
    finished = trial.run(eval_command(run), timeout_s=_TRAINING_TIMEOUT_S)
    ended = _judge_run_exit(finished, run)
    if ended is None and (found := accuracy_of(finished.out)) != base.accuracy:
        ours, theirs = ({key: each.get(key) for key in ("top1", "loss")} for each in (found, base.accuracy))
        ended = Judgement("run-eval", Verdict.WRONG, f"{ours}, but the sound run has {theirs}")
    trial.judge(ended or Judgement("run-eval", Verdict.HARMLESS))


def judge_replay(trial: Trial, base: SoundRun, run: Path) -> None:
    """Replay the run; if its record differs from that of the sound run, the replay must not report the same bits."""
    finished = trial.run(["verify-run", str(run), "--from", "0"], timeout_s=_TRAINING_TIMEOUT_S)
    ended = _judge_run_exit(finished, run)
    if finished.code == 1 and finished.out.startswith(b"differs"):
        ended = Judgement("verify-run", Verdict.DETECTED, "differs")
    if ended is None and (where := find_differing_record(base, run)):
        ended = Judgement("verify-run", Verdict.WRONG, f"reported the same bits, although {where}")
    trial.judge(ended or Judgement("verify-run", Verdict.HARMLESS))


def find_differing_record(base: SoundRun, run: Path) -> str:
    """Return where the logs of a run first differ from the sound run's; a truncated end is not a difference."""
    for name, keys in _LOGS.items():
        sound = base.losses if name == "loss.jsonl" else base.evaluations
        found = columns(run / name, *keys)
        for number, (ours, theirs) in enumerate(zip(found, sound, strict=False), start=1):
            if ours != theirs:
                return f"line {number} of {name} differs from the sound run"
    return ""


def judge_resume(trial: Trial, base: SoundRun, run: Path) -> None:
    """Resume the run; its weights, losses and evaluations must equal those of the sound run."""
    finished = trial.run(resume_command(run, steps=RESUMED_STEPS), timeout_s=_TRAINING_TIMEOUT_S)
    ended = _judge_run_exit(finished, run)
    if ended is not None:
        trial.judge(ended)
        return
    trial.judge(compare_with_sound_run(base, run))


def _attempt_live(trial: Trial, base: SoundRun, run: Path, draw: random.Random) -> None:
    """Apply a fault while the run is training; the run must end with an error and write its weights."""
    running = _resume_in_background(trial, run)
    trial.fault = f"during the run, {LIVE_FAULTS[trial.case.name.removeprefix(_LIVE)](run, base, draw)}"
    finished = running.wait(_LIVE_TIMEOUT_S)
    trial.log.append(finished)
    trial.judge(judge_live(finished, run))


def _attempt_interrupted(trial: Trial, base: SoundRun, run: Path, draw: random.Random) -> None:
    """Resume a run that has the weights of another run, kill it before it writes its own, and evaluate it."""
    trial.fault = f"{replace_weights(run, base, draw)}, and the resumed run is killed"
    running = _resume_in_background(trial, run)
    if not running.is_over():
        running.kill()
    finished = running.wait(_LIVE_TIMEOUT_S)
    trial.log.append(finished)
    if not finished.killed and (ended := _judge_run_exit(finished, run)) is not None:
        trial.judge(ended)
    judge_evaluation(trial, base, run)


def _resume_in_background(trial: Trial, run: Path) -> Running:
    """Resume a run in the background; return when it has done some steps or has ended."""
    where = trial.folder / "trainer"
    where.mkdir()
    running = trial.commands.start(resume_command(run, steps=_LIVE_STEPS), where)
    deadline = time.monotonic() + _LIVE_TIMEOUT_S
    while len(read_lines(run / "loss.jsonl")) < STEPS + _STEPS_BEFORE_FAULT:
        if running.is_over() or time.monotonic() > deadline:
            break
        time.sleep(_POLL_EVERY_S)
    return running


def judge_live(finished: Finished, run: Path) -> Judgement:
    """Judge a run whose folder lost files before the end: it must not succeed, and must leave its weights."""
    name = "run-train"
    ended = _judge_run_exit(finished, run)
    if ended is None:
        return Judgement(name, Verdict.WRONG, "succeeded, although its folder had lost files")
    if ended.verdict is not Verdict.DETECTED:
        return ended
    try:
        read_weights(run / "model.safetensors")
    except Exception as error:  # noqa: BLE001 - any error means that the weights are lost
        return Judgement(name, Verdict.WRONG, f"failed with a message, but left no readable weights: {error}")
    return ended


def compare_with_sound_run(base: SoundRun, run: Path) -> Judgement:
    """Judge a resumed run: its weights, losses and evaluations must equal those of the sound run."""
    name = "run-train"
    try:
        weights = read_weights(run / "model.safetensors")
    except Exception as error:  # noqa: BLE001 - any error means that the weights are damaged
        return Judgement(name, Verdict.WRONG, f"left weights that cannot be read: {error}")
    if weights != base.weights:
        count = sum(weights.get(key) != digest for key, digest in base.weights.items())
        return Judgement(name, Verdict.WRONG, f"resumed, but the weights differ: {count} of {len(base.weights)} arrays")
    losses = columns(run / "loss.jsonl", *LOSS_KEYS)
    evaluations = columns(run / "eval.jsonl", *EVALUATION_KEYS)
    for log, found, sound in (("loss.jsonl", losses, base.losses), ("eval.jsonl", evaluations, base.evaluations)):
        if found != sound:
            same = [ours == theirs for ours, theirs in zip(found, sound, strict=False)]
            line = [*same, False].index(False) + 1
            return Judgement(name, Verdict.WRONG, f"resumed, but {log} differs from line {line} on")
    return Judgement(name, Verdict.HARMLESS)
