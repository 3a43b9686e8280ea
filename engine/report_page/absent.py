"""Why a part of the page has no content."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Absent:
    """The reason why something is not on the page, as a sentence without its full stop.

    The first letter is shown as it is, because the sentence may begin with a path or an option.
    """

    reason: str
