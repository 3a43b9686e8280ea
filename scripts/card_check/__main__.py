"""The command behind scripts/gpu-check, whose help it has. Needs only the standard library until all is found."""

import argparse
import contextlib
import math
import os
import shutil
import signal
import sys
import tarfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import NoReturn

from scripts.card_check.check import Check, UnfitError, describe_machine, environment_of
from scripts.card_check.parts import ROOT, Part, Plan
from scripts.card_check.report import Report

_ME = "scripts/gpu-check"
_TORCH_PYTHON = "LOOPFEED_TORCH_PYTHON"
# The parts that are options; --cifar is one with a value.
_NAMED = ("transports", "tests", "benchmarks", "trace")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _refuse(f"{message}; see {_ME} --help")


class _StoppedError(Exception):
    """A signal asked this process to stop."""


def main(arguments: Sequence[str], folder: Path) -> int:
    """Run a check and return the exit code; relative paths are relative to ``folder``."""
    begin = time.monotonic()
    options = _parse(arguments)
    plan = _plan(options, folder)
    parts, left_out = _choose(plan, options.parts)
    environment = environment_of(plan.is_rehearsal)
    until = begin + 60 * options.minutes if options.minutes else math.inf
    try:
        machine = describe_machine(environment)
        plan.out.mkdir(parents=True, exist_ok=True)
        report = Report(plan.out / "report.txt")
        report.add([*_head(options), *machine], pending=[each.name for each in parts])
        return _run(Check(plan, parts, report, environment, until), left_out)
    except UnfitError as error:
        _refuse(str(error))
    except OSError as error:
        _say(f"the report cannot be written: {error}")
        return 1
    finally:
        shutil.rmtree(plan.work, ignore_errors=True)


def _run(check: Check, left_out: Sequence[str]) -> int:
    _stop_on_signals()
    last = list(left_out)
    try:
        check.run()
    except _StoppedError as stopped:
        last = [f"== stopped by {stopped} during {check.pending[0] if check.pending else 'its end'}"]
        check.failed += check.pending
    failed = ", ".join(check.failed)
    check.report.add([*last, f"== FAILED: {failed}" if failed else "== all of the parts that ran are right"])
    _say(f"wrote the report to {check.report.path}")
    return 1 if failed else 0


def _plan(options: argparse.Namespace, folder: Path) -> Plan:
    bench, name = ROOT / ".bench", "gpu-rehearsal" if options.rehearse else "gpu-check"
    return Plan(
        out=folder / options.out if options.out else bench / name,
        work=bench / f"{name}-{os.getpid()}",
        is_rehearsal=options.rehearse,
        is_timed=options.minutes is not None,
        repeats=options.repeats or (1 if options.rehearse else 3 if options.minutes else 5),
        case=options.case,
        cifar=_find_cifar(options.cifar, folder),
        has_torch_python=bool(os.environ.get(_TORCH_PYTHON)),
    )


def _head(options: argparse.Namespace) -> list[str]:
    limit = f"{options.minutes:g} minutes" if options.minutes else "no limit"
    head = [f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {limit}"]
    if options.rehearse:
        head.append("REHEARSAL on the processor, at small sizes: no figure below says anything about a card")
    return head


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog=_ME, add_help=False, allow_abbrev=False)
    for name in _NAMED:
        parser.add_argument(f"--{name}", dest="parts", action="append_const", const=name, default=[])
    parser.add_argument("--rehearse", action="store_true")
    for name in ("--out", "--case", "--cifar"):
        parser.add_argument(name, default="" if name == "--case" else None)
    parser.add_argument("--repeats", type=_count)
    parser.add_argument("--minutes", type=_minutes)
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number ≥ 1, got {text!r}")
    return int(text)


def _minutes(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 1 <= (minutes := float(text)) <= 1440:
            return minutes
    raise argparse.ArgumentTypeError(f"must be from 1 to 1440, got {text!r}")


def _find_cifar(given: str | None, folder: Path) -> Path | None:
    if given is None:
        return None
    path = (folder / given).resolve() if given else Path()
    is_folder = (path / "train").is_dir() and ((path / "test").is_dir() or (path / "val").is_dir())
    if not given or not (is_folder or (path.is_file() and tarfile.is_tarfile(path))):
        _refuse(
            f"--cifar must be a folder with train and test (or val), or a tar archive of one, which may be compressed, "
            f"got {given!r}; see data/README.md for how to create it"
        )
    return path


def _choose(plan: Plan, named: Sequence[str]) -> tuple[list[Part], list[str]]:
    """Return the parts to run, and lines that say what is left out and why."""
    chosen = set(named) | ({"cifar"} if plan.cifar else set())
    if not named and (plan.is_timed or plan.is_rehearsal or not chosen):
        chosen |= set(_NAMED)
    why = dict.fromkeys(_NAMED, "only other parts were asked for") | {"cifar": "no --cifar was given"}
    left_out = [
        f"== {part.name}: left out, because {why[part.name]}" for part in plan.parts() if part.name not in chosen
    ]
    return [part for part in plan.parts() if part.name in chosen], left_out


def _stop_on_signals() -> None:
    def stop(number: int, _: FrameType | None) -> None:
        raise _StoppedError(signal.Signals(number).name)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)


def _say(text: str) -> None:
    print(f"{_ME}: {text}", file=sys.stderr)


def _refuse(text: str) -> NoReturn:
    _say(text)
    raise SystemExit(2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], Path(sys.argv[1])))
