"""Weights as named tensors, as stored in `model.safetensors`."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.numpy import save

from loopfeed.engine.keys import like_leaf, plain_key
from loopfeed.engine.records.digests import SEAL, describe_array, json_digest
from loopfeed.engine.records.stored_types import as_weights, may_stand_for
from loopfeed.engine.updates.update import Weights
from loopfeed.models.torchvision_names import COUNTER, describe_mismatches, from_torchvision, to_torchvision
from loopfeed.preprocess.claimed_size import is_plausible, stored_size
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.regular_file import open_regular, read_at
from loopfeed.preprocess.system_errors import reading_remedy
from loopfeed.preprocess.workers import Pool

type Tensors = dict[str, NDArray[Any]]

_DIGEST_THREADS = 4
# A safetensors file begins with the length of its header.
_LENGTH_BYTES = 8
_MOST_TENSORS, _MOST_AXES, _MOST_SIZES = 100_000, 32, 1 << 48
# The key that announces a digest, so that a damaged digest key is detected.
_KIND = "digest"
# safetensors' names of the types that NumPy supports, including those that jax adds.
_READABLE: dict[str, Any] = {
    **{"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16, "C64": np.complex64},
    **{"I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8},
    **{"U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool},
}


class StoredWeights(NamedTuple):
    """The content of a safetensors file.

    Attributes:
        tensors: the tensors by name, as stored.
        metadata: the file's metadata.
        digest: the digest of both, which was checked; None if the file has none, such as one written by another program
            or an older run.
    """

    tensors: Tensors
    metadata: dict[str, str]
    digest: str | None = None

    @property
    def is_of_user_model(self) -> bool:
        """Whether a run wrote the file for a user-defined model, whose tensors are named by leaf path."""
        return any(part_of(name) == "params" for name in self.tensors)


def part_of(name: str) -> str | None:
    """Return "params" or "batch_stats", whichever a leaf path is in or, as a single array, is itself; else None."""
    part = name.partition(".")[0]
    return part if part in ("params", "batch_stats") else None


def name_tensors(registry_name: str | None, params: Any, batch_stats: Any) -> Tensors:
    """Return all tensors of a model by name.

    Args:
        registry_name: the model's name in the registry, None for a user-defined model.
        params, batch_stats: its pytrees.

    Returns:
        For a registry model, torchvision's names and layouts; otherwise the path of each leaf, `params.…` and
        `batch_stats.…`, in the model's own layout; a part that is a single array is called `params` or `batch_stats`.
        Dtypes of at most eight bits that safetensors lacks are widened (`loopfeed.engine.records.stored_types`).
    """
    if registry_name is not None:
        return to_torchvision(registry_name, params, batch_stats)
    return {name: as_weights(np.asarray(plain_key(leaf))) for name, leaf in _named_leaves(params, batch_stats)}


def check_names(params: Any, batch_stats: Any) -> None:
    """Check the names of the tensors of a user-defined model; leaves may be abstract.

    Raises:
        ValueError: if two tensors have the same name, or keys with dots make one branch of two when names are split at
            their dots, as `loopfeed.read_weights` does.
    """
    leaves = jax.tree_util.tree_leaves_with_path(_as_tree(params, batch_stats))
    seen: set[str] = set()
    branches: dict[str, tuple[tuple[str, ...], str]] = {}
    for path, _ in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in seen:
            raise ValueError(f"every tensor must have a unique name, but two are called {name}: rename one of the keys")
        seen.add(name)
        shown = jax.tree_util.keystr(path)
        for dotted, keys in _branches_of(path):
            before, first = branches.setdefault(dotted, (keys, shown))
            if before != keys:
                raise ValueError(
                    f"the names of tensors must not be ambiguous, but {first} and {shown} are both in {dotted} when "
                    "their names are split at the dots: rename one of the keys"
                )


def _branches_of(path: tuple[Any, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each beginning of a leaf's name that ends before a dot or at its end, and the keys that make it up."""
    done: tuple[str, ...] = ()
    for entry in path:
        words = jax.tree_util.keystr((entry,), simple=True).split(".")
        for end in range(1, len(words)):
            part = (*done, ".".join(words[:end]) + ".")  # with its dot: only the beginning of a key
            yield ".".join(done + tuple(words[:end])), part
        done = (*done, ".".join(words))
        yield ".".join(done), done


