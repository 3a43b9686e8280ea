"""The kind ``calls`` of scripts/torture: the shim changes the calls that it is told to, and wrong results are found."""

import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.torture_campaign.call_faults import CallFault, build_shim, draw_call_fault, read_calls, watching
from scripts.torture_campaign.calls import judge_kept, judge_message
from scripts.torture_campaign.case import Verdict
from tests.test_torture import finished

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the campaign needs Linux"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="the shim is built by a C compiler"),
]

PROGRAM = """
import mmap, os, shutil, subprocess, sys
os.mkdir("sub")
with open("a", "wb", buffering=0) as file:
    count = file.write(b"12345678")
    os.fsync(file.fileno())
    os.ftruncate(file.fileno(), count)
os.rename("a", "sub/b")
with open("sub/b", "rb", buffering=0) as file:
    parts = [file.read(8), os.pread(file.fileno(), 8, 0), os.preadv(file.fileno(), [bytearray(8)], 0)]
    mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
subprocess.run([sys.executable, "-c", "import os; open('sub/b').read(); open('sub/b').read(1)"], check=True)
print(os.stat("sub/b").st_size, *map(len, parts[:2]), parts[2], *os.listdir("sub"))
shutil.rmtree("sub")
"""
FAULT = CallFault("read", "sub/b", 1, 9, "EIO", "once")


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    built = build_shim(tmp_path_factory.mktemp("shim"))
    assert isinstance(built, Path)
    return built


def run(shim, folder, orders):
    """Run the program in a folder; return the last line that it prints, and whether it is an error."""
    (folder / "disk").mkdir()
    environment = os.environ | {"LD_PRELOAD": str(shim)} | orders
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=folder / "disk",
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return (done.stderr or done.stdout).strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("changes", "ends"),
    [
        ({"nth": 99}, "8 8 8 8 b"),
        ({}, "OSError: [Errno 5] Input/output error"),
        ({"change": "short"}, "8 4 8 8 b"),
        ({"change": "short", "others": "same"}, "8 4 4 4 b"),
        ({"change": "short", "nth": 3}, "8 8 8 4 b"),
        ({"change": "EINTR"}, "8 8 8 8 b"),  # Python calls again
        ({"change": "delay", "others": "same"}, "8 8 8 8 b"),
        ({"call": "write", "pattern": "a", "change": "short"}, "4 4 4 4 b"),
        ({"call": "create", "pattern": "a", "change": "ENOSPC"}, "OSError: [Errno 28] No space left on device: 'a'"),
        ({"call": "fsync", "pattern": "a"}, "OSError: [Errno 5] Input/output error"),
        ({"call": "truncate", "pattern": "a", "change": "ESTALE"}, "OSError: [Errno 116] Stale file handle"),
        ({"call": "close", "pattern": "a", "change": "ENOSPC"}, "OSError: [Errno 28] No space left on device"),
        ({"call": "rename", "pattern": "*b"}, "OSError: [Errno 5] Input/output error: 'a' -> 'sub/b'"),
        ({"call": "mmap", "change": "ENODEV"}, "OSError: [Errno 19] No such device"),
        ({"call": "mkdir", "pattern": "s*"}, "OSError: [Errno 5] Input/output error: 'sub'"),
        ({"call": "list", "pattern": "sub", "change": "ESTALE"}, "OSError: [Errno 116] Stale file handle: 'sub'"),
        ({"call": "unlink"}, "OSError: [Errno 5] Input/output error: 'b'"),
        # The calls of child processes are counted together; the fifth is the child's.
        ({"nth": 5, "others": ("stat",)}, "returned non-zero exit status 1."),
    ],
)  # fmt: skip
def test_the_shim_changes_these_calls_alone(shim, tmp_path, changes, ends):
    fault = replace(FAULT, **changes)
    assert run(shim, tmp_path, fault.environment(tmp_path / "disk", tmp_path / "log")).endswith(ends)
    changed = read_calls(tmp_path / "log")
    assert bool(changed) == (fault.nth != 99)
    assert {fault.call} <= {call for call, _ in changed} or fault.nth == 99


