"""The cores that a process may use."""

import os

import pytest

from preprocess.cores import num_cores


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_the_number_of_cores_is_that_of_the_schedulers_affinity():
    allowed = os.sched_getaffinity(0)
    assert num_cores() == len(allowed)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert num_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(("found", "expected"), [(6, 6), (None, 1)])
def test_without_affinity_all_cores_of_the_machine_count(monkeypatch, found, expected):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: found)
    assert num_cores() == expected
