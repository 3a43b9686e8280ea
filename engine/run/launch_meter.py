"""Gathers the spans and counts of the parts of a launch into its record, and says who waits for whom.

Only reads the parts, from any thread, while they work: a number may be a step older than another.
"""

import resource
import sys
from contextlib import suppress
from dataclasses import replace
from time import perf_counter

import jax

from loopfeed.engine.compilation.ahead_of_time import Compiled
from loopfeed.engine.feed.feed_meter import MOST_STALLS, FeedMeter
from loopfeed.engine.processes import this_process
from loopfeed.engine.program.kernels import uses_amx_in_bfloat16
from loopfeed.engine.records.machine import Topology
from loopfeed.engine.records.run_folder import recorded_versions
from loopfeed.engine.records.snapshot_writer import SnapshotWriter
from loopfeed.engine.run.descriptions import topology_of
from loopfeed.engine.run.run import Run
from loopfeed.engine.runtime.core_use import read_core_use
from loopfeed.engine.runtime.goodput import Rollback, add_up, compilations_of, parts_of, without_details
from loopfeed.engine.runtime.monitor import describe_span
from loopfeed.engine.runtime.record import (
    CoreUse,
    Goodput,
    LaunchRuntime,
    LaunchState,
    MemoryPeaks,
    Phase,
    Pulls,
    Pushes,
    ReaderTimes,
    Ring,
    RingSample,
    RuntimeReport,
    SlowOperation,
    SnapshotTimes,
    Stall,
)
from loopfeed.engine.runtime.slow_operations import find_slow_operations
from loopfeed.engine.runtime.verdict import Circumstances, judge
from loopfeed.engine.spans import (
    CLOSE,
    COMPILING,
    END,
    EVALUATION,
    LOOP,
    PUSH,
    SINK,
    SNAPSHOT,
    SNAPSHOT_PUSH,
    STEP_WAIT,
)
from loopfeed.preprocess.read_meter import AWAIT, CHECK, COPY, OPEN, READ, SOURCE, STAGES, Reading, ReadMeter

# Launches of at least so long a loop are searched for slow operations without being asked to.
_WORTH_S = 120.0


