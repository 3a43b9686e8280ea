"""Packs splits on the workers of a Dask cluster: a block is a task, and this process finishes each split.

The plan and the journal are those of a pack in one part (`loopfeed.preprocess.packing.parts`), so an interrupted pack
continues here or on one machine. A task of a lost worker is given to another one. Needs the package `distributed`.
"""

from __future__ import annotations

import queue
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from loopfeed.preprocess.packing.dask_request import (
    BlockResult,
    BlockTask,
    PackRequest,
    describe_versions,
    installed_versions,
)
from loopfeed.preprocess.packing.owner import PartOwner
from loopfeed.preprocess.packing.pack import PackProgress, PackResult
from loopfeed.preprocess.packing.part import Part
from loopfeed.preprocess.packing.parts import OnProgress, SplitJob, finish_job, open_job
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.location import Location, ShardError

if TYPE_CHECKING:
    from distributed import Client, Future

    from loopfeed.preprocess.packing.plan import PackSettings
    from loopfeed.preprocess.shards.targets import SplitTargets
    from loopfeed.preprocess.sources.listing import SourceSplit

CONNECT_TIMEOUT_S = 15.0
"""Time limit for connecting to the scheduler, in seconds."""

_CLOSE_TIMEOUT_S = 5.0
_RESULT_TIMEOUT_S = 5.0
_MOST_LOSSES = 20
_LOOK_EVERY_S = 5.0
_WORKER_TIMEOUT_S = 600.0
_RETRIES = 2

# A text, because a function of Loopfeed could not be sent to a worker without Loopfeed.
_VERSIONS = (
    "{each.metadata['Name'].lower(): each.version"
    " for each in reversed(list(__import__('importlib.metadata').metadata.distributions()))"
    " if (each.metadata['Name'] or '').lower() in %r}"
)


