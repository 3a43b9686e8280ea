"""Connects the monitoring of a launch: its meter, the watchdog, and the files of the run folder."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from loopfeed.engine.compilation.ahead_of_time import Compiled
from loopfeed.engine.records.digests import RunningDigest
from loopfeed.engine.records.run_folder import LOSS_LOG, RUNTIME, STALLS, RunFolder, recorded_versions
from loopfeed.engine.records.snapshot_writer import SnapshotWriter
from loopfeed.engine.run.descriptions import topology_of
from loopfeed.engine.run.launch_meter import LaunchMeter, describe_devices
from loopfeed.engine.run.run import Run
from loopfeed.engine.runtime.goodput import Rollback, add_up, find_rollback, parts_of, without_details
from loopfeed.engine.runtime.monitor import MOST_STALLS_BYTES, RuntimeMonitor
from loopfeed.engine.runtime.record import LaunchRuntime, RuntimeReport
from loopfeed.engine.runtime.runtime_file import encode_runtime, read_runtime
from loopfeed.engine.spans import COMPILING
from loopfeed.preprocess.regular_file import read_regular


def start_monitor(
    launch: Run,
    compiled: Compiled,
    *,
    snapshots: SnapshotWriter | None = None,
    folder: RunFolder | None = None,
    rollback: Rollback | None = None,
) -> RuntimeMonitor:
    """Start to monitor a launch, whose program is about to run.

    Args:
        launch: the launch.
        compiled: its program.
        snapshots: writes its snapshots.
        folder: the run folder in which it is recorded; None records nothing.
        rollback: the earlier launches of the run.
    """
    meter = LaunchMeter(launch, compiled, snapshots, rollback)
    stalls = b""
    if folder is not None:
        with suppress(OSError):  # there usually is none
            stalls = read_regular(folder.path / STALLS, max_bytes=MOST_STALLS_BYTES)
    monitor = RuntimeMonitor(
        meter,
        warn_s=launch.config.stall_warn_s or 0.0,
        write=None if folder is None else folder.write_monitoring,
        stalls=stalls,
        say=launch.notices.say,
        on_stall=launch.on_stall,
    )
    monitor.start()
    return monitor


def record_rollback(launch: Run, folder: RunFolder, cuts: Mapping[Path, RunningDigest]) -> Rollback:
    """Return the earlier launches of a run that is about to be rewound, and what this one takes back.

    Writes them and this launch into `runtime.json` too, which the monitor does again: it reports a disk that fails. A
    record that cannot be read is left out, with a warning.

    Args:
        launch: the launch that resumes it.
        folder: the run folder, not rewound yet.
        cuts: the digest of each log up to the step from which it is resumed, by path.
    """
    log, spans, step = folder.path / LOSS_LOG, launch.spans, launch.start.step
    rollback = Rollback()
    try:
        if (report := read_runtime(folder.path)) is not None:
            rollback = find_rollback(report.launches, log, step, cuts[log].num_bytes)
    except (ValueError, OSError) as error:
        launch.notify(f"warning: {error}; what it says of earlier launches is dropped")
    total_s = spans.total_s
    begun = LaunchRuntime(
        started=spans.started,
        ended=spans.started + total_s,
        start_step=step,
        end_step=step,
        state="running",
        versions=recorded_versions(),
        devices=describe_devices(topology_of(launch)),
        lost_steps=rollback.num_steps,
        lost_s=rollback.seconds,
        goodput=parts_of(total=total_s, compilation=spans[COMPILING].total_s),
    )
    launches = without_details((*rollback.launches, begun))
    with suppress(OSError):
        folder.write_monitoring(RUNTIME, encode_runtime(RuntimeReport(launches, add_up(launches))))
    return rollback
