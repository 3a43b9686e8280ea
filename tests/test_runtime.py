"""Goodput, verdict, report, watchdog and monitor, without a run."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import pairwise

import pytest

from loopfeed.engine.records.file_errors import LostFileError
from loopfeed.engine.runtime import core_use
from loopfeed.engine.runtime.goodput import add_up, find_rollback, without_details
from loopfeed.engine.runtime.monitor import RingSamples, RuntimeMonitor, Watchdog, describe_threads
from loopfeed.engine.runtime.record import (
    CoreUse,
    Goodput,
    LaunchRuntime,
    MemoryPeaks,
    ProgramTimes,
    Pulls,
    Pushes,
    ReaderTimes,
    Ring,
    RingSample,
    RunGoodput,
    RuntimeReport,
    SlowOperation,
    SnapshotTimes,
    Stall,
    Verdict,
)
from loopfeed.engine.runtime.report import describe_runtime
from loopfeed.engine.runtime.runtime_file import decode_runtime
from loopfeed.engine.runtime.verdict import Circumstances, judge
from loopfeed.engine.spans import Times
from loopfeed.preprocess.workers import Worker
from tests.toy import toy_config

LAUNCH = LaunchRuntime(
    started=100.0, ended=200.0, start_step=0, end_step=500, state="done", versions={}, devices="cpu",
    goodput=Goodput(steps=80, compilation=15, other=5), pulls=Pulls(count=500, bytes=10**9, waits=Times(500)),
)  # fmt: skip
CONFIG = toy_config(reader_threads=4, snapshot_every_steps=50)
LOCAL = Circumstances(CONFIG, "data/shards", "data/shards", prefetch=8, is_cpu=True)
STORED = replace(LOCAL, description="s3://bucket/shards", location="s3://bucket/shards")
OWN = replace(LOCAL, description="batches of your own", location=None)
CACHED = replace(CONFIG, cache="cache", order="windowed")
SYNTHETIC = replace(OWN, config=replace(CONFIG, synthetic=True))


def waiting(seconds_by_stage, *, stalls=(), first_s=0.0, p50_s=0.02):
    """Return a launch of 80 s in the loop that waited."""
    waited = sum(seconds_by_stage.values())
    return replace(
        LAUNCH,
        goodput=Goodput(steps=80 - waited, waiting=waited, compilation=15, other=5),
        pulls=Pulls(500, 10**9, Times(500, waited, p50_s), wait_s_by_stage=seconds_by_stage, first_wait_s=first_s),
        stalls=stalls,
        reader=ReaderTimes(source_s=30.0),
    )


READING = waiting({"read": 38.4, "check": 7.2})
SNAPSHOTS = replace(
    LAUNCH,
    goodput=Goodput(steps=50, snapshots=30, compilation=15, other=5),
    snapshots=SnapshotTimes(count=7, num_skipped=3, writes=Times(7, 70, 10, 10, 10, 10)),
)
ONE = SnapshotTimes(count=1)
EVALUATING = replace(LAUNCH, goodput=Goodput(steps=30, evaluation=50))
SLOW = (SlowOperation("convolution", "conv1", "f32[8]", "its kernel is turned", 3),)


@pytest.mark.parametrize(
    ("launch", "about", "by", "parts"),
    [
        (READING, LOCAL, "reading", ["57 % of the time for data/shards (read 48 %, check 9 %)", "--reader-threads"]),
        (READING, STORED, "reading", ["--order windowed) and keep shards on this machine (--cache)"]),
        (READING, replace(STORED, config=CACHED), "reading", ["--reader-threads"]),
        (waiting({"read": 20.0}, p50_s=0.0), LOCAL, "reading", ["in bursts, which a larger --prefetch bridges, now 8"]),
        (
            waiting({"read": 20.0}, stalls=(Stall(3, 15.0, "read", "c/7"), Stall(9, 1.0, "read", "c/8"))),
            LOCAL, "reading", ["25 % of the time for c/7 (read 25 %)"],
        ),
        (
            replace(LAUNCH, goodput=Goodput(steps=60, waiting=20), pulls=Pulls(
                500, waits=Times(500, 2.0), wait_s_by_stage={"read": 2.0}, evaluation_wait_s=18.0,
                evaluation_wait_s_by_stage={"check": 18.0}), stalls=(Stall(3, 1.5, "read", "train/c/7"),)),
            LOCAL, "checking", ["25 % of the time for the evaluation's data (check 22 %, read 2 %)"],
        ),
        (waiting({"check": 20.0}), LOCAL, "checking", ["(check 25 %)", "is checked when it is first read"]),
        (waiting({"open": 20.0}), LOCAL, "opening", ["(open 25 %)"]),
        (waiting({"copy": 20.0}), LOCAL, "copying", ["(copy 25 %)"]),
        (waiting({"source": 40.0}), OWN, "source", ["50 % of the time for your own batches, which take 60.0 ms"]),
        (waiting({"source": 40.0}), SYNTHETIC, "source", ["synthetic batches"]),
        (waiting({"read": 30.0}, first_s=30.0), LOCAL, "device", ["100 % of the time"]),
        (
            replace(LAUNCH, goodput=Goodput(steps=40, waiting=40), pushes=Pushes(blocked_s=40, blocked_by="PlainSink")),
            LOCAL, "terminal", ["50 % of the time until PlainSink accepted losses", "Ctrl-Q"],
        ),
        (
            replace(LAUNCH, goodput=Goodput(steps=40, waiting=40), pushes=Pushes(blocked_s=40, blocked_by="Mine")),
            LOCAL, "sink", ["bound by a sink", "until Mine accepted"],
        ),
        (SNAPSHOTS, LOCAL, "snapshots", ["38 % of the time", "10.00 s each, and 3 skipped", "--snapshot-every"]),
        (EVALUATING, LOCAL, "evaluation", ["62 %", "--eval-every"]),
        (replace(LAUNCH, pulls=replace(LAUNCH.pulls, copy_s=40)), LOCAL, "copying", ["50 % of the time, at 0.0 GB/s"]),
        (LAUNCH, LOCAL, "device", ["bound by the device: it computed for 100 %", "waited 0 % of it", "use a GPU"]),
        (LAUNCH, replace(LOCAL, is_cpu=False), "device", ["--precision bfloat16"]),
        (LAUNCH, replace(LOCAL, has_faster_half=True), "device", ["has AMX (--precision bfloat16), use a GPU, or"]),
        (replace(LAUNCH, slow_operations=SLOW), LOCAL, "device", ["3 operations (convolutions) have no fast kernel"]),
        (replace(SNAPSHOTS, goodput=Goodput(steps=48, evaluation=24, snapshots=8)), LOCAL, "nothing", [
            "nothing dominated the run: device 60 %, evaluation 30 %, snapshots 10 %"]),
        (replace(SNAPSHOTS, goodput=Goodput(steps=0.6, snapshots=0.4)), LOCAL, "nothing", ["snapshots 40 %"]),
        (replace(SNAPSHOTS, goodput=Goodput(steps=3, snapshots=1.2)), LOCAL, "snapshots", ["faster disk"]),
        (replace(READING, state="failed"), LOCAL, "unknown", ["the run failed after 500 steps; it waited 45.6 s"]),
        (replace(LAUNCH, end_step=19), LOCAL, "unknown", ["too short to say what bound it: 19 steps in 80.0 s"]),
        # A snapshot at the end says nothing of a longer run, unless it takes long.
        (replace(LAUNCH, goodput=Goodput(steps=0.3, snapshots=5), snapshots=ONE), LOCAL, "unknown", ["in 0.3 s"]),
        (replace(LAUNCH, goodput=Goodput(steps=3, snapshots=5), snapshots=ONE), LOCAL, "device", ["for 100 % of the"]),
        (replace(LAUNCH, goodput=Goodput(steps=3, snapshots=15), snapshots=ONE), LOCAL, "snapshots", ["1 snapshot on"]),
        (replace(LAUNCH, cores=CoreUse(2, 2, 90, 105, 5)), LOCAL, "device", [
            "meanwhile other processes took 52 % of the time of its 2 cores, so that it may be faster without them"]),
        (replace(READING, cores=CoreUse(1, 1, 10, 90, 0)), LOCAL, "reading", ["90 % of the time of its 1 core, "]),
        (replace(LAUNCH, goodput=Goodput(steps=0.3, compilation=50)), LOCAL, "unknown", ["500 steps in 0.3 s"]),
    ],
)  # fmt: skip
def test_the_verdict_names_what_bound_the_run(launch, about, by, parts):
    verdict = judge(launch, about)
    assert verdict.bound_by == by
    for part in parts:
        assert part in verdict.line
    assert "\n" not in verdict.line


@pytest.mark.parametrize(
    ("cores", "share"),
    [
        (CoreUse(2, 2, 90, 105, 5), 105 / 200),
        (CoreUse(2, 2, 20, 100, 80), None),  # the rest is idle
        (CoreUse(2, 2, 165, 30, 5), None),  # others take little
        (CoreUse(4, 1, 95, 300, 5), None),  # it has all that its control group lets it use
        (CoreUse(4, 1, 40, 355, 5), 355 / 400),
        (CoreUse(4, 1, 0, 0, 0), None),
    ],
)
def test_others_take_cores_that_the_process_may_use_and_that_are_not_idle(cores, share):
    assert cores.taken_by_others == (None if share is None else pytest.approx(share))


def test_the_use_of_cores_is_that_of_those_allowed(tmp_path, monkeypatch):
    cores = ("cpu  9 9 9 9 9 9 9 9", "cpu0 100 20 30 400 50 6 7 8 90 9", "cpu1 9 9 9 9 9 9 9 9", "cpu3 1 2 3 4 5 6 7 8")
    (tmp_path / "stat").write_text("\n".join((*cores, "intr 1")))
    monkeypatch.setattr(core_use, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 7})
    monkeypatch.setattr(os, "sysconf", lambda _: 10)
    monkeypatch.setattr(core_use, "num_cores", lambda: 1)
    found = core_use.read_core_use()
    assert found is not None
    # The guests' time is part of the users'.
    assert (found.num_cores, found.num_at_once, found.idle_s) == (2, 1, 45.9)
    assert found.own_s + found.others_s == pytest.approx(19.8)
    assert CoreUse(2, 1, 7.0, 5.0, 2.0).since(CoreUse(2, 1, 4.0, 1.0, 2.0)) == CoreUse(2, 1, 3.0, 4.0, 0.0)
    for content in ("", "cpu0 a\n", "cpu0\n"):
        (tmp_path / "stat").write_text(content)
        assert core_use.read_core_use() is None
    (tmp_path / "stat").unlink()
    assert core_use.read_core_use() is None


def test_the_processes_that_a_run_started_are_its_own_while_they_live():
    if core_use.read_core_use() is None:
        pytest.skip("this system does not tell how its cores are used")
    spinning = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True); input()"
    before = core_use.read_core_use()
    with subprocess.Popen([sys.executable, "-c", spinning], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        after = core_use.read_core_use()
        child.communicate(b"\n")
    assert before is not None
    assert after is not None
    assert after.since(before).own_s >= 0.45


def test_every_option_that_a_verdict_names_exists():
    from loopfeed.engine.commands.cli import main

    options = {name for each in main.params for name in (*each.opts, *each.secondary_opts)}
    advice = " ".join(
        judge(launch, about).advice
        for launch in (
            READING,
            SNAPSHOTS,
            LAUNCH,
            waiting({"copy": 20.0}),
            waiting({"source": 20.0}),
            waiting({"read": 20.0}, p50_s=0.0),
            EVALUATING,
        )
        for about in (LOCAL, STORED, OWN, replace(SYNTHETIC, is_cpu=False))
    )
    named = {word.strip("(),;") for word in advice.split() if word.strip("(),;").startswith("--")}
    assert len(named) >= 7
    assert named <= options


def test_goodput_adds_up_over_launches_and_counts_what_was_lost_once():
    first = replace(LAUNCH, goodput=Goodput(steps=60, evaluation=20, compilation=15, other=5))
    second = replace(first, started=250.0, ended=350.0, lost_s=40.0, lost_steps=90)
    found = add_up([first, second])
    # A quarter of the 160 s in the two loops.
    assert found == RunGoodput(
        steps=90, evaluation=30, compilation=30, other=10, lost=40, lost_steps=90, gaps=50
    )  # fmt: skip
    assert found.total == first.wall_s + second.wall_s
    assert add_up([LAUNCH]).lost == 0


def write_losses(path, times):
    path.write_text("".join(json.dumps({"step": step, "time": at}) + "\n" for step, at in enumerate(times, 1)))
    return [len("".join(json.dumps({"step": step, "time": at}) + "\n" for step, at in enumerate(times[:n], 1)))
            for n in range(len(times) + 1)]  # fmt: skip


def test_a_kill_costs_the_steps_after_the_snapshot(tmp_path):
    """The last update of the record was at step 5; the log goes to step 8, of which 3 are kept."""
    log = tmp_path / "loss.jsonl"
    sizes = write_losses(log, [111.0 + second for second in range(8)])
    log.write_bytes(log.read_bytes() + b'{"step": 9, "ti')
    killed = replace(LAUNCH, ended=115.0, end_step=5, state="running", goodput=Goodput(steps=5, compilation=10))
    found = find_rollback([killed], log, 3, sizes[3])
    assert (found.num_steps, found.seconds) == (5, 5.0)
    (last,) = found.launches
    assert (last.ended, last.end_step, last.goodput) == (118.0, 8, Goodput(steps=8, compilation=10))


def test_a_clock_that_is_set_forward_adds_at_most_a_minute(tmp_path):
    log = tmp_path / "loss.jsonl"
    sizes = write_losses(log, [111.0 + second + 36_000 * (second >= 6) for second in range(8)])
    killed = replace(LAUNCH, ended=115.0, end_step=5, state="running", goodput=Goodput(steps=5, compilation=10))
    found = find_rollback([killed], log, 3, sizes[3])
    assert (found.num_steps, found.seconds) == (5, 62.0)
    assert found.launches[0].goodput.steps == 65


def test_a_resume_that_was_killed_before_it_rewound_is_counted_once(tmp_path):
    log = tmp_path / "loss.jsonl"
    sizes = write_losses(log, [111.0 + second for second in range(8)])
    first = replace(LAUNCH, ended=118.0, end_step=8, goodput=Goodput(steps=8, compilation=10))
    killed = replace(LAUNCH, started=500.0, ended=510.0, start_step=3, end_step=3, state="running", lost_steps=5,
                     lost_s=5.0, goodput=Goodput(compilation=10))  # fmt: skip
    found = find_rollback([first, killed], log, 3, sizes[3])
    assert (found.launches, found.num_steps, found.seconds) == ((first, killed), 0, 0.0)


def test_a_rollback_over_several_launches_does_not_count_the_time_between_them(tmp_path):
    log = tmp_path / "loss.jsonl"
    sizes = write_losses(log, [111.0, 112.0, 113.0, 511.0, 512.0])
    first = replace(LAUNCH, ended=113.0, end_step=3, goodput=Goodput(steps=3, compilation=10))
    second = replace(first, started=500.0, ended=512.0, start_step=3, end_step=5, goodput=Goodput(steps=2, other=10))
    assert find_rollback([first, second], log, 1, sizes[1]).seconds == 2.0 + 2.0
    whole = find_rollback([first, second], log, 0, 0)
    assert (whole.num_steps, whole.seconds) == (5, 5.0)
    nothing = find_rollback([first, second], log, 5, sizes[5])
    assert (nothing.launches, nothing.num_steps, nothing.seconds) == ((first, second), 0, 0.0)


FULL = replace(
    LAUNCH,
    devices="8 × NVIDIA H200 with a long name",
    programs=(ProgramTimes("initial state", 1.0, 2.0, from_cache=True), ProgramTimes("training", 100.0, 20.0, False)),
    pulls=Pulls(10**7, 10**15, Times(10**7, 1e5, 1.0, 10.0, 100.0, 1e4), 1e5, dict.fromkeys(("read", "check"), 1e5), 9),
    pushes=Pushes(10**6, 10**12, Times(10**6, 1e5, 1.0, 1.0, 1.0, 1.0), 1e4, "ProgressSink"),
    ring=Ring(64, (RingSample(0.0, 0), RingSample(1.0, 64))),
    stalls=tuple(Stall(10**6 + n, 1e3, "read", "s3://bucket/" + "long/" * 30 + str(n)) for n in range(20)),
    reader=ReaderTimes(1e5, 1e5, 1e5, 1e5, 1e5, 10**15, 64),
    snapshots=SnapshotTimes(100, 10, 10**13, 1e3, Times(100, 1e4, 1.0, 1.0, 1.0, 1.0), 1e3),
    memory=MemoryPeaks(10**11, 10**11, 10**11),
    slow_operations=SLOW * 9,
    goodput=Goodput(1e5, 1e5, 1e5, 1e5, 1e5, 1e5),
    verdict=Verdict("device", "it computed " * 12, "advice " * 12),
)


@pytest.mark.parametrize("launch", [FULL, LAUNCH], ids=["full", "empty"])
def test_the_report_fits_a_terminal(launch):
    launches = (launch,) * 12
    goodput = replace(add_up(launches), lost=1e5, lost_steps=10**6, gaps=1e6)
    lines = describe_runtime(RuntimeReport(launches, goodput)).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 40
    assert lines[0].startswith("runtime report: launch 12 of 12, 500 steps after step 0, done")


@pytest.mark.parametrize("width", [40, 60, 79])
def test_the_report_of_a_narrow_terminal_breaks_between_words_and_keeps_its_tables(width):
    report = RuntimeReport((FULL,), add_up([FULL]))
    wide, lines = describe_runtime(report), describe_runtime(report, width).splitlines()
    assert [line for line in lines if len(line) > width and len(line.split()) > 1] == []
    assert {word for line in lines for word in line.split()} <= {*wide.split(), "traced", "compiled"}
    (titles,) = (line for line in lines if line.split()[:1] == ["count"])
    (row,) = (line for line in lines if line.strip().startswith("push "))
    # Each number ends below its title.
    assert len(titles.split()) == len(row.replace(" s", "").split()) - 1
    assert len(titles) == len(row)


def test_the_report_says_what_the_record_says():
    text = " ".join(describe_runtime(RuntimeReport((FULL,), add_up([FULL]))).split())
    for part in ("training 100.00 s 20.00 s", "2.00 s from the cache", "3 × convolution f32[8] in conv1",
                 "6 other kinds of operations", "step 1,000,000: 1,000 s, read of …", "host 100.0 GB", "32 ready",
                 "push 1,000,000 100,000 s 1.00 s", "verdict: the run was bound by the device"):  # fmt: skip
        assert part in text


class Watched:
    """A watchdog whose clock and progress a test sets."""

    def __init__(self, warn_s=10.0):
        self.now, self.steps = 0.0, 0
        self.said: list[str] = []
        self.kept: list[str] = []
        self.dog = Watchdog(
            warn_s,
            self,
            say=self.said.append,
            keep=self.kept.append,
            clock=lambda: self.now,
        )

    def progress(self):
        return self.steps

    def describe(self):
        return "the loop waits for nobody"

    def continues(self):
        return True

    def look(self, now, steps=0):
        self.now, self.steps = now, steps
        self.dog.look()


def test_the_watchdog_warns_at_doubling_distances_and_says_when_the_run_continues():
    watched = Watched()
    for second in range(100):
        watched.look(float(second))
    waits = [10, 20, 40, 80]
    assert watched.said == [f"warning: no step for {wait} s: the loop waits for nobody" for wait in waits]
    assert len(watched.kept) == 4
    watched.look(100.0, steps=1)
    assert watched.said[4:] == ["the run continues after 100 s without a step"]
    watched.look(105.0, steps=2)
    watched.look(114.0, steps=2)
    assert len(watched.said) == 5
    watched.look(115.0, steps=2)
    assert watched.said[5] == "warning: no step for 10 s: the loop waits for nobody"


def test_a_stall_is_reported_even_if_nobody_can_say_why():
    watched = Watched()
    none: dict[str, str] = {}
    watched.describe = lambda: none["step"]  # type: ignore[method-assign]
    watched.look(10.0)
    assert watched.said == ["warning: no step for 10 s: who waits for whom is unknown (KeyError: 'step')"]
    assert "Thread MainThread (" in watched.kept[0]


def test_the_stacks_of_all_threads_but_those_that_wait_for_work_are_named():
    reached, ended = threading.Event(), threading.Event()

    def wait_in_a_function_of_this_name():
        reached.set()
        ended.wait(30)

    thread = threading.Thread(target=wait_in_a_function_of_this_name, name="the-one-that-waits")
    thread.start()
    assert reached.wait(10)
    Worker(int, "ended").start().result(10)
    text = describe_threads()
    ended.set()
    thread.join(10)
    assert "Thread the-one-that-waits (" in text
    assert "wait_in_a_function_of_this_name" in text
    assert "Thread MainThread (" in text
    assert "spare" not in text


class Recorded(Watched):
    def report(self, state, samples):
        launch = replace(LAUNCH, state=state)
        return RuntimeReport((launch,), add_up([launch]))

    def sample_ring(self):
        return None


def monitor(write, *, said, stalls=b""):
    return RuntimeMonitor(Recorded(), write=write, stalls=stalls, say=said.append)


def test_the_record_is_written_at_once_and_whole_at_the_end():
    written: list[tuple[str, bytes]] = []
    first = threading.Event()

    def write(name, content):
        written.append((name, content))
        first.set()

    watching = monitor(write, said=[], stalls=b"before\n")
    watching.start()
    assert first.wait(10)
    assert decode_runtime(written[0][1]).last.state == "running"
    watching.keep_stall("who waits")
    report = watching.finish("done")
    assert decode_runtime(written[-1][1]) == report
    assert report.last.state == "done"
    stalls = [content.decode() for name, content in written if name == "stalls.txt"]
    assert stalls[-1].startswith("before\n=====")
    assert stalls[-1].endswith("who waits\n")


def test_a_disk_that_fails_is_reported_once_and_stops_nothing():
    said: list[str] = []

    def write(name, content):
        raise OSError(28, "No space left on device")

    watching = monitor(write, said=said)
    watching.start()
    watching.write_soon()
    report = watching.finish("done")
    assert report.last.state == "done"
    assert said == [
        "warning: runtime.json could not be written (No space left on device); the run continues without it"
    ]


@pytest.mark.usefixtures("no_spare_threads")
def test_a_system_without_threads_is_reported_and_stops_nothing(monkeypatch):
    said: list[str] = []

    def refuse(_):
        raise RuntimeError("can't start new thread")

    watching = monitor(lambda name, content: None, said=said)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        watching.start()
    assert watching.finish("done").last.state == "done"
    assert said == ["warning: the run is not watched (can't start new thread)"]


def test_a_folder_that_is_lost_is_left_to_the_run_to_report(tmp_path):
    said: list[str] = []

    def write(name, content):
        raise LostFileError.of(tmp_path)

    watching = monitor(write, said=said)
    watching.start()
    watching.finish("failed")
    assert said == []


@pytest.mark.timeout(30)
def test_a_disk_that_hangs_delays_the_end_by_a_limited_time():
    said: list[str] = []
    hangs = threading.Event()
    watching = monitor(lambda name, content: hangs.wait(60), said=said)
    watching.start()
    started = time.monotonic()
    watching.finish("done", 0.2)
    assert time.monotonic() - started < 10
    hangs.set()
    assert said == ["warning: runtime.json was not written within 0.2 s: check the disk of the run folder"]


def test_old_reports_of_stalls_are_dropped_whole(monkeypatch):
    monkeypatch.setattr("loopfeed.engine.runtime.monitor.MOST_STALLS_BYTES", 400)
    written: list[bytes] = []
    watching = monitor(lambda name, content: written.append(content) if name == "stalls.txt" else None, said=[])
    for number in range(9):
        watching.keep_stall(f"report {number} " + "x" * 50)
    watching.start()
    watching.finish("done")
    text = written[-1].decode()
    assert text.startswith("=" * 80 + "\nreport ")
    assert text.endswith("report 8 " + "x" * 50 + "\n")
    assert len(text) <= 400


def test_what_was_lost_before_is_not_lost_again(tmp_path):
    """Launch 1 made steps 1 to 5, and launch 2 made 2 to 4 again; a third one begins after step 1 as well."""
    log = tmp_path / "loss.jsonl"
    sizes = write_losses(log, [111.0, 511.0, 512.0, 513.0])
    first = replace(LAUNCH, ended=115.0, end_step=5, goodput=Goodput(steps=5, compilation=10))
    second = replace(first, started=500.0, ended=513.0, start_step=1, end_step=4, lost_s=4.0, lost_steps=4,
                     goodput=Goodput(steps=3, other=10))  # fmt: skip
    found = find_rollback([first, second], log, 1, sizes[1])
    assert (found.num_steps, found.seconds) == (3, 3.0)


def test_only_the_newest_launches_keep_their_lists():
    launches = without_details([replace(LAUNCH, stalls=(Stall(1, 1.0, "read", None),))] * 13)
    assert [len(each.stalls) for each in launches] == [0] * 3 + [1] * 10


def test_samples_of_the_ring_are_bounded_and_evenly_spaced():
    samples = RingSamples(every_s=1.0)
    for second in range(10_000):
        samples.offer(RingSample(float(second), second))
    times = [each.time_s for each in samples.all()]
    assert 100 <= len(times) <= 240
    assert {after - before for before, after in pairwise(times)} == {64.0}


def test_a_clock_that_is_set_back_hides_no_loss(tmp_path):
    log = tmp_path / "loss.jsonl"
    sizes = write_losses(log, [111.0 + second - 3600 * (second >= 4) for second in range(8)])
    ended = replace(LAUNCH, ended=118.0, end_step=8, goodput=Goodput(steps=8, compilation=10))
    found = find_rollback([ended], log, 4, sizes[4])
    assert (found.num_steps, found.seconds) == (4, 4.0)
