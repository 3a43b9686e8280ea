"""Cases run by several workers, each with its own servers and folder, until all are done or the time is up."""

from __future__ import annotations

import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from scripts.torture_campaign.case import Case, Outcome, Trial
from scripts.torture_campaign.commands import Commands

NUM_WORKERS = 2


class Kind(Protocol):
    """A kind of faults."""

    name: str

    def prepare(self, trial: Trial) -> None:
        """Create the sound data, once, in a folder that is kept."""
        ...

    def cases(self, seed: int, count: int) -> list[Case]:
        """Return the cases, the named ones first."""
        ...

    def attempt(self, trial: Trial) -> None:
        """Apply the fault of a case, run commands and judge them."""
        ...


@dataclass
class Campaign:
    """The cases of a run of the campaign, shared by its workers.

    Attributes:
        base: the folder of all files of the campaign.
        report: called with each outcome.
        keeps_folders: whether the folders of cases are kept.
        shim: a library that every command loads, which does nothing without orders (`call_faults`).
    """

    base: Path
    report: Callable[[Outcome, Trial], None]
    keeps_folders: bool = False
    shim: Path | None = None
    errors: list[str] = field(default_factory=list)
    num_left: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _heavy: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)
    _open: list[Commands] = field(default_factory=list)

    def prepare(self, kinds: Iterable[Kind]) -> None:
        """Let the kinds create their sound data, two at a time."""
        with ThreadPoolExecutor(NUM_WORKERS) as pool:
            try:
                for done in [pool.submit(self._prepare, kind) for kind in kinds]:
                    done.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.close()
                raise

    def _prepare(self, kind: Kind) -> None:
        commands = self._commands()
        folder = self.base / f"sound-{kind.name}"
        folder.mkdir(parents=True)
        try:
            kind.prepare(Trial(Case(kind.name, "prepare", 0), folder, commands))
        finally:
            commands.close()

    def run(self, kinds: dict[str, Kind], cases: list[Case], *, deadline_s: float) -> None:
        """Try the cases in order until all are done; start none after the deadline, on the monotonic clock."""
        left = iter(cases)
        workers = [
            threading.Thread(target=self._work, args=(number, kinds, left, deadline_s), daemon=True)
            for number in range(NUM_WORKERS)
        ]
        for worker in workers:
            worker.start()
        try:
            for worker in workers:
                while worker.is_alive():
                    worker.join(0.2)
        finally:
            self._stop.set()
            self.close()
        self.num_left = sum(1 for _ in left)

    def close(self) -> None:
        """Kill every server, and with it every command."""
        for commands in self._open:
            commands.end()

    def _commands(self) -> Commands:
        commands = Commands(self.shim)
        self._open.append(commands)
        return commands

    def _work(self, number: int, kinds: dict[str, Kind], cases: Iterator[Case], deadline_s: float) -> None:
        commands = self._commands()
        while not self._stop.is_set() and time.monotonic() < deadline_s:
            with self._lock:
                case = next(cases, None)
            if case is None:
                return
            try:
                self._attempt(case, kinds[case.kind], commands, number)
            except Exception:  # noqa: BLE001 - reported with the table, and fails the campaign
                if self._stop.is_set():
                    return
                with self._lock:
                    self.errors.append(f"{case.id}: the campaign itself failed:\n{traceback.format_exc()}")
                commands.close()

    def _attempt(self, case: Case, kind: Kind, commands: Commands, number: int) -> None:
        folder = self.base / f"worker-{number}" / case.id.replace("/", "-").replace(":", "-")
        folder.mkdir(parents=True)
        trial = Trial(case, folder, commands)
        try:
            if case.is_heavy:
                with self._heavy:
                    kind.attempt(trial)
            else:
                kind.attempt(trial)
            outcomes = trial.outcomes()
        finally:
            if not self.keeps_folders:
                remove(folder)
        with self._lock:
            for outcome in outcomes:
                self.report(outcome, trial)


def remove(folder: Path) -> None:
    """Remove a folder with any content, including a very deeply nested one."""
    subprocess.run(["rm", "-rf", "--", folder], check=False)
