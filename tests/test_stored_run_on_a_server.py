"""Runs whose folder is on a real S3 server on this machine: killed, paused, left without their server, and resumed."""

import json
import re
import shutil
import signal
import time
from contextlib import contextmanager

import pytest

from loopfeed.engine.records.stored.lease import LEASE, Lease
from loopfeed.engine.records.stored.reading import download
from loopfeed.engine.records.stored.state import MARKER, OBJECTS, StoredState, read_state
from loopfeed.preprocess.demo.demo_set import draw_demo
from loopfeed.preprocess.shards.location import ShardError, open_location
from tests.object_servers import BUCKET, KEYS, MotoServer
from tests.store_commands import command, losses, same_weights, start
from tests.test_object_storage import TRAIN

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
RUN = [*TRAIN, "--eval-split", "off", "--snapshot-every", "10", "--data", "local"]


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patched, MotoServer() as running:
        for name, value in running.environment.items():
            patched.setenv(name, value)
        yield running


@pytest.fixture(scope="module")
def place(server, tmp_path_factory):
    """A working folder with a pack, an uninterrupted run of 60 steps, and a home folder of its own."""
    folder = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(folder / ".cache"))
        draw_demo(folder / "photos", num_images=200)
        command(folder, server, "preprocess-imagenet", "photos", "local", "--size", "32", "--shard-images", "64")
        command(folder, server, *RUN, "--steps", "60", "--run-dir", "whole", is_small=False)
        yield folder


def url_of(name):
    return f"s3://{BUCKET}/runs/{name}"


def wait_for(condition, process, limit_s=120.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def state_of(location) -> StoredState:
    state = read_state(location)
    assert state is not None
    return state


def holder_of(location):
    return json.loads(location.read(LEASE) or "{}").get("pid")


def has_snapshot(location, step):
    state = read_state(location)
    return state is not None and any(found >= step for found in state.snapshot_steps)


def check_same(place, url, name):
    download(open_location(url), place / name)
    assert losses(place / name) == losses(place / "whole")
    assert same_weights(place / name / "model.safetensors", place / "whole/model.safetensors")


@contextmanager
def stopped(server):
    server.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.signal(signal.SIGCONT)


def test_a_killed_run_is_resumed_from_the_store_alone_and_waits_for_a_paused_server(place, server):
    url = url_of("killed")
    location = open_location(url)
    # Of the size of the registry's, which takes long enough for a kill before its end.
    process = start(place, server, *RUN, "--steps", "60", "--run-dir", url, is_small=False)
    wait_for(lambda: has_snapshot(location, 10), process)
    process.kill()
    process.communicate()
    assert 10 <= max(state_of(location).snapshot_steps) < 60
    shutil.rmtree(place / ".cache/loopfeed/runs")
    # Its lease names this machine and a process that has died.
    assert holder_of(location) == process.pid
    resumed = start(place, server, "run-train", "--run-dir", url, "--resume", is_small=False)
    wait_for(lambda: holder_of(location) == resumed.pid, resumed)
    with stopped(server):
        time.sleep(5)
        assert resumed.poll() is None
    out, err = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, out + err
    assert f"resuming {url} from the snapshot of step" in out
    assert f"run folder: {url}" in out
    assert "warning" not in out + err
    check_same(place, url, "resumed")
    assert {key for key in location.list_keys() if key.startswith(OBJECTS)} == state_of(location).keys
    assert set(location.list_keys()) == {MARKER, *state_of(location).keys}
    assert not (place / ".cache/loopfeed/runs").exists()
    recorded = json.loads((place / "resumed/config.json").read_text())["config"]
    assert (recorded["run_dir"], recorded["storage_options"]) == (url, f"endpoint={server.endpoint}")
    assert KEYS["AWS_SECRET_ACCESS_KEY"] not in json.dumps(list(recorded.values())).split('"')
    tail = ("tail-run", url, "--once", "--log-every", "1")
    shown = command(place, server, *tail, "--storage-option", f"endpoint={server.endpoint}")
    assert shown.count("step ") == 60


def test_a_bucket_that_does_not_exist_is_named(server):
    lease = Lease(open_location("s3://no-such-bucket/runs/first"))
    with pytest.raises(ShardError, match="NoSuchBucket"):
        lease.acquire(pytest.fail)


def test_a_server_that_is_gone_ends_the_run_and_two_processes_resume_it(place, server):
    url, options = url_of("gone"), ["--storage-option", "timeout=4", "--storage-option", "retries=2"]
    location = open_location(url)
    # The processes that a command spawns know no smaller networks.
    process = start(place, server, *RUN, "--steps", "100000", "--run-dir", url, *options, is_small=False)
    wait_for(lambda: has_snapshot(location, 20), process)
    state = state_of(location)
    with stopped(server):
        out, err = process.communicate(timeout=60)
    assert process.returncode == 2, out + err
    assert "Traceback" not in err
    fault = r"(no response within 4 s|the store at .* does not answer)"
    assert re.search(rf"run-train: {url}/: can't .*: {fault}", err), err
    kept = re.search(r"the working copy is kept in (\S+)\. To continue when the store can be reached: run-train", err)
    assert kept, err
    assert (place / kept[1] / "config.json").exists()
    # What the server has is whole: the state that it had, or one that was on its way.
    assert max(state_of(location).snapshot_steps) >= max(state.snapshot_steps)
    download(location, place / "gone")
    done = len(losses(place / "gone"))
    steps = len((place / kept[1] / "loss.jsonl").read_text().splitlines())
    assert steps >= done > 0
    # The others read what the first one has uploaded.
    resume = ["run-train", "--run-dir", url, "--resume", "--steps", steps + 2, "--spawn", "2", *options]
    out = command(place, server, *resume, is_small=False)
    assert "continuing the working copy" in out
    assert re.search(rf"done: {steps + 2:,} steps, 2 of them", out), out
    download(location, place / "resumed-by-two")
    assert len(losses(place / "resumed-by-two")) == steps + 2
