"""Markup of the report page: whatever is text stays text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopfeed.engine.report_page.markup import Html, data_block, join, table, tag
from tests.report_pages import parse
from tests.report_runs import HOSTILE


@pytest.mark.parametrize("text", [HOSTILE, "a & b < c", "'\"", ""])
def test_a_text_comes_back_from_a_parser(text):
    page = parse(tag("p", text, title=text))
    (element,) = page.children
    assert element.text == text
    assert element.attributes == {"title": text}


@given(st.text())
def test_no_text_makes_an_element(text):
    page = parse(tag("p", text, title=text))
    assert page.children[0].name == "p"
    assert all(isinstance(each, str) for each in page.children[0].children)


def test_control_characters_are_escaped_and_long_texts_lose_their_middle():
    assert tag("p", "a\x1b[2J\u202eb\ud800") == "<p>a\\x1b[2J\\u202eb\\ud800</p>"
    text = parse(tag("p", "x" * 5000 + "end")).text
    assert len(text) < 2100
    assert text.endswith("end")


def test_attributes_of_zero_stay_and_those_of_none_go():
    assert (
        tag("line", x1=0, x2=None, hidden=True, open=False, aria_label="a")
        == '<line x1="0" hidden aria-label="a"></line>'
    )


def test_markup_is_not_escaped_again_and_none_is_nothing():
    assert join(tag("b", "<"), None, [Html("<br>"), "&"]) == "<b>&lt;</b><br>&amp;"


def test_data_cannot_end_their_block():
    block = data_block({"name": HOSTILE})
    assert block.count("<") == 2
    assert json.loads(parse(block).text) == {"name": HOSTILE}
    with pytest.raises(ValueError, match="JSON"):
        data_block({"value": float("nan")})


def test_a_table_has_headings_for_its_rows_and_columns():
    page = parse(table(("class", "images"), [("cat", "1,000")], caption="Classes", numbers=(1,)))
    assert [(each.text, each.attributes.get("scope")) for each in page.all("th")] == [
        ("class", "col"), ("images", "col"), ("cat", "row"),
    ]  # fmt: skip
    assert page.one("caption").text == "Classes"
    assert page.one("div").attributes["tabindex"] == "0"
