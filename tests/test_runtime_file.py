"""`runtime.json`: what is written is read back, and what is no such record is refused with its name."""

import json
import math
from dataclasses import fields
from pathlib import Path

import pytest

from loopfeed.engine.records.run_folder import RUNTIME
from loopfeed.engine.runtime.record import (
    Compilations,
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
from loopfeed.engine.runtime.runtime_file import decode_runtime, encode_runtime, read_runtime
from loopfeed.engine.spans import Times

LAUNCH = LaunchRuntime(
    started=10.0,
    ended=30.5,
    start_step=0,
    end_step=7,
    state="done",
    versions={"jax": "1"},
    devices="cpu",
    programs=(ProgramTimes("training", 0.5, 1.5, from_cache=True),),
    pulls=Pulls(7, 700, Times(7, 1.0, 0.1, 0.2, 0.3, 0.5), 0.25, {"read": 1.0}),
    ring=Ring(4, (RingSample(0.5, 3), RingSample(1.5, 0))),
    stalls=(Stall(3, 0.5, "read", "pixels/c/0/0/0"), Stall(2, 0.25, "source", None)),
    memory=MemoryPeaks(host=1 << 20),
    slow_operations=(SlowOperation("product", "forward/dot", "s8[2,2]", "no kernel", 2),),
    goodput=Goodput(steps=10, compilation=5.5, waiting=5),
    cores=CoreUse(2, 2, 1.5, 0.25, 0.5),
    verdict=Verdict("reading", "the loop waited", "--prefetch 8"),
)
REPORT = RuntimeReport((LAUNCH, LaunchRuntime(40, 41, 7, 7, "running", {}, "cpu")), RunGoodput(steps=10, gaps=9.5))


def test_a_report_is_read_back_as_it_was_written(tmp_path):
    assert read_runtime(tmp_path) is None
    (tmp_path / RUNTIME).write_bytes(encode_runtime(REPORT))
    assert read_runtime(tmp_path) == REPORT


def test_unknown_keys_are_ignored_and_missing_ones_have_their_defaults():
    values = json.loads(encode_runtime(REPORT))
    values["later"] = values["launches"][0]["later"] = 1
    del values["launches"][0]["memory"]
    found = decode_runtime(json.dumps(values).encode()).launches[0]
    assert found.memory == MemoryPeaks()
    assert found.stalls == LAUNCH.stalls


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.update(format=2), "format must be 1, got 2"),
        (lambda values: values.update(launches=[]), "must have a launch"),
        (lambda values: values["launches"][0].update(end_step=1.5), "end_step has the value 1.5"),
        (lambda values: values["launches"][0].update(state="odd"), "state has the value 'odd'"),
        (lambda values: values["launches"][0].pop("started"), "started"),
        (lambda values: values["launches"][0].update(started=10**400), "started has the value 1000"),
        (lambda values: values["launches"][0].update(end_step=10**400), "end_step has the value 1000"),
        (lambda values: values["launches"][0]["goodput"].update(steps=math.nan), "steps has the value nan"),
        (lambda values: values["launches"][0].update(ended=math.inf), "ended has the value inf"),
        (lambda values: values["goodput"].update(lost=1e300), "lost has the value 1e"),
        (lambda values: values["launches"][0]["pulls"].update(waits=[]), "waits has the value"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path, change, message):
    values = json.loads(encode_runtime(REPORT))
    change(values)
    (tmp_path / RUNTIME).write_text(json.dumps(values))
    with pytest.raises(ValueError, match=f"runtime.json is not a record of launches.*{message}"):
        read_runtime(tmp_path)


def test_the_reference_has_every_key():
    page = (Path(__file__).parents[1] / "docs/reference/run-folder.md").read_text(encoding="utf-8")
    parts = (LaunchRuntime, RunGoodput, Pulls, Pushes, Ring, Stall, ReaderTimes, SnapshotTimes, MemoryPeaks, Times,
             Compilations, ProgramTimes, SlowOperation, Verdict, CoreUse)  # fmt: skip
    assert [each.name for part in parts for each in fields(part) if f"`{each.name}`" not in page] == []
