"""Recipes: known ways to train, each a TOML file of settings with the accuracy to expect and where that comes from.

Owns the form of these files and the finding of them; what a recipe's settings do is `engine.config`'s. Must not import
jax, so that the commands start fast.
"""

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from engine.config import COUNTED_IN_EPOCHS, TrainConfig
from preprocess.regular_file import read_regular

_FOLDER = Path(__file__).parent
_MAX_BYTES = 1 << 20
_SUFFIX = ".toml"
_TEXTS = {
    "summary": "what is trained, in a line",
    "command": "the commands of the run, one a line",
    "expected": "the accuracy",
    "source": "where the accuracy and the settings come from",
    "hardware": "where it ran, and for how long",
}
_TABLE = "settings"
# They belong to one run, not to a way of training.
_OF_ONE_RUN = ("run_dir", "resume", "overwrite", "dump_hlo")
_SETTINGS = tuple(field.name for field in fields(TrainConfig) if field.name not in _OF_ONE_RUN)


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe as its file has it.

    Attributes:
        name: the file's, without its ending.
        summary: what is trained, in a line.
        command: the commands of the run, one a line.
        expected: the accuracy, and whether it was measured with this project.
        source: where accuracy and settings come from.
        hardware: where it ran, and for how long.
        settings: of `engine.config.TrainConfig`, those alone that the recipe names.
    """

    name: str
    summary: str
    command: str
    expected: str
    source: str
    hardware: str
    settings: dict[str, Any]


def recipe_names() -> tuple[str, ...]:
    """Gives the names of the recipes that come with the project, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob(f"*{_SUFFIX}")))


def load_recipe(name_or_path: str | os.PathLike[str]) -> LoadedRecipe:
    """Reads a recipe, by its name or from a file of the user's own.

    Args:
        name_or_path: one of `recipe_names`; or a path, which ends in .toml or has a folder in it.

    Raises:
        ValueError: for an unknown name or a file that is no recipe: a text that is missing, a key or setting that is
            unknown, a value of another kind or out of its range. The message names the file, the key and the remedy.
    """
    text = os.fspath(name_or_path)
    path = Path(text)
    if path.suffix != _SUFFIX and path.name == text:
        if text not in recipe_names():
            raise ValueError(
                f"a recipe must be one of {', '.join(recipe_names())}, or a file that ends in {_SUFFIX}; got {text!r}"
            )
        path = _FOLDER / f"{text}{_SUFFIX}"
    document = _read(path)
    for key in document:
        if key not in (*_TEXTS, _TABLE):
            raise ValueError(f"{path}: {_unknown('key', key, (*_TEXTS, _TABLE), f'move a setting below [{_TABLE}]')}")
    return LoadedRecipe(name=path.stem, **_texts(document, path), settings=_settings(document, path))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_regular(path, max_bytes=_MAX_BYTES).decode("utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: a recipe must be a file that can be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:  # of the syntax, or of the encoding
        raise ValueError(f"{path}: a recipe must be TOML in UTF-8: {error}") from error


def _texts(document: Mapping[str, Any], path: Path) -> dict[str, str]:
    texts = {}
    for key, meaning in _TEXTS.items():
        text = document.get(key)
        if not isinstance(text, str) or not text.strip():
            found = "none" if text is None else f"{text!r} of {type(text).__name__}"
            raise ValueError(f'{path}: a recipe must have the text {key}, got {found}: add {key} = "…", {meaning}')
        texts[key] = text.strip()
    return texts


def _settings(document: Mapping[str, Any], path: Path) -> dict[str, Any]:
    settings = document.get(_TABLE)
    if not isinstance(settings, dict):
        raise ValueError(
            f"{path}: a recipe must have the table {_TABLE}, got {settings!r}: add [{_TABLE}] and a setting a line"
        )
    for name in settings:
        if name in _OF_ONE_RUN:
            raise ValueError(f"{path}: {name} belongs to one run, not to a recipe: give it on the command line")
        if name not in _SETTINGS:
            raise ValueError(f"{path}: {_unknown('setting', name, _SETTINGS, 'take it out')}")
    for epochs, steps in COUNTED_IN_EPOCHS:
        if epochs in settings and steps in settings:
            raise ValueError(
                f"{path}: {epochs} and {steps} must not both be given, got {settings[epochs]} and {settings[steps]}: "
                "leave one out"
            )
    try:
        TrainConfig(**settings)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return settings


def _unknown(kind: str, name: str, known: tuple[str, ...], otherwise: str) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"a recipe has no {kind} {name!r}: {f'{near[0]} is meant?' if near else otherwise}"
