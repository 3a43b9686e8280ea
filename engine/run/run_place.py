"""Where the folder of a run is on this machine: at the path that the settings name or, for a URL, in a copy."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.locations import storage_options_of
from loopfeed.engine.processes import this_process, wait_for_processes
from loopfeed.engine.records.stored.reading import local_copy, naming_in
from loopfeed.engine.records.stored.stored_run import StoredRun, check_url_is_free, stored_run
from loopfeed.preprocess.storage_options import is_url


@dataclass(frozen=True)
class RunPlace:
    """The place of a run.

    Attributes:
        path: the run folder on this machine, None if there is none; absolute, as the caller may change the
            working directory.
        url: the URL that the settings name, None if they name a path.
        stored: uploads the folder, None unless this process writes a stored run.
    """

    path: Path | None
    url: str | None = None
    stored: StoredRun | None = None

    def naming(self, notify: Callable[[str], None]) -> Callable[[str], None]:
        """Return a function that passes messages on, which name a stored run by its URL."""
        return notify if self.path is None or self.url is None else naming_in(notify, self.path, self.url)


@contextmanager
def open_place(config: TrainConfig, notify: Callable[[str], None], *, is_dry: bool) -> Iterator[RunPlace]:
    """Yield the place of a run; a stored run is uploaded inside the block and at its end.

    Of several processes, the first alone writes; the others read the run that is resumed.

    Args:
        config: the settings.
        notify: called with one-line messages.
        is_dry: whether the run is only read.

    Raises:
        ValueError: as `loopfeed.engine.records.stored.stored_run.stored_run`.
    """
    url = config.run_dir
    if url is None or not is_url(url):
        yield RunPlace(None if url is None else Path(url).absolute())
        return
    options = storage_options_of(config)
    if this_process().index == 0 and not is_dry:
        with stored_run(url, options, resume=config.resume, overwrite=config.overwrite, notify=notify) as stored:
            if config.resume:
                wait_for_processes("stored")
            yield RunPlace(stored.path, url, stored)
        return
    if not config.resume:
        if is_dry:
            check_url_is_free(url, options, overwrite=config.overwrite, notify=notify)
        yield RunPlace(None)
        return
    if not is_dry:
        # The first process may have a newer state to upload.
        wait_for_processes("stored")
    with local_copy(url, options) as path:
        yield RunPlace(path, url)
