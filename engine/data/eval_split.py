"""The choice of a run's evaluation split, and the check that its labels mean what those of the training split mean."""

from itertools import takewhile

from loopfeed.engine.config import OFF, TrainConfig
from loopfeed.engine.owners import storage_options_of
from loopfeed.preprocess.shards.location import open_location
from loopfeed.preprocess.shards.manifest import Manifest
from loopfeed.preprocess.shards.splits import SplitNames, find_splits, unfinished_remedy

USUAL_EVAL_SPLITS = ("val", "test")


def choose_eval_split(config: TrainConfig, data: str, *, is_new: bool = False) -> str | None:
    """Return the name of the split to evaluate on, or None if there is none.

    Without the setting `eval_split`, it is the first of "val" and "test" that exists and is not the training split.

    Raises:
        ValueError: one of these two splits has lost its manifest, or, if `is_new`, is not completely packed.
    """
    if config.eval_split == OFF:
        return None
    if config.eval_split is not None:
        return config.eval_split
    splits = find_splits(data, storage_options=storage_options_of(config))
    chosen = _usual_eval_split(config, data, splits)
    if is_new:
        _check_none_is_unfinished(config, data, chosen, splits)
    return chosen


def _usual_eval_split(config: TrainConfig, data: str, splits: SplitNames) -> str | None:
    for name in USUAL_EVAL_SPLITS:
        if name == config.split:
            continue
        if name in splits.broken:
            raise ValueError(
                f"the evaluation split must have a manifest.json, but {data.rstrip('/')}/{name} has none: "
                "restore that file, or choose another split with --eval-split (off for none)"
            )
        if name in splits.complete:
            return name
    return None


def _check_none_is_unfinished(config: TrainConfig, data: str, chosen: str | None, splits: SplitNames) -> None:
    """Raise ValueError if a split that takes precedence over the chosen split is only partly packed."""
    missing = {*takewhile(lambda name: name != chosen, (name for name in USUAL_EVAL_SPLITS if name != config.split))}
    if found := missing.intersection(splits.unfinished):
        split = open_location(data, storage_options=storage_options_of(config)).child(min(found))
        raise ValueError(
            f"the evaluation split must be complete, but {data.rstrip('/')}/{min(found)} is only partly packed: "
            f"{unfinished_remedy(split)}, or choose another split with --eval-split (off for none)"
        )


def have_same_classes(left: Manifest, right: Manifest) -> bool:
    """Return whether the labels of two splits mean the same."""
    kinds = [None if each.targets is None else each.targets.kind for each in (left, right)]
    return kinds[0] == kinds[1] and [each.id for each in left.classes] == [each.id for each in right.classes]


def check_same_classes(train: Manifest, evaluation: Manifest, name: str) -> None:
    """Raise ValueError if the labels of the evaluation split, called `name`, mean others than those in training."""
    if not have_same_classes(train, evaluation):
        raise ValueError(
            f"the evaluation split must have the classes of the training split, but the classes of {name} differ: "
            "pack both from the same source, or give --eval-split off"
        )
