"""Pack order, held-out images and limits: functions of keys only."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopfeed.preprocess.shards.classes import ImageClass
from loopfeed.preprocess.sources import selection
from loopfeed.preprocess.sources.listing import Listing, SourceError
from loopfeed.preprocess.sources.selection import held_out, pack_order


def listing_of(pairs):
    ids = {label: name.split("/")[0] for name, label in pairs}
    listing = Listing(ImageClass(ids.get(label, ""), "") for label in range(max(ids) + 1))
    for name, label in pairs:
        folder, _, member = name.partition("/")
        listing.add(folder + "/", member, label, size=10)
    return listing


def names_in_order(listing, limit=None):
    return [listing.name(int(entry)) for entry in pack_order(listing, np.arange(len(listing)), limit)]


def tree(num_classes, num_images):
    return [(f"c{label}/{k}.jpg", label) for label in range(num_classes) for k in range(num_images)]


def test_golden_order():
    # A change here makes an interrupted pack, run again, mix two orders.
    order = "c0/0.jpg c2/2.jpg c1/2.jpg c1/1.jpg c2/0.jpg c0/1.jpg c2/1.jpg c0/2.jpg c1/0.jpg"
    assert names_in_order(listing_of(tree(3, 3))) == order.split()


@settings(max_examples=50)
@given(st.data())
def test_order_does_not_depend_on_how_files_are_listed(data):
    pairs = tree(3, 12)
    shuffled = data.draw(st.permutations(pairs))
    limit = data.draw(st.none() | st.integers(1, 40))
    assert names_in_order(listing_of(shuffled), limit) == names_in_order(listing_of(pairs), limit)


@given(num_classes=st.integers(1, 7), num_images=st.integers(1, 9), limit=st.integers(1, 70))
def test_a_limit_takes_turns_among_classes_and_keeps_the_order(num_classes, num_images, limit):
    listing = listing_of(tree(num_classes, num_images))
    whole, limited = names_in_order(listing), names_in_order(listing, limit)
    assert limited == [name for name in whole if name in set(limited)]
    assert len(limited) == min(limit, num_classes * num_images)
    counts = Counter(name.split("/")[0] for name in limited)
    assert max(counts.values()) - min(counts.get(f"c{label}", 0) for label in range(num_classes)) <= 1


def test_a_limit_uses_what_small_classes_have():
    listing = listing_of([("a/0", 0), *((f"b/{k}", 1) for k in range(50))])
    assert Counter(name[0] for name in names_in_order(listing, 10)) == {"a": 1, "b": 9}


def test_equal_hashes_are_ordered_by_name(monkeypatch):
    monkeypatch.setattr(selection, "key_hashes", lambda listing, purpose: np.zeros(len(listing), np.uint64))
    assert names_in_order(listing_of([("x/b", 0), ("x/c", 0), ("x/a", 0)])) == ["x/a", "x/b", "x/c"]


def test_a_duplicate_image_is_refused():
    with pytest.raises(SourceError, match="a/1 exists twice; write the archive again without the"):
        names_in_order(listing_of([("a/1", 0), ("a/2", 0), ("a/1", 0)]))


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=20), fraction=st.floats(0.001, 0.999))
def test_each_class_is_held_out_by_itself(sizes, fraction):
    pairs = [(f"c{label}/{k}", label) for label, size in enumerate(sizes) for k in range(size)]
    listing = listing_of(pairs)
    taken = held_out(listing, fraction)
    hashes = selection.key_hashes(listing, b"feedloop holdout")
    for label, size in enumerate(sizes):
        mine = sorted((hashes[place], taken[place]) for place, (_, each) in enumerate(pairs) if each == label)
        flags = [bool(flag) for _, flag in mine]
        count = min(max(int(fraction * size + 0.5), 1), size - 1)
        assert flags == [True] * count + [False] * (size - count)


def test_small_classes_are_all_in_the_validation_split():
    # The rule of earlier packs left five of these classes out.
    pairs = tree(40, 16)
    taken = held_out(listing_of(pairs), 0.1)
    assert Counter(label for (_, label), out in zip(pairs, taken, strict=True) if out) == dict.fromkeys(range(40), 2)


def test_a_larger_fraction_holds_out_the_same_images_and_more():
    listing = listing_of(tree(4, 200))
    assert (held_out(listing, 0.2) <= held_out(listing, 0.4)).all()
    assert held_out(listing_of(tree(2, 200)), 0.2).tolist() == held_out(listing, 0.2)[:400].tolist()


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=30), fraction=st.floats(0.01, 0.999))
def test_the_rule_of_earlier_packs(sizes, fraction):
    pairs = [(f"c{label}/{k}", label) for label, size in enumerate(sizes) for k in range(size)]
    listing = listing_of(pairs)
    taken = held_out(listing, fraction, rule=1)
    assert {label for (_, label), out in zip(pairs, taken, strict=True) if not out} == set(range(len(sizes)))
    # No image but that one is kept back: one more of a class with several is held out by its own hash alone.
    hashes = selection.key_hashes(listing, b"feedloop holdout")
    falls = hashes < np.uint64(round(fraction * 2**64))
    for label, size in enumerate(sizes):
        mine = [place for place, (_, each) in enumerate(pairs) if each == label]
        assert falls[mine].sum() - taken[mine].sum() == (1 if falls[mine].sum() == size else 0)


def test_a_rule_of_a_newer_version():
    with pytest.raises(SourceError, match="hold-out rule must be 1 to 2, got 3; install a newer"):
        held_out(listing_of(tree(2, 2)), 0.5, rule=3)
    with pytest.raises(SourceError, match="begun without groups; leave --group-by out"):
        held_out(listing_of(tree(2, 2)), 0.5, rule=1, groups=np.zeros(4, np.uint32))


@settings(max_examples=50)
@given(st.data(), st.floats(0.05, 0.6))
def test_groups_are_held_out_whole_and_the_last_of_a_class_never(data, fraction):
    labels = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=60))
    groups = np.array([data.draw(st.integers(0, 9)) for _ in labels], np.uint32)
    pairs = [(f"c{label}/{k}", label) for k, label in enumerate(labels)]
    taken = held_out(listing_of(pairs), fraction, groups=groups)
    assert not set(groups[taken]) & set(groups[~taken])
    assert set(np.array(labels)[~taken]) == set(labels)
    # No group that is left would bring the counts of its classes nearer, unless it has the last of a class.
    counts = np.bincount(labels, minlength=4)
    wanted = np.minimum(np.maximum(np.floor(fraction * counts + 0.5), 1), counts - 1)
    found = np.bincount(np.array(labels)[taken], minlength=4)
    for group in set(groups[~taken].tolist()) if taken.any() else ():
        its = np.bincount(np.array(labels)[groups == group], minlength=4)
        is_last = ((counts - found == its) & (its > 0)).any()
        assert is_last or np.abs(wanted - found - its).sum() >= np.abs(wanted - found).sum()


def test_a_group_with_the_last_image_of_a_class_is_not_held_out_however_well_it_fits():
    pairs = [("a/0", 0), *((f"b/{k}", 1) for k in range(40))]
    groups = np.array([0] * 11 + [1] * 30, np.uint32)
    assert held_out(listing_of(pairs), 0.25, groups=groups).tolist() == [False] * 11 + [True] * 30


def test_holding_out_is_independent_of_the_order():
    listing = listing_of(tree(1, 4000))
    taken = held_out(listing, 0.5)[pack_order(listing, np.arange(4000))]
    assert abs(taken[:2000].mean() - taken[2000:].mean()) < 0.08  # five sigma
