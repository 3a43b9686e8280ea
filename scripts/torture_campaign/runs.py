"""The kind ``runs``: damage to run folders before or during a resume, an evaluation, a replay or `tail-run`."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from scripts.torture_campaign.case import Judgement, Trial, Verdict, judge_exit
from scripts.torture_campaign.commands import Finished, Running
from scripts.torture_campaign.damage import damage, replace
from scripts.torture_campaign.oracle import changed_keys, read_lines, read_logs, read_tree, read_weights
from scripts.torture_campaign.pack_oracle import make_sound_pack

type RunFault = Callable[[Path, random.Random], object]
type Lines = list[bytes]

TOP_FILES = ("config.json", "loss.jsonl", "eval.jsonl", "control.jsonl", "result.json", "model.safetensors")
_LOGS = TOP_FILES[1:4]
_FIRST_STEPS, _STEPS, _RESUMED_STEPS = 100, 150, 200
_TRAINING = (
    "--model resnet8 --image-size 16 --batch 8 --infeed-timeout 5 --eval-every 50 --snapshot-every 0 --keep 0 "
    "--flip 0.5 --ema-decay 0.9"
)
_TRAINING_TIMEOUT_S, _READING_TIMEOUT_S = 180.0, 20.0
_REQUEST_TIMEOUT_S = 300.0
_REPLAYED_SHARE = 0.1
_INTERRUPTED = "interrupted-weights-foreign"
_LIVE_STEPS = _STEPS + 1000
"""Enough that a fault during the run occurs long before its end."""
_STEPS_BEFORE_FAULT = 70
"""Late enough that an evaluation has been logged: a log that is removed before it is opened is found missing anyway."""
_LIVE_TIMEOUT_S = 60.0
_POLL_EVERY_S = 0.005
# Another valid value of each setting.
_CHANGED_SETTINGS: dict[str, Any] = {
    "seed": 1, "momentum": 0.5, "learning_rate": 0.5, "hue": 0.1, "mixup": 0.2, "flip": 0.25, "weight_decay": 0.01,
    "label_smoothing": 0.1, "ema_decay": 0.5, "schedule": "cosine", "optimizer": "nesterov", "image_size": 24,
    "batch": 16, "warmup_steps": 150, "eval_mirror": True, "precision": "bfloat16",
}  # fmt: skip
_INVALID_LINES = (
    b"\n", b"null\n", b"[]\n", b"{}\n", b"{\n", b"\xff\xfe\n", b'{"step": 1e999}\n', b'{"step": "\x1b[2J"}\n',
    b'{"step": ' + b"9" * 5000 + b"}\n", b"[" * 100_000 + b"\n", b'{"step": "\\ud800"}\n', b"a" * 3_000_000,
    b'{"step": -1, "loss": 1.0, "lr": 0.1, "images_per_s": 1.0, "wait_ms": 0.0, "time": 1.0}\n',
    b'{"step": 5, "loss": NaN, "lr": null, "images_per_s": 1.0, "wait_ms": 0.0, "time": 1e400}\n',
)  # fmt: skip


def _change_setting(name: str, run: Path, _draw: random.Random) -> None:
    path = run / "config.json"
    document = json.loads(path.read_text())
    document["config"][name] = _CHANGED_SETTINGS[name]
    path.write_text(json.dumps(document, indent=2) + "\n")


def _replace(key: str, how: str, run: Path, _draw: random.Random) -> None:
    replace(run / key, how)


def _flip_weights(bit: int, run: Path, draw: random.Random) -> None:
    """Flip bit 6 of a byte of the weights, or the signs of many: a single weight may be in a filter without effect."""
    path = run / "model.safetensors"
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    places = [draw.randrange(start, len(content))]
    if bit == 7:
        signs = range(start + 3, len(content), 4)
        places = draw.sample(signs, len(signs) // 50)
    for at in places:
        content[at] ^= 1 << bit
    path.write_bytes(content)


def _swap_lines(lines: Lines, _others: Lines, draw: random.Random) -> None:
    one, other = draw.choices(range(len(lines)), k=2)
    lines[one], lines[other] = lines[other], lines[one]
    if one == other:
        lines.insert(one, lines[one])


def _change_digit(lines: Lines, _others: Lines, draw: random.Random) -> None:
    content = bytearray(b"".join(lines))
    at = draw.choice([at for at, byte in enumerate(content) if chr(byte).isdigit()])
    content[at] = ord(str((int(chr(content[at])) + draw.randrange(1, 10)) % 10))
    lines[:] = [bytes(content)]


def _insert(lines: Lines, line: bytes, draw: random.Random) -> None:
    lines.insert(draw.randrange(len(lines) + 1), line)


LINE_FAULTS: dict[str, Callable[[Lines, Lines, random.Random], object]] = {
    "line-foreign": lambda lines, others, draw: _insert(
        lines, draw.choice(others or [b'{"step": 3, "pull": 2}\n']), draw
    ),
    "line-doubled": lambda lines, _, draw: _insert(lines, draw.choice(lines), draw),
    "lines-swapped": _swap_lines,
    "line-missing": lambda lines, _, draw: lines.pop(draw.randrange(len(lines))),
    "line-strange": lambda lines, _, draw: _insert(lines, draw.choice(_INVALID_LINES), draw),
    "digit": _change_digit,
}
"""By name: a function that changes a log's lines, given those of another run."""


