"""The sources of the settings of a run: defaults, a recipe or a recorded run, and the command line.

Owns the precedence of these sources, and records which one decided each setting. Must not know what a setting does, or
the options of any command.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from loopfeed.engine.config import COUNTED_IN_EPOCHS, NO_VALUE, SETTINGS, describe_value, epochs_in
from loopfeed.engine.settings import SettingError

COMMAND_LINE = "command line"
DEFAULT = "default"
_GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)


class OptionSource(NamedTuple):
    """The settings from one source, and the name of the source.

    Attributes:
        name: the source as shown in `config.json` and in messages: "recipe imagenet-90", "the recorded run" or
            "command line".
        settings: the given settings, by their names in `TrainConfig`.
    """

    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class MergedOptions:
    """Settings merged from several sources.

    Attributes:
        settings: the arguments of `TrainConfig` that were given by a source.
        origins: for every setting of `TrainConfig`, the name of the source that decided it, or "default".
        overrides: a description of each setting that a later source changed: "batch 256 → 1024".
    """

    settings: dict[str, Any]
    origins: dict[str, str]
    overrides: tuple[str, ...]


# ParamType is generic in the annotations of newer click versions, but not at run time in older ones.
class OptionalNumber(click.ParamType):  # type: ignore[type-arg]
    """A click type for a number or the word `default`, which stands for None.

    Args:
        kind: the type of the number, click.INT or click.FLOAT.
    """

    def __init__(self, kind: click.types.IntParamType | click.types.FloatParamType) -> None:
        self._kind = kind
        self.name = kind.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or None for the word `default`; reject other values as click rejects invalid numbers."""
        return None if value == NO_VALUE else self._kind.convert(value, param, ctx)


class CountedSteps(click.ParamType):  # type: ignore[type-arg]
    """A click type for a number of steps, or of epochs as in 0.5e, which stays text.

    Args:
        kind: the type of a value that is not in epochs.
    """

    def __init__(self, kind: click.ParamType) -> None:  # type: ignore[type-arg]
        self._kind = kind
        self.name = kind.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or the text if it is in epochs; reject others as click rejects invalid numbers."""
        if epochs_in(value) is not None:
            return value
        try:
            return self._kind.convert(value, param, ctx)
        except click.BadParameter as error:
            self.fail(f"{error.message.rstrip('.')}, nor a number of epochs such as 1e or 0.5e.", param, ctx)


def command_line(context: click.Context) -> OptionSource:
    """Return the settings that were given as options on the command line or as environment variables.

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
            found = " and ".join(f"{{{name}}} {describe_value(given[name])}" for name in (epochs, steps))
            raise SettingError(epochs, f"{epochs} and {steps} must not both be given, got {found}: leave one out")
        if (in_epochs := epochs_in(given.get(steps))) is not None:
            given[epochs] = in_epochs
            del given[steps]
    return OptionSource(COMMAND_LINE, given)


def merge_options(*sources: OptionSource) -> MergedOptions:
    """Merge the settings of several sources; each source overrides those before it.

    Epochs and steps are two units for the same setting. If a source gives one of them, the other is dropped from
    earlier sources. If a source has both, as the record of a run does, the epochs are kept and the steps are computed
    again. Both then have the origin of the one that was given or removed.
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
                overrides.append(f"{name} {describe_value(settings[name])} → {describe_value(value)}")
            settings[name] = value
            origins[name] = source.name
    return MergedOptions(settings, origins, tuple(overrides))


def _displace(settings: dict[str, Any], old: str, new: str, given: Mapping[str, Any], overrides: list[str]) -> None:
    """Drop the setting `old`, given by an earlier source, because a later source gives its counterpart `new`."""
    if (value := settings.pop(old, None)) is not None:
        overrides.append(f"{old} {describe_value(value)} → {new} {describe_value(given[new])}")
