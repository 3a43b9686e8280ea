"""Templates of the report page: whatever is text stays text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopfeed.engine.report_page.report import open_templates
from tests.report_pages import parse, table
from tests.report_runs import HOSTILE

TEMPLATES = open_templates()
PARAGRAPH = '<p title="{{ text }}">{{ text }}</p>'


def rendered(source, **values):
    return TEMPLATES.from_string(source).render(runs=[], alone=True, **values)


@given(st.text() | st.just(HOSTILE))
def test_no_text_makes_an_element_or_an_attribute(text):
    (element,) = parse(rendered(PARAGRAPH, text=text)).children
    assert list(element.attributes) == ["title"]
    assert all(isinstance(each, str) for each in element.children)
    if text.isprintable():
        assert (element.text, element.attributes["title"]) == (text, text)


def test_control_characters_are_escaped_and_long_texts_lose_their_middle():
    (element,) = parse(rendered(PARAGRAPH, text="a\x1b[2J\u202eb\ud800")).children
    assert element.text == element.attributes["title"] == "a\\x1b[2J\\u202eb\\ud800"
    text = parse(rendered("{{ text }}", text="x" * 5000 + "end")).text
    assert len(text) < 2100
    assert text.endswith("end")


def test_data_cannot_end_their_block():
    block = rendered('<script type="application/json">{{ value | tojson }}</script>', value={"name": HOSTILE})
    assert block.count("<") == 2
    assert json.loads(parse(block).text) == {"name": HOSTILE}
    with pytest.raises(ValueError, match="JSON"):
        rendered("{{ value | tojson }}", value=float("nan"))


def test_a_table_has_headings_for_its_rows_and_columns():
    source = '{% import "macros.html" as m with context %}{{ m.table("Cl<s", ["class", "images"], rows, [1]) }}'
    page = parse(rendered(source, rows=[["<b>cat", "1,000"]]))
    assert table(page, "Cl<s") == [["class", "images"], ["<b>cat", "1,000"]]
    assert [each.attributes.get("scope") for each in page.all("th")] == ["col", "col", "row"]
    assert [each.attributes.get("class") for each in page.all("td")] == ["n"]
    assert page.one("div").attributes["tabindex"] == "0"
