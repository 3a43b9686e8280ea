"""A test that a training killed at any instant and resumed is bit-identical to an uninterrupted training.

Two reference runs are not interrupted: `plain`, and `asked`, which receives a learning rate factor and an evaluation
request from `control-run`. Each further training starts from scratch, its process group receives SIGKILL at a random
instant, it is resumed by `run-train --resume`, possibly killed again, and finally compared with its reference.

The batch at which a request takes effect depends on timing, so sending a request again would change the training. The
trainings compared with `asked` therefore start in the state that a kill before the first snapshot would have left: with
its `config.json` and its `control.jsonl`, and nothing else. All their launches are resumed ones, which repeat the
requests from the log. The other trainings have a fresh start, including compilation.

Instants are drawn from the seed: a fraction of the reference's time to its first step, a step plus a fraction of a step
time, or an event visible in the run folder (a snapshot or an evaluation in progress, the end). Times would not be
sufficient: on a busy machine a run may be finished before. scripts/kill-and-resume runs this script.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from loopfeed.engine.records.snapshot import read_snapshot
from loopfeed.preprocess.quantities import quantity

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
EVAL_EVERY, SNAPSHOT_EVERY = 20, 7
# Enables everything that a step can depend on.
TRAINING = (
    "--image-size 32 --model resnet8 --batch 32 --accumulate-steps 2 --chunk 3 --optimizer nesterov --schedule cosine "
    "--warmup-steps 6 --ema-decay 0.99 --label-smoothing 0.1 --clip-norm 1 --skip-nonfinite 2 --flip 0.5 "
    "--crop random --crop-padding 4 --mixup 0.2 --brightness 0.2 --contrast 0.2 --saturation 0.2 --hue 0.05 "
    f"--erasing 0.25 --eval-every {EVAL_EVERY} --snapshot-every {SNAPSHOT_EVERY} --keep 3"
).split()
# A launch that takes longer hangs, which is an error.
LAUNCH_TIMEOUT_S = 900.0
LOOK_EVERY_S = 0.0005
MOST_LAUNCHES = 12
# The other fields of a line are measurements.
COMPARED = {"loss.jsonl": ("step", "loss", "lr"), "eval.jsonl": ("step", "num_images", "top1", "top5", "loss")}


@dataclass(frozen=True)
class Kill:
    """The instant at which a launch is killed.

    Attributes:
        after_s: delay in seconds after `moment` if given, otherwise after `step` if given, otherwise after the start.
        moment: an event visible in the run folder, a key of `MOMENTS`.
        step: a step that is in the loss log while the launch trains.
    """

    after_s: float
    moment: str = ""
    step: int = 0

    def __str__(self) -> str:
        return f"{self.after_s:.3f} s after {self.moment or (f'step {self.step}' if self.step else 'the start')}"

    def has_come(self, run: Path, steps: int, said_before: int) -> bool:
        """Return whether the delay starts now."""
        if self.moment:
            return MOMENTS[self.moment](run, steps)
        # An earlier launch left its lines; they are truncated by the time that this launch has compiled its program.
        is_training = not self.step or "\ncompiled training program" in read_output(log_of(run), said_before)
        return is_training and num_lines(run / "loss.jsonl") >= self.step


@dataclass
class Reference:
    """An uninterrupted run.

    Attributes:
        folder: the run folder.
        start_s: seconds from the start of the process to the first loss.
        duration_s: seconds from the start of the process to its end.
        steps: number of updates.
    """

    folder: Path
    start_s: float
    duration_s: float
    steps: int

    def draw_kill(self, draw: random.Random) -> Kill:
        """Draw a kill instant for a launch that takes as long as this run."""
        if draw.random() < self.start_s / self.duration_s:
            return Kill(draw.uniform(0, self.start_s))
        step_s = (self.duration_s - self.start_s) / self.steps
        return Kill(draw.uniform(0, step_s), step=draw.randrange(1, self.steps))


@dataclass
class Trial:
    """A training that is interrupted.

    Attributes:
        number: number of the trial, from 1.
        folder: the run folder.
        reference: the run that it must equal.
        is_asked: whether it replays the requests of its reference.
        kills: kills of its launches, in order; further launches are not killed.
        cache: folder of compiled programs.
        story: description of what happened.
    """

    number: int
    folder: Path
    reference: Reference
    is_asked: bool
    kills: list[Kill]
    cache: Path
    story: list[str] = field(default_factory=list)


def main() -> int:
    """Run the references and the trials; return the exit code."""
    options = parse_arguments()
    base, draw = options.run_dir, random.Random(options.seed)
    base.mkdir(parents=True, exist_ok=True)
    cache = base / "cache"
    print(f"references in {base}, of {options.steps} steps", flush=True)
    plain = run_reference(options, base / "plain", cache, is_asked=False)
    print(f"plain: {plain.duration_s:.1f} s, its program compiled", flush=True)
    asked = run_reference(options, base / "asked", cache, is_asked=True)
    print(f"asked: {asked.duration_s:.1f} s, {describe_requests(asked.folder)}", flush=True)
    num_identical = num_kills = 0
    for number in range(1, options.kills + 1):
        trial = draw_trial(number, base, plain, asked, cache, draw)
        num_kills += run_trial(trial, options)
        differences = compare(trial.folder, trial.reference.folder, options.steps)
        trial.story[-1] += (
            f": DIFFERENT, see {trial.folder}: {'; '.join(differences)}" if differences else ": identical"
        )
        print("\n".join(f"{number:3}: {line}" for line in trial.story), flush=True)
        if not differences:
            num_identical += 1
            remove(trial)
    print(f"{num_identical} of {options.kills} byte-identical, {num_kills} kills")
    return 0 if num_identical == options.kills else 1


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="scripts/kill-and-resume")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, default=ROOT / f"runs/kill-{datetime.now():%Y%m%d-%H%M%S}")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    options.data, options.run_dir = options.data.absolute(), options.run_dir.absolute()
    if options.run_dir.is_dir() and any(options.run_dir.iterdir()):
        parser.error(f"--run-dir must be new or empty, and {options.run_dir} is not; give another folder")
    if options.steps < EVAL_EVERY:
        parser.error(f"--steps must be {EVAL_EVERY} or more, so that there is an evaluation, got {options.steps}")
    return options


def train_command(options: argparse.Namespace, run: Path, cache: Path, *, resume: bool) -> list[str]:
    """Return the command of a launch; a resumed launch reads its settings from the run folder."""
    command = [str(BIN / "run-train"), "--run-dir", str(run), "--compilation-cache", str(cache)]
    if resume:
        return [*command, "--resume"]
    return [*command, "--data", str(options.data), "--steps", str(options.steps), *TRAINING]


def start(command: list[str], log: Path) -> "subprocess.Popen[bytes]":
    """Start a command in its own process group; its output is appended to ``log``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )


