"""Where each setting of a run comes from: the defaults, a recipe or a recorded run, the command line.

Owns the precedence of these sources and the record of which one won; knows nothing of what a setting does, nor of any
command's options.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from engine.config import COUNTED_IN_EPOCHS, NO_VALUE, TrainConfig, setting_words

COMMAND_LINE = "command line"
DEFAULT = "default"
_NAMES = tuple(field.name for field in fields(TrainConfig))
_IN_A_FILE = re.compile(r".*\.toml: ")
_GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)


class OptionSource(NamedTuple):
    """Settings and who gave them.

    Attributes:
        name: as `config.json` and messages have it: "recipe imagenet-90", "the recorded run", "command line".
        settings: those that were given, by the names of `TrainConfig`.
    """

    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class MergedOptions:
    """What several sources come to.

    Attributes:
        settings: for `TrainConfig`; those that nobody gave are left out.
        origins: for every setting of `TrainConfig`, the name of the source that decided on it, or "default".
        overrides: in words, each setting of an earlier source that a later one changed: "batch 256 → 1024".
    """

    settings: dict[str, Any]
    origins: dict[str, str]
    overrides: tuple[str, ...]


# Generic for a type checker in newer clicks, in no way at run time in older ones.
class OptionalNumber(click.ParamType):  # type: ignore[type-arg]
    """A number, or the word `default`: the value that stands without any recipe, which no number may express.

    Args:
        kind: of the number, click.INT or click.FLOAT.
    """

    def __init__(self, kind: click.types.IntParamType | click.types.FloatParamType) -> None:
        self._kind = kind
        self.name = kind.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Gives the number, None for the word; fails as click's own type does."""
        return None if value == NO_VALUE else self._kind.convert(value, param, ctx)


def command_line(context: click.Context) -> OptionSource:
    """Gives the settings whose options were given on a command line or by its environment variables.

    Options that are no setting of `TrainConfig` are left out.

    Raises:
        ValueError: where epochs and steps are both given.
    """
    given = {
        name: value
        for name, value in context.params.items()
        if name in _NAMES and context.get_parameter_source(name) in _GIVEN
    }
    for epochs, steps in COUNTED_IN_EPOCHS:
        if given.get(epochs) is not None and steps in given:
            options = [f"--{name.replace('_', '-')} {given[name]:g}" for name in (epochs, steps)]
            raise ValueError(f"{epochs} and {steps} must not both be given, got {' and '.join(options)}: leave one out")
    return OptionSource(COMMAND_LINE, given)


def with_option_names(text: str, context: click.Context) -> str:
    """Gives a message in the words of a command line: `chunk_batches must …` becomes `--chunk must …`.

    A name of one word is one of a setting where the message begins with it; elsewhere it is English. What was given to
    the command, such as a path, stays as it is, and so does what a recipe's file is told of its own settings.
    """
    if _IN_A_FILE.match(text):
        return text
    options = {option.name: option.opts[0] for option in context.command.params if isinstance(option, click.Option)}
    names = "|".join(name for name in _NAMES if name in options and "_" in name)
    words = "|".join(name for name in _NAMES if name in options and "_" not in name)
    # Neither a part of a path or another name nor an argument in Python.
    pattern = re.compile(rf"(?<![\w/.'-])(?:{names})(?![\w/'=-]|\.\w)|^(?:{words})(?= must )")
    values = (value for value in context.params.values() if isinstance(value, str))
    given = "|".join(re.escape(value) for value in values if any(name in value for name in _NAMES if "_" in name))
    pieces = re.split(f"({given})", text) if given else [text]
    # Split by what was given, every second piece is that.
    pieces[::2] = [pattern.sub(lambda found: options[found[0]], piece) for piece in pieces[::2]]
    return "".join(pieces)


def merge_options(*sources: OptionSource) -> MergedOptions:
    """Merges the settings of sources, each stronger than those before it.

    Epochs and steps are two ways of saying one thing: where a source gives one of them, an earlier source's other one
    counts no more, and where one source has both, as the record of a run does, the epochs stand and the steps are
    counted anew. Both then have the origin of the one that was given, or taken away.
    """
    settings: dict[str, Any] = {}
    origins = dict.fromkeys(_NAMES, DEFAULT)
    overrides: list[str] = []
    for source in sources:
        given = dict(source.settings)
        for epochs, steps in COUNTED_IN_EPOCHS:
            if given.get(epochs) is not None:
                given.pop(steps, None)
                _displace(settings, steps, epochs, given, overrides)
                origins[steps] = source.name
            elif steps in given:
                given.pop(epochs, None)
                _displace(settings, epochs, steps, given, overrides)
                origins[epochs] = source.name
            elif epochs in given and settings.get(epochs) is not None:
                origins[steps] = source.name
        for name, value in given.items():
            if name in settings and settings[name] != value:
                overrides.append(f"{name} {setting_words(settings[name])} → {setting_words(value)}")
            settings[name] = value
            origins[name] = source.name
    return MergedOptions(settings, origins, tuple(overrides))


def _displace(settings: dict[str, Any], old: str, new: str, given: Mapping[str, Any], overrides: list[str]) -> None:
    """Takes away the one of a pair that an earlier source gave, where a later one gives the other."""
    if (value := settings.pop(old, None)) is not None:
        overrides.append(f"{old} {setting_words(value)} → {new} {setting_words(given[new])}")
