"""HTML and SVG elements, in which every text is escaped.

Whatever comes from a run is untrusted: a plain `str` given to `tag` is text, and only `Html`, which this module makes,
is markup.
"""

import html
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from loopfeed.preprocess.printable import printable_text

# Elements that have no end tag in HTML.
_VOID = frozenset({"br", "img", "meta"})
_LONGEST_TEXT = 2000
# The cells of a table of names and values may be broken anywhere, so that long paths fit.
_COLUMNS_OF_FACTS = 2


class Html(str):
    """Markup, in which all texts are escaped already."""

    __slots__ = ()


type Node = Html | str | None
"""Markup, a text to escape, or nothing."""


def tag(name: str, /, *children: Node | Iterable[Node], **attributes: Any) -> Html:
    """Return an element.

    Args:
        name: the name of the element.
        children: its content; a `str` that is not `Html` is escaped, None is left out.
        attributes: its attributes. An underscore becomes a hyphen, and one at the end is dropped (`class_`). None and
            False leave the attribute out, True gives it no value.
    """
    shown = "".join(
        _attribute(key, value) for key, value in attributes.items() if not (value is None or value is False)
    )
    if name in _VOID:
        return Html(f"<{name}{shown}>")
    return Html(f"<{name}{shown}>{join(*children)}</{name}>")


def join(*children: Node | Iterable[Node]) -> Html:
    """Return nodes one after the other, texts escaped."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, Html):
            parts.append(child)
        elif isinstance(child, str):
            parts.append(escaped(_shortened(child)))
        elif child is not None:
            parts.append(join(*child))
    return Html("".join(parts))


def _shortened(text: str) -> str:
    """Return a text without its middle if it is very long."""
    half = _LONGEST_TEXT // 2
    return text if len(text) <= _LONGEST_TEXT else f"{text[:half]} … {text[-half:]}"


def escaped(text: str) -> Html:
    """Return a text as markup, without control characters."""
    return Html(html.escape(printable_text(text), quote=True))


def _attribute(key: str, value: Any) -> str:
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escaped(_text(value))}"'


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def data_block(value: Any) -> Html:
    """Return a block of JSON for the page's script; browsers do not run it, and nothing in it can end it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    safe = re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", text)
    return Html(f'<script type="application/json">{safe}</script>')


def table(
    columns: Sequence[Node],
    rows: Iterable[Sequence[Node]],
    *,
    caption: str,
    numbers: Iterable[int] = (),
    class_: str = "",
) -> Html:
    """Return a table that scrolls within itself where it is wider than the page; the first cell of a row heads it.

    Args:
        columns: the headings.
        rows: the cells.
        caption: what the table shows.
        numbers: the places of the columns with numbers, which are aligned to the right.
        class_: its class, "" for that of its kind.
    """
    right = frozenset(numbers)

    def cell(name: str, place: int, content: Node, **attributes: str) -> Html:
        return tag(name, content, class_="n" if place in right else None, **attributes)

    head = tag("tr", (cell("th", place, each, scope="col") for place, each in enumerate(columns)))
    body = (
        tag(
            "tr", cell("th", 0, row[0], scope="row"), (cell("td", place, each) for place, each in enumerate(row[1:], 1))
        )
        for row in rows
    )
    class_ = class_ or ("facts" if len(columns) == _COLUMNS_OF_FACTS else "")
    content = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", body), class_=class_ or None)
    return scrolling(content, caption)


def scrolling(content: Html, label: str) -> Html:
    """Return content that scrolls sideways within itself, also by the keyboard."""
    return tag("div", content, class_="scroll", tabindex="0", role="region", aria_label=label)


def paragraph(*children: Node, class_: str | None = None) -> Html:
    """Return a paragraph."""
    return tag("p", *children, class_=class_)


def folded(summary: str, *children: Node) -> Html:
    """Return content that is shown on request."""
    return tag("details", tag("summary", summary), *children)
