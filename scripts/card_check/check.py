"""A check of the project on a machine with an NVIDIA card: its parts one after another, and a report of them."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.card_check.limited import run_limited
from scripts.card_check.parts import ROOT, Command, Conclusion, Part, Plan
from scripts.card_check.report import Report
from scripts.card_check.requirements import install_commands

# Starting Python and jax alone takes that long.
_LEAST_S = 10.0
_PROBE_LIMIT_S = 120.0
# The limit of a command if the check has none.
_MOST_S = 3600.0
# Of the logs of a benchmark's candidates, as much is kept.
_LOG_BYTES = 200_000


class UnfitError(RuntimeError):
    """This machine or its Python cannot be checked; the message has the reason and the remedy."""


def environment_of(is_rehearsal: bool) -> dict[str, str]:
    """Return the environment of everything that is run: this project first on the path, before the user's own."""
    own = [os.path.abspath(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]  # noqa: PTH100
    path = os.pathsep.join(dict.fromkeys([str(ROOT), str(ROOT / "src"), *own]))
    found = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    if is_rehearsal:
        return found | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # compiles faster
    return found | {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def describe_machine(environment: dict[str, str]) -> list[str]:
    """Return a description of the Python and the card, as lines.

    Raises:
        UnfitError: a package is missing, or jax sees no card.
    """
    probe = [sys.executable, "-m", "scripts.card_check.probe"]
    try:
        done = subprocess.run(probe, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=_PROBE_LIMIT_S)
        found = json.loads(done.stdout.splitlines()[-1] if done.stdout else "null")
    except subprocess.TimeoutExpired:
        raise UnfitError(
            f"jax did not find its devices within {_PROBE_LIMIT_S:g} s; nvidia-smi must list a card"
        ) from None
    except ValueError:
        found = None
    if found is None:
        raise UnfitError(f"{sys.executable} could not look for its packages:\n{done.stderr[-2000:]}")
    if missing := found["missing"]:
        reasons = "\n".join(f"  {each} {reason}" for each, reason in missing.items())
        raise UnfitError(
            f"{sys.executable} must be able to import all that the project needs, but\n{reasons}\n"
            f"{install_commands(sys.executable, list(missing))}\n"
            "or set another Python: PYTHON=/path/to/python scripts/gpu-check"
        )
    if "no_card" in found:
        raise UnfitError(
            f"{found['no_card']}\nnvidia-smi must list a card with driver 580 or newer, and {sys.executable} needs "
            "the plugin: pip install '.[cuda]'"
        )
    return [*found["lines"], *(f"not supported: {each}" for each in found["unsupported"])]


@dataclass
class Check:
    """The course of a check.

    Attributes:
        plan: what to run.
        parts: the parts to run, in this order.
        report: the report.
        environment: the environment of everything that is run.
        until: the time at which all must have ended, by `time.monotonic`.
        failed: the names of the parts that failed or were left out for lack of time.
        pending: the names of the parts that have not ended.
    """

    plan: Plan
    parts: Sequence[Part]
    report: Report
    environment: dict[str, str]
    until: float = math.inf
    failed: list[str] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Run the parts; each may use its share of the time that is left, and what it does not use is the others'."""
        for number, part in enumerate(self.parts):
            coming = self.parts[number:]
            self.pending = [each.name for each in coming]
            left_s = self.until - time.monotonic()
            limit_s = left_s * part.share / sum(each.share for each in coming)
            if limit_s < _LEAST_S:
                lines = [f"== {part.name}: left out, as its share of the {left_s:.0f} s that were left is too short"]
                self.failed.append(part.name)
            else:
                print(f"-- {part.name}{_limit_text(limit_s)}", flush=True)
                lines = self._run_part(part, limit_s)
            self.pending = self.pending[1:]
            self.report.add(lines, pending=self.pending)

    def _run_part(self, part: Part, limit_s: float) -> list[str]:
        """Run a part and return its block of the report."""
        started, log_path = time.monotonic(), self.plan.out / f"{part.name}.log"
        begin_s = time.time()
        log_path.unlink(missing_ok=True)
        lines, is_right = list[str](), True
        (self.plan.work / part.name).mkdir(parents=True, exist_ok=True)
        for command in part.commands(limit_s):
            left_s = limit_s - (time.monotonic() - started)
            if left_s < 1:
                lines.append(f"-- {command.name}: left out, because the part's time was over")
                is_right = False
                continue
            what, ended_well = self._run_command(command, left_s * command.most, log_path)
            lines += what
            is_right &= ended_well
        conclusion = _conclude(part)
        is_right &= conclusion.is_right
        if part.name == "benchmarks":
            _keep_logs(log_path, begin_s)
        if not is_right:
            self.failed.append(part.name)
        seconds = time.monotonic() - started
        outcome = "right" if is_right else f"FAILED; all of its output is in {log_path.name}"
        return [f"== {part.name}: {outcome}; {seconds:.0f} s{_limit_text(limit_s)}", *lines, *conclusion.lines]

    def _run_command(self, command: Command, limit_s: float, log_path: Path) -> tuple[list[str], bool]:
        with log_path.open("ab") as log:
            log.write(f"$ {' '.join(command.argv)}\n".encode())
            log.flush()
            begin = log.tell()
            outcome = run_limited(
                command.argv,
                log=log,
                limit_s=min(limit_s, _MOST_S),
                environment=self.environment | command.environment,
                folder=ROOT,
            )
        ended_well = outcome.code == 0
        with log_path.open("rb") as log:
            log.seek(begin)
            output = log.read().decode(errors="replace").splitlines()
        shown = output[-(command.shown if ended_well else max(command.shown, 40)) :]
        return [f"-- {command.name}: {outcome.describe()}", *shown], ended_well


def _keep_logs(log_path: Path, begin_s: float) -> None:
    """Append the logs of a benchmark's candidates to the part's log, which may be all that is carried away."""
    with log_path.open("ab") as kept:
        for path in sorted((ROOT / ".bench" / "logs").glob("*.log")):
            if path.stat().st_mtime >= begin_s:
                kept.write(f"\n$ {path.name}\n".encode() + path.read_bytes()[-_LOG_BYTES:])


def _limit_text(limit_s: float) -> str:
    return f" of at most {limit_s:.0f} s" if math.isfinite(limit_s) else ""


def _conclude(part: Part) -> Conclusion:
    try:
        return part.conclude()
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Conclusion((f"its results cannot be read: {type(error).__name__}: {error}",), False)
