"""The record of a finished or stopped run: its settings, their resolved values, and the trained weights.

Owns reading these so that the weights can be used. Must not know: data, programs, how the files are written.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.named_parts import OWN_FUNCTIONS
from loopfeed.engine.owners import STORAGE, with_given
from loopfeed.engine.records.folder_lock import is_locked
from loopfeed.engine.records.folder_state import check_config_digest
from loopfeed.engine.records.loss_log import last_logged_step
from loopfeed.engine.records.recorded_run import RecordedEnd, RecordedRun, read_recorded, read_result
from loopfeed.engine.records.run_folder import CONFIG, LOSS_LOG, RESULT, SNAPSHOTS, WEIGHTS
from loopfeed.engine.records.snapshot import SnapshotError, read_folder_state, snapshot_steps
from loopfeed.engine.records.snapshot_weights import find_best, read_snapshot_weights
from loopfeed.engine.records.stored.reading import local_copy, naming_in, settings_only, with_weights
from loopfeed.engine.records.weights import StoredWeights, read_weights
from loopfeed.engine.records.weights_metadata import steps_in
from loopfeed.preprocess.storage_options import as_text, is_url
from loopfeed.preprocess.system_errors import status_of

# What the record of every run has resolved.
_NEEDED = ("model", "data", "num_classes", "height", "width")


@dataclass(frozen=True)
class TrainedRun:
    """A run as recorded in its folder, with its trained weights.

    Attributes:
        path: the folder.
        record: the content of its `config.json`, which has all that `read_run` checks.
        weights: the trained weights, with their metadata.
        snapshot_step: the step of the snapshot that the weights are from, None if they are from the weights file.
    """

    path: Path
    record: RecordedRun
    weights: StoredWeights
    snapshot_step: int | None = None

    @property
    def config(self) -> TrainConfig:
        """The settings of its last launch; `run_dir` is the current folder of the run."""
        return replace(self.record.config, run_dir=str(self.path))

    @property
    def model_name(self) -> str:
        """The name of the trained model."""
        return str(self.record.resolved["model"])

    @property
    def num_classes(self) -> int | None:
        """The number of classes, K; None if only a user-defined model determined it."""
        found: int | None = self.record.resolved["num_classes"]
        return found

    @property
    def shape(self) -> tuple[int, int]:
        """The height and the width of its images in pixels, before the crop to `config.image_size`."""
        return self.record.resolved["height"], self.record.resolved["width"]

    @property
    def user_parts(self) -> Mapping[str, Any]:
        """The names of the user-defined functions that it trained with, by part."""
        found: Mapping[str, Any] = self.record.resolved.get(OWN_FUNCTIONS, {})
        return found


def run_settings(
    run: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, str] | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> TrainConfig:
    """Return the settings of a run, with `run_dir` set to its folder or URL.

    What belongs to a user, a machine or a launch is not taken from the record: caches, the project of Weights & Biases,
    credentials, and what concerned only the recorded launch have their defaults. If the record names a server that the
    environment does not, no keys are sent there.

    Args:
        run: the folder or URL of the run.
        storage_options: how to reach the store of a URL, see `loopfeed.preprocess.storage_options.STORAGE_OPTIONS`; if
            they are given, the settings have them in place of the recorded ones.
        notify: called with a line about recorded settings that are not returned, if there are any.

    Raises:
        ValueError: if the folder is not a run folder, or its `config.json` is unreadable or was changed since it was
            written.

    Example:
        >>> run_settings("run").batch
        4
    """
    with local_copy(run, storage_options, settings_only) as folder:
        check_folder(folder)
        recorded = read_recorded(folder)
    given = {"run_dir": os.fspath(run) if is_url(os.fspath(run)) else os.fspath(folder)}
    if storage_options:
        given[STORAGE] = as_text(storage_options) or ""
    config = with_given(recorded.config, given)
    if (line := recorded.describe_replaced(config)) is not None:
        notify(line)
    return config


@contextmanager
def reading_run(
    run: str | os.PathLike[str],
    snapshot: int | Literal["best"] | None,
    notify: Callable[[str], None],
    *,
    metric: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> Iterator[tuple[TrainedRun, Callable[[str], None]]]:
    """Yield a run, read as by `read_run`, and `notify`; of a URL, messages and errors in the block name the URL.

    Args:
        run: its folder or URL.
        snapshot: the step of a snapshot, "best", or None as for `read_run`.
        notify: called with one-line messages.
        metric: what "best" means, as for `find_best`.
        storage_options: how to reach the store of a URL.
    """
    with local_copy(run, storage_options, with_weights(snapshot)) as folder:
        say = naming_in(notify, folder, run)
        check_has_weights(folder)
        step = find_best(folder, metric, say) if snapshot == "best" else snapshot
        yield read_run(folder, step), say


def read_run(path: Path, snapshot: int | None = None) -> TrainedRun:
    """Read the settings and the weights of a run from its folder.

    Args:
        path: the run folder.
        snapshot: the step of the snapshot whose weights to read; None reads the weights file, or the newest snapshot
            if the run has written no weights yet.

    Raises:
        ValueError: if it is not a run folder, has neither weights nor such a snapshot, one of its files has changed
            since it was written, or `config.json` belongs to another run.
    """
    check_has_weights(path)
    recorded, end = read_recorded(path), read_result(path)
    _check_config(path, recorded, end)
    try:
        if snapshot is None and (path / WEIGHTS).exists():
            weights, snapshot_step = _read_weights(path, recorded, end), None
        else:
            weights = read_snapshot_weights(path, recorded, snapshot)
            snapshot_step = steps_in(weights.metadata)
        for name in _NEEDED:
            recorded.resolved[name]
    except KeyError as error:
        raise ValueError(
            f"{path / CONFIG} must record the resolved settings, but {error} is missing: restore the file"
        ) from None
    return TrainedRun(path, recorded, weights, snapshot_step)


def _check_config(path: Path, recorded: RecordedRun, end: RecordedEnd | None) -> None:
    """Raise ValueError if `config.json` does not match `result.json` or, if that is missing, the newest snapshot."""
    if end is not None and end.folder is not None:
        check_config_digest(path / CONFIG, recorded.digest, recorded.continued, end.folder, path / RESULT)
        return
    for step in reversed(snapshot_steps(path / SNAPSHOTS)):
        # The weights do not depend on a snapshot: a damaged one does not prevent their evaluation.
        with suppress(SnapshotError, OSError):
            state = read_folder_state(path / SNAPSHOTS, step)
            if state is not None:
                by = path / SNAPSHOTS / str(step)
                check_config_digest(path / CONFIG, recorded.digest, recorded.continued, state, by)
            return


def _read_weights(path: Path, recorded: RecordedRun, end: RecordedEnd | None) -> StoredWeights:
    """Read the weights of a run; raise ValueError if they have changed or were not written by the run when it ended."""
    weights = read_weights(path / WEIGHTS)
    if end is not None and end.weights_digest not in (None, weights.digest):
        found = "there is none now" if weights.digest is None else f"is {weights.digest[:12]} now"
        raise ValueError(
            f"{path / WEIGHTS} is not what the run wrote at its end (its digest (sha256) was "
            f"{str(end.weights_digest)[:12]}, but {found}): restore that file, or evaluate it with --weights FILE"
        )
    if weights.digest is None and recorded.digest is not None:
        raise ValueError(
            f"{path / WEIGHTS} must have a digest (sha256), as {CONFIG} in the same folder does, but has none and may "
            "be from another run: restore that file, or evaluate it with --weights FILE"
        )
    return weights


def describe_later_steps(path: Path, weights_step: int) -> str | None:
    """Return a warning if a run continued after writing its weights but has not written newer ones; otherwise None.

    Args:
        path: the run folder.
        weights_step: the step of its weights.
    """
    end = read_result(path)
    # A resumed run first removes `result.json`. A run that is stopped at once records no state and writes no weights.
    if end is not None and (end.folder is not None or not end.is_sealed):
        return None
    step, is_running = None, False
    with suppress(OSError):  # the weights can be evaluated without the log
        step, is_running = last_logged_step(path / LOSS_LOG), is_locked(path)
    if step is None or step == weights_step:
        return None
    remedy = "wait for it to end" if is_running else "resume it with run-train --resume"
    return (
        f"warning: the weights are those of step {weights_step:,}, but the run continued to step {step:,} and has "
        f"written none since: {remedy} to get its last weights"
    )


def check_has_weights(path: Path) -> None:
    """Raise ValueError if a folder is not a run folder, or its run has written neither weights nor a snapshot yet."""
    check_folder(path)
    if not (path / WEIGHTS).exists() and not snapshot_steps(path / SNAPSHOTS):
        raise ValueError(
            f"RUN must contain {WEIGHTS} or a snapshot, but {path} does not: the run is still in progress, was killed, "
            "or ended before its first step. Wait for it to end, request a snapshot (control-run RUN --snapshot), stop "
            "it (Ctrl-C), or resume it (run-train --resume)"
        )


def check_folder(path: Path, name: str | None = None) -> None:
    """Raise ValueError if a folder is not a run folder; if it contains run folders, name the latest one.

    Args:
        path: the folder, or that of a copy of a stored run.
        name: what was given for it, if that is something else.
    """
    name = name or str(path)
    if not path.is_dir():
        found = "does not exist" if status_of(path) is None else "is a file"
        raise ValueError(f"RUN must be a run folder, but {name} {found}: give the --run-dir of run-train")
    if not (path / CONFIG).exists():
        below = sorted(path.glob(f"*/{CONFIG}"), key=lambda config: config.stat().st_mtime_ns)
        found = f"contains no {CONFIG}"
        if below:
            found = f"contains {len(below)} run folder{'s' * (len(below) > 1)}; the latest is {below[-1].parent}"
        raise ValueError(f"RUN must be a run folder, but {name} {found}: give the --run-dir of run-train")
