"""Names, weights and groups of a pack: what other readers find, what is repaired, and what older packs lack."""

import json
import shutil
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import tensorstore as ts
import zarr
from click.testing import CliRunner

from loopfeed import evaluate, train
from loopfeed.preprocess.commands.inspect_cli import main as inspect_shards
from loopfeed.preprocess.packing.finish import NameBytes
from loopfeed.preprocess.shards import arrays, split_arrays
from loopfeed.preprocess.shards.location import ShardError, open_location
from loopfeed.preprocess.shards.manifest import Manifest
from loopfeed.preprocess.shards.reader import open_split
from loopfeed.preprocess.shards.verify import find_lost_files, verify_split
from tests.fake_source import FakeSource, fake_source, files_of, pack, packed_words
from tests.toy import Linear, toy_config

NAMES = [
    "n1/a.png",
    "n2/Ä b.png",
    "n3/\udcff\udcfe.png",
    "n1/deep/er/ü.png",
    "n2/4.png",
    "n3/" + "x" * 300,
    "n1/日本.png",
]
KEPT = [0, 2, 3, 4, 5, 6]


@dataclass
class Named(FakeSource):
    def key(self, index):
        return NAMES[index % len(NAMES)] if index < len(NAMES) else f"{index}.png"


def source_of(num_images=7, *, broken=(1,), **columns):
    plain = fake_source(num_images)
    return Named(plain.images, plain.labels, broken=frozenset(broken), **columns)


COLUMNS = {
    "weights": np.array([1, 0, 0.5, 2, 3, 0, 1e-3], np.float32),
    "groups": np.array([4, 0, 0, 2, 4, 1, 3], np.uint32),
}


@pytest.fixture
def data(tmp_path):
    pack(source_of(**COLUMNS), tmp_path)
    return tmp_path


def read_array(path):
    """Read an array with zarr and with TensorStore, neither of which knows Loopfeed."""
    found = np.asarray(zarr.open_array(str(path), mode="r")[:])
    other = ts.open({"driver": "zarr3", "kvstore": f"file://{path}/"}).result().read().result()
    np.testing.assert_array_equal(found, other)
    return found


def test_another_zarr_reader_finds_the_names_as_bytes_of_the_file_names(data):
    text, offsets = read_array(data / "train/names"), read_array(data / "train/name_offsets")
    assert (text.dtype, offsets.dtype) == (np.uint8, np.uint64)
    found = [bytes(text[start:stop]) for start, stop in pairwise(offsets)]
    assert found == [NAMES[index].encode("utf-8", "surrogateescape") for index in KEPT]
    assert found[1] == b"n3/\xff\xfe.png"
    np.testing.assert_array_equal(read_array(data / "train/weights"), COLUMNS["weights"][KEPT])
    np.testing.assert_array_equal(read_array(data / "train/groups"), COLUMNS["groups"][KEPT])


def test_the_open_split_returns_names_weights_and_groups(data):
    with open_split(str(data), "train") as split:
        assert split.manifest.format_version == 5
        assert split.names(np.arange(6)) == [NAMES[index] for index in KEPT]
        assert split.names(np.array([5, 0, 5])) == [NAMES[6], NAMES[0], NAMES[6]]
        assert split.names(np.array([], np.int64)) == []
        np.testing.assert_array_equal(split.weights(), COLUMNS["weights"][KEPT])
        np.testing.assert_array_equal(split.groups(), COLUMNS["groups"][KEPT])
        assert split.manifest.num_groups == 5
        with pytest.raises(ShardError, match=r"image 6 is outside 0\.\.5"):
            split.names(np.array([6]))
    with pytest.raises(ShardError, match="the split is closed"):
        split.names(np.array([0]))


def test_a_pack_without_weights_and_groups_has_neither(tmp_path):
    pack(source_of(), tmp_path)
    with open_split(str(tmp_path), "train") as split:
        assert (split.weights(), split.groups()) == (None, None)
    assert not {"weights", "groups"} & {path.name for path in (tmp_path / "train").iterdir()}


