"""Reads and checks a run's `config.json`, and `result.json`, the record of how it ended.

Does not need jax, so that commands can reject a bad file quickly.
"""

import dataclasses
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loopfeed.engine.config import OWN_BATCHES, SETTINGS, TrainConfig
from loopfeed.engine.named_parts import OWN_FUNCTIONS, recorded_named_parts
from loopfeed.engine.owners import OF_A_USER, STORAGE, describe_replaced, take_recorded
from loopfeed.engine.records.control_log import CONTROL_LOG_NAME
from loopfeed.engine.records.digests import SEAL, is_as_sealed, json_digest
from loopfeed.engine.records.file_errors import describe_unreadable
from loopfeed.engine.records.folder_state import FolderState
from loopfeed.engine.records.limits import MOST_JSON_BYTES
from loopfeed.engine.records.loss_log import RunEnd
from loopfeed.engine.records.machine import MACHINE, Topology, in_one_process
from loopfeed.engine.records.run_folder import CONFIG, CONTINUED, EVALUATION_LOG, LOSS_LOG, RESULT
from loopfeed.engine.settings import Owner
from loopfeed.models.names import MODEL_NAMES
from loopfeed.preprocess.regular_file import read_regular
from loopfeed.preprocess.shown_values import shown
from loopfeed.preprocess.system_errors import error_text, reading_remedy, status_of

FILES = "files"
"""The key of `result.json` for the state of the other files at the end of the run."""
WEIGHTS_DIGEST = "weights_sha256"
"""The key under `FILES` for the digest in the metadata of `model.safetensors`; None if that file was not written."""


@dataclass(frozen=True)
class RecordedEnd:
    """The state of the run's other files, as recorded in `result.json`.

    Attributes:
        folder: the state of `config.json` and the logs; None if it was not recorded: by a run from before digests were
            written, or one that was abandoned while it may still have been writing.
        weights_digest: the digest of `model.safetensors`, None if it is not recorded.
        is_sealed: whether `result.json` contains its own digest.
        is_complete: whether the run did all its steps, or its evaluations ended it.
    """

    folder: FolderState | None
    weights_digest: str | None
    is_sealed: bool
    is_complete: bool = False


def read_result(run: Path) -> RecordedEnd | None:
    """Read and check `result.json`; return None if it does not exist.

    Raises:
        ValueError: if it cannot be read, or has changed since it was written.
    """
    path = run / RESULT
    try:
        values = json.loads(read_regular(path, max_bytes=MOST_JSON_BYTES))
        if not isinstance(values, dict):
            raise TypeError(f"it must be a JSON object, but is {type(values).__name__}")
        if SEAL not in values and FILES not in values:
            return _recorded_end(values, is_sealed=False)
        if not is_as_sealed(values):
            found, now = str(values.get(SEAL, "none"))[:12], json_digest(values)[:12]
            raise ValueError(f"its digest (sha256) was {found}, but is {now} now")
        return _recorded_end(values)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if remedy := reading_remedy(error, ""):
            raise ValueError(f"{path} cannot be read ({error_text(error)}): {remedy}") from error
        raise ValueError(
            f"{path} is not what the run wrote at its end ({error_text(error)}): restore that file, or remove it to "
            "resume from the newest snapshot"
        ) from error


def _recorded_end(values: dict[str, Any], *, is_sealed: bool = True) -> RecordedEnd:
    files, is_complete = values.get(FILES), RunEnd.of(values).outcome == "done"
    if files is None:
        return RecordedEnd(None, None, is_sealed, is_complete)
    folder = FolderState.from_json(files)
    for name in (LOSS_LOG, EVALUATION_LOG, CONTROL_LOG_NAME):
        if name not in folder.logs:
            raise KeyError(name)
    return RecordedEnd(folder, files.get(WEIGHTS_DIGEST), is_sealed, is_complete)


# What the runs of versions without a setting used, where that is not its default now.
_OF_OLDER_RUNS = {"kernels": "xla", "eval_every_steps": 0, "snapshot_every_steps": 0}

# Larger than any number of classes and any side of an image.
_MOST = 1 << 20
_SIZES = ("num_classes", "height", "width", "num_devices", "num_processes")


