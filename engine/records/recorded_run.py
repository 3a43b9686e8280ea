"""What `config.json` records of a run, read back. Needs no jax, so that the commands can refuse quickly."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import TrainConfig
from engine.records.digests import SEAL, is_as_sealed, json_digest
from engine.records.file_errors import unreadable_words
from engine.records.limits import MOST_JSON_BYTES
from engine.records.run_folder import CONFIG, CONTINUED
from preprocess.regular_file import read_regular


@dataclass(frozen=True)
class RecordedRun:
    """What `config.json` holds.

    Attributes:
        config: the settings of the last launch.
        resolved: what they resolved to.
        manifest_digest: of the data, None where they had none.
        origins: where each setting came from.
        versions: of what took part.
        earlier: of earlier launches, oldest first: `until_step` and the `settings` that were others until then.
        digest: the seal of the file, None where it was written before there was one.
        continued: the seals that it had in earlier launches, oldest first.
    """

    config: TrainConfig
    resolved: dict[str, Any]
    manifest_digest: str | None
    origins: dict[str, str]
    versions: dict[str, str]
    earlier: tuple[dict[str, Any], ...]
    digest: str | None = None
    continued: tuple[str, ...] = ()

    @property
    def seals(self) -> tuple[str, ...]:
        """All seals that the file has had so far, oldest first."""
        return self.continued if self.digest is None else (*self.continued, self.digest)

    def config_at(self, step: int) -> TrainConfig:
        """Gives the settings that the update `step` (from 1) was made with."""
        config = self.config
        for launch in reversed(self.earlier):
            if step <= launch["until_step"]:
                config = dataclasses.replace(config, **launch["settings"])
        return config

    def changes(self) -> tuple[int, ...]:
        """Gives the steps after which settings changed, ascending."""
        return tuple(sorted({launch["until_step"] for launch in self.earlier}))


def read_recorded(run: Path) -> RecordedRun:
    """Read `config.json`, and check that it is what was written.

    Raises:
        ValueError: where it is missing, no regular file, unreadable, of another form, or was changed since it was
            written. What was written before the file held a digest cannot be checked for that.
    """
    try:
        return read_record(run / CONFIG)
    except FileNotFoundError:
        raise ValueError(f"a run folder must hold {CONFIG}, and {run} does not: name the folder of a run") from None


def read_record(path: Path) -> RecordedRun:
    """Read a `config.json` wherever it lies, and check that it is what was written.

    Raises:
        FileNotFoundError: where it is missing.
        ValueError: as `read_recorded`.
    """
    try:
        values = json.loads(read_regular(path, max_bytes=MOST_JSON_BYTES))
        if not isinstance(values, dict):
            raise TypeError(f"it must be a JSON object, is {type(values).__name__}")
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise _unreadable(path, error) from error
    _check_seal(path, values)
    try:
        return RecordedRun(
            config=TrainConfig.from_json(values["config"]),
            resolved=dict(values["resolved"]),
            manifest_digest=values["manifest_sha256"],
            origins=dict(values["origins"]),
            versions=dict(values["versions"]),
            earlier=tuple(
                {**e, "until_step": int(e["until_step"]), "settings": dict(e["settings"])} for e in values["earlier"]
            ),
            digest=values.get(SEAL),
            continued=tuple(map(str, values.get(CONTINUED, ()))),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise _unreadable(path, error) from error


def _check_seal(path: Path, values: dict[str, Any]) -> None:
    """Raise ValueError where a record was changed since it was written; a record without a digest is an older run's."""
    if SEAL not in values and CONTINUED not in values:
        return
    if not is_as_sealed(values):
        found, now = str(values.get(SEAL, "none"))[:12], json_digest(values)[:12]
        raise ValueError(
            f"{path} must be what run-train wrote, and was changed since (its digest (sha256) was {found}, is {now}): "
            "undo the change or restore the file; to change a setting, give its option to run-train --resume instead"
        )


def _unreadable(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{path} must be what run-train wrote, and cannot be read ({unreadable_words(error)}): "
        "restore it, or begin another run"
    )