def _swap_snapshots(run: Path, _draw: random.Random) -> None:
    first, last = (run / f"snapshots/{step}" for step in (_FIRST_STEPS, _STEPS))
    first.rename(run / "snapshots/between")
    last.rename(first)
    (run / "snapshots/between").rename(last)


def _rename_snapshot(run: Path, draw: random.Random) -> None:
    old, new = draw.choice([(_STEPS, _STEPS + 10), (_FIRST_STEPS, 120), (_STEPS, 10)])
    (run / f"snapshots/{old}").rename(run / f"snapshots/{new}")


def _empty(run: Path, _draw: random.Random) -> None:
    for entry in list(run.iterdir()):
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def _copy_log(run: Path, _draw: random.Random) -> None:
    """Replace the loss log by a copy of itself, as many editors do."""
    shutil.copyfile(run / "loss.jsonl", copy := run.with_name("copy"))
    copy.rename(run / "loss.jsonl")


LIVE_FAULTS: dict[str, RunFault] = {
    "live-emptied": _empty,
    # Renamed first, because the run may be creating files in it.
    "live-folder-removed": lambda run, _: shutil.rmtree(run.rename(run.with_name("removed")), ignore_errors=True),
    "live-config-removed": partial(_replace, "config.json", "removed"),
    "live-log-removed": partial(_replace, "loss.jsonl", "removed"),
    "live-log-copied": _copy_log,
}
"""Faults of the folder of a running training, by name: what the run writes afterwards is lost or incomplete."""