def log_of(run: Path) -> Path:
    """Return the log file of a run's launches, which is beside the run folder."""
    return run.with_name(f"{run.name}.log")


def run_reference(options: argparse.Namespace, run: Path, cache: Path, *, is_asked: bool) -> Reference:
    """Run a training without interruption."""
    started = time.monotonic()
    process = start(train_command(options, run, cache, resume=False), log_of(run))
    wait_until(lambda: num_lines(run / "loss.jsonl") > 0, process)
    start_s = time.monotonic() - started
    if is_asked:
        wait_until(lambda: num_lines(run / "loss.jsonl") >= SNAPSHOT_EVERY + 2, process)
        request = ["--learning-rate-factor", "0.5", "--evaluate"]
        subprocess.run([BIN / "control-run", run, *request], check=True, stdout=subprocess.DEVNULL, timeout=120)
    if (code := process.wait(LAUNCH_TIMEOUT_S)) != 0:
        raise SystemExit(f"the uninterrupted run failed with exit code {code}; see {log_of(run)}")
    return Reference(run, start_s, time.monotonic() - started, options.steps)


def describe_requests(run: Path) -> str:
    """Return a description of the requests that took effect in a run."""
    events = read_lines(run / "control.jsonl")
    return "; ".join(f"factor {e['learning_rate_factor']}, evaluation: at batch {e['pull']}" for e in events)


