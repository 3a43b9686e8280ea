"""A bit-exact comparison of this checkout with an earlier one, on packs and runs that the earlier one made.

The commands of each release run from its own sources, with the packages of this environment and a separate cache of
compiled programs, so that no result is shared. When the old code resumes its own run, the new code must get the same
result from a copy of that run. scripts/compare-releases runs this.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.numpy import load_file

from loopfeed.engine.records.snapshot import read_snapshot, snapshot_steps
from loopfeed.preprocess.quantities import quantity
from scripts.torture_campaign.kills import TRAINING
from scripts.torture_campaign.oracle import LOGS, read_lines, read_log

ROOT = Path(__file__).parents[1]
VARIABLES = ("LOOPFEED_", "FEEDLOOP_", "JAX_", "XLA_")
LEAST_STEPS = 60  # a request takes seconds, and must arrive before the run ends
REQUEST_AT_STEP = 9
WHOLE_STEPS = 20
TIMEOUT_S = 900.0
_POLL_EVERY_S = 0.01
_NOWHERE = subprocess.DEVNULL
NUM_IMAGES = {"train": 150, "val": 50}
SQUARE = "square"
IMAGE_SIZE, NUM_CLASSES, SHARD_IMAGES = 32, 5, 40
# `-P` keeps the working directory off the path, so that the sources come only from PYTHONPATH.
START = (
    "import sys; from importlib import import_module; sys.argv[0] = {name!r}; import_module({module!r}).{function}()"
)
FIND = "import importlib.util, sys; print(getattr(importlib.util.find_spec(sys.argv[1]), 'origin', 'nothing'))"
# The reader is in another module in older releases, whose packages were called `engine`, `models` and `preprocess`.
READ = """
import hashlib, sys
from importlib import import_module
import numpy as np
names = ("loopfeed",) if sys.argv[2] == "loopfeed" else ("preprocess", "preprocess.shards")
found = [module for module in map(import_module, names) if hasattr(module, "open_split")]
for split in ("train", "val"):
    with found[0].open_split(sys.argv[1], split) as images:
        pixels = np.zeros((images.num_images, images.height, images.width), np.uint32)
        labels = np.zeros((images.num_images, *getattr(images, "label_row", ())), np.int32)
        images.read_into(np.arange(images.num_images), pixels, labels, timeout_s=60)
    print(split, len(labels), hashlib.sha256(pixels.tobytes() + labels.tobytes()).hexdigest())