def read_weights(path: str | os.PathLike[str]) -> StoredWeights:
    """Read a safetensors file into memory, and check its digest if it has one.

    Raises:
        ValueError: if there is no such file, it is truncated or of another format, or holds numbers of an unsupported
            type.
    """
    with name_read_errors(path):
        check_is_stored(path)  # the library would wait for the writer of a pipe
        try:
            tensors, metadata = _load(path)
        except SafetensorError as error:
            raise ValueError(
                f"weights must be a complete safetensors file, but {os.fspath(path)} is not ({error}): copy it again, "
                "or save it with safetensors"
            ) from None
    return StoredWeights(tensors, metadata, _checked_digest(path, tensors, metadata))


def _load(path: str | os.PathLike[str]) -> tuple[Tensors, dict[str, str]]:
    try:
        file = safe_open(path, framework="np")
    except (OSError, MemoryError):
        return _load_unmapped(path)  # safetensors maps the file, which some file systems can't, or not now
    with file:
        names = list(file.keys())
        _check_number(path, len(names))
        for name in names:
            part = file.get_slice(name)
            _check_kind(path, name, part.get_dtype(), part.get_shape())
        return {name: file.get_tensor(name) for name in names}, dict(file.metadata() or {})


def _load_unmapped(path: str | os.PathLike[str]) -> tuple[Tensors, dict[str, str]]:
    """Read a safetensors file without mapping it; raise OSError if it can't be read."""
    file = open_regular(path)
    try:
        content = read_at(file, os.fstat(file).st_size, 0)
    finally:
        os.close(file)
    tensors: Tensors = {}
    entries = deserialize(content)
    _check_number(path, len(entries))
    for name, entry in entries:
        _check_kind(path, name, entry["dtype"], entry["shape"])
        # Not `safetensors.numpy.load`, which lacks bfloat16.
        tensors[name] = np.frombuffer(entry["data"], _READABLE[entry["dtype"]]).reshape(entry["shape"])
    num_bytes = int.from_bytes(content[:_LENGTH_BYTES], "little")
    header = json.loads(content[_LENGTH_BYTES : _LENGTH_BYTES + num_bytes])
    return tensors, header.get("__metadata__", {})


def _check_number(path: str | os.PathLike[str], number: int) -> None:
    if number > _MOST_TENSORS:
        raise ValueError(
            f"weights must be at most {_MOST_TENSORS:,} tensors, but {os.fspath(path)} has {number:,}: save only those "
            "of the model"
        )


def _check_kind(path: str | os.PathLike[str], name: str, kind: str, shape: Sequence[int]) -> None:
    # NumPy multiplies the sizes of an empty tensor, too, those of zero left out.
    if len(shape) > _MOST_AXES or math.prod(size or 1 for size in shape) >= _MOST_SIZES:
        raise ValueError(
            f"weights must be tensors of at most {_MOST_AXES} axes and 2⁴⁸ numbers, but {printable(name)} of "
            f"{os.fspath(path)} has the shape {str(list(shape))[:80]}: save it again"
        )
    if kind not in _READABLE:
        raise ValueError(
            f"weights must be floats of 16 to 64 bits, but {printable(name)} of {os.fspath(path)} is {kind}: save it "
            "as float32"
        )


def check_is_stored(path: str | os.PathLike[str]) -> None:
    """Raise ValueError if most of a weights file are holes, which would take memory as tensors; OSError as `open`."""
    file = open_regular(path)
    try:
        status = os.fstat(file)
    finally:
        os.close(file)
    if not is_plausible(status.st_size, stored_size(status)):
        raise ValueError(
            f"weights must be stored whole, but of the {status.st_size:,} bytes of {os.fspath(path)} the disk holds "
            f"only {stored_size(status):,}: copy the file again"
        )


@contextmanager
def name_read_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise ValueError with the path and a remedy if a weights file is a folder, missing or unreadable."""
    if Path(path).is_dir():
        raise ValueError(f"weights must be a file, but {os.fspath(path)} is a folder: give a file")
    try:
        yield
    except FileNotFoundError:
        raise ValueError(f"weights must be a file, but {os.fspath(path)} does not exist: check the path") from None
    except OSError as error:
        raise ValueError(
            f"weights must be readable, but {os.fspath(path)} is not ({error.strerror or error}): "
            f"{reading_remedy(error, 'check the path')}"
        ) from error


def with_digest(tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata plus a digest of the tensors and the metadata, so that readers can check both.

    The digest is computed from names, types, shapes, values and metadata, not from the file's bytes: it stays valid if
    another program saves the same content.
    """
    return {**metadata, _KIND: SEAL, SEAL: _digest_of(tensors, metadata)}


