"""Weights to start a run from: a safetensors file of torchvision's, of PyTorch's or of another run.

Owns what a file must hold for that and what may differ. Knows nothing of the run.
"""

import hashlib
import os
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from engine.records.weights import StoredWeights, Tensors, name_tensors, place_tensors, read_weights
from engine.updates.update import Weights

_HEAD = "fc"
_MOST_NAMED = 5


class InitialWeights(NamedTuple):
    """What a run begins with in place of drawn weights.

    Attributes:
        params, batch_stats: the model's pytrees, NumPy arrays; what the file does not give is the leaf that
            `load_initial_weights` was given.
        notes: what the user should know of the file, a line each.
        digest: sha256 of the file's tensors and their names.
    """

    params: Any
    batch_stats: Any
    notes: tuple[str, ...]
    digest: str

    def over(self, drawn: Weights) -> Weights:
        """Gives the drawn weights with those of the file in their places; may be called while tracing.

        Only what was loaded over shapes (`jax.ShapeDtypeStruct`) has leaves that are taken from `drawn`.
        """

        def choose(given: Any, drawn: Any) -> Any:
            return drawn if isinstance(given, jax.ShapeDtypeStruct) else given

        return Weights(
            jax.tree.map(choose, self.params, drawn.params), jax.tree.map(choose, self.batch_stats, drawn.batch_stats)
        )


def load_initial_weights(
    path: str | os.PathLike[str], registry_name: str | None, params: Any, batch_stats: Any
) -> InitialWeights:
    """Reads and checks weights to start from; needs no drawn ones, so that it can stand before everything slow.

    Args:
        path: of a safetensors file: torchvision's names and layouts for a network of the registry, `params.…` and
            `batch_stats.…` for a model of the user's own, as in the `model.safetensors` of a run.
        registry_name: the model's name in the registry, None for one of the user's own.
        params, batch_stats: its pytrees, arrays or jax.ShapeDtypeStruct: what they should become.

    Returns:
        The weights, of the dtypes of `params` and `batch_stats` (floats of another width are converted). The classifier
        of a network of the registry with another number of classes stays the given one.

    Raises:
        ValueError: where the file cannot be read, a tensor is missing, left over or of another shape, or a number is
            not finite.
    """
    file, like = os.fspath(path), Weights(params, batch_stats)
    stored = read_weights(file)
    try:
        placed = place_tensors(registry_name, stored.tensors, like)
    except ValueError as error:
        raise ValueError(f"--init-from {file}: {error}{_hint(stored, registry_name)}") from None
    named = name_tensors(registry_name, *placed)
    _check_finite(file, named)
    notes = _conversions(stored.tensors, named)
    if registry_name is not None and (classes := _other_classes(placed, like)):
        placed = placed._replace(params=placed.params | {_HEAD: params[_HEAD]})
        notes.append(f"the classifier is drawn anew: the file has {classes[0]:,} classes, the data {classes[1]:,}")
    return InitialWeights(placed.params, placed.batch_stats, tuple(notes), _digest(stored.tensors))


def _digest(tensors: Tensors) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        found.update(np.ascontiguousarray(tensor))
    return found.hexdigest()


def _other_classes(placed: Weights, like: Weights) -> tuple[int, int] | None:
    """The numbers of classes of the file and of the data, None where they are one."""
    there, wanted = (int(weights.params[_HEAD]["bias"].shape[0]) for weights in (placed, like))
    return None if there == wanted else (there, wanted)


def _hint(stored: StoredWeights, registry_name: str | None) -> str:
    """Where the file names the model that it is of, and that is another: which."""
    named = stored.metadata.get("model")
    return f" (the file says that it is of {named!r})" if named not in (None, registry_name) else ""


def _conversions(stored: Tensors, placed: Tensors) -> list[str]:
    """Says which floats are of another width in the model than in the file."""
    kinds = Counter(
        (str(stored[name].dtype), str(tensor.dtype))
        for name, tensor in placed.items()
        if jnp.issubdtype(tensor.dtype, jnp.floating) and stored[name].dtype != tensor.dtype
    )
    return [
        f"{count:,} tensor{'' if count == 1 else 's'} of {there} {'is' if count == 1 else 'are'} converted to {here}"
        for (there, here), count in kinds.items()
    ]


def _check_finite(file: str, tensors: Tensors) -> None:
    """Raises ValueError naming the first tensors that hold a number that is not finite."""
    found = [
        name
        for name, tensor in tensors.items()
        if jnp.issubdtype(tensor.dtype, jnp.floating) and not np.isfinite(tensor.astype(np.float32)).all()
    ]
    if found:
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        raise ValueError(
            f"--init-from {file}: weights must be finite, and {', '.join(found[:_MOST_NAMED])}{more} "
            f"{'are' if len(found) > 1 else 'is'} not: take the weights of a run that did not diverge"
        )
