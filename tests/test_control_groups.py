"""The cores and the memory that the control groups of a container leave to this process."""

import os
from pathlib import Path

import pytest

from loopfeed.preprocess import control_groups
from loopfeed.preprocess.control_groups import host_memory_bytes, num_allowed_cores, num_cores

TOTAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
V2 = "29 23 0:26 {root} {at} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "36 31 0:33 {root} {at} rw - cgroup cgroup rw,{controllers}\n"
NONE_V1 = 9223372036854771712  # what the kernel writes where there is no limit


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Return a function that makes this process a member of groups with files in them."""

    def set_up(mounts, members, files):
        lines = [form.format(at=str(tmp_path / name).replace(" ", r"\040"), **more) for form, name, more in mounts]
        (tmp_path / "mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + "".join(lines))
        (tmp_path / "cgroup").write_text(members)
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        monkeypatch.setattr(control_groups, "_MOUNTS", tmp_path / "mountinfo")
        monkeypatch.setattr(control_groups, "_MEMBERSHIP", tmp_path / "cgroup")
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))

    return set_up


UNIFIED = [(V2, "all", {"root": "/"})]
MEMBER_V2 = "1:name=systemd:/elsewhere\n0::/user/run\n"


@pytest.mark.parametrize(
    ("limits", "memory", "cores"),
    [
        ({}, TOTAL, 16),
        ({"": ("max", "max 100000")}, TOTAL, 16),
        ({"": ("5000", "400000 100000")}, 5000, 4),
        ({"user": ("7000", "150000 100000"), "user/run": ("max", "max 100000")}, 7000, 2),
        ({"": ("9000", "900000 100000"), "user": ("6000", "20000 100000"), "user/run": ("8000", "max 1000")}, 6000, 1),
        ({"user/run": ("4000", "3200000 100000"), "user/other": ("1", "1000 100000")}, 4000, 16),
    ],
)
def test_the_least_limit_of_the_groups_counts(groups, limits, memory, cores):
    files: dict[str, str] = {}
    for group, (num_bytes, cpu) in limits.items():
        files |= {f"all/{group}/memory.max": num_bytes, f"all/{group}/cpu.max": cpu}
    groups(UNIFIED, MEMBER_V2, files)
    assert (host_memory_bytes(), num_cores(), num_allowed_cores()) == (memory, cores, 16)


@pytest.mark.parametrize(
    ("cpu_root", "member", "group"),
    [
        ("/", "/slurm/job_1", "slurm/job_1"),  # the machine's own view
        ("/docker/abc", "/docker/abc", ""),  # a container: its group is what is mounted
        ("/docker/abc", "/docker/abc/in side", "in side"),
        ("/docker/abc", "/other", ""),  # a view of another name space
        ("/", "/../../other", ""),
    ],
)
def test_version_1_has_a_hierarchy_for_each_controller(groups, cpu_root, member, group):
    mounts = [
        (V1, "my cpu", {"root": cpu_root, "controllers": "cpu,cpuacct"}),
        (V1, "memory", {"root": cpu_root, "controllers": "memory"}),
        (V1, "cpuset", {"root": cpu_root, "controllers": "cpuset"}),
        (V2, "unified", {"root": "/"}),
    ]
    members = f"5:cpuset:/wrong\n4:memory:{member}\n2:cpu,cpuacct:{member}\n0::/\n"
    files = {
        f"my cpu/{group}/cpu.cfs_quota_us": "250000",
        f"my cpu/{group}/cpu.cfs_period_us": "100000",
        f"memory/{group}/memory.limit_in_bytes": "6000000",
        "cpuset/cpu.cfs_quota_us": "1000",
        "cpuset/cpu.cfs_period_us": "100000",
    }
    groups(mounts, members, files)
    assert (host_memory_bytes(), num_cores()) == (6000000, 3)


def test_version_1_without_limits_has_the_whole_machine(groups):
    mounts = [(V1, name, {"root": "/", "controllers": name}) for name in ("cpu", "memory")]
    files = {
        "cpu/cpu.cfs_quota_us": "-1",
        "cpu/cpu.cfs_period_us": "100000",
        "memory/memory.limit_in_bytes": str(NONE_V1),
    }
    groups(mounts, "4:memory:/\n1:cpu:/\n", files)
    assert (host_memory_bytes(), num_cores()) == (TOTAL, 16)


def test_a_system_without_groups_has_all_its_memory_and_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(control_groups, "_MEMBERSHIP", tmp_path / "nowhere")
    assert (host_memory_bytes(), num_cores()) == (TOTAL, num_allowed_cores())
    assert list(control_groups.group_folders("cpu")) == list[Path]()