@dataclass
class RunKind:
    """Faults of run folders.

    Attributes:
        cache: folder of compiled programs.
        run: the sound run of `_STEPS` with snapshots of two steps, never changed.
        donor: a run with another seed.
        tree: the bytes of each file of the sound run.
        resumed: what the sound run has recorded once it was resumed, as `records_of` returns it.
        accuracy: the output of run-eval on the sound run, without its time.
    """

    cache: Path
    run: Path = Path()
    donor: Path = Path()
    tree: dict[str, bytes] = field(default_factory=dict)
    resumed: dict[str, Any] = field(default_factory=dict)
    accuracy: dict[str, Any] = field(default_factory=dict)
    heavy: ClassVar[tuple[str, ...]] = ()

    def prepare(self, trial: Trial) -> None:
        """Train the sound run in two launches, with a request during the first; then train the donor run."""
        pack = make_sound_pack(trial, "raw").folder
        self.run, self.donor, resumed = (trial.folder / f"run-{name}" for name in ("sound", "donor", "resumed"))
        train = ["run-train", "--data", str(pack), "--compilation-cache", str(self.cache), *_TRAINING.split()]
        train += ["--steps", str(_FIRST_STEPS), "--run-dir"]
        ask_during(trial, trial.start([*train, str(self.run)]), self.run, "--learning-rate-factor", "0.5")
        trial.run_soundly([*train, str(self.donor), "--seed", "1"])
        for run in (self.run, self.donor):
            trial.run_soundly(_resume_command(run, _STEPS))
        shutil.copytree(self.run, resumed)
        trial.run_soundly(_resume_command(resumed, _RESUMED_STEPS))
        self.accuracy = accuracy_of(trial.run_soundly(_eval_command(self.run)).out)
        self.tree, self.resumed = read_tree(self.run), records_of(resumed)

    def faults(self) -> dict[str, RunFault]:
        """Return the faults that are always tried, by name."""
        faults: dict[str, RunFault] = {
            f"setting-{name}": partial(_change_setting, name) for name in _CHANGED_SETTINGS
        } | self._folder_faults()
        for fault, name in product(LINE_FAULTS, _LOGS):
            faults[f"{fault}:{name}"] = partial(self._change_lines, name, fault)
        snapshot = next(key for key in sorted(self.tree) if key.startswith(f"snapshots/{_STEPS}/state/d/"))
        for how, key in [*product(("pipe", "dangling"), (*TOP_FILES, snapshot)), ("removed", "control.jsonl")]:
            faults[f"{how}:{key.split('/')[0]}"] = partial(_replace, key, how)
        return faults

    def _folder_faults(self) -> dict[str, RunFault]:
        return {
            "weights-signs": partial(_flip_weights, 7),
            "weights-bit": partial(_flip_weights, 6),
            "weights-foreign": lambda run, _: self._take(run, "model.safetensors"),
            "snapshots-swapped": _swap_snapshots,
            "snapshot-renamed": _rename_snapshot,
            "snapshots-foreign": lambda run, _: self._take(run, "snapshots"),
            "snapshot-state-foreign": lambda run, _: self._take(run, f"snapshots/{_STEPS}/state"),
            "snapshots-removed": lambda run, draw: shutil.rmtree(
                run / draw.choice([f"snapshots/{_STEPS}", "snapshots"])
            ),
            "config-foreign": lambda run, _: self._take(run, "config.json"),
        }

    def _take(self, run: Path, key: str) -> None:
        """Take a file or folder of the run with another seed."""
        if (run / key).is_dir():
            shutil.rmtree(run / key)
            shutil.copytree(self.donor / key, run / key)
        else:
            shutil.copyfile(self.donor / key, run / key)

    def _change_lines(self, name: str, fault: str, run: Path, draw: random.Random) -> None:
        ours, others = (
            path.read_bytes().splitlines(keepends=True) if path.exists() else []
            for path in (run / name, self.donor / name)  # a run without requests has no control.jsonl
        )
        LINE_FAULTS[fault](ours, others, draw)
        (run / name).write_bytes(b"".join(ours))

    def names(self, count: int) -> list[str]:
        """Return the named cases, then drawn ones up to ``count`` in all."""
        names = [*self.faults(), *LIVE_FAULTS, _INTERRUPTED]
        return names + [f"random-{number}" for number in range(max(0, count - len(names)))]

    def attempt(self, trial: Trial) -> None:
        """Damage a copy of the sound run, run the commands on it and judge them."""
        draw, run, name = trial.case.draw(), trial.folder / "run", trial.case.name
        shutil.copytree(self.run, run)
        if name in LIVE_FAULTS or name == _INTERRUPTED:
            return self._attempt_live(trial, run, name, draw)
        if trial.case.number is None:
            self.faults()[name](run, draw)
        else:
            name = self._damage(run, draw)
        changed = set(changed_keys(read_tree(run), self.tree))
        trial.fault = f"{name}, changed {sorted(changed)[:3]}"
        # A resume writes to the run folder, so it comes last.
        finished = trial.run(["tail-run", str(run), "--once"], _READING_TIMEOUT_S)
        trial.judge(_judge_run_exit(finished, run) or Judgement("tail-run", Verdict.HARMLESS))
        is_replayed = bool(changed & {"config.json", "loss.jsonl", "eval.jsonl"}) or draw.random() < _REPLAYED_SHARE
        if changed & {"config.json", "model.safetensors", "result.json"} and not trial.has_hung:
            self._judge_evaluation(trial, run)
        if is_replayed and not trial.has_hung:
            finished = trial.run(["verify-run", str(run), "--from", "0"], _TRAINING_TIMEOUT_S)
            trial.judge(judge_replay(finished, self.resumed, run))
        if not trial.has_hung:
            finished = trial.run(_resume_command(run, _RESUMED_STEPS), _TRAINING_TIMEOUT_S)
            trial.judge(_judge_run_exit(finished, run) or compare_records("run-train", self.resumed, run))
        return None

    def _damage(self, run: Path, draw: random.Random) -> str:
        """Apply one drawn fault to a copy of the sound run; say what was done."""
        faults, (kind,) = self.faults(), draw.choices(["lines", "folder", "top", "snapshot"], [25, 10, 40, 25])
        if kind in ("lines", "folder"):
            name = draw.choice([
                name for name in faults if (name.split(":")[0] in LINE_FAULTS if kind == "lines" else
                                            name in self._folder_faults())
            ])  # fmt: skip
            faults[name](run, draw)
            return name
        key = draw.choice(TOP_FILES if kind == "top" else [each for each in self.tree if "/" in each])
        return f"{key}: {damage(run / key, draw)}"

    def _attempt_live(self, trial: Trial, run: Path, name: str, draw: random.Random) -> None:
        """Resume a run and apply a fault while it trains: it must end with an error and write its weights.

        A run that has the weights of another run and is killed before it writes its own is evaluated.
        """
        if name == _INTERRUPTED:
            self._take(run, "model.safetensors")
        running = trial.start(_resume_command(run, _LIVE_STEPS))
        deadline = time.monotonic() + _LIVE_TIMEOUT_S
        while len(read_lines(run / "loss.jsonl")) < _STEPS + _STEPS_BEFORE_FAULT and not running.is_over():
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_EVERY_S)
        trial.fault = name
        if name != _INTERRUPTED:
            LIVE_FAULTS[name](run, draw)
            trial.judge(judge_live(trial.end(running, _LIVE_TIMEOUT_S), run))
            return
        if not running.is_over():
            running.kill()
        finished = trial.end(running, _LIVE_TIMEOUT_S)
        if not finished.killed and (ended := _judge_run_exit(finished, run)) is not None:
            trial.judge(ended)
        self._judge_evaluation(trial, run)

    def _judge_evaluation(self, trial: Trial, run: Path) -> None:
        finished = trial.run(_eval_command(run), _TRAINING_TIMEOUT_S)
        trial.judge(judge_evaluation(finished, self.accuracy, run))


