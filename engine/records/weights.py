"""Weights as named tensors: what `model.safetensors` holds, written and read back."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from engine.keys import like_leaf, plain_key
from engine.records.digests import SEAL, describe_array, json_digest
from engine.updates.update import Weights
from models.torchvision_names import COUNTER, from_torchvision, to_torchvision
from preprocess.regular_file import open_regular

type Tensors = dict[str, NDArray[Any]]

_MOST_FAULTS = 5
_DIGEST_THREADS = 4
# The key that says that there is a digest: one that is damaged itself is missed.
_KIND = "digest"
# safetensors' names of what NumPy, with the types that jax brings, has an array for.
_READABLE = {"F64", "F32", "F16", "BF16", "I64", "U64", "I32", "U32", "I16", "U16", "I8", "U8", "BOOL"}


class StoredWeights(NamedTuple):
    """What a safetensors file holds.

    Attributes:
        tensors: by name, as they are stored.
        metadata: what was written beside them.
        digest: of both, which were checked against it; None where the file carries none, as those of other programs
            and of older runs.
    """

    tensors: Tensors
    metadata: dict[str, str]
    digest: str | None = None

    @property
    def is_of_own_model(self) -> bool:
        """Whether a run wrote it of a model of the user's own: named by the paths of its leaves."""
        return any(name.startswith("params.") for name in self.tensors)


def name_tensors(registry_name: str | None, params: Any, batch_stats: Any) -> Tensors:
    """Names every tensor of a model.

    Args:
        registry_name: the model's name in the registry, None for a model of the user's own, whatever it is called.
        params, batch_stats: its pytrees.

    Returns:
        torchvision's names and layouts for a network of the registry; else the path of each leaf, `params.…` and
        `batch_stats.…`, in the model's own layout.
    """
    if registry_name is not None:
        return to_torchvision(registry_name, params, batch_stats)
    return {name: np.asarray(plain_key(leaf)) for name, leaf in _named_leaves(params, batch_stats)}


def check_names(params: Any, batch_stats: Any) -> None:
    """Raises ValueError where two tensors of a model of the user's own would have one name; takes shapes too."""
    seen: set[str] = set()
    for name, _ in _named_leaves(params, batch_stats):
        if name in seen:
            raise ValueError(f"every tensor must have a path of its own, and two are called {name}: rename one's key")
        seen.add(name)


def read_weights(path: str | os.PathLike[str]) -> StoredWeights:
    """Reads a safetensors file into memory.

    Raises:
        ValueError: where there is no such file, it is cut short or of another format, or holds numbers of a type that
            nothing here computes with.
    """
    if Path(path).is_dir():
        raise ValueError(f"weights must be a safetensors file, and {os.fspath(path)} is a folder: name the file in it")
    try:
        os.close(open_regular(path))  # the library would wait for whoever writes to a pipe
        with safe_open(path, framework="np") as file:
            names = list(file.keys())
            for name in names:
                if (kind := file.get_slice(name).get_dtype()) not in _READABLE:
                    raise ValueError(
                        f"weights must be floats of 16 to 64 bits, and {name} of {os.fspath(path)} is {kind}: "
                        "save it as float32"
                    )
            tensors, metadata = {name: file.get_tensor(name) for name in names}, dict(file.metadata() or {})
    except FileNotFoundError:
        raise ValueError(
            f"weights must be a safetensors file, and {os.fspath(path)} does not exist: see how it is spelt"
        ) from None
    except SafetensorError as error:
        raise ValueError(
            f"weights must be a whole safetensors file, and {os.fspath(path)} is not ({error}): copy it again, or "
            "save it with safetensors"
        ) from None
    except OSError as error:
        raise ValueError(
            f"weights must be readable, and {os.fspath(path)} is not ({error.strerror or error}): see its permissions"
        ) from error
    return StoredWeights(tensors, metadata, _checked_digest(path, tensors, metadata))


