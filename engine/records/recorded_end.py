"""Reads and checks `result.json`, the record of how a run ended. Does not need jax."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopfeed.engine.records.control_log import CONTROL_LOG_NAME
from loopfeed.engine.records.digests import SEAL, is_as_sealed, json_digest
from loopfeed.engine.records.folder_state import FolderState
from loopfeed.engine.records.limits import MOST_JSON_BYTES
from loopfeed.engine.records.run_folder import EVALUATION_LOG, LOSS_LOG, RESULT
from loopfeed.preprocess.regular_file import read_regular
from loopfeed.preprocess.system_errors import error_text, reading_remedy

FILES = "files"
"""The key of `result.json` for the state of the other files at the end of the run."""
WEIGHTS_DIGEST = "weights_sha256"
"""The key under `FILES` for the digest in the metadata of `model.safetensors`; None if that file was not written."""


@dataclass(frozen=True)
class RecordedEnd:
    """The state of the run's other files, as recorded in `result.json`.

    Attributes:
        folder: the state of `config.json` and the logs; None if it was not recorded: by a run from before digests were
            written, or one that was abandoned while it may still have been writing.
        weights_digest: the digest of `model.safetensors`, None if it is not recorded.
        is_sealed: whether `result.json` contains its own digest.
    """

    folder: FolderState | None
    weights_digest: str | None
    is_sealed: bool


def read_result(run: Path) -> RecordedEnd | None:
    """Read and check `result.json`; return None if it does not exist.

    Raises:
        ValueError: if it cannot be read, or has changed since it was written.
    """
    path = run / RESULT
    try:
        values = json.loads(read_regular(path, max_bytes=MOST_JSON_BYTES))
        if not isinstance(values, dict):
            raise TypeError(f"it must be a JSON object, but is {type(values).__name__}")
        if SEAL not in values and FILES not in values:
            return RecordedEnd(None, None, is_sealed=False)
        if not is_as_sealed(values):
            found, now = str(values.get(SEAL, "none"))[:12], json_digest(values)[:12]
            raise ValueError(f"its digest (sha256) was {found}, but is {now} now")
        return _recorded_end(values)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if remedy := reading_remedy(error, ""):
            raise ValueError(f"{path} cannot be read ({error_text(error)}): {remedy}") from error
        raise ValueError(
            f"{path} is not what the run wrote at its end ({error_text(error)}): restore that file, or remove it to "
            "resume from the newest snapshot"
        ) from error


def _recorded_end(values: dict[str, Any]) -> RecordedEnd:
    files = values.get(FILES)
    if files is None:
        return RecordedEnd(None, None, is_sealed=True)
    folder = FolderState.from_json(files)
    for name in (LOSS_LOG, EVALUATION_LOG, CONTROL_LOG_NAME):
        if name not in folder.logs:
            raise KeyError(name)
    return RecordedEnd(folder, files.get(WEIGHTS_DIGEST), is_sealed=True)
