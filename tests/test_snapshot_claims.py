"""What a snapshot claims is compared with its facts and its files before memory is taken for it."""

import errno
import json
import os

import numpy as np
import pytest
import tensorstore as ts

from loopfeed.engine.records import orbax_store, snapshot
from loopfeed.engine.records.digests import sealed
from loopfeed.engine.records.given_weights import read_given_weights
from loopfeed.engine.records.orbax_store import arrays_store
from loopfeed.engine.records.run_folder import SNAPSHOTS
from loopfeed.engine.records.snapshot import (
    SnapshotError,
    UnreadSnapshotError,
    read_folder_state,
    read_snapshot,
    write_snapshot,
)
from loopfeed.engine.records.weights import read_weights
from loopfeed.engine.run.resume import find_start
from loopfeed.preprocess import claimed_size
from loopfeed.preprocess.claimed_size import FREE_BYTES, MOST_RATIO, is_plausible

GB = 1 << 30


@pytest.fixture
def written(tmp_path, monkeypatch):
    """The folder of a snapshot of three arrays; Orbax must not read any of them."""
    tree = {"w": np.random.default_rng(0).normal(size=(8, 5)), "step": np.int32(4), "none": np.zeros((0, 3))}
    write_snapshot(tmp_path, 4, 8, tree)
    assert read_snapshot(tmp_path, 4).leaves["w"].shape == (8, 5)

    def must_not_read(path):
        raise AssertionError("the arrays were read")

    monkeypatch.setattr(snapshot, "restore_arrays", must_not_read)
    return tmp_path


def store_of(folder):
    return ts.KvStore.open(arrays_store(folder / "4")).result()


def claim(folder, name="w", **changes):
    """Change what the metadata of a stored array say."""
    store = store_of(folder)
    metadata = json.loads(store.read(f"{name}/.zarray").result().value)
    store.write(f"{name}/.zarray", json.dumps(metadata | changes).encode()).result()


def change_facts(folder, **changes):
    """Change the facts of a snapshot, and their digest, which anyone can compute."""
    path = folder / "4/facts/metadata"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps(sealed({**facts, **changes})))


def leaves(folder):
    return json.loads((folder / "4/facts/metadata").read_text())["leaves"]


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [6 * GB // 8], "chunks": [1 << 20], "fill_value": 1.0},
        {"shape": [8, 5, 1 << 40], "chunks": [1, 1, 1]},
        {"shape": [2**64, 5]},
        {"chunks": [1 << 40, 1]},
        {"chunks": [8]},
        {"chunks": [0, 5]},
        {"chunks": "many"},
        {"shape": None},
    ],
)
def test_a_stored_array_that_claims_another_shape_is_refused_unread(written, changes):
    claim(written, **changes)
    with pytest.raises(SnapshotError, match=r"4 is damaged .*: w does not have the shape \[8, 5\] that it was"):
        read_snapshot(written, 4)


def test_metadata_that_are_nested_deep_or_long_are_refused(written):
    for text in ("[" * 100_000, " " * 100_000):
        store_of(written).write("w/.zarray", text.encode()).result()
        with pytest.raises(SnapshotError, match="w does not have the shape"):
            read_snapshot(written, 4)


def test_an_array_that_the_facts_do_not_list_is_refused_unread(written):
    store_of(written).write("other/.zarray", b'{"shape": [1000000000000], "chunks": [1]}').result()
    with pytest.raises(SnapshotError, match="other is not one of its arrays"):
        read_snapshot(written, 4)


