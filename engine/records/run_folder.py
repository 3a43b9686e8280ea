"""The run folder: what a run leaves behind, and where.

`config.json` (settings, what they resolved to, versions, the data's manifest digest), `loss.jsonl`, `eval.jsonl`,
`control.jsonl` (requests that took effect), `snapshots/`, `result.json` (how the run ended) and `model.safetensors`
(the trained weights). One process at a time works in it.

`config.json` and `result.json` hold digests of themselves, each snapshot and `result.json` those of the other files as
they were by then (`engine.records.folder_state`), and `model.safetensors` one of its tensors.
"""

import json
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from engine.config import TrainConfig
from engine.records.control_log import CONTROL_LOG_NAME
from engine.records.control_requests import CONTROL_FOLDER_NAME, remove_requests
from engine.records.digests import SEAL, sealed
from engine.records.file_errors import LostFileError
from engine.records.folder_lock import LOCK_NAME, FolderLock
from engine.records.versions import version_of
from engine.records.whole_file import remove_unfinished, write_whole
from preprocess.shards.arrays import PIXELS

LOSS_LOG = "loss.jsonl"
EVALUATION_LOG = "eval.jsonl"
RESULT = "result.json"
CONFIG = "config.json"
SNAPSHOTS = "snapshots"
WEIGHTS = "model.safetensors"
CONTINUED = "continues"
"""The key of `config.json` that holds the seals that the file had in earlier launches."""
# In the order in which they are removed: the mark of a finished run first, the mark of any run last.
_WRITTEN_HERE = (
    RESULT,
    WEIGHTS,
    EVALUATION_LOG,
    CONTROL_LOG_NAME,
    CONTROL_FOLDER_NAME,
    SNAPSHOTS,
    LOSS_LOG,
    CONFIG,
)
# What lies in a folder of runs, in a split of a pack, in a pack, in a folder of packs.
_OF_OTHERS = (f"*/{LOSS_LOG}", *(f"{place}{PIXELS}/zarr.json" for place in ("", "*/", "*/train/", "*/val/", "*/test/")))
_RECORDED_VERSIONS = ("feedloop", "jax", "jaxlib", "numpy", "optax", "tensorstore")


