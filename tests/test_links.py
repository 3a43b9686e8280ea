"""Links in the folders of others: nothing outside the folder that the user named is created, changed or removed."""

import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from loopfeed import train
from loopfeed.engine.control.request import ControlRequest
from loopfeed.engine.records.control_requests import (
    ControlMailbox,
    find_requests,
    remove_requests,
    send_request,
    withdraw,
)
from loopfeed.engine.records.json_lines import JsonLines
from loopfeed.engine.records.run_folder import RunFolder, check_folder
from loopfeed.engine.records.snapshot import SnapshotError, remove_snapshot, write_snapshot
from loopfeed.preprocess.regular_file import LinkedPathError, check_unlinked, open_unlinked, remove_tree
from loopfeed.preprocess.shards.location import ShardError, open_location
from loopfeed.preprocess.shards.shard_cache import ShardCache
from tests.fake_source import fake_source, pack
from tests.toy import Linear, toy_batch, toy_config

PACK = "a" * 64


def files_of(folder: Path) -> dict[str, bytes | None]:
    """Return the content of each file below a folder by its path, None for folders."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture
def home(tmp_path):
    """A folder with files of the user, in the forms that a run or a pack would take for its own."""
    home = tmp_path / "home"
    names = ("notes.txt", "settings.json", "7/data", "99/data", "zarr.json", "c/0/0/0", "plan.json", "1", "0", "lock")
    for name in (*names, f"{PACK}/pixels/c/0/0/0"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("precious")
    before = files_of(home)
    yield home
    assert files_of(home) == before


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a finished run, which no test may change."""
    path = tmp_path_factory.mktemp("links") / "run"
    train(toy_config(steps=4, snapshot_every_steps=2, run_dir=path), model=Linear(), batches=toy_batch)
    return path


@pytest.fixture
def gift(run, tmp_path):
    """A copy of that folder."""
    return Path(shutil.copytree(run, tmp_path / "gift"))


@pytest.mark.parametrize("name", ["notes.txt", "7", "new/file", "new"])
def test_a_path_through_a_link_is_refused_and_one_to_the_folder_is_not(home, tmp_path, name):
    (tmp_path / "named").symlink_to(home)
    check_unlinked(tmp_path / "named", tmp_path / "named" / name)
    with pytest.raises(LinkedPathError, match=r"it is a link, through which nothing is written: '.*/named'"):
        check_unlinked(tmp_path, tmp_path / "named" / name)