def test_pixels_and_labels_are_stored_as_before_names(data):
    with open_split(str(data), "train") as split:
        pixels, labels = np.zeros((6, 4, 4), np.uint32), np.zeros(6, np.int32)
        split.read_into(np.arange(6), pixels, labels, timeout_s=30)
    for found, expected in zip((pixels, labels), packed_words(source_of()), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_many_names_are_written_and_read_a_file_at_a_time(tmp_path, monkeypatch):
    # Shard files of 64 names' offsets and of 512 bytes, so that names cross from one file to the next.
    for name, shards in {arrays.NAMES: (512, 64), arrays.NAME_OFFSETS: (64, 16)}.items():
        few = arrays.COLUMNS[name]._replace(shards=arrays.NumberShards((), *shards))
        monkeypatch.setitem(arrays.COLUMNS, name, few)
    largest = 0
    original = NameBytes.__getitem__

    def counted(self, places):
        nonlocal largest
        largest = max(largest, len(found := original(self, places)))
        return found

    monkeypatch.setattr(NameBytes, "__getitem__", counted)
    source = source_of(700, broken=(1, 650))
    pack(source, tmp_path)
    assert largest <= 512
    names = [source.key(index) for index in range(700) if index not in source.broken]
    assert len(list((tmp_path / "train/name_offsets/c").iterdir())) == 11
    with open_split(str(tmp_path), "train") as split:
        assert split.names(np.arange(698)[::-1]) == names[::-1]
        assert split._names is not None
        assert max(len(split._names._bytes._held), len(split._names._offsets._held)) <= 4
        assert split.names(np.array([40, 41, 697])) == [names[40], names[41], names[697]]
    assert verify_split(str(tmp_path), "train") == ()


def test_opening_a_split_reads_no_names(data, monkeypatch):
    opened = []

    def counted(location, name, metadata=None):
        opened.append(name)
        return arrays.read_array(location, name, metadata)

    monkeypatch.setattr(split_arrays, "read_array", counted)
    with open_split(str(data), "train") as split:
        split.read_into(np.arange(1), np.zeros((1, 4, 4), np.uint32), np.zeros(1, np.int32), timeout_s=30)
        assert not {"names", "name_offsets", "weights", "groups"} & {*opened}


LOST = ["names", "names/c/0", "names/zarr.json", "name_offsets/c/0", "weights/c/0", "weights/zarr.json", "groups/c/0"]


@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize("how", ["missing", "truncated"])
def test_each_lost_file_is_found_and_packed_again(data, lost, how):
    before, path = files_of(data), data / "train" / lost
    if path.is_dir():
        shutil.rmtree(path)
    elif how == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-30])
    assert any(each.file.startswith(lost) for each in verify_split(str(data), "train"))
    result = pack(source_of(**COLUMNS), data)
    assert any(each.startswith(lost) for each in result.repaired)
    assert files_of(data) == before


@pytest.mark.parametrize("name", ["names", "name_offsets", "weights", "groups"])
def test_exchanged_values_are_found_and_packed_again(data, name):
    before = files_of(data)
    array = ts.open({"driver": "zarr3", "kvstore": f"file://{data}/train/{name}/"}).result()
    array[:4].write(array[:4].read().result()[::-1].copy()).result()
    assert name in {each.file.partition("/")[0] for each in verify_split(str(data), "train")}
    with open_split(str(data), "train") as split:
        read = partial(split.names, np.arange(6)) if name.startswith("name") else getattr(split, name)
        with pytest.raises(ShardError, match=f"the {name} differ from those that"):
            read()
    assert [each.partition("/")[0] for each in pack(source_of(**COLUMNS), data).repaired] == [name]
    assert files_of(data) == before


def test_names_that_the_source_no_longer_has_are_not_made_up(data):
    shutil.rmtree(data / "train/names")
    changed = source_of(**COLUMNS)
    changed.key = lambda index: f"other{index}"
    with pytest.raises(ShardError, match=r"names is missing or damaged and can't be packed again: the source now has"):
        pack(changed, data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"column_digests": {}}, "the keys of column_digests must be names, name_offsets, weights, groups"),
        ({"column_digests": {"names": 3}}, "names of column_digests must be a list"),
        ({"column_digests": []}, "column_digests must be an object"),
        ({"num_groups": 0}, "num_groups must be 0 without groups"),
        ({"name_bytes": -1}, "name_bytes must be a whole number from 0"),
        ({"name_bytes": 1 << 40}, "names of column_digests must have 262,144 entries, found 1"),
        ({"format_version": 4}, "unknown key column_digests, name_bytes, num_groups"),
    ],
)
def test_each_broken_rule_of_a_manifest_with_names_is_named(data, changes, message):
    document = json.loads((data / "train/manifest.json").read_text()) | changes
    with pytest.raises(ShardError, match=message):
        Manifest.from_json(json.dumps(document))


