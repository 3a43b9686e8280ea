"""The token that puts the calls to the host in order.

XLA orders two calls only if one needs a value of the other; on a CPU, side effects order nothing. So every crossing
takes the token that the crossing before it returned, and returns the next one: all of them are one chain of values.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Token(NamedTuple):
    """What a crossing needs of the one before it, on this device.

    Attributes:
        byte: uint8 [], a result of that crossing; nobody reads its value.
    """

    byte: jax.Array


TOKEN_SHAPE = jax.ShapeDtypeStruct((), jnp.uint8)
"""The shape of a token's byte."""


def first_token() -> Token:
    """Return the token of the first crossing of a program; called once, where the tracing of the program begins."""
    return Token(jnp.zeros((), jnp.uint8))
