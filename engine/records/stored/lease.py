"""The lease of a stored run: an object that names the one process that may write it.

A store has no locks, so the holder renews the lease, and another process may take over once the lease was not renewed
for some time, or at once if it can see that the holder has died. No decision depends on the date: the clocks of two
machines may differ by hours, and may be set while a run goes on. On the holder's own machine, its monotonic clock says
how old the lease is; a process elsewhere watches by its own clock whether the lease changes. Owns the object, its
renewal and the messages about the holder. Must not know: what is stored.
"""

import json
import math
import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loopfeed.engine.records.stored.state import StoredRunError
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.location import Location, ShardError

LEASE = "writer.json"
LEASE_S = 180.0
"""How long a lease lasts after its last renewal, in seconds; longer if requests may take longer."""
_TRIES = 3
_LOOK_EVERY_S = 2.0
_LONGEST_WATCH_S = 3600.0
"""The longest time for which the lease of a holder elsewhere is watched, in seconds."""


class StoredRunInUseError(StoredRunError):
    """Raised if another process holds the lease of a stored run."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a lease.

    Attributes:
        launch: an identifier of this one holder.
        host: the name of its machine.
        pid: its process ID.
        process: what tells the process from others with the same ID (`_process_identity`).
        renewed: when it renewed the lease, in seconds since the Unix epoch; only earlier releases decide by it.
        lasts_s: how long the lease lasts from then on.
        renewed_clock: the same time by the monotonic clock of its machine, in seconds; NaN in earlier releases.
        renewals: how often it has renewed the lease, so that its content changes each time.
    """

    launch: str
    host: str
    pid: int
    process: str
    renewed: float
    lasts_s: float
    renewed_clock: float = math.nan
    renewals: int = 0

    @property
    def is_here(self) -> bool:
        """Whether it runs or ran on this machine since its start, and in this container."""
        return self.host == os.uname().nodename and self.process.split(" ")[:2] == _machine()

    def left_s(self, clock: float) -> float | None:
        """Return for how many more seconds it holds the lease, at least 0; None if only watching can tell.

        Args:
            clock: the monotonic clock of this machine, in seconds.
        """
        if not self.is_here:
            return None
        if _process_identity(self.pid) != self.process:
            return 0.0
        age_s = clock - self.renewed_clock
        return max(0.0, self.lasts_s - age_s) if age_s >= 0 else None

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}"


