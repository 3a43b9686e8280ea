"""The weights that a user names: a file of any program, a repository of the hub, or a run of this project.

Owns what such a text may be, how the two formats of files are told apart, and which names of other programs are
understood. Whatever describes the weights becomes the metadata that a run's own weights have. Must not know more
of models than their names.
"""

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from loopfeed.engine.records.hub import WEIGHTS_NAMES, fetch, is_hub_name
from loopfeed.engine.records.run_folder import CONFIG, WEIGHTS
from loopfeed.engine.records.snapshot_weights import find_best
from loopfeed.engine.records.stored.reading import local_copy, naming, read_stored_file, with_weights
from loopfeed.engine.records.stored.state import read_state
from loopfeed.engine.records.timm_config import MOST_BYTES, is_config_of_timm, metadata_of_config
from loopfeed.engine.records.torch_file import read_torch_file
from loopfeed.engine.records.trained_run import read_run
from loopfeed.engine.records.weights import StoredWeights, Tensors, check_is_stored, name_read_errors, read_weights
from loopfeed.models.names import find_timm_model
from loopfeed.preprocess.file_kinds import HEAD_BYTES, UNPACK, kind_of
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.regular_file import open_regular, read_regular
from loopfeed.preprocess.shards.location import ShardError, open_location
from loopfeed.preprocess.storage_options import is_url
from loopfeed.preprocess.suggestions import WEIGHTS_BY_NAME, is_about_weights

_SNAPSHOT = re.compile("(.+)@(best|[0-9]{1,18})")
_DOWNLOAD_TIMEOUT_S = 600.0
"""Time limit for the download of one file, in seconds; a server that is down is noticed sooner."""

FILE_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
_WRAPPERS = ("module.", "_orig_mod.", "model.")
"""What DataParallel, `torch.compile` and training frameworks put before every name of a state dictionary."""
_TIMM_HEAD, _HEAD = "head.fc", "fc"
_ZIP = b"PK\x03\x04"
# Protocol 2 to 5. PyTorch < 1.6 wrote several pickles in a row; a file saved by `pickle` itself begins likewise.
_PICKLES = tuple(bytes((0x80, protocol)) for protocol in range(2, 6))
# A safetensors file begins with the length of its header in eight bytes, and the header with a brace.
_BRACE_OFFSET = 8


class Origin(NamedTuple):
    """Where weights are from.

    Attributes:
        source: what the user named.
        revision: the commit of a repository, or the step of a snapshot; None for others.
        sha256: of the file, hexadecimal; None for a snapshot, which is no file.
    """

    source: str
    revision: str | None = None
    sha256: str | None = None


class GivenWeights(NamedTuple):
    """Weights, one-line messages about what was changed or chosen while reading them, and where they are from.

    The metadata of `stored` are as `loopfeed.engine.records.weights_metadata` defines them, as far as the source says
    so: model, image_size, mean, std, num_classes, classes and preprocessing (resize, filter and crop).
    """

    stored: StoredWeights
    notes: tuple[str, ...]
    origin: Origin


def read_given_weights(
    location: str | os.PathLike[str],
    storage_options: Mapping[str, str] | None = None,
    *,
    revision: str | None = None,
) -> GivenWeights:
    """Read the weights that a user names.

    Args:
        location: one of these:
            - the path or URL of a safetensors file, or of a state dictionary saved by PyTorch; the content decides;
            - ``hf-hub:OWNER/NAME`` or ``hf-hub:OWNER/NAME@REVISION``, a repository of the Hugging Face hub;
            - a folder with ``model.safetensors`` and the ``config.json`` of timm;
            - the folder or URL of a run, or either with ``@best`` or ``@STEP`` for one of its snapshots.
        storage_options: how to reach the store of a URL.
        revision: the commit to take of a repository, if the location names none.

    Returns:
        The tensors with the file's dtypes. A prefix (`module.`, `_orig_mod.`, `model.`) that every name has is left
        out.

    Raises:
        ValueError: there are no such weights, or as `loopfeed.engine.records.weights.read_weights` and
            `loopfeed.engine.records.torch_file.read_torch_file`.
    """
    text = os.fspath(location)
    if is_hub_name(text):
        return _read_repository(text, revision)
    place, snapshot = _split_snapshot(text)
    if is_url(place):
        if snapshot is None and not _is_stored_run(place, storage_options):
            return _read_content(place, _read_url(place, storage_options))
        with local_copy(place, storage_options, with_weights(snapshot)) as folder:
            return _read_run(text, folder, snapshot)
    path = Path(place)
    if not os.path.lexists(path) and (is_about_weights(text) or find_timm_model(path.name) is not None):
        raise ValueError(f"weights must be a file, but {text} does not exist: check the path. {WEIGHTS_BY_NAME}")
    if is_config_of_timm(path / CONFIG):
        path /= WEIGHTS
    if path.is_dir():
        _check_is_run(path)
        return _read_run(text, path, snapshot)
    beside = path.parent / CONFIG
    is_described = path.name in WEIGHTS_NAMES and is_config_of_timm(beside)
    return _with_config(_read_file(text, path), beside if is_described else None)


