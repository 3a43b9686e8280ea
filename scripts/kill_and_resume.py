"""Whether a training that is killed at any instant and resumed ends in the same bits as one that is left alone.

Two references run without interruption: `plain`, and `asked`, of which `control-run` asks for another learning rate and
for an evaluation on its way. Each further training is begun anew, gets SIGKILL at a drawn instant (its whole process
group), is resumed by `run-train --resume`, perhaps killed again, and compared with its reference once it has ended.

At which batch a request takes effect is decided by the clock, so that a request sent anew would make another training.
The trainings compared with `asked` therefore begin as that run would have been found by a kill before its first
snapshot: with its `config.json` and its `control.jsonl`, and nothing else. All their launches are resumed ones, which
repeat the requests from the log. What the others do until they are killed is a fresh start, compilation included.

Instants come from the seed: a part of the time that a reference took to its first step, a step and a part of what one
takes, or a moment that is seen in the run folder (a snapshot or an evaluation under way, the end). Seconds alone would
not do: on a busy machine a run may be over when they are. scripts/kill-and-resume runs this.
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

from engine.records.snapshot import read_snapshot

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
EVAL_EVERY, SNAPSHOT_EVERY = 20, 7
# Everything that a step can depend on is on.
TRAINING = (
    "--image-size 32 --model resnet8 --batch 32 --accumulate-steps 2 --chunk 3 --optimizer nesterov --schedule cosine "
    "--warmup-steps 6 --ema-decay 0.99 --label-smoothing 0.1 --clip-norm 1 --skip-nonfinite 2 --flip 0.5 "
    "--crop random --crop-padding 4 --mixup 0.2 --brightness 0.2 --contrast 0.2 --saturation 0.2 --hue 0.05 "
    f"--erasing 0.25 --eval-every {EVAL_EVERY} --snapshot-every {SNAPSHOT_EVERY} --keep 3"
).split()
# No launch takes so long; one that does hangs, and that is an error too.
LAUNCH_TIMEOUT_S = 900.0
LOOK_EVERY_S = 0.0005
MOST_LAUNCHES = 12
# The rest of a line is measured.
COMPARED = {"loss.jsonl": ("step", "loss", "lr"), "eval.jsonl": ("step", "num_images", "top1", "top5", "loss")}


@dataclass(frozen=True)
class Kill:
    """When a launch is killed.

    Attributes:
        after_s: seconds, from what comes first of the following that is given.
        moment: is seen in the run folder.
        step: is in the loss log, and the launch trains.
    """

    after_s: float
    moment: str = ""
    step: int = 0

    def __str__(self) -> str:
        return f"{self.after_s:.3f} s after {self.moment or (f'step {self.step}' if self.step else 'the start')}"

    def has_come(self, run: Path, steps: int, said_before: int) -> bool:
        """Tells whether the seconds are to be counted from now on."""
        if self.moment:
            return MOMENTS[self.moment](run, steps)
        # A launch before this one left its lines; they are cut by the time that this one has its program.
        is_training = not self.step or "\ncompiled training program" in read_said(log_of(run), said_before)
        return is_training and num_lines(run / "loss.jsonl") >= self.step


@dataclass
class Reference:
    """An uninterrupted run.

    Attributes:
        folder: of the run.
        start_s: from the start of its process to its first loss.
        duration_s: to its end.
        steps: updates made.
    """

    folder: Path
    start_s: float
    duration_s: float
    steps: int

    def draw_kill(self, draw: random.Random) -> Kill:
        """Draws an instant of a launch that takes as long as this one did."""
        if draw.random() < self.start_s / self.duration_s:
            return Kill(draw.uniform(0, self.start_s))
        step_s = (self.duration_s - self.start_s) / self.steps
        return Kill(draw.uniform(0, step_s), step=draw.randrange(1, self.steps))


@dataclass
class Trial:
    """A training that is interrupted.

    Attributes:
        number: of the trial, from 1.
        folder: of the run.
        reference: what it must come to.
        is_asked: whether it replays the requests of its reference.
        kills: for its launches, in order; further launches are left alone.
        cache: of compiled programs.
        story: what happened, in words.
    """

    number: int
    folder: Path
    reference: Reference
    is_asked: bool
    kills: list[Kill]
    cache: Path
    story: list[str] = field(default_factory=list)


def main() -> int:
    """Runs the references and the trials; gives the exit code."""
    options = parse_arguments()
    base, draw = options.run_dir, random.Random(options.seed)
    base.mkdir(parents=True, exist_ok=True)
    cache = base / "cache"
    print(f"references in {base}, of {options.steps} steps", flush=True)
    plain = run_reference(options, base / "plain", cache, is_asked=False)
    print(f"plain: {plain.duration_s:.1f} s, its program compiled", flush=True)
    asked = run_reference(options, base / "asked", cache, is_asked=True)
    print(f"asked: {asked.duration_s:.1f} s, {told_requests(asked.folder)}", flush=True)
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
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="scripts/kill-and-resume")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, default=ROOT / f"runs/kill-{datetime.now():%Y%m%d-%H%M%S}")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    options.data, options.run_dir = options.data.absolute(), options.run_dir.absolute()
    if options.run_dir.is_dir() and any(options.run_dir.iterdir()):
        parser.error(f"--run-dir must be new or empty, and {options.run_dir} is not: name another")
    if options.steps < EVAL_EVERY:
        parser.error(f"--steps must be {EVAL_EVERY} or more, to have an evaluation on the way, got {options.steps}")
    return options


def train_command(options: argparse.Namespace, run: Path, cache: Path, *, resume: bool) -> list[str]:
    """Gives the command of a launch; one that is resumed has its settings from the run folder."""
    command = [str(BIN / "run-train"), "--run-dir", str(run), "--compilation-cache", str(cache)]
    if resume:
        return [*command, "--resume"]
    return [*command, "--data", str(options.data), "--steps", str(options.steps), *TRAINING]


def start(command: list[str], log: Path) -> "subprocess.Popen[bytes]":
    """Starts a process group of its own; what it says goes to the end of a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )


