"""Digests of `config.json` and the logs, recorded with each snapshot and at the end of the run.

Owns the comparison of these digests with the current content of the files. It detects damage and edits by hand, but
does not protect against recomputed digests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loopfeed.engine.records.digests import LogState, RunningDigest, digest_file
from loopfeed.engine.records.json_lines import read_lines
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.system_errors import reading_remedy


@dataclass(frozen=True)
class FolderState:
    """The digests of `config.json` and of the logs.

    Attributes:
        config_sha256: the digest of `config.json`.
        logs: the state of each log by file name; a log that does not exist yet has the state of an empty file.
    """

    config_sha256: str
    logs: Mapping[str, LogState] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "config_sha256": self.config_sha256,
            "logs": {name: state.to_json() for name, state in self.logs.items()},
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "FolderState":
        """Create a state from values returned by `to_json`.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: for any other values.
        """
        return cls(
            str(values["config_sha256"]), {str(name): LogState.from_json(log) for name, log in values["logs"].items()}
        )


@dataclass(frozen=True)
class RecordedBy:
    """The text for messages about files that do not match their digests: what recorded the digests, and a remedy.

    Attributes:
        name: what recorded the digests, such as "the snapshot of step 8".
        remedy: the alternative to restoring the file, worded to end the message.
    """

    name: str
    remedy: str = ""


def by_snapshot(snapshots: Path, step: int) -> RecordedBy:
    """Return the text for messages about files that do not match the digests recorded in a snapshot."""
    return RecordedBy(
        f"the snapshot of step {step}", f", or remove {snapshots / str(step)} to resume from the snapshot before it"
    )


def by_result(path: Path) -> RecordedBy:
    """Return the text for messages about files that do not match the digests recorded in `result.json`."""
    return RecordedBy(path.name, f", or remove {path} to resume from the newest snapshot")


def digest_log(path: Path, *expected: tuple[LogState, RecordedBy]) -> RunningDigest:
    """Check a log against its expected states; return the digest of its content up to the longest state.

    Args:
        path: the log, which is read once.
        expected: earlier states of the log, each with what recorded it.

    Raises:
        ValueError: if the file's beginning differs, or the file is too short, missing, or not a regular file; the
            message gives the shortest expected state that does not match.
    """
    found = RunningDigest()
    for state, by in sorted(expected, key=lambda each: each[0].num_bytes):
        try:
            found = digest_file(path, state.num_bytes, found)
        except FileNotFoundError:
            raise _refusal(path, state, by, "it is missing") from None
        except OSError as error:
            if remedy := reading_remedy(error, ""):
                raise ValueError(f"{path} cannot be read ({error.strerror or error}): {remedy}") from error
            raise _refusal(path, state, by, f"it cannot be read ({error.strerror or error})") from error
        now = found.state()
        if now.num_bytes < state.num_bytes:
            raise _refusal(path, state, by, f"it has only {quantity(now.num_bytes, 'byte')}")
        if now != state:
            reason = f"its digest (sha256) was {state.sha256[:12]}, but is {now.sha256[:12]} now"
            raise _refusal(path, state, by, reason)
    return found


def whole_lines_digest(path: Path) -> RunningDigest:
    """Return the digest of a log's complete lines, ignoring a truncated last line; treat a missing file as empty.

    Raises:
        ValueError: if a line is longer than any line of a log.
        OSError: if the file cannot be read.
    """
    found = RunningDigest()
    for line in read_lines(path):
        found.update(line)
    return found


def check_no_more(path: Path, expected: LogState, by: RecordedBy) -> None:
    """Raise ValueError if complete lines were appended to a log after its run ended."""
    num_bytes = whole_lines_digest(path).num_bytes
    if num_bytes > expected.num_bytes:
        raise _refusal(path, expected, by, f"it is longer by {quantity(num_bytes - expected.num_bytes, 'byte')}")


def check_config_digest(
    path: Path, digest: str | None, earlier: Sequence[str], state: FolderState, by: Path | str
) -> None:
    """Raise ValueError unless `config.json` is the version recorded in a state or a later version of the same file.

    Args:
        path: the path of `config.json`.
        digest: its digest, None if it has none.
        earlier: its digests in earlier launches.
        state: the recorded state.
        by: the path or the name of the record: a snapshot or `result.json`.
    """
    if state.config_sha256 in (digest, *earlier):
        return
    found = "there is none now" if digest is None else f"is {digest[:12]} now"
    raise ValueError(
        f"{path} and {by} are not of the same run: according to the second, the digest (sha256) of the first was "
        f"{state.config_sha256[:12]}, but {found}. Restore it or, if the second is of another run, remove that. "
        "To change a setting, give its option to run-train --resume"
    )


def _refusal(path: Path, expected: LogState, by: RecordedBy, found: str) -> ValueError:
    return ValueError(
        f"{path} has changed since it was recorded by {by.name} ({quantity(expected.num_bytes, 'byte')}): {found}; "
        f"restore that file{by.remedy}"
    )
