"""The board on which the host's threads leave their requests for the running program.

Owns when a request takes effect. Knows nothing of who asks, of files, or of how the control word travels.
"""

import threading
import time
from collections.abc import Callable, Sequence

from engine.control.event import ControlEvent, events_at, factor_before
from engine.control.request import ControlRequest
from engine.control.word import EVALUATE, SNAPSHOT, ControlWords, encode_control, stop_at_once


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
