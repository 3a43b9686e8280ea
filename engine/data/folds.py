"""Cross-validation on one split: the fold of each image, by its class and group.

Owns the rule. It depends on the images alone, in the order of the pack, which is that of the hashes of their names; not
on the seed, so that the folds of all runs on a pack are the same.
"""

import numpy as np
from numpy.typing import NDArray

# Shares of a class are counted in these.
_UNITS = 1 << 30


def folds_of(classes: NDArray[np.int32], groups: NDArray[np.uint32] | None, num_folds: int) -> NDArray[np.int16]:
    """Return the fold of each image, int16 [N], from 0.

    Without groups, the images sorted by class are dealt out in turn: any two folds differ by at most one image, in each
    class and in all. Groups are never divided; the largest come first, and each goes to the fold that has the smallest
    share of its classes so far (as scikit-learn's StratifiedGroupKFold, of which it is a simpler form).

    Args:
        classes: int32 [N], ≥ 0.
        groups: uint32 [N]; None for each image by itself.
        num_folds: n.
    """
    folds = np.empty(len(classes), np.int16)
    if groups is None:
        folds[np.argsort(classes, kind="stable")] = np.arange(len(classes)) % num_folds
        return folds
    _, group_of, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    members = np.split(np.argsort(group_of, kind="stable"), np.cumsum(sizes)[:-1])
    totals = np.bincount(classes)
    has = np.zeros((num_folds, len(totals)), np.int64)
    # Of equal size, the group comes first whose first image does.
    for group in sorted(range(len(sizes)), key=lambda each: (-sizes[each], int(members[each][0]))):
        own, counts = np.unique(classes[members[group]], return_counts=True)
        shares = has[:, own] @ (counts * _UNITS // totals[own])
        fold = min(range(num_folds), key=lambda each: (int(shares[each]), int(has[each].sum())))
        has[fold, own] += counts
        folds[members[group]] = fold
    return folds