"""


class FailedError(Exception):
    """A command that must succeed failed."""


@dataclass(frozen=True)
class Release:
    """A checkout whose commands are run.

    Attributes:
        name: "old" or "new".
        root: the folder of its sources.
        base: the folder of everything that the commands write.
    """

    name: str
    root: Path
    base: Path

    def command(self, name: str, *arguments: str | Path) -> list[str]:
        """Return the command line of one of the project's commands."""
        project = tomllib.loads((self.root / "pyproject.toml").read_text())["project"]
        module, _, function = project["scripts"][name].partition(":")
        start = START.format(name=name, module=module, function=function)
        return [sys.executable, "-P", "-c", start, *map(str, arguments)]

    def xlas_kernels(self) -> list[str]:
        """Return the options with which a new run uses XLA's kernels, which all releases have, with the same bits."""
        return ["--kernels", "xla"] if (self.root / "models/kernels").is_dir() else []

    def canvases(self) -> tuple[str, ...]:
        """Return what it can pack of an image: the central square and, since there are canvases, all of it."""
        return (SQUARE, "3:2") if (self.root / "preprocess/extents.py").is_file() else (SQUARE,)

    def environment(self) -> dict[str, str]:
        """Return the environment of its commands: on the CPU, without the user's settings."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(VARIABLES)}
        cache = self.base / f"cache-{self.name}"
        path = os.pathsep.join(map(str, (self.root, self.root / "src")))
        return kept | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path, "XDG_CACHE_HOME": str(cache)}

    @property
    def package(self) -> str:
        """The package of its reader."""
        return "loopfeed" if (self.root / "src/loopfeed").is_dir() else "preprocess"

    def run(self, name: str, *arguments: str | Path) -> str:
        """Run a command and return its output; raise FailedError if it fails."""
        return self._finish(self.command(name, *arguments), f"{name} {' '.join(map(str, arguments))}")

    def run_program(self, program: str, *arguments: str | Path) -> str:
        """Run a Python program in the same way."""
        return self._finish([sys.executable, "-P", "-c", program, *map(str, arguments)], "a program of this script")

    def start(self, name: str, *arguments: str | Path) -> "subprocess.Popen[bytes]":
        """Start a command and discard its output."""
        quiet: dict[str, Any] = {"stdin": _NOWHERE, "stdout": _NOWHERE, "stderr": _NOWHERE}
        return subprocess.Popen(self.command(name, *arguments), env=self.environment(), **quiet)

    def _finish(self, command: list[str], description: str) -> str:
        where: dict[str, Any] = {"env": self.environment(), "cwd": self.base, "stdin": _NOWHERE}
        done = subprocess.run(command, **where, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode != 0:
            output = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
            raise FailedError(
                f"the {self.name} code's {description} ended with exit code {done.returncode}: {output[-1]}"
            )
        return done.stdout


type Compared = tuple[list[str], str]
"""The differences, and a description of what was compared."""


@dataclass
class Table:
    """The comparisons so far, each printed when it is done."""

    num_same: int = 0
    differing: list[str] = field(default_factory=list)

    def add(self, what: str, compare: Callable[[], Compared]) -> None:
        """Make a comparison and print its line; a failing command counts as a difference."""
        try:
            differences, extent = compare()
        except (FailedError, subprocess.TimeoutExpired) as error:
            differences, extent = [str(error)], ""
        if differences:
            self.differing.append(what)
        else:
            self.num_same += 1
        print(f"{'DIFFERS' if differences else 'same':8}{what:64}{'; '.join(differences) or extent}", flush=True)


def main() -> int:
    """Make all comparisons and return the exit code."""
    options = parse_arguments()
    with open_folder(options.keep) as base:
        old, new = Release("old", options.old, base), Release("new", ROOT, base)
        for release in (old, new):
            (base / release.name).mkdir()
        table = Table()
        try:
            check_sources(old, new)
            draw_images(base / "images")
            for canvas in old.canvases():
                PackComparisons(old, new, canvas).make(table)
            RunComparisons(old, new, make_run(old, options.steps), options.steps).make(table)
            if options.demo_steps:
                compare_demo(old, new, options.demo_steps, table)
        except (FailedError, subprocess.TimeoutExpired) as error:
            print(f"scripts/compare-releases: {error}", file=sys.stderr)
            return 1
    print(f"{table.num_same} the same, {len(table.differing)} different")
    return 1 if table.differing else 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="scripts/compare-releases")
    parser.add_argument("old", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--demo-steps", type=int, default=150)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    options.old = options.old.absolute()
    if not (options.old / "pyproject.toml").is_file():
        parser.error(f"OLD_CHECKOUT must be a checkout of this project, and {options.old} has no pyproject.toml")
    if options.steps < LEAST_STEPS or options.demo_steps < 0:
        parser.error(
            f"--steps must be {LEAST_STEPS} or more and --demo-steps 0 or more, "
            f"got {options.steps} and {options.demo_steps}"
        )
    if options.keep is not None and options.keep.exists() and any(options.keep.iterdir()):
        parser.error(f"--keep must be new or empty, and {options.keep} is not: name another")
    return options


@contextmanager
def open_folder(keep: Path | None) -> Iterator[Path]:
    """Create the folder for all output; a temporary one if none is to be kept."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="releases-") if keep is None else nullcontext(keep) as folder:
        yield Path(folder).absolute()


def check_sources(old: Release, new: Release) -> None:
    """Raise FailedError if a release does not run from its own sources."""
    for release in (old, new):
        found = release.run_program(FIND, release.package).strip()
        if not Path(found).is_relative_to(release.root):
            raise FailedError(f"the {release.name} code must be in {release.root}, and {found} was found")


# --- packs


def draw_images(folder: Path) -> None:
    """Draw class folders of PNG files; the colour shows the class, and noise makes every image different."""
    for seed, (split, num_images) in enumerate(NUM_IMAGES.items()):
        random = np.random.default_rng(seed)
        colours = np.random.default_rng(2).integers(40, 160, (NUM_CLASSES, 3))
        for number in range(num_images):
            label = number % NUM_CLASSES
            shape = IMAGE_SIZE + 12 * (number % 2), IMAGE_SIZE + 16 * (number % 3)
            noise = random.integers(-40, 90, (*shape, 3))
            path = folder / split / f"class{label}" / f"{number:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((colours[label] + noise).clip(0, 255).astype(np.uint8)).save(path)


