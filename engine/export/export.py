"""Export of trained weights: what is read, in which format it is written, and where it must not be written."""

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.evaluation.subject import check_user_model, read_weights_file
from loopfeed.engine.export.exported_model import ExportedModel, export_run, export_weights_file
from loopfeed.engine.export.onnx_file import onnx_file
from loopfeed.engine.export.stablehlo_file import stablehlo_file
from loopfeed.engine.export.timm_folder import CONFIG as TIMM_CONFIG
from loopfeed.engine.export.timm_folder import WEIGHTS as TIMM_WEIGHTS
from loopfeed.engine.export.timm_folder import timm_files
from loopfeed.engine.program.train_state import TrainModel
from loopfeed.engine.records.given_weights import find_run
from loopfeed.engine.records.run_folder import CONFIG, LOSS_LOG
from loopfeed.engine.records.trained_run import reading_run
from loopfeed.engine.records.weights import weights_file
from loopfeed.engine.records.weights_metadata import steps_in
from loopfeed.engine.records.whole_file import check_can_write, write_whole
from loopfeed.engine.settings import SettingError
from loopfeed.preprocess.storage_options import is_url
from loopfeed.preprocess.synced_folders import sync_folder

type Format = Literal["safetensors", "timm", "stablehlo", "onnx"]
FORMATS: Final[tuple[Format, ...]] = ("safetensors", "timm", "stablehlo", "onnx")
_SUFFIXES: Final[dict[str, Format]] = {
    ".safetensors": "safetensors",
    ".stablehlo": "stablehlo",
    ".onnx": "onnx",
    "": "timm",
}
_WRITERS: Final = {"stablehlo": stablehlo_file, "onnx": onnx_file}


class ExportResult(NamedTuple):
    """What was written.

    Attributes:
        path: the file or folder.
        format: safetensors, timm, stablehlo or onnx.
        step: the number of updates that produced the weights, 0 if unknown.
        num_bytes: the size of the file, or of the folder's files.
        digest: of the tensors and their metadata for safetensors, else the SHA-256 of the file or of the folder's
            weights, hexadecimal.
    """

    path: Path
    format: Format
    step: int
    num_bytes: int
    digest: str


def export_model(
    run_or_weights: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    format: Format | None = None,  # noqa: A002 - the word of the command
    snapshot: int | Literal["best"] | None = None,
    metric: str | None = None,
    model: TrainModel | str | None = None,
    image_size: int | None = None,
    overwrite: bool = False,
    notify: Callable[[str], None] = lambda _: None,
    storage_options: Mapping[str, str] | None = None,
) -> ExportResult:
    """Write the weights of a run or of a file in a format of other programs.

    The file or folder is written whole or not at all. If the run keeps a moving average of its weights, that is what
    is written.

    Args:
        run_or_weights: the folder or URL of a run, which may still be in progress, or weights as `--init-from` takes
            them.
        out: the file to write or, for timm, the folder.
        format: `safetensors`, the weights alone; `timm`, a folder for `timm.create_model("local-dir:…")`; `stablehlo`,
            a program for any process with jax; `onnx`. None takes it from the name: .safetensors, .stablehlo, .onnx,
            and a folder for timm for a name without a suffix.
        snapshot: the step of a run's snapshot to export, "best" for the kept one with the best evaluation, or None for
            the weights at its end, else of its newest snapshot.
        metric: what "best" means: top1, top5, loss, or a metric of your own as NAME:max or NAME:min; None is the run's
            setting `keep_best`, else top1 or, without it, the loss.
        model: your own model, if the run trained one; or the registry name of a file's, if it records none.
        image_size: height and width of the input, for a weights file; None is the one that the file records.
        overwrite: whether to replace what is there.
        notify: called with one-line messages.
        storage_options: how to reach the store of a URL.

    Raises:
        ValueError: there are no such weights, the format cannot hold the model, something is there, or it would be in
            the folder of a run.
        OSError: it cannot be written.

    Example:
        >>> export_model("run", "exported.safetensors").format
        'safetensors'
    """
    path = Path(out)
    chosen = format or format_of(path)
    if chosen not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {chosen!r}")
    run = find_run(run_or_weights, snapshot)
    if metric is not None and (run is None or run[1] != "best"):
        found = snapshot if run is None else run[1]
        raise SettingError(
            "metric", "{setting} can be given only with the snapshot best, got {found}: leave it out", found=found
        )
    _check_place(path, chosen, None if run is None or is_url(run[0]) else Path(run[0]), overwrite=overwrite)
    if run is None:
        return _export_file(run_or_weights, path, chosen, snapshot, model, image_size, notify, storage_options)
    if image_size is not None:
        raise ValueError("image_size can be given only with a weights file: a run is exported at its own size")
    where, snapshot = run
    opened = reading_run(where, snapshot, notify, metric=metric, storage_options=storage_options)
    with opened as (recorded, say):
        if chosen == "safetensors":
            return _write_weights(path, recorded.weights.tensors, recorded.weights.metadata)
        if isinstance(model, str):
            raise ValueError(f"model can be a name only with a weights file, got {model!r} and a run: leave it out")
        check_user_model(recorded, model, command="export-model")
        return _write(export_run(recorded, model, say), path, chosen)


