"""The command behind scripts/torture: options, the order of cases, the exit code."""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from types import FrameType

from scripts.torture_campaign.call_faults import build_shim
from scripts.torture_campaign.campaign import Campaign, Kind, remove
from scripts.torture_campaign.case import KINDS, Case, Outcome, Trial
from scripts.torture_campaign.kinds import make_kind
from scripts.torture_campaign.report import documented, is_clean, table
from scripts.torture_campaign.verdict import first_line

COUNTS = {"packs": 400, "runs": 150, "images": 250, "archives": 100, "kills": 40, "calls": 300}
# In a sample, the number of cases of each kind per turn, because the cost of a case differs between kinds.
_SAMPLE_SHARES = {"packs": 6, "runs": 1, "images": 2, "archives": 4, "kills": 1, "calls": 2}
_MIN_FREE_BYTES = 6 << 30
_IN_MEMORY = Path("/dev/shm")


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="scripts/torture")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget-minutes", type=float, default=30.0)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--only", default=",".join(KINDS))
    for kind in KINDS:
        parser.add_argument(f"--{kind}", type=int, default=COUNTS[kind])
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--case")
    options = parser.parse_args(arguments)
    options.only = [name for name in options.only.split(",") if name]
    if unknown := [name for name in options.only if name not in KINDS]:
        parser.error(f"--only must be some of {', '.join(KINDS)}, got {unknown[0]}")
    if options.case is not None:
        options.only = [options.case.partition("/")[0]]
        if options.only[0] not in KINDS:
            parser.error(f"--case must begin with one of {', '.join(KINDS)} and a slash, got {options.case}")
    if options.keep is not None and options.keep.is_dir() and any(options.keep.iterdir()):
        parser.error(f"--keep must be a new or empty folder, and {options.keep} is not empty; give another")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the campaign; return the exit code."""
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    signal.signal(signal.SIGTERM, _raise_keyboard_interrupt)  # so that SIGTERM unwinds the stack too
    base = _make_folder(options.keep)
    try:
        return _run(options, base)
    except ValueError as error:
        print(f"scripts/torture: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nscripts/torture: stopped", file=sys.stderr)
        return 130
    finally:
        if options.keep is None:
            remove(base)


def _run(options: argparse.Namespace, base: Path) -> int:
    started_s = time.monotonic()
    outcomes: list[Outcome] = []
    is_single = options.case is not None

    peak_memory: dict[str, tuple[float, str]] = {}

    def report(outcome: Outcome, trial: Trial) -> None:
        outcomes.append(outcome)
        for each in trial.log:
            found = each.max_rss_mb, f"{each.command[0]} of {outcome.case.id}"
            peak_memory[outcome.case.kind] = max(peak_memory.get(outcome.case.kind, found), found)
        if is_single:
            _show(outcome, trial)
        elif outcome.worst.verdict.is_failure:
            print(f"FAILED  {outcome}", flush=True)

    minutes = options.budget_minutes if options.minutes is None else options.minutes
    shim = None
    if "calls" in options.only:
        built = build_shim(base)
        if isinstance(built, str):
            print(f"calls left out: the library that makes the faults {built}", flush=True)
            options.only.remove("calls")
        else:
            shim = built
    campaign = Campaign(base, report, keeps_folders=options.keep is not None, shim=shim)
    try:
        kinds = {name: make_kind(name, base) for name in options.only}
        # Start with the slowest kinds.
        campaign.prepare(sorted(kinds.values(), key=lambda kind: kind.name not in ("runs", "kills")))
        print(f"seed {options.seed}: sound data created in {time.monotonic() - started_s:.0f} s, in {base}", flush=True)
        cases = choose_cases(options, kinds)
        # The time of a sample is for its cases only; the time of a whole campaign includes the preparation.
        begun_s = started_s if options.minutes is None else time.monotonic()
        campaign.run(kinds, cases, deadline_s=begun_s + 60 * minutes)
    finally:
        campaign.close()
    print(f"\n{table(outcomes)}\n{documented()}")
    for kind, (max_mb, what) in peak_memory.items():
        print(f"most memory, {kind}: {max_mb:,.0f} MB, {what}")
    for error in campaign.errors:
        print(f"ERROR {error}", file=sys.stderr)
    left = f"; {campaign.num_left} of {len(cases)} cases skipped because the time was up" if campaign.num_left else ""
    print(f"{len(outcomes)} cases in {time.monotonic() - started_s:.0f} s, seed {options.seed}{left}")
    return 0 if is_clean(outcomes) and not campaign.errors else 1


def choose_cases(options: argparse.Namespace, kinds: Mapping[str, Kind]) -> list[Case]:
    """Return the cases in the order in which they are tried: named cases, then drawn ones, with the kinds in turn.

    With --minutes, for which most cases are left out, return a seeded sample in which the kinds take turns.

    Raises:
        ValueError: --case is not the id of a case.
    """
    by_kind = [kind.cases(options.seed, getattr(options, name)) for name, kind in kinds.items()]
    if options.case is not None:
        found = [case for cases in by_kind for case in cases if case.id == options.case]
        kind, _, name = options.case.partition("/")
        single = Case(kind, name, options.seed)
        if not found and single.number is None:
            raise ValueError(
                f"--case must be the id of a case, and there is no {options.case}; use one that was printed"
            )
        return found or [single]
    if options.minutes is None:
        named = _in_turns([[case for case in cases if not case.is_drawn] for cases in by_kind])
        return named + _in_turns([[case for case in cases if case.is_drawn] for cases in by_kind])
    for cases in by_kind:
        # A slow case would leave no time for the others.
        cases[:] = [case for case in cases if not case.is_heavy]
        random.Random(f"{options.seed}/sample").shuffle(cases)
    return _in_turns([share for cases in by_kind for share in _split_by_share(cases, _SAMPLE_SHARES)])


def _split_by_share(cases: list[Case], shares: Mapping[str, int]) -> list[list[Case]]:
    """Distribute the cases of a kind over as many lists as it has cases per turn."""
    num_lists = shares[cases[0].kind] if cases else 1
    return [cases[first::num_lists] for first in range(num_lists)]


def _in_turns(by_kind: list[list[Case]]) -> list[Case]:
    return [case for turn in zip_longest(*by_kind) for case in turn if case is not None]


def _show(outcome: Outcome, trial: Trial) -> None:
    print(f"{outcome.case.id}: {outcome.fault}")
    for finished in trial.log:
        ended = "hung" if finished.hung else f"exit code {finished.code}"
        print(f"$ {' '.join(finished.command)}\n  {ended}, {finished.seconds:.1f} s, {finished.max_rss_mb:,.0f} MB")
        for stream in (finished.out, finished.err):
            for line in stream[:8000].decode(errors="replace").splitlines()[:40]:
                print(f"  | {first_line(line)}")
    for judgement in outcome.judgements:
        print(f"{judgement.command}: {judgement.verdict.upper()} {judgement.why}")


def _make_folder(keep: Path | None) -> Path:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        return keep.resolve()
    has_room = _IN_MEMORY.is_dir() and shutil.disk_usage(_IN_MEMORY).free > _MIN_FREE_BYTES
    return Path(tempfile.mkdtemp(prefix="torture-", dir=_IN_MEMORY if has_room else None))


def _raise_keyboard_interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
