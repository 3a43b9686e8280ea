"""Export of the weights in a snapshot of a run, as a `model.safetensors` of its own."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from loopfeed.engine.records.run_folder import CONFIG, LOSS_LOG
from loopfeed.engine.records.snapshot_weights import find_best
from loopfeed.engine.records.stored.reading import local_copy, with_weights
from loopfeed.engine.records.trained_run import check_has_weights, read_run
from loopfeed.engine.records.weights import weights_file
from loopfeed.engine.records.whole_file import check_can_write, write_whole


class ExportedWeights(NamedTuple):
    """The file that was written, the step of its weights, and the digest of its content."""

    path: Path
    step: int
    digest: str


def export_weights(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    snapshot: int | Literal["best"],
    metric: str | None = None,
    overwrite: bool = False,
    notify: Callable[[str], None] = lambda _: None,
    storage_options: Mapping[str, str] | None = None,
) -> ExportedWeights:
    """Write the weights of a snapshot to a safetensors file like the one that the run writes at its end.

    If the run keeps a moving average of its weights, that is what is written.

    Args:
        run: the run folder, or its URL; the run may still be in progress.
        out: the file to write.
        snapshot: the step of the snapshot, or "best" for the one with the best evaluation in `eval.jsonl` among those
            that are kept.
        metric: what "best" means: top1, top5, loss, or a metric of your own as NAME:max or NAME:min; None is the run's
            setting `keep_best`, else top1.
        overwrite: whether to replace an existing file.
        notify: called with one-line messages.
        storage_options: how to reach the store of a URL.

    Raises:
        ValueError: if there is no such snapshot, it is damaged, the file exists, or it would be in the folder of a run.
        OSError: if the file cannot be written.
    """
    path = Path(out)
    with local_copy(run, storage_options, with_weights(snapshot)) as folder:
        check_has_weights(folder)
        _check_is_elsewhere(folder, path)
        check_can_write(path, "OUT", overwrite=overwrite)
        step = find_best(folder, metric, notify) if snapshot == "best" else snapshot
        content, digest = weights_file(*read_run(folder, step).weights[:2])
    write_whole(path, content)
    return ExportedWeights(path, step, digest)


def _check_is_elsewhere(run: Path, path: Path) -> None:
    """Raise ValueError if a file would be in the folder of a run."""
    # Not Path.resolve, which raises RuntimeError for symbolic links that form a loop.
    place, own = Path(os.path.realpath(path)), Path(os.path.realpath(run))
    for each in (Path(os.path.realpath(path.parent)), *place.parents):
        if each == own or ((each / CONFIG).is_file() and (each / LOSS_LOG).is_file()):
            raise ValueError(
                f"OUT must not be in the folder of a run, which must contain only its run, but {path} is in {each}: "
                "choose another folder"
            )
