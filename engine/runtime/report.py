"""The report of what the runtime did, as plain text of at most 80 columns; after PyTorch/XLA's `met.metrics_report`."""

import statistics
import textwrap
from collections.abc import Iterator, Sequence

from loopfeed.engine.runtime.record import LaunchRuntime, RuntimeReport
from loopfeed.engine.spans import Times
from loopfeed.preprocess.quantities import quantity

_WIDTH = 80
_MOST_STALLS = _MOST_SLOW = 3
_MOST_PATH = 42
_TIMES = ("total", "p50", "p90", "p99", "max")
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def describe_runtime(report: RuntimeReport, width: int = _WIDTH) -> str:
    """Return the newest launch of a run, and the goodput over all launches, as text.

    Args:
        report: the record of the run.
        width: the columns of a line; a longer word, such as a path, stays whole.
    """
    launch, count = report.last, len(report.launches)
    steps = quantity(launch.end_step - launch.start_step, "step")
    lines = [
        f"runtime report: launch {count} of {count}, {steps} after step {launch.start_step}, {launch.state}, "
        f"{launch.wall_s:,.1f} s on {launch.devices}"
    ]
    for part in (
        _goodput(report),
        _programs(launch, width),
        _stages(launch, width),
        _times(launch, width),
        _reading(launch),
        _stalls(launch),
        _memory(launch),
        _cores(launch),
        _slow_operations(launch),
    ):
        lines.extend(part)
    if launch.verdict is not None:
        lines.append(f"verdict: {launch.verdict.line}")
    return "\n".join(wrap_words(line, width) for line in lines)


def wrap_words(text: str, width: int) -> str:
    """Return a line of text as lines of so many columns, broken between words, all but the first indented."""
    return textwrap.fill(text, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


def _goodput(report: RuntimeReport) -> Iterator[str]:
    goodput, count = report.goodput, len(report.launches)
    total = goodput.total or 1.0
    gaps = f", and {goodput.gaps:,.1f} s between them" if goodput.gaps else ""
    launches = "1 launch" if count == 1 else f"{count:,} launches"
    yield f"goodput over {launches}: {goodput.total:,.1f} s{gaps}"
    parts = [
        f"{name} {_seconds(seconds)} ({100 * seconds / total:.1f}%)"
        for name, seconds in goodput.seconds().items()
        if seconds
    ]
    yield "  " + ", ".join(parts)
    if goodput.lost_steps:
        yield f"  {quantity(goodput.lost_steps, 'step')} were made again after a resume from an earlier step"


def _programs(launch: LaunchRuntime, width: int) -> Iterator[str]:
    traced, compiled = (11, 15) if width >= _WIDTH else (10, 10)
    titles = ("traced in", "compiled in") if width >= _WIDTH else ("traced", "compiled")
    yield f"{'programs':<18}{titles[0]:>{traced}}{titles[1]:>{compiled}}"
    for program in launch.programs:
        origin = "  from the cache" if program.from_cache else ""
        cells = f"{program.trace_s:>{traced - 2}.2f} s{program.compile_s:>{compiled - 2}.2f} s"
        yield f"  {program.name:<16}{cells}{origin}"
    every = launch.compilations
    yield (
        f"  in all: {quantity(every.num_traces, 'trace')}, {quantity(every.num_programs, 'program')}, "
        f"{quantity(every.cache_hits, 'cache hit')}, {every.cache_misses} missed"
    )


def _stages(launch: LaunchRuntime, width: int) -> Iterator[str]:
    steps_width = 24 if width >= _WIDTH else 14
    if launch.stages:
        yield f"stages{'steps':>{steps_width - 4}}{'images/s':>12}{'first step':>12}"
    for stage in launch.stages:
        steps = f"{stage.start_step + 1} to {stage.end_step}"
        speed = stage.num_images / stage.seconds if stage.seconds else 0
        yield f"  {steps:>{steps_width}}{speed:>12,.1f}{_seconds(stage.first_step_s):>12}"


def _times(launch: LaunchRuntime, width: int) -> Iterator[str]:
    # Those for which there is room, the most telling first.
    room = max(1, (width - 27) // 10)
    names = [name for name in _TIMES if name in ("total", "max", "p50", "p99", "p90")[:room]]
    yield f"{'':<18}{'count':>9}" + "".join(f"{name:>10}" for name in names)
    for name, times in (
        ("step's wait", launch.pulls.waits),
        ("push", launch.pushes.times),
        ("snapshot write", launch.snapshots.writes),
    ):
        if times.count:
            yield _row(name, times, names)
    pulls, pushes = launch.pulls, launch.pushes
    evaluated = f", {pulls.evaluation_count:,} for evaluations" if pulls.evaluation_count else ""
    # Copies of small batches are not timed.
    copied = f", copied in {_seconds(pulls.copy_s)}" if pulls.copy_s else ""
    yield f"pulled: {pulls.count:,} batches, {_size(pulls.bytes)}{copied}{evaluated}; pushed: {_size(pushes.bytes)}"
    if pushes.blocked_s:
        yield f"  blocked for {_seconds(pushes.blocked_s)}, longest by {pushes.blocked_by}"
    snapshots = launch.snapshots
    if snapshots.count or snapshots.num_skipped:
        yield (
            f"snapshots: {snapshots.count} of {_size(snapshots.bytes)} in all, {snapshots.num_skipped} skipped; the "
            f"loop waited {_seconds(snapshots.push_s)}, the end of the run {_seconds(snapshots.end_wait_s)}"
        )


def _row(name: str, times: Times, names: Sequence[str]) -> str:
    cells = "".join(f"{_seconds(getattr(times, f'{each}_s')):>10}" for each in names)
    return f"  {name:<16}{times.count:>9,}{cells}"


def _reading(launch: LaunchRuntime) -> Iterator[str]:
    reader = launch.reader
    stages = {
        "source": reader.source_s,
        "open": reader.open_s,
        "read": reader.read_s,
        "check": reader.check_s,
        "copy": reader.copy_s,
    }
    done = ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in stages.items() if seconds)
    yield f"reading, {quantity(reader.num_threads, 'thread')}: {done or 'nothing'}; {_size(reader.bytes)}"
    if by_stage := launch.pulls.all_wait_s_by_stage:
        waits = ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in by_stage.items())
        yield f"  waited for: {waits}"
    if samples := [each.num_ready for each in launch.ring.samples]:
        empty = sum(each == 0 for each in samples) / len(samples)
        yield (
            f"ring of {quantity(launch.ring.depth, 'batch')}: {statistics.median(samples):g} ready (median), empty "
            f"{100 * empty:.0f} % of the time"
        )