def find_run(
    location: str | os.PathLike[str], snapshot: int | Literal["best"] | None
) -> tuple[str, int | Literal["best"] | None] | None:
    """Return the run that a location names, and which snapshot of it; None if it names a file or a repository.

    Args:
        location: as `read_given_weights` takes it.
        snapshot: one that is named beside it.

    Raises:
        ValueError: two snapshots are named.
    """
    place, named = _split_snapshot(os.fspath(location))
    if is_hub_name(place) or is_config_of_timm(Path(place) / CONFIG):
        return None
    # Only a run has snapshots: of one that is missing, it is to be said that the run is.
    is_missing = (named, snapshot) != (None, None) and not os.path.lexists(place)
    if place.endswith(FILE_SUFFIXES) if is_url(place) else not (Path(place).is_dir() or is_missing):
        return None
    if None not in (named, snapshot):
        raise ValueError(f"one snapshot of {place} can be given, got {named} and {snapshot}: leave one out")
    return place, snapshot if named is None else named


def _split_snapshot(location: str) -> tuple[str, int | Literal["best"] | None]:
    """Return the run in a location, and the snapshot of it that is named behind an @, None if none is."""
    found = None if Path(location).exists() else _SNAPSHOT.fullmatch(location)
    if found is None:
        return location, None
    return found[1], "best" if found[2] == "best" else int(found[2])


def _read_repository(name: str, revision: str | None) -> GivenWeights:
    weights, config, commit = fetch(name, revision)
    given = _read_file(name, weights, commit)
    if config is None:
        note = f"warning: no {CONFIG} says for what input and which classes they are"
        return given._replace(notes=(*given.notes, note))
    return _with_config(given, config)


def _with_config(given: GivenWeights, config: Path | None) -> GivenWeights:
    """Return weights with what a config of timm says of them; the file's own metadata win."""
    if config is None:
        return given
    with name_read_errors(config):
        content = read_regular(config, max_bytes=MOST_BYTES)
    described, notes = metadata_of_config(content, f"{CONFIG} of {printable(given.origin.source)}")
    stored = given.stored._replace(metadata=described | given.stored.metadata)
    return given._replace(stored=stored, notes=(*given.notes, *notes))


def _read_run(name: str, folder: Path, snapshot: int | Literal["best"] | None) -> GivenWeights:
    """Read the weights of a run: those at its end, those of a snapshot, or else of its newest."""
    notes: list[str] = []
    step = find_best(folder, None, notes.append) if snapshot == "best" else snapshot
    found = read_run(folder, step)
    if found.snapshot_step is None:
        return GivenWeights(found.weights, (), Origin(name, None, _sha256_of(folder / WEIGHTS)))
    if not notes:
        notes.append(f"those of the snapshot of step {found.snapshot_step:,}")
    return GivenWeights(found.weights, tuple(notes), Origin(name, str(found.snapshot_step)))


def _check_is_run(folder: Path) -> None:
    if not (folder / CONFIG).exists():
        raise ValueError(
            f"weights must be a file or the folder of a run, but {folder} is a folder without {CONFIG}: give a file or "
            "a run"
        )


def _read_content(url: str, content: bytes) -> GivenWeights:
    with tempfile.TemporaryDirectory(prefix="loopfeed-") as temporary:
        copy = Path(temporary) / "weights"
        copy.write_bytes(content)
        with naming(copy, url):
            return _read_file(url, copy)


