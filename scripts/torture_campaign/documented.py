"""The one list of faults that commands need not notice, each with its reason; the table counts them by themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Exemption:
    """A fault that a command may leave unnoticed.

    Attributes:
        name: of the exemption.
        reason: why it is one.
    """

    name: str
    reason: str


PIXELS_WITHOUT_CHECKSUM = Exemption(
    "pixels without checksums",
    "a pack made with --no-checksum has nothing to tell changed pixels by while reading; inspect-shards --verify does",
)
DIGITS_OF_A_LOG = Exemption(
    "digits of a log",
    "a line of loss.jsonl or eval.jsonl that stays one, of its step, is a record for people; verify-run compares it",
)
MISSING_LAST_LINES = Exemption(
    "the results of a run",
    "result.json tells how a run ended and decides nothing; a resume writes it anew",
)
EXEMPTIONS = (PIXELS_WITHOUT_CHECKSUM, DIGITS_OF_A_LOG, MISSING_LAST_LINES)


def exempt_reading(changed: Iterable[str], *, has_checksums: bool) -> Exemption | None:
    """Return the exemption of a reader to which the files ``changed`` of a pack gave other pixels; None if there is none."""
    if not has_checksums and all("/pixels/c/" in key for key in changed):
        return PIXELS_WITHOUT_CHECKSUM
    return None
