"""The sound run that faults are applied to, a donor run, and the results of the commands on the sound run."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.torture_campaign.case import Trial
from scripts.torture_campaign.oracle import columns, read_tree, read_weights
from scripts.torture_campaign.sound_packs import EVALUATION_KEYS, LOSS_KEYS, make_sound_packs, train_command

FIRST_STEPS, STEPS, RESUMED_STEPS = 100, 150, 200
_BATCH = 8
_TRAINING_OPTIONS = [
    "--eval-every",
    "50",
    "--snapshot-every",
    "0",
    "--keep",
    "0",
    "--flip",
    "0.5",
    "--ema-decay",
    "0.9",
]
_TIMEOUT_S = 300.0
_REQUEST_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class SoundRun:
    """A sound run of `STEPS` with snapshots of two steps, and its results.

    Attributes:
        folder: the run folder, never changed.
        donor: a run with another seed.
        tree: the bytes of each file.
        losses, evaluations: records of the run after it was resumed up to `RESUMED_STEPS`.
        weights: digests of the weights of the resumed run, by name.
        accuracy: the output of run-eval on the sound run, without its time.
    """

    folder: Path
    donor: Path
    tree: dict[str, bytes]
    losses: list[tuple[Any, ...]]
    evaluations: list[tuple[Any, ...]]
    weights: dict[str, str]
    accuracy: dict[str, Any]


def make_sound_run(trial: Trial, cache: Path) -> SoundRun:
    """Train the sound run in two launches, with a learning rate request during the first; then train the donor run.

    Raises:
        RuntimeError: a command failed on sound data.
    """
    pack = make_sound_packs(trial, ("raw",))["raw"].folder
    run, donor, resumed = (trial.folder / f"run-{name}" for name in ("sound", "donor", "resumed"))
    _train_with_request(trial, pack, run, cache, seed=0)
    _run_checked(trial, resume_command(run, steps=STEPS))
    _run_checked(
        trial, [*train_command(pack, donor, cache, steps=FIRST_STEPS, batch=_BATCH), *_TRAINING_OPTIONS, "--seed", "1"]
    )
    _run_checked(trial, resume_command(donor, steps=STEPS))
    shutil.copytree(run, resumed)
    _run_checked(trial, resume_command(resumed, steps=RESUMED_STEPS))
    said = _run_checked(trial, eval_command(run))
    return SoundRun(
        run,
        donor,
        read_tree(run),
        columns(resumed / "loss.jsonl", *LOSS_KEYS),
        columns(resumed / "eval.jsonl", *EVALUATION_KEYS),
        read_weights(resumed / "model.safetensors"),
        accuracy_of(said),
    )


def resume_command(run: Path, *, steps: int) -> list[str]:
    """Return the command that resumes a run."""
    return ["run-train", "--run-dir", str(run), "--resume", "--steps", str(steps)]


def eval_command(run: Path) -> list[str]:
    """Return the command that evaluates a run."""
    return ["run-eval", str(run), "--json"]


def accuracy_of(said: bytes) -> dict[str, Any]:
    """Return the JSON output of run-eval without the time; empty if it is not a JSON object."""
    try:
        document = json.loads(said)
    except ValueError:
        return {}
    return {key: value for key, value in document.items() if key != "time"} if isinstance(document, dict) else {}


def _train_with_request(trial: Trial, pack: Path, run: Path, cache: Path, *, seed: int) -> None:
    """Train the first steps, and request another learning rate during the training."""
    where = trial.folder / "first"
    where.mkdir()
    command = [
        *train_command(pack, run, cache, steps=FIRST_STEPS, batch=_BATCH),
        *_TRAINING_OPTIONS,
        "--seed",
        str(seed),
    ]
    # A server runs one command at a time; control-run is imported by both servers.
    running = trial.commands.start(command, where)
    request = ["control-run", str(run), "--learning-rate-factor", "0.5"]
    deadline, number, is_accepted = time.monotonic() + _TIMEOUT_S, 0, False
    # Try as soon as the run has its folder, during compilation: so few steps may be done soon afterwards.
    while not is_accepted and not running.is_over() and time.monotonic() < deadline:
        folder = trial.folder / f"request-{number}"
        folder.mkdir()
        answered = trial.commands.packing.start(request, folder).wait(_REQUEST_TIMEOUT_S)
        is_accepted, number = answered.code == 0, number + 1
        time.sleep(0.05)
    finished = running.wait(_TIMEOUT_S)
    if finished.code != 0:
        raise RuntimeError(f"the sound run failed: {finished.output}")
    if not is_accepted:
        raise RuntimeError("the sound run did not accept a request")


def _run_checked(trial: Trial, command: list[str]) -> bytes:
    finished = trial.run(command, timeout_s=_TIMEOUT_S)
    if finished.code != 0:
        raise RuntimeError(f"{' '.join(command)} failed on sound data: {finished.output}")
    return finished.out
