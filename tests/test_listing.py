"""Keys, digests and the order of classes: what a pack takes from a listing."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loopfeed.preprocess.shards.classes import ImageClass
from loopfeed.preprocess.sources.listing import ListedSplit, Listing, SourceError, index_classes
from loopfeed.preprocess.sources.selection import pack_order
from loopfeed.preprocess.sources.tree import FolderStore

CLASSES = (ImageClass("cat", "cat"), ImageClass("dog", "dog"))
IMAGES = [("cat", "1.jpg", 0), ("cat", "sub/2.jpg", 0), ("dog", "\udcff.jpg", 1), ("dog", "1.jpg", 1)]


def split_of(listing, **columns):
    return ListedSplit(
        "train", CLASSES, listing, FolderStore(Path()), pack_order(listing, np.arange(len(listing))), **columns
    )


def class_folders():
    listing = Listing(CLASSES)
    for folder, member, label in IMAGES:
        listing.add(f"train/{folder}/", member, label, size=10)
    return listing


def table(folder_of=lambda folder: folder):
    listing = Listing(CLASSES, keys="path")
    for folder, member, label in reversed(IMAGES):
        listing.add("photos/", f"{folder_of(folder)}/{member}", label, size=10)
    return listing


def test_a_table_with_the_paths_of_class_folders_has_their_keys_order_and_digest():
    folders, rows = split_of(class_folders()), split_of(table())
    assert [rows.key(at) for at in range(4)] == [folders.key(at) for at in range(4)]
    assert sorted(folders.key(at) for at in range(4)) == ["cat/1.jpg", "cat/sub/2.jpg", "dog/1.jpg", "dog/\udcff.jpg"]
    assert rows.digest() == folders.digest()
    expected = b"feedloop listing 2\ncat\ndog\n"
    for at in range(4):
        expected += folders.key(at).encode("utf-8", "surrogateescape") + b"\x0010\n"
    assert folders.digest() == hashlib.sha256(expected).hexdigest()


def test_the_digest_states_a_class_that_the_key_does_not_begin_with():
    listing = Listing(CLASSES, keys="path")
    listing.add("", "all/1.jpg", 1, size=10)
    assert listing.digest_line(0) == b"all/1.jpg\x0010\x00dog\n"
    relabelled = Listing(CLASSES, keys="path")
    relabelled.add("", "all/1.jpg", 0, size=10)
    assert split_of(listing).digest() != split_of(relabelled).digest()
    # "a/b" is no folder of class folders, where the class "a" has the same key.
    nested = Listing([ImageClass("a", "a"), ImageClass("a/b", "a/b")], keys="path")
    nested.add("", "a/b/1.jpg", 0, size=10)
    nested.add("", "a/b/1.jpg", 1, size=10)
    assert nested.digest_line(0) == b"a/b/1.jpg\x0010\n"
    assert nested.digest_line(1) == b"a/b/1.jpg\x0010\x00a/b\n"


def test_a_key_has_no_leading_slash():
    listing = Listing([ImageClass("", "")])
    listing.add("set.tar!", "x/1.jpg", 0, size=10)
    assert listing.key_bytes(0) == b"/x/1.jpg"
    assert split_of(listing).key(0) == "x/1.jpg"


def test_the_digest_covers_weights_and_groups():
    columns: list[dict[str, Any]] = [
        {},
        {"weights": np.ones(4, np.float32)},
        {"weights": np.array([1, 1, 1, 2], np.float32)},
        {"groups": np.zeros(4, np.uint32)},
        {"groups": np.array([0, 0, 1, 1], np.uint32)},
    ]
    assert len({split_of(class_folders(), **each).digest() for each in columns}) == len(columns)


@pytest.mark.parametrize(
    ("ids", "as_folders", "as_values"),
    [
        (["10", "2", "-1", "0"], ["-1", "0", "10", "2"], ["-1", "0", "2", "10"]),
        (["10", "2", "01"], ["01", "10", "2"], ["01", "10", "2"]),
        (["10", "2", "cat"], ["10", "2", "cat"], ["10", "2", "cat"]),
        (["10", "2", "1.0"], ["1.0", "10", "2"], ["1.0", "10", "2"]),
        (["10", "2", "-0"], ["-0", "10", "2"], ["-0", "10", "2"]),
        (["10", "٢"], ["10", "٢"], ["10", "٢"]),
    ],
)
def test_only_values_that_are_all_whole_numbers_are_in_numerical_order(ids, as_folders, as_values):
    assert [each.id for each in index_classes(ids, {}, "here")] == as_folders
    assert [each.id for each in index_classes(ids, {}, "here", numeric=True)] == as_values


def test_half_a_character_is_no_class():
    """JSON can have one, as in the labels of WebDataset, and Python too; bytes of a folder's name are kept."""
    assert [each.id for each in index_classes(["b", "\udcff"], {}, "here")] == ["b", "\udcff"]
    with pytest.raises(SourceError, match=r"the class 'y\\ud800' is not valid Unicode; rename it"):
        index_classes(["x", "y\ud800"], {}, "here", numeric=True)
