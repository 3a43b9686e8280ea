"""The verdict on a launch: what bound it, by which figures, and what to change."""

from dataclasses import dataclass, replace

from loopfeed.engine.config import OFF, TrainConfig
from loopfeed.engine.runtime.record import LaunchRuntime, Verdict
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.storage_options import is_url

_LEAST_STEPS, _LEAST_S = 20, 0.5
# The share of the time from which a part binds a run. Reading takes place beside the steps, so whenever the loop waits
# for it regularly, it is what the run's speed depends on; the others only add to the steps.
_BINDS = {"reading": 0.1, "sinks": 0.1, "snapshots": 0.2, "copying": 0.3, "evaluation": 0.5}
_DEVICE_BINDS = 0.7
# Snapshots that take less time in all bind no run, and neither does a single one, of which a longer run has no more.
_LEAST_OF_SNAPSHOTS_S, _LEAST_OF_ONE_S = 1.0, 10.0
# The share of the waiting that one file must have had to be named.
_LEAST_OF_FILE = 0.5
_NOUNS = {"source": "source", "open": "opening", "read": "reading", "check": "checking", "copy": "copying"}
# The sinks that write to the terminal.
_TERMINALS = ("PlainSink", "ProgressSink")


@dataclass(frozen=True)
class Circumstances:
    """What a verdict's advice depends on.

    Attributes:
        config: the settings.
        description: the data set in words.
        location: the packed data set from which the batches come, None if there is none.
        prefetch: how many batches are read ahead.
        is_cpu: whether the devices are of the processor.
        has_faster_half: whether bfloat16 is known to be faster on this processor.
    """

    config: TrainConfig
    description: str
    location: str | None
    prefetch: int
    is_cpu: bool
    has_faster_half: bool = False


def judge(launch: LaunchRuntime, about: Circumstances) -> Verdict:
    """Return what bound a launch that has ended, and whether other processes took its cores.

    What the first batch was waited for, and a single snapshot of some seconds, do not count.
    """
    verdict, cores = _judge(launch, about), launch.cores
    if verdict.bound_by == "unknown" or cores is None or (share := cores.taken_by_others) is None:
        return verdict
    others = f"meanwhile other processes took {_percent(share)} of the time of its {quantity(cores.num_cores, 'core')}"
    return replace(verdict, evidence=f"{verdict.evidence}; {others}, so that it may be faster without them")


def _judge(launch: LaunchRuntime, about: Circumstances) -> Verdict:
    goodput, pulls = launch.goodput, launch.pulls
    num_steps = launch.end_step - launch.start_step
    if launch.state == "failed":
        evidence = (
            f"the run failed after {quantity(num_steps, 'step')}; it waited {pulls.later_wait_s:,.1f} s for batches"
        )
        return Verdict("unknown", evidence, "")
    is_one = launch.snapshots.count + launch.snapshots.num_skipped < 2
    snapshots_s = 0.0 if is_one and goodput.snapshots < _LEAST_OF_ONE_S else goodput.snapshots
    running_s = goodput.steps + goodput.evaluation + snapshots_s + goodput.waiting - pulls.first_wait_s
    if num_steps < _LEAST_STEPS or running_s < _LEAST_S:
        short = f"{quantity(num_steps, 'step')} in {max(0.0, running_s):.1f} s"
        return Verdict("unknown", f"the run was too short to say what bound it: {short}", "")
    seconds = {
        "reading": pulls.later_wait_s,
        "sinks": launch.pushes.blocked_s,
        "snapshots": snapshots_s,
        "copying": min(pulls.copy_s, goodput.steps),
        "evaluation": goodput.evaluation,
    }
    shares = {name: each / running_s for name, each in seconds.items()}
    shares["device"] = max(0.0, 1 - sum(shares.values()))
    binding = [name for name, least in _BINDS.items() if shares[name] >= least]
    if snapshots_s < _LEAST_OF_SNAPSHOTS_S:
        binding = [name for name in binding if name != "snapshots"]
    if binding:
        by = max(binding, key=lambda name: shares[name])
        return _JUDGES[by](launch, about, shares[by])
    if shares["device"] >= _DEVICE_BINDS:
        return _of_device(launch, about, shares["device"])
    parts = ", ".join(f"{name} {_percent(each)}" for name, each in sorted(shares.items(), key=lambda pair: -pair[1]))
    return Verdict("nothing", f"nothing dominated the run: {parts}", "")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _of_reading(launch: LaunchRuntime, about: Circumstances, share: float) -> Verdict:
    by_stage = launch.pulls.all_wait_s_by_stage
    stages = sorted(((seconds, stage) for stage, seconds in by_stage.items() if seconds), reverse=True)
    main = stages[0][1]
    # The stages include what the first batch was waited for.
    total = sum(by_stage.values()) or 1.0
    parts = [f"{stage} {_percent(share * each / total)}" for each, stage in stages if share * each / total >= 0.005]
    is_of_evaluation = _is_of_evaluation(launch)
    where = _file_at_fault(launch) or ("the evaluation's data" if is_of_evaluation else about.description)
    if main == "source" and about.location is None and not is_of_evaluation:
        num = max(1, launch.pulls.count + launch.pulls.evaluation_count)
        each_ms = 1e3 * launch.reader.source_s / num
        what = "your own batches"
        advice = (
            "make the function faster, give a BatchSource with thread_safe = True, which several threads call, or pack "
            "the images (preprocess-imagenet)"
        )
        if about.config.synthetic:
            what, advice = "synthetic batches", f"raise --reader-threads, now {about.config.reader_threads}"
        evidence = f"the loop waited {_percent(share)} of the time for {what}, which take {each_ms:,.1f} ms each"
        return Verdict("source", evidence, advice)
    detail = f" ({', '.join(parts)})" if parts else ""
    evidence = f"the loop waited {_percent(share)} of the time for {where}{detail}"
    return Verdict(_NOUNS[main], evidence, _advice_on_reading(launch, about, main))


