"""The initial weights of a run, read from a safetensors or PyTorch file of torchvision, timm or another run.

Owns what such a file must contain and what may differ. Does not depend on the run.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from loopfeed.engine.records.given_weights import Origin, read_given_weights, rename_head
from loopfeed.engine.records.imagenet import classes_or_imagenet
from loopfeed.engine.records.weights import Tensors, name_tensors, place_tensors
from loopfeed.engine.records.weights_metadata import OF_INPUT, check_metadata, classes_of
from loopfeed.engine.updates.update import Weights
from loopfeed.models.model import get_at, replace_at
from loopfeed.models.registry import find_network, image_size_of, resize_params
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.classes import ImageClass, have_same_order, lacking, places

_MOST_NAMED = 5


class InitialWeights(NamedTuple):
    """The weights that a run starts from instead of randomly initialised weights.

    Attributes:
        params, batch_stats: the model's pytrees of NumPy arrays.
        notes: one-line messages to the user about the file.
        digest: SHA-256 of the file's tensors and their names.
        origin: where they are from.
        metadata: what the source says of the input of the weights, as the metadata of a run's own weights.
        is_by_identifier: whether the classifier is another one than the file's because of the identifiers of classes.
        has_new_classifier: whether it is none of the file's: it is zero.
    """

    params: Any
    batch_stats: Any
    notes: tuple[str, ...]
    digest: str
    origin: Origin
    metadata: Mapping[str, str]
    is_by_identifier: bool = False
    has_new_classifier: bool = False


def load_initial_weights(
    path: str | os.PathLike[str],
    registry_name: str | None,
    params: Any,
    batch_stats: Any,
    *,
    classes: Sequence[ImageClass] = (),
    storage_options: Mapping[str, str] | None = None,
    revision: str | None = None,
) -> InitialWeights:
    """Read and check initial weights; this needs only the shapes of the model's arrays, so it can precede slow work.

    Args:
        path: what `read_given_weights` takes: a file, a run or a repository of the hub, with torchvision's names and
            layouts for a network of the registry, and with `params.…` and `batch_stats.…` for a user-defined model, as
            in the `model.safetensors` of a run. Prefixes of wrappers are left out.
        registry_name: the model's name in the registry, None for a user-defined one.
        params, batch_stats: the model's pytrees, arrays or jax.ShapeDtypeStruct.
        classes: the classes of the data by label, empty if they have no identifiers.
        storage_options: how to reach the store of a URL.
        revision: the commit to take of a repository, if the path names none.

    Returns:
        The weights, with the dtypes of `params` and `batch_stats` (floats of another width are converted). If a network
        of the registry has a class that the file lacks, or another number of them without identifiers, its classifier
        is zero, so that the first loss is that of chance and nothing random reaches the trunk (Kolesnikov et al., 2020,
        arXiv:1912.11370); if the file has all of its classes, its rows are the file's. If the images of a vision
        transformer have another size, its position embedding is interpolated.

    Raises:
        ValueError: if the file cannot be read, a tensor is missing, unexpected or of another shape, a value is NaN or
            infinite, or the record of its classes is malformed.
    """
    file, like = os.fspath(path), Weights(params, batch_stats)
    head = None if registry_name is None else find_network(registry_name).head
    given = rename_head(read_given_weights(file, storage_options, revision=revision), head)
    stored, changes, origin = given
    try:
        placed = place_tensors(registry_name, stored.tensors, like)
    except ValueError as error:
        model = stored.metadata.get("model")
        reason = str(error)
        if model not in (None, registry_name):
            reason = (
                f"the weights are those of the model {printable(str(model))}, not of {registry_name or 'your own'}: "
                f"give --model {printable(str(model))}, or other weights"
            )
        raise ValueError(f"--init-from {file}: {reason}") from None
    named = name_tensors(registry_name, *placed)
    _check_finite(file, named)
    check_metadata({key: text for key, text in stored.metadata.items() if key in OF_INPUT}, file)
    notes, in_file = [*changes, *_conversions(stored.tensors, named)], classes_of(stored.metadata, file)
    described = partial(InitialWeights, digest=_digest(stored.tensors), origin=origin, metadata=stored.metadata)
    if registry_name is None or head is None:
        return described(placed.params, placed.batch_stats, tuple(notes + _doubts(in_file, classes)))
    in_file = classes_or_imagenet(in_file, get_at(placed.params, head)["bias"].shape[0], classes)
    like_head = get_at(like.params, head)
    classifier, of_classes, is_by_identifier = _fit_classifier(
        get_at(placed.params, head), int(like_head["bias"].shape[0]), in_file, classes
    )
    is_new = classifier is None
    if is_new:
        classifier = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like_head)
    params = replace_at(placed.params, head, classifier)
    params, of_size = _fit_size(registry_name, params, like.params)
    notes += [*of_classes, *of_size]
    return described(
        params, placed.batch_stats, tuple(notes), is_by_identifier=is_by_identifier, has_new_classifier=is_new
    )


def _digest(tensors: Tensors) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        found.update(np.ascontiguousarray(tensor))
    return found.hexdigest()


def _doubts(in_file: Sequence[ImageClass], in_data: Sequence[ImageClass]) -> list[str]:
    """Return a warning if a user-defined model, whose classifier is unknown, starts from weights of other classes."""
    if not in_file or not in_data or have_same_order(in_file, in_data):
        return []
    how = "in another order" if not (lacking(in_data, in_file) or lacking(in_file, in_data)) else "others"
    return [
        f"warning: the classes of the data are {how} than the file's, whose weights are taken by number: check that"
    ]


def _fit_classifier(
    classifier: Any, num_in_data: int, in_file: Sequence[ImageClass], in_data: Sequence[ImageClass]
) -> tuple[Any, list[str], bool]:
    """Fit a file's classifier to the classes of the data.

    Returns:
        The classifier, None if none of the file's fits; a message for each change; and whether the identifiers of the
        classes made one.
    """
    num_in_file, is_new = int(classifier["bias"].shape[0]), "the classifier is new, and zero"
    has_parts = in_file and len(in_data) == num_in_data < num_in_file and not lacking(in_data, in_file)
    if num_in_file != num_in_data and not has_parts:
        found = quantity(num_in_file, "class")
        return None, [f"{is_new}: the file has {found}, the data have {num_in_data:,}"], False
    if not in_data or have_same_order(in_file, in_data):
        return classifier, [], False
    if not in_file:
        note = "the file does not record its classes: they are taken to be those of the data, in order"
        return classifier, [note], False
    for has, lacks, words in ((in_data, in_file, "the file lacks"), (in_file, in_data, "the data lack")):
        if not has_parts and (others := lacking(has, lacks)) is not None:
            return None, [f"{is_new}, because the classes differ: {words} {others}"], True
    order = [*places(in_data, in_file), *range(len(in_data), num_in_data)]
    permuted = jax.tree.map(lambda leaf: leaf[..., np.array(order)], classifier)
    note = "the rows of the classifier are permuted: the file has the same classes in another order"
    if has_parts:
        note = f"the classifier has {num_in_data:,} of the {num_in_file:,} rows of the file, by identifier"
    return permuted, [note], True


def _fit_size(registry_name: str, params: Any, like: Any) -> tuple[Any, list[str]]:
    """Fit a file's weights to the image size of the data, and return a message for each change."""
    of_file, of_data = (image_size_of(registry_name, each) for each in (params, like))
    if of_data is None or of_file == of_data:
        return params, []
    note = (
        f"the position embedding is interpolated: the file is for images of {of_file} × {of_file} px, the data "
        f"have {of_data} × {of_data} px"
    )
    return resize_params(registry_name, params, of_data), [note]


def _conversions(stored: Tensors, placed: Tensors) -> list[str]:
    """Return one message for each pair of float types between which tensors are converted."""
    kinds = Counter(
        (str(stored[name].dtype), str(tensor.dtype))
        for name, tensor in placed.items()
        if jnp.issubdtype(tensor.dtype, jnp.floating) and stored[name].dtype != tensor.dtype
    )
    return [
        f"{count:,} {found} tensor{' is' if count == 1 else 's are'} converted to {needed}"
        for (found, needed), count in kinds.items()
    ]


def _check_finite(file: str, tensors: Tensors) -> None:
    """Raise ValueError if tensors contain NaN or infinite values; the message names the first such tensors."""
    found = [
        name
        for name, tensor in tensors.items()
        if jnp.issubdtype(tensor.dtype, jnp.floating) and not np.isfinite(tensor.astype(np.float32)).all()
    ]
    if found:
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        raise ValueError(
            f"--init-from {file}: weights must be finite, but {', '.join(found[:_MOST_NAMED])}{more} "
            f"{'are' if len(found) > 1 else 'is'} not: use the weights of a run that did not diverge"
        )
