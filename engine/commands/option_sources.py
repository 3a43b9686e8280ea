"""Where each setting of a run comes from: the defaults, a recipe or a recorded run, the command line.

Owns the precedence of these sources and the record of which one won; knows nothing of what a setting does, nor of any
command's options.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from engine.config import COUNTED_IN_EPOCHS, NO_VALUE, SETTINGS, setting_words
from engine.settings import SettingError

COMMAND_LINE = "command line"
DEFAULT = "default"
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
        SettingError: where epochs and steps are both given.
    """
    given = {
        name: value
        for name, value in context.params.items()
        if name in SETTINGS and context.get_parameter_source(name) in _GIVEN
    }
    for epochs, steps in COUNTED_IN_EPOCHS:
        if given.get(epochs) is not None and steps in given:
            told = " and ".join(f"{{{name}}} {given[name]:g}" for name in (epochs, steps))
            raise SettingError(epochs, f"{epochs} and {steps} must not both be given, got {told}: leave one out")
    return OptionSource(COMMAND_LINE, given)


def merge_options(*sources: OptionSource) -> MergedOptions:
    """Merges the settings of sources, each stronger than those before it.

    Epochs and steps are two ways of saying one thing: where a source gives one of them, an earlier source's other one
    counts no more, and where one source has both, as the record of a run does, the epochs stand and the steps are
    counted anew. Both then have the origin of the one that was given, or taken away.
    """
    settings: dict[str, Any] = {}
    origins = dict.fromkeys(SETTINGS, DEFAULT)
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
