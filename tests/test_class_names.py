"""Which class a line of `classes.txt` names, and what is said about the file."""

import pytest

from loopfeed.preprocess.shards.classes import ImageClass, have_same_order, lacking, places
from loopfeed.preprocess.sources.class_names import describe_alike, leaf_folders, name_classes, parse_name_file
from loopfeed.preprocess.sources.label_columns import describe_doubts


@pytest.mark.parametrize(
    ("ids", "text", "names"),
    [
        ("red|red fox|blue", "red fox\nred panda\nblue\n", {}),
        ("red|red fox", "red fox Vulpes vulpes\nred a colour\n", {"red fox": "Vulpes vulpes", "red": "a colour"}),
        ("red|red fox", "red fox\tVulpes\nred\n", {"red fox": "Vulpes"}),
        ("golden|pug", "golden retriever\npug\n", {}),
        ("golden|pug", "golden\tretriever\npug\n", {"golden": "retriever"}),
        ("a|b|c", "a alpha\nb beta, second\nc\n", {"a": "alpha", "b": "beta"}),
        ("tench, Tinca tinca|cat", "tench, Tinca tinca\ncat\n", {}),
        ("n01|n02", "n01 tench, Tinca tinca\nn02 white shark\nn03 nobody\n", {"n01": "tench", "n02": "white shark"}),
        ("Ku\u0308che|Bad", "K\u00fcche kitchen\nBad bath\n", {"Ku\u0308che": "kitchen", "Bad": "bath"}),
        ("1|2|10", "1 001.Albatross\n2 002.Auk\n10 010.Jay\n", {"1": "001.Albatross", "2": "002.Auk", "10": "010.Jay"}),
    ],
)  # fmt: skip
def test_an_identifier_with_blanks_is_never_divided(ids, text, names):
    assert name_classes([parse_name_file(text.encode(), "classes.txt")], ids.split("|")).names == names


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("cat\ndog\n", None),
        ("cat Felis\ndog Canis\n", None),
        ("dog\ncat\n", "labels are in the order of the identifiers (0 cat, 1 dog), whatever the order of that file"),
        ("dog Canis\ncat Felis\n", "has the classes in another order"),
        ("cat\ndog\nsea cow\n", 'has 1 line without a class, such as "sea cow"'),
        ("0: cat\n1: dog\n", 'names no class (its first line is "0: cat"), so it is not used'),
    ],
)
def test_a_file_that_does_not_mean_what_its_order_suggests_is_named_in_one_line(text, note):
    notes = name_classes([parse_name_file(text.encode(), "x/classes.txt")], ["cat", "dog"]).notes
    assert len(notes) == (note is not None)
    assert note is None or (notes[0].startswith("x/classes.txt ") and note in notes[0])


def test_a_line_as_long_as_the_file_may_be_takes_no_longer_than_any():
    file = parse_name_file(b"n0 " + b" a" * (1 << 22), "classes.txt")
    assert len(name_classes([file], ["n0"]).names["n0"]) == (1 << 23) - 1


def test_identifiers_in_another_unicode_form_are_the_same():
    mac, linux = ([ImageClass(each, each) for each in ids] for ids in (("Bad", "Ku\u0308che"), ("K\u00fcche", "Bad")))
    assert lacking(mac, linux) is None
    assert places(mac, among=linux) == [1, 0]
    assert have_same_order(mac, linux[::-1])


def test_names_of_many_digits_take_time_by_their_length():
    assert describe_alike(["0" * 100_000 + "x", "1"], "x") == []
    assert describe_doubts("class", [f".{'1' * 200_000}x"]) == []


@pytest.mark.parametrize("pair", [("0", "00"), ("0", "0.0"), ("7", "007."), ("10", "010.00")])
def test_numbers_written_in_two_ways_look_alike(pair):
    assert "how a number is written" in describe_alike(pair, "x")[0]
    assert describe_alike(["0", "1", ".0", "-0", "10", "1.01"], "x") == []


def test_decimal_numbers_are_doubted():
    assert [bool(describe_doubts("c", [each])) for each in ("1.5", "-,05", "1.0", "3", "1.5x", ".")] == [
        *(True, True, False, False, False, False)
    ]


def test_leaves_are_folders_with_images_or_without_folders_however_deep():
    paths = ["a/b/c/1.png", "a/b-/1", "a/b/2", "a/0", "x/1.png", "x/y/1.png", "loose.png"]
    assert leaf_folders(paths) == ["a/b/c", "a/b-", "x", "x/y"]
    deep = [f"{number}{'/a' * 2_000}/1" for number in range(500)]
    assert len(leaf_folders([*deep, "0/1"])) == 500
