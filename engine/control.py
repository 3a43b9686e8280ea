"""The control word: what the host tells the running program with every batch.

Owns the word's layout on both sides (NumPy writes it, the device reads it) and the host's board of requests. Knows
nothing of who asks or how the word travels.
"""

import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from engine.records.control_log import ControlEvent, events_at, factor_before
from engine.records.control_requests import ControlRequest

# uint32 [3]: a word of flags, the bits of a float32, a number of batches. Words of four bytes cross in the same call as
# the pixels; a second call would cost more than both (4 µs).
CONTROL_WORDS = 3
STOP = 1 << 0
SNAPSHOT = 1 << 1
EVALUATE = 1 << 2
_FLOAT32, _UINT32 = struct.Struct("<f"), struct.Struct("<I")


class ControlWord(NamedTuple):
    """A control word as the program reads it.

    Attributes:
        stop: bool [], leave the loop after the batches that came with the word.
        snapshot: bool [], push a snapshot of the state after them.
        evaluate: bool [], evaluate after them.
        learning_rate_factor: float32 [], multiplies the schedule's learning rate at their steps.
        num_batches: int32 [], how many came.
    """

    stop: jax.Array
    snapshot: jax.Array
    evaluate: jax.Array
    learning_rate_factor: jax.Array
    num_batches: jax.Array


def decode_control(words: jax.Array) -> ControlWord:
    """Reads the uint32 [3] words on the device."""
    flags = words[0]
    return ControlWord(
        stop=(flags & STOP) != 0,
        snapshot=(flags & SNAPSHOT) != 0,
        evaluate=(flags & EVALUATE) != 0,
        learning_rate_factor=lax.bitcast_convert_type(words[1], jnp.float32),
        num_batches=words[2].astype(jnp.int32),
    )


type ControlWords = tuple[int, int, int]
"""What the host writes as uint32 [3]; a tuple, as an array of NumPy's takes ten times as long to make."""


def encode_control(flags: int, learning_rate_factor: float, num_batches: int) -> ControlWords:
    """Makes control words on the host; `flags` is a union of STOP, SNAPSHOT and EVALUATE."""
    (factor_bits,) = _UINT32.unpack(_FLOAT32.pack(learning_rate_factor))
    return flags, factor_bits, num_batches


def stop_at_once() -> ControlWords:
    """Gives the words of a stop that comes in the place of batches."""
    return encode_control(STOP, 1.0, 0)


class ControlBoard:
    """Where the host's threads leave their requests for the program; safe from any thread and from signal handlers.

    Attributes:
        stop_reason: why a stop was asked for, None while none was; the first reason stays.
    """

    def __init__(self) -> None:
        # Reentrant: a signal handler may run on the main thread in the middle of a request made there.
        self._lock = threading.RLock()
        self._pending: list[ControlRequest] = []
        self._replayed: Sequence[ControlEvent] = ()
        self._record: Callable[[ControlEvent], None] = lambda _: None
        self._pulls_a_step = 1
        self._factor = 1.0
        self.stop_reason: str | None = None

    def prepare(
        self,
        *,
        first_pull: int,
        pulls_a_step: int,
        replayed: Sequence[ControlEvent],
        record: Callable[[ControlEvent], None],
    ) -> None:
        """Makes the board ready for a launch.

        Args:
            first_pull: the launch begins with it.
            pulls_a_step: that make one update.
            replayed: what took effect at pulls of earlier launches, and takes effect there again; stops do not.
            record: told of each request before the program is; where it raises, the request is lost and the run ends.
        """
        self._record, self._pulls_a_step = record, pulls_a_step
        self._replayed = [event for event in replayed if event.pull >= first_pull]
        self._factor = factor_before(replayed, first_pull)

    def request(self, request: ControlRequest) -> None:
        """Leaves a request for the next pull."""
        with self._lock:
            self._pending.append(request)

    def request_stop(self, reason: str) -> None:
        """Asks the program to leave its loop at its next pull."""
        with self._lock:
            if self.stop_reason is None:
                self.stop_reason = reason

    def is_stop_requested(self) -> bool:
        """Tells whether a stop was asked for."""
        return self.stop_reason is not None

    def words(self, pull: int, num_batches: int) -> ControlWords:
        """Gives the control words of a pull of training batches and takes up what waits for it.

        Args:
            pull: its first batch, from 0.
            num_batches: wanted. Fewer come, at least one, where a request of an earlier launch took effect among
                them, and one where something is asked for that acts behind it.

        Raises:
            BaseException: what the record of a request raised.
        """
        if not self._pending and not self._replayed:
            return stop_at_once() if self.is_stop_requested() else encode_control(0, self._factor, num_batches)
        # At a stop, too: what is recorded here takes effect here in the launch that goes on.
        flags = 0
        for event in [*events_at(self._replayed, pull), *self._take_up(pull)]:
            flags |= SNAPSHOT * event.snapshot | EVALUATE * event.evaluate
            if event.learning_rate_factor is not None:
                self._factor = event.learning_rate_factor
        self._replayed = [event for event in self._replayed if event.pull > pull]
        if self.is_stop_requested():
            return stop_at_once()
        # What acts behind an update does so behind the same one in every launch, whatever chunks that makes.
        most = 1 if flags else num_batches
        num_batches = min([most, *(event.pull - pull for event in self._replayed)])
        return encode_control(flags, self._factor, num_batches)

    def stop_words(self, num_batches: int) -> ControlWords:
        """Gives the control words of a pull of `num_batches` that only a stop concerns."""
        return stop_at_once() if self.is_stop_requested() else encode_control(0, 1.0, num_batches)

    def _take_up(self, pull: int) -> list[ControlEvent]:
        """Records what is asked for as taking effect at this pull, and gives it."""
        with self._lock:
            requests, self._pending = self._pending, []
        events: list[ControlEvent] = []
        for request in requests:
            event = ControlEvent(
                pull=pull,
                step=pull // self._pulls_a_step + 1,
                learning_rate_factor=request.learning_rate_factor,
                snapshot=request.snapshot,
                evaluate=request.evaluate,
                stop=request.stop,
                request=request.id,
                time=time.time(),
            )
            # On disk first: a run that is killed at any instant from here on repeats it, at this pull.
            self._record(event)
            events.append(event)
            if request.stop:
                self.request_stop("control-run")
        return events
