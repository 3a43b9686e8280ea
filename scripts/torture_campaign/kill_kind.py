"""The kind ``kills``: SIGKILL at any instant of packing and training, which must not change the result."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from scripts.kill_and_resume import COMPARED, EVAL_EVERY, TRAINING
from scripts.torture_campaign.case import Case, Trial
from scripts.torture_campaign.commands import Finished, Running
from scripts.torture_campaign.oracle import columns, read_tree, read_weights
from scripts.torture_campaign.sound_packs import make_sound_packs
from scripts.torture_campaign.verdict import Judgement, Verdict, judge_exit

_STEPS = 2 * EVAL_EVERY
_NUM_IMAGES, _SIDE = 400, 160
_TIMEOUT_S = 120.0
_REFERENCE_TIMEOUT_S = 400.0
_POLL_EVERY_S = 0.002


@dataclass
class KillKind:
    """Kills of packing and of training.

    Attributes:
        cache: folder of compiled programs.
        data: the pack that is trained on.
        source: the images that are packed.
        packed: the bytes of each file of the uninterrupted pack.
        run: the uninterrupted run.
        seconds: the duration of each in seconds, by ``packing`` and ``training``.
    """

    cache: Path
    data: Path = Path()
    source: Path = Path()
    packed: dict[str, bytes] = field(default_factory=dict)
    run: Path = Path()
    seconds: dict[str, float] = field(default_factory=dict)
    name: str = "kills"

    def prepare(self, trial: Trial) -> None:
        """Pack and train without interruption."""
        self.source, dest, self.run = (trial.folder / name for name in ("images", "packed", "run"))
        _draw_images(self.source)
        self.data = make_sound_packs(trial, ("raw",))["raw"].folder
        # The second training reads its program from the cache, as the killed ones do.
        commands = {
            "packing": pack_command(self.source, dest),
            "compiling": self._train_command(trial.folder / "first"),
        }
        commands["training"] = self._train_command(self.run)
        for name, command in commands.items():
            finished = trial.run(command, timeout_s=_REFERENCE_TIMEOUT_S)
            if finished.code != 0:
                raise RuntimeError(f"{name} failed on sound data: {finished.output}")
            self.seconds[name] = finished.seconds
        self.packed = read_tree(dest)

    def cases(self, seed: int, count: int) -> list[Case]:
        """Return the cases, which alternate between packing and training."""
        names = ("packing", "training")
        return [Case(self.name, f"{names[number % 2]}-{number}", seed) for number in range(count)]

    def attempt(self, trial: Trial) -> None:
        """Kill a command one or more times, run it again to its end, and compare the result."""
        what, draw = trial.case.name.split("-")[0], trial.case.draw()
        instants = []
        for _ in range(draw.choice([1, 1, 2, 3])):
            command, run = self._command(trial, what)
            running = self._start(trial, command)
            instants.append(self._kill(running, what, draw, run))
            finished = running.wait(_TIMEOUT_S)
            trial.log.append(finished)
            if not finished.killed or finished.hung:
                break
        trial.fault = f"{what} killed {', '.join(instants)}"
        command, run = self._command(trial, what)
        finished = trial.run(command, timeout_s=_TIMEOUT_S)
        ended = _judge_final_launch(finished, run)
        compared = self._compare_pack(run) if what == "packing" else self._compare_run(run)
        trial.judge(ended or compared)

    def _start(self, trial: Trial, command: list[str]) -> Running:
        where = trial.folder / f"killed-{len(trial.log)}"
        where.mkdir()
        return trial.commands.start(command, where)

    def _command(self, trial: Trial, what: str) -> tuple[list[str], Path]:
        """Return the command that starts or continues, and the folder that it writes."""
        dest = trial.folder / what
        if what == "packing":
            return pack_command(self.source, dest), dest
        if not (dest / "config.json").exists():
            return [*self._train_command(dest), "--overwrite"], dest
        return ["run-train", "--run-dir", str(dest), "--resume", "--compilation-cache", str(self.cache)], dest

    def _train_command(self, run: Path) -> list[str]:
        where = ["--data", str(self.data), "--run-dir", str(run), "--compilation-cache", str(self.cache)]
        return ["run-train", *where, "--steps", str(_STEPS), *TRAINING]

    def _kill(self, running: Running, what: str, draw: random.Random, run: Path) -> str:
        """Kill a command at a drawn instant, which for a training may be a short time after a step."""
        after_s = draw.uniform(0, self.seconds[what])
        step = draw.randrange(1, _STEPS)
        is_by_step = what == "training" and draw.random() < 0.6
        if is_by_step:
            after_s = draw.uniform(0, 0.05)
            while not running.is_over() and len(columns(run / "loss.jsonl", "step")) < step:
                if time.monotonic() - running.started_s > _TIMEOUT_S:
                    break
                time.sleep(_POLL_EVERY_S)
        deadline = time.monotonic() + after_s
        while not running.is_over() and time.monotonic() < deadline:
            time.sleep(_POLL_EVERY_S)
        if running.is_over():
            return "after its end"
        running.kill()
        return f"{after_s:.2f} s after {f'step {step}' if is_by_step else 'its start'}"

    def _compare_pack(self, dest: Path) -> Judgement:
        tree = read_tree(dest)
        others = sorted(key for key in {*tree, *self.packed} if tree.get(key) != self.packed.get(key))
        if others:
            why = f"{len(others)} files differ from those of an uninterrupted pack, such as {others[0]}"
            return Judgement("preprocess-imagenet", Verdict.WRONG, why)
        return Judgement("preprocess-imagenet", Verdict.HARMLESS)

    def _compare_run(self, run: Path) -> Judgement:
        if read_weights(run / "model.safetensors") != read_weights(self.run / "model.safetensors"):
            return Judgement("run-train", Verdict.WRONG, "weights that differ from those of the uninterrupted run")
        for name, keys in COMPARED.items():
            if columns(run / name, *keys) != columns(self.run / name, *keys):
                return Judgement("run-train", Verdict.WRONG, f"{name} differs from that of the uninterrupted run")
        return Judgement("run-train", Verdict.HARMLESS)


def _judge_final_launch(finished: Finished, dest: Path) -> Judgement | None:
    """Judge the launch that was not killed: it must succeed."""
    ended = judge_exit(finished, names=[str(dest)], refusals=(1, 2))
    if ended is not None and ended.verdict is Verdict.DETECTED:
        return Judgement(finished.command[0], Verdict.WRONG, f"did not continue after a kill: {ended.why}")
    return ended


def pack_command(source: Path, dest: Path) -> list[str]:
    """Return the command that packs, in many small shards."""
    return ["preprocess-imagenet", str(source), str(dest), "--size", "32", "--shard-images", "16", "--workers", "2"]


def _draw_images(folder: Path) -> None:
    random_ = np.random.default_rng(2)
    for number in range(_NUM_IMAGES):
        path = folder / f"class-{number % 4}" / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = random_.integers(0, 256, (_SIDE, _SIDE, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(path, compress_level=1)
