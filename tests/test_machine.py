"""What of a machine the bits depend on: recorded with each launch, and named where a run goes on elsewhere."""

import json
from typing import Any

import pytest

from loopfeed import replay_run, train
from loopfeed.engine.records import machine
from loopfeed.engine.records.machine import MACHINE, describe_machine, machine_differences, machine_warning
from loopfeed.engine.records.recorded_run import read_recorded
from loopfeed.models import xla_threads
from tests.toy import Linear, toy_batch, toy_config

XEON = "vendor_id : GenuineIntel\ncpu family : 6\nmodel : 143\nmodel name : Xeon\nflags : {}\n"
AVX2 = "sse4_2 avx avx2 fma"
AMX = f"{AVX2} avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16 amx_tile amx_bf16 amx_int8"


def described(monkeypatch, tmp_path, info, **environment):
    (tmp_path / "cpuinfo").write_text(info)
    with monkeypatch.context() as changed:
        changed.setattr(machine, "_CPU_INFO", tmp_path / "cpuinfo")
        changed.setattr(machine, "num_allowed_cores", lambda: 3)
        changed.setattr(xla_threads, "_chosen", None)
        for name in ("XLA_FLAGS", "PJRT_NPROC"):
            changed.delenv(name, raising=False)
        for name, value in environment.items():
            changed.setenv(name, value)
        return describe_machine("cpu", "", {"x64": False, "matmul_precision": None})


@pytest.mark.parametrize(
    ("flags", "limit", "instructions"),
    [
        (AVX2, "", "AVX2"),
        (AMX, "", "AMX"),
        (AMX, "--xla_cpu_max_isa=AVX512", "AVX512"),
        (AMX, "--xla_cpu_max_isa=AVX512 --xla_cpu_max_isa=sse4_2", "SSE4_2"),
        (AVX2, "--xla_cpu_max_isa=AMX", "AVX2"),
    ],
)
def test_the_instruction_sets_are_those_of_the_processor_up_to_the_limit(
    monkeypatch, tmp_path, flags, limit, instructions
):
    found = described(monkeypatch, tmp_path, XEON.format(flags), XLA_FLAGS=f"{limit} --xla_dump_to=/tmp/x")
    assert found == {
        "processor": "Xeon 6 143", "instructions": instructions, "threads": "3", "xla_flags": "", "jax_options": "",
    }  # fmt: skip


def test_flags_that_change_numbers_and_threads_are_recorded_in_one_order(monkeypatch, tmp_path):
    flags = "--xla_cpu_enable_fast_math=true --xla_dump_to=x --xla_backend_optimization_level=1"
    found = described(monkeypatch, tmp_path, XEON.format(AVX2), XLA_FLAGS=flags, PJRT_NPROC="2")
    assert found["xla_flags"] == "--xla_backend_optimization_level=1 --xla_cpu_enable_fast_math=true"
    assert found["threads"] == "2"
    arm = "CPU implementer : 0x41\nCPU part : 0xd40\nFeatures : fp asimd bf16 sve\n"
    found = described(monkeypatch, tmp_path, arm)
    assert found["instructions"] == "SVE"
    assert found["processor"].endswith("0x41 0xd40")
    card = describe_machine("gpu", "PJRT C API\ncuda 12090", {"x64": True, "matmul_precision": "highest"})
    assert (card["platform"], card["jax_options"]) == ("PJRT C API cuda 12090", "matmul_precision=highest x64=True")


def test_each_difference_is_named_and_what_is_unknown_is_none():
    one = {"processor": "A", "instructions": "AVX2", "threads": "2", "xla_flags": ""}
    other = {"processor": "B", "instructions": "AVX2", "threads": "1", "xla_flags": "--x"}
    assert machine_differences(one, one) == machine_differences(None, one) == []
    assert machine_differences(one, other) == [
        "the processor (A, now B)",
        "the threads of XLA, one for each core (2, now 1)",
        "XLA_FLAGS (none, now --x)",
    ]
    assert machine_differences(one, one | {"threads": "1"}, "free") == []
    threads = machine_differences(one, one | {"threads": "1"}, "settable")
    assert threads == [
        "the threads of XLA, one for each core (2, now 1; PJRT_NPROC=2 in the environment makes as many)"
    ]
    assert machine_warning([one, None], one) is None
    warning = machine_warning([other, one], one)
    assert warning is not None
    assert "only the same machine guarantees bit-identical results" in warning
    assert warning.count("(B, now A)") == 1


def test_a_resume_and_a_replay_name_what_differs(tmp_path, monkeypatch):
    run, told = tmp_path / "run", list[str]()
    how: dict[str, Any] = {"model": Linear(), "batches": toy_batch}
    train(toy_config(steps=2, run_dir=run, kernels="xla"), **how)
    here = read_recorded(run).machines[-1]
    train(toy_config(steps=3, run_dir=run, kernels="xla", resume=True), notify=told.append, **how)
    replay_run(run, from_step=0, model=Linear(), batches=toy_batch, notify=told.append)
    assert not [line for line in told if line.startswith("warning")]
    assert any(line.endswith("the same bits are expected") for line in told)

    told.clear()
    other = here | {"threads": "7", "instructions": "SSE4_2"}
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("loopfeed.engine.run.changes.describe_machine", lambda *_: other)
        train(toy_config(steps=4, run_dir=run, kernels="xla", resume=True), notify=told.append, **how)
    (warning,) = [line for line in told if line.startswith("warning")]
    assert f"the threads of XLA, one for each core ({here['threads']}, now 7;" in warning
    assert f"the instruction sets that XLA uses ({here['instructions']}, now SSE4_2)" in warning
    assert json.loads((run / "config.json").read_text())["earlier"][-1][MACHINE] == here
    recorded = read_recorded(run)
    assert [recorded.machine_at(step) for step in (1, 3, 4)] == [here, here, other]

    told.clear()
    report = replay_run(run, from_step=0, notify=told.append, **how)
    assert any(line.startswith("steps 1 … 3: ") and line.endswith("the same bits are expected") for line in told), told
    (denied,) = [line for line in told if line.startswith("step 4: ")]
    assert f" and the threads of XLA, one for each core (7, now {here['threads']}; PJRT_NPROC=7 in the" in denied
    assert report.is_same
    assert len(report.doubts) == 2


def test_a_record_of_an_earlier_version_promises_only_on_the_same_processor(tmp_path, monkeypatch):
    run, told = tmp_path / "run", list[str]()
    how: dict[str, Any] = {"model": Linear(), "batches": toy_batch}
    with monkeypatch.context() as earlier:
        for module in ("descriptions", "recorder"):
            earlier.setattr(f"loopfeed.engine.run.{module}.MACHINE", "another key")
        train(toy_config(steps=2, run_dir=run, kernels="xla"), **how)
    replay_run(run, from_step=0, notify=told.append, **how)
    assert any("on the same processor and cores, which the record lacks" in line for line in told)
    train(toy_config(steps=3, run_dir=run, kernels="xla", resume=True), notify=told.append, **how)
    assert not [line for line in told if line.startswith("warning")]
    recorded = read_recorded(run)
    assert recorded.machine_at(2) is None
    assert recorded.machine_at(3) is not None