def test_facts_and_arrays_that_agree_on_far_more_than_is_stored_are_refused_unread(written):
    shape = [24 * GB // 8]
    claim(written, shape=shape, chunks=[1 << 20], fill_value=1.0)
    change_facts(written, leaves=leaves(written) | {"w": {"dtype": "float64", "shape": shape, "sha256": "0"}})
    with pytest.raises(SnapshotError, match=r"would take 25,769,803,780 bytes, but its files have [0-9,]{5,9}$"):
        read_snapshot(written, 4)


@pytest.mark.parametrize(
    ("leaf", "match"),
    [
        ({"dtype": "float32", "shape": [2**64]}, r"none cannot have the shape \[18446744073709551616\]"),
        ({"dtype": "float32", "shape": [0, 2**62]}, "none cannot have the shape"),
        ({"dtype": "float32", "shape": [-1]}, "none cannot have the shape"),
        ({"dtype": "float32", "shape": "3"}, "none cannot have the shape"),
        ({"dtype": "float32", "shape": [1.5]}, "none cannot have the shape"),
        ({"dtype": "nothing", "shape": [3]}, "its metadata do not describe none"),
        ({"shape": [3]}, "its metadata do not describe none"),
        (None, "its metadata do not describe none"),
    ],
)
def test_facts_that_describe_no_array_are_refused(written, leaf, match):
    change_facts(written, leaves=leaves(written) | {"none": leaf})
    with pytest.raises(SnapshotError, match=match):
        read_snapshot(written, 4)


def test_a_million_empty_arrays_are_refused(written):
    change_facts(written, leaves={f"a{number}": {"dtype": "bool", "shape": [0]} for number in range(100_001)})
    with pytest.raises(SnapshotError, match="it lists 100,001 arrays, of at most 100,000"):
        read_snapshot(written, 4)


@pytest.mark.parametrize(
    "changes", [{"pulls": 2**64}, {"pulls": -1}, {"pulls": "8"}, {"leaves": []}, {"versions": None}, {"format": None}]
)
def test_other_facts_of_another_form_are_refused(written, changes):
    change_facts(written, **changes)
    for read in (read_snapshot, read_folder_state):
        with pytest.raises(SnapshotError, match=r"metadata cannot be read|must have format 1"):
            read(written, 4)


def test_holes_in_the_files_are_not_stored(written, tmp_path):
    claim(written, shape=[24 * GB // 8], chunks=[1 << 20], fill_value=1.0)
    large = {"w": {"dtype": "float64", "shape": [24 * GB // 8], "sha256": "0"}}
    change_facts(written, leaves=leaves(written) | large)
    padding = written / "4/state/d/padding"
    with padding.open("wb") as file:
        file.write(b"x" * 10_000)
        file.truncate(10 * GB)
    if padding.stat().st_blocks * 512 > GB:
        pytest.skip("this file system stores holes")
    with pytest.raises(SnapshotError, match="its arrays would take 25,769,803,780 bytes"):
        read_snapshot(written, 4)
    weights = tmp_path / "weights"
    header = b'{"a":{"dtype":"F32","shape":[2684354560],"data_offsets":[0,10737418240]}}'
    weights.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(weights, 8 + len(header) + 10 * GB)
    for read in (read_weights, read_given_weights):
        with pytest.raises(
            ValueError, match=r"must be stored whole, but of the 10,737,418,321 bytes of .*: copy the file"
        ):
            read(weights)


def test_whatever_state_can_be_written_can_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(claimed_size, "FREE_BYTES", 1000)
    # As on a disk that compresses, of 8 MB of zeros.
    monkeypatch.setattr(snapshot, "stored_size", lambda status: status.st_size if status.st_size < 1 << 20 else 0)
    for number, tree in enumerate(
        ({"table": np.zeros(1 << 20)}, {"w": np.random.default_rng(0).normal(size=9000)}, {})
    ):
        write_snapshot(tmp_path, number, 1, {**tree, "step": np.int32(4)})
        read = read_snapshot(tmp_path, number).leaves
        assert all(np.array_equal(read[name], tree[name]) for name in tree)
    # Only as much as is needed, and only where it is.
    paddings = {path.parts[-4]: path.stat().st_size for path in tmp_path.rglob("padding")}
    assert paddings == {"0": -(-(8 * (1 << 20) + 4 - 1000) // MOST_RATIO)}
    (tmp_path / "0/state/d/padding").unlink()
    with pytest.raises(SnapshotError, match="its arrays would take"):
        read_snapshot(tmp_path, 0)


def test_zeros_that_are_hardly_stored_are_plausible_up_to_a_bound(tmp_path):
    zeros = np.zeros(FREE_BYTES // 8 // 16)
    write_snapshot(tmp_path, 1, 1, {"momentum": zeros, "w": np.random.default_rng(0).normal(size=1000)})
    assert read_snapshot(tmp_path, 1).leaves["momentum"].size == zeros.size
    assert is_plausible(FREE_BYTES, 0)
    assert is_plausible(MOST_RATIO * 1000 + FREE_BYTES, 1000)
    assert not is_plausible(MOST_RATIO * 1000 + FREE_BYTES + 1, 1000)


@pytest.mark.parametrize("name", ["exp#1", "50%", "a?b", "lr=0.1%20x", "a|b"])
def test_the_characters_of_urls_in_a_path_have_no_meaning(tmp_path, name):
    folder = tmp_path / name
    write_snapshot(folder, 4, 8, {"w": np.arange(3.0), "z": np.ones(2)})
    np.testing.assert_array_equal(read_snapshot(folder, 4).leaves["w"], [0, 1, 2])
    ts.KvStore.open(arrays_store(folder / "4")).result().write("z/0", b"no").result()
    with pytest.raises(SnapshotError, match=r"4 is damaged .*: z cannot be read"):
        read_snapshot(folder, 4)


@pytest.mark.parametrize(
    "error",
    [
        *(
            ValueError(f"UNKNOWN: Error reading manifest [os_error_code='{number}']")
            for number in (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENOMEM, errno.EACCES)
        ),
        MemoryError(),
        RuntimeError("can't start new thread"),
    ],
)
@pytest.mark.parametrize(
    "reader", [(snapshot, "restore_facts"), (orbax_store, "arrays_store"), (snapshot, "restore_arrays")]
)
def test_a_newest_snapshot_that_was_not_read_is_neither_passed_over_nor_called_damaged(
    tmp_path, monkeypatch, reader, error
):
    folder, step = tmp_path / SNAPSHOTS, 4
    for each in (step, 5):
        write_snapshot(folder, each, each, {"w": np.arange(3.0)})

    def fail(path):
        raise error

    before = getattr(*reader)
    monkeypatch.setattr(*reader, lambda path: (fail if path.name == "5" else before)(path))
    with pytest.raises(UnreadSnapshotError, match=r"the snapshot .*5 cannot be read: "):
        read_snapshot(folder, 5)
    with pytest.raises(ValueError, match="or remove that snapshot to resume without it"):
        find_start(tmp_path, pytest.fail)
