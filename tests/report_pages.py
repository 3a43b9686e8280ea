"""A parsed report page for tests: its elements, texts, tables and charts."""

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

VOID = frozenset({"br", "img", "meta"})


@dataclass
class Element:
    """An element with its attributes and what is in it, texts as strings."""

    name: str
    attributes: dict[str, str | None]
    children: list[Any] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(each if isinstance(each, str) else each.text for each in self.children)

    def all(self, name: str, **attributes: str) -> list["Element"]:
        """Return the elements of a name below this one, in the order of the page."""
        found = []
        for child in self.children:
            if isinstance(child, Element):
                if child.name == name and all(
                    child.attributes.get(key.rstrip("_")) == value for key, value in attributes.items()
                ):
                    found.append(child)
                found += child.all(name, **attributes)
        return found

    def one(self, name: str, **attributes: str) -> "Element":
        (found,) = self.all(name, **attributes)
        return found


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("document", {})
        self.open = [self.root]

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), f"an attribute of <{tag}> is there twice"
        element = Element(tag, dict(attrs))
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attrs):
        raise AssertionError(f"<{tag}/>")

    def handle_endtag(self, tag):
        assert self.open[-1].name == tag, f"</{tag}> in <{self.open[-1].name}>"
        self.open.pop()

    def handle_data(self, data):
        self.open[-1].children.append(data)


def parse(text: str) -> Element:
    """Parse a page; raise AssertionError if an element is not closed in order."""
    parser = _Parser()
    parser.feed(text)
    parser.close()
    assert parser.open == [parser.root], f"<{parser.open[-1].name}> is not closed"
    return parser.root


def section(page: Element, name: str) -> Element:
    return page.one("section", id=name)


def table(element: Element, caption: str) -> list[list[str]]:
    """Return the cells of the table with a caption, its headings first."""
    (found,) = [each for each in element.all("table") if each.one("caption").text == caption]
    return [[cell.text for cell in row.children if isinstance(cell, Element)] for row in found.all("tr")]


def rows_of(element: Element, caption: str) -> dict[str, str]:
    """Return the second cell of each row by the first."""
    return {row[0]: row[1] for row in table(element, caption)[1:]}


def points(element: Element, title: str) -> dict[str, Any]:
    """Return what the chart with a title gives to the page's script."""
    (figure,) = [each for each in element.all("figure") if each.one("figcaption").text.startswith(title)]
    return json.loads(figure.one("script", type="application/json").text)