def _sha256_of(path: Path) -> str:
    with name_read_errors(path), os.fdopen(open_regular(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_file(name: str, path: Path, revision: str | None = None) -> GivenWeights:
    """Read weights in either format; the content of the file decides, not its name."""
    with name_read_errors(path), os.fdopen(open_regular(path), "rb") as file:
        head = file.read(HEAD_BYTES)
    start = head[: _BRACE_OFFSET + 1]
    # The length at the beginning of a safetensors file may be any bytes.
    kind = None if start[_BRACE_OFFSET:] == b"{" else kind_of(head)
    if kind is not None and (kind.is_lost or (kind.remedy == UNPACK and not start.startswith(_ZIP))):
        raise ValueError(
            f"weights must be a safetensors file or a file of PyTorch 1.6 or newer, but {os.fspath(path)} is "
            f"{kind.name}: {kind.remedy}"
        )
    notes = []
    if start[_BRACE_OFFSET:] == b"{" or not start.startswith((_ZIP, *_PICKLES)):
        stored = read_weights(path)
    elif start.startswith(_ZIP):
        with name_read_errors(path):
            check_is_stored(path)
            tensors, key, ignored = read_torch_file(path)
        stored = StoredWeights(tensors, {})
        if key is not None:
            rest = f", not those under {' or '.join(map(repr, ignored))}" if ignored else ""
            notes.append(f"the tensors are those under {key!r} in the file{rest}")
    else:
        raise ValueError(
            f"weights must be a safetensors file or a file of PyTorch 1.6 or newer, but {os.fspath(path)} is an older "
            "PyTorch file or another pickle: load it in PyTorch, and save its state dictionary again with torch.save "
            "or safetensors.torch.save_file"
        )
    tensors, renamed = _without_wrappers(stored.tensors)
    origin = Origin(name, revision, _sha256_of(path))
    return GivenWeights(stored._replace(tensors=tensors), (*notes, *renamed), origin)


def rename_head(given: GivenWeights, head: str | None) -> GivenWeights:
    """Return weights with timm's classifier `head.fc` called `fc` if that is the path of the model's classifier."""
    stored, notes, _ = given
    if head != _HEAD or not _has(stored.tensors, _TIMM_HEAD) or _has(stored.tensors, _HEAD):
        return given
    tensors = {
        _HEAD + name.removeprefix(_TIMM_HEAD) if name.startswith(f"{_TIMM_HEAD}.") else name: tensor
        for name, tensor in stored.tensors.items()
    }
    note = f"timm's classifier {_TIMM_HEAD!r} is called 'fc'"
    return given._replace(stored=stored._replace(tensors=tensors), notes=(*notes, note))


def _has(tensors: Tensors, path: str) -> bool:
    return any(name.startswith(f"{path}.") for name in tensors)


def _without_wrappers(tensors: Tensors) -> tuple[Tensors, list[str]]:
    """Return tensors without prefixes of wrappers that every name has, at most three, and a message for each."""
    notes = []
    for _ in _WRAPPERS:
        if wrapper := _wrapper_of(tensors):
            tensors = {name.removeprefix(wrapper): tensor for name, tensor in tensors.items()}
            notes.append(f"the prefix {wrapper!r} of the tensors' names is left out")
    return tensors, notes


def _wrapper_of(tensors: Tensors) -> str | None:
    """Return the prefix that all names have, if it is that of a wrapper."""
    return next(
        (
            wrapper
            for wrapper in _WRAPPERS
            if tensors and all(name.startswith(wrapper) and name != wrapper for name in tensors)
        ),
        None,
    )


def _is_stored_run(location: str, storage_options: Mapping[str, str] | None) -> bool:
    """Return whether there is a run at a URL; a store may refuse to say what is not there, so a file's is not tried."""
    if location.endswith(FILE_SUFFIXES) or not _is_in_folder(location):
        return False
    return read_state(open_location(location, storage_options=storage_options)) is not None


def _is_in_folder(location: str) -> bool:
    folder, _, key = location.rstrip("/").rpartition("/")
    return bool(key) and not folder.endswith(":/")


def _read_url(location: str, storage_options: Mapping[str, str] | None) -> bytes:
    """Return the content of the file at a URL, whose folder may be a stored run.

    Raises:
        ShardError: the store cannot be reached, or it has no such file.
    """
    folder, _, key = location.rpartition("/")
    if not key or not _is_in_folder(location):
        raise ShardError(f"{location} is not the URL of a file; give one such as s3://bucket/folder/model.safetensors")
    store = open_location(folder, storage_options=storage_options)
    content = store.read(key, timeout_s=_DOWNLOAD_TIMEOUT_S)
    if content is None and (content := read_stored_file(store, key)) is None:
        raise ShardError(f"{location} does not exist; check the URL")
    return content
