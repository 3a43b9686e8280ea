"""Packs on each kind of server, two that speak S3 and one for `gs://`: the bytes and losses of a local pack."""

import pytest

from loopfeed.preprocess.demo.demo_set import draw_demo
from loopfeed.preprocess.shards.location import open_location
from tests.fake_source import fake_source, files_of, pack
from tests.object_servers import GoogleServer, MotoServer, SeaweedServer
from tests.store_commands import command, losses

PACK = ["preprocess-imagenet", "photos", "--size", "32", "--shard-images", "32"]
TRAIN = ["run-train", "--batch", "16", "--model", "resnet8", "--lr", "0.05", "--steps", "4", "--eval-split", "off"]
WARNING = "ignores conditional writes, so it cannot stop two"
pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=[MotoServer, SeaweedServer, GoogleServer], ids=["moto", "seaweedfs", "google"])
def server(request):
    with pytest.MonkeyPatch.context() as patched, request.param() as running:
        for name, value in running.environment.items():
            patched.setenv(name, value)
        yield running


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A working folder with photographs, of which one is damaged, packed and trained on without a server."""
    folder = tmp_path_factory.mktemp("place")
    draw_demo(folder / "photos", num_images=200)
    image = sorted((folder / "photos").rglob("*.jpg"))[0]
    image.write_bytes(image.read_bytes()[:300])
    command(folder, None, *PACK, "local")
    command(folder, None, *TRAIN, "--data", "local", "--run-dir", "runs/local")
    return folder


def stored_files(url):
    store = open_location(url)
    return {key: store.read(key) for key in store.list_keys()}


def test_a_pack_in_parts_and_a_run_on_it_are_those_of_a_local_folder(place, server):
    url = f"{server.url}/imagenet"
    outputs = [command(place, server, *PACK, url, "--part", f"{number}/3") for number in (2, 3, 1)]
    assert stored_files(url) == files_of(place / "local")
    assert "Left out: 1 (all listed in" in outputs[-1]
    command(place, server, "inspect-shards", url, "--verify")
    if server.scheme == "gs":  # tests/test_object_storage.py trains on S3
        run = f"runs/{server.port}"
        command(place, server, *TRAIN, "--data", url, "--run-dir", run)
        assert losses(place / run) == losses(place / "runs/local")
    is_conditional = not isinstance(server, GoogleServer)
    assert [WARNING in output for output in outputs] == [not is_conditional] * 3
    if not is_conditional:
        # Loopfeed does send conditions, and this server ignores them.
        owner = "name=imagenet%2Ftrain%2Fjournal%2Fparts%2F1-of-3.owner&ifGenerationMatch="
        assert owner in server.log()


def test_damage_in_the_store_is_found_and_packed_again(server, tmp_path):
    url = f"{server.url}/damaged"
    source = fake_source(14)
    pack(source, url)
    pack(source, tmp_path / "local")
    store = open_location(url)
    shard = "train/pixels/c/0/0/0"
    content = bytearray(store.read(shard) or b"")
    content[7] ^= 1
    store.write(shard, bytes(content))
    if server.scheme == "s3":
        hidden = ["--storage-option", "credentials=anonymous"]
        assert "PERMISSION_DENIED" in command(tmp_path, server, "inspect-shards", url, *hidden, code=2)
    assert "pixels/c/0/0/0" in command(tmp_path, server, "inspect-shards", url, "--verify", code=2)
    pack(source, url, overwrite=True)
    assert stored_files(url) == files_of(tmp_path / "local")
