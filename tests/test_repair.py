"""A finished split that lost files is not called complete: they are packed again to the same bytes, or named."""

import errno
import os
import shutil

import numpy as np
import pytest
import tensorstore as ts

from loopfeed.preprocess.packing.pack import pack_split
from loopfeed.preprocess.packing.part import Part
from loopfeed.preprocess.packing.parts import finish_parts, pack_part
from loopfeed.preprocess.shards import shard_sizes
from loopfeed.preprocess.shards.location import ShardError, open_location
from loopfeed.preprocess.shards.targets import SplitTargets
from tests.fake_source import fake_source, files_of, pack, settings_for


@pytest.fixture
def source():
    """14 images, 4 a shard, of which 5 are broken: 9 packed, the last shard with one."""
    return fake_source(14, broken=frozenset({1, 5, 6, 12, 13}))


def lose(path, how):
    if how == "gone":
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif how == "longer":
        path.write_bytes(path.read_bytes() + b"x")
    elif how == "changed":
        path.write_bytes(path.read_bytes()[:5] + b"\x7f" + path.read_bytes()[6:])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        os.truncate(path, path.stat().st_size - 1)


LOST = (
    ("pixels/c/0/0/0", "gone"),
    ("pixels/c", "gone"),
    ("pixels/c/2/0/0", "shorter"),
    ("pixels/c/1/0/0", "empty"),
    ("pixels/c/1/0/0", "longer"),
    ("pixels/zarr.json", "gone"),
    ("labels", "gone"),
    ("labels/c/0", "shorter"),
    ("labels/zarr.json", "empty"),
    ("checksums/c/0", "gone"),
    ("checksums/zarr.json", "shorter"),
    ("labels/c/0", "changed"),
    ("checksums/c/0", "changed"),
    ("pixels/zarr.json", "changed"),
    ("failures.jsonl", "changed"),
)


@pytest.mark.parametrize("values", [{}, {"codec": "blosc"}, {"layout": "dense", "checksum": False}], ids=str)
def test_lost_files_are_packed_again_to_the_same_bytes(tmp_path, source, values):
    pack(source, tmp_path, **values)
    expected = files_of(tmp_path)
    for key, how in LOST:
        if not (path := tmp_path / "train" / key).exists():
            continue  # without checksums
        lose(path, how)
        again = pack(source.changed(), tmp_path, **values)
        assert again.was_complete
        assert again.repaired
        assert all(each.startswith(key) for each in again.repaired)
        assert files_of(tmp_path) == expected
    assert pack(source.changed(), tmp_path, **values).repaired == ()


def test_targets_are_packed_again(tmp_path):
    source = fake_source(9)
    targets = SplitTargets("numbers", "0" * 64, np.arange(18, dtype=np.float32).reshape(9, 2))
    source = source.changed(classes=source.classes[:2], labels=[0] * 9)
    location = open_location(str(tmp_path)).child("train")
    pack_split(source, location, settings_for(source), targets=targets)
    expected = files_of(tmp_path)
    shutil.rmtree(tmp_path / "train/targets/c")
    assert pack_split(source, location, settings_for(source), targets=targets).repaired == ("targets/c/0/0",)
    assert files_of(tmp_path) == expected


def test_a_part_of_a_finished_pack_packs_what_it_lost(tmp_path, source):
    location, settings = open_location(str(tmp_path)).child("train"), settings_for(source)
    for number in (1, 2):
        pack_part(source, location, settings, Part(number, 2))
    expected = files_of(tmp_path)
    (tmp_path / "train/pixels/c/1/0/0").unlink()
    result = pack_part(source, location, settings, Part(1, 2))
    assert result.finished is not None
    assert result.finished.repaired == ("pixels/c/1/0/0",)
    (tmp_path / "train/labels/c/0").unlink()
    assert finish_parts(source, location, settings).repaired == ("labels/c/0",)
    assert files_of(tmp_path) == expected


def test_an_interrupted_repair_is_continued(tmp_path, source):
    pack(source, tmp_path)
    expected = files_of(tmp_path)
    shutil.rmtree(tmp_path / "train/pixels/c")
    with pytest.raises(KeyboardInterrupt):
        pack(source.changed(raising={10: KeyboardInterrupt()}), tmp_path)
    assert len(pack(source.changed(), tmp_path).repaired) == 2  # the first shard was written
    assert files_of(tmp_path) == expected


def test_other_pixels_of_the_source_are_not_written(tmp_path, source, monkeypatch):
    pack(source, tmp_path)
    lost = tmp_path / "train/pixels/c/1/0/0"
    lost.unlink()
    other = source.changed(images=source.images.copy())
    other.images[8] ^= 1
    monkeypatch.setattr(other, "digest", source.digest)
    message = r"pixels/c/1/0/0 is missing or damaged and can't be packed again: the images .* other pixels; restore it"
    with pytest.raises(ShardError, match=message):
        pack(other, tmp_path)
    assert not lost.exists()


def test_a_shard_that_cannot_be_read_is_named(tmp_path, source, monkeypatch):
    def fail(file, size, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    pack(source, tmp_path, codec="blosc")
    monkeypatch.setattr(shard_sizes, "read_at", fail)
    with pytest.raises(ShardError, match=r"train/pixels/c/0/0/0 can't be read: Input/output error; try again"):
        pack(source, tmp_path, codec="blosc")


def test_lost_failures_are_made_again(tmp_path, source):
    pack(source, tmp_path)
    expected = files_of(tmp_path)
    (tmp_path / "train/failures.jsonl").unlink()
    assert pack(source.changed(), tmp_path).repaired == ("failures.jsonl",)
    assert files_of(tmp_path) == expected
    (tmp_path / "train/failures.jsonl").unlink()
    other = source.changed(broken=source.broken | {0})
    with pytest.raises(ShardError, match=r"failures\.jsonl is missing or damaged .* restore it, or .*--overwrite"):
        pack(other, tmp_path)
    pack(fake_source(4, seed=1), tmp_path / "whole")
    (tmp_path / "whole/train/failures.jsonl").unlink()
    assert pack(fake_source(4, seed=1), tmp_path / "whole").repaired == ("failures.jsonl",)


def test_a_lost_shard_in_a_store_is_packed_again(source):

    context = ts.Context()
    pack(source, "memory://pack/", context=context)
    location = open_location("memory://pack/train/", context=context)
    whole = {key: location.read(key) for key in location.list_keys()}
    location.delete("pixels/c/1/0/0")
    assert pack(source, "memory://pack/", context=context).repaired == ("pixels/c/1/0/0",)
    assert {key: location.read(key) for key in location.list_keys()} == whole
