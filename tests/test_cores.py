"""The cores that a process may use, and the threads of XLA and oneDNN that follow from them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loopfeed.engine import xla_threads
from loopfeed.models import xla_threads as kernels_threads
from loopfeed.preprocess.control_groups import num_allowed_cores

ROOT = Path(__file__).parents[1]


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
import os, sys
from pathlib import Path
from unittest.mock import patch
from loopfeed.engine import xla_threads
from loopfeed.engine.crossing.choice import this_platform
from loopfeed.engine.records.machine import describe_machine
with patch.multiple(xla_threads, num_cores=lambda: 3, num_allowed_cores=lambda: 64):
    this_platform()
assert str(os.environ.get("PJRT_NPROC")) == sys.argv[1]  # nothing is left to the children
assert describe_machine("cpu", "", {})["threads"] == sys.argv[2]
print(sum(path.read_text().startswith("tf_XLAExecute") for path in Path("/proc/self/task").glob("*/comm")))
"""
    kept = {name: value for name, value in os.environ.items() if name != "PJRT_NPROC"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(environment.get("PJRT_NPROC")), str(expected)],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert int(done.stdout) == expected


IN_A_SOURCE = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax, jax.numpy as jnp, numpy as np
from loopfeed import TrainConfig, train
from tests.toy import Linear
def batches(step):
    key = jax.random.key(step)
    labels = jnp.argsort(jax.random.normal(key, (300,)))[:8] % 3
    return np.asarray(jax.random.randint(key, (8, 4, 4), 0, 2**24, jnp.uint32)), np.asarray(labels)
config = TrainConfig(steps=60, batch=8, num_classes=3, learning_rate=0.1, infeed_timeout_s=20.0, devices=sys.argv[1])
print(train(config, model=Linear(), batches=batches).steps_done)
"""


@pytest.mark.integration
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
def test_a_source_may_use_jax_where_devices_are_as_many_as_cores(devices):
    done = run_program(IN_A_SOURCE, devices)
    assert done.stdout == "60\n", done.stderr


@pytest.mark.parametrize(("cores", "devices", "threads"), [(1, 1, 2), (2, 2, 3), (2, 1, None), (4, 8, 9)])
def test_there_is_a_thread_of_xla_for_the_source(monkeypatch, cores, devices, threads):
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    monkeypatch.setattr(xla_threads, "_has_devices", lambda: False)
    monkeypatch.setattr(xla_threads, "num_cores", lambda: cores)
    monkeypatch.setattr(xla_threads, "num_allowed_cores", lambda: 64)
    monkeypatch.setattr(kernels_threads, "_chosen", None)
    xla_threads.spare_thread(devices)
    assert kernels_threads.given_num_threads() == threads
    with xla_threads.fitting_threads():
        assert os.environ["PJRT_NPROC"] == str(threads or cores)
    assert "PJRT_NPROC" not in os.environ
    assert kernels_threads.given_num_threads() == (threads or cores)


FORKED = """
import os, sys, warnings
warnings.simplefilter("ignore")
from loopfeed import TrainConfig, train
from tests.toy import Linear, toy_batch
import jax
if sys.argv[1] == "used":
    jax.devices()
child = os.fork()
if child:
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    config = TrainConfig(steps=3, batch=8, num_classes=3, learning_rate=0.1)
    try:
        print(train(config, model=Linear(), batches=toy_batch).steps_done, flush=True)
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize(
    ("use", "said"),
    [("unused", "3\n0\n"), ("used", "this process was forked from one in which jax was in use already")],
)
def test_a_forked_process_trains_or_is_refused(use, said):
    done = run_program(FORKED, use)
    assert done.stdout.startswith(said), done.stderr
    assert done.stdout.endswith("\n0\n")


def run_program(program, *words):
    kept = {name: value for name, value in os.environ.items() if name != "PJRT_NPROC"}
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=120)
