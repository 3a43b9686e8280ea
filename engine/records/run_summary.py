"""What is known of a run by its folder, also while it is written, and however damaged: for tables of runs.

Reads little, whatever the length of the run. Must not know: terminals, tables, jax.
"""

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from loopfeed.engine.objective.best_metric import parse_metric
from loopfeed.engine.records.digests import SEAL, is_as_sealed
from loopfeed.engine.records.evaluation_log import EvaluationLog, best_evaluation, compared_by, value_of
from loopfeed.engine.records.folder_lock import is_locked, was_killed
from loopfeed.engine.records.limits import MOST_JSON_BYTES
from loopfeed.engine.records.loss_log import NO_ROWS, read_last_rows, read_run_end
from loopfeed.engine.records.run_folder import CONFIG, EVALUATION_LOG, LOSS_LOG, RESULT, RUNTIME
from loopfeed.engine.stream.sinks import EvaluationRecord
from loopfeed.preprocess.regular_file import read_regular
from loopfeed.preprocess.system_errors import error_text

RunState = Literal["starting", "running", "done", "stopped", "failed", "killed", "damaged", "foreign"]

SILENT_S = 600.0
"""A run whose folder is not locked and that has written nothing for so long is taken for killed."""
_SPEED_ROWS = 64
_MOST_DEPTH = 32


@dataclass(frozen=True)
class RunSummary:
    """What a run folder says; a missing number is None.

    Attributes:
        run: the path or URL of the folder.
        state: what the run does, or how it ended; "damaged" if its files cannot be read, "foreign" if `config.json` is
            not one that a run writes.
        fault: why it is damaged or foreign.
        settings: as recorded in `config.json`.
        resolved: what they resolved to, such as the model.
        step, steps: updates done, and updates of the whole run.
        loss: the last loss; None also if it is NaN or infinite.
        images_per_s: the median of the newest steps.
        best_metric: what says which evaluation is best: the recorded `keep_best`, else top1, else loss.
        best_value, best_step: this number of the best evaluation, and its step.
        last_value: this number of the newest evaluation.
        evaluation: the newest evaluation.
        started_s: when its first launch began, in seconds since the Unix epoch.
        duration_s: seconds that its launches have lasted together, compilation included.
        changed_s: when a file of the run last changed, in seconds since the Unix epoch.
        result: the content of `result.json`, empty while the run continues.
        runtime: what `runtime.json` says of the whole run: the `goodput`, and the `verdict` of the newest launch.
    """

    run: str
    state: RunState
    fault: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    resolved: dict[str, Any] = field(default_factory=dict)
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    images_per_s: float | None = None
    best_metric: str | None = None
    best_value: float | None = None
    best_step: int | None = None
    last_value: float | None = None
    evaluation: EvaluationRecord | None = None
    started_s: float | None = None
    duration_s: float | None = None
    changed_s: float | None = None
    result: dict[str, Any] = field(default_factory=dict)
    runtime: dict[str, Any] = field(default_factory=dict)

    @property
    def keep_best(self) -> str | None:
        """The recorded setting, None if it is not a metric."""
        with suppress(ValueError):
            if isinstance(found := self.settings.get("keep_best"), str):
                return parse_metric(found).text
        return None

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if self.evaluation is not None:
            with suppress(ValueError):  # metrics that no run writes are left out
                return values | {"evaluation": _plain(asdict(self.evaluation))}
            values["evaluation"] = _plain(asdict(replace(self.evaluation, metrics={})))
        return values


def is_run(folder: Path) -> bool:
    """Return whether a folder contains what a run writes, or is locked by a run that starts."""
    if any((folder / name).exists() for name in (CONFIG, LOSS_LOG)):
        return True
    with suppress(OSError):
        return is_locked(folder)
    return False


def summarise_run(folder: Path, now_s: float, name: str | None = None) -> RunSummary:
    """Read a run folder; whatever is wrong with it is said in the result, and nothing is raised.

    Args:
        folder: the folder.
        now_s: the current time, in seconds since the Unix epoch.
        name: what to call it, by default its path.
    """
    name = str(folder) if name is None else name
    changed_s = _changed_s(folder)
    try:
        return _summarise(folder, now_s, name, changed_s)
    except (OSError, ValueError) as error:
        return RunSummary(name, "damaged", fault=error_text(error), changed_s=changed_s)


