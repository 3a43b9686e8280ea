"""A copy of the logs of a stored run that is brought up to date again and again, as the run writes them.

The copy grows like the run folder itself: lines are appended, and a file is replaced only if the run went back.
"""

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from loopfeed.engine.records.run_folder import RESULT, WEIGHTS, WRITTEN_HERE
from loopfeed.engine.records.stored.mirror import UPLOAD_EVERY_S
from loopfeed.engine.records.stored.reading import check_room, naming, read_parts, read_whole
from loopfeed.engine.records.stored.state import Part, StoredState
from loopfeed.preprocess.shards.location import Location, open_location

_BLOCK_BYTES = 1 << 20
_REFRESH_EVERY_S = UPLOAD_EVERY_S / 2


@contextmanager
def followed_copy(
    url: str, storage_options: Mapping[str, str] | None = None
) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Yield the folder of a temporary copy of the logs of a stored run, and a function to call before each reading.

    Raises:
        ShardError: the store cannot be reached.
    """
    location = open_location(url, storage_options=storage_options)
    with tempfile.TemporaryDirectory(prefix="loopfeed-") as temporary:
        copy = _LogCopy(location, Path(temporary) / "run")
        with naming(copy.folder, url):
            yield copy.folder, copy.refresh


class _LogCopy:
    """Copies what a stored run itself writes, but its snapshots and weights; the folder exists once the run does."""

    def __init__(self, location: Location, folder: Path) -> None:
        self._location, self.folder = location, folder
        self._state: StoredState | None = None
        self._refreshed_s = -_REFRESH_EVERY_S

    def refresh(self) -> None:
        """Bring the copy up to date unless that was done a moment ago; raise ShardError if the store cannot be read."""
        if time.monotonic() < self._refreshed_s + _REFRESH_EVERY_S:
            return
        read_whole(self._location, self._update)
        self._refreshed_s = time.monotonic()

    def _update(self, state: StoredState) -> None:
        if state == self._state:
            return
        self.folder.mkdir(exist_ok=True)
        before = {} if self._state is None else self._state.files
        # A reader takes the result for the end of the logs.
        if RESULT not in state.files:
            (self.folder / RESULT).unlink(missing_ok=True)
        names = [name for name in WRITTEN_HERE if name in state.files and name != WEIGHTS]
        check_room(self._location, self.folder, state, [name for name in names if name not in before])
        for name in sorted(names, key=lambda name: name == RESULT):
            if state.files[name] != before.get(name):
                self._update_file(self.folder / name, before.get(name, ()), state.files[name])
        self._state = state

    def _update_file(self, path: Path, before: tuple[Part, ...], now: tuple[Part, ...]) -> None:
        num_kept = 0
        while num_kept < min(len(before), len(now)) and before[num_kept] == now[num_kept]:
            num_kept += 1
        start = sum(part.size for part in now[:num_kept])
        if before and path.suffix == ".jsonl" and _append(path, start, read_parts(self._location, now[num_kept:])):
            return
        beside = path.with_name(f".{path.name}.new")
        with beside.open("wb") as file:
            with suppress(FileNotFoundError), path.open("rb") as old:
                while block := old.read(min(_BLOCK_BYTES, start - file.tell())):
                    file.write(block)
            file.writelines(read_parts(self._location, now[num_kept:]))
        beside.replace(path)


def _append(path: Path, start: int, contents: Iterable[bytes]) -> bool:
    """Append to a log what it lacks of its content from `start` on; return False if it has something else there."""
    with path.open("r+b") as file:
        file.seek(start)
        for content in contents:
            old = file.read(len(content))
            if not content.startswith(old):
                return False
            file.write(content[len(old) :])
        return not file.read(1)