def _stalls(launch: LaunchRuntime) -> Iterator[str]:
    if launch.stalls:
        yield "longest waits:"
    for stall in launch.stalls[:_MOST_STALLS]:
        where = "" if stall.shard is None else f" of {_shorten(stall.shard)}"
        what = "evaluation after step" if stall.phase == "evaluation" else "step"
        yield f"  {what} {stall.step:,}: {_seconds(stall.wait_s)}, {stall.stage}{where}"


def _memory(launch: LaunchRuntime) -> Iterator[str]:
    memory = launch.memory
    parts = {"host": memory.host, "device": memory.device, "program (estimated)": memory.program}
    yield "memory at most: " + ", ".join(f"{name} {_size(each)}" for name, each in parts.items() if each is not None)


def _cores(launch: LaunchRuntime) -> Iterator[str]:
    if (cores := launch.cores) is not None and (total := cores.own_s + cores.others_s + cores.idle_s):
        shares = {"this process": cores.own_s, "others": cores.others_s, "idle": cores.idle_s}
        used = ", ".join(f"{name} {100 * seconds / total:.0f} %" for name, seconds in shares.items())
        yield f"time of {quantity(cores.num_cores, 'core')}: {used}"


def _slow_operations(launch: LaunchRuntime) -> Iterator[str]:
    for slow in launch.slow_operations[:_MOST_SLOW]:
        times = f"{slow.count} × " if slow.count > 1 else ""
        yield f"slow: {times}{slow.kind} {slow.shape} in {slow.name}: {slow.why}"
    if len(launch.slow_operations) > _MOST_SLOW:
        yield f"slow: {len(launch.slow_operations) - _MOST_SLOW} other kinds of operations (runtime.json)"


def _seconds(seconds: float) -> str:
    if seconds == 0:
        return "0"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:,.2f} s" if seconds < 100 else f"{seconds:,.0f} s"


def _size(num_bytes: int) -> str:
    for unit, name in _UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.1f} {name}"
    return f"{num_bytes} B"


def _shorten(path: str) -> str:
    return path if len(path) <= _MOST_PATH else f"…{path[1 - _MOST_PATH :]}"
