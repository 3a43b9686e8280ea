"""A profile as text, in each of its formats."""

import csv
import io
import json

import pytest

from loopfeed.engine.profile.formats import COLUMNS, describe_seconds, format_profile, to_csv
from loopfeed.engine.profile.table import Profile, ProfileRow, ScopeRow, TracedSteps

PROFILE = Profile(
    rows=(
        ProfileRow("fit", "fit", 83.25, 0.0, 1, 1602.0, 83.25, 100.0),
        ProfileRow("fit", "valid", 0.4375, 0.03125, 3, 22840.0, 1.3125, 1.5766),
        ProfileRow("train", "step", 0.0795, 0.0042, 1042, 1610.0, 82.839, 99.506),
        ProfileRow("train", "draw", 0.0, 0.0, 1042, None, 0.0, 0.0),
        ProfileRow("train", "unattributed", 0.000078, 0.0000125, 1042, 1641025.6, 0.081276, 0.0976, True),
    ),
    scopes=(
        ScopeRow("train", "forward", "layer1", 0.0125, 0.001, 1042, 10240.0, 13.025, 15.6456),
        ScopeRow("train", "forward", "a|b", 0.0125, 0.001, 1042, 10240.0, 13.025, 15.6456),
        ScopeRow("train", "backward", "layer1", 0.0125, 0.001, 1042, 10240.0, 13.025, 15.6456),
    ),
    traced=(TracedSteps("train", 10, 30, 0.0801, 0.0799),),
    notes=("* a mark", "Another note that is so long that it does not fit into one line of a terminal of 80 columns."),
)


def test_actions_are_never_shortened_and_the_widest_numbers_fit_a_terminal():
    widest = [
        ProfileRow("valid", "unattributed", mean_s, mean_s, calls, rate, 3.5e8, 100.0, is_estimated=True)
        for mean_s in (99_999.4, 99_999.6, 0.9996, 9.996e-4)
        for calls in (999_999, 1_000_000, 2**31 - 1)
        for rate in (-499_999.0, 999e6, -2.5e9, 987e9)
    ]
    scopes = [
        ScopeRow(
            "valid", "backward", "encoder/" * 8 + "block", row.mean_s, 0.0, row.calls, row.samples_per_s, 3.5e8, 1.0
        )
        for row in widest
    ]
    text = format_profile(Profile(tuple(widest), tuple(scopes)), "plain")
    assert max(map(len, text.splitlines())) == 80
    assert text.count("unattributed*") == len(widest)
    assert text.count("er/block  ") == len(widest)


def test_markdown_has_two_tables_of_equal_columns():
    lines = format_profile(PROFILE, "markdown").splitlines()
    first, second = lines[:7], lines[8:13]
    assert first[0] == "| " + " | ".join(COLUMNS) + " |"
    assert first[-1] == "|  | unattributed\\* | 78.0 µs | 12.5 µs | 1,042 | 1.6 M | 81.3 ms | 0.1 % |"
    assert second[3] == "|  |  | a\\|b | 12.5 ms | 1.00 ms | 1,042 | 10,240 | 13.0 s | 15.6 % |"
    for table in (first, second):
        assert len({line.replace("\\|", "").count("|") for line in table}) == 1


def test_csv_has_both_tables_with_unrounded_numbers():
    rows = list(csv.DictReader(io.StringIO(to_csv(PROFILE))))
    assert tuple(rows[0]) == (*COLUMNS, "Scope", "Estimated")
    assert [row["Scope"] for row in rows] == ["", "", "", "", "", "layer1", "a|b", "layer1"]
    assert [row["Estimated"] for row in rows] == ["0", "0", "0", "0", "1", "1", "1", "1"]
    assert (rows[4]["Mean Duration"], rows[3]["Samples/Second"]) == ("7.8e-05", "")
    assert format_profile(PROFILE, "csv") == to_csv(PROFILE)


def test_json_has_every_field():
    values = json.loads(format_profile(PROFILE, "json"))
    assert list(values) == ["rows", "scopes", "traced", "notes"]
    assert tuple(ProfileRow(**row) for row in values["rows"]) == PROFILE.rows
    assert tuple(ScopeRow(**row) for row in values["scopes"]) == PROFILE.scopes
    assert tuple(TracedSteps(**each) for each in values["traced"]) == PROFILE.traced
    assert tuple(values["notes"]) == PROFILE.notes


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.00 µs"), (9.994e-6, "9.99 µs"), (1e-3, "1.00 ms"), (0.0125, "12.5 ms"), (1, "1.00 s"), (999, "999 s"),
     (86_400, "86,400 s"), (360_000, "100 h")],
)  # fmt: skip
def test_durations_have_three_digits(seconds, text):
    assert describe_seconds(seconds) == text
