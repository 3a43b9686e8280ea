"""The convolutions of a traced program that are slow inside a loop on a CPU."""

from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import jax

import loopfeed.models.layers

_OURS = PurePath(str(loopfeed.models.layers.__file__)).parent


def slow_convolutions_warning(jaxpr: Any) -> str | None:
    """Return a warning about the convolutions of a program that are `lax`'s own, None on a GPU or if there are none.

    Args:
        jaxpr: the traced training program.
    """
    if jax.default_backend() != "cpu":
        return None
    count = count_lax_convolutions(jaxpr)
    if not count:
        return None
    return (
        f"warning: {count:,} convolution{' of the model is' if count == 1 else 's of the model are'} "
        "jax.lax.conv_general_dilated, whose gradients are many times slower inside a loop on a CPU: use "
        "loopfeed.convolution, loopfeed.conv_general_dilated or an adapter of loopfeed.engine.adapters"
    )


def count_lax_convolutions(jaxpr: Any) -> int:
    """Count the convolutions that a program differentiates, other than those of `loopfeed.models.layers`."""
    return sum(1 for _ in _forward_convolutions(jaxpr, ""))


def _forward_convolutions(jaxpr: Any, outer: str) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        names = f"{outer}/{equation.source_info.name_stack}"
        if equation.primitive is jax.lax.conv_general_dilated_p:
            # "jvp" is in the name of what is differentiated, "transpose" in that of the gradients.
            if "jvp" in names and "transpose" not in names and not _is_ours(equation):
                yield equation
            continue
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from _forward_convolutions(inner, names)


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns")


def _is_ours(equation: Any) -> bool:
    traceback = equation.source_info.traceback
    frames = () if traceback is None else traceback.frames
    return any(PurePath(frame.file_name).parent == _OURS for frame in frames)