def _is_of_evaluation(launch: LaunchRuntime) -> bool:
    pulls = launch.pulls
    return sum(pulls.evaluation_wait_s_by_stage.values()) > sum(pulls.wait_s_by_stage.values())


def _file_at_fault(launch: LaunchRuntime) -> str | None:
    """Return the file that most of the waiting was for, None if there is no single one."""
    seconds: dict[str, float] = {}
    for stall in launch.stalls:
        if stall.shard is not None:
            seconds[stall.shard] = seconds.get(stall.shard, 0.0) + stall.wait_s
    if not seconds:
        return None
    file = max(seconds, key=seconds.__getitem__)
    return file if seconds[file] >= _LEAST_OF_FILE * sum(launch.pulls.all_wait_s_by_stage.values()) else None


def _advice_on_reading(launch: LaunchRuntime, about: Circumstances, stage: str) -> str:
    waits, raise_readers = launch.pulls.waits, f"raise --reader-threads, now {about.config.reader_threads}"
    if stage == "copy":
        return "images are copied from memory; a smaller image size or more cores (--reader-threads) help"
    if stage == "check":
        return f"an image is checked when it is first read in a launch; {raise_readers}"
    if about.location is not None and is_url(about.location):
        hints = ["read large parts (--order windowed)"] * (about.config.order != "windowed")
        hints += ["keep shards on this machine (--cache)"] * (about.config.cache in (None, OFF))
        if hints:
            return " and ".join(hints)
    if waits.count and waits.p50_s < 0.1 * waits.total_s / waits.count:
        return f"the waits come in bursts, which a larger --prefetch bridges, now {about.prefetch}"
    return f"{raise_readers}, or put the data on a faster disk"


def _of_sinks(launch: LaunchRuntime, _: Circumstances, share: float) -> Verdict:
    name = launch.pushes.blocked_by or "a sink"
    evidence = f"the loop waited {_percent(share)} of the time until {name} accepted losses"
    if name in _TERMINALS:
        return Verdict("terminal", evidence, "unblock the terminal (Ctrl-Q), or write the output to a file")
    return Verdict("sink", evidence, "make its write method return sooner")


def _of_snapshots(launch: LaunchRuntime, about: Circumstances, share: float) -> Verdict:
    snapshots = launch.snapshots
    evidence = (
        f"copying snapshots and waiting for the disk took {_percent(share)} of the time: "
        f"{quantity(snapshots.count, 'snapshot')} on the disk, {snapshots.writes.p50_s:,.2f} s each"
    )
    if snapshots.num_skipped:
        evidence += f", and {snapshots.num_skipped} skipped"
    every = about.config.snapshot_every_steps
    advice = "put the run folder on a faster disk"
    return Verdict("snapshots", evidence, advice + (f", or raise --snapshot-every, now {every}" if every else ""))


def _of_copying(launch: LaunchRuntime, about: Circumstances, share: float) -> Verdict:
    rate = launch.pulls.bytes / launch.pulls.copy_s / 1e9 if launch.pulls.copy_s else 0.0
    evidence = f"copying batches to the program took {_percent(share)} of the time, at {rate:,.1f} GB/s"
    return Verdict("copying", evidence, f"raise --reader-threads, now {about.config.reader_threads}, which also copy")


def _of_evaluation(_: LaunchRuntime, __: Circumstances, share: float) -> Verdict:
    return Verdict("evaluation", f"evaluations took {_percent(share)} of the time", "raise --eval-every")


_JUDGES = {
    "reading": _of_reading,
    "sinks": _of_sinks,
    "snapshots": _of_snapshots,
    "copying": _of_copying,
    "evaluation": _of_evaluation,
}


def _of_device(launch: LaunchRuntime, about: Circumstances, share: float) -> Verdict:
    running_s = launch.goodput.total - launch.goodput.compilation - launch.goodput.other
    waited = _percent(launch.pulls.later_wait_s / running_s)
    evidence = f"it computed for {_percent(share)} of the time, and the loop waited {waited} of it for batches"
    if launch.slow_operations:
        count = sum(each.count for each in launch.slow_operations)
        kinds = " and ".join(dict.fromkeys(f"{each.kind}s" for each in launch.slow_operations))
        return Verdict("device", evidence, f"{quantity(count, 'operation')} ({kinds}) have no fast kernel")
    if about.is_cpu:
        half = "compute in bfloat16, for which this processor has AMX (--precision bfloat16), " * about.has_faster_half
        return Verdict("device", evidence, f"{half}use a GPU, or a smaller model or image size")
    half = "--precision bfloat16, or " if about.config.precision == "float32" else ""
    return Verdict("device", evidence, f"{half}more devices")
