"""The record of what the runtime did in each launch of a run: the types behind `runtime.json`.

Times are in seconds. Needs neither jax nor files; `loopfeed.engine.runtime.runtime_file` reads and writes the file.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from loopfeed.engine.spans import StageTimes, Times

type LaunchState = Literal["running", "done", "stopped", "failed"]
type Phase = Literal["train", "evaluation"]

FORMAT = 1
"""The version of `runtime.json`. A reader refuses any other."""


@dataclass(frozen=True)
class ProgramTimes:
    """A program that was traced and compiled.

    Attributes:
        name: "training" or "initial state".
        trace_s: seconds to trace and lower it.
        compile_s: seconds to compile it, or to load it from the cache.
        from_cache: whether it came from the cache on disk.
    """

    name: str
    trace_s: float
    compile_s: float
    from_cache: bool


@dataclass(frozen=True)
class Compilations:
    """Everything that jax traced and compiled in this process during a launch, small functions included.

    Attributes:
        num_traces, trace_s: functions that were traced, and the seconds that took.
        num_programs, compile_s: programs that were compiled or loaded from the cache, and the seconds that took.
        cache_hits, cache_misses: programs that were found in the cache on disk, or looked for in vain.
    """

    num_traces: int = 0
    trace_s: float = 0.0
    num_programs: int = 0
    compile_s: float = 0.0
    cache_hits: int = 0
    cache_misses: int = 0


@dataclass(frozen=True)
class Pulls:
    """The batches that the loop pulled.

    Attributes:
        count: number of training batches.
        bytes: bytes of their pixels and labels, as they were passed to the program.
        waits: how long the loop waited, for each step (of several pulls if `accumulate_steps` is larger than 1).
        copy_s: seconds that the loop waited while batches of at least 4 KiB were copied to the program's memory.
        wait_s_by_stage: the waiting by the stage of reading that was at fault ("source", "open", "read", "check",
            "copy"), also for a batch that never came.
        evaluation_count: number of evaluation batches.
        evaluation_wait_s: seconds that the loop waited for them.
        evaluation_wait_s_by_stage: these seconds by the stage of reading.
        first_wait_s: seconds of all these that the first batches took, when nothing is read ahead yet.
    """

    count: int = 0
    bytes: int = 0
    waits: Times = field(default_factory=Times)
    copy_s: float = 0.0
    wait_s_by_stage: dict[str, float] = field(default_factory=dict)
    evaluation_count: int = 0
    evaluation_wait_s: float = 0.0
    evaluation_wait_s_by_stage: dict[str, float] = field(default_factory=dict)
    first_wait_s: float = 0.0

    @property
    def all_wait_s_by_stage(self) -> dict[str, float]:
        """The waiting of steps and evaluations by the stage of reading, in seconds."""
        found = dict(self.wait_s_by_stage)
        for stage, seconds in self.evaluation_wait_s_by_stage.items():
            found[stage] = found.get(stage, 0.0) + seconds
        return found

    @property
    def later_wait_s(self) -> float:
        """Seconds that steps and evaluations waited for all batches but the first."""
        return max(0.0, sum(self.all_wait_s_by_stage.values()) - self.first_wait_s)


@dataclass(frozen=True)
class Pushes:
    """What the loop pushed: losses, evaluations and snapshots.

    Attributes:
        count: number of pushes.
        bytes: bytes of what was pushed.
        times: how long each push took on the host, during which the loop waited.
        blocked_s: seconds of these that the loop waited for a sink whose queue was full.
        blocked_by: the name of the sink for which it waited longest, None if it waited for none.
    """

    count: int = 0
    bytes: int = 0
    times: Times = field(default_factory=Times)
    blocked_s: float = 0.0
    blocked_by: str | None = None


@dataclass(frozen=True)
class RingSample:
    """How many batches were ready.

    Attributes:
        time_s: seconds since the launch started.
        num_ready: batches in the ring that the loop could take at once.
    """

    time_s: float
    num_ready: int


@dataclass(frozen=True)
class Ring:
    """The batches that were read ahead, over time.

    Attributes:
        depth: batches that the ring holds.
        samples: at most 240, evenly spaced.
    """

    depth: int = 0
    samples: tuple[RingSample, ...] = ()


@dataclass(frozen=True)
class Stall:
    """A wait of the loop for one batch.

    Attributes:
        step: the step that waited (updates done, from 1); of an evaluation, the step after which it took place.
        wait_s: how long it waited.
        stage: the stage of reading that took most of the batch's time: "source" (a function for batches, or anything
            before the first read), "open", "read", "check" or "copy".
        shard: the file that took longest, or the first of several that were read together; None if no file was read.
        phase: "train", or "evaluation" if an evaluation waited.
    """

    step: int
    wait_s: float
    stage: str
    shard: str | None
    phase: Phase = "train"


@dataclass(frozen=True)
class ReaderTimes:
    """What the reading threads did, summed over the threads.

    Attributes:
        source_s: seconds in a function for batches, or in preparing reads.
        open_s: seconds in opening and mapping files.
        read_s: seconds in reading, including the store's own decoding and checks.
        check_s: seconds in comparing images with their checksums.
        copy_s: seconds in copying images from a window in memory.
        bytes: bytes of pixels that were read.
        num_threads: number of reading threads.
    """

    source_s: float = 0.0
    open_s: float = 0.0
    read_s: float = 0.0
    check_s: float = 0.0
    copy_s: float = 0.0
    bytes: int = 0
    num_threads: int = 0


@dataclass(frozen=True)
class SnapshotTimes:
    """The snapshots of a launch.

    Attributes:
        count: number of snapshots on the disk.
        num_skipped: number of snapshots that were skipped because the disk was too slow.
        bytes: bytes of the arrays of those on the disk.
        push_s: seconds that the loop waited while snapshots were copied to host memory.
        writes: how long writing each took, beside the loop.
        end_wait_s: seconds that the run waited for the disk after its last step.
    """

    count: int = 0
    num_skipped: int = 0
    bytes: int = 0
    push_s: float = 0.0
    writes: Times = field(default_factory=Times)
    end_wait_s: float = 0.0


@dataclass(frozen=True)
class MemoryPeaks:
    """The most memory that was in use, in bytes.

    Attributes:
        host: of the process, as the system counts it (resident set).
        device: of the first device, None if the backend does not count it.
        program: of one execution of the program, as estimated by XLA.
    """

    host: int | None = None
    device: int | None = None
    program: int | None = None


# Shares of the time of the cores from which others are said to have taken them: so much by others, hardly any left
# idle, and less for the process than it may use.
_LEAST_OF_OTHERS, _MOST_IDLE, _MOST_OWN = 0.2, 0.1, 0.85


@dataclass(frozen=True)
class CoreUse:
    """How the cores that the process may run on were used from before the loop to the end of the launch.

    Attributes:
        num_cores: number of these cores.
        num_at_once: how many of them a control group lets it use at once.
        own_s: seconds of cores that the process and those that it started took.
        others_s: seconds that everything else took, other virtual machines included.
        idle_s: seconds in which cores were idle.
    """

    num_cores: int
    num_at_once: int
    own_s: float
    others_s: float
    idle_s: float

    def since(self, before: "CoreUse") -> "CoreUse":
        """Return the times between an earlier reading and this one."""
        names = ("own_s", "others_s", "idle_s")
        return replace(self, **{name: max(0.0, getattr(self, name) - getattr(before, name)) for name in names})

    @property
    def taken_by_others(self) -> float | None:
        """The share of the time of the cores that others took from the process; None if they did not."""
        total = self.own_s + self.others_s + self.idle_s
        may_use = total * self.num_at_once / self.num_cores
        is_taken = self.others_s >= _LEAST_OF_OTHERS * total and self.idle_s <= _MOST_IDLE * total
        return self.others_s / total if total and is_taken and self.own_s <= _MOST_OWN * may_use else None


@dataclass(frozen=True)
class SlowOperation:
    """Operations of the compiled program that run without a fast kernel.

    Attributes:
        kind: what is slow, such as "convolution" or "product".
        name: the scope of the operation in the program.
        shape: its result, such as "f32[8,10]".
        why: why it is slow, and what to do.
        count: how many of this kind, name and shape there are.
    """

    kind: str
    name: str
    shape: str
    why: str
    count: int = 1


@dataclass(frozen=True)
class Goodput:
    """The wall time of a launch by what it was spent on, in seconds.

    Attributes:
        steps: in training steps, without waits.
        evaluation: in evaluations, without waits.
        snapshots: in copying snapshots to the host, and in waiting for the disk at the end.
        compilation: in tracing, compiling and initialising.
        waiting: in waiting for batches and for sinks.
        other: in everything else, such as opening the data set.
    """

    steps: float = 0.0
    evaluation: float = 0.0
    snapshots: float = 0.0
    compilation: float = 0.0
    waiting: float = 0.0
    other: float = 0.0

    def seconds(self) -> dict[str, float]:
        """Return the parts of `total` by name."""
        return {name: float(seconds) for name, seconds in vars(self).items() if name not in ("lost_steps", "gaps")}

    @property
    def total(self) -> float:
        """The wall time, in seconds."""
        return sum(self.seconds().values())


@dataclass(frozen=True)
class RunGoodput(Goodput):
    """The wall time of all launches of a run by what it was spent on, without what was lost, in seconds.

    Attributes:
        lost: in steps that a later launch made again because it resumed from an earlier step, and what belonged to
            them.
        lost_steps: how many steps were made again.
        gaps: between launches, when nothing ran; no part of `total`.
    """

    lost: float = 0.0
    lost_steps: int = 0
    gaps: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """What bound a run.

    Attributes:
        bound_by: "device", "reading", "checking", "opening", "copying", "source" (user-defined or synthetic batches),
            "snapshots", "terminal", "sink" (any other) or "evaluation"; "nothing" if nothing dominates,
            "unknown" if the run was too short.
        evidence: the figures that show it.
        advice: what to change, empty if there is nothing.
    """

    bound_by: str
    evidence: str
    advice: str

    @property
    def line(self) -> str:
        """The verdict as one line of text."""
        by = {"source": "the source of its batches", "sink": "a sink"}
        by |= {name: f"the {name}" for name in ("device", "terminal")}
        bound = by.get(self.bound_by, self.bound_by)
        named = "" if self.bound_by in ("nothing", "unknown") else f"the run was bound by {bound}: "
        return named + self.evidence + (f"; {self.advice}" if self.advice else "")


@dataclass(frozen=True)
class LaunchRuntime:
    """What the runtime did in one launch.

    Attributes:
        started, ended: Unix time in seconds; while the launch runs, `ended` is the time of the last update.
        start_step, end_step: updates done before and after.
        state: "running" also if the process was killed.
        versions: of Python and the packages, by name.
        devices: the vendor's name for the devices, and how many there are, such as "2 × cpu".
        lost_steps, lost_s: steps of earlier launches that this launch makes again, and the seconds that they took.
        programs, compilations, pulls, pushes, ring, reader, snapshots, memory, slow_operations, goodput: see their
            types.
        stalls: the longest waits, at most 20, longest first.
        cores: how the cores were used, None while it runs, of several processes, or if the system does not tell it.
        stages: the stages of a run with several, in which this launch made steps.
        verdict: what bound the launch, None while it runs.
    """

    started: float
    ended: float
    start_step: int
    end_step: int
    state: LaunchState
    versions: dict[str, str]
    devices: str
    lost_steps: int = 0
    lost_s: float = 0.0
    programs: tuple[ProgramTimes, ...] = ()
    compilations: Compilations = field(default_factory=Compilations)
    pulls: Pulls = field(default_factory=Pulls)
    pushes: Pushes = field(default_factory=Pushes)
    ring: Ring = field(default_factory=Ring)
    stalls: tuple[Stall, ...] = ()
    reader: ReaderTimes = field(default_factory=ReaderTimes)
    snapshots: SnapshotTimes = field(default_factory=SnapshotTimes)
    memory: MemoryPeaks = field(default_factory=MemoryPeaks)
    slow_operations: tuple[SlowOperation, ...] = ()
    goodput: Goodput = field(default_factory=Goodput)
    cores: CoreUse | None = None
    stages: tuple[StageTimes, ...] = ()
    verdict: Verdict | None = None

    @property
    def wall_s(self) -> float:
        """Seconds from start to end."""
        return max(0.0, self.ended - self.started)


@dataclass(frozen=True)
class RuntimeReport:
    """What the runtime did in all launches of a run, as in `runtime.json`.

    Attributes:
        launches: oldest first, at least one.
        goodput: over all launches.
    """

    launches: tuple[LaunchRuntime, ...]
    goodput: RunGoodput

    @property
    def last(self) -> LaunchRuntime:
        """The newest launch."""
        return self.launches[-1]

    @property
    def verdict(self) -> Verdict | None:
        """What bound the newest launch, None while it runs."""
        return self.last.verdict