def test_an_error_about_an_image_names_its_file(data):
    path = data / "train/pixels/c/0/0/0"
    content = bytearray(path.read_bytes())
    content[70] ^= 1  # image 1, which is NAMES[2]
    path.write_bytes(content)
    with open_split(str(data), "train") as split:
        pixels, labels = np.zeros((6, 4, 4), np.uint32), np.zeros(6, np.int32)
        with pytest.raises(ShardError, match=r"image 1 \('n3/\\udcff\\udcfe.png'\) in pixels/c/0/0/0: the checksum"):
            split.read_into(np.arange(6), pixels, labels, timeout_s=30)
        # Without the names, the index remains.
        shutil.rmtree(data / "train/names")
        with pytest.raises(ShardError, match=r"train: image 1 in pixels/c/0/0/0: the checksum"):
            split.read_into(np.arange(6), pixels, labels, timeout_s=30)


def test_a_complete_pack_is_recognised_with_its_names(data):
    location = open_location(str(data)).child("train")
    manifest = Manifest.from_json((data / "train/manifest.json").read_bytes())
    assert find_lost_files(location, manifest) == ()
    before = files_of(data)
    assert pack(source_of(**COLUMNS), data).was_complete
    assert files_of(data) == before


def test_inspect_shards_says_what_a_pack_has_beside_labels(data):
    result = CliRunner().invoke(inspect_shards, [str(data)])
    assert "format     version 5\n" in result.stdout
    assert "also       weights and 5 groups of the images\n" in result.stdout


def test_forged_offsets_are_an_error_whatever_the_digests_say(data):
    array = ts.open({"driver": "zarr3", "kvstore": f"file://{data}/train/name_offsets/"}).result()
    sound = array.read().result()
    path = data / "train/manifest.json"
    manifest = Manifest.from_json(path.read_bytes())
    for forged in (sound[::-1], sound + 1, np.where(np.arange(7) == 3, np.uint64(2**63), sound)):
        array[...].write(np.ascontiguousarray(forged)).result()
        digests = {**manifest.column_digests, "name_offsets": (arrays.words_digest([forged]),)}
        path.write_text(replace(manifest, column_digests=digests).to_json())
        with (
            open_split(str(data), "train") as split,
            pytest.raises(ShardError, match=r"name_offsets: the names overlap or are longer than 16,384 bytes; run"),
        ):
            split.names(np.arange(6))
        found = verify_split(str(data), "train")
        assert [each.file for each in found] == ["name_offsets/c/0"]
        assert found[0].what == "offsets beyond the bytes of the names, or descending"


def test_a_name_is_found_for_the_damaged_image_alone(data, monkeypatch):
    """Not for each image of the batch that is read again to find it."""
    named: list[int] = []

    def describe(location, manifest, index):
        named.append(index)
        return f"image {index}"

    monkeypatch.setattr("loopfeed.preprocess.shards.reader.describe_image", describe)
    (data / "train/pixels/c/1/0/0").unlink()
    with open_split(str(data), "train") as split, pytest.raises(ShardError, match="image 4 in pixels/c/1/0/0"):
        split.read_into(np.arange(6), np.zeros((6, 4, 4), np.uint32), np.zeros(6, np.int32), timeout_s=30)
    assert named == [4]


def test_lost_names_are_found_before_the_images_are_evaluated(tmp_path):
    source = source_of()
    pack(source, tmp_path / "data")
    run = toy_config(
        data=str(tmp_path / "data"), num_classes=None, eval_split="train", run_dir=tmp_path / "run", steps=1
    )
    train(run, model=Linear())
    (tmp_path / "data/train/names/c/0").unlink()
    said: list[str] = []
    with pytest.raises(ShardError, match="names/c/0"):
        evaluate(tmp_path / "run", model=Linear(), predictions=True, notify=said.append)
    assert not [line for line in said if line.startswith("compiled")]
    assert evaluate(tmp_path / "run", model=Linear()).record.num_images == 6
