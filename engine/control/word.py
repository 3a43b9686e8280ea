"""The control word: the host's message to the running program with every pull.

Owns the word's layout on both sides: the host writes it, the device reads it. Does not depend on the transport.
"""

import struct
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# uint32 [3]: flags, the bits of a float32, a number of batches. The words cross in the same call as the pixels; a
# second call would cost more than both (4 µs).
CONTROL_WORDS = 3
STOP = 1 << 0
SNAPSHOT = 1 << 1
EVALUATE = 1 << 2
_FLOAT32, _UINT32 = struct.Struct("<f"), struct.Struct("<I")


class ControlWord(NamedTuple):
    """A control word as the program reads it.

    Attributes:
        stop: bool [], leave the loop after the batches of this pull.
        snapshot: bool [], push a snapshot of the state after them.
        evaluate: bool [], evaluate after them.
        learning_rate_factor: float32 [], multiplies the schedule's learning rate at their steps.
        num_batches: int32 [], number of batches in this pull.
    """

    stop: jax.Array
    snapshot: jax.Array
    evaluate: jax.Array
    learning_rate_factor: jax.Array
    num_batches: jax.Array


def decode_control(words: jax.Array) -> ControlWord:
    """Decode the uint32 [3] words on the device."""
    flags = words[0]
    return ControlWord(
        stop=(flags & STOP) != 0,
        snapshot=(flags & SNAPSHOT) != 0,
        evaluate=(flags & EVALUATE) != 0,
        learning_rate_factor=lax.bitcast_convert_type(words[1], jnp.float32),
        num_batches=words[2].astype(jnp.int32),
    )


type ControlWords = tuple[int, int, int]
"""The words that the host writes as uint32 [3]; a tuple, as a NumPy array takes ten times as long to create."""


def encode_control(flags: int, learning_rate_factor: float, num_batches: int) -> ControlWords:
    """Encode control words on the host; `flags` is a union of STOP, SNAPSHOT and EVALUATE."""
    (factor_bits,) = _UINT32.unpack(_FLOAT32.pack(learning_rate_factor))
    return flags, factor_bits, num_batches


def stop_at_once() -> ControlWords:
    """Return the control words of a stop without batches."""
    return encode_control(STOP, 1.0, 0)
