"""The board on which host threads place requests for the running program, and the control word that carries them to it.

Decides when a request takes effect, and owns the layout of the word: encoded on the host, decoded on the device. Does
not depend on the origin of requests, on files, or on the transport.
"""

import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from loopfeed.engine.control.recording import Recording
from loopfeed.engine.control.request import (
    CALLBACK_ORIGIN,
    ControlEvent,
    ControlRequest,
    events_at,
    factor_before,
    origin_of,
)

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


END_OF_PROCESS = "the end of the process"
"""The reason of a stop that comes when Python ends and starts no more threads, so that no snapshot can be written."""


def stop_at_once() -> ControlWords:
    """Return the control word that stops the program at once, without further batches."""
    return encode_control(STOP, 1.0, 0)


# How long a pull waits for the record of an event: usually a millisecond. It doubles with each event that is late, so
# that requests take effect on a slow disk too, while one that hangs stops the program only once.
_LEAST_PATIENCE_S, _MOST_PATIENCE_S = 1.0, 60.0
# Longest waits at the end of a run, for an event that is late and for the last one.
_END_TIMEOUT_S = 10.0


class ControlBoard:
    """A queue of requests for the running program; safe to use from any thread and from signal handlers.

    Attributes:
        last_batch: index of the last training batch that the program asked for, from 0; -1 before the first.
        stop_reason: the reason given by the first request to stop, or None.
    """

    def __init__(self) -> None:
        # Reentrant: a signal handler may interrupt a request on the main thread.
        self._lock = threading.RLock()
        self._pending: list[ControlRequest] = []
        self._replayed: Sequence[ControlEvent] = ()
        self._record: Callable[[ControlEvent], Recording | None] = lambda _: None
        self._late: Recording | None = None
        self._patience_s = _LEAST_PATIENCE_S
        self._is_snapshot_due: Callable[[int], bool] = lambda _: False
        self._keeps_evaluated = False
        self._batches_per_step = 1
        self._factor = 1.0
        self.stop_reason: str | None = None
        self.last_batch = -1

    def prepare(
        self,
        *,
        first_batch: int,
        batches_per_step: int,
        replayed: Sequence[ControlEvent],
        record: Callable[[ControlEvent], Recording | None],
        is_snapshot_due: Callable[[int], bool] = lambda _: False,
        keeps_evaluated: bool = False,
    ) -> None:
        """Prepare the board for a launch.

        Args:
            first_batch: index of the first batch of the launch.
            batches_per_step: batches per update.
            replayed: events of earlier launches, which take effect again at their pulls, except for stops.
            record: function called with each event before the program receives it. It returns the recording, if that
                may take a while; a request that is not recorded in time takes effect at a later pull. If it raises, the
                request is lost and the run stops.
            is_snapshot_due: called at each pull with the step to which it belongs, from 1; returns whether the run
                itself wants a snapshot after that step. Such a snapshot is no event: it changes no bit of the training.
            keeps_evaluated: whether a snapshot follows each evaluation that is requested.
        """
        self._record, self._batches_per_step = record, batches_per_step
        self._replayed = [event for event in replayed if event.pull >= first_batch]
        self._factor = factor_before(replayed, first_batch)
        self._is_snapshot_due, self._keeps_evaluated = is_snapshot_due, keeps_evaluated

    def request(self, request: ControlRequest) -> None:
        """Add a request, which takes effect at the program's next pull of batches, or once it can be recorded."""
        with self._lock:
            self._pending.append(request)

    def request_stop(self, reason: str) -> None:
        """Ask the program to leave its loop at its next pull of batches."""
        with self._lock:
            if self.stop_reason is None:
                self.stop_reason = reason

    def is_stop_requested(self) -> bool:
        """Return whether a stop was requested."""
        return self.stop_reason is not None

    def words(self, batch_index: int, num_batches: int) -> ControlWords:
        """Return the control words for a pull of training batches, at which pending requests take effect.

        Args:
            batch_index: index of the first batch, from 0.
            num_batches: number of batches to pull. The words allow fewer, but at least one, if a request of an earlier
                launch took effect among them, and only one if a snapshot or an evaluation is requested.

        Raises:
            BaseException: any exception that `record` raises.
        """
        self.last_batch = batch_index
        is_due = not self.is_stop_requested() and self._is_snapshot_due(batch_index // self._batches_per_step + 1)
        if not (self._pending or self._replayed or is_due):
            return stop_at_once() if self.is_stop_requested() else encode_control(0, self._factor, num_batches)
        # Also at a stop: the launch that resumes the run applies events recorded here at this pull.
        flags = SNAPSHOT * is_due
        for event in [*events_at(self._replayed, batch_index), *self._record_pending(batch_index)]:
            is_kept = event.snapshot or (event.evaluate and self._keeps_evaluated)
            flags |= SNAPSHOT * is_kept | EVALUATE * event.evaluate
            if event.learning_rate_factor is not None:
                self._factor = event.learning_rate_factor
        self._replayed = [event for event in self._replayed if event.pull > batch_index]
        if self.is_stop_requested():
            return stop_at_once()
        # A snapshot or an evaluation must follow the same update in every launch, whatever the chunk size.
        most = 1 if flags else num_batches
        num_batches = min([most, *(event.pull - batch_index for event in self._replayed)])
        return encode_control(flags, self._factor, num_batches)

    def stop_words(self, num_batches: int) -> ControlWords:
        """Return the control words for a pull of `num_batches` batches at which only a stop can take effect."""
        return stop_at_once() if self.is_stop_requested() else encode_control(0, 1.0, num_batches)

    def record_late(self, batch_index: int) -> list[ControlEvent]:
        """Record the requests that callbacks made after the last pull, except for stops, and return the events.

        A run that is resumed from here is not given the occasions of these requests again, so it must find them in the
        record. Those of `control-run` are left out: their sender is told that the run has ended.

        Args:
            batch_index: the next batch, that of a run that is resumed from here.

        Raises:
            TimeoutError: if they are not recorded in time.
            BaseException: any exception that `record` raises.
        """
        with self._lock:
            self._pending = [
                request for request in self._pending if origin_of(request.id) == CALLBACK_ORIGIN and not request.stop
            ]
        if not self._pending:
            return []
        if self._late is None or self._late.is_over(_END_TIMEOUT_S):
            self._patience_s = _END_TIMEOUT_S
            events = self._record_pending(batch_index, is_cancelled=lambda: False)
            if not self._pending:
                return events
        raise TimeoutError(
            f"requests of callbacks must be recorded in control.jsonl within {_END_TIMEOUT_S:g} s, but the disk did "
            "not accept them: check the disk"
        )

    def _record_pending(self, batch_index: int, is_cancelled: Callable[[], bool] | None = None) -> list[ControlEvent]:
        """Record the pending requests as events at this pull, and return the events that are recorded in time.

        The others stay pending, and so do all while the disk still works on a late one.
        """
        if self._late is not None:
            if not self._late.is_over():
                self._stop_if_asked(self._pending)
                return []
            self._late = None
        with self._lock:
            requests, self._pending = self._pending, []
        events: list[ControlEvent] = []
        try:
            for request in requests:
                event = self._event(request, batch_index)
                # Recorded before it takes effect: a run killed at any later instant repeats it at this pull.
                recording = self._record(event)
                if recording and not recording.wait(self._patience_s, is_cancelled or self.is_stop_requested):
                    self._late = recording
                    self._patience_s = min(2 * self._patience_s, _MOST_PATIENCE_S)
                    with self._lock:
                        self._pending = [*requests[len(events) :], *self._pending]
                    return events
                events.append(event)
        finally:
            self._stop_if_asked(requests)
        self._patience_s = _LEAST_PATIENCE_S
        return events

    def _stop_if_asked(self, requests: Sequence[ControlRequest]) -> None:
        """Stop if a request asks for that, recorded or not: a resumed run does not repeat a stop."""
        for request in requests:
            if request.stop:
                self.request_stop(origin_of(request.id))

    def _event(self, request: ControlRequest, batch_index: int) -> ControlEvent:
        return ControlEvent(
            pull=batch_index,
            step=batch_index // self._batches_per_step + 1,
            learning_rate_factor=request.learning_rate_factor,
            snapshot=request.snapshot,
            evaluate=request.evaluate,
            stop=request.stop,
            request=request.id,
            time=time.time(),
        )