class RunFolder:
    """A folder for one run, held for this process until it is closed; a context manager.

    Args:
        path: made where it is missing.
        overwrite: remove what an earlier run left; nothing else in the folder is touched.
        resume: continue the run that is there.

    Attributes:
        config_digest: the seal of the `config.json` that was written.
        weights_digest: of the `model.safetensors` that was written, None while none was.

    Raises:
        ValueError: where an earlier run is there and may not be overwritten, none is there that could be continued,
            other runs or packed data lie below, another process works in the folder, or the path cannot be a folder.
    """

    def __init__(self, path: Path, *, overwrite: bool = False, resume: bool = False) -> None:
        self.path = path
        self.config_digest = ""
        self.weights_digest: str | None = None
        self._is_resumed, self._is_launched = resume, False
        self._is_cleared, self._is_kept = False, False
        self._is_new = not path.exists()
        if resume and not (path / CONFIG).is_file():
            raise ValueError(
                f"a run that is to be continued must be there, and {path} holds no {CONFIG}: "
                "name the folder of the run (--run-dir), or begin one without --resume"
            )
        if not (path / CONFIG).is_file():
            self._check_is_no_other()
        _make_folder(path)
        self._lock = FolderLock(path)
        self._lock.acquire()
        try:
            if not resume and not overwrite:
                self._check_is_free()
            self._remove_unfinished()
            remove_requests(path)
        except BaseException:
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

    def keep_locked(self) -> None:
        """Keeps the folder for as long as the process lives: something of it may still be writing."""
        self._is_kept = True

    def launched(self) -> None:
        """Marks that from now on there is something to keep; before, leaving takes back what was written."""
        self._is_launched = True

    def _check_is_no_other(self) -> None:
        """Raises ValueError where other runs or packed data lie below: of DIR/NAME the name was forgotten."""
        below = (each for pattern in _OF_OTHERS for each in self.path.glob(pattern))
        if (found := next(below, None)) is not None:
            holds = found.relative_to(self.path).parent
            raise ValueError(
                f"a run folder must hold its run alone, and {self.path} holds {holds}: name one below it, such as "
                f"{self.path / 'run'} (--run-dir)"
            )

    def _check_is_free(self) -> None:
        left = [name for name in _WRITTEN_HERE if _is_left(self.path / name)]
        if left:
            raise ValueError(
                f"the run folder must be new, and {self.path} holds {left[-1]} of an earlier run: choose another "
                "(--run-dir), continue the run (--resume) or overwrite it (--overwrite)"
            )

    def _remove_unfinished(self) -> None:
        """Removes what a kill left: the weights of a large network would take as much room again, each time."""
        for name in (CONFIG, RESULT, WEIGHTS):
            with suppress(OSError):  # no leftover is worth the run
                remove_unfinished(self.path / name)

    def clear(self) -> None:
        """Removes what an earlier run left."""
        for name in _WRITTEN_HERE:
            # Requests that are there by now are to this run: an earlier one's went when the folder was entered.
            if name != CONTROL_FOLDER_NAME:
                _remove(self.path / name)
        self._is_cleared = True

    def _abandon(self) -> None:
        """Leaves the folder as it was: an earlier run that is continued, or that was not replaced yet, stays."""
        if self._is_cleared:
            self.clear()
        if self._is_resumed or (self.path / CONFIG).exists():
            return
        _remove(self.path / CONTROL_FOLDER_NAME)
        # Its holder alone may remove the lock.
        (self.path / LOCK_NAME).unlink(missing_ok=True)
        if self._is_new:
            with suppress(OSError):  # somebody else's files are in it by now
                self.path.rmdir()

    @property
    def loss_log(self) -> Path:
        """Where the loss stream goes."""
        return self.path / LOSS_LOG

    @property
    def evaluation_log(self) -> Path:
        """Where the evaluations go."""
        return self.path / EVALUATION_LOG

    @property
    def control_log(self) -> Path:
        """Where the requests that took effect go."""
        return self.path / CONTROL_LOG_NAME

    @property
    def snapshots(self) -> Path:
        """Where the snapshots go."""
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
        """Records the settings as given and as resolved, the versions, and the data they were meant for.

        Args:
            config, resolved, manifest_digest: of this launch.
            origins: where each setting came from.
            earlier: of the launches that this one continues, what their settings were where they differ.
            continued: the seals that this file had in those launches, oldest first.
        """
        # As JSON has it, a tuple as a list: the seal must be that of what is read back.
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
        """Raise LostFileError where the folder was emptied, or another run works in it: `config.json` is gone."""
        if self._lock.is_taken() or not (self.path / CONFIG).is_file():
            raise LostFileError.of(self.path / CONFIG)

    def remove_result(self) -> None:
        """Takes back the mark of a finished run, for one that goes on."""
        (self.path / RESULT).unlink(missing_ok=True)

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Records how the run ended; its presence means that nothing more will be written."""
        self._write_json(RESULT, sealed(result))

    def write_weights(self, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> Path:
        """Writes the weights as safetensors, with their digest among the metadata; gives the file's path.

        The folder is made anew where somebody removed it: weights may be days of work.

        Raises:
            OSError: where they cannot be written; LostFileError where another run works in the folder by now.
            MemoryError: where there is no memory for the file's content.
        """
        from safetensors.numpy import save

        from engine.records.weights import with_digest

        path = self.path / WEIGHTS
        # safetensors writes an array's memory as it lies; ascontiguousarray would make a vector of a scalar.
        laid_out = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
        metadata = with_digest(laid_out, metadata)
        try:
            content = _in_fixed_order(save(laid_out, dict(metadata)))
        except MemoryError as error:
            size = sum(tensor.nbytes for tensor in laid_out.values())
            raise MemoryError(
                f"{path} needs {size / 1e6:,.0f} MB of memory to be written, which this machine has not: free memory, "
                "and continue the run from its last snapshot (--resume)"
            ) from error
        self._write(WEIGHTS, content)
        self.weights_digest = metadata[SEAL]
        return path

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        self._write(name, (json.dumps(value, indent=2) + "\n").encode())

    def _write(self, name: str, content: bytes) -> None:
        """Write a file; raise LostFileError, and replace nothing, where another run works in the folder by now."""
        if self._lock.is_taken():
            raise LostFileError.of(self.path / name)
        with suppress(OSError):  # the write below raises the error that names the file
            self.path.mkdir(parents=True, exist_ok=True)
        write_whole(self.path / name, content)


def recorded_versions() -> dict[str, str]:
    """Gives the versions of what takes part in a run's numbers."""
    return {"python": platform.python_version()} | {name: version_of(name) for name in _RECORDED_VERSIONS}


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"the run folder must be a folder, and {path} is a file: choose another") from None
    except OSError as error:
        raise ValueError(
            f"the run folder must be writable, and {path} cannot be made ({error.strerror}): choose another"
        ) from error


def _is_left(path: Path) -> bool:
    """Tells whether something of an earlier run is at a path; one of strangers' files alone does not count."""
    return path.exists() and (not path.is_dir() or any(_own_entries(path)))


def _own_entries(folder: Path) -> Iterator[Path]:
    """Gives what runs write into one of their folders: a folder for a snapshot's step, a file for a request."""
    for entry in folder.iterdir():
        if folder.name != SNAPSHOTS:
            is_own = entry.suffix == ".json"
        else:
            is_own = entry.is_dir() and (entry.name.isdigit() or entry.name == ".unfinished")
        if is_own:
            yield entry


def _remove(path: Path) -> None:
    """Removes a file, or what runs write into a folder and the folder where nothing else is in it."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for entry in list(_own_entries(path)):
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    with suppress(OSError):  # somebody else's files are in it
        path.rmdir()


def _in_fixed_order(file: bytes) -> bytes:
    """Gives a safetensors file with its metadata sorted: the library writes it in the order of a randomised hash."""
    length = int.from_bytes(file[:8], "little")
    header = json.loads(file[8 : 8 + length])
    if "__metadata__" in header:
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # Tensors begin at a multiple of eight, as the format wants it.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + file[8 + length :]