def log_of(run: Path) -> Path:
    """Gives where the launches of a run speak; beside it, as the folder is theirs."""
    return run.with_name(f"{run.name}.log")


def run_reference(options: argparse.Namespace, run: Path, cache: Path, *, is_asked: bool) -> Reference:
    """Runs a training without interruption."""
    started = time.monotonic()
    process = start(train_command(options, run, cache, resume=False), log_of(run))
    wait_until(lambda: num_lines(run / "loss.jsonl") > 0, process)
    start_s = time.monotonic() - started
    if is_asked:
        wait_until(lambda: num_lines(run / "loss.jsonl") >= SNAPSHOT_EVERY + 2, process)
        request = ["--learning-rate-factor", "0.5", "--evaluate"]
        subprocess.run([BIN / "control-run", run, *request], check=True, stdout=subprocess.DEVNULL, timeout=120)
    if (code := process.wait(LAUNCH_TIMEOUT_S)) != 0:
        raise SystemExit(f"the uninterrupted run must end well, and ended with {code}: see {log_of(run)}")
    return Reference(run, start_s, time.monotonic() - started, options.steps)


def told_requests(run: Path) -> str:
    """Gives in words what took effect in a run."""
    events = read_lines(run / "control.jsonl")
    return "; ".join(f"factor {e['learning_rate_factor']}, evaluation: at batch {e['pull']}" for e in events)


