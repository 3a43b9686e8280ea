"""How a setting is declared, once: default, range, help, where it takes effect, and whether a resume may change it.

Owns the form of a declaration, the check of a value, and the errors that carry their setting. Knows no setting by name
and no command: options, checks, reference and resume rules are derived from what is declared here. Must not import
jax, so that the commands start fast.
"""

import dataclasses
import math
import numbers
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from preprocess.suggestions import did_you_mean

LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127
_KEY = "setting"


class Stage(Enum):
    """Where a setting takes effect, in words for the reference."""

    PROGRAM = "compiled into the program"
    RUNTIME = "argument of the program: changing it compiles nothing"
    HOST = "on the host alone"


class OnResume(Enum):
    """What a resume may do with a setting, in words for the reference."""

    KEPT = "must stay as it was"
    CHANGES = "may change"
    CHANGES_IF_SET = "may change, but neither be added nor taken away"
    GROWS = "may change; the run must still have steps to make"
    PER_LAUNCH = "belongs to one launch, not to the run"


Completion = Literal["model", "folder", "file"]
"""What a shell may complete a text with."""


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """What is said of a setting where it is declared.

    Attributes:
        group: its heading in `--help` and in the reference.
        stage: where it takes effect.
        on_resume: what a resume may do with it.
        help_text: a sentence or two for `--help`; a name in braces stands for the setting of that name.
        between: least and largest value, None for what is no number.
        unit: what stands for the value in `--help`, None for what the type says.
        option: how the command line spells it where that is not its name, None where it is.
        default_words: what the default comes to where the value does not say it; braces as in `help_text`.
        details: what the reference and the docstring say besides; braces as in `help_text`.
        completion: what a shell completes a text with.
        in_place_of: the setting that this one is another way of giving.
    """

    group: str
    stage: Stage
    on_resume: OnResume
    help_text: str
    between: tuple[float, float] | None = None
    unit: str | None = None
    option: tuple[str, ...] | None = None
    default_words: str | None = None
    details: str = ""
    completion: Completion | None = None
    in_place_of: str | None = None


def setting[T](default: T, group: str, stage: Stage, on_resume: OnResume, help_text: str, /, **declared: Any) -> T:
    """Return the field of a dataclass that declares a setting; the arguments are those of `Declaration`."""
    declaration = Declaration(group=group, stage=stage, on_resume=on_resume, help_text=help_text, **declared)
    field: Any = dataclasses.field(default=default, metadata={_KEY: declaration})
    return field


class ConfigError(ValueError):
    """Settings that are refused, with the rule, the value found and the remedy."""


class SettingError(ConfigError):
    """A setting that is refused; the message names settings as Python does, `words` as whoever reads it does.

    Args:
        setting: the name of the setting that is at fault.
        template: the message. `{setting}` stands for the setting at fault, another name in braces for what was found
            under that name, or else for the setting of that name.
        found: what the message tells of.
    """

    def __init__(self, setting: str, template: str, **found: Any) -> None:
        # Not the message: a copy, and one that another process made, is built from these.
        super().__init__(setting, template)
        self.setting = setting
        self._found = found

    def words(self, name_setting: Callable[[str], str]) -> str:
        """Return the message, each setting named as `name_setting` gives it."""
        return str(self.args[1]).format_map(_Words(self._found, self.setting, name_setting))

    def __str__(self) -> str:
        return self.words(str)


class UnknownSettingError(SettingError, TypeError):
    """A name that no setting has; a TypeError too, as it is where it was given as an argument."""


class _Words(dict[str, Any]):
    def __init__(self, found: Mapping[str, Any], setting: str, name_setting: Callable[[str], str]) -> None:
        super().__init__(found)
        self["setting"] = name_setting(setting)
        self._name_setting = name_setting

    def __missing__(self, name: str) -> str:
        return self._name_setting(name)


