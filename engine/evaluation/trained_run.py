"""What the folder of a finished or stopped run says of it: settings, what they resolved to, and the trained weights.

Owns reading them back for whoever uses the weights. Must not know: data, programs, how they are written.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from engine.config import TrainConfig
from engine.records.folder_state import check_config_digest
from engine.records.recorded_end import RecordedEnd, read_result
from engine.records.recorded_run import RecordedRun, read_recorded
from engine.records.run_folder import CONFIG, RESULT, SNAPSHOTS, WEIGHTS
from engine.records.snapshot import SnapshotError, read_folder_state, snapshot_steps
from engine.records.weights import StoredWeights, read_weights


@dataclass(frozen=True)
class TrainedRun:
    """A run as its folder has it.

    Attributes:
        path: the folder.
        config: the settings of its last launch; `run_dir` is the folder, wherever it was then.
        model_name: of the model that was trained.
        data: it was trained on, in words.
        num_classes: K, None where the user's own model alone knew.
        height, width: of its images, in pixels, before the crop to `config.image_size`.
        manifest_digest, eval_manifest_digest: sha256 of the manifests of the training split and of the split that it
            was evaluated on, None where there was none.
        weights: the trained ones, with what is written beside them.
    """

    path: Path
    config: TrainConfig
    model_name: str
    data: str
    num_classes: int | None
    height: int
    width: int
    manifest_digest: str | None
    eval_manifest_digest: str | None
    weights: StoredWeights


def read_run(path: Path) -> TrainedRun:
    """Read the folder of a run.

    Raises:
        ValueError: where it is no folder of a run, has no weights yet, one of its files was changed since, or
            `config.json` is another run's.
    """
    check_has_weights(path)
    recorded, end = read_recorded(path), read_result(path)
    _check_config(path, recorded, end)
    resolved = recorded.resolved
    weights = _read_weights(path, recorded, end)
    try:
        return TrainedRun(
            path=path,
            config=replace(recorded.config, run_dir=str(path)),
            model_name=resolved["model"],
            data=resolved["data"],
            num_classes=resolved["num_classes"],
            height=resolved["height"],
            width=resolved["width"],
            manifest_digest=recorded.manifest_digest,
            eval_manifest_digest=resolved.get("eval_manifest_sha256"),
            weights=weights,
        )
    except KeyError as error:
        raise ValueError(
            f"{path / CONFIG} must say what the settings resolved to, and {error} is missing: restore the file"
        ) from None


def _check_config(path: Path, recorded: RecordedRun, end: RecordedEnd | None) -> None:
    """Raise ValueError where `config.json` is not the one that the result or, without one, the snapshots tell of."""
    if end is not None and end.folder is not None:
        check_config_digest(path / CONFIG, recorded.digest, recorded.continued, end.folder, RESULT)
        return
    for step in reversed(snapshot_steps(path / SNAPSHOTS)):
        # The weights do not depend on a snapshot: one that is damaged does not keep them from being evaluated.
        with suppress(SnapshotError, OSError):
            state = read_folder_state(path / SNAPSHOTS, step)
            if state is not None:
                by = f"the snapshot of step {step}"
                check_config_digest(path / CONFIG, recorded.digest, recorded.continued, state, by)
            return


def _read_weights(path: Path, recorded: RecordedRun, end: RecordedEnd | None) -> StoredWeights:
    """Read the weights of a run; raise ValueError where they were changed since, or are not those of its end."""
    weights = read_weights(path / WEIGHTS)
    if end is not None and end.weights_digest not in (None, weights.digest):
        found = "carries none" if weights.digest is None else f"is {weights.digest[:12]}"
        raise ValueError(
            f"{path / WEIGHTS} must be what the run wrote at its end, and is not (its digest (sha256) was "
            f"{str(end.weights_digest)[:12]}, the file {found}): restore that file, or evaluate it as --weights FILE"
        )
    if weights.digest is None and recorded.digest is not None:
        raise ValueError(
            f"{path / WEIGHTS} must carry a digest (sha256), as {CONFIG} beside it does, and carries none: it cannot "
            "be told whether this run wrote it; restore that file, or evaluate it as --weights FILE"
        )
    return weights


def check_has_weights(path: Path) -> None:
    """Raise ValueError where a folder is none of a run, or its run has no weights yet."""
    _check_folder(path)
    if not (path / WEIGHTS).exists():
        raise ValueError(
            f"RUN must hold {WEIGHTS}, and {path} does not: the run has not ended, was killed, or ended before its "
            "first step; wait for its end, stop it (Ctrl-C), or go on with it (run-train --resume)"
        )


def _check_folder(path: Path) -> None:
    """Raises ValueError where there is no folder of a run; where runs lie in it, names the one that began last."""
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        raise ValueError(f"RUN must be the folder of a run, and {path} {found}: give the --run-dir of a run-train")
    if not (path / CONFIG).exists():
        below = sorted(path.glob(f"*/{CONFIG}"), key=lambda config: config.stat().st_mtime_ns)
        found = f"holds {len(below)} of them; the last is {below[-1].parent}" if below else f"holds no {CONFIG}"
        raise ValueError(f"RUN must be the folder of a run, and {path} {found}: give the --run-dir of a run-train")
