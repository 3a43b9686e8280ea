"""The run folder, which contains the files that a run writes.

`config.json` (settings, what they resolved to, versions, the data's manifest digest), `loss.jsonl`, `eval.jsonl`,
`control.jsonl` (requests that took effect), `snapshots/`, `result.json` (how the run ended), `model.safetensors` (the
trained weights), `runtime.json` (what the runtime did) and `stalls.txt` (stacks of threads during stalls). Only one
process at a time can use it.

`config.json` and `result.json` contain digests of themselves, each snapshot and `result.json` also those of the other
files at that time (`loopfeed.engine.records.folder_state`), and `model.safetensors` a digest of its tensors.
"""

import json
import math
import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from numpy.typing import NDArray

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.records.control_log import CONTROL_LOG_NAME
from loopfeed.engine.records.control_requests import CONTROL_FOLDER_NAME, find_requests, remove_requests
from loopfeed.engine.records.digests import SEAL, sealed
from loopfeed.engine.records.file_errors import LostFileError
from loopfeed.engine.records.folder_lock import (
    LOCK_NAME,
    UNFINISHED,
    FolderLock,
    check_can_hold_snapshots,
    check_path_is_text,
)
from loopfeed.engine.records.loss_log import CONFIG_NAME, EVALUATION_LOG_NAME, LOSS_LOG_NAME, RESULT_NAME
from loopfeed.engine.records.machine import versions_of
from loopfeed.engine.records.whole_file import remove_unfinished, write_whole
from loopfeed.preprocess.regular_file import LinkedPathError, check_unlinked, is_regular, remove_tree
from loopfeed.preprocess.shards.arrays import PIXELS
from loopfeed.preprocess.synced_folders import sync_folder
from loopfeed.preprocess.system_errors import remedy_of, status_of
from loopfeed.preprocess.workers import Worker, call_within, wait_for

LOSS_LOG, EVALUATION_LOG, RESULT, CONFIG = LOSS_LOG_NAME, EVALUATION_LOG_NAME, RESULT_NAME, CONFIG_NAME
SNAPSHOTS = "snapshots"
WEIGHTS = "model.safetensors"
PROFILE = "profile.csv"
RUNTIME = "runtime.json"
STALLS = "stalls.txt"
TENSORBOARD, WANDB = "tensorboard", "wandb"
"""The folders in which loggers write."""
EVENT_FILE_SUFFIX, WANDB_RUN_ID = ".feedloop", "run-id"
"""The ending of the names of event files, and the file with the id of the run of Weights & Biases."""
CONTINUED = "continues"
"""The key of `config.json` for the digests that the file had in earlier launches."""
# In the order of removal: `result.json`, which marks a finished run, first; `config.json`, which marks any run, last.
WRITTEN_HERE = (
    RESULT,
    WEIGHTS,
    PROFILE,
    RUNTIME,
    STALLS,
    EVALUATION_LOG,
    CONTROL_LOG_NAME,
    CONTROL_FOLDER_NAME,
    SNAPSHOTS,
    LOSS_LOG,
    CONFIG,
)
# What marks a folder of runs, a split of a pack, a pack, a folder of packs.
_OTHER_CONTENT = (
    f"*/{LOSS_LOG}",
    *(f"{place}{PIXELS}/zarr.json" for place in ("", "*/", "*/train/", "*/val/", "*/test/")),
)
# What is written in folders of the run under names that are known beforehand.
_WRITTEN_BELOW = (f"{SNAPSHOTS}/{UNFINISHED}", f"{WANDB}/{WANDB_RUN_ID}", f"{WANDB}/wandb")
_MAKE_TRIES = 10
# So long, an interrupted run waits for what is still at work in its folder.
_UNLOCK_WAIT_S = 1.0
_RECORDED_VERSIONS = ("jax", "jaxlib", "numpy", "optax", "tensorstore")