def draw_trial(number: int, base: Path, plain: Reference, asked: Reference, cache: Path, draw: random.Random) -> Trial:
    """Draw the kills of a training: at a random instant for every other training, else at each of `MOMENTS` in turn."""
    is_asked, timed = number % 2 == 0, asked
    if number % 10 == 5:
        # An empty cache: the launch is killed while it compiles, or while it writes to the cache.
        cache, timed = base / f"cache-{number}", plain
        kills = [Kill(draw.uniform(0, plain.start_s))]
    elif number % 4 in (1, 2):
        kills = [asked.draw_kill(draw)]
    else:
        moment = list(MOMENTS)[number // 4 % len(MOMENTS)]
        kills = [Kill(draw.choice([0.0, 0.003, 0.03, 0.3]) * draw.random(), moment)]
    kills += [timed.draw_kill(draw) for _ in range(draw.choice([0, 0, 0, 1, 2]))]
    return Trial(number, base / f"trial-{number}", asked if is_asked else plain, is_asked, kills, cache)


def run_trial(trial: Trial, options: argparse.Namespace) -> int:
    """Launch, kill and resume a training until it ends; return the number of kills."""
    prepare(trial)
    kills, num_kills = list(trial.kills), 0
    for _ in range(MOST_LAUNCHES):
        resumes = (trial.folder / "config.json").exists()
        log_of(trial.folder).touch()
        said_before = log_of(trial.folder).stat().st_size
        command = train_command(options, trial.folder, trial.cache, resume=resumes)
        kill = kills.pop(0) if kills else None
        code = run_and_kill(command, trial.folder, kill, options.steps, said_before)
        begun = describe_start(log_of(trial.folder), said_before, resumes)
        if code == -signal.SIGKILL and kill is not None:
            num_kills += 1
            trial.story.append(f"{begun}, killed {kill}, {describe_folder(trial.folder)}")
            continue
        if code == 0 and kill is not None and not num_kills:
            trial.story.append(f"{begun}, ended before it could be killed: trying again")
            prepare(trial)
            kills = [Kill(kill.after_s / 2, step=kill.step // 2)]
            continue
        trial.story.append(f"{begun}, ended" + ("" if code == 0 else f" WITH EXIT CODE {code}"))
        return num_kills
    trial.story.append(f"abandoned after {MOST_LAUNCHES} launches")
    return num_kills


def prepare(trial: Trial) -> None:
    """Create the run folder in the state at the start of the trial."""
    shutil.rmtree(trial.folder, ignore_errors=True)
    if trial.is_asked:
        trial.folder.mkdir()
        for name in ("config.json", "control.jsonl"):
            shutil.copy(trial.reference.folder / name, trial.folder / name)


def run_and_kill(command: list[str], run: Path, kill: Kill | None, steps: int, said_before: int) -> int:
    """Run a launch, kill its process group at the given instant, and return the exit code."""
    process = start(command, log_of(run))
    if kill is not None:
        wait_until(lambda: kill.has_come(run, steps, said_before), process)
        try:
            process.wait(kill.after_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait(LAUNCH_TIMEOUT_S)


def wait_until(is_so: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    """Wait until ``is_so`` or until the process exits; kill it and raise SystemExit if that takes too long."""
    deadline = time.monotonic() + LAUNCH_TIMEOUT_S
    while not is_so() and process.poll() is None:
        if time.monotonic() > deadline:
            os.killpg(process.pid, signal.SIGKILL)
            raise SystemExit(f"a launch made no progress for {LAUNCH_TIMEOUT_S:g} s and was killed: {process.args!r}")
        time.sleep(LOOK_EVERY_S)


def is_writing_snapshot(run: Path, _steps: int) -> bool:
    """Return whether the second snapshot of a run is being written."""
    return (run / "snapshots/.unfinished").exists() and (run / f"snapshots/{SNAPSHOT_EVERY}").exists()


def is_evaluating(run: Path, _steps: int) -> bool:
    """Return whether the losses before an evaluation are recorded and the evaluation is not."""
    steps = num_lines(run / "loss.jsonl")
    return steps >= EVAL_EVERY and not any(line["step"] == EVAL_EVERY for line in read_lines(run / "eval.jsonl"))


def is_evaluated(run: Path, _steps: int) -> bool:
    """Return whether an evaluation is recorded that is not in any snapshot yet."""
    return any(line["step"] == EVAL_EVERY for line in read_lines(run / "eval.jsonl"))


def is_at_its_end(run: Path, steps: int) -> bool:
    """Return whether all losses are recorded, so that the final files are being written."""
    return num_lines(run / "loss.jsonl") >= steps and any(
        line["step"] == steps for line in read_lines(run / "eval.jsonl")
    )


def has_last_snapshot(run: Path, steps: int) -> bool:
    """Return whether the last snapshot exists, so that the weights are written next."""
    return (run / f"snapshots/{steps}").exists()


MOMENTS: dict[str, Callable[[Path, int], bool]] = {
    "a snapshot was begun": is_writing_snapshot,
    "an evaluation was begun": is_evaluating,
    "the last loss": is_at_its_end,
    "an evaluation was recorded": is_evaluated,
    "the last snapshot": has_last_snapshot,
}


def num_lines(path: Path) -> int:
    """Return the number of complete lines of a file, 0 if it does not exist."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a log, none if it does not exist."""
    content = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in content.split(b"\n")[:-1]]


def read_output(log: Path, said_before: int) -> str:
    """Return the output of a launch so far; its log has ``said_before`` bytes of earlier output."""
    with log.open("rb") as file:
        file.seek(said_before)
        return file.read().decode(errors="replace")


def describe_start(log: Path, said_before: int, resumes: bool) -> str:
    """Return a description of where a launch started, according to its output."""
    if not resumes:
        return "started"
    output = read_output(log, said_before)
    if found := re.search(r"^resuming .* from (?:the snapshot of )?(step [\d,]+|its beginning)", output, re.MULTILINE):
        return f"resumed from {found[1]}"
    return "resumed, killed before it restored anything"


def describe_folder(run: Path) -> str:
    """Return a description of the files that a kill left on disk."""
    if not (run / "config.json").exists():
        return "no config.json on disk, to be started again"
    folder = run / "snapshots"
    steps = [int(path.name) for path in folder.iterdir() if path.name.isdigit()] if folder.exists() else []
    unfinished = ", one unfinished" if (folder / ".unfinished").exists() else ""
    newest = f"newest snapshot {max(steps)}" if steps else "no snapshot"
    counts = f"step {num_lines(run / 'loss.jsonl')}, {num_lines(run / 'eval.jsonl')} evaluations"
    return f"{counts}, {newest}{unfinished} on disk"


def compare(run: Path, reference: Path, steps: int) -> list[str]:
    """Return the differences between a run and its reference; empty if they are identical."""
    if not (run / "result.json").exists():
        return ["it has no result.json"]
    differences = []
    if (run / "model.safetensors").read_bytes() != (reference / "model.safetensors").read_bytes():
        differences.append("model.safetensors")
    if [line["step"] for line in read_lines(run / "loss.jsonl")] != list(range(1, steps + 1)):
        differences.append("the steps of loss.jsonl")
    for name, kept in COMPARED.items():
        ours, theirs = ([[line[key] for key in kept] for line in read_lines(each / name)] for each in (run, reference))
        if ours != theirs:
            same = [a == b for a, b in zip(ours, theirs, strict=False)]
            differences.append(f"{name} from line {[*same, False].index(False) + 1}")
    return differences + compare_snapshots(run, reference, steps)


def compare_snapshots(run: Path, reference: Path, steps: int) -> list[str]:
    """Return the differences between the last snapshots, which include momentum, averages and counters."""
    ours, theirs = (read_snapshot(each / "snapshots", steps).leaves for each in (run, reference))
    if ours.keys() != theirs.keys():
        return ["the names of the last snapshot"]
    others = [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()]
    return [f"{quantity(len(others), 'array')} of the last snapshot, such as {others[0]}"] if others else []


def remove(trial: Trial) -> None:
    """Remove the files of an identical run."""
    shutil.rmtree(trial.folder)
    log_of(trial.folder).unlink()
    if trial.cache.name != "cache":
        shutil.rmtree(trial.cache, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