def test_without_a_fault_the_shim_notes_each_call_below_its_folder(shim, tmp_path):
    assert run(shim, tmp_path, watching(tmp_path / "disk", tmp_path / "log")) == "8 8 8 8 b"
    calls = read_calls(tmp_path / "log")
    expected = {("mkdir", "sub"): 1, ("create", "a"): 1, ("write", "a"): 1, ("fsync", "a"): 1, ("truncate", "a"): 1,
                ("close", "a"): 1, ("rename", "sub/b"): 1, ("mmap", "sub/b"): 1, ("unlink", "sub/b"): 1}  # fmt: skip
    assert {key: calls[key] for key in expected} == expected
    assert all(not path.startswith("/") for _, path in calls)


def test_the_same_number_draws_the_same_fault_and_all_changes_are_drawn():
    calls = {("read", "a"): 3, ("write", "b"): 5, ("stat", "c*"): 1, ("mmap", "c*"): 2}

    def faults(seed, calls=calls):
        return [draw_call_fault(calls, random.Random(f"{seed}/{number}")) for number in range(400)]

    drawn = faults(1)
    assert drawn == faults(1) != faults(2)
    more = faults(1, calls | {("write", "b"): 12, ("read", "d"): 1})
    assert {other.pattern for one, other in zip(drawn, more, strict=True) if one != replace(other, nth=one.nth,
                                                                        count=one.count)} == {"d"}  # fmt: skip
    assert {each.change for each in drawn if each.call == "read"} == {"EIO", "ESTALE", "EINTR", "short", "delay"}
    assert {each.nth for each in drawn if each.call == "write"} == set(range(1, 6))
    assert all(each.others == "once" for each in drawn if each.change == "EINTR")
    assert {each.change for each in drawn if "write" in each.others} == {"ENOSPC", "EIO", "ESTALE"}


@pytest.mark.parametrize(
    ("change", "message", "verdict"),
    [
        ("EIO", "/disk/pack/train/manifest.json can't be read: Input/output error; check the disk", Verdict.DETECTED),
        ("ENOSPC", "/disk/run/loss.jsonl cannot be written: make room on its disk", Verdict.DETECTED),
        ("EIO", "/disk/run/loss.jsonl cannot be written: make room on its disk", Verdict.WRONG),
        ("ESTALE", "/disk/pack/train/manifest.json does not exist", Verdict.WRONG),
        ("EIO", "/disk/pack/train/pixels/c/0/0/0 is damaged", Verdict.WRONG),
        ("EIO", "a file cannot be read or written", Verdict.WRONG),
        ("delay", "/disk/pack/train/pixels/c/0/0/0 was read too slowly", Verdict.WRONG),
    ],
)
def test_a_message_must_name_a_file_and_be_true(change, message, verdict):
    ended = finished("run-train", 2, err=f"run-train: {message}")
    assert judge_message(ended, replace(FAULT, change=change), ["/disk/"]).verdict is verdict


def test_what_a_resumed_run_had_must_be_kept(tmp_path):
    before = {"run/snapshots/4/a": b"a", "run/loss.jsonl": b"1\n2\n", "run/eval.jsonl": b"", "pack/val/a": b"b"}

    def why(**changes):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for key, content in {**before, **changes}.items():
            (folder / key).parent.mkdir(parents=True, exist_ok=True)
            (folder / key).write_bytes(content)
        return judge_kept("run-train", "resume", folder, before).why

    assert "no readable weights" in why()
    assert "lost lines of run/loss.jsonl" in why(**{"run/loss.jsonl": b"1\n"})
    assert "1 files" in why(**{"run/snapshots/4/a": b"?"})
    assert "1 files" in why(**{"pack/val/a": b"?"})
    assert judge_kept("run-eval", "evaluate", tmp_path / "0", before).verdict is Verdict.HARMLESS
