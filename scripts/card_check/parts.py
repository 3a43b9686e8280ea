"""The parts of a check: their commands, the time that they get, and what is concluded from what they wrote.

They stand in the order of their worth: what is cut off, if the time is short, is worth the least. Needs only the
standard library.
"""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).parents[2]
# Uncompresses argv[1], if it is compressed, to argv[2].
_UNCOMPRESS = """
import bz2, gzip, lzma, shutil, sys
with open(sys.argv[1], "rb") as file:
    opens = {b"\\x1f\\x8b": gzip.open, b"BZ": bz2.open, b"\\xfd7": lzma.open}.get(file.read(2), lambda plain: plain)
    file.seek(0)
    with opens(file) as source, open(sys.argv[2], "wb") as target:
        shutil.copyfileobj(source, target)
"""
# The losses of both transports, at the highest precision of products, which two programs sum in different orders:
# over the first steps the roundings stay below this, as those of a GPU and a CPU do; later they grow.
_FIRST_STEPS, _TOLERANCE = 20, 1e-3


@dataclass(frozen=True)
class Command:
    """A command of a part.

    Attributes:
        name: what it does, for the report.
        argv: the command; the first word is the Python.
        most: the largest share of the part's remaining time that it may use.
        shown: number of last lines of its output that the report shows.
        environment: additional environment variables.
    """

    name: str
    argv: tuple[str, ...]
    most: float = 1.0
    shown: int = 40
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Conclusion:
    """What a part's results say: lines for the report, and whether they are as they must be."""

    lines: tuple[str, ...] = ()
    is_right: bool = True


@dataclass(frozen=True)
class Part:
    """A part of the check.

    Attributes:
        name: name in the report and on the command line.
        share: the time that it may use, relative to the others' shares.
        commands: its commands, for the seconds that it may use. All are run, also after one that fails.
        conclude: reads what they wrote.
    """

    name: str
    share: float
    commands: Callable[[float], tuple[Command, ...]]
    conclude: Callable[[], Conclusion] = Conclusion