def weights_file(tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> tuple[bytes, str]:
    """Return the content of a safetensors file with these tensors and metadata, and the digest in it."""
    # safetensors writes an array's memory as it is; ascontiguousarray would turn a scalar into a vector.
    contiguous = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
    metadata = with_digest(contiguous, metadata)
    return _in_fixed_order(save(contiguous, dict(metadata))), metadata[SEAL]


def _in_fixed_order(file: bytes) -> bytes:
    """Return a safetensors file with its metadata sorted, because the library writes the entries in a random order."""
    length = int.from_bytes(file[:8], "little")
    header = json.loads(file[8 : 8 + length])
    if "__metadata__" in header:
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # The format requires that tensors begin at a multiple of eight bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + file[8 + length :]


def _digest_of(tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> str:
    # hashlib releases the GIL: with two threads, 100 MB take 40 ms instead of 70.
    with Pool(_DIGEST_THREADS, "digests") as threads:
        described = dict(zip(tensors, threads.map(describe_array, tensors.keys(), tensors.values()), strict=True))
    described_metadata = {key: value for key, value in metadata.items() if key not in (_KIND, SEAL)}
    return json_digest({"metadata": described_metadata, "tensors": described})


def _checked_digest(path: str | os.PathLike[str], tensors: Tensors, metadata: Mapping[str, str]) -> str | None:
    """Return the digest in the metadata, or None if absent; raise ValueError if it does not match the content."""
    if _KIND not in metadata and SEAL not in metadata:
        return None
    expected, found = metadata.get(SEAL, "none"), _digest_of(tensors, metadata)
    if expected != found or metadata.get(_KIND) != SEAL:
        raise ValueError(
            f"{os.fspath(path)} has changed since it was written (its digest (sha256) was {expected[:12]}, but is "
            f"{found[:12]} now): copy it again from an intact copy. A program that changes weights on purpose must "
            f"leave {_KIND} and {SEAL} out of their metadata"
        )
    return found


def place_tensors(registry_name: str | None, tensors: Mapping[str, NDArray[Any]], like: Weights) -> Weights:
    """Arrange named tensors as a model's pytrees; the inverse of `name_tensors`.

    Args:
        registry_name: as in `name_tensors`.
        tensors: the tensors by name. A float tensor may have a different float type from that in `like`. For a
            registry model, PyTorch's `num_batches_tracked` may be present.
        like: the model's params and batch_stats, arrays or jax.ShapeDtypeStruct.

    Returns:
        NumPy arrays (jax arrays for PRNG keys) of the dtypes of `like`. For a registry model, the size of the
        classifier comes from the tensors, not from `like`.

    Raises:
        ValueError: if a tensor is missing, unexpected, of another shape or of another kind; lists the first few.
    """
    if registry_name is not None:
        faults = [
            f"{name} is {tensor.dtype}, not a float type"
            for name, tensor in tensors.items()
            if name.rpartition(".")[2] != COUNTER and not jnp.issubdtype(tensor.dtype, jnp.floating)
        ]
        if faults:
            listed = describe_mismatches((), (), faults)
            raise ValueError(f"the tensors are not those of {registry_name}: {listed}; save it in float32")
        return Weights(*from_torchvision(registry_name, tensors))
    return _place_by_path(tensors, like)


def _place_by_path(tensors: Mapping[str, NDArray[Any]], like: Weights) -> Weights:
    expected = dict(_named_leaves(like.params, like.batch_stats))
    stored = {name: jax.eval_shape(plain_key, leaf) for name, leaf in expected.items()}
    others = []
    for name, leaf in stored.items():
        if name not in tensors:
            continue
        found = tensors[name]
        if found.shape != leaf.shape:
            others.append(f"{name} is {found.shape} instead of {leaf.shape}")
        elif not may_stand_for(found.dtype, leaf.dtype):
            others.append(f"{name} is {found.dtype} instead of {leaf.dtype}")
    if faults := describe_mismatches(expected, tensors, others):
        raise ValueError(f"the tensors are not those of the model: {faults}; they must come from the same model")
    leaves = [like_leaf(tensors[name].astype(stored[name].dtype), leaf) for name, leaf in expected.items()]
    placed = jax.tree.unflatten(jax.tree.structure(_as_tree(*like)), leaves)
    return Weights(placed["params"], placed["batch_stats"])


def _as_tree(params: Any, batch_stats: Any) -> dict[str, Any]:
    return {"params": params, "batch_stats": batch_stats}


def _named_leaves(params: Any, batch_stats: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(_as_tree(params, batch_stats))
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]