def format_of(path: Path) -> Format:
    """Return the format that the name of a file or folder says; raise ValueError if it says none."""
    found = _SUFFIXES.get("" if path.is_dir() else path.suffix.lower())
    if found is None:
        raise ValueError(
            f"OUT must end in .safetensors, .onnx or .stablehlo, or have no suffix for a folder of timm, got {path}: "
            f"rename it, or give --format ({', '.join(FORMATS)})"
        )
    return found


def _export_file(
    given: str | os.PathLike[str],
    path: Path,
    chosen: Format,
    snapshot: int | str | None,
    model: TrainModel | str | None,
    image_size: int | None,
    notify: Callable[[str], None],
    storage_options: Mapping[str, str] | None,
) -> ExportResult:
    for what, value in (("a snapshot", snapshot), ("a model of your own", None if isinstance(model, str) else model)):
        if value is not None:
            raise ValueError(f"{what} can be given only with a run, got the weights {given}: give the folder of a run")
    if chosen == "safetensors":
        stored = read_weights_file(os.fspath(given), TrainConfig(), notify, storage_options, is_of_registry=False)
        return _write_weights(path, stored.tensors, stored.metadata)
    name = model if isinstance(model, str) else None
    return _write(export_weights_file(os.fspath(given), name, image_size, notify, storage_options), path, chosen)


def _write_weights(path: Path, tensors: Mapping[str, object], metadata: Mapping[str, str]) -> ExportResult:
    content, digest = weights_file(tensors, metadata)  # type: ignore[arg-type]
    write_whole(path, content)
    return ExportResult(path, "safetensors", steps_in(metadata), len(content), digest)


def _write(exported: ExportedModel, path: Path, chosen: Format) -> ExportResult:
    step = exported.subject.step
    if chosen == "timm":
        files = timm_files(exported)
        _write_folder(path, files)
        digest = hashlib.sha256(files[TIMM_WEIGHTS]).hexdigest()
        return ExportResult(path, chosen, step, sum(map(len, files.values())), digest)
    content = _WRITERS[chosen](exported)
    write_whole(path, content)
    return ExportResult(path, chosen, step, len(content), hashlib.sha256(content).hexdigest())


def _check_place(path: Path, chosen: Format, run: Path | None, *, overwrite: bool) -> None:
    _check_is_elsewhere(run, path)
    if chosen != "timm":
        check_can_write(path, "OUT", overwrite=overwrite)
        return
    if not path.parent.is_dir():
        raise ValueError(f"OUT must be in an existing folder, but {path.parent} is missing: create it")
    if not os.path.lexists(path):
        return
    names = sorted(each.name for each in path.iterdir()) if path.is_dir() and not path.is_symlink() else None
    if names is None or set(names) - {TIMM_CONFIG, TIMM_WEIGHTS}:
        raise ValueError(
            f"OUT must be a new folder, or hold only {TIMM_CONFIG} and {TIMM_WEIGHTS}, but {path} does not: choose "
            "another path"
        )
    if names and not overwrite:
        raise ValueError(
            f"OUT must be a new folder, but {path} exists: choose another path, or replace it (--overwrite)"
        )


def _write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Write a folder beside its place, and rename it there."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.mkdir()
    try:
        for name, content in files.items():
            write_whole(temporary / name, content)
        if path.exists():
            old = temporary.with_name(f"{temporary.name}.old")
            path.rename(old)
            try:
                temporary.rename(path)
            except BaseException:
                old.rename(path)
                raise
            shutil.rmtree(old)
        else:
            temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    with suppress(PermissionError):
        sync_folder(path.parent)


def _check_is_elsewhere(run: Path | None, path: Path) -> None:
    """Raise ValueError if a file would be in the folder of a run."""
    # Not Path.resolve, which raises RuntimeError for symbolic links that form a loop.
    place, own = Path(os.path.realpath(path)), None if run is None else Path(os.path.realpath(run))
    for each in (Path(os.path.realpath(path.parent)), *place.parents):
        if each == own or ((each / CONFIG).is_file() and (each / LOSS_LOG).is_file()):
            raise ValueError(
                f"OUT must not be in the folder of a run, which must contain only its run, but {path} is in {each}: "
                "choose another folder"
            )