def with_digest(tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata with the digest of all tensors and of the other metadata.

    It travels with the file, for whoever reads it to check. It is computed from names, types, shapes, values and
    metadata, not from the file's bytes: a copy that another program saves with the same content keeps it.
    """
    return {**metadata, _KIND: SEAL, SEAL: _digest_of(tensors, metadata)}


def _digest_of(tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> str:
    # hashlib lets other threads go on meanwhile: with two, 100 MB take 40 ms in place of 70.
    with ThreadPoolExecutor(_DIGEST_THREADS) as threads:
        described = dict(zip(tensors, threads.map(describe_array, tensors.keys(), tensors.values()), strict=True))
    told = {key: value for key, value in metadata.items() if key not in (_KIND, SEAL)}
    return json_digest({"metadata": told, "tensors": described})


def _checked_digest(path: str | os.PathLike[str], tensors: Tensors, metadata: Mapping[str, str]) -> str | None:
    """Return the digest that the metadata hold; raise ValueError where the content has another."""
    if _KIND not in metadata and SEAL not in metadata:
        return None
    wanted, found = metadata.get(SEAL, "none"), _digest_of(tensors, metadata)
    if wanted != found or metadata.get(_KIND) != SEAL:
        raise ValueError(
            f"{os.fspath(path)} must hold what was written, and was changed since (its digest (sha256) was "
            f"{wanted[:12]}, is {found[:12]}): copy it again from where it is whole; a program that changes weights on "
            f"purpose must leave {_KIND} and {SEAL} out of their metadata"
        )
    return found


def place_tensors(registry_name: str | None, tensors: Mapping[str, NDArray[Any]], like: Weights) -> Weights:
    """Puts named tensors where the model has them; the inverse of `name_tensors`.

    Args:
        registry_name: as there.
        tensors: by name. What is float there may be of another float type here. PyTorch's `num_batches_tracked` may
            stand beside those of a network of the registry.
        like: the model's params and batch_stats, arrays or jax.ShapeDtypeStruct.

    Returns:
        NumPy arrays (jax's where a leaf is a generator's key) of the dtypes of `like`. The classifier of the
        registry's is as large as the tensors have it, whatever `like` says.

    Raises:
        ValueError: where a tensor is missing, left over, of another shape or of another kind, naming the first few.
    """
    if registry_name is not None:
        faults = [
            f"{name} is {tensor.dtype}, no float"
            for name, tensor in tensors.items()
            if name.rpartition(".")[2] != COUNTER and not jnp.issubdtype(tensor.dtype, jnp.floating)
        ]
        if faults:
            raise ValueError(_list_faults(registry_name, faults, "save it in float32"))
        return Weights(*from_torchvision(registry_name, tensors))
    return _place_by_path(tensors, like)


def _place_by_path(tensors: Mapping[str, NDArray[Any]], like: Weights) -> Weights:
    wanted = dict(_named_leaves(like.params, like.batch_stats))
    stored = {name: jax.eval_shape(plain_key, leaf) for name, leaf in wanted.items()}
    faults = [f"missing {name}" for name in wanted if name not in tensors]
    faults += [f"unexpected {name}" for name in tensors if name not in wanted]
    for name, leaf in stored.items():
        if name not in tensors:
            continue
        found = tensors[name]
        if found.shape != leaf.shape:
            faults.append(f"{name} is {found.shape} instead of {leaf.shape}")
        elif found.dtype != leaf.dtype and not _are_floats(found.dtype, leaf.dtype):
            faults.append(f"{name} is {found.dtype} instead of {leaf.dtype}")
    if faults:
        raise ValueError(_list_faults("the model", faults, "they must come from the same model"))
    leaves = [like_leaf(tensors[name].astype(stored[name].dtype), leaf) for name, leaf in wanted.items()]
    placed = jax.tree.unflatten(jax.tree.structure(_as_tree(*like)), leaves)
    return Weights(placed["params"], placed["batch_stats"])


def _are_floats(*dtypes: Any) -> bool:
    return all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)


def _list_faults(model_name: str, faults: list[str], remedy: str) -> str:
    more = f" and {len(faults) - _MOST_FAULTS} more" if len(faults) > _MOST_FAULTS else ""
    return f"the tensors are not those of {model_name}: {'; '.join(faults[:_MOST_FAULTS])}{more}; {remedy}"


def _as_tree(params: Any, batch_stats: Any) -> dict[str, Any]:
    return {"params": params, "batch_stats": batch_stats}


def _named_leaves(params: Any, batch_stats: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(_as_tree(params, batch_stats))
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]