def _summarise(folder: Path, now_s: float, name: str, changed_s: float | None) -> RunSummary:
    end = read_run_end(folder)
    # After the end: what a run writes before its end is then seen.
    recorded, fault = _read_config(folder)
    rows = read_last_rows(folder / LOSS_LOG, _SPEED_ROWS)
    if rows is None:
        fault, rows = fault or f"the last lines of {LOSS_LOG} are not those of a run", NO_ROWS
    evaluations = EvaluationLog(folder / EVALUATION_LOG).read()
    step = int(rows.step[-1]) if len(rows) else None
    if end is not None and step is not None and end.steps_done is not None and step > end.steps_done:
        end = None  # left over from before the run was resumed
    state: RunState = end.outcome if end is not None else _state_without_end(folder, step, changed_s, now_s)
    if fault is not None:
        is_ours = (folder / LOSS_LOG).exists() or (folder / RESULT).exists() or recorded
        state = "damaged" if is_ours else "foreign"
    settings, resolved = (_object(recorded.get(key)) for key in ("config", "resolved"))
    runtime = _read_object(folder / RUNTIME)
    steps, speeds = settings.get("steps"), sorted(each for each in rows.images_per_s.tolist() if math.isfinite(each))
    found = RunSummary(
        run=name,
        state=state,
        fault=fault,
        settings=settings,
        resolved=resolved,
        step=step if end is None or end.steps_done is None else end.steps_done,
        steps=steps if type(steps) is int else None,
        loss=float(rows.loss[-1]) if len(rows) and math.isfinite(rows.loss[-1]) else None,
        images_per_s=speeds[len(speeds) // 2] if speeds else None,
        evaluation=evaluations[-1] if evaluations else None,
        started_s=_started_s(runtime),
        duration_s=_duration_s(runtime),
        changed_s=changed_s,
        result={} if end is None else _read_object(folder / RESULT),
        runtime=_runtime_in_short(runtime),
    )
    return replace(found, **_best_of(evaluations, found.keep_best))


def _best_of(evaluations: Sequence[EvaluationRecord], keep_best: str | None) -> dict[str, Any]:
    """Return what a summary says of the best evaluation and the newest."""
    metric = compared_by(evaluations, keep_best)
    best = best_evaluation(evaluations, metric)
    if best is None:
        return {}
    last = value_of(metric, evaluations[-1])
    return {
        "best_metric": metric.text,
        "best_value": value_of(metric, best),
        "best_step": best.step,
        "last_value": None if math.isnan(last) else last,
    }


def _state_without_end(folder: Path, step: int | None, changed_s: float | None, now_s: float) -> RunState:
    if was_killed(folder):
        return "killed"
    is_recent = changed_s is not None and now_s - changed_s < SILENT_S
    if is_locked(folder) or is_recent:
        return "starting" if step is None else "running"
    return "killed"


def _read_config(folder: Path) -> tuple[dict[str, Any], str | None]:
    """Return the content of `config.json`, as far as it is one of a run, and what is wrong with it."""
    try:
        recorded = _plain(json.loads(read_regular(folder / CONFIG, max_bytes=MOST_JSON_BYTES)))
    except FileNotFoundError:
        # It is written when the program has been compiled.
        return {}, f"{CONFIG} is missing" if (folder / LOSS_LOG).exists() else None
    except (ValueError, RecursionError) as error:
        return {}, f"{CONFIG} cannot be read: {error}"
    if not isinstance(recorded, dict) or not isinstance(recorded.get("config"), dict):
        return {}, f"{CONFIG} is not that of a run"
    if SEAL in recorded and not is_as_sealed(recorded):
        return recorded, f"{CONFIG} has changed since the run wrote it"
    return recorded, None


def _runtime_in_short(recorded: dict[str, Any]) -> dict[str, Any]:
    newest = launches[-1] if (launches := _launches(recorded)) else {}
    return {"goodput": recorded.get("goodput"), "verdict": newest.get("verdict")} if recorded else {}


def _launches(runtime: dict[str, Any]) -> list[dict[str, Any]]:
    launches = runtime.get("launches")
    return list(map(_object, launches)) if isinstance(launches, list) else []


def _started_s(runtime: dict[str, Any]) -> float | None:
    started = [launch.get("started") for launch in _launches(runtime)[:1]]
    return float(started[0]) if started and isinstance(started[0], int | float) else None


def _duration_s(runtime: dict[str, Any]) -> float | None:
    """Return how long the launches have lasted; a launch that trains is written every few seconds."""
    lasted = []
    for launch in _launches(runtime):
        started, ended = launch.get("started"), launch.get("ended")
        if isinstance(started, int | float) and isinstance(ended, int | float) and ended >= started:
            lasted.append(float(ended - started))
    return math.fsum(lasted) if lasted else None


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return _object(_plain(json.loads(read_regular(path, max_bytes=MOST_JSON_BYTES))))
    except (OSError, ValueError, RecursionError):
        return {}


def _plain(value: Any, depth: int = 0) -> Any:
    """Return a JSON value with null for NaN and infinity; raise ValueError if it is nested deeper than any of a run."""
    if depth > _MOST_DEPTH:
        raise ValueError(f"it is nested more than {_MOST_DEPTH} levels deep")
    if isinstance(value, dict):
        return {name: _plain(each, depth + 1) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, depth + 1) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _changed_s(folder: Path) -> float | None:
    """Return when a file of the run last changed; when the folder did, if there is none yet."""
    files = [folder / name for name in (CONFIG, LOSS_LOG, EVALUATION_LOG, RESULT)]
    for paths in (files, [folder]):
        times = []
        for path in paths:
            with suppress(OSError):
                times.append(path.stat().st_mtime)
        if times:
            return max(times)
    return None