@dataclass(frozen=True, kw_only=True)
class Setting(Declaration):
    """A declared setting, with what its field says of it.

    Attributes:
        name: in Python and in JSON.
        kind: bool, int, float or str.
        is_optional: whether it may be None.
        choices: the words that it may be, empty where it is no choice.
        default: its default.
    """

    name: str
    kind: type[bool] | type[int] | type[float] | type[str]
    is_optional: bool
    choices: tuple[str, ...]
    default: Any

    @property
    def options(self) -> tuple[str, ...]:
        """How the command line spells it, the usual spelling first; a switch with its negation behind a slash."""
        dashed = self.name.replace("_", "-")
        usual = f"--{dashed}/--no-{dashed}" if self.kind is bool else f"--{dashed}"
        return self.option or (usual,)

    def help_words(self, name_setting: Callable[[str], str]) -> str:
        """Return the help, each setting named as `name_setting` gives it."""
        return self.help_text.format_map(_Words({}, self.name, name_setting))

    def default_as_words(self, name_setting: Callable[[str], str] = str) -> str:
        """Return what the default is or comes to, each setting named as `name_setting` gives it."""
        return (self.default_words or str(self.default)).format_map(_Words({}, self.name, name_setting))

    @property
    def range_words(self) -> str:
        """The values that it takes, in words; empty where every value of its type is taken."""
        if self.choices:
            return ", ".join(self.choices)
        if self.between is None:
            return ""
        low, high = self.between
        return f"at least {low}, finite in float32" if high == LARGEST_FLOAT32 else f"{low} … {high}"

    def checked(self, value: Any) -> Any:
        """Return a value as its declared kind, in Python's own types.

        Raises:
            SettingError: where it is of another kind, an empty text, out of its range, or none of the choices.
        """
        if value is None and self.is_optional:
            return None
        value = self._of_kind(value)
        if self.between is not None:
            low, high = self.between
            # Written so that NaN fails too.
            if not (low <= value <= high and math.isfinite(value)):
                rule = "be at least {low} and finite in float32" if high == LARGEST_FLOAT32 else "lie in {low} … {high}"
                raise SettingError(
                    self.name, f"{{setting}} must {rule}, got {{value}}", low=low, high=high, value=value
                )
        if self.choices and value not in self.choices:
            raise SettingError(
                self.name,
                "{setting} must be one of {choices}, got {value!r}{near}",
                choices=", ".join(self.choices),
                value=value,
                near=did_you_mean(value, self.choices),
            )
        return value

    def _of_kind(self, value: Any) -> Any:
        kind: Any = self.kind
        if kind is str and isinstance(value, os.PathLike):
            value = os.fspath(value)
        # NumPy registers its integers and floats as these; a bool of Python's is an integer too, never meant as one.
        taken = {bool: bool, int: numbers.Integral, float: numbers.Real, str: str}[kind]
        if not isinstance(value, taken) or (isinstance(value, bool) and kind is not bool):
            raise SettingError(
                self.name,
                "{setting} must be of type {kind}{optional}, got {value!r} of {found}",
                kind=kind.__name__,
                optional=" or None" if self.is_optional else "",
                value=value,
                found=type(value).__name__,
            )
        if kind is str and not value:
            raise SettingError(
                self.name, "{setting} must not be empty, got {value!r}: leave it out to take its default", value=value
            )
        try:
            return kind(value)
        except OverflowError:
            raise SettingError(self.name, "{setting} must be finite, got an integer beyond every float") from None


def settings_of(declared: type) -> Mapping[str, Setting]:
    """Return the settings that a dataclass declares, by their names, in their order."""
    kinds = get_type_hints(declared)
    return MappingProxyType(
        {field.name: _setting_of(field, kinds[field.name]) for field in dataclasses.fields(declared)}
    )


def _setting_of(field: "dataclasses.Field[Any]", kind: Any) -> Setting:
    is_choice = get_origin(kind) is Literal
    kinds = () if is_choice else get_args(kind)
    return Setting(
        **vars(field.metadata[_KEY]),
        name=field.name,
        kind=str if is_choice else kinds[0] if kinds else kind,
        is_optional=type(None) in kinds,
        choices=get_args(kind) if is_choice else (),
        default=field.default,
    )


def table_of(settings: Mapping[str, Setting]) -> list[dict[str, str]]:
    """Return what a reference says of each setting: a row a setting, all in words, nothing empty but range and unit."""
    return [
        {
            "name": each.name,
            "option": ", ".join(each.options).replace("/", " / "),
            "type": " | ".join(("choice" if each.choices else each.kind.__name__, *("None",) * each.is_optional)),
            "default": each.default_as_words(),
            "range": each.range_words,
            "unit": each.unit or "",
            "group": each.group,
            "help": f"{each.help_words(str)} {each.details}".strip(),
            "stage": each.stage.value,
            "on_resume": each.on_resume.value,
        }
        for each in settings.values()
    ]


def attributes_section(settings: Mapping[str, Setting]) -> str:
    """Return the section of a docstring that describes the settings."""
    # Not wrapped: that takes longer than all else that is done here, and every command waits for it.
    lines = [
        f"{row['name']}: {row['help']} Default: {row['default']}. On resume: {row['on_resume']}."
        for row in table_of(settings)
    ]
    return "\n        ".join(["    Attributes:", *lines]) + "\n    "


def unknown_setting(name: str, known: Mapping[str, Setting], what: str) -> UnknownSettingError:
    """Return the error about a name that no setting has; `what` was to have it."""
    if near := did_you_mean(name, known):
        return UnknownSettingError(name, "{what} has no setting {name!r}{near}", what=what, name=name, near=near)
    return UnknownSettingError(
        name, "a setting must be one of {known}; got {name!r}", known=", ".join(known), name=name
    )