@dataclass(frozen=True)
class Plan:
    """What to run, and where.

    Attributes:
        out: the folder of the report; `work` is that of everything else.
        is_rehearsal: whether everything runs on the processor, at small sizes.
        is_timed: whether the time is limited, so that only the most important case is measured.
        repeats: rounds of each benchmark.
        case: substring of the names of the cases to measure.
        cifar: a folder or an archive with CIFAR-10; None if there is none.
        has_torch_python: whether PyTorch has a Python of its own.
    """

    out: Path
    work: Path
    is_rehearsal: bool
    is_timed: bool
    repeats: int
    case: str
    cifar: Path | None
    has_torch_python: bool

    def parts(self) -> tuple[Part, ...]:
        """Return all parts. The shares are seconds, if the check takes ten minutes."""
        return (
            Part("transports", 90, self._transports, self._same_losses),
            Part("tests", 160, self._tests, self._passed),
            Part("benchmarks", 190, self._benchmarks, self._measured),
            Part("cifar", 100, self._cifar, self._same_bits),
            Part("trace", 60, self._trace),
        )

    def _transports(self, _: float) -> tuple[Command, ...]:
        sizes = ("--image-size", "32", "--batch", "128", "--steps", "200")
        if self.is_rehearsal:
            sizes = ("--image-size", "8", "--batch", "8", "--steps", "24")
        fixed = ("--synthetic", "--model", "resnet8", "--num-classes", "10", "--overwrite", *sizes)
        highest = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
        return tuple(
            Command(
                f"run-train --transport {name}",
                _project("run-train", *fixed, "--transport", name, "--run-dir", str(self._run_folder(name))),
                most=0.6,
                shown=6,
                environment=highest,
            )
            for name in self._compared
        )

    @property
    def _compared(self) -> tuple[str, str]:
        return ("inplace" if self.is_rehearsal else "cuda"), "callback"

    def _run_folder(self, transport: str) -> Path:
        return self.work / "transports" / transport

    def _same_losses(self) -> Conclusion:
        fast, slow = (read_losses(self._run_folder(name) / "loss.jsonl") for name in self._compared)
        return compare_losses(fast, slow, *self._compared)

    def _tests(self, limit_s: float) -> tuple[Command, ...]:
        # A part that is cut off says which tests passed, and a test that hangs leaves time for the others.
        options = (
            "-p",
            "no:cacheprovider",
            "-W",
            "default",
            "-v",
            "-rs",
            "--timeout",
            f"{min(300, max(30, limit_s / 3)):.0f}",
        )
        argv = (sys.executable, "-m", "pytest", *options, "-m", "gpu", "--junit-xml", str(self._results))
        return (Command("pytest", (*argv, "tests/test_gpu.py")),)

    @property
    def _results(self) -> Path:
        return self.work / "tests" / "results.xml"

    def _passed(self) -> Conclusion:
        return none_skipped(self._results, is_rehearsal=self.is_rehearsal)

    def _benchmarks(self, limit_s: float) -> tuple[Command, ...]:
        bench = "card-rehearsal" if self.is_rehearsal else "card"
        options = ["--repeats", str(self.repeats), "--json", str(self._figures)]
        is_short = self.is_timed and not self.is_rehearsal
        options += ["--round-s", "3"] if is_short else []
        case = self.case or ("resnet50 224" if is_short else "")
        options += ["--case", case] if case else []
        # It needs a little time at the end for its table.
        options += ["--limit-s", f"{0.85 * limit_s:.0f}"] if math.isfinite(limit_s) else []
        options += ["--peers"] if self.has_torch_python else []
        argv = (sys.executable, "-m", "scripts.benchmarks", bench, *options)
        return (Command(f"scripts/bench {bench}", argv, shown=200),)

    @property
    def _figures(self) -> Path:
        return self.out / "card.json"

    def _measured(self) -> Conclusion:
        return all_measured(self._figures)

    def _cifar(self, _: float) -> tuple[Command, ...]:
        assert self.cifar is not None
        folder = self.work / "cifar"
        source, packed, commands = self.cifar, folder / "packed", list[Command]()
        if self.cifar.is_file():
            source = folder / "cifar10.tar"
            uncompress = (sys.executable, "-c", _UNCOMPRESS, str(self.cifar), str(source))
            commands.append(Command("uncompress the archive", uncompress))
        limit = ("--limit", "64") if self.is_rehearsal else ()
        pack = ("--size", "32", "--overwrite", *limit)
        commands.append(
            Command("preprocess-imagenet", _project("preprocess-imagenet", str(source), str(packed), *pack), shown=6)
        )
        settings: tuple[str, ...] = (
            "--recipe",
            "cifar-gpu",
            "--precision",
            "bfloat16",
            "--data",
            str(packed),
            "--overwrite",
        )
        if self.is_rehearsal:
            settings += ("--model", "resnet8", "--batch", "8", "--steps", "2")
        for name in ("compiled", "timed"):
            train = _project("run-train", *settings, "--run-dir", str(folder / name))
            commands.append(Command(f"run-train --recipe cifar-gpu, {name}", train, shown=6))
        return tuple(commands)

    def _same_bits(self) -> Conclusion:
        compiled, timed = (read_losses(self.work / "cifar" / name / "loss.jsonl") for name in ("compiled", "timed"))
        is_same = bool(timed) and compiled == timed
        return Conclusion((f"the losses of both runs are {'' if is_same else 'NOT '}the same to the bit",), is_same)

    def _trace(self, _: float) -> tuple[Command, ...]:
        networks = {"resnet50": ("224", "256"), "resnet8": ("32", "512")}
        fixed: tuple[str, ...] = ("--precision", "bfloat16", "--steps", "120", "--profile-steps", "40:100")
        if self.is_rehearsal:
            networks, fixed = {"resnet8": ("8", "8")}, ("--steps", "24", "--profile-steps", "8:16")
        return tuple(
            Command(
                f"run-train --profile of {model}",
                _project(
                    "run-train",
                    *("--synthetic", "--model", model, "--image-size", size, "--batch", batch, *fixed),
                    # Random images take longer to draw than a card takes to learn from them.
                    *("--reader-threads", "8", "--profile", "--overwrite"),
                    *("--run-dir", str(self.work / "trace" / model)),
                ),
                shown=60,
            )
            for model, (size, batch) in networks.items()
        )


