"""The steps of making the page: runs are read, their weights evaluated, and the file written whole."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from loopfeed.engine.objective.losses import Loss
from loopfeed.engine.objective.metrics import Metric, PerExample
from loopfeed.engine.owners import OF_AN_EVALUATION, STORAGE, recorded_settings
from loopfeed.engine.program.train_state import TrainModel
from loopfeed.engine.records.recorded_run import RecordedRun
from loopfeed.engine.records.stored.reading import local_copy, naming_in, with_weights
from loopfeed.engine.records.whole_file import write_whole
from loopfeed.engine.report_page.absent import Absent
from loopfeed.engine.report_page.data_card import read_data_card
from loopfeed.engine.report_page.evaluated import evaluate_weights_of
from loopfeed.engine.report_page.page import page
from loopfeed.engine.report_page.run_on_page import read_run
from loopfeed.preprocess.storage_options import as_text

MOST_RUNS = 26
"""The largest number of runs on a page: each is called by a letter."""

# For a page of a megabyte with seven long runs, and of two with 26.
_MOST_POINTS, _POINTS_OF_ALL, _LEAST_POINTS = 1000, 3000, 100
_MOST_PICTURES, _PICTURES_OF_ALL, _LEAST_PICTURES = 24, 96, 6
_NOT_EVALUATED = Absent("the weights were not evaluated, as was requested (--no-evaluate)")


def report_run(
    runs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    path: str | os.PathLike[str],
    *,
    evaluate: bool = True,
    data: str | os.PathLike[str] | None = None,
    split: str | None = None,
    model: TrainModel | None = None,
    loss: Loss | None = None,
    metrics: Mapping[str, Metric | PerExample] | None = None,
    overwrite: bool = False,
    notify: Callable[[str], None] = lambda _: None,
    storage_options: Mapping[str, str] | None = None,
) -> Path:
    """Write a self-contained HTML page about one or several runs, and return its path.

    Runs may still be in progress, have failed, or lack files: the page then says what is missing and why. The weights
    of each run are evaluated if its data set is there.

    Args:
        runs: folders or URLs of runs, at most 26.
        path: the file to write.
        evaluate: whether to evaluate the weights, for confusions, the accuracy of each class and mistakes.
        data: where the data set of the runs is now; None is where each run found it.
        split: the split to evaluate on; None is the one that each run was evaluated on.
        model, loss, metrics: your own, if the runs trained with them, as for `loopfeed.evaluate`.
        overwrite: whether to replace an existing file.
        notify: called with one-line messages.
        storage_options: how to reach the store of a URL, of a run and of its data, see
            `loopfeed.preprocess.storage_options.STORAGE_OPTIONS`; no keys are sent to a server that only a record
            names.

    Raises:
        ValueError: if a folder is not that of a run, or the file exists or cannot be there.
        OSError: if the file cannot be written.
        KeyboardInterrupt: on SIGINT, SIGTERM or SIGHUP during an evaluation, if the caller is the main thread.
    """
    given = [os.fspath(each) for each in ([runs] if isinstance(runs, str | os.PathLike) else runs)]
    if not 1 <= len(given) <= MOST_RUNS:
        raise ValueError(f"runs must be 1 to {MOST_RUNS} run folders, got {len(given)}: make several pages")
    out = Path(path)
    check_out(out, overwrite=overwrite)
    own, place = {"model": model, "loss": loss, "metrics": metrics}, None if data is None else os.fspath(data)
    found_runs = []
    for index, run in enumerate(given):
        with local_copy(run, storage_options, with_weights(None)) as folder:
            say = naming_in(notify, folder, run)
            found = read_run(index, folder, run, max(_LEAST_POINTS, min(_MOST_POINTS, _POINTS_OF_ALL // len(given))))
            if isinstance(found.recorded, RecordedRun):
                recorded = _reached(found.recorded, place, storage_options, say)
                found = replace(found, card=read_data_card(recorded, place, split), weights=_NOT_EVALUATED)
                if evaluate:
                    num_pictures = max(_LEAST_PICTURES, min(_MOST_PICTURES, _PICTURES_OF_ALL // len(given)))
                    weights = evaluate_weights_of(folder, recorded, place, split, own, num_pictures, say)
                    found = replace(found, weights=weights)
            found_runs.append(found)
    write_whole(out, page(found_runs).encode())
    return out


def check_out(out: Path, *, overwrite: bool) -> None:
    """Raise ValueError if the page must not or cannot be written to a file."""
    if not out.parent.is_dir():
        raise ValueError(f"the page must be in an existing folder, but {out.parent} is none: create it")
    if out.is_dir():
        raise ValueError(f"the page must be a file, but {out} is a folder: choose another path (--out)")
    if os.path.lexists(out) and not (overwrite and out.is_file()):
        raise ValueError(
            f"the page must be a new file, but {out} exists: choose another path (--out), or replace it (--overwrite)"
        )


def _reached(
    recorded: RecordedRun, data: str | None, storage_options: Mapping[str, str] | None, notify: Callable[[str], None]
) -> RecordedRun:
    """Return the record of a run with the way to reach the store of its data; say what that replaces."""
    how = as_text(storage_options or {}) or recorded_settings(recorded.config, {"data": data})[STORAGE]
    config = replace(recorded.config, storage_options=how)
    if (line := recorded.describe_replaced(config, OF_AN_EVALUATION, (STORAGE,))) is not None:
        notify(line)
    return replace(recorded, config=config)