class RunFolder:
    """A context manager that keeps the folder of one run locked for this process.

    Args:
        path: created if missing.
        overwrite: remove the files of an earlier run; nothing else in the folder is touched.
        resume: continue the run in the folder.

    Attributes:
        config_digest: the digest of the `config.json` that was written.
        weights_digest: the digest of the `model.safetensors` that was written; None if there is none.

    Raises:
        ValueError: if the folder contains an earlier run that may not be overwritten, no run to resume, or other runs
            or packed data, is in use by another process, cannot be created, or cannot hold snapshots.
    """

    def __init__(self, path: Path, *, overwrite: bool = False, resume: bool = False) -> None:
        self.path = path
        self.config_digest = ""
        self.weights_digest: str | None = None
        self._is_resumed, self._is_launched = resume, False
        self._is_cleared, self._is_kept = False, False
        check_path_is_text(path)
        _check_content(path, resume=resume)
        self._made = _make_folder(path)
        self._lock, self._had_lock = FolderLock(path, leftover=RESULT), (path / LOCK_NAME).exists()
        # `control-run` sends requests as soon as the folder is locked: those there before are for an earlier run.
        earlier_requests, had_requests = find_requests(path), _is_left(path / CONTROL_FOLDER_NAME)
        try:
            self._lock.acquire()
            if not resume and not overwrite:
                _check_is_free(path, had_requests=had_requests)
            self._remove_unfinished()
            remove_requests(path, earlier_requests)
            check_can_hold_snapshots(self.snapshots if self.snapshots.is_dir() else path)
        except BaseException:
            self._remove_made(lock=not self._had_lock)
            self._lock.release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if not self._is_launched:
                self._abandon()
        finally:
            if not self._is_kept:
                self._lock.release()

    def unlock_after(self, workers: Sequence[Worker[Any]]) -> None:
        """Keep the folder locked until all of these threads have ended, because they may still be writing.

        Waits a second for them; the folder is unlocked later if they take longer.
        """
        self._is_kept = True

        def unlock() -> None:
            wait_for(workers, math.inf)
            self._lock.release()

        call_within(_UNLOCK_WAIT_S, unlock, "unlock")

    def launched(self) -> None:
        """Mark the run as started, so that leaving the context keeps the run's files instead of removing them."""
        self._is_launched = True

    def _remove_unfinished(self) -> None:
        """Remove the temporary files left by a killed process, because an unfinished weights file can be large."""
        remove_tree(self.path / UNFINISHED)
        for name in (CONFIG, RESULT, WEIGHTS, PROFILE, RUNTIME, STALLS):
            with suppress(OSError):  # a leftover must not stop the run
                remove_unfinished(self.path / name)

    def clear(self) -> None:
        """Remove the files of an earlier run."""
        for name in (*WRITTEN_HERE, TENSORBOARD, WANDB):
            # All present requests are for this run: those for an earlier one were removed when the folder was locked.
            if name != CONTROL_FOLDER_NAME:
                _remove(self.path / name)
        with suppress(OSError):
            sync_folder(self.path)  # a power failure must not bring back a part of it beside the files of the new run
        self._is_cleared = True

    def _abandon(self) -> None:
        """Remove what this process wrote; keep an earlier run that was resumed or has not been overwritten yet."""
        if self._is_cleared:
            self.clear()
        holds_run = self._is_resumed or (self.path / CONFIG).exists()
        if not holds_run:
            _remove(self.path / CONTROL_FOLDER_NAME)
        self._remove_made(lock=not (holds_run and self._had_lock))

    def _remove_made(self, *, lock: bool) -> None:
        """Remove the folders created for this run if they are empty; with `lock`, first remove the lock file."""
        # Only the holder may remove the lock.
        if lock and self._lock.is_in_place():
            (self.path / LOCK_NAME).unlink(missing_ok=True)
        with suppress(OSError):  # one contains other files by now
            for folder in self._made:
                folder.rmdir()

    @property
    def loss_log(self) -> Path:
        """The path of the loss log."""
        return self.path / LOSS_LOG

    @property
    def evaluation_log(self) -> Path:
        """The path of the evaluation log."""
        return self.path / EVALUATION_LOG

    @property
    def control_log(self) -> Path:
        """The path of the log of requests that took effect."""
        return self.path / CONTROL_LOG_NAME

    @property
    def snapshots(self) -> Path:
        """The path of the snapshot folder."""
        return self.path / SNAPSHOTS

    def write_config(
        self,
        config: TrainConfig,
        resolved: Mapping[str, Any],
        manifest_digest: str | None,
        *,
        origins: Mapping[str, str],
        earlier: Sequence[Mapping[str, Any]] = (),
        continued: Sequence[str] = (),
    ) -> None:
        """Write `config.json`: the settings as given and as resolved, the versions and the data's manifest digest.

        Args:
            config, resolved, manifest_digest: of this launch.
            origins: where each setting came from.
            earlier: for each launch that this one continues, the settings that differed.
            continued: the digests that this file had in those launches, oldest first.
        """
        # Through JSON, which makes a tuple a list: the digest must be that of the values as they are read back.
        values = json.loads(
            json.dumps(
                {
                    "config": config.to_json(),
                    "origins": dict(origins),
                    "resolved": dict(resolved),
                    "manifest_sha256": manifest_digest,
                    "versions": recorded_versions(),
                    "earlier": list(earlier),
                    CONTINUED: list(continued),
                }
            )
        )
        self._write_json(CONFIG, record := sealed(values))
        self.config_digest = record[SEAL]

    def check_kept(self) -> None:
        """Raise LostFileError if the folder was emptied, removed or locked by another run after this run locked it."""
        if self._lock.is_taken() or not is_regular(self.path / CONFIG):
            raise LostFileError.of(self.path / CONFIG)

    def can_resume_from(self, step: int) -> bool:
        """Return whether the files from which a run resumes at the snapshot of `step` are still in the folder."""
        try:
            for needed in (self.path / CONFIG, self.loss_log, self.snapshots / str(step)):
                needed.stat()
        except OSError as error:  # a disk that fails now may still have them
            return not isinstance(error, FileNotFoundError | NotADirectoryError)
        return not self._lock.is_taken()

    def remove_result(self) -> None:
        """Remove `result.json`, the mark of a finished run, because the run continues."""
        (self.path / RESULT).unlink(missing_ok=True)
        # It records what the logs contain, and so must not come back once they are cut.
        sync_folder(self.path)

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write `result.json`, the record of how the run ended; once the file exists, the run writes nothing more."""
        self._write_json(RESULT, sealed(result))

    def write_monitoring(self, name: str, content: bytes) -> None:
        """Write a file that serves monitoring alone.

        Raises:
            OSError: if it cannot be written; LostFileError if the folder was emptied or locked by another run.
        """
        self.check_kept()
        self._write(name, content)

    def write_weights(self, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> Path:
        """Write the weights to a safetensors file, with their digest in the metadata, and return the file's path.

        The folder is created again if it was removed: weights may be days of work.

        Raises:
            OSError: if they cannot be written; LostFileError if another run has locked the folder since.
            MemoryError: if there is not enough memory for the file's content.
        """
        from loopfeed.engine.records.weights import weights_file

        path = self.path / WEIGHTS
        try:
            content, digest = weights_file(tensors, metadata)
        except MemoryError as error:
            size = sum(tensor.nbytes for tensor in tensors.values())
            raise MemoryError(
                f"writing {path} needs {size / 1e6:,.0f} MB of memory, more than is free: free some memory, "
                "and continue the run from its last snapshot (--resume)"
            ) from error
        self._write(WEIGHTS, content)
        self.weights_digest = digest
        return path

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        self._write(name, (json.dumps(value, indent=2) + "\n").encode())

    def _write(self, name: str, content: bytes) -> None:
        """Write a file; raise LostFileError and write nothing if another run has since locked the folder."""
        if self._lock.is_taken():
            raise LostFileError.of(self.path / name)
        with suppress(OSError):  # the write below raises the error that names the file
            self.path.mkdir(parents=True, exist_ok=True)
        write_whole(self.path / name, content)


def recorded_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a run's numbers depend on."""
    return {"python": platform.python_version()} | versions_of(*_RECORDED_VERSIONS)


