"""What a label means, in a few words, for the pictures of a batch."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from loopfeed.engine.images.mixing import WHOLE
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.shards.classes import ImageClass
from loopfeed.preprocess.shards.targets import TargetKind

_MOST_NUMBERS = 4
_SHOWN_SHARE = 0.005  # of a target distribution, what rounds to more than 0.00


def captions_of(
    labels: Any, own_share: NDArray[np.int32] | None, classes: Sequence[ImageClass], targets: TargetKind | None
) -> list[str]:
    """Return a caption for each image of a batch: its class, or what else its label says; of a mixed image, both.

    Args:
        labels: int32 [B] class numbers, or any pytree of arrays [B, …].
        own_share: int32 [B] in units of 2**-16, the share of each image's own label; None if nothing is mixed.
        classes: the classes by number, empty if they have no names.
        targets: what an array of labels [B, K] of a packed split contains.
    """
    leaves = jax.tree_util.tree_leaves_with_path(labels)
    num_images = len(leaves[0][1])
    alone = [
        "\n".join(_describe(path, np.asarray(leaf)[row], classes, targets) for path, leaf in leaves)
        for row in range(num_images)
    ]
    if own_share is None:
        return alone
    return [_mixed(alone[row], alone[row ^ 1], int(own_share[row]) / WHOLE) for row in range(num_images)]


def _mixed(own: str, partner: str, share: float) -> str:
    # A picture that is not mixed, or with another of its class, has one label.
    if share == 1.0 or own == partner:
        return own
    return "\n".join(f"{part:.2f} {text}" for part, text in ((share, own), (1 - share, partner)))


def _describe(path: Any, value: NDArray[Any], classes: Sequence[ImageClass], targets: TargetKind | None) -> str:
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    prefix = f"{name}: " if name else ""
    if not name and value.ndim == 0 and value.dtype.kind in "iu":
        return _class_name(int(value), classes)
    if not name and value.ndim == 1 and _are_classes(value, targets):
        present = [index for index in np.argsort(-value, kind="stable").tolist() if value[index] > _SHOWN_SHARE]
        is_sure = set(value.tolist()) <= {0.0, 1.0}
        texts = [_class_name(index, classes) + ("" if is_sure else f" {value[index]:.2f}") for index in present]
        return ", ".join(texts) or "-"
    if value.size > _MOST_NUMBERS:
        return f"{prefix}{value.dtype} {list(value.shape)}"
    return prefix + ", ".join(f"{number:.4g}" for number in value.ravel().astype(np.float64).tolist())


def _are_classes(value: NDArray[Any], targets: TargetKind | None) -> bool:
    """Return whether an array [K] has a number for each class: of several classes, or a distribution over them."""
    if targets is not None:
        return targets == "classes"
    return value.dtype.kind == "f" and bool((value >= 0).all()) and abs(float(value.sum()) - 1) < 1e-3


def _class_name(number: int, classes: Sequence[ImageClass]) -> str:
    if 0 <= number < len(classes):
        return printable(classes[number].name)
    return f"class {number}"
