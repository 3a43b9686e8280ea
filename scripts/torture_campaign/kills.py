"""The kind ``kills``: SIGKILL at any instant of packing and training, which must not change the result.

Trainings are compared with two that are not killed: `plain`, and `asked`, which receives a learning rate factor and an
evaluation request. The batch at which a request takes effect depends on timing, so it cannot be sent again: the
trainings compared with `asked` start in the state that a kill before the first snapshot would have left, with its
`config.json` and its `control.jsonl`, and repeat the requests from the log. The others start afresh, some of them with
an empty cache.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from loopfeed.engine.records.snapshot import read_snapshot
from scripts.torture_campaign.calls import judge_last
from scripts.torture_campaign.case import Judgement, Trial, Verdict
from scripts.torture_campaign.commands import Running, output_files
from scripts.torture_campaign.oracle import changed_keys, read_lines, read_tree
from scripts.torture_campaign.pack_oracle import make_sound_pack
from scripts.torture_campaign.runs import ask_during, compare_records, records_of

EVAL_EVERY, SNAPSHOT_EVERY = 20, 7
# Enables everything that a step can depend on.
TRAINING = (
    "--image-size 32 --model resnet8 --batch 32 --accumulate-steps 2 --chunk 3 --optimizer nesterov --schedule cosine "
    "--warmup-steps 6 --ema-decay 0.99 --label-smoothing 0.1 --clip-norm 1 --skip-nonfinite 2 --flip 0.5 "
    "--crop random --crop-padding 4 --mixup 0.2 --brightness 0.2 --contrast 0.2 --saturation 0.2 --hue 0.05 "
    f"--erasing 0.25 --eval-every {EVAL_EVERY} --snapshot-every {SNAPSHOT_EVERY} --keep 3"
).split()
STAGES = f"""
[[stages]]
until = {EVAL_EVERY - 3}
image_size = 24
batch = 16
freeze = "layer1.*"

