"""The cores that a process may use, and the threads of XLA and oneDNN that follow from them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from preprocess.cores import num_allowed_cores


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_the_number_of_cores_is_that_of_the_schedulers_affinity():
    allowed = os.sched_getaffinity(0)
    assert num_allowed_cores() == len(allowed)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert num_allowed_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(("found", "expected"), [(6, 6), (None, 1)])
def test_without_affinity_all_cores_of_the_machine_count(monkeypatch, found, expected):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: found)
    assert num_allowed_cores() == expected


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="this system does not list its threads")
@pytest.mark.parametrize(("environment", "expected"), [({}, 3), ({"PJRT_NPROC": "5"}, 5)])
def test_xla_has_as_many_threads_as_the_quota_or_the_user_says(environment, expected):
    program = """
import os
from pathlib import Path
from unittest.mock import patch
from engine import xla_threads
from engine.crossing.choice import this_platform
with patch.multiple(xla_threads, num_cores=lambda: 3, num_allowed_cores=lambda: 64):
    this_platform()
print(sum(path.read_text().startswith("tf_XLAExecute") for path in Path("/proc/self/task").glob("*/comm")))
"""
    kept = {name: value for name, value in os.environ.items() if name != "PJRT_NPROC"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=kept | environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert int(done.stdout) == expected
