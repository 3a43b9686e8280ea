"""The command behind scripts/torture: options, the order of cases, the workers, the table and the exit code."""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from multiprocessing import active_children
from pathlib import Path
from threading import Lock
from types import FrameType

from scripts.torture_campaign.archives import ArchiveKind
from scripts.torture_campaign.call_faults import build_shim
from scripts.torture_campaign.calls import CallKind
from scripts.torture_campaign.case import Case, Kind, Trial, Verdict, first_line
from scripts.torture_campaign.commands import set_environment
from scripts.torture_campaign.images import ImageKind
from scripts.torture_campaign.kills import KillKind
from scripts.torture_campaign.packs import EXEMPTIONS, PackKind
from scripts.torture_campaign.runs import RunKind

# Of each kind: how it is made with a folder for compiled programs and the pack of `--data`, its cases by default, and
# per turn of a sample, because the cost of a case differs.
KINDS: dict[str, tuple[Callable[[Path, Path | None], Kind], int, int]] = {
    "packs": (lambda cache, _: PackKind(cache), 400, 6),
    "runs": (lambda cache, _: RunKind(cache), 150, 1),
    "images": (lambda *_: ImageKind(), 250, 2),
    "archives": (lambda *_: ArchiveKind(), 100, 4),
    "kills": (KillKind, 40, 1),
    "calls": (lambda cache, _: CallKind(cache), 300, 2),
}
_NUM_WORKERS = 2
_MIN_FREE_BYTES = 6 << 30
_IN_MEMORY = Path("/dev/shm")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="scripts/torture")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget-minutes", type=float, default=30.0)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--only", default=",".join(KINDS))
    for kind, (_, count, _) in KINDS.items():
        parser.add_argument(f"--{kind}", type=int, default=count)
    parser.add_argument("--data", type=Path)
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
    options = parse_arguments(arguments)
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
    shim = build_shim(base) if "calls" in options.only else None
    if isinstance(shim, str):
        print(f"calls left out: the library that makes the faults {shim}", flush=True)
        options.only.remove("calls")
        shim = None
    set_environment(shim)
    data = None if options.data is None else options.data.resolve()
    kinds = {name: KINDS[name][0](base / "cache", data) for name in options.only}
    campaign = Campaign(base, kinds, keeps_folders=options.keep is not None, shows_all=options.case is not None)
    campaign.prepare()
    print(f"seed {options.seed}: sound data created in {time.monotonic() - started_s:.0f} s, in {base}", flush=True)
    cases = choose_cases(options, kinds)
    # The time of a sample is for its cases only; the time of a whole campaign includes the preparation.
    is_sample = options.minutes is not None
    minutes, begun_s = (options.minutes, time.monotonic()) if is_sample else (options.budget_minutes, started_s)
    num_left = campaign.run(cases, deadline_s=begun_s + 60 * minutes)
    print(f"\n{campaign.table()}")
    for name, reason in EXEMPTIONS.items():
        print(f"documented: {name}: {reason}")
    for kind, (max_mb, what) in campaign.peak_memory.items():
        print(f"most memory, {kind}: {max_mb:,.0f} MB, {what}")
    left = f"; {num_left} of {len(cases)} cases skipped because the time was up" if num_left else ""
    num_tried = sum(count.total() for count in campaign.counts.values())
    print(f"{num_tried} cases in {time.monotonic() - started_s:.0f} s, seed {options.seed}{left}")
    return int(campaign.has_failed)


def choose_cases(options: argparse.Namespace, kinds: Mapping[str, Kind]) -> list[Case]:
    """Return the cases in the order in which they are tried: named cases, then drawn ones, with the kinds in turn.

    With --minutes, for which most cases are left out, return a seeded sample in which the kinds take turns.

    Raises:
        ValueError: --case is not the id of a case.
    """
    by_kind = [
        [
            Case(name, case, options.seed, any(word in case for word in kind.heavy))
            for case in kind.names(getattr(options, name))
        ]
        for name, kind in kinds.items()
    ]
    if options.case is not None:
        kind, _, name = options.case.partition("/")
        single = Case(kind, name, options.seed)
        found = [case for case in by_kind[0] if case.id == single.id]
        if not found and single.number is None:
            raise ValueError(f"--case must be the id of a case, and there is no {single.id}; use one that was printed")
        return found or [single]
    if options.minutes is None:
        return sorted(_in_turns(by_kind), key=lambda case: case.number is not None)
    shares = []
    for cases in by_kind:
        quick = [case for case in cases if not case.is_heavy]  # a slow case would leave no time for the others
        random.Random(f"{options.seed}/sample").shuffle(quick)
        num_lists = KINDS[quick[0].kind][2] if quick else 1
        shares += [quick[first::num_lists] for first in range(num_lists)]
    return list(_in_turns(shares))


def _in_turns(lists: Iterable[list[Case]]) -> Iterator[Case]:
    return (case for turn in zip_longest(*lists) for case in turn if case is not None)