class LaunchMeter:
    """What one launch does.

    Args:
        launch: the launch.
        compiled: its program.
        snapshots: writes its snapshots; None if it takes none.
        rollback: the earlier launches of the run, and what this one takes back.
    """

    def __init__(
        self,
        launch: Run,
        compiled: Compiled,
        snapshots: SnapshotWriter | None = None,
        rollback: Rollback | None = None,
    ) -> None:
        self._launch, self._spans, self._compiled, self._snapshots = launch, launch.spans, compiled, snapshots
        self._rollback = rollback or Rollback()
        self._versions = recorded_versions()
        self._slow: tuple[SlowOperation, ...] = ()
        self._feeders = [each.feeder for each in launch.infeeds]
        self._training, *evaluation = self._feeders
        self._meters: dict[Phase, FeedMeter] = {
            "train": self._training.meter,
            "evaluation": evaluation[0].meter if evaluation else FeedMeter(ReadMeter()),
        }
        self._num_pulled, self._pulled_at = 0, 0.0
        # Of several processes, the others may be those of the run.
        self._cores = read_core_use() if this_process().count == 1 else None

    def sample_ring(self) -> RingSample | None:
        """Return how many training batches are ready; None unless the loop runs and will pull more."""
        feeder = self._training
        num_batches = feeder.stop_index - feeder.start_index
        if self._spans[LOOP].since is None or feeder.num_taken >= num_batches:
            return None
        return RingSample(self._spans.total_s, feeder.num_ready)

    def report(self, state: LaunchState, samples: tuple[RingSample, ...]) -> RuntimeReport:
        """Return what the run did so far, of which this launch is the last."""
        launches = without_details((*self._rollback.launches, self._gather(state, samples)))
        return RuntimeReport(launches, add_up(launches))

    def _gather(self, state: LaunchState, samples: tuple[RingSample, ...]) -> LaunchRuntime:
        launch, spans = self._launch, self._spans
        if state != "running":
            self._find_slow_operations()
        found = LaunchRuntime(
            started=spans.started,
            # By a clock that nobody sets: the parts of the goodput add up to it.
            ended=spans.started + spans.total_s,
            start_step=launch.start.step,
            end_step=launch.start.step + launch.stream.num_losses,
            state=state,
            versions=self._versions,
            devices=describe_devices(topology_of(launch)),
            lost_steps=self._rollback.num_steps,
            lost_s=self._rollback.seconds,
            programs=tuple(launch.programs),
            compilations=compilations_of(spans),
            pulls=self._pulls(),
            pushes=self._pushes(),
            ring=Ring(self._training.depth, samples),
            stalls=self._stalls(),
            reader=self._reader(),
            snapshots=self._snapshot_times(),
            memory=self._memory(),
            slow_operations=self._slow,
            goodput=self._goodput(),
            cores=None if state == "running" else self._core_use(),
            stages=tuple(launch.stream.stages.values()) if launch.config.stages else (),
        )
        return found if state == "running" else replace(found, verdict=judge(found, self._circumstances()))

    def continues(self) -> bool:
        """Return whether the loop goes on: it has neither ended nor been asked to."""
        launch = self._launch
        has_failed = any(each.failure is not None for each in launch.infeeds)
        return not (self._spans[LOOP].count or launch.board.is_stop_requested() or has_failed)

    def progress(self) -> object:
        """Return a value that changes with every step, batch and snapshot on the disk; called several times a second.

        A push without a step, as while gradients are accumulated, is no progress.
        """
        stream, snapshots, spans = self._launch.stream, self._snapshots, self._spans
        num_written = 0 if snapshots is None else snapshots.writes.count
        # After the loop, the sinks take what is queued.
        num_taken = stream.num_taken if spans[LOOP].count else 0
        num_pulled = self._training.num_taken
        if num_pulled != self._num_pulled:
            self._num_pulled, self._pulled_at = num_pulled, perf_counter()
        num_ended = spans[EVALUATION].count + spans[SNAPSHOT].count
        return self._launch.outfeed.step, num_ended, num_pulled, stream.num_evaluation_pulls, num_written, num_taken

    def describe(self) -> str:
        """Return who waits for whom."""
        push, stream = self._spans[PUSH], self._launch.stream
        if self._spans[LOOP].count:
            return self._describe_end()
        if (since := push.since) is not None:
            if stream.blocked_by is not None:
                return f"the loop waits until the sink {stream.blocked_by} accepts losses"
            return f"the outfeed has been receiving for {describe_span(perf_counter() - since)}"
        # On a GPU, a reading thread may also wait for a batch that is far ahead of the loop.
        is_ahead = self._launch.transport.runs_ahead and self._training.num_ready > 0
        for phase, meter in self._meters.items():
            if (waiting := meter.waiting) is not None and not is_ahead:
                number = f"step {self._step_of(waiting.batch_index)}" if phase == "train" else "an evaluation"
                reading = meter.busy(waiting.batch_index)
                what = ", which no thread is reading" if reading is None else f": {_describe_reading(meter, reading)}"
                return f"the loop waits for the batch of {number}{what}"
        # Where the host runs ahead, the device may not have got the last batch yet.
        pushed_at = push.ended_at or self._spans[LOOP].since or perf_counter()
        since = pushed_at if self._launch.transport.runs_ahead else max(pushed_at, self._pulled_at)
        return f"the device has been computing {self._steps_now()} for {describe_span(perf_counter() - since)}" + (
            ", or waits for another process" if this_process().count > 1 else ""
        )

    def _steps_now(self) -> str:
        """Return which steps the loop makes now: of those that are pulled together, none ends before the others."""
        first, config = self._launch.outfeed.step + 1, self._launch.config
        together = max(1, self._launch.infeed.num_together // config.accumulate_steps)
        last = min(first + together - 1, config.steps)
        return f"step {first}" if last <= first else f"steps {first} to {last} (--chunk)"

    def _describe_end(self) -> str:
        if self._launch.profiling.is_collecting:
            return "the steps are done, and the run waits until the profile is collected"
        if unfinished := self._launch.stream.unfinished():
            return f"the steps are done, and the run waits until the sink {unfinished[0]} has accepted all losses"
        step = None if self._snapshots is None else self._snapshots.unwritten_step
        if step is not None:
            return f"the steps are done, and the run waits until the snapshot of step {step} is on the disk"
        return "the steps are done, and the run is ending"

    def _step_of(self, batch_index: int) -> int:
        return batch_index // self._launch.config.accumulate_steps + 1

    def _pulls(self) -> Pulls:
        feeder, meter, evaluation = self._training, self._meters["train"], self._meters["evaluation"]
        return Pulls(
            count=feeder.num_taken,
            bytes=feeder.bytes_taken,
            waits=self._spans[STEP_WAIT].summary(),
            copy_s=meter.copy_s,
            wait_s_by_stage=_by_stage(meter),
            evaluation_count=sum(each.num_taken for each in self._feeders[1:]),
            evaluation_wait_s=evaluation.wait_s,
            evaluation_wait_s_by_stage=_by_stage(evaluation),
            first_wait_s=meter.first_wait_s + evaluation.first_wait_s,
        )

    def _pushes(self) -> Pushes:
        times, blocked = self._spans[PUSH].summary(), self._spans.seconds_of(SINK)
        return Pushes(
            count=times.count,
            bytes=self._launch.outfeed.num_bytes,
            times=times,
            blocked_s=sum(blocked.values()),
            blocked_by=max(blocked, key=blocked.__getitem__) if blocked else None,
        )

    def _stalls(self) -> tuple[Stall, ...]:
        found = [
            Stall(step_of(stall.batch_index), stall.wait_s, stall.stage, meter.readings.name(stall.file), phase)
            for (phase, meter), step_of in zip(self._meters.items(), (self._step_of, self._evaluated_step), strict=True)
            for stall in meter.stalls()
        ]
        return tuple(sorted(found, key=lambda each: each.wait_s, reverse=True)[:MOST_STALLS])

    def _evaluated_step(self, batch_index: int) -> int:
        """Return the step after which the evaluation of a batch took place."""
        launch, evaluated = self._launch, self._launch.data.evaluation
        assert evaluated is not None
        number = batch_index // evaluated.num_batches - launch.start.num_evaluations
        done = launch.stream.evaluations
        return done[number].step if 0 <= number < len(done) else launch.outfeed.step

    def _reader(self) -> ReaderTimes:
        # Two feeders may read the same split.
        meters = {id(each.readings): each.readings for each in self._meters.values()}
        readings = [each for meter in meters.values() for each in meter.all()]
        totals = [sum(each.totals[stage] for each in readings) for stage in range(AWAIT)]
        return ReaderTimes(
            source_s=totals[SOURCE],
            open_s=totals[OPEN],
            read_s=totals[READ],
            check_s=totals[CHECK],
            copy_s=totals[COPY],
            # A user's source does not say what it reads.
            bytes=sum(each.num_bytes for each in readings) or sum(each.bytes_taken for each in self._feeders),
            num_threads=self._training.num_threads,
        )

    def _snapshot_times(self) -> SnapshotTimes:
        snapshots, spans = self._snapshots, self._spans
        if snapshots is None:
            return SnapshotTimes()
        return SnapshotTimes(
            count=snapshots.writes.count,
            num_skipped=snapshots.num_skipped,
            bytes=snapshots.num_bytes,
            push_s=spans[SNAPSHOT_PUSH].total_s,
            writes=snapshots.writes.summary(),
            end_wait_s=spans[END].total_s,
        )

    def _memory(self) -> MemoryPeaks:
        # In KiB on Linux, in bytes on macOS.
        unit = 1 if sys.platform == "darwin" else 1024
        device = None
        with suppress(Exception):  # what a backend raises that does not count
            device = (self._launch.team.own[0].memory_stats() or {}).get("peak_bytes_in_use")
        return MemoryPeaks(
            host=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
            device=device,
            program=self._compiled.peak_bytes or None,
        )

    def _goodput(self) -> Goodput:
        spans = self._spans
        # On a GPU, a reading thread waits for a batch, not the loop.
        is_known = not self._launch.transport.runs_ahead
        waits = [each.waiting if is_known else None for each in self._meters.values()]
        now = spans[LOOP].ended_at or perf_counter()
        training_s, evaluating_s = (max(0.0, now - wait.since) if wait is not None else 0.0 for wait in waits)
        evaluation_wait_s = evaluating_s + self._meters["evaluation"].wait_s
        evaluation_s = max(0.0, spans[EVALUATION].until(now) - evaluation_wait_s)
        close_s, snapshots_s = spans[CLOSE].total_s, spans[SNAPSHOT].total_s
        in_loop_s = sum(spans.seconds_of(SINK).values()) - close_s
        waiting_s = self._meters["train"].wait_s + training_s + evaluation_wait_s + in_loop_s
        return parts_of(
            total=spans.total_s,
            steps=max(0.0, spans[LOOP].until(now) - evaluation_s - snapshots_s - waiting_s),
            evaluation=evaluation_s,
            snapshots=snapshots_s + spans[END].total_s,
            compilation=spans[COMPILING].total_s,
            waiting=waiting_s + close_s,
        )

    def _core_use(self) -> CoreUse | None:
        now = read_core_use()
        return None if self._cores is None or now is None else now.since(self._cores)

    def _circumstances(self) -> Circumstances:
        config, data = self._launch.config, self._launch.data
        return Circumstances(
            config,
            data.description,
            data.location,
            prefetch=self._training.depth,
            is_cpu=jax.default_backend() == "cpu",
            has_faster_half=uses_amx_in_bfloat16(
                config, jax.default_backend(), is_user_model=self._launch.parts.model is not None
            ),
        )

    def _find_slow_operations(self) -> None:
        """Find the operations without a fast kernel if that is worth it: it takes seconds for a large program."""
        launch = self._launch
        if launch.is_over and (launch.config.runtime_report or self._spans[LOOP].total_s >= _WORTH_S):
            # A text that cannot be had or read, such as that of a later XLA, is no reason for a run to fail.
            with suppress(Exception):
                text = self._compiled.call.as_text() or ""
                self._slow = find_slow_operations(text, is_cpu=jax.default_backend() == "cpu")


def describe_devices(topology: Topology) -> str:
    """Return the devices of a launch in words, such as "2 × cpu"."""
    return f"{topology.num_devices} × {topology.device}" if topology.num_devices > 1 else topology.device


def _by_stage(meter: FeedMeter) -> dict[str, float]:
    return {stage: seconds for stage, seconds in zip(STAGES, meter.wait_s_by_stage, strict=True) if seconds}


def _describe_reading(meter: FeedMeter, reading: Reading) -> str:
    since_s, stage = perf_counter() - reading.since, reading.stage
    file = meter.readings.name(reading.file)
    what = {
        SOURCE: "the source of the batches" if file is None else "the preparation of a read",
        OPEN: f"opening {file}",
        READ: f"reading {file or 'the labels'}",
        CHECK: f"checking images of {file}",
        COPY: "copying images",
    }[stage]
    return f"{what} has taken {describe_span(since_s)} so far (thread {reading.thread})"
