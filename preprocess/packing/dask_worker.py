"""The part of a pack that runs on a Dask worker: it opens the source once and packs one block after another."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from distributed import WorkerPlugin, get_worker

from loopfeed.preprocess.packing.dask_request import (
    BlockResult,
    BlockTask,
    PackRequest,
    describe_versions,
    installed_versions,
)
from loopfeed.preprocess.packing.owner import PartOwner
from loopfeed.preprocess.packing.pack import PackProgress
from loopfeed.preprocess.packing.part import Part
from loopfeed.preprocess.packing.parts import SplitJob, open_job, pack_blocks
from loopfeed.preprocess.packing.pipeline import DecodeBudgets, decode_budgets
from loopfeed.preprocess.packing.plan import describe_differences
from loopfeed.preprocess.shards.location import ShardError
from loopfeed.preprocess.sources.open_source import Source, open_source

if TYPE_CHECKING:
    from distributed import Worker

_CHECK_EVERY_S = 2.0
"""Interval between checks whether the pack was stopped, in seconds."""


class PackPlugin(WorkerPlugin):
    """Keeps the source open on a worker, for all tasks of a pack."""

    def __init__(self, request: PackRequest, name: str) -> None:
        self._request, self.name = request, name

    def setup(self, worker: Worker) -> None:
        """Prepare for tasks. The source is opened by the first of them, because listing it may take a minute."""
        self._worker = worker.address
        self._lock = threading.Lock()
        self._source: Source | None = None
        self._jobs: dict[str, SplitJob] = {}
        self._budgets: DecodeBudgets = decode_budgets()

    def teardown(self, worker: Worker) -> None:  # noqa: ARG002 - Dask's signature
        """Close the source."""
        with self._lock:
            if self._source is not None:
                self._source.close()
                self._source = None

    def pack(self, task: BlockTask) -> BlockResult:
        """Pack a block, unless it is packed already."""
        with self._lock:
            if task.split not in self._jobs:
                self._jobs[task.split] = self._open(task)
            job = self._jobs[task.split]
        owner = PartOwner(job.location, Part(1, 1), task.run)
        checked_s = time.monotonic()
        result = BlockResult()

        def watch(state: PackProgress) -> None:
            nonlocal checked_s, result
            result = BlockResult(state.done, state.failed)
            if time.monotonic() - checked_s > _CHECK_EVERY_S:
                owner.check()
                checked_s = time.monotonic()

        pack_blocks(job, [task.block], owner, watch, self._budgets)
        return result

    def _open(self, task: BlockTask) -> SplitJob:
        request = self._request
        if (found := installed_versions()) != request.versions:
            raise ShardError(f"it has {describe_versions(found, request.versions)}")
        if self._source is None:
            self._source = open_source(request.source, **request.options)
        split = self._source.splits[task.split]
        folder = request.open_dest().child(task.split)
        settings = request.settings_of(task.holdout_rule, task.plan["shard_images"])
        job = open_job(split, folder, settings, self._source.targets.get(task.split))
        differences = describe_differences(task.plan, job.plan)
        if differences:
            raise ShardError(
                f"it finds another source or other versions than this machine: {'; '.join(differences)}; let all "
                "machines see the same files"
            )
        return job


def pack_block(task: BlockTask) -> BlockResult:
    """Pack a block on this worker.

    An error that another worker may not have, such as one of a file system, is raised, so that Dask tries again; any
    other is part of the result.
    """
    worker = get_worker()
    plugin = worker.plugins[task.plugin]
    try:
        return plugin.pack(task)
    except ValueError as error:
        if isinstance(error.__cause__, (OSError, RuntimeError)):
            raise
        return BlockResult(error=f"worker {worker.address}: {error}")
