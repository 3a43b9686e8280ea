"""Where the folder of a run is on this machine: at the path that the settings name or, for a URL, in a copy."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.owners import storage_options_of
from loopfeed.engine.processes import this_process, wait_for_processes
from loopfeed.engine.records.stored.reading import local_copy, naming_in
from loopfeed.engine.records.stored.stored_run import StoredRun, check_url_is_free, stored_run
from loopfeed.engine.settings import SettingError
from loopfeed.preprocess.storage_options import is_url


def check_has_folder(config: TrainConfig, *, is_dry: bool) -> None:
    """Raise SettingError if a setting needs a run folder and none is given; snapshots need no folder in a dry run."""
    if this_process().index > 0:
        return
    needs_one = {
        "resume": config.resume,
        "snapshot_every_steps": (config.snapshot_every_steps or config.snapshot_every_epochs) and not is_dry,
        "keep_best": config.keep_best is not None and not is_dry,
        "tensorboard": config.tensorboard and not is_dry,
    }
    if config.run_dir is None and any(needs_one.values()):
        raise SettingError(
            next(name for name, is_needed in needs_one.items() if is_needed),
            "the setting {setting} needs a run folder, got none: give one with TrainConfig(run_dir=…)",
        )


def naming_run(config: TrainConfig, path: Path | None, notify: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that passes messages on, which name a run in a store by its URL."""
    url = config.run_dir
    return notify if path is None or url is None or not is_url(url) else naming_in(notify, path, url)


@contextmanager
def open_place(
    config: TrainConfig, notify: Callable[[str], None], *, is_dry: bool
) -> Iterator[tuple[Path | None, StoredRun | None]]:
    """Yield the run folder on this machine, and what uploads it to a store; None if there is none.

    The path is absolute, as the caller may change the working directory. A stored run is uploaded inside the block and
    at its end.

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
        yield None if url is None else Path(url).absolute(), None
        return
    options = storage_options_of(config)
    if this_process().index == 0 and not is_dry:
        with stored_run(url, options, resume=config.resume, overwrite=config.overwrite, notify=notify) as stored:
            if config.resume:
                wait_for_processes("stored")
            yield stored.path, stored
        return
    if not config.resume:
        if is_dry:
            check_url_is_free(url, options, overwrite=config.overwrite, notify=notify)
        yield None, None
        return
    if not is_dry:
        # The first process may have a newer state to upload.
        wait_for_processes("stored")
    with local_copy(url, options) as path:
        yield path, None