class Lease:
    """The permission to write one stored run.

    Args:
        location: the folder of the stored run.
        clock: returns the seconds of the monotonic clock.
        sleep: waits for some seconds.

    Attributes:
        launch: the identifier of this holder.
    """

    def __init__(
        self,
        location: Location,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._location, self._clock, self._sleep = location, clock, sleep
        self._renewals = 0
        self.launch = uuid.uuid4().hex

    def acquire(self, notify: Callable[[str], None]) -> None:
        """Acquire the lease, after it was watched for as long as it lasts if another machine may hold it.

        Args:
            notify: called before the lease is watched, and with a warning if the store cannot exclude a simultaneous
                start.

        Raises:
            StoredRunInUseError: another process holds the lease.
            ShardError: the store cannot be read or written.
        """
        for _ in range(_TRIES):
            generation = self._free_generation(notify)
            if self._location.write_if(LEASE, self._content(), generation) is not None or self._is_ours():
                break
        else:
            holder = self._holder()
            if holder is None:
                # TensorStore takes a bucket that does not exist for a condition that failed; a listing names the fault.
                self._location.list_keys(LEASE)
            raise self._taken(holder)
        # A store that ignores conditions replaces the lease by itself.
        if self._location.is_remote and not self._location.refuses_to_replace(LEASE, self._content()):
            notify(
                f"warning: the store of {self._location.display} ignores conditional writes, so it cannot exclude two "
                "runs that are started here at the same moment: start only one"
            )

    def check_free(self, notify: Callable[[str], None]) -> None:
        """Raise StoredRunInUseError if another process holds the lease, without acquiring it; it waits as `acquire`."""
        self._free_generation(notify)

    def renew(self) -> None:
        """Renew the lease.

        Raises:
            StoredRunInUseError: another process holds it.
            ShardError: the store cannot be read or written.
        """
        for _ in range(_TRIES):
            content, generation = self._location.read_stamped(LEASE)
            holder = None if content is None else _parse(content)
            if holder is None or holder.launch != self.launch:
                raise self._taken(holder)
            if self._location.write_if(LEASE, self._content(), generation) is not None:
                return
        raise self._taken(self._holder())

    def release(self) -> None:
        """Delete the lease if it is still held; a lease that cannot be deleted expires."""
        with suppress(ShardError):
            if self._is_ours():
                self._location.delete(LEASE)

    def _free_generation(self, notify: Callable[[str], None]) -> bytes:
        """Return the generation of the lease that may be replaced; raise StoredRunInUseError if it is held."""
        content, generation = self._location.read_stamped(LEASE)
        if content is None:
            return generation
        holder = _parse(content)
        left_s = None if holder is None else holder.left_s(self._clock())
        if holder is None or left_s or holder.lasts_s > _LONGEST_WATCH_S:
            raise self._taken(holder, left_s)
        return generation if left_s == 0 else self._watch(content, holder, notify)

    def _watch(self, content: bytes, holder: Holder, notify: Callable[[str], None]) -> bytes:
        """Return the generation of a lease that does not change for as long as it lasts, by the clock of this machine.

        A process that holds it renews it every few seconds.
        """
        stop = self._clock() + holder.lasts_s
        place, limit = self._location.display, quantity(round(holder.lasts_s), "second")
        notify(
            f"{place} was in use by {holder}: waiting up to {limit} to see whether it still is; if it was killed, you "
            f"can delete {place}{LEASE} instead"
        )
        while True:
            # The clock is read before the lease.
            is_over = self._clock() >= stop
            found, generation = self._location.read_stamped(LEASE)
            if found is not None and found != content:
                raise self._taken(_parse(found))
            if found is None or is_over:
                return generation
            self._sleep(_LOOK_EVERY_S)

    def _content(self) -> bytes:
        lasts_s = max(LEASE_S, 4 * self._location.timeout_s)
        pid = os.getpid()
        self._renewals += 1
        holder = Holder(
            launch=self.launch,
            host=os.uname().nodename,
            pid=pid,
            process=_process_identity(pid),
            renewed=time.time(),
            lasts_s=lasts_s,
            renewed_clock=self._clock(),
            renewals=self._renewals,
        )
        return json.dumps(asdict(holder), indent=2).encode() + b"\n"

    def _holder(self) -> Holder | None:
        content = self._location.read(LEASE)
        return None if content is None else _parse(content)

    def _is_ours(self) -> bool:
        holder = self._holder()
        return holder is not None and holder.launch == self.launch

    def _taken(self, holder: Holder | None, left_s: float | None = None) -> StoredRunInUseError:
        key = f"{self._location.display}{LEASE}"
        if holder is None:
            return StoredRunInUseError(
                f"{key} does not name this process as the one that writes the run: if no other process does, delete "
                "that object"
            )
        again = "" if left_s is None else f"try again in {quantity(max(1, round(left_s)), 'second')}, or "
        return StoredRunInUseError(
            f"{self._location.display} is in use by {holder}: wait for it to end, or stop it; if it was killed, "
            f"{again}delete {key}"
        )


def _parse(content: bytes) -> Holder | None:
    """Return the holder that a lease names, None if it has another form."""
    try:
        values: dict[str, Any] = json.loads(content)
        if not all(map(math.isfinite, (values["renewed"], values["lasts_s"]))):
            return None
        return Holder(
            str(values["launch"]),
            str(values["host"]),
            int(values["pid"]),
            str(values["process"]),
            float(values["renewed"]),
            float(values["lasts_s"]),
            float(values.get("renewed_clock", math.nan)),
            int(values.get("renewals", 0)),
        )
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None


def _machine() -> list[str]:
    """Return what tells this boot of this machine, and this container, from others with the same host name."""
    found = ["-", "-"]
    with suppress(OSError):
        found = [
            Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
            str(Path("/proc/self/ns/pid").readlink()),
        ]
    return found


def _process_identity(pid: int) -> str:
    """Return the machine and the start time of a process, which differ if its ID was given to another; "" if it ended.

    Outside of Linux, a process ID that is in use counts as the same process.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except (PermissionError, OverflowError):
        pass  # a process of another user
    begun = "-"
    with suppress(OSError, IndexError):
        # The name of the program, in parentheses, may contain anything.
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        if status[0] in "ZX":  # killed, but its parent has not asked for its exit code yet
            return ""
        begun = status[19]
    return " ".join([*_machine(), begun])