@dataclass(frozen=True)
class PackComparisons:
    """Comparisons of both releases on the same images, and on the pack that the old code made of them."""

    old: Release
    new: Release
    canvas: str

    def make(self, table: Table) -> None:
        """Pack the images with both, and compare."""
        for release in (self.old, self.new):
            size = ("--size", f"{IMAGE_SIZE}", "--shard-images", f"{SHARD_IMAGES}")
            canvas = () if len(release.canvases()) == 1 else ("--canvas", self.canvas)
            release.run("preprocess-imagenet", self.old.base / "images", self._pack(release), *size, *canvas)
        also = "" if self.canvas == SQUARE else f", canvas {self.canvas}"
        table.add(f"packing: the files that both write{also}", self.files)
        table.add(f"reading the old pack: every pixel and label{also}", self.reading)
        table.add(f"inspect-shards --verify of the old pack{also}", self.verifying)
        if also:
            table.add("training on whole pictures, by both", self.training)

    def _pack(self, release: Release) -> Path:
        return pack_of(release, self.canvas)

    def files(self) -> Compared:
        """Compare the files of pixels and labels that both wrote."""
        ours, theirs = arrays_of(self._pack(self.new)), arrays_of(self._pack(self.old))
        others = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
        differences = [f"{quantity(len(others), 'file')}, such as {others[0]}"] if others else []
        return differences, f"{len(ours)} files of pixels and labels"

    def reading(self) -> Compared:
        """Compare what both read from the old pack."""
        ours, theirs = (
            each.run_program(READ, self._pack(self.old), each.package).splitlines() for each in (self.new, self.old)
        )
        differences = [f"{a} is {b}" for a, b in zip(ours, theirs, strict=True) if a != b]
        return differences, f"{sum(NUM_IMAGES.values())} images"

    def verifying(self) -> Compared:
        """Verify the old pack with both."""
        for release in (self.new, self.old):
            release.run("inspect-shards", self._pack(self.old), "--verify")
        return [], "both find no fault"

    def training(self) -> Compared:
        """Train on random crops of the old pack with both."""
        runs = [release.base / release.name / "whole-run" for release in (self.new, self.old)]
        for release, run in zip((self.new, self.old), runs, strict=True):
            words: list[str | Path] = ["--run-dir", run, "--data", self._pack(self.old), "--steps", f"{WHOLE_STEPS}"]
            words += TRAINING
            release.run("run-train", *words, "--crop", "resized", "--crop-padding", "0", *release.xlas_kernels())
        return compare_folders(*runs)


def pack_of(release: Release, canvas: str = SQUARE) -> Path:
    """Return where a release packs the drawn images."""
    return release.base / release.name / ("data" if canvas == SQUARE else "whole")


def arrays_of(pack: Path) -> dict[str, bytes]:
    """Return the files of pixels, of labels or targets and of extents of a pack."""
    return {
        str(path.relative_to(pack)): path.read_bytes()
        for path in pack.rglob("*")
        if path.is_file() and {"pixels", "labels", "targets", "extents"} & set(path.relative_to(pack).parts)
    }


# --- runs


def make_run(old: Release, steps: int) -> Path:
    """Train with the old code, and send a request during the run."""
    run = old.base / "old/run"
    training = old.start("run-train", "--run-dir", run, "--data", pack_of(old), "--steps", f"{steps}", *TRAINING)
    try:
        until = time.monotonic() + TIMEOUT_S
        while len(read_lines(run / "loss.jsonl")) < REQUEST_AT_STEP and training.poll() is None:
            if time.monotonic() > until:
                break
            time.sleep(_POLL_EVERY_S)
        old.run("control-run", run, "--learning-rate-factor", "0.5", "--evaluate")
        code = training.wait(TIMEOUT_S)
    finally:
        training.kill()
    if code != 0:
        raise FailedError(f"the old code's run-train into {run} ended with exit code {code}")
    return run