@dataclass(frozen=True)
class RecordedRun:
    """The content of `config.json`.

    Attributes:
        config: the settings of the last launch that may be used, see `loopfeed.engine.owners.take_recorded`; those of
            the user and of the launch have their defaults.
        resolved: the values that they resolved to.
        manifest_digest: the digest of the data's manifest; None if there is no manifest.
        origins: where each setting came from.
        versions: the versions of Python and of the packages.
        earlier: one entry per earlier launch, oldest first: `until_step`, and what differed up to it: the `settings`,
            the `topology`, the `machine`.
        digest: the digest of the file, None if it was written by a version that added none.
        continued: the digests that the file had in earlier launches, oldest first.
        replaced: the recorded values of the settings that have others in `config`, to show them.
    """

    config: TrainConfig
    resolved: dict[str, Any]
    manifest_digest: str | None
    origins: dict[str, str]
    versions: dict[str, str]
    earlier: tuple[dict[str, Any], ...]
    digest: str | None = None
    continued: tuple[str, ...] = ()
    replaced: Mapping[str, Any] = field(default_factory=dict)

    def value_of(self, name: str) -> Any:
        """Return the recorded value of a setting, to show it."""
        return self.replaced.get(name, getattr(self.config, name))

    def describe_replaced(
        self, now: TrainConfig, used: Collection[str] = (*OF_A_USER, STORAGE), options: Collection[str] = ()
    ) -> str | None:
        """Return a line about what a command does not use of the record; as `describe_replaced` does."""
        return describe_replaced(self.config, self.replaced, now, used=used, options=options)

    @property
    def seals(self) -> tuple[str, ...]:
        """All digests that the file has had so far, oldest first."""
        return self.continued if self.digest is None else (*self.continued, self.digest)

    def config_at(self, step: int) -> TrainConfig:
        """Return the settings in effect at update `step`, counted from 1."""
        config = self.config
        for launch in reversed(self.earlier):
            if step <= launch["until_step"]:
                config = dataclasses.replace(config, **launch["settings"])
        return config

    def topology_at(self, step: int) -> Topology:
        """Return the devices and processes that update `step`, counted from 1, was made on."""
        found = self.resolved
        for launch in reversed(self.earlier):
            if step <= launch["until_step"]:
                found = launch.get("topology", found)
        return Topology.from_json(found)

    @property
    def machines(self) -> tuple[dict[str, str], ...]:
        """The machines of all launches, as far as they are recorded."""
        return tuple(found for each in (*self.earlier, self.resolved) if (found := each.get(MACHINE)) is not None)

    def machine_at(self, step: int) -> dict[str, str] | None:
        """Return the machine that update `step`, counted from 1, was made on; None in older records."""
        found = self.resolved.get(MACHINE)
        for launch in reversed(self.earlier):
            if step <= launch["until_step"]:
                found = launch.get(MACHINE, found)
        return found

    def replayed_config(self, step: int) -> TrainConfig:
        """Return the settings that repeat update `step`, counted from 1, in one process on as many devices."""
        return in_one_process(self.config_at(step), self.topology_at(step))

    def replayed_configs(self, from_step: int, to_step: int | None) -> list[TrainConfig]:
        """Return the settings that repeat each launch of the updates `from_step` + 1 … `to_step`, oldest first."""
        ends = [end for end in self.changes() if from_step < end and (to_step is None or end < to_step)]
        return [self.replayed_config(step) for step in (from_step + 1, *(end + 1 for end in ends))]

    def changes(self) -> tuple[int, ...]:
        """Return the steps after which settings changed, in ascending order."""
        return tuple(sorted({launch["until_step"] for launch in self.earlier}))


def read_recorded(run: Path) -> RecordedRun:
    """Read `config.json`, and check it against its digest.

    Raises:
        ValueError: if it is missing, not a regular file, unreadable, of another form, or has changed since it was
            written. A file without a digest, of an older run, cannot be checked for changes.
    """
    try:
        return read_record(run / CONFIG)
    except FileNotFoundError:
        found = "does not exist" if status_of(run) is None else "does not"
        raise ValueError(f"a run folder must contain {CONFIG}, but {run} {found}: give the folder of a run") from None


