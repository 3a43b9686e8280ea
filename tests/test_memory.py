"""The memory that a process may have: the least limit of the groups that it lies in."""

import os

import pytest

from preprocess import memory
from preprocess.memory import host_memory_bytes

TOTAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, TOTAL),
        ({"": "max"}, TOTAL),
        ({"": "5000"}, 5000),
        ({"user": "7000", "user/run": "max"}, 7000),
        ({"": "9000", "user": "6000", "user/run": "8000"}, 6000),
        ({"user/run": "4000", "user/other": "1"}, 4000),
    ],
)
def test_the_least_limit_of_the_groups_counts(tmp_path, monkeypatch, limits, expected):
    for group in ("", "user", "user/run", "user/other"):
        (tmp_path / "groups" / group).mkdir(exist_ok=True, parents=True)
    for group, limit in limits.items():
        (tmp_path / "groups" / group / "memory.max").write_text(limit + "\n")
    (tmp_path / "membership").write_text("1:name=systemd:/elsewhere\n0::/user/run\n")
    monkeypatch.setattr(memory, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(memory, "_MEMBERSHIP", tmp_path / "membership")
    assert host_memory_bytes() == expected


def test_a_system_without_groups_has_all_its_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_MEMBERSHIP", tmp_path / "nowhere")
    assert host_memory_bytes() == TOTAL
