"""The control word: what the host tells the running program with every batch.

Owns the word's layout on both sides (NumPy writes it, the device reads it) and the host's board of requests. Knows
nothing of who asks or how the word travels.
"""

import threading
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

# uint32 [2]: a word of flags, then the bits of a float32. Two words of four bytes cross in the same call as the
# pixels; a second call would cost more than both (4 µs).
CONTROL_WORDS = 2
STOP = 1 << 0
SNAPSHOT = 1 << 1
EVALUATE = 1 << 2


class ControlWord(NamedTuple):
    """A control word as the program reads it.

    Attributes:
        stop: bool [], leave the loop before this step.
        snapshot: bool [], push a snapshot of the state after this step.
        evaluate: bool [], evaluate after this step.
        learning_rate_factor: float32 [], multiplies the schedule's learning rate at this step.
    """

    stop: jax.Array
    snapshot: jax.Array
    evaluate: jax.Array
    learning_rate_factor: jax.Array


def decode_control(words: jax.Array) -> ControlWord:
    """Reads the uint32 [2] words on the device."""
    flags = words[0]
    return ControlWord(
        stop=(flags & STOP) != 0,
        snapshot=(flags & SNAPSHOT) != 0,
        evaluate=(flags & EVALUATE) != 0,
        learning_rate_factor=lax.bitcast_convert_type(words[1], jnp.float32),
    )


def encode_control(flags: int = 0, learning_rate_factor: float = 1.0) -> NDArray[np.uint32]:
    """Writes uint32 [2] words on the host; `flags` is a union of STOP, SNAPSHOT and EVALUATE."""
    return np.array([flags, np.float32(learning_rate_factor).view(np.uint32)], np.uint32)


class ControlBoard:
    """Where the host's threads leave their requests for the program; safe from any thread and from signal handlers.

    Attributes:
        stop_reason: why a stop was asked for, None while none was; the first reason stays.
    """

    def __init__(self) -> None:
        # Reentrant: a signal handler may run on the main thread in the middle of a request made there.
        self._lock = threading.RLock()
        self.stop_reason: str | None = None

    def request_stop(self, reason: str) -> None:
        """Asks the program to leave its loop at its next pull."""
        with self._lock:
            if self.stop_reason is None:
                self.stop_reason = reason

    def is_stop_requested(self) -> bool:
        """Tells whether a stop was asked for."""
        return self.stop_reason is not None

    def words(self) -> NDArray[np.uint32]:
        """Gives the uint32 [2] control words of the next pull."""
        return encode_control(STOP if self.is_stop_requested() else 0)
