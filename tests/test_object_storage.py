"""Packs on a real S3 server on this machine: the same bytes and results as in a local folder, and servers that fail.

The commands are those of docs/howto/object-storage.md, run as a user runs them. The server is moto, or SeaweedFS with
LOOPFEED_TEST_S3=seaweedfs in the environment; tests/test_object_servers.py has shorter tests of both.
"""

import json
import os
import re
import shlex
import signal
import time
from pathlib import Path

import pytest

from loopfeed.preprocess.demo.demo_set import draw_demo
from loopfeed.preprocess.shards.location import open_location
from tests.fake_source import files_of
from tests.object_servers import BUCKET, S3_SERVERS, SECRET
from tests.store_commands import command, losses, same_weights, start

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/howto/object-storage.md"
URL = f"s3://{BUCKET}/imagenet"
S3Server = S3_SERVERS[os.environ.get("LOOPFEED_TEST_S3", "moto")]
TRAIN = ["run-train", "--batch", "16", "--model", "resnet8", "--lr", "0.05"]
DEADLINE_S = 60
pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patched, S3Server() as running:
        for name, value in running.environment.items():
            patched.setenv(name, value)
        yield running


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A working folder with photographs, packed into a local folder, and a home folder without keys."""
    folder = tmp_path_factory.mktemp("place")
    draw_demo(folder / "photos", num_images=200)
    command(folder, None, "preprocess-imagenet", "photos", "local", "--size", "32", "--shard-images", "64")
    return folder


def wait_for_steps(run, count, process):
    stop = time.monotonic() + 300
    while not (run / "loss.jsonl").exists() or len(losses(run)) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < stop, "the run makes no steps"
        time.sleep(0.05)


def page_commands():
    """Return the commands of the page that are not marked as not run, with the addresses of the tests."""
    blocks = re.findall(r"(<!-- not run -->\n)?```\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [shlex.split(line) for mark, body in blocks if not mark for line in body.splitlines()]


def test_the_commands_of_the_page_give_the_results_of_a_local_pack(place, server):
    """Pack, verify, train, continue, start from weights and evaluate, and compare each with the local pack."""
    values = {"s3://bucket": f"s3://{BUCKET}", "http://127.0.0.1:9000": server.endpoint}
    for words in page_commands():
        if "--init-from" in words:
            key, content = "weights/model.safetensors", (place / "runs/stored/model.safetensors").read_bytes()
            open_location(f"s3://{BUCKET}", storage_options={"endpoint": server.endpoint}).write(key, content)
        for old, new in values.items():
            words = [word.replace(old, new) for word in words]
        command(place, server, *words)
    stored = open_location(URL, storage_options={"endpoint": server.endpoint})
    local = files_of(place / "local")
    assert {key: stored.read(key) for key in stored.list_keys()} == {str(key): value for key, value in local.items()}
    # The runs of the page, on the local pack.
    command(place, server, *TRAIN, "--data", "local", "--steps", "12", "--run-dir", "runs/local")
    assert losses(place / "runs/local") == losses(place / "runs/stored")
    assert same_weights(place / "runs/local/model.safetensors", place / "runs/stored/model.safetensors")
    tuned = ["run-train", "--data", "local", "--model", "resnet8", "--batch", "16", "--steps", "2"]
    weights = "runs/local/model.safetensors"
    command(place, server, *tuned, "--init-from", weights, "--run-dir", "runs/local-tuned")
    assert losses(place / "runs/local-tuned") == losses(place / "runs/tuned")
    evaluations = [
        json.loads(command(place, server, "run-eval", f"runs/{name}", "--json").splitlines()[0])
        for name in ("local", "stored")
    ]
    differing = {key for key in evaluations[0] if evaluations[0][key] != evaluations[1][key]}
    assert differing <= {"time"}
    recorded = (place / "runs/stored/config.json").read_text(encoding="utf-8")
    assert json.loads(recorded)["config"]["storage_options"] == f"endpoint={server.endpoint}"
    assert SECRET not in recorded


def test_a_pause_of_the_server_costs_waiting_and_nothing_else(place, server):
    url, steps = f"s3://{BUCKET}/paused", 60
    command(place, server, "preprocess-imagenet", "photos", url, "--size", "32", "--shard-images", "64")
    train = [*TRAIN, "--eval-split", "off", "--steps", steps]
    command(place, server, *train, "--data", "local", "--run-dir", "runs/unpaused")
    process = start(place, server, *train, "--data", url, "--run-dir", "runs/paused")
    wait_for_steps(place / "runs/paused", 5, process)
    server.signal(signal.SIGSTOP)
    try:
        time.sleep(6)
        assert process.poll() is None
        num_steps = len(losses(place / "runs/paused"))
    finally:
        server.signal(signal.SIGCONT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert num_steps < steps  # it did wait
    assert losses(place / "runs/paused") == losses(place / "runs/unpaused")
    assert same_weights(place / "runs/paused/model.safetensors", place / "runs/unpaused/model.safetensors")


def test_a_server_that_is_gone_ends_a_run_and_a_packing_and_both_continue_with_it(place):
    steps, run, other_url = 80, place / "runs/gone", f"{URL}-other"
    train = [*TRAIN, "--eval-split", "off", "--snapshot-every", "5", "--keep", "0"]
    # Both wait for the server for three seconds; by default it would be twenty.
    patient = ["--storage-option", "retries=3"]
    with S3Server() as server:
        packing = ["preprocess-imagenet", "photos", URL, "--size", "32", "--shard-images", "64"]
        command(place, server, *packing)
        command(place, server, *train, "--steps", steps, "--data", "local", "--run-dir", "runs/whole")
        slow_packing = ["preprocess-imagenet", "photos", other_url, "--size", "32", "--shard-images", "8"]
        packer = start(place, server, *slow_packing, "--workers", "1", *patient)
        store = open_location(other_url, storage_options={"endpoint": server.endpoint})
        while not store.list_keys("train/journal/shards/"):
            assert packer.poll() is None, packer.communicate()
        packer.send_signal(signal.SIGSTOP)  # while the run gets that far
        trainer = start(place, server, *train, "--steps", steps, "--data", URL, "--run-dir", run, *patient)
        wait_for_steps(run, 12, trainer)
        server.kill()
        packer.send_signal(signal.SIGCONT)
        killed = time.monotonic()
        for process, name in ((trainer, "run-train"), (packer, "preprocess-imagenet")):
            _, err = process.communicate(timeout=300)
            assert time.monotonic() - killed < DEADLINE_S
            assert process.returncode == 2, err
            assert "Traceback" not in err
            expected = rf"{name}: .*the store at {server.endpoint} does not answer \(.*\); check the server"
            assert re.search(expected, err), err
        assert len(list((run / "snapshots").iterdir())) >= 2
        # Without the server, a resume is refused soon; with it, the run continues to the same bits.
        few = ["--storage-option", "retries=1"]
        out = command(place, server, *train, "--run-dir", run, "--resume", *few, code=2)
        assert f"{URL} at {server.endpoint} cannot be reached" in out
        server.start()
        command(place, server, *packing)
        command(place, server, "run-train", "--run-dir", run, "--resume")
        command(place, server, *slow_packing, "--workers", "1")
        command(place, server, "inspect-shards", other_url, "--verify")
    assert losses(run) == losses(place / "runs/whole")
    assert same_weights(run / "model.safetensors", place / "runs/whole/model.safetensors")
