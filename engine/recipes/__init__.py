"""Recipes: TOML files of training settings; the project's recipes also document the expected accuracy and its source.

Owns the format of these files and their lookup; `loopfeed.engine.config` declares the settings. Must not import jax, so
that the commands start fast.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopfeed.engine.config import COUNTED_IN_EPOCHS, OWN_BATCHES, SETTINGS, TrainConfig, epochs_in
from loopfeed.engine.named_parts import NAMED_PARTS, OWN_FUNCTIONS, OWN_PARTS
from loopfeed.engine.owners import OF_A_RECIPE, OF_A_RECORD_AS_RECIPE, OF_A_USER, STORAGE, recorded_settings
from loopfeed.engine.settings import ConfigError, SettingError, suggest_setting
from loopfeed.models.names import MODEL_NAMES
from loopfeed.preprocess.regular_file import read_regular
from loopfeed.preprocess.shown_values import shown
from loopfeed.preprocess.suggestions import did_you_mean
from loopfeed.preprocess.system_errors import reading_remedy

if TYPE_CHECKING:
    from loopfeed.engine.records.recorded_run import RecordedRun

_FOLDER = Path(__file__).parent
# Python's reader takes quadratic time for a dotted key: 2 s for one of this size.
_MAX_BYTES = 1 << 15
_MOST_LEVELS = 8
_SUFFIX, _RECORD_SUFFIX = ".toml", ".json"
_TEXTS = {
    "summary": "what is trained, in one line",
    "command": "the commands of the run, one per line",
    "expected": "the expected accuracy",
    "expected_data": "the digest of the images with which it was measured",
    "source": "where the accuracy and the settings come from",
    "hardware": "where it ran, and for how long",
}
_TABLE = "settings"


class RecipeError(ConfigError):
    """Raised if a recipe is invalid; `faults` contains one message for each fault."""

    def __init__(self, path: str, faults: tuple[str, ...]) -> None:
        super().__init__(path, faults)
        self.path, self.faults = path, faults

    def __str__(self) -> str:
        if len(self.faults) == 1:
            return f"{self.path}: {self.faults[0]}"
        return "\n  ".join([f"{self.path}: {len(self.faults)} faults:", *self.faults])


_NEEDS_OWN_PART = "a recipe must not need user-defined {part}, but the run had some: use another run or a TOML file"


@dataclass(frozen=True)
class LoadedRecipe:
    """The content of a recipe file; descriptions that the file omits are empty strings.

    Attributes:
        name: the file name without its extension; for the record of a run, the name of the run folder.
        summary: what is trained, in one line.
        command: the commands of the run, one per line.
        expected: the expected accuracy, and whether it was measured with this project.
        expected_data: `RunData.contents_digest` of the images with which it was measured.
        source: where the accuracy and the settings come from.
        hardware: where it ran, and for how long.
        settings: the settings of `loopfeed.engine.config.TrainConfig` that the recipe contains.
        unnamed_data: a description of the data, if the recipe is the record of a run that does not say where the data
            are; else empty.
        path: the file.
        recorded: the record, if the recipe is that of a run.
    """

    name: str
    settings: dict[str, Any]
    summary: str = ""
    command: str = ""
    expected: str = ""
    expected_data: str = ""
    source: str = ""
    hardware: str = ""
    unnamed_data: str = ""
    path: str = ""
    recorded: "RecordedRun | None" = None

    @property
    def is_built_in(self) -> bool:
        """Whether the recipe comes with the project."""
        return bool(self.path) and Path(self.path).parent == _FOLDER

    def settings_below(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that count below those that the user gives, see `loopfeed.engine.owners.with_given`."""
        if self.recorded is None:
            return self.settings
        return self.settings | recorded_settings(self.recorded.config, given, (STORAGE,))


def recipe_names() -> tuple[str, ...]:
    """Return the names of the recipes that come with the project, in alphabetical order.

    Example:
        >>> "imagenet-90" in recipe_names()
        True
    """
    return tuple(sorted(path.stem for path in _FOLDER.glob(f"*{_SUFFIX}")))


def load_recipe(name_or_path: str | os.PathLike[str]) -> LoadedRecipe:
    """Load a recipe by its name or from a file.

    Args:
        name_or_path: one of `recipe_names`; or a path that ends in .toml or contains a folder; or the path of a run's
            config.json, whose settings are then used.

    Raises:
        RecipeError: the file is not a recipe: it has no table of settings, an unknown key or setting, or a value of the
            wrong type or out of range. A ValueError. The message names the file and every fault.
        ConfigError: the name is unknown.
        ValueError: a run's record cannot be read or was changed since it was written.

    Example:
        >>> settings = load_recipe("imagenet-90").settings
        >>> settings["epochs"], settings["model"]
        (90, 'resnet50')
    """
    text = os.fspath(name_or_path)
    path = Path(text)
    if path.suffix == _RECORD_SUFFIX:
        return _recorded_recipe(path)
    if path.suffix != _SUFFIX and path.name == text:
        if text not in (names := recipe_names()):
            raise ConfigError(
                f"a recipe must be one of {', '.join(names)}, or a file whose name ends in {_SUFFIX}; got {text!r}"
                f"{did_you_mean(text, names)}"
            )
        path = _FOLDER / f"{text}{_SUFFIX}"
    document = _with_epochs(_read(path))
    if faults := tuple(_faults(document)):
        raise RecipeError(str(path), faults)
    texts = {key: document[key].strip() for key in _TEXTS if key in document}
    return LoadedRecipe(name=path.stem, settings=document[_TABLE], path=str(path), **texts)