def ask_during(trial: Trial, running: Running, run: Path, *request: str) -> Finished:
    """Send a request to a run as soon as it has its folder, during compilation; wait for the end of the run.

    Raises:
        RuntimeError: the run failed or did not accept the request.
    """
    is_accepted = False
    while not is_accepted and not running.is_over() and time.monotonic() < running.started_s + _REQUEST_TIMEOUT_S:
        is_accepted = trial.run(["control-run", str(run), *request], _TRAINING_TIMEOUT_S).code == 0
    finished = trial.end(running, _REQUEST_TIMEOUT_S)
    if finished.code != 0 or not is_accepted:
        raise RuntimeError(f"the sound run failed, or did not accept a request: {finished.output}")
    return finished


def _resume_command(run: Path, steps: int) -> list[str]:
    return ["run-train", "--run-dir", str(run), "--resume", "--steps", str(steps)]


def _eval_command(run: Path) -> list[str]:
    return ["run-eval", str(run), "--json"]


def accuracy_of(said: bytes) -> dict[str, Any]:
    """Return the JSON output of run-eval without the time; empty if it is not a JSON object."""
    try:
        document = json.loads(said)
    except ValueError:
        return {}
    return {key: value for key, value in document.items() if key != "time"} if isinstance(document, dict) else {}


def records_of(run: Path) -> dict[str, Any]:
    """Return the losses and evaluations of a run, and its weights, or "unreadable" under that name."""
    try:
        weights = read_weights(run / "model.safetensors")
    except Exception as error:  # noqa: BLE001 - any error means that the weights are missing or damaged
        weights = {"unreadable": str(error)}
    return {**read_logs(run), "weights": weights}


def _judge_run_exit(finished: Finished, run: Path) -> Judgement | None:
    names = (str(run), *TOP_FILES, "snapshot", "data", "RUN")
    return judge_exit(finished, names=names, refusals=(1, 2))


def judge_evaluation(finished: Finished, sound: Mapping[str, Any], run: Path) -> Judgement:
    """Judge an evaluation of the run: its accuracy must equal that of the sound run."""
    ended = _judge_run_exit(finished, run)
    if ended is None and (found := accuracy_of(finished.out)) != sound:
        ours, theirs = ({key: each.get(key) for key in ("top1", "loss")} for each in (found, sound))
        ended = Judgement("run-eval", Verdict.WRONG, f"{ours}, but the sound run has {theirs}")
    return ended or Judgement("run-eval", Verdict.HARMLESS)


def judge_replay(finished: Finished, sound: Mapping[str, Any], run: Path) -> Judgement:
    """Judge a replay: it must not report the same bits if a line differs from the sound run's.

    A truncated end is not a difference.
    """
    ended = _judge_run_exit(finished, run)
    if finished.code == 1 and finished.out.startswith(b"differs"):
        ended = Judgement("verify-run", Verdict.DETECTED, "differs")
    for name, lines in read_logs(run).items():
        if ended is None and lines[: len(sound[name])] != sound[name][: len(lines)]:
            ended = Judgement("verify-run", Verdict.WRONG, f"reported the same bits, although {name} differs")
    return ended or Judgement("verify-run", Verdict.HARMLESS)


def judge_live(finished: Finished, run: Path) -> Judgement:
    """Judge a run whose folder lost files before the end: it must not succeed, and must leave its weights."""
    ended = _judge_run_exit(finished, run)
    if ended is None:
        return Judgement("run-train", Verdict.WRONG, "succeeded, although its folder had lost files")
    weights = records_of(run)["weights"]
    if ended.verdict is Verdict.DETECTED and "unreadable" in weights:
        return Judgement(
            "run-train", Verdict.WRONG, f"failed with a message, but left no readable weights: {weights['unreadable']}"
        )
    return ended


def compare_records(name: str, sound: Mapping[str, Any], run: Path) -> Judgement:
    """Judge what a command left: its weights, losses and evaluations must equal those of the sound run."""
    found = records_of(run)
    for key, theirs in sound.items():
        if (ours := found[key]) != theirs:
            same = [one == other for one, other in zip(ours, theirs, strict=False)]
            where = "" if key == "weights" else f" from line {[*same, False].index(False) + 1} on"
            return Judgement(name, Verdict.WRONG, f"{key} differ{where}: {str(ours)[:80]}")
    return Judgement(name, Verdict.HARMLESS)
