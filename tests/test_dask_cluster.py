"""Packing on a real Dask cluster: a scheduler and two workers, which are processes of this machine."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from preprocess.commands.cli import main
from tests.fake_source import files_of

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("distributed") is None, reason="distributed is not installed"),
]

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 120
MAIN = "from preprocess.commands.cli import main; main()"
OPTIONS = ("--size", "32", "--resize", "32", "--shard-images", "4")


class Cluster:
    """A scheduler and its workers."""

    def __init__(self, folder):
        self._folder = folder
        self._processes = []
        self.scheduler = self._start(
            "scheduler", "--host", "127.0.0.1", "--port", "0", "--scheduler-file", "address.json"
        )
        found = folder / "address.json"
        wait_until(lambda: found.exists() and found.read_text().endswith("}"))
        self.address = json.loads(found.read_text())["address"]

    def add_worker(self, **environment):
        number = len(self._processes)
        worker = self._start("worker", self.address, "--no-nanny", "--nthreads", "1", environment=environment)
        wait_until(lambda: "Registered to" in (self._folder / f"{number}.log").read_text())
        return worker

    def _start(self, kind, *arguments, environment=None):
        with (self._folder / f"{len(self._processes)}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"distributed.cli.dask_{kind}", "--no-dashboard", *arguments],
                cwd=self._folder,
                env=os.environ | {"PYTHONPATH": str(ROOT)} | (environment or {}),
                stdout=log,
                stderr=log,
            )
        self._processes.append(process)
        return process

    def stop(self):
        for process in reversed(self._processes):
            process.kill()
            process.wait()


def wait_until(condition):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def cluster(tmp_path):
    folder = tmp_path / "cluster"
    folder.mkdir()
    started = Cluster(folder)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Two splits of 60 and 20 images of 900 × 700 pixels; three are damaged."""
    folder = tmp_path_factory.mktemp("source")
    rng = np.random.default_rng(0)
    for index in range(80):
        path = folder / ("train" if index < 60 else "val") / f"c{index % 2}" / f"{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (700, 900, 3), dtype=np.uint8)).save(path)
        if index in (5, 33, 70):
            path.write_bytes(path.read_bytes()[:5000])
    return folder


@pytest.fixture(scope="module")
def expected(source, tmp_path_factory):
    dest = tmp_path_factory.mktemp("expected")
    assert CliRunner().invoke(main, [str(source), str(dest), *OPTIONS]).exit_code == 0
    return files_of(dest)


def start_client(source, dest, address):
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, source, dest, *OPTIONS, "--executor", "dask", "--scheduler", address],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def pack_with(source, dest, address):
    client = start_client(source, dest, address)
    output = client.communicate(timeout=TIMEOUT_S)[0]
    return client.returncode, output


def num_blocks(dest):
    return len(list(dest.glob("train/journal/blocks/*.json")))


def test_a_lost_worker_changes_no_byte(tmp_path, cluster, source, expected):
    lost, kept = cluster.add_worker(), cluster.add_worker()
    client = start_client(source, tmp_path / "again", cluster.address)
    wait_until(lambda: num_blocks(tmp_path / "again") >= 3)
    lost.send_signal(signal.SIGKILL)
    num_packed = num_blocks(tmp_path / "again")
    output = client.communicate(timeout=TIMEOUT_S)[0]
    assert client.returncode == 0, output
    assert num_packed < 15
    assert "Packing on 2 workers of tcp://" in output
    assert "train: 58 images of 2 classes packed." in output
    assert "Left out: 2 (all listed in" in output
    assert kept.poll() is None
    assert files_of(tmp_path / "again") == expected
    assert (
        "val: 19 images of 2 classes packed (already complete)."
        in pack_with(source, tmp_path / "again", cluster.address)[1]
    )


