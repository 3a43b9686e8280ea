"""What the other files of a run folder held when a snapshot was taken, and at the run's end.

Owns comparing that with what they hold now. It guards against damage and edits by hand, not against whoever recomputes
the digests.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.records.digests import LogState, RunningDigest, digest_file
from engine.records.limits import LONGEST_LINE_BYTES
from preprocess.regular_file import open_regular


@dataclass(frozen=True)
class FolderState:
    """What `config.json` and the logs held.

    Attributes:
        config_sha256: the seal of `config.json`.
        logs: of each log by its file's name; of one that was not begun the state of no bytes.
    """

    config_sha256: str
    logs: Mapping[str, LogState] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the state as it is recorded."""
        return {
            "config_sha256": self.config_sha256,
            "logs": {name: state.to_json() for name, state in self.logs.items()},
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "FolderState":
        """Return what `to_json` made; raise ValueError, KeyError, TypeError or AttributeError for anything else."""
        return cls(
            str(values["config_sha256"]), {str(name): LogState.from_json(log) for name, log in values["logs"].items()}
        )


@dataclass(frozen=True)
class RecordedBy:
    """What recorded a state of the files, in words for messages.

    Attributes:
        name: such as "the snapshot of step 8".
        remedy: beside restoring the file, as the sentence goes on.
    """

    name: str
    remedy: str = ""


def by_snapshot(snapshots: Path, step: int) -> RecordedBy:
    """Return the words for a snapshot."""
    return RecordedBy(
        f"the snapshot of step {step}", f", or remove {snapshots / str(step)} to go on from the snapshot before it"
    )


def by_result(path: Path) -> RecordedBy:
    """Return the words for `result.json`."""
    return RecordedBy(path.name, f", or remove {path} to go on from the newest snapshot")


def digest_log(path: Path, *expected: tuple[LogState, RecordedBy]) -> RunningDigest:
    """Return the digest of a log up to the longest of its expected states; what was appended later is not read.

    Args:
        path: of the log, which is read once.
        expected: states that it had, each with what recorded it.

    Raises:
        ValueError: where the file begins otherwise, is shorter, missing, or no regular file; the message names the
            shortest of the expected states that it does not match.
    """
    found = RunningDigest()
    for state, by in sorted(expected, key=lambda each: each[0].num_bytes):
        try:
            found = digest_file(path, state.num_bytes, found)
        except FileNotFoundError:
            raise _refusal(path, state, by, "it is missing") from None
        except OSError as error:
            raise _refusal(path, state, by, f"it cannot be read ({error.strerror or error})") from error
        now = found.state()
        if now.num_bytes < state.num_bytes:
            raise _refusal(path, state, by, f"it has only {now.num_bytes:,} bytes")
        if now != state:
            raise _refusal(path, state, by, f"its digest (sha256) was {state.sha256[:12]}, is {now.sha256[:12]}")
    return found


def whole_lines_digest(path: Path) -> RunningDigest:
    """Return the digest of the whole lines of a log, which a crash may have cut short; of none where there is no file.

    Raises:
        OSError: where the file cannot be read.
    """
    found = RunningDigest()
    with suppress(FileNotFoundError), os.fdopen(open_regular(path), "rb") as file:
        while (line := file.readline(LONGEST_LINE_BYTES)).endswith(b"\n"):
            found.update(line)
    return found


def check_no_more(path: Path, expected: LogState, by: RecordedBy) -> None:
    """Raise ValueError where whole lines were appended to a log after the end of its run."""
    num_bytes = whole_lines_digest(path).num_bytes
    if num_bytes > expected.num_bytes:
        raise _refusal(path, expected, by, f"{num_bytes - expected.num_bytes:,} bytes were appended")


def check_config_digest(path: Path, digest: str | None, earlier: Sequence[str], state: FolderState, by: str) -> None:
    """Raise ValueError where `config.json` is neither the one that a state tells of, nor continues it.

    Args:
        path: of `config.json`.
        digest: its seal, None where it has none.
        earlier: the seals that it had in earlier launches.
        state: what is recorded.
        by: what recorded it, in words.
    """
    if state.config_sha256 in (digest, *earlier):
        return
    found = "carries no digest" if digest is None else f"is {digest[:12]}"
    raise ValueError(
        f"{path} must be of the run whose files lie beside it: its digest (sha256) was {state.config_sha256[:12]} "
        f"for {by}, and the file {found}: restore that file; to change a setting, give its option to run-train --resume"
    )


def _refusal(path: Path, expected: LogState, by: RecordedBy, found: str) -> ValueError:
    return ValueError(
        f"{path} must hold what it held for {by.name} ({expected.num_bytes:,} bytes), and {found}: "
        f"restore that file{by.remedy}"
    )
