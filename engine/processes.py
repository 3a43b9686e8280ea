"""The processes that train together: how this one joins the others, on this machine or on several.

The runtime is jax's own. Must be called before anything else uses jax.
"""

import atexit
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from loopfeed.engine.peers import Peers
from loopfeed.engine.xla_threads import fitting_threads
from loopfeed.preprocess.workers import call_within

PEER_TIMEOUT_S = 60.0
JOIN_TIMEOUT_S = 120.0
_ASK_EVERY_S = 0.5
_EXCHANGED = "loopfeed/exchanged"
# Opening large data on a slow storage takes minutes; a process that dies is noticed by the watch.
_EXCHANGE_LIMIT_S = 600
# All have come to the end: a second is enough.
_PART_S = 5.0


@dataclass(frozen=True)
class ThisProcess:
    """The number of this process, from 0, and how many there are."""

    index: int
    count: int


def this_process() -> ThisProcess:
    """Return the number of this process and of all processes that train together, (0, 1) without others.

    Example:
        >>> this_process()
        ThisProcess(index=0, count=1)
    """
    import jax

    with fitting_threads():
        return ThisProcess(jax.process_index(), jax.process_count())


def join_processes(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    peer_timeout_s: float = PEER_TIMEOUT_S,
    join_timeout_s: float = JOIN_TIMEOUT_S,
) -> None:
    """Join the other processes of a run; call it in each of them, before jax is used for anything else.

    From then on a thread watches the others. If one fails, dies or does not answer, it writes to stderr which one that
    was, and ends this process with exit code 1.

    Args:
        coordinator: address HOST:PORT of the first process; None lets jax find it, as Slurm, Open MPI, Kubernetes or a
            TPU pod describe it to their processes.
        num_processes: number of processes; None as above.
        process_id: number of this process, from 0; None as above.
        peer_timeout_s: seconds after which a process that no longer answers ends the others.
        join_timeout_s: seconds to wait for the others at the start.

    Raises:
        ValueError: the address has another form, or is given without the two numbers.
        RuntimeError: the others cannot be reached in time, or jax is already in use.
    """
    check_address(coordinator, num_processes, process_id)
    peers = Peers(peer_timeout_s, _end)
    join_as(peers, coordinator, num_processes, process_id, 4 * peer_timeout_s, join_timeout_s)
    atexit.register(peers.interpreter_ends)


def _end(message: str) -> NoReturn:
    sys.stderr.write(f"loopfeed: {message}\n")
    sys.stderr.flush()
    os._exit(1)


def check_address(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Raise ValueError if the address of the coordinator has another form or is given without the two numbers."""
    given = {"--coordinator": coordinator, "--num-processes": num_processes, "--process-id": process_id}
    missing = [option for option, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        raise ValueError(
            "the coordinator's address, the number of processes and the number of this process belong together, but "
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing: give all three, or none of them"
        )
    if coordinator is not None and not re.fullmatch("[0-9]{1,5}", coordinator.rpartition(":")[2]):
        raise ValueError(f"the coordinator must be HOST:PORT, got {coordinator!r}: give both")
    if num_processes is not None and process_id is not None and not 0 <= process_id < num_processes:
        raise ValueError(f"the number of this process must lie in 0 … {num_processes - 1}, got {process_id}")


def join_as(
    peers: Peers,
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    runtime_timeout_s: float,
    join_timeout_s: float,
) -> None:
    """Join the other processes of a run with these peers; arguments and errors are those of `join_processes`.

    Args:
        peers: this process's part in the run.
        coordinator, num_processes, process_id, join_timeout_s: as `join_processes` takes them.
        runtime_timeout_s: seconds of silence after which the runtime itself aborts the others, without a clear message.
    """
    import jax

    # Its service would take SIGTERM, which stops a run cleanly.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if coordinator is not None and process_id:
        _wait_for(coordinator, join_timeout_s)
    limit_s = max(1, round(runtime_timeout_s))
    # With an address, jax would still look for pods of Kubernetes, for which it needs a package and permissions.
    is_sought = coordinator is None or "KUBERNETES_SERVICE_HOST" not in os.environ
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            cluster_detection_method=None if is_sought else "deactivate",
            initialization_timeout=max(1, round(join_timeout_s)),
            heartbeat_timeout_seconds=limit_s,
            shutdown_timeout_seconds=limit_s,
        )
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(
            f"the coordinator {coordinator or 'of this cluster'} cannot be reached, or not all processes came, within "
            f"{join_timeout_s:g} s: start all of them, and check the address and the firewall"
        ) from error
    except ValueError as error:
        raise ValueError(
            "jax finds no job of Slurm, Open MPI, Kubernetes or a TPU pod here: give the coordinator HOST:PORT, the "
            "number of processes (--num-processes) and the number of this one (--process-id)"
        ) from error

    # The client is not public, but the only access to the store of keys and values; Orbax uses it in the same way.
    from jax._src.distributed import global_state as joined

    peers.join(joined.client, joined.process_id, joined.num_processes, joined.coordinator_address or "")


def _wait_for(coordinator: str, limit_s: float) -> None:
    """Wait until the coordinator accepts connections; jax would abort this process if it did not come in time."""
    host, _, port = coordinator.rpartition(":")
    deadline = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_ASK_EVERY_S).close()
        except OSError as error:
            if time.monotonic() >= deadline:
                raise RuntimeError(
                    f"the coordinator {coordinator} cannot be reached within {limit_s:g} s "
                    f"({error.strerror or error}): start the first process, and check the address and the firewall"
                ) from error
            time.sleep(_ASK_EVERY_S)
        else:
            return


def wait_for_processes(place: str) -> None:
    """Wait until all processes have come to a place of this name; does nothing without others."""
    if this_process().count > 1:
        # Imported here, because a run of one process does not need it.
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(place)


def exchange(subject: str, text: str) -> list[str]:
    """Return the texts that all processes give about a subject, in their order; only this one's without others.

    All processes must call it equally often, and in the same order.

    Raises:
        RuntimeError: another process does not come here in time.
    """
    here = this_process()
    if here.count == 1:
        return [text]
    from jax._src.distributed import global_state as joined

    client: Any = joined.client
    folder = f"{_EXCHANGED}/{subject}"
    # A program can train more than once.
    number = client.key_value_increment(f"{folder}/count/{here.index}", 1)
    client.key_value_set(f"{folder}/{number}/{here.index}", text)
    try:
        return [
            str(client.blocking_key_value_get(f"{folder}/{number}/{other}", _EXCHANGE_LIMIT_S * 1000))
            for other in range(here.count)
        ]
    except Exception as error:
        raise RuntimeError(
            f"the {subject} of another process did not arrive within {_EXCHANGE_LIMIT_S} s ({error}): check the "
            "messages of the other processes"
        ) from error


def leave_processes(peers: Peers) -> bool:
    """Wait until all processes have come here, and part from them; does nothing without others.

    A process that ended without it would be taken for one that died.

    Returns:
        Whether all have parted in time. If not, jax waits for one that is gone, and this process must end at once.
    """
    if this_process().count == 1:
        return True
    import jax

    peers.leave()
    # All are done: what the runtime says about the end of another decides nothing.
    return call_within(_PART_S, _ignoring_runtime(jax.distributed.shutdown), "parting")


def _ignoring_runtime(function: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        with suppress(RuntimeError):
            function()

    return call