def test_a_file_is_not_opened_by_a_link_and_of_a_link_to_a_folder_only_the_link_is_removed(home, tmp_path):
    for target in ("notes.txt", "none"):
        (tmp_path / target).symlink_to(home / target)
        with pytest.raises(LinkedPathError):
            open_unlinked(tmp_path / target, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        remove_tree(tmp_path / target)
        assert not (tmp_path / target).is_symlink()
    (tmp_path / "folder").symlink_to(home)
    remove_tree(tmp_path / "folder")
    assert not (tmp_path / "folder").is_symlink()


@pytest.mark.parametrize("how", [{"resume": True}, {"overwrite": True}])
@pytest.mark.parametrize(
    ("name", "target"),
    [
        *((name, "notes.txt") for name in (".lock", "loss.jsonl", "eval.jsonl", "control.jsonl", "model.safetensors")),
        *((name, "none") for name in (".lock", "eval.jsonl", "stalls.txt", "tensorboard")),
        *((name, ".") for name in ("control", "snapshots", "tensorboard", "wandb", ".unfinished")),
        *(("snapshots/.unfinished", "."), ("wandb/wandb", "."), ("wandb/run-id", "notes.txt")),
    ],
)
def test_a_run_folder_with_a_link_is_refused_and_the_link_followed_by_nothing(gift, home, name, target, how):
    remove_tree(gift / name)
    (gift / name).unlink(missing_ok=True)
    (gift / name).parent.mkdir(exist_ok=True)
    (gift / name).symlink_to(home / target)
    before = files_of(gift)
    for start in (RunFolder, check_folder):
        with pytest.raises(ValueError, match=rf"must itself contain what its run writes, but \S*/{name} is a link: re"):
            start(gift, **how)
    assert files_of(gift) == before
    # What the message says to do.
    (gift / name).unlink()
    check_folder(gift, **how)


def test_a_run_folder_may_itself_be_a_link_and_goes_on_once_a_link_in_it_is_removed(gift, home, tmp_path):
    (tmp_path / "named").symlink_to(gift)
    (gift / ".lock").unlink()
    (gift / ".lock").symlink_to(home / "notes.txt")
    config = toy_config(steps=6, run_dir=tmp_path / "named", resume=True)
    with pytest.raises(ValueError, match=r"named/\.lock is a link: remove it"):
        train(config, model=Linear(), batches=toy_batch)
    (gift / ".lock").unlink()
    assert train(config, model=Linear(), batches=toy_batch).steps_done == 6


def test_a_link_that_comes_during_the_run_is_not_followed_either(home, tmp_path):
    (tmp_path / "control").symlink_to(home)
    with pytest.raises(LinkedPathError):
        send_request(tmp_path, ControlRequest("settings", stop=True))
    with pytest.raises(LinkedPathError):
        withdraw(tmp_path, "settings")
    assert find_requests(tmp_path) == []
    remove_requests(tmp_path, ["settings.json"])
    mailbox = ControlMailbox(tmp_path, lambda _: None)
    mailbox.start()
    time.sleep(0.1)
    mailbox.close()
    (tmp_path / "loss.jsonl").symlink_to(home / "none")
    with pytest.raises(LinkedPathError):
        JsonLines(tmp_path / "loss.jsonl").open()
    (tmp_path / "snapshots").symlink_to(home)
    with pytest.raises(SnapshotError, match=r"cannot be written \(it is a link, .*: remove that link"):
        write_snapshot(tmp_path / "snapshots", 1, 1, {"a": np.zeros(1)})
    with pytest.raises(LinkedPathError):
        remove_snapshot(tmp_path / "snapshots", 7)


@pytest.mark.parametrize(
    "name",
    [
        *("", "pixels", "pixels/c", "pixels/c/0", "pixels/zarr.json", "labels/c", "checksums", "journal"),
        *("journal/owner.__lock", "journal/lock", "failures.jsonl.__lock"),
    ],
)
def test_a_pack_is_not_written_through_links(home, tmp_path, name):
    link = tmp_path / "data/train" / name
    pack(fake_source(6, size=4), tmp_path / "data")
    (tmp_path / "data/train/journal").mkdir()
    remove_tree(link)
    link.unlink(missing_ok=True)
    link.symlink_to(home / "none" if link.suffix else home)
    source = fake_source(7, size=4)
    # Before a split is written, its manifest and its plan are read, which are others' here.
    said = "." if name in ("", "journal") else rf"{link} is a link, and nothing is written through links inside a pack"
    with pytest.raises(ShardError, match=said):
        pack(source, tmp_path / "data", overwrite=True)
    with pytest.raises(ShardError, match="is a link"):
        open_location(str(tmp_path / "data")).child("train").write(f"{name}/x".lstrip("/"), b"")


@pytest.mark.parametrize(
    ("name", "target"),
    [
        *(("size", "notes.txt"), ("lock", "none"), (PACK, PACK), (f"{PACK}/pixels", f"{PACK}/pixels")),
        *((f"{PACK}/incoming", "."), (f"{PACK}/used", "."), (f"{PACK}/incoming/0", "notes.txt")),
        (f"{PACK}/used/0", "none"),
    ],
)
def test_a_cache_of_shards_is_not_written_through_links(home, tmp_path, name, target):
    (tmp_path / "cache" / name).parent.mkdir(parents=True)
    (tmp_path / "cache" / name).symlink_to(home / target)
    cache = ShardCache(tmp_path / "cache", 100, lambda _: None)
    cache.touch(PACK, 0)
    cache.add(PACK, 0, 60, lambda: [b"content"])
    cache.add(PACK, 1, 60, lambda: [b"content"])
    cache.drop(PACK, 0)