class DaskCluster:
    """A context manager that holds a connection to a Dask scheduler.

    Args:
        address: the address of the scheduler.
        notify: called with messages about the workers.

    Raises:
        ShardError: Dask is not installed, the scheduler can't be reached within `CONNECT_TIMEOUT_S`, or a worker lacks
            Loopfeed or has other versions.
    """

    def __init__(self, address: str, notify: Callable[[str], None]) -> None:
        self._address, self._notify = address, notify
        self._plugin: str | None = None

    def __enter__(self) -> Self:
        self._client = _connect(self._address)
        try:
            self._check_workers()
        except BaseException:
            self._client.close(timeout=_CLOSE_TIMEOUT_S)
            raise
        return self

    def send_request(self, request: PackRequest) -> None:
        """Send what they need to the workers, also to those that come later; call this once, before `pack_split`."""
        from loopfeed.preprocess.packing.dask_worker import PackPlugin

        self._plugin = f"loopfeed-{uuid.uuid4().hex}"
        self._client.register_plugin(PackPlugin(request, self._plugin))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._plugin is not None and self._client.status == "running":
                self._client.unregister_worker_plugin(self._plugin)
        except (OSError, RuntimeError, TimeoutError, KeyError, ValueError):
            pass  # the scheduler or a worker has just gone, and its plugin with it
        finally:
            self._client.close(timeout=_CLOSE_TIMEOUT_S)

    def pack_split(
        self,
        source: SourceSplit,
        location: Location,
        settings: PackSettings,
        *,
        on_progress: OnProgress,
        targets: SplitTargets | None = None,
    ) -> PackResult:
        """Pack ``source`` into the folder ``location`` on the workers. The arguments are those of `pack_split`.

        Raises:
            ShardError: as `pack_part`, a worker reports an error, or the scheduler or all workers are lost. Finished
                shards are kept, and the next call continues after them.
            KeyboardInterrupt: re-raised; workers stop within seconds.
        """
        assert self._plugin is not None
        job = open_job(source, location, settings, targets)
        if job.manifest() is not None:
            return finish_job(job)
        job.begin(1)
        with PartOwner(location, Part(1, 1), notify=self._notify) as owner:
            recorded = job.recorded()
            if job.manifest() is None:
                tasks = [
                    BlockTask(self._plugin, source.name, block, owner.run, job.plan, job.settings.holdout_rule)
                    for block in range(job.num_blocks)
                    if block not in recorded
                ]
                done = sum(len(job.block_range(block)) for block in recorded)
                failed = sum(len(record.failures) for record in recorded.values())
                self._run(job, tasks, PackProgress(done, len(source), failed), on_progress)
        return finish_job(job, on_progress)

    def _run(self, job: SplitJob, tasks: Sequence[BlockTask], progress: PackProgress, on_progress: OnProgress) -> None:
        ended: queue.SimpleQueue[Future] = queue.SimpleQueue()
        on_progress(progress)
        submitted = self._submit(tasks, ended)
        num_losses: Counter[int] = Counter()
        try:
            while submitted:
                future = self._next(ended)
                result = self._result(future) or _recorded(job, submitted[future].block)
                task = submitted.pop(future)
                if result is None:
                    num_losses[task.block] += 1
                    submitted |= self._submit_again(future, task, num_losses[task.block], ended)
                    continue
                progress = PackProgress(
                    progress.done + result.num_images, progress.total, progress.failed + result.num_failures
                )
                on_progress(progress)
        except BaseException:
            if self._client.status == "running":
                self._client.cancel(list(submitted))
            raise

    def _submit(
        self, tasks: Sequence[BlockTask], ended: queue.SimpleQueue[Future], attempt: int = 0
    ) -> dict[Future, BlockTask]:
        """Submit tasks, whose futures are put into ``ended`` when they end."""
        from loopfeed.preprocess.packing.dask_worker import pack_block

        if not tasks:
            return {}
        suffix = f"-again{attempt}" if attempt else ""
        keys = [f"{self._plugin}-{task.split}-{task.block}{suffix}" for task in tasks]
        futures = self._client.map(pack_block, tasks, key=keys, retries=_RETRIES, pure=False)
        for future in futures:
            future.add_done_callback(ended.put)
        return dict(zip(futures, tasks, strict=True))

    def _submit_again(
        self, future: Future, task: BlockTask, num_losses: int, ended: queue.SimpleQueue[Future]
    ) -> dict[Future, BlockTask]:
        """Submit a task whose result was lost; if the scheduler has done so already, wait for that.

        Raises:
            ShardError: it was lost more than `_MOST_LOSSES` times.
        """
        if num_losses > _MOST_LOSSES:
            raise ShardError(
                f"the result of shard {task.block} of {task.split} was lost {num_losses} times; check the workers and "
                "their connections, then run the same command again to continue"
            )
        if future.status == "cancelled":
            return self._submit([task], ended, num_losses)
        future.add_done_callback(ended.put)
        return {future: task}

    def _next(self, ended: queue.SimpleQueue[Future]) -> Future:
        """Return the next task that ended, and look meanwhile whether there are workers."""
        lonely_s: float | None = None
        while True:
            try:
                return ended.get(timeout=_LOOK_EVERY_S)
            except queue.Empty:
                pass
            if self._client.status != "running":
                raise self._lost_scheduler()
            if self._client.scheduler_info()["workers"]:
                lonely_s = None
            elif lonely_s is None:
                lonely_s = time.monotonic()
                self._notify(f"No worker is connected to {self._address}; waiting for one ...")
            elif time.monotonic() - lonely_s > _WORKER_TIMEOUT_S:
                raise ShardError(
                    f"no worker was connected to {self._address} for {_WORKER_TIMEOUT_S / 60:.0f} minutes; start "
                    "workers, then run the same command again to continue"
                )

    def _result(self, future: Future) -> BlockResult | None:
        """Return the result of a task that ended, or None if it was lost with its worker.

        Raises:
            ShardError: the task failed, or the connection to the scheduler was lost.
        """
        if self._client.status != "running":
            raise self._lost_scheduler()
        from distributed import KilledWorker
        from distributed.client import FutureCancelledError

        try:
            result: BlockResult = future.result(timeout=_RESULT_TIMEOUT_S)
        except KilledWorker as error:
            raise ShardError(
                f"{error.task} was lost with its worker {error.allowed_failures + 1} times; the workers may need more "
                "memory, or fewer threads. Run the same command again to continue"
            ) from error
        except ImportError as error:
            raise ShardError(
                f"a worker of {self._address} cannot load Loopfeed ({error}); install the same version on all workers"
            ) from error
        except (FutureCancelledError, OSError, ValueError) as error:
            if future.status == "error":
                raise ShardError(f"a worker of {self._address} failed {_RETRIES + 1} times: {error}") from error
            if self._client.status != "running" or getattr(error, "reason", None) == "scheduler-connection-lost":
                raise self._lost_scheduler() from error
            return None
        if result.error is not None:
            raise ShardError(result.error)
        return result

    def _check_workers(self) -> None:
        """Raise ShardError if a worker has no Loopfeed or other versions."""
        wanted = installed_versions()
        found: dict[str, Any] = self._client.run(eval, _VERSIONS % (tuple(wanted),), on_error="return")
        for worker, versions in found.items():
            if isinstance(versions, BaseException):
                raise ShardError(f"worker {worker} does not answer ({versions}); restart it")
            if versions != wanted:
                raise ShardError(
                    f"worker {worker} has {describe_versions(versions, wanted)}; install the same versions on all "
                    "machines"
                )
        if found:
            self._notify(f"Packing on {quantity(len(found), 'worker')} of {self._address}.")
        else:
            self._notify(f"No worker is connected to {self._address} yet.")

    def _lost_scheduler(self) -> ShardError:
        return ShardError(
            f"the connection to the scheduler {self._address} was lost; run the same command again to continue"
        )


def _recorded(job: SplitJob, block: int) -> BlockResult | None:
    """Return the result of a block from its record in the journal, or None if the block is not packed."""
    record = job.recorded([block]).get(block)
    return None if record is None else BlockResult(record.stop - record.start, len(record.failures))


def _connect(address: str) -> Client:
    try:
        from distributed import Client
    except ImportError as error:
        raise ShardError(
            "--executor dask needs the package distributed; install it with pip install 'loopfeed[distributed]'"
        ) from error
    try:
        return Client(address, timeout=CONNECT_TIMEOUT_S, set_as_default=False)
    except (OSError, ValueError, TimeoutError, RuntimeError) as error:
        reason = (str(error).splitlines() or ["no response"])[0]
        raise ShardError(
            f"the Dask scheduler {address} cannot be reached ({reason}); "
            "check the address, such as tcp://node1:8786, and that the scheduler is running"
        ) from error
