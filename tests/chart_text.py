"""A drawn chart as plain text."""

from collections.abc import Sequence

from loopfeed.engine.commands.loss_chart import Span


def chart_text(lines: Sequence[Sequence[Span]]) -> str:
    return "\n".join("".join(span.text for span in line) for line in lines)