def draw_trial(number: int, base: Path, plain: Reference, asked: Reference, cache: Path, draw: random.Random) -> Trial:
    """Draws when a training is killed: every other time anywhere, else in turn at the moments that matter most."""
    is_asked, timed = number % 2 == 0, asked
    if number % 10 == 5:
        # An empty cache: it is killed while it compiles, or while it keeps what it has compiled.
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
    """Launches, kills and resumes a training until it ends; gives the number of kills."""
    prepare(trial)
    kills, num_kills = list(trial.kills), 0
    for _ in range(MOST_LAUNCHES):
        resumes = (trial.folder / "config.json").exists()
        log_of(trial.folder).touch()
        said_before = log_of(trial.folder).stat().st_size
        command = train_command(options, trial.folder, trial.cache, resume=resumes)
        kill = kills.pop(0) if kills else None
        code = run_and_kill(command, trial.folder, kill, options.steps, said_before)
        begun = tell_start(log_of(trial.folder), said_before, resumes)
        if code == -signal.SIGKILL and kill is not None:
            num_kills += 1
            trial.story.append(f"{begun}, killed {kill}, {tell_folder(trial.folder)}")
            continue
        if code == 0 and kill is not None and not num_kills:
            trial.story.append(f"{begun}, ended before it was to be killed: once more")
            prepare(trial)
            kills = [Kill(kill.after_s / 2, step=kill.step // 2)]
            continue
        trial.story.append(f"{begun}, ended" + ("" if code == 0 else f" WITH EXIT CODE {code}"))
        return num_kills
    trial.story.append(f"given up after {MOST_LAUNCHES} launches")
    return num_kills


def prepare(trial: Trial) -> None:
    """Makes a training's folder as it is when the trial begins."""
    shutil.rmtree(trial.folder, ignore_errors=True)
    if trial.is_asked:
        trial.folder.mkdir()
        for name in ("config.json", "control.jsonl"):
            shutil.copy(trial.reference.folder / name, trial.folder / name)


def run_and_kill(command: list[str], run: Path, kill: Kill | None, steps: int, said_before: int) -> int:
    """Runs a launch, kills its process group at the instant, and gives the exit code."""
    process = start(command, log_of(run))
    if kill is not None:
        wait_until(lambda: kill.has_come(run, steps, said_before), process)
        try:
            process.wait(kill.after_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait(LAUNCH_TIMEOUT_S)


def wait_until(is_so: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    """Waits for something that a process does; ends with it, and with an error where it takes too long."""
    deadline = time.monotonic() + LAUNCH_TIMEOUT_S
    while not is_so() and process.poll() is None:
        if time.monotonic() > deadline:
            os.killpg(process.pid, signal.SIGKILL)
            raise SystemExit(f"a launch must get there within {LAUNCH_TIMEOUT_S:g} s, and hangs: {process.args!r}")
        time.sleep(LOOK_EVERY_S)


def is_writing_snapshot(run: Path, _steps: int) -> bool:
    """Tells whether the second snapshot of a run is being written."""
    return (run / "snapshots/.unfinished").exists() and (run / f"snapshots/{SNAPSHOT_EVERY}").exists()


def is_evaluating(run: Path, _steps: int) -> bool:
    """Tells whether the losses before an evaluation are there and it is not."""
    steps = num_lines(run / "loss.jsonl")
    return steps >= EVAL_EVERY and not any(line["step"] == EVAL_EVERY for line in read_lines(run / "eval.jsonl"))


def is_evaluated(run: Path, _steps: int) -> bool:
    """Tells whether an evaluation was recorded that no snapshot knows of yet."""
    return any(line["step"] == EVAL_EVERY for line in read_lines(run / "eval.jsonl"))


def is_at_its_end(run: Path, steps: int) -> bool:
    """Tells whether the losses are all there, and what comes after them is being written."""
    return num_lines(run / "loss.jsonl") >= steps and any(
        line["step"] == steps for line in read_lines(run / "eval.jsonl")
    )


def has_last_snapshot(run: Path, steps: int) -> bool:
    """Tells whether the last snapshot is there, and the weights come next."""
    return (run / f"snapshots/{steps}").exists()


MOMENTS: dict[str, Callable[[Path, int], bool]] = {
    "a snapshot was begun": is_writing_snapshot,
    "an evaluation was begun": is_evaluating,
    "the last loss": is_at_its_end,
    "an evaluation was recorded": is_evaluated,
    "the last snapshot": has_last_snapshot,
}


def num_lines(path: Path) -> int:
    """Counts the whole lines of a file that may not be there."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads the whole lines of a log that may not be there."""
    content = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in content.split(b"\n")[:-1]]


def read_said(log: Path, said_before: int) -> str:
    """Gives what a launch has said so far."""
    with log.open("rb") as file:
        file.seek(said_before)
        return file.read().decode(errors="replace")


def tell_start(log: Path, said_before: int, resumes: bool) -> str:
    """Gives where a launch began, by its own words."""
    if not resumes:
        return "begun"
    said = read_said(log, said_before)
    if found := re.search(r"^resuming .* from (?:the snapshot of )?(step [\d,]+|its beginning)", said, re.MULTILINE):
        return f"resumed from {found[1]}"
    return "resumed, from nowhere yet"


def tell_folder(run: Path) -> str:
    """Gives what a kill left on disk."""
    if not (run / "config.json").exists():
        return "no config.json on disk, to be begun anew"
    folder = run / "snapshots"
    steps = [int(path.name) for path in folder.iterdir() if path.name.isdigit()] if folder.exists() else []
    unfinished = ", one unfinished" if (folder / ".unfinished").exists() else ""
    newest = f"newest snapshot {max(steps)}" if steps else "no snapshot"
    counts = f"step {num_lines(run / 'loss.jsonl')}, {num_lines(run / 'eval.jsonl')} evaluations"
    return f"{counts}, {newest}{unfinished} on disk"


def compare(run: Path, reference: Path, steps: int) -> list[str]:
    """Gives what differs between a run and its reference; nothing where all that must be the same is."""
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
    """Gives what differs in the last snapshots: momentum, averages and counters, which the weights do not show."""
    ours, theirs = (read_snapshot(each / "snapshots", steps).leaves for each in (run, reference))
    if ours.keys() != theirs.keys():
        return ["the names of the last snapshot"]
    others = [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()]
    return [f"{len(others)} arrays of the last snapshot, such as {others[0]}"] if others else []


def remove(trial: Trial) -> None:
    """Removes what an identical run left."""
    shutil.rmtree(trial.folder)
    log_of(trial.folder).unlink()
    if trial.cache.name != "cache":
        shutil.rmtree(trial.cache, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