def check_folder(path: Path, *, overwrite: bool = False, resume: bool = False) -> None:
    """Check that `RunFolder` would open a folder, without creating, locking or removing anything.

    Raises:
        ValueError: as `RunFolder`.
    """
    check_path_is_text(path)
    _check_content(path, resume=resume)
    existing = next(each for each in (path, *path.parents) if os.path.lexists(each))
    if not existing.is_dir():
        raise _not_a_folder(path)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"the run folder must be writable, but {existing} is not: choose another path")
    FolderLock(path).check()
    if not resume and not overwrite:
        _check_is_free(path)


def _check_content(path: Path, *, resume: bool) -> None:
    """Raise ValueError if a folder contains no run to resume, links for what a run writes, other runs or packed data.

    In the last two cases, the user gave DIR instead of DIR/NAME.
    """
    for name in (LOCK_NAME, *WRITTEN_HERE, UNFINISHED, TENSORBOARD, WANDB, *_WRITTEN_BELOW):
        try:
            check_unlinked(path, path / name)
        except LinkedPathError as error:
            raise ValueError(
                f"a run folder must itself contain what its run writes, but {error.filename} is a link: remove it, or "
                "put what it leads to in its place"
            ) from error
    if (path / CONFIG).is_file():
        return
    if resume:
        why = "does not exist" if status_of(path) is None else f"contains no {CONFIG}"
        raise ValueError(
            f"there is no run to resume in {path}, which {why}: "
            "give the folder of the run (--run-dir), or start a run without --resume"
        )
    below = (each for pattern in _OTHER_CONTENT for each in path.glob(pattern))
    if (found := next(below, None)) is not None:
        other = found.relative_to(path).parent
        raise ValueError(
            f"a run folder must contain only its run, but {path} contains {other}: choose a folder in it, such as "
            f"{path / 'run'} (--run-dir)"
        )