def _project(name: str, *arguments: str) -> tuple[str, ...]:
    """Return a command of the project, which need not be installed."""
    module = {"run-train": "loopfeed.engine.commands.cli", "preprocess-imagenet": "loopfeed.preprocess.commands.cli"}[
        name
    ]
    start = f"import sys; sys.argv[0] = {name!r}; from {module} import main; main()"
    return (sys.executable, "-c", start, *arguments)


def read_losses(path: Path) -> list[float]:
    """Return a run's losses in the order of its steps; an empty list if it wrote none."""
    if not path.is_file():
        return []
    losses = [json.loads(line)["loss"] for line in path.read_text(encoding="utf-8").splitlines()]
    return [math.nan if each is None else float(each) for each in losses]


def compare_losses(fast: list[float], slow: list[float], fast_name: str, slow_name: str) -> Conclusion:
    """Conclude whether two transports made the same steps."""
    counts = f"{fast_name}: {len(fast)} losses, {slow_name}: {len(slow)} losses"
    if not fast or len(fast) != len(slow) or not all(map(math.isfinite, (*fast, *slow))):
        return Conclusion((f"{counts}; both must have all of them, and finite ones",), False)
    apart = [abs(a - b) / max(abs(a), abs(b), 1e-30) for a, b in zip(fast, slow, strict=True)]
    same = next((step for step, each in enumerate(apart) if each), len(apart))
    first = max(apart[:_FIRST_STEPS])
    lines = (
        f"{counts}; the first {same} are the same to the bit",
        f"largest relative difference: {first:.2g} in the first {_FIRST_STEPS} (must be ≤ {_TOLERANCE:g}), "
        f"{max(apart):.2g} in all; last losses {fast[-1]:.6g} and {slow[-1]:.6g}",
    )
    return Conclusion(lines, first <= _TOLERANCE)


def none_skipped(results: Path, *, is_rehearsal: bool) -> Conclusion:
    """Conclude from pytest's results whether the tests ran: on a card, each must; without one, none can."""
    if not results.is_file():
        return Conclusion(("pytest did not end, so its summary is missing",), False)
    cases = list(ET.parse(results).getroot().iter("testcase"))
    num_skipped = sum(case.find("skipped") is not None for case in cases)
    line = f"{len(cases)} tests, {num_skipped} skipped" + ", because there is no card" * is_rehearsal
    return Conclusion((line,), bool(cases) and num_skipped == (len(cases) if is_rehearsal else 0))


def all_measured(figures: Path) -> Conclusion:
    """Conclude from a benchmark's document whether every candidate was measured; PyTorch only if it is installed."""
    if not figures.is_file():
        return Conclusion((f"{figures.name} was not written",), False)
    lines, is_right = [], True
    document = json.loads(figures.read_bytes())
    for case in (case for bench in document["benches"] for case in bench["cases"]):
        for row in case["candidates"]:
            if row["speed"] is not None:
                continue
            reason = (row["reason"] or "no reason was given").splitlines()
            is_absent = "No module named 'torch'" in reason[-1]
            lines.append(f"not measured: {row['name']}: {'PyTorch is not installed' if is_absent else reason[0]}")
            is_right &= is_absent
    return Conclusion(tuple(lines), is_right)
