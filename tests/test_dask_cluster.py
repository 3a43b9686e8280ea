"""Packing on a real Dask cluster: a scheduler and two workers, which are processes of this machine."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from loopfeed.preprocess.commands.cli import main
from loopfeed.preprocess.packing import dask_cluster
from loopfeed.preprocess.packing.dask_cluster import DaskCluster
from loopfeed.preprocess.shards.location import open_location
from tests.fake_source import files_of
from tests.object_servers import KEYS, SECRET, MotoServer, free_port
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("distributed") is None, reason="distributed is not installed"),
]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/howto/cluster-packing.md"
TIMEOUT_S = 120
MAIN = "from loopfeed.preprocess.commands.cli import main; main()"
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

    def logs(self):
        return "".join(path.read_text() for path in self._folder.glob("*.log"))

    def stop(self):
        for process in reversed(self._processes):
            process.kill()
            process.wait()


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


def start_client(source, dest, address, *options):
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, source, dest, *OPTIONS, *options, "--executor", "dask", "--scheduler", address],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def pack_with(source, dest, address):
    client = start_client(source, dest, address)
    output = client.communicate(timeout=TIMEOUT_S)[0]
    return client.returncode, output


def pack_here(source, dest, address):
    """Pack as `pack_with` does, but in this process."""
    return CliRunner().invoke(main, [*map(str, (source, dest)), *OPTIONS, "--executor", "dask", "--scheduler", address])


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


def test_workers_write_to_a_store_at_the_address_of_the_command_with_their_own_keys(
    cluster, source, expected, monkeypatch
):
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    with MotoServer() as server:
        for _ in range(2):
            cluster.add_worker()
        option = ["--storage-option", f"endpoint={server.endpoint}"]
        client = start_client(source, f"{server.url}/set", cluster.address, *option)
        store = open_location(f"{server.url}/set", storage_options={"endpoint": server.endpoint})
        wait_until(lambda: len(store.list_keys("train/journal/blocks/")) >= 2)
        journal = [store.read(key) or b"" for key in store.list_keys("train/journal/")]
        output = client.communicate(timeout=TIMEOUT_S)[0]
        assert client.returncode == 0, output
        assert {key: store.read(key) for key in store.list_keys()} == expected
    assert len(journal) >= 3
    assert SECRET not in output + cluster.logs()
    assert not any(SECRET.encode() in content for content in journal)


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


def test_a_scheduler_that_does_not_answer_is_an_error_within_the_limit(tmp_path, source, monkeypatch):
    monkeypatch.setattr(dask_cluster, "CONNECT_TIMEOUT_S", 1.0)
    result = pack_here(source, tmp_path / "again", "tcp://127.0.0.1:9")
    assert result.exit_code == 2
    assert "preprocess-imagenet: the Dask scheduler tcp://127.0.0.1:9 cannot be reached (" in result.stderr
    assert "check the address, such as tcp://node1:8786, and that the scheduler is running" in result.stderr
    assert not (tmp_path / "again").exists()


class Faults:
    """Loses the results of the first two tasks that end."""

    def __init__(self, cluster, dest):
        self._cluster, self._dest = cluster, dest
        self._worker = cluster.add_worker()
        self._result = DaskCluster._result
        self.lost = []

    def result(self, packing, future):
        if len(self.lost) < 2:
            self.lost.append(future.key)
            (self._lose_worker, self._lose_task)[len(self.lost) - 1](packing._client, future)
        return self._result(packing, future)

    def _lose_worker(self, *_):
        """Kill the only worker after it reported the end of the task; another one comes later."""
        self._worker.kill()
        self._worker.wait()
        Timer(3, self._cluster.add_worker).start()

    def _lose_task(self, client, future):
        """Let the scheduler forget a task, as if its worker had died before the record was written."""
        client.cancel([future])
        wait_until(lambda: future.status == "cancelled")
        block = int(future.key.rpartition("-")[2])
        (self._dest / f"train/journal/blocks/{block:08d}.json").unlink()


def test_results_that_are_lost_are_taken_from_the_journal_or_packed_again(
    tmp_path, cluster, source, expected, monkeypatch
):
    monkeypatch.setattr(dask_cluster, "_RESULT_TIMEOUT_S", 1.0, raising=False)
    faults, dest = Faults(cluster, tmp_path / "again"), tmp_path / "again"
    monkeypatch.setattr(DaskCluster, "_result", lambda *arguments: faults.result(*arguments))
    result = pack_here(source, dest, cluster.address)
    assert result.exit_code == 0, result.output
    assert len(faults.lost) == 2
    assert "train: 58 images of 2 classes packed." in result.output
    assert files_of(dest) == expected


HIDDEN = """
import importlib.metadata as metadata
found = metadata.distributions
metadata.distributions = lambda **given: [each for each in found(**given) if each.metadata["Name"] != "loopfeed"]
"""


def test_workers_without_loopfeed_or_with_another_version_are_named(tmp_path, cluster, source):
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden/sitecustomize.py").write_text(HIDDEN)
    worker = cluster.add_worker(PYTHONPATH=str(tmp_path / "hidden"))
    code, output = pack_with(source, tmp_path / "again", cluster.address)
    assert code == 2
    assert "has no loopfeed (needed: " in output
    assert "install the same versions on all machines" in output
    worker.kill()
    worker.wait()
    other = tmp_path / "other/loopfeed-0.0.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: loopfeed\nVersion: 0.0.1\n")
    cluster.add_worker(PYTHONPATH=f"{other.parent}:{ROOT}")
    code, output = pack_with(source, tmp_path / "again", cluster.address)
    assert code == 2
    assert "has loopfeed 0.0.1 instead of " in output
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


def page_blocks():
    """Return the blocks of the page that are not marked as not run."""
    blocks = re.findall(r"(<!-- not run -->\n)?```\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [body for mark, body in blocks if not mark]


def test_the_commands_of_the_page_give_the_pack_of_one_machine(tmp_path, source, expected, monkeypatch):
    """Run the commands as they are, but for addresses, the folders, and options for small images."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for name, value in (KEYS | {"PYTHONPATH": str(ROOT), "SLURM_CPUS_PER_TASK": "2"}).items():
        monkeypatch.setenv(name, value)
    with MotoServer() as server, started(tmp_path) as start:
        address = f"127.0.0.1:{free_port()}"
        values = {
            "/shared/imagenet": str(source),
            "/shared/": f"{tmp_path}/",
            "s3://bucket": server.url,
            "http://127.0.0.1:9000": server.endpoint,
            "tcp://node1:8786": f"tcp://{address}",
            "dask scheduler": f"dask scheduler --no-dashboard --host tcp://{address}",
            "preprocess-imagenet": f"preprocess-imagenet {' '.join(OPTIONS)}",
        }
        for body in page_blocks():
            for old, new in values.items():
                body = body.replace(old, new)
            if body.startswith("#!"):
                (tmp_path / "pack.sh").write_text(body)
                parts = [start("bash pack.sh", SLURM_ARRAY_TASK_ID=str(part)) for part in range(1, 5)]
                assert [part.wait(TIMEOUT_S) for part in parts] == [0] * 4
                continue
            for line in body.splitlines():
                process = start(line)
                if not line.startswith("dask"):
                    assert process.wait(TIMEOUT_S) == 0, (tmp_path / "log").read_text()
        store = open_location(f"{server.url}/imagenet", storage_options={"endpoint": server.endpoint})
        assert {key: store.read(key) for key in store.list_keys()} == expected
    for name in ("shards", "shards-of-array", "shards-of-dask"):
        assert files_of(tmp_path / name) == expected


@contextmanager
def started(folder):
    """Yield a function that starts a line of shell in ``folder``; what still runs at the end is stopped."""
    processes = []
    with (folder / "log").open("w") as log:

        def start(line, **environment):
            process = subprocess.Popen(
                ["bash", "-c", f"exec {line}"], cwd=folder, env=os.environ | environment, stdout=log, stderr=log
            )
            processes.append(process)
            return process

        try:
            yield start
        finally:
            for process in reversed(processes):
                process.terminate()  # so that a worker ends its processes
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                process.kill()
                process.wait()