[[stages]]
"""
CANVASES = ("square", "3:2")
"""What the packs that are killed store of an image."""
_STEPS = 2 * EVAL_EVERY
_NUM_IMAGES, _SIDE, _SHARD_IMAGES = 400, 160, 16
_NUM_SHARDS = _NUM_IMAGES // _SHARD_IMAGES
_TIMEOUT_S = 120.0
_POLL_EVERY_S = 0.0005


def _has_evaluated(run: Path, step: int) -> bool:
    return any(line.get("step") == step for line in read_lines(run / "eval.jsonl"))


def _num_steps(run: Path) -> int:
    return len(read_lines(run / "loss.jsonl"))


def _num_shards(pack: Path) -> int:
    return sum(1 for _ in pack.glob("train/pixels/c/*/0/0"))


MOMENTS: dict[str, Callable[[Path], bool]] = {
    "a snapshot was begun": lambda run: (
        (run / "snapshots/.unfinished").exists() and (run / f"snapshots/{SNAPSHOT_EVERY}").exists()
    ),
    "an evaluation was begun": lambda run: _num_steps(run) >= EVAL_EVERY and not _has_evaluated(run, EVAL_EVERY),
    "the last loss": lambda run: _num_steps(run) >= _STEPS and _has_evaluated(run, _STEPS),
    "an evaluation was recorded": lambda run: _has_evaluated(run, EVAL_EVERY),
    "the last snapshot": lambda run: (run / f"snapshots/{_STEPS}").exists(),
}
"""Events that are visible in a run folder, after which a training is killed."""


@dataclass
class KillKind:
    """Kills of packing and of training.

    Attributes:
        cache: folder of compiled programs.
        data: the pack that is trained on; None for a sound one.
        source: the images that are packed.
        stages: the stages of the training, in which batch, image size and frozen parameters differ.
        packed: the bytes of each file of the uninterrupted packs, by their canvas.
        runs: the uninterrupted runs.
        records: what they recorded.
        seconds: the duration of each, by ``packing`` and ``training``.
    """

    cache: Path
    data: Path | None = None
    source: Path = Path()
    stages: Path = Path()
    packed: dict[str, dict[str, bytes]] = field(default_factory=dict)
    runs: dict[str, Path] = field(default_factory=dict)
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    heavy: ClassVar[tuple[str, ...]] = ()

    def prepare(self, trial: Trial) -> None:
        """Pack and train without interruption."""
        self.source, dest = trial.folder / "images", trial.folder / "packed"
        random_ = np.random.default_rng(2)
        for number in range(_NUM_IMAGES):
            path = self.source / f"class-{number % 4}" / f"{number:04}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            shape = _SIDE + 40 * (number % 3), _SIDE + 30 * (number % 2)
            pixels = random_.integers(0, 256, (*shape, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(path, compress_level=1)
        (trial.folder / "stages.toml").write_text(STAGES)
        self.stages = trial.folder / "stages.toml"
        self.data = self.data or make_sound_pack(trial, "raw").folder
        for number, canvas in enumerate(CANVASES):
            packing = pack_command(self.source, dest / f"{number}", canvas)
            self.seconds["packing"] = trial.run_soundly(packing).seconds
            self.packed[canvas] = read_tree(dest / f"{number}")
        self.runs = {name: trial.folder / name for name in ("asked", "plain")}
        ask_during(trial, trial.start(self._train(self.runs["asked"])), self.runs["asked"],
                   "--learning-rate-factor", "0.5", "--evaluate")  # fmt: skip
        # The second training reads its program from the cache, as the killed ones do.
        self.seconds["training"] = trial.run_soundly(self._train(self.runs["plain"])).seconds
        self.records = {name: records_of(run) for name, run in self.runs.items()}

    def names(self, count: int) -> list[str]:
        """Return the cases, which alternate between packing and training."""
        return [f"{('packing', 'training')[number % 2]}-{number}" for number in range(count)]

    def attempt(self, trial: Trial) -> None:
        """Kill a command one or more times, run it again to its end, and compare the result."""
        what, number = trial.case.name.split("-")
        draw, dest = trial.case.draw(), trial.folder / what
        reference = "asked" if int(number) % 4 == 1 else "plain"
        if what == "packing":
            reference = CANVASES[int(number) // 2 % 2]
        cache = trial.folder / "cache" if int(number) % 10 == 3 else self.cache
        if what == "training" and reference == "asked":
            dest.mkdir()
            for name in ("config.json", "control.jsonl"):
                shutil.copy(self.runs[reference] / name, dest / name)
        instants = []
        for _ in range(draw.choice([1, 1, 2, 3])):
            running = trial.start(self._command(what, reference, dest, cache))
            instants.append(self._kill(running, what, draw, dest))
            finished = trial.end(running, _TIMEOUT_S)
            if not finished.killed or finished.hung:
                break
        trial.fault = f"{what} ({reference}) killed {', '.join(instants)}"
        ended = judge_last(trial.run(self._command(what, reference, dest, cache), _TIMEOUT_S), dest, "a kill")
        if ended is None and what == "packing":
            others = changed_keys(read_tree(dest), self.packed[reference])
            why = f"{len(others)} files differ from an uninterrupted pack's, such as {others[0]}" if others else ""
            ended = Judgement("preprocess-imagenet", Verdict.WRONG if others else Verdict.HARMLESS, why)
        trial.judge(ended or self._compare_run(reference, dest))

    def _command(self, what: str, reference: str, dest: Path, cache: Path) -> list[str]:
        """Return the command that starts or continues."""
        if what == "packing":
            return pack_command(self.source, dest, reference)
        if not (dest / "config.json").exists():
            return [*self._train(dest, cache), "--overwrite"]
        return ["run-train", "--run-dir", str(dest), "--resume", "--compilation-cache", str(cache)]

    def _train(self, run: Path, cache: Path | None = None) -> list[str]:
        where = ["--data", str(self.data), "--run-dir", str(run), "--compilation-cache", str(cache or self.cache)]
        return ["run-train", *where, "--steps", str(_STEPS), "--stages", str(self.stages), *TRAINING]

    def _kill(self, running: Running, what: str, draw: random.Random, run: Path) -> str:
        """Kill a command at a drawn instant, which may be a short time after a shard, or after a step or an event."""
        is_packing = what == "packing"
        number, moment = draw.randrange(1, _NUM_SHARDS if is_packing else _STEPS), draw.choice(list(MOMENTS))
        instants = ["its start", f"shard {number}"] if is_packing else ["its start", f"step {number}", moment]
        after, after_s = draw.choice(instants), draw.uniform(0, 0.05)
        if after == "its start":
            after_s = draw.uniform(0, self.seconds[what])
        elif after == moment:
            after_s *= draw.choice([0, 0.1, 1, 6])
        said = output_files(running.folder)[0]

        def has_come() -> bool:
            if is_packing:
                return _num_shards(run) >= number
            if after == moment:
                return MOMENTS[moment](run)
            # An earlier launch left its lines; they are truncated by the time that this one has compiled its program.
            return b"\ncompiled training program" in said.read_bytes() and _num_steps(run) >= number

        deadline = running.started_s + _TIMEOUT_S
        while after != "its start" and not running.is_over() and time.monotonic() < deadline and not has_come():
            time.sleep(_POLL_EVERY_S)
        until = time.monotonic() + after_s
        while not running.is_over() and time.monotonic() < until:
            time.sleep(_POLL_EVERY_S)
        if running.is_over():
            return "after its end"
        running.kill()
        return f"{after_s:.3f} s after {after}"

    def _compare_run(self, reference: str, run: Path) -> Judgement:
        """Compare the records of a run, then its last snapshot, which includes momentum, averages and counters."""
        judged = compare_records("run-train", self.records[reference], run)
        ours, theirs = (read_snapshot(each / "snapshots", _STEPS).leaves for each in (run, self.runs[reference]))
        others = [name for name in {**ours, **theirs} if repr(_bytes(ours, name)) != repr(_bytes(theirs, name))]
        if judged.verdict is Verdict.HARMLESS and others:
            judged = Judgement(
                "run-train", Verdict.WRONG, f"{len(others)} arrays of the last snapshot differ: {others[0]}"
            )
        return judged


def _bytes(leaves: dict[str, Any], name: str) -> bytes | None:
    return leaves[name].tobytes() if name in leaves else None


def pack_command(source: Path, dest: Path, canvas: str) -> list[str]:
    """Return the command that packs, in many small shards."""
    options = ["--size", "32", "--canvas", canvas, "--shard-images", str(_SHARD_IMAGES), "--workers", "2"]
    return ["preprocess-imagenet", str(source), str(dest), *options]