@dataclass(frozen=True)
class RunComparisons:
    """Comparisons of both releases on a run of the old code.

    Attributes:
        old, new: the releases.
        run: the run folder, which is not modified.
        steps: the number of its steps.
    """

    old: Release
    new: Release
    run: Path
    steps: int

    @property
    def more_steps(self) -> int:
        """The number of steps of a run that is resumed for more."""
        return self.steps + self.steps // 2

    def make(self, table: Table) -> None:
        """Make every comparison."""
        more = ("--steps", f"{self.more_steps}")
        table.add("the same training, started by the new code", self.beginning)
        table.add("resuming for more steps", lambda: self.resuming("resumed", lambda _: None, *more))
        table.add("resuming from the snapshot before the last", lambda: self.resuming("rewound", forget_end))
        table.add("run-eval of its weights", self.evaluating)
        table.add("verify-run of all its steps", self.replaying)
        table.add("verify-run of its steps and those that the new code added", self.replaying_more)

    def beginning(self) -> Compared:
        """Compare the run with one that the new code makes from the first step, including requests."""
        folder = self.new.base / "new/begun"
        folder.mkdir()
        for name in ("config.json", "control.jsonl"):
            shutil.copy(self.run / name, folder / name)
        self.new.run("run-train", "--run-dir", folder, "--resume")
        return compare_folders(folder, self.run)

    def resuming(self, name: str, prepare: Callable[[Path], None], *arguments: str) -> Compared:
        """Compare the results of both when they resume a copy of the run."""
        folders = [release.base / release.name / name for release in (self.new, self.old)]
        for release, folder in zip((self.new, self.old), folders, strict=True):
            shutil.copytree(self.run, folder)
            prepare(folder)
            release.run("run-train", "--run-dir", folder, "--resume", *arguments)
        return compare_folders(*folders)

    def evaluating(self) -> Compared:
        """Compare the evaluations of the run's weights by both with each other and with the recorded one."""
        ours, theirs = (
            json.loads(each.run("run-eval", self.run, "--json", "--per-class")) for each in (self.new, self.old)
        )
        recorded = read_lines(self.run / "eval.jsonl")[-1]
        unlike = [name for name in theirs if name != "time" and ours.get(name) != theirs[name]]
        unlike += [f"{name} as recorded" for name in LOGS["eval.jsonl"] if ours[name] != recorded[name]]
        return unlike, f"{len(theirs) - 1} numbers and the record"

    def replaying(self) -> Compared:
        """Compare the numbers that both print about a replay of the whole run."""
        ours, theirs = (each.run("verify-run", self.run, "--from", "0") for each in (self.new, self.old))
        numbers = [re.findall(r"\d[\d,.]*", output) for output in (ours, theirs)]
        return ([] if numbers[0] == numbers[1] else [f"{ours.strip()} is {theirs.strip()}"]), ours.strip()

    def replaying_more(self) -> Compared:
        """Replay the run that the old code started and the new code resumed; the replay must compare all of it."""
        run = self.new.base / "new/resumed"
        verdict, wanted = self.new.run("verify-run", run, "--from", "0").strip(), whole_replay(run, self.more_steps)
        return ([] if verdict == wanted else [f"{verdict!r}, expected {wanted!r}"]), verdict


def whole_replay(run: Path, steps: int) -> str:
    """Return the verdict on a run that was replayed from its first step to its last without a difference."""
    num_evaluations = len(read_lines(run / "eval.jsonl"))
    num_arrays = len(read_snapshot(run / "snapshots", steps).leaves)
    return (
        f"the same bits: {steps:,} losses, {num_evaluations:,} evaluation{'s' * (num_evaluations != 1)}, "
        f"{num_arrays:,} arrays of the snapshot of step {steps:,}"
    )


def forget_end(run: Path) -> None:
    """Remove what a kill before the last snapshot would not have left."""
    shutil.rmtree(run / "snapshots" / str(snapshot_steps(run / "snapshots")[-1]))
    for name in ("model.safetensors", "result.json"):
        (run / name).unlink()


def compare_folders(ours: Path, theirs: Path) -> Compared:
    """Return the differences between two runs, and a description of what was compared."""
    differences, extent = [], []
    for name in LOGS:
        lines, wanted = (read_log(each / name) for each in (ours, theirs))
        if lines != wanted:
            same = [a == b for a, b in zip(lines, wanted, strict=False)]
            differences.append(f"{name} from line {[*same, False].index(False) + 1}")
        extent.append(f"{quantity(len(wanted), 'line')} of {name}")
    step = snapshot_steps(theirs / "snapshots")[-1]
    arrays = {
        "model.safetensors": [load_file(each / "model.safetensors") for each in (ours, theirs)],
        f"snapshot {step}": [dict(read_snapshot(each / "snapshots", step).leaves) for each in (ours, theirs)],
    }
    for name, (found, wanted_arrays) in arrays.items():
        bits, wanted_bits = (
            {key: (str(array.dtype), array.shape, array.tobytes()) for key, array in each.items()}
            for each in (found, wanted_arrays)
        )
        others = [key for key in sorted(bits.keys() | wanted_bits.keys()) if bits.get(key) != wanted_bits.get(key)]
        if others:
            differences.append(f"{quantity(len(others), 'array')} of {name}, such as {others[0]}")
        extent.append(f"{quantity(len(wanted_bits), 'array')} of {name}")
    return differences, ", ".join(extent)


# --- the demo


def compare_demo(old: Release, new: Release, steps: int, table: Table) -> None:
    """Run the commands of scripts/demo with both, each on its own demo set, and compare the runs."""

    def compare() -> Compared:
        runs = [release.base / release.name / "demo-run" for release in (new, old)]
        for release, run in zip((new, old), runs, strict=True):
            data = release.base / release.name / "demo"
            release.run("preprocess-imagenet", "--demo", data)
            words: list[str | Path] = ["--recipe", "demo", "--data", data, "--run-dir", run, "--steps", f"{steps}"]
            release.run("run-train", *words, *release.xlas_kernels())
        return compare_folders(*runs)

    table.add("scripts/demo: drawn, packed and trained by both", compare)


if __name__ == "__main__":
    sys.exit(main())
