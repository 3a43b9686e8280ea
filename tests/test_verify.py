"""Verifying: intact splits pass, and each kind of damage is found and named, however many there are."""

import numpy as np
import pytest
import tensorstore as ts

from loopfeed.preprocess.shards.location import ShardError
from loopfeed.preprocess.shards.reader import open_split
from loopfeed.preprocess.shards.verify import verify_split
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


def test_all_damage_is_named(data):
    edit(data / "train/pixels/c/0/0/0", 70)  # image 1: an image is 64 bytes and a checksum of 4
    edit(data / "train/pixels/c/0/0/0", 3 * 68)
    (data / "train/pixels/c/1/0/0").unlink()
    shard = data / "train/pixels/c/2/0/0"
    shard.write_bytes(shard.read_bytes()[:-1])
    (data / "train/pixels/c/9").mkdir()
    (data / "train/pixels/c/9/stray").write_bytes(b"x")
    (data / "train/failures.jsonl").write_text("")
    found = damages(data)
    assert found[:2] == [
        "pixels/c/9/stray: the file does not belong to the split",
        "failures.jsonl: the file has changed since it was written",
    ]
    changed = "the checksum does not match because the bytes have changed"
    assert found[2] == f"pixels/c/0/0/0: images 1, 3 (n2/1.png, n2/4.png): {changed}"
    missing = "the shard file, or the image in it, is missing"
    assert found[3] == f"pixels/c/1/0/0: images 4–7 (n3/5.png, n1/6.png, n2/7.png, …): {missing}"
    assert found[4].startswith("pixels/c/2/0/0: images 8–10 (")
    assert len(found) == 5


def test_without_checksums_a_changed_pixel_is_detected_in_its_file(tmp_path):
    pack(fake_source(5), tmp_path, checksum=False)
    edit(tmp_path / "train/pixels/c/0/0/0", 65)  # blue of the first pixel of image 1
    assert damages(tmp_path) == ["pixels/c/0/0/0: its images differ from those that were packed in this file"]


def test_swapped_shard_files_are_detected(data):
    first, second = data / "train/pixels/c/0/0/0", data / "train/pixels/c/1/0/0"
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    assert damages(data) == [
        f"pixels/c/{shard}/0/0: its images differ from those that were packed in this file" for shard in (0, 1)
    ]


def test_files_of_another_pack_are_detected(data, tmp_path):
    pack(fake_source(13, seed=1, broken=frozenset({3, 11})), tmp_path / "other")
    for name in ("labels/c/0", "failures.jsonl"):
        (data / "train" / name).write_bytes((tmp_path / "other/train" / name).read_bytes())
    assert damages(data) == [
        "failures.jsonl: the file has changed since it was written",
        "labels: the labels differ from those that were packed",
    ]


@pytest.mark.parametrize("keep", [0, 1, 131])
@pytest.mark.parametrize("num_images", [4, 12])
def test_a_truncated_shard_file_is_one_line(tmp_path, keep, num_images):
    pack(fake_source(num_images), tmp_path, shard_images=8)
    shard = tmp_path / "train/pixels/c/0/0/0"
    shard.write_bytes(shard.read_bytes()[:keep])
    count = min(num_images, 8)
    num_bytes = count * (64 + 4) + 8 * 16 + 4
    words = f"the shard file is truncated to {keep} of {num_bytes} bytes"
    assert damages(tmp_path) == [f"pixels/c/0/0/0: images 0–{count - 1} (n1/0.png, n2/1.png, n3/2.png, …): {words}"]


@pytest.mark.parametrize(
    ("key", "num_chunks"), [("pixels/c/0/0/0", 4), ("labels/c/0", 1 << 10), ("checksums/c/0", 1 << 10)]
)
def test_bytes_that_no_reader_reads_are_a_change_of_a_file(tmp_path, key, num_chunks):
    source = fake_source(5)
    pack(source.changed(images=np.zeros_like(source.images)), tmp_path, codec="blosc")
    file = tmp_path / "train" / key
    content, index_bytes = file.read_bytes(), num_chunks * 16 + 4
    file.write_bytes(content + content[-index_bytes:])
    assert damages(tmp_path) == [f"{key}: the shard file has {index_bytes:,} bytes that are in none of its chunks"]


def test_what_a_pack_killed_at_its_end_leaves_is_explained(data):
    (data / "train/journal").mkdir()
    (data / "train/journal/plan.json").write_text("{}")
    (data / "train/journal/owner").write_text("x")
    assert [each.split(";")[1] for each in damages(data)] == [" run the same command again to remove the folder"]
    assert damages(data)[0].startswith("journal/: the folder belongs to a preprocess-imagenet command")


def test_without_checksums_a_nonzero_low_byte_is_detected(tmp_path):
    pack(fake_source(5), tmp_path, checksum=False)
    edit(tmp_path / "train/pixels/c/0/0/0", 2 * 64)
    assert damages(tmp_path) == ["pixels/c/0/0/0: image 2 (n3/2.png): pixels whose low byte is not 0"]


def test_labels_are_checked_against_classes_and_counts(data):
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(data / "train/labels")}}
    labels = ts.open(spec).result()
    labels[np.array([3, 4, 9])].write(np.array([7, 0, 3], np.uint16)).result()
    found = damages(data)
    assert found[0] == "labels/c/0: images 3, 9 (n2/4.png, n2/10.png): labels outside 0..2"
    assert len(found) == 1


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ('"shape":[11,4,4]', '"shape":[12,4,4]', 'Expected "shape" of [11,4,4] but received: [12,4,4]'),
        ('"fill_value":4278255615', '"fill_value":0', 'Expected "fill_value" of 4278255615 but received: 0'),
        ('"endian":"little"', '"endian":"big"', 'Mismatch in "codecs"'),
        ('{"chunk_shape":[4,4,4]}', '{"chunk_shape":[8,4,4]}', 'Expected "chunk_shape" of [4,4,4]'),
    ],
)
def test_metadata_that_is_not_what_was_packed_is_named(data, old, new, what):
    path = data / "train/pixels/zarr.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    (data / "train/labels/zarr.json").unlink()
    found = damages(data)
    assert found[0] == "labels/zarr.json: the file is missing"
    assert found[1].startswith(f"pixels/zarr.json: the array was changed after packing: {what}")
    assert len(found) == 2
    with pytest.raises(ShardError, match="the array was changed after packing"):
        open_split(str(data), "train")


def test_an_edited_manifest_is_not_verified(data):
    path = data / "train/manifest.json"
    path.write_text(path.read_text().replace("goldfish", "shark"))
    with pytest.raises(ShardError, match=r"manifest.json: a value was changed after packing"):
        verify_split(str(data), "train")


def test_an_unfinished_split_is_not_verified(data):
    (data / "train/manifest.json").unlink()
    with pytest.raises(ShardError, match=r"train/ contains files of a split, but its manifest\.json is missing"):
        verify_split(str(data), "train")


def test_a_reformatted_manifest_does_not_pass(data):
    path = data / "train/manifest.json"
    path.write_text(path.read_text() + "\n")
    assert damages(data) == ["manifest.json: the values are unchanged, but the bytes differ from those written"]


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", "x" * (1 << 21)])
def test_metadata_that_a_native_reader_might_not_survive_are_refused_before_it(data, content):
    (data / "train/pixels/zarr.json").write_text(content)
    found = damages(data)
    assert len(found) == 1
    assert found[0].startswith("pixels/zarr.json: ")
    with pytest.raises(ShardError, match=r"pixels/zarr\.json is not valid array metadata"):
        open_split(str(data), "train")
