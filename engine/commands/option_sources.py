"""The sources of a run's settings: the defaults, a recipe or a recorded run, the command line.

Owns the precedence of these sources and the record of which one decided each setting; knows nothing of what a setting
does, or of the options of any command.
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
    """Settings and where they were given.

    Attributes:
        name: as `config.json` and messages show it: "recipe imagenet-90", "the recorded run", "command line".
        settings: the given settings, by their names in `TrainConfig`.
    """

    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class MergedOptions:
    """The merged settings of several sources.

    Attributes:
        settings: the arguments of `TrainConfig`, without those that no source gave.
        origins: for every setting of `TrainConfig`, the name of the source that decided it, or "default".
        overrides: a text for each setting of an earlier source that a later one changed: "batch 256 → 1024".
    """

    settings: dict[str, Any]
    origins: dict[str, str]
    overrides: tuple[str, ...]


# ParamType is generic in the annotations of newer click versions, but not at run time in older ones.
class OptionalNumber(click.ParamType):  # type: ignore[type-arg]
    """A number, or the word `default` for None, which no number can express.

    Args:
        kind: the type of the number, click.INT or click.FLOAT.
    """

    def __init__(self, kind: click.types.IntParamType | click.types.FloatParamType) -> None:
        self._kind = kind
        self.name = kind.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or None for the word; fail as click's own type does."""
        return None if value == NO_VALUE else self._kind.convert(value, param, ctx)


def command_line(context: click.Context) -> OptionSource:
    """Return the settings whose options were given on the command line or by environment variables.

    Options that are not settings of `TrainConfig` are left out.

    Raises:
        SettingError: epochs and steps are both given.
    """
    given = {
        name: value
        for name, value in context.params.items()
        if name in SETTINGS and context.get_parameter_source(name) in _GIVEN
    }
    for epochs, steps in COUNTED_IN_EPOCHS:
        if given.get(epochs) is not None and steps in given:
            found = " and ".join(f"{{{name}}} {given[name]:g}" for name in (epochs, steps))
            raise SettingError(epochs, f"{epochs} and {steps} must not both be given, got {found}: leave one out")
    return OptionSource(COMMAND_LINE, given)


def merge_options(*sources: OptionSource) -> MergedOptions:
    """Merge the settings of several sources; each source overrides those before it.

    Epochs and steps express the same setting. If a source gives one of them, the other one of an earlier source is
    dropped. If a source has both, as the record of a run does, the epochs are kept and the steps are computed again.
    Both then have the origin of the one that was given or removed.
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
    """Drop the setting `old` of an earlier source, because a later source gives its counterpart `new`."""
    if (value := settings.pop(old, None)) is not None:
        overrides.append(f"{old} {setting_words(value)} → {new} {setting_words(given[new])}")
