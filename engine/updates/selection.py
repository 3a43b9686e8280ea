"""Selection of parameters by the dotted paths of their leaves: which are frozen, and which have factors of their own.

Frozen leaves are removed from the tree of trained parameters (None stands in their place), so that they have neither
gradients nor moments. Does not depend on how patterns are written in settings.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax

from loopfeed.engine.patterns import Group
from loopfeed.models.layers.batch_norm import Frozen

_NO_GROUP = Group("")


def dotted_path(path: Sequence[Any]) -> str:
    """Return the dotted path of a leaf, such as "layer1.0.conv1.kernel", from its key path."""
    return ".".join(jax.tree_util.keystr((entry,), simple=True) for entry in path)


def dotted_paths(tree: Any) -> list[str]:
    """Return the dotted paths of all leaves of a pytree, in order."""
    return [dotted_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def matches(patterns: Sequence[str], path: str) -> bool:
    """Return whether one of the regular expressions matches a whole dotted path."""
    return any(re.fullmatch(pattern, path) for pattern in patterns)


def split_frozen(tree: Any, patterns: Sequence[str]) -> tuple[Any, Any]:
    """Split a pytree into its trained and its frozen leaves; in each part, None stands for the leaves of the other.

    Without patterns, the trained part is the tree itself, and the frozen part is None.
    """
    if not patterns:
        return tree, None
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    is_frozen = [matches(patterns, dotted_path(path)) for path, _ in leaves]
    pairs = [(None, leaf) if frozen else (leaf, None) for (_, leaf), frozen in zip(leaves, is_frozen, strict=True)]
    trained, frozen = ([pair[part] for pair in pairs] for part in (0, 1))
    return jax.tree.unflatten(structure, trained), jax.tree.unflatten(structure, frozen)


def join_frozen(trained: Any, frozen: Any) -> Any:
    """Undo `split_frozen`: return the whole tree of a trained and a frozen part."""
    if frozen is None:
        return trained
    return jax.tree.map(
        lambda leaf, other: other if leaf is None else leaf, trained, frozen, is_leaf=lambda leaf: leaf is None
    )


def keep_frozen(new: Any, before: Any, patterns: Sequence[str]) -> Any:
    """Return `new` with the leaves of `before` wherever a pattern matches; both have the same structure."""
    if not patterns:
        return new
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf, old: old if matches(patterns, dotted_path(path)) else leaf, new, before
    )


def mark_frozen(batch_stats: Any, patterns: Sequence[str]) -> Any:
    """Return batch statistics of a network of the registry with those of wholly frozen norms marked as `Frozen`.

    A norm is frozen if patterns match both of its statistics.
    """
    moved = {_parent(path) for path in dotted_paths(batch_stats) if not matches(patterns, path)}
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if _parent(dotted_path(path)) in moved else Frozen(leaf), batch_stats
    )


def unmark_frozen(batch_stats: Any) -> Any:
    """Undo `mark_frozen`."""
    return jax.tree.map(lambda leaf: leaf.value if _is_marked(leaf) else leaf, batch_stats, is_leaf=_is_marked)


def has_frozen_norms(batch_stats: Any, patterns: Sequence[str]) -> bool:
    """Return whether `mark_frozen` would mark a norm; the leaves may be abstract."""
    return any(map(_is_marked, jax.tree.leaves(mark_frozen(batch_stats, patterns), is_leaf=_is_marked)))


def _is_marked(leaf: Any) -> bool:
    return isinstance(leaf, Frozen)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


@dataclass(frozen=True)
class StagedParts:
    """The parts of the parameters that the same stages of a run train; each part has an optimizer state of its own.

    So a parameter that is trained from a later stage on begins there as if it were new, as in PyTorch: with the moments
    and the bias correction of its own first update.

    Attributes:
        frozen_by_stage: the patterns of the parameters that each stage does not train.
        stages: for each part, whether each stage trains it. Parameters that no stage trains are in no part.
    """

    frozen_by_stage: tuple[tuple[str, ...], ...]
    stages: tuple[tuple[bool, ...], ...]

    @classmethod
    def of(cls, params: Any, frozen_by_stage: tuple[tuple[str, ...], ...]) -> "StagedParts":
        """Return the parts of parameters, those that are trained first in front."""
        found = {_stages_that_train(path, frozen_by_stage) for path in dotted_paths(params)}
        return cls(frozen_by_stage, tuple(sorted((each for each in found if any(each)), reverse=True)))

    def take(self, tree: Any, part: int | None = None) -> Any:
        """Return one part of a pytree, or all; None stands for the other leaves. A leaf may be None already."""

        def keep(path: Any, leaf: Any) -> Any:
            stages = _stages_that_train(dotted_path(path), self.frozen_by_stage)
            return leaf if (any(stages) if part is None else stages == self.stages[part]) else None

        return jax.tree_util.tree_map_with_path(keep, tree)

    def trained_with(self, frozen: tuple[str, ...]) -> list[int]:
        """Return the numbers of the parts that a stage with these patterns trains."""
        stage = self.frozen_by_stage.index(frozen)
        return [number for number, stages in enumerate(self.stages) if stages[stage]]


def _stages_that_train(path: str, frozen_by_stage: Sequence[Sequence[str]]) -> tuple[bool, ...]:
    return tuple(not matches(patterns, path) for patterns in frozen_by_stage)


def join_parts(parts: Sequence[Any]) -> Any:
    """Return the tree of all leaves of parts, in each of which None stands for the leaves of the others."""
    return reduce(join_frozen, parts)


def groups_of(params: Any, groups: Sequence[Group]) -> list[Group]:
    """Return the group of each leaf, in order: the first whose pattern matches, else one whose factors are 1."""
    return [
        next((group for group in groups if matches((group.pattern,), path)), _NO_GROUP) for path in dotted_paths(params)
    ]


def scale_leaves(tree: Any, factors: Sequence[float]) -> Any:
    """Return a pytree of arrays with each leaf multiplied by its factor; leaves whose factor is 1 are unchanged."""
    leaves, structure = jax.tree.flatten(tree)
    scaled = [leaf if factor == 1 else leaf * factor for leaf, factor in zip(leaves, factors, strict=True)]
    return jax.tree.unflatten(structure, scaled)
