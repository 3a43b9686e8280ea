"""The lease of a stored run: an object that names the one process that may write it, and until when.

A store has no locks, so the holder renews the lease, and another process may take over once it has expired, or at once
if it can see that the holder has died. Owns the object, its renewal and the messages about the holder. Must not know:
what is stored.
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

from engine.records.stored.state import StoredRunError
from preprocess.quantities import quantity
from preprocess.shards.location import Location, ShardError

LEASE = "writer.json"
LEASE_S = 180.0
"""How long a lease lasts after its last renewal, in seconds; longer if requests may take longer."""
_TRIES = 3


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
        renewed: when it renewed the lease, in seconds since the Unix epoch.
        lasts_s: how long the lease lasts from then on.
    """

    launch: str
    host: str
    pid: int
    process: str
    renewed: float
    lasts_s: float

    @property
    def expires(self) -> float:
        """When the lease expires, in seconds since the Unix epoch."""
        return self.renewed + self.lasts_s

    def has_died(self) -> bool:
        """Return whether the process is known to have died; that of another machine or container is not known."""
        if self.host != os.uname().nodename or self.process.split(" ")[:2] != _machine():
            return False
        return _process_identity(self.pid) != self.process

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}"


class Lease:
    """The permission to write one stored run.

    Args:
        location: the folder of the stored run.
        now: returns the seconds since the Unix epoch.

    Attributes:
        launch: the identifier of this holder.
    """

    def __init__(self, location: Location, *, now: Callable[[], float] = time.time) -> None:
        self._location, self._now = location, now
        self.launch = uuid.uuid4().hex

    def acquire(self, notify: Callable[[str], None]) -> None:
        """Acquire the lease; `notify` is called with a warning if the store cannot exclude a simultaneous start.

        Raises:
            StoredRunInUseError: another process holds the lease.
            ShardError: the store cannot be read or written.
        """
        for _ in range(_TRIES):
            generation = self._free_generation()
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

    def check_free(self) -> None:
        """Raise StoredRunInUseError if another process holds the lease, without acquiring it."""
        self._free_generation()

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

    def _free_generation(self) -> bytes:
        """Return the generation of the lease that may be replaced; raise StoredRunInUseError if another one holds."""
        content, generation = self._location.read_stamped(LEASE)
        if content is not None:
            holder = _parse(content)
            if holder is None or (holder.expires > self._now() and not holder.has_died()):
                raise self._taken(holder)
        return generation

    def _content(self) -> bytes:
        lasts_s = max(LEASE_S, 4 * self._location.timeout_s)
        pid = os.getpid()
        holder = Holder(self.launch, os.uname().nodename, pid, _process_identity(pid), self._now(), lasts_s)
        return json.dumps(asdict(holder), indent=2).encode() + b"\n"

    def _holder(self) -> Holder | None:
        content = self._location.read(LEASE)
        return None if content is None else _parse(content)

    def _is_ours(self) -> bool:
        holder = self._holder()
        return holder is not None and holder.launch == self.launch

    def _taken(self, holder: Holder | None) -> StoredRunInUseError:
        key = f"{self._location.display}{LEASE}"
        if holder is None:
            return StoredRunInUseError(
                f"{key} does not name this process as the one that writes the run: if no other process does, delete "
                "that object"
            )
        left_s = max(1, round(holder.expires - self._now()))
        return StoredRunInUseError(
            f"{self._location.display} is in use by {holder}: wait for it to end, or stop it; if it was killed, try "
            f"again in {quantity(left_s, 'second')}, or delete {key}"
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
