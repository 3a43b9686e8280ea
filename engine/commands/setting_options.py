"""Click options for settings, derived entirely from their declarations in `loopfeed.engine.config`.

Knows no individual setting; each command chooses its options.
"""

from collections.abc import Callable, Mapping
from typing import Any

import click

from loopfeed.engine.commands.option_sources import CountedSteps, OptionalNumber
from loopfeed.engine.config import COUNTED_IN_EPOCHS, SETTINGS
from loopfeed.engine.named_parts import NAME_FORM, OWN_PARTS
from loopfeed.engine.recipes.stages_file import read_stages
from loopfeed.engine.settings import Setting, SettingError
from loopfeed.engine.stages import Stages
from loopfeed.models.names import MODEL_NAMES
from loopfeed.preprocess.commands.completion import Complete, complete_file, complete_folder, complete_word
from loopfeed.preprocess.commands.suggesting import NamedElsewhere, SuggestingChoice, ascii_only

type Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_NUMBERS: Mapping[type, click.types.IntParamType | click.types.FloatParamType] = {
    int: ascii_only(click.INT),
    float: ascii_only(click.FLOAT),
}
_COMPLETE: Mapping[str | None, Complete] = {
    "model": complete_word(lambda: ("auto", *MODEL_NAMES)),
    "folder": complete_folder,
    "file": complete_file,
}


def option_spelling(name: str) -> str:
    """Return the `run-train` option for a setting (for a switch, without its negation), or any other name unchanged."""
    if name not in SETTINGS:
        return name
    if not SETTINGS[name].options:
        return option_spelling(SETTINGS[name].in_place_of or SETTINGS[name].set_by or "")
    return SETTINGS[name].options[0].partition("/")[0]


def option_names(context: click.Context) -> Callable[[str], str]:
    """Return a function that maps setting names to the options of the context's command and leaves others unchanged."""
    options = {param.name: param.opts[0] for param in context.command.params if isinstance(param, click.Option)}
    options |= {
        epochs: options[steps] for epochs, steps in COUNTED_IN_EPOCHS if epochs not in options and steps in options
    }
    return lambda name: options.get(name, name)


def setting_option(name: str) -> Decorator:
    """Return a decorator that adds the option for a setting to a command."""
    setting = SETTINGS[name]
    if setting.kind is bool:
        values: dict[str, Any] = {"default": setting.default, "is_flag": True}
    else:
        values = {
            "type": _click_type(setting),
            "default": setting.default,
            "metavar": _metavar(setting),
            "shell_complete": _COMPLETE.get(setting.completion),
        }
    if setting.kind is tuple:
        values |= {"type": _NUMBERS[float], "nargs": 3}
    if setting.joined_by is not None:
        values |= {"multiple": True, "callback": _joining(setting.joined_by)}
    if setting.default_text is not None:
        values["show_default"] = setting.render_default(option_spelling)
    return click.option(
        *setting.options, name, cls=NamedElsewhere, also_called=setting.also_called,
        help=setting.render_help(option_spelling), **values,
    )  # fmt: skip


def overriding_option(
    name: str, *spellings: str, default_text: str, help_text: str | None = None, unit: str | None = None
) -> Decorator:
    """Return a decorator that adds an option to override a recorded setting; the option's default is None.

    Args:
        name: the name of the setting.
        spellings: the option and its aliases, if they differ from those declared for the setting.
        default_text: a description of the value that is used if the option is not given.
        help_text, unit: replacements for those declared for the setting, if those do not fit the command.
    """
    setting = SETTINGS[name]
    values: dict[str, Any] = {"default": None, "show_default": default_text}
    if setting.kind is not bool:
        values |= {
            "type": SuggestingChoice(setting.choices) if setting.choices else _NUMBERS.get(setting.kind, click.STRING),
            "metavar": unit or _metavar(setting),
            "shell_complete": _COMPLETE.get(setting.completion),
        }
    if setting.joined_by is not None:
        values |= {"multiple": True, "callback": _joining(setting.joined_by)}
    return click.option(
        *(spellings or setting.options), name, help=help_text or setting.render_help(option_spelling), **values
    )


def _joining(separator: str) -> Callable[[click.Context, click.Parameter, tuple[str, ...]], str | None]:
    """Return a click callback that joins the values of a repeated option; none, or '', are None."""
    return lambda _context, _parameter, values: separator.join(values) or None


class _ChoiceOrUserPart(SuggestingChoice):
    """A choice that lets the name of a part of the user's own pass, such as "package.module:function"."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the name of an own part unchanged; treat other values as a choice."""
        return value if isinstance(value, str) and ":" in value else super().convert(value, param, ctx)

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """Return the message of a choice, with the form of an own part if no choice is near."""
        message = super().get_invalid_choice_message(value, ctx)
        return f"{message[:-1]}: one of your own is named as {NAME_FORM}." if message.endswith(".") else message


class _StagesFile(click.types.StringParamType):
    """The path of a file of stages, which is read at once."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the stages in the file."""
        if isinstance(value, Stages):
            return value
        try:
            return read_stages(value)
        except SettingError as error:
            self.fail(error.render(lambda _: "stages"), param, ctx)


def _click_type(setting: Setting) -> Any:
    if setting.kind is Stages:
        return _StagesFile()
    if setting.choices:
        return (_ChoiceOrUserPart if setting.name in OWN_PARTS else SuggestingChoice)(setting.choices)
    number = _NUMBERS.get(setting.kind)
    if number is None:
        return click.STRING
    kind = OptionalNumber(number) if setting.is_optional else number
    return CountedSteps(kind) if _is_counted(setting) else kind


def _is_counted(setting: Setting) -> bool:
    return any(setting.name == steps for _, steps in COUNTED_IN_EPOCHS)


def _metavar(setting: Setting) -> str | None:
    if _is_counted(setting):
        return f"{setting.unit}|Ee"
    if setting.unit is None and setting.between is not None:
        low, high = setting.between
        return f"{low:g}…{high:g}"
    return setting.unit
