"""Verifying: intact splits pass, and each kind of damage is found and named, however many there are."""

import json

import numpy as np
import pytest
import tensorstore as ts

from preprocess.location import ShardError
from preprocess.verify import Damage, verify_split
from tests.fake_source import fake_source, pack


@pytest.fixture
def data(tmp_path):
    """11 images, 4 a shard, with 2 more that failed."""
    pack(fake_source(13, broken=frozenset({2, 12})), tmp_path)
    return tmp_path


def damages(data):
    return [str(each) for each in verify_split(str(data), "train")]


def edit(path, position, change=1):
    content = bytearray(path.read_bytes())
    content[position] ^= change
    path.write_bytes(content)


@pytest.mark.parametrize("values", [{}, {"codec": "blosc"}, {"checksum": False}, {"codec": "blosc", "checksum": False}])
def test_an_intact_split_passes_and_every_image_is_counted(tmp_path, values):
    pack(fake_source(11), tmp_path, **values)
    seen = []
    found = verify_split(str(tmp_path), "train", on_progress=lambda done, total: seen.append((done, total)))
    assert found == ()
    assert seen == [(4, 11), (8, 11), (11, 11)]


def test_a_split_in_memory_is_verified(tmp_path):
    context = ts.Context()
    pack(fake_source(5), "memory://x", context=context)
    assert verify_split("memory://x", "train", context=context) == ()


def test_every_damage_is_named_not_just_the_first(data):
    edit(data / "train/pixels/c/0/0/0", 70)  # image 1: an image is 64 bytes and a checksum of 4
    edit(data / "train/pixels/c/0/0/0", 3 * 68)
    (data / "train/pixels/c/1/0/0").unlink()
    shard = data / "train/pixels/c/2/0/0"
    shard.write_bytes(shard.read_bytes()[:-1])
    (data / "train/pixels/c/9").mkdir()
    (data / "train/pixels/c/9/stray").write_bytes(b"x")
    (data / "train/failures.jsonl").write_text("")
    found = damages(data)
    assert found[:3] == [
        "pixels/c/1/0/0: the file is missing",
        "pixels/c/9/stray: the file does not belong to the split",
        "failures.jsonl: 0 failures noted, the manifest says 2",
    ]
    assert found[3] == "pixels/c/0/0/0: images 1, 3: the checksum does not match, the bytes have changed"
    assert found[4] == "pixels/c/1/0/0: images 4–7: the shard file, or the image in it, is missing"
    assert found[5].startswith("pixels/c/2/0/0: images 8–10: ")
    assert len(found) == 6


def test_without_checksums_a_changed_pixel_is_still_noticed(tmp_path):
    pack(fake_source(5), tmp_path, checksum=False)
    edit(tmp_path / "train/pixels/c/0/0/0", 65)  # blue of the first pixel of image 1
    found = damages(tmp_path)
    assert [each.split(" is (")[0] for each in found] == ["pixels: the channel mean", "pixels: the channel std"]


def test_without_checksums_a_used_low_byte_is_noticed(tmp_path):
    pack(fake_source(5), tmp_path, checksum=False)
    edit(tmp_path / "train/pixels/c/0/0/0", 2 * 64)
    assert damages(tmp_path) == ["pixels/c/0/0/0: image 2: pixels with a low byte that is not 0"]


def test_labels_are_checked_against_classes_and_counts(data):
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(data / "train/labels")}}
    labels = ts.open(spec).result()
    labels[np.array([3, 4, 9])].write(np.array([7, 0, 3], np.uint16)).result()
    found = damages(data)
    assert found[0] == "labels/c/0: images 3, 9: labels outside 0..2"
    assert "images of class n" in found[1]
    assert len(found) == 2


def test_a_damaged_label_file_is_named(data):
    edit(data / "train/labels/c/0", 0)
    assert damages(data) == ["labels/c/0: the checksum does not match, the bytes have changed"]


def test_an_array_that_is_not_what_the_manifest_says_is_named(data):
    path = data / "train/pixels/zarr.json"
    path.write_text(path.read_text().replace('"shape":[11,4,4]', '"shape":[12,4,4]'))
    (data / "train/labels/zarr.json").unlink()
    found = damages(data)
    assert found[0] == "labels/zarr.json: the file is missing"
    assert found[1].startswith("labels/zarr.json: ")
    assert found[2] == "pixels/zarr.json: the array is uint32 [12, 4, 4], the manifest says uint32 [11, 4, 4]"


def test_counts_of_the_manifest_are_checked(data):
    path = data / "train/manifest.json"
    document = json.loads(path.read_text())
    document["class_counts"][0] += 1
    document["class_counts"][1] -= 1
    path.write_text(json.dumps(document))
    assert damages(data) == [
        f"labels: {document['class_counts'][0] - 1} images of class n1, the manifest says "
        f"{document['class_counts'][0]}; other classes may differ too"
    ]


def test_an_unfinished_split_is_not_verified(data):
    (data / "train/manifest.json").unlink()
    with pytest.raises(ShardError, match="the split is not complete"):
        verify_split(str(data), "train")


def test_many_images_are_named_in_short():
    text = str(Damage("f", "bad", tuple(range(0, 60, 2))))
    assert text == "f: images 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, … 30 in all: bad"
