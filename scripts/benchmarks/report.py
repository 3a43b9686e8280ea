"""The results of a run as one JSON document."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loopfeed.engine.records.whole_file import write_whole
from scripts.benchmarks.bench import Bench, Settings
from scripts.benchmarks.hardware import (
    describe_environment,
    describe_hardware,
    describe_versions,
    git_commit,
)
from scripts.benchmarks.peers import PEERS
from scripts.benchmarks.session import ROOT, CaseResult

FORMAT_VERSION = 1


def describe_run(settings: Settings) -> dict[str, Any]:
    """Return the facts shared by all results of a run: date, commit, hardware, versions, settings."""
    return {
        "format_version": FORMAT_VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(ROOT),
        "hardware": describe_hardware(),
        "versions": describe_versions(),
        "environment": describe_environment(),
        "settings": {
            "repeats": settings.repeats,
            "peers": settings.peers,
            "case": settings.case,
            "round_s": settings.round_s,
            "limit_s": settings.limit_s,
            "images": None if settings.images is None else str(settings.images),
        },
    }


def write_json(path: Path, about: dict[str, Any], results: Sequence[tuple[Bench, CaseResult]]) -> None:
    """Write the results of a run atomically.

    Raises:
        OSError: the file cannot be written.
    """
    benches: dict[str, list[Any]] = {}
    for bench, result in results:
        benches.setdefault(bench.name, []).append(result.to_json())
    peers = {row.candidate.peer for _, result in results for row in result.rows if row.candidate.peer}
    about = about | {
        "peers": {name: {"what": PEERS[name].what, "pins": PEERS[name].requirements} for name in sorted(peers)},
        "benches": [{"name": name, "cases": cases} for name, cases in benches.items()],
    }
    write_whole(path, (json.dumps(about, indent=1, ensure_ascii=False) + "\n").encode())
