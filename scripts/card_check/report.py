"""The report of a check: written again after each part, whole or not at all."""

from collections.abc import Iterable
from pathlib import Path

from loopfeed.engine.records.whole_file import write_whole


class Report:
    """A text file that grows by blocks; an earlier report stays in front of them.

    Raises:
        OSError: the file cannot be read or written, also from `add` and `say_pending`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._text = path.read_text(encoding="utf-8") if path.exists() else ""

    def add(self, lines: Iterable[str], *, pending: Iterable[str] = ()) -> None:
        """Append a block, print it, and write the file, which ends with the names of the parts still to come."""
        block = "\n".join(lines) + "\n"
        print(block, end="", flush=True)
        self._text += block
        names = ", ".join(pending)
        end = f"== not finished: {names}\n" if names else ""
        write_whole(self.path, (self._text + end).encode())