def test_ctrl_c_stops_the_workers_and_the_same_command_continues(tmp_path, cluster, source, expected):
    cluster.add_worker()
    client = start_client(source, tmp_path / "again", cluster.address)
    wait_until(lambda: num_blocks(tmp_path / "again") >= 2)
    client.send_signal(signal.SIGINT)
    output = client.communicate(timeout=TIMEOUT_S)[0]
    assert client.returncode == 130, output
    assert "Stopped. Run the same command again to continue." in output
    assert "Traceback" not in output
    assert not list((tmp_path / "again").glob("*/manifest.json"))
    wait_until(lambda: not list((tmp_path / "again").rglob("*.__lock")))
    assert 2 <= num_blocks(tmp_path / "again") < 15
    code, output = pack_with(source, tmp_path / "again", cluster.address)
    assert code == 0, output
    assert files_of(tmp_path / "again") == expected


def test_a_lost_scheduler_is_an_error_and_a_part_continues(tmp_path, cluster, source, expected):
    cluster.add_worker()
    client = start_client(source, tmp_path / "again", cluster.address)
    wait_until(lambda: num_blocks(tmp_path / "again") >= 2)
    cluster.scheduler.kill()
    output = client.communicate(timeout=TIMEOUT_S)[0]
    assert client.returncode == 2, output
    assert "the connection to the scheduler tcp://" in output
    assert "was lost; run the same command again to continue" in output
    arguments = [str(source), str(tmp_path / "again"), *OPTIONS]
    refused = CliRunner().invoke(main, arguments)
    assert "this unfinished pack was begun with --executor dask; continue it in the same way" in refused.output
    assert CliRunner().invoke(main, [*arguments, "--part", "1/1"]).exit_code == 0
    assert files_of(tmp_path / "again") == expected


def test_a_scheduler_that_does_not_answer_is_an_error_within_20_seconds(tmp_path, source):
    start_s = time.monotonic()
    code, output = pack_with(source, tmp_path / "again", "tcp://127.0.0.1:9")
    assert code == 2
    assert "preprocess-imagenet: the Dask scheduler tcp://127.0.0.1:9 cannot be reached (" in output
    assert "check the address, such as tcp://node1:8786, and that the scheduler is running" in output
    assert time.monotonic() - start_s < 30  # the limit is 15 s; importing and starting take seconds on a busy machine
    assert not (tmp_path / "again").exists()


HIDDEN = """
import importlib.metadata as metadata
found = metadata.distributions
metadata.distributions = lambda **given: [each for each in found(**given) if each.metadata["Name"] != "feedloop"]
"""


def test_workers_without_feedloop_or_with_another_version_are_named(tmp_path, cluster, source):
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden/sitecustomize.py").write_text(HIDDEN)
    worker = cluster.add_worker(PYTHONPATH=str(tmp_path / "hidden"))
    code, output = pack_with(source, tmp_path / "again", cluster.address)
    assert code == 2
    assert "has no feedloop (needed: " in output
    assert "install the same versions on all machines" in output
    worker.kill()
    worker.wait()
    other = tmp_path / "other/feedloop-0.0.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: feedloop\nVersion: 0.0.1\n")
    cluster.add_worker(PYTHONPATH=f"{other.parent}:{ROOT}")
    code, output = pack_with(source, tmp_path / "again", cluster.address)
    assert code == 2
    assert "has feedloop 0.0.1 instead of " in output
    assert not (tmp_path / "again").exists()


def test_a_source_that_only_this_machine_has_is_an_error(tmp_path, cluster, source):
    """A folder that is there when it is listed, and gone for the worker that opens it."""
    for path in (tmp_path / "mine/c0/1.jpg", tmp_path / "mine/c1/2.jpg"):
        path.parent.mkdir(parents=True)
        path.write_bytes((source / "train/c0/2.jpg").read_bytes())
    client = start_client(tmp_path / "mine", tmp_path / "again", cluster.address)
    wait_until(lambda: (tmp_path / "again/train/journal/plan.json").exists())
    (tmp_path / "mine").rename(tmp_path / "gone")
    cluster.add_worker()
    output = client.communicate(timeout=TIMEOUT_S)[0]
    assert client.returncode == 2, output
    assert "preprocess-imagenet: worker tcp://127.0.0.1:" in output
    assert f"{tmp_path / 'mine'} does not exist" in output