def read_record(path: Path) -> RecordedRun:
    """Read a `config.json` from any path, and check it against its digest.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: as `read_recorded`.
    """
    try:
        values = json.loads(read_regular(path, max_bytes=MOST_JSON_BYTES))
        if not isinstance(values, dict):
            raise TypeError(f"it must be a JSON object, but is {type(values).__name__}")
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise _unreadable(path, error) from error
    _check_seal(path, values)
    try:
        for name in ("config", "resolved", "origins", "versions"):
            if not isinstance(values[name], dict):
                raise TypeError(f"{name} must be an object, but is {type(values[name]).__name__}")
        _check_resolved(values["resolved"])
        Topology.from_json(values["resolved"])
        # In older runs, labels of another form than class numbers were trusted.
        of_older_runs = _OF_OLDER_RUNS | ({"labels_are_invariant": True} if values["resolved"].get("labels") else {})
        config = TrainConfig.from_json(of_older_runs | values["config"])
        # Data of which the record does not name the place are searched for.
        is_elsewhere = config.synthetic or values["resolved"].get("data") == OWN_BATCHES
        is_known = is_elsewhere or config.data is not None or values["resolved"].get("data_location") is not None
        config, replaced = take_recorded(config, has_no_place=not is_known)
        return RecordedRun(
            config=config,
            resolved=dict(values["resolved"]),
            manifest_digest=values["manifest_sha256"],
            origins=dict(values["origins"]),
            versions=dict(values["versions"]),
            earlier=tuple(
                {**_checked_launch(e), "until_step": int(e["until_step"]), "settings": _of_run(e["settings"])}
                for e in values["earlier"]
            ),
            digest=values.get(SEAL),
            continued=tuple(map(str, values.get(CONTINUED, ()))),
            replaced=replaced,
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise _unreadable(path, error) from error


def _of_run(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of an earlier launch; raise ValueError if one is not the run's, as run-train records none."""
    if others := [name for name in values if name not in SETTINGS or SETTINGS[name].owner is not Owner.RUN]:
        raise ValueError(f"an earlier launch must differ only in settings of the run, but differs in {others[0]!r}")
    return dict(values)


def _checked_launch(launch: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(launch.get("versions", {}), dict):
        raise ValueError(
            f"the versions of an earlier launch must be an object, but are {str(launch['versions'])[:80]!r}"
        )
    if "topology" in launch:
        Topology.from_json(launch["topology"])
    if (found := launch.get(MACHINE)) is not None and not _are_texts(found):
        raise ValueError(f"the {MACHINE} of an earlier launch must be an object of texts, but is {str(found)[:80]!r}")
    return launch


def _check_resolved(resolved: Mapping[str, Any]) -> None:
    """Raise ValueError for a resolved value that no run records: it decides what is built, and how large it is."""
    sizes = f"a whole number from 1 to {_MOST:,}"
    for name, is_valid, rule in (
        *((name, lambda value: isinstance(value, str), "text") for name in ("model", "data", "data_location")),
        *((name, lambda value: type(value) is int and 1 <= value <= _MOST, sizes) for name in _SIZES),
        *((name, _is_triple, "three finite numbers") for name in ("mean", "std")),
        *((name, _are_texts, "an object of texts") for name in (MACHINE, "own_sources")),
    ):
        value = resolved.get(name)
        if (value is not None or (name == "model" and name in resolved)) and not is_valid(value):
            raise ValueError(f"resolved {name} must be {rule}, but is {str(shown(value))[:80]!r}")


def _is_triple(value: Any) -> bool:
    return (
        isinstance(value, list) and len(value) == 3 and all(type(e) in (int, float) and abs(e) < _MOST for e in value)
    )


def _are_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def _check_seal(path: Path, values: dict[str, Any]) -> None:
    """Raise ValueError if a record has changed since it was written; accept older runs' records without a digest."""
    if SEAL not in values and CONTINUED not in values:
        return
    if not is_as_sealed(values):
        found, now = str(values.get(SEAL, "none"))[:12], json_digest(values)[:12]
        raise ValueError(
            f"{path} has changed since run-train wrote it (its digest (sha256) was {found}, but is {now} now): "
            "restore the file. To change a setting, give its option to run-train --resume"
        )


def _unreadable(path: Path, error: Exception) -> ValueError:
    remedy = reading_remedy(error, "restore the file as run-train wrote it, or train the run again with --overwrite")
    return ValueError(f"{path} cannot be read ({describe_unreadable(error)}): {remedy}")


def recorded_user_parts(recorded: Mapping[str, Any]) -> tuple[str, ...]:
    """Return which parts, such as "model", were user-defined, according to what `config.json` records."""
    is_own = {"model": recorded.get("model") not in MODEL_NAMES, "batches": recorded.get("data") == OWN_BATCHES}
    own = (*(name for name, is_so in is_own.items() if is_so), *recorded.get(OWN_FUNCTIONS, {}))
    return tuple(dict.fromkeys((*own, *recorded_named_parts(recorded))))