def _recorded_recipe(path: Path) -> LoadedRecipe:
    """Return the recorded settings of a run as a recipe."""
    from loopfeed.engine.records.recorded_run import read_record

    try:
        recorded = read_record(path)
    except FileNotFoundError as error:
        raise RecipeError(
            str(path), (f"a recipe must be a readable file ({error.strerror}): check the path",)
        ) from error
    if (model := recorded.resolved.get("model")) not in MODEL_NAMES:
        raise RecipeError(
            str(path),
            (f"a recipe must have a built-in model, but the run trained {model!r}: use another run or a TOML file",),
        )
    if recorded.resolved.get("data") == OWN_BATCHES:
        raise RecipeError(
            str(path),
            (_NEEDS_OWN_PART.format(part="batches"),),
        )
    if recorded.resolved.get("num_eval_batches") and recorded.resolved.get("eval_manifest_sha256", "") is None:
        raise RecipeError(
            str(path),
            (_NEEDS_OWN_PART.format(part="evaluation images"),),
        )
    for name, part in OWN_PARTS.items():
        if any(name in recorded.resolved.get(key, ()) for key in (OWN_FUNCTIONS, NAMED_PARTS)):
            raise RecipeError(str(path), (_NEEDS_OWN_PART.format(part=part.label.removeprefix("a ")),))
    if recorded.config.cycle_start_steps:
        raise RecipeError(
            str(path),
            ("a recipe must have one cycle, but the run had others appended (--append-epochs): use another run",),
        )
    settings = recorded_settings(recorded.config, {}, OF_A_RECORD_AS_RECIPE)
    unnamed_data = ""
    if settings["data"] is None:
        # The run searched for its data; the same search could find other data now.
        settings["data"] = recorded.resolved.get("data_location")
        if settings["data"] is None and recorded.manifest_digest is not None:
            unnamed_data = str(recorded.resolved.get("data"))
    return LoadedRecipe(
        path.absolute().parent.name,
        settings,
        source=str(path),
        unnamed_data=unnamed_data,
        path=str(path),
        recorded=recorded,
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(read_regular(path, max_bytes=_MAX_BYTES).decode("utf-8"))
    except OSError as error:
        raise RecipeError(
            str(path),
            (f"a recipe must be a readable file ({error.strerror}): {reading_remedy(error, 'check the path')}",),
        ) from error
    except (ValueError, RecursionError) as error:  # invalid syntax or encoding
        raise RecipeError(str(path), (f"a recipe must be TOML in UTF-8: {error}",)) from error
    if _is_deep(document):
        raise RecipeError(
            str(path),
            (
                f"a recipe must have texts and the table {_TABLE}, got tables or lists inside each other, more than "
                f"{_MOST_LEVELS} deep: remove them",
            ),
        )
    return document


def _is_deep(document: Mapping[str, Any]) -> bool:
    """Return whether tables and lists are nested deeper than any fault of a recipe can be shown."""
    found: list[Any] = [document]
    for _ in range(_MOST_LEVELS):
        found = [inner for each in found for inner in (each.values() if isinstance(each, dict) else each)]
        found = [each for each in found if isinstance(each, (dict, list))]
    return bool(found)


def _with_epochs(document: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe with each number of steps that is given in epochs, as in "0.5e", under the name for epochs."""
    if not isinstance(document.get(_TABLE), dict):
        return document
    settings = dict(document[_TABLE])
    for epochs, steps in COUNTED_IN_EPOCHS:
        if epochs not in settings and (found := epochs_in(settings.get(steps))) is not None:
            settings[epochs] = found
            del settings[steps]
    return document | {_TABLE: settings}


def _faults(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each fault in a recipe."""
    for key, value in document.items():
        if key in _TEXTS:
            if not isinstance(value, str) or not value.strip():
                got = f"{shown(value)!r} of type {type(value).__name__}"
                yield f'{key} must be a non-empty string, got {got}: {key} = "…", {_TEXTS[key]}'
        elif key != _TABLE:
            near = did_you_mean(key, (*_TEXTS, _TABLE))
            yield f"a recipe has no key {key!r}{near or f': move settings below [{_TABLE}]'}"
    settings = document.get(_TABLE)
    if isinstance(settings, dict):
        yield from _setting_faults(settings)
    else:
        yield f"a recipe must have the table {_TABLE}, got {shown(settings)!r}: add [{_TABLE}] and one setting per line"


def _setting_faults(settings: Mapping[str, Any]) -> Iterator[str]:
    sound = {}
    for name, value in settings.items():
        if name in OWN_PARTS and (name not in SETTINGS or (isinstance(value, str) and ":" in value)):
            yield f"a recipe must not name code, but has {name} = {shown(value)!r}: give --{name} on the command line"
        elif name not in SETTINGS:
            near = suggest_setting(name, map(SETTINGS.__getitem__, OF_A_RECIPE))
            yield f"a recipe has no setting {name!r}{near or ': remove it'}"
        elif name not in OF_A_RECIPE:
            whose = "the user and the machine" if name in (*OF_A_USER, STORAGE) else "a single run"
            yield f"{name} belongs to {whose}, not to a recipe: give it on the command line"
        else:
            try:
                sound[name] = SETTINGS[name].checked(value)
            except SettingError as error:
                yield str(error)
    for epochs, steps in COUNTED_IN_EPOCHS:
        if epochs in settings and steps in settings:
            got = f"{settings[epochs]} and {settings[steps]}"
            yield f"{epochs} and {steps} must not both be given, got {got}: leave one out"
    try:
        TrainConfig(**sound)
    except ConfigError as error:
        yield str(error)
