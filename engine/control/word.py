"""The control word: the message that the host sends to the running program with every pull.

Owns the layout of the message: encoding on the host, decoding on the device. Does not depend on the transport.
"""

import struct
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

# uint32 [3]: flags, the bits of a float32, a number of batches. They are transferred in the same call as the
# pixels, because a second call (4 µs) would take longer than both transfers.
CONTROL_WORDS = 3
STOP = 1 << 0
SNAPSHOT = 1 << 1
EVALUATE = 1 << 2
_FLOAT32, _UINT32 = struct.Struct("<f"), struct.Struct("<I")


class ControlWord(NamedTuple):
    """A decoded control word, on the device.

    Attributes:
        stop: whether to leave the loop after the batches of this pull. True if there are none, so that zeros, which the
            host answers after a failure, end the loop.
        snapshot: whether to push a snapshot of the state after these batches.
        evaluate: whether to evaluate after these batches.
        learning_rate_factor: multiplies the scheduled learning rate at the steps of these batches.
        num_batches: number of batches in this pull.
    """

    stop: Bool[Array, ""]
    snapshot: Bool[Array, ""]
    evaluate: Bool[Array, ""]
    learning_rate_factor: Float32[Array, ""]
    num_batches: Int32[Array, ""]


def decode_control(words: UInt32[Array, "3"]) -> ControlWord:
    """Decode a control word on the device."""
    flags = words[0]
    return ControlWord(
        stop=((flags & STOP) != 0) | (words[2] == 0),
        snapshot=(flags & SNAPSHOT) != 0,
        evaluate=(flags & EVALUATE) != 0,
        learning_rate_factor=lax.bitcast_convert_type(words[1], jnp.float32),
        num_batches=words[2].astype(jnp.int32),
    )


type ControlWords = tuple[int, int, int]
"""The three uint32 words of a control word; a tuple, because a NumPy array takes ten times as long to create."""


def encode_control(flags: int, learning_rate_factor: float, num_batches: int) -> ControlWords:
    """Encode a control word on the host; `flags` is a bitwise OR of STOP, SNAPSHOT and EVALUATE."""
    (factor_bits,) = _UINT32.unpack(_FLOAT32.pack(learning_rate_factor))
    return flags, factor_bits, num_batches


def stop_at_once() -> ControlWords:
    """Return the control word that stops the program at once, without further batches."""
    return encode_control(STOP, 1.0, 0)