@dataclass
class Campaign:
    """The cases of a run of the campaign, tried by `_NUM_WORKERS` workers.

    Attributes:
        base: the folder of all files of the campaign.
        kinds: the kinds by name.
        keeps_folders: whether the folders of cases are kept.
        shows_all: whether the commands and judgements of each case are shown.
        counts: by kind, the number of cases by their worst verdict.
        peak_memory: by kind, in MB, with the command.
        has_failed: whether a case failed, or the campaign itself.
    """

    base: Path
    kinds: Mapping[str, Kind]
    keeps_folders: bool = False
    shows_all: bool = False
    counts: dict[str, Counter[Verdict]] = field(default_factory=dict)
    peak_memory: dict[str, tuple[float, str]] = field(default_factory=dict)
    has_failed: bool = False
    _is_stopped: bool = False
    _lock: Lock = field(default_factory=Lock)
    _heavy: Lock = field(default_factory=Lock)

    def prepare(self) -> None:
        """Let the kinds create their sound data, the slowest first."""
        self._work_off(self._prepare, sorted(self.kinds, key=lambda name: name not in ("runs", "kills")))

    def run(self, cases: list[Case], *, deadline_s: float) -> int:
        """Try the cases in order, none after the deadline on the monotonic clock; return how many were left."""
        return sum(self._work_off(lambda case: self._try(case, deadline_s), cases))

    def _work_off[T, R](self, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
        with ThreadPoolExecutor(_NUM_WORKERS) as pool:
            try:
                return list(pool.map(work, items))
            except BaseException:
                self.has_failed = self._is_stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                for server in active_children():
                    server.kill()  # and with it its command
                raise

    def _prepare(self, name: str) -> None:
        folder = self.base / f"sound-{name}"
        folder.mkdir(parents=True)
        self.kinds[name].prepare(Trial(Case(name, "prepare", 0), folder))

    def _try(self, case: Case, deadline_s: float) -> bool:
        """Try a case; return whether it was left, because the time was up."""
        if time.monotonic() >= deadline_s:
            return True
        folder = self.base / case.id.replace("/", "-").replace(":", "-")
        folder.mkdir()
        trial = Trial(case, folder)
        error = ""
        try:
            with self._heavy if case.is_heavy else nullcontext():
                self.kinds[case.kind].attempt(trial)
        except Exception:  # noqa: BLE001 - reported, and fails the campaign
            error = f"ERROR {case.id}: the campaign itself failed:\n{traceback.format_exc()}"
        finally:
            if not self.keeps_folders:
                remove(folder)
        with self._lock:
            if not self._is_stopped:
                self._report(trial, error)
        return False

    def _report(self, trial: Trial, error: str) -> None:
        kind = trial.case.kind
        self.counts.setdefault(kind, Counter())[trial.verdict] += 1
        self.has_failed |= bool(error) or trial.verdict.is_failure
        for finished in trial.log:
            found = finished.max_rss_mb, f"{finished.command[0]} of {trial.case.id}"
            self.peak_memory[kind] = max(self.peak_memory.get(kind, found), found)
        if error:
            print(error, file=sys.stderr)
        elif self.shows_all:
            show(trial)
        elif trial.verdict.is_failure:
            print(f"FAILED  {trial}", flush=True)

    def table(self) -> str:
        """Return a table with a row per kind: the number of cases, and of cases by their worst verdict."""
        rows = [("kind", "faults", *map(str, Verdict))]
        for name, count in [*self.counts.items(), ("all", sum(self.counts.values(), Counter[Verdict]()))]:
            rows.append((name, str(count.total()), *(str(count[verdict]) for verdict in Verdict)))
        return "\n".join(f"{row[0]:10}" + "".join(f"{text:>11}" for text in row[1:]) for row in rows)


def show(trial: Trial) -> None:
    """Print the commands of a case with their output, and the judgements."""
    print(f"{trial.case.id}: {trial.fault}")
    for finished in trial.log:
        ended = "hung" if finished.hung else f"exit code {finished.code}"
        print(f"$ {' '.join(finished.command)}\n  {ended}, {finished.seconds:.1f} s, {finished.max_rss_mb:,.0f} MB")
        for stream in (finished.out, finished.err):
            for line in stream[:8000].decode(errors="replace").splitlines()[:40]:
                print(f"  | {first_line(line)}")
    for judgement in trial.judgements:
        print(f"{judgement.command}: {judgement.verdict.upper()} {judgement.why}")


def remove(folder: Path) -> None:
    """Remove a folder with any content, including a very deeply nested one."""
    subprocess.run(["rm", "-rf", "--", folder], check=False)


def _make_folder(keep: Path | None) -> Path:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        return keep.resolve()
    has_room = _IN_MEMORY.is_dir() and shutil.disk_usage(_IN_MEMORY).free > _MIN_FREE_BYTES
    return Path(tempfile.mkdtemp(prefix="torture-", dir=_IN_MEMORY if has_room else None))


def _raise_keyboard_interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