def _check_is_free(path: Path, *, had_requests: bool = True) -> None:
    left = [name for name in WRITTEN_HERE if _is_left(path / name) and (had_requests or name != CONTROL_FOLDER_NAME)]
    if left:
        raise ValueError(
            f"the run folder must be new, but {path} contains {left[-1]} of an earlier run: choose another "
            "folder (--run-dir), continue the run (--resume) or overwrite it (--overwrite)"
        )


def _not_a_folder(path: Path) -> ValueError:
    return ValueError(f"the run folder must be a folder, but {path} is a file: choose another path")


def _make_folder(path: Path) -> tuple[Path, ...]:
    """Create a folder and its parents, and return the folders that were missing, deepest first."""
    missing = tuple(each for each in (path, *path.parents) if not os.path.lexists(each))
    for tries_left in reversed(range(_MAKE_TRIES)):
        try:
            path.mkdir(parents=True, exist_ok=True)
            break
        except (FileExistsError, NotADirectoryError):
            raise _not_a_folder(path) from None
        except OSError as error:
            # Another run that was refused may have removed a parent that it had created.
            if tries_left and isinstance(error, FileNotFoundError):
                continue
            raise ValueError(
                f"the run folder must be writable, but {path} cannot be created ({error.strerror}): choose another "
                f"path, or {remedy_of(error)}"
            ) from error
    for each in missing:
        with suppress(OSError):  # another run that was refused may have removed it
            sync_folder(each.parent)
    return missing


def _is_left(path: Path) -> bool:
    """Return whether a path contains files of an earlier run; a folder with only unrelated files does not count."""
    return path.exists() and (not path.is_dir() or any(_own_entries(path)))


def _own_entries(folder: Path) -> Iterator[Path]:
    """Yield the entries that a run wrote to a folder: snapshots, requests, or the files of loggers."""
    for entry in folder.iterdir():
        if folder.name == SNAPSHOTS:
            is_own = entry.is_dir() and (entry.name.isdigit() or entry.name == ".unfinished")
        elif folder.name == TENSORBOARD:
            is_own = entry.suffix == EVENT_FILE_SUFFIX
        elif folder.name == WANDB:
            is_own = entry.name == WANDB_RUN_ID  # the package's own files may still have to be sent
        else:
            is_own = entry.suffix == ".json"
        if is_own:
            yield entry


def _remove(path: Path) -> None:
    """Remove a file or, if the path is a folder, what a run wrote to it, and then the folder itself if it is empty."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for entry in list(_own_entries(path)):
        entry.unlink() if entry.is_symlink() or not entry.is_dir() else shutil.rmtree(entry)
    with suppress(OSError):  # it contains other files
        path.rmdir()
