"""The names of the program's scopes, and which phase, action and layer an operation belongs to by its scopes.

The program is traced inside `jax.named_scope`s with these names. jax writes the scopes of each operation into its
metadata, as XLA's `op_name`, which says nothing to the compiler. Does not depend on jax.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

TRAIN, VALID = "train", "valid"
"""The phases inside the program: updates, and evaluations."""

DRAW, UNPACK, AUGMENT, FORWARD, LOSS, OPT_STEP, PUSH, SNAPSHOT, PREDICT = (
    "draw",
    "unpack",
    "augment",
    "forward",
    "loss",
    "opt_step",
    "push",
    "snapshot",
    "predict",
)
"""The scopes of the actions."""

BACKWARD = "backward"
"""The action of what jax derives from the scopes `forward` and `loss`; it is not a scope of its own."""

ACTIONS = {
    TRAIN: (DRAW, UNPACK, AUGMENT, FORWARD, LOSS, BACKWARD, OPT_STEP, PUSH, SNAPSHOT),
    VALID: (DRAW, UNPACK, PREDICT, LOSS, PUSH),
}
"""The actions of each phase, in the order of the program."""

# Transformations, whose name jax wraps around a scope, as in transpose(jvp(forward)).
_TRANSFORMATIONS = ("jvp", "transpose", "vmap", "remat", "checkpoint")
# What jax adds to the scopes for calls and control flow.
_STRUCTURE = re.compile(
    r"while|body|cond|scan|body_fun|cond_fun|branch_\d+_fun|closed_call|core_call|eval_jaxpr|checkpoint|"
    r"rematted_computation|shard_map|custom_jvp_call|custom_vjp_call|custom_vjp_call_jaxpr|p?jit\(.*\)|pjit"
)
_WRAPPED = re.compile(rf"({'|'.join(_TRANSFORMATIONS)})\((.*)\)")


@dataclass(frozen=True)
class Scope:
    """Where an operation belongs.

    Attributes:
        phase: `TRAIN` or `VALID`, None outside of both.
        action: one of the phase's `ACTIONS`, None if the operation has none, such as the counting of a loop.
        path: the scopes inside the action, joined by "/", such as "layer1/0/conv1"; empty without any.
    """

    phase: str | None = None
    action: str | None = None
    path: str = ""


NO_SCOPE = Scope()
"""The scope of an operation that belongs to no phase, or whose metadata have been lost."""


def parse_op_name(op_name: str) -> Scope:
    """Return the scope of an operation by its `op_name`, such as "jit(f)/while/body/train/jvp(forward)/stem/add".

    The scope directly inside the phase is the action, so that a model may have a scope called "loss". Whatever jax
    transposed belongs to the backward pass.

    Args:
        op_name: the scopes, outermost first, with jax's transformations around them; last is the primitive.
    """
    names = list(_scopes(op_name))
    phase = next((name for name in names if name in ACTIONS), None)
    if phase is None:
        return NO_SCOPE
    actions = [name for name in ACTIONS[phase] if name != BACKWARD]
    # jax repeats the outer scopes inside a call that it transposes or traces once for several callers.
    starts = [at for at, (one, two) in enumerate(pairwise(names)) if one == phase and two in actions]
    if not starts:
        return Scope(phase)
    _, action, *path = names[starts[-1] :]
    if action in (FORWARD, LOSS) and "transpose(" in op_name:
        return Scope(phase, BACKWARD, "/".join([LOSS, *path] if action == LOSS else path))
    return Scope(phase, action, "/".join(path))


def _scopes(op_name: str) -> Iterator[str]:
    """Yield the names of the scopes of an operation, without jax's own and without the primitive."""
    *outer, _ = _split(op_name)
    for part in outer:
        yield from _unwrapped(part)


def _unwrapped(part: str) -> Iterator[str]:
    if _STRUCTURE.fullmatch(part):
        return
    if wrapped := _WRAPPED.fullmatch(part):
        for inner in _split(wrapped[2]):
            yield from _unwrapped(inner)
    elif part:
        yield part


def _split(text: str) -> list[str]:
    """Split at each slash that is not inside parentheses."""
    parts, depth = [""], 0
    for character in text:
        if character == "/" and depth == 0:
            parts.append("")
            continue
        depth += (character == "(") - (character == ")")
        parts[-1] += character
    return parts
