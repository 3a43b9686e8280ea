"""A short card with a title and some facts: as text for a terminal, and as HTML for a notebook. Knows no runs."""

from collections.abc import Iterable
from html import escape

from loopfeed.preprocess.printable import printable_line

type Facts = Iterable[tuple[str, str]]
"""Names and values, in order."""

# A notebook's own colours and fonts, light or dark; no style sheet, which would apply to the whole notebook.
_FAINT = "opacity:.7;padding:0 1em 0 0;text-align:left;vertical-align:top;white-space:nowrap"
_VALUE = "padding:0;text-align:left;font-variant-numeric:tabular-nums;overflow-wrap:anywhere"


def text_card(title: str, facts: Facts) -> str:
    """Return a title, and below it a line for each fact."""
    found = [(name, printable_line(value)) for name, value in facts]
    width = max((len(name) for name, _ in found), default=0)
    return "\n".join([printable_line(title), *(f"  {name:{width}}  {value}" for name, value in found)])


def html_card(title: str, facts: Facts, *parts: str) -> str:
    """Return the same as HTML; `parts` are HTML that stands below it."""
    rows = "".join(
        f'<tr style="background:none"><td style="{_FAINT}">{escape(name)}</td>'
        f'<td style="{_VALUE}">{escape(printable_line(value))}</td></tr>'
        for name, value in facts
    )
    table = f'<table style="border:0;margin:.2em 0">{rows}</table>' if rows else ""
    return f'<div style="max-width:60em"><b>{escape(printable_line(title))}</b>{table}{"".join(parts)}</div>'
