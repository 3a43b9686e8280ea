"""Declarations of settings: default, range, help text, whose a setting is, where it takes effect, what a resume may do.

Owns the format of a declaration, the validation of values, and the errors about settings. Knows no individual setting
and no command: options, checks, reference and resume rules are derived from the declarations. Must not import jax, so
that the commands start fast.
"""

import dataclasses
import math
import numbers
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from loopfeed.preprocess.shown_values import shown
from loopfeed.preprocess.suggestions import WEIGHTS_BY_NAME, describe_nearest, did_you_mean, is_about_weights, nearest

LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127
_KEY = "setting"
_PLAIN = (int, float, str, bytes, type(None))
_WRITABLE = ("s3://", "gs://", "file://")


class TakesEffect(Enum):
    """The place where a setting takes effect; the values are the words used in the settings reference."""

    PROGRAM = "compiled into the program"
    RUNTIME = "argument of the program: changing it compiles nothing"
    HOST = "on the host only"


class Owner(Enum):
    """Whose a setting is; the values are the words used in the settings reference.

    What names a place to write to or to load programs from, an account, or a command's task must be `USER` or `LAUNCH`:
    the record of a run and a recipe may come from somebody else, and of these two nothing in them is used.
    `loopfeed.engine.owners` has the rules.
    """

    RUN = "of the run: a resume keeps it"
    DATA = "of the data: where they are read"
    USER = "of the user and the machine: each launch gives it again"
    LAUNCH = "belongs to one launch, not to the run"


class OnResume(Enum):
    """Whether a resume may change a setting; the values are the words used in the settings reference."""

    KEPT = "must not change"
    CHANGES = "may change"
    CHANGES_IF_SET = "may change, but cannot be added or removed"
    GROWS = "may change, to more than the steps already done"
    COMPUTED = "changes with the setting that it is computed from"


class Belongs(NamedTuple):
    """Whose a setting is, and whether a resume may change it."""

    owner: Owner
    on_resume: OnResume


Completion = Literal["model", "folder", "file"]
"""The kinds of values for which the shell can offer completions."""


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """The declaration of a setting, without its name, type and default.

    Attributes:
        group: its heading in `--help` and in the settings reference.
        takes_effect: where it takes effect.
        belongs: whose it is, and whether a resume may change it.
        help_text: one or two sentences for `--help`; the name of a setting in braces is replaced by its option.
        between: the smallest and largest value, None if it is not a number.
        unit: the placeholder for the value in `--help`, None to derive it from the type.
        option: its spelling on the command line, None to derive it from its name; empty if it has none.
        default_text: a description of the default, if its value is not self-explanatory; braces as in `help_text`.
        details: additional text for the reference and the docstring; braces as in `help_text`.
        completion: the kind of value for which the shell offers completions.
        in_place_of: the setting that is computed from this one if this one is given.
        set_by: the setting that this one is computed from, if it has no option of its own.
        joined_by: what joins the values of an option that may be repeated; None for an option that is given once.
        parsed_by: a class whose `of` checks and converts a value, if the type has no check of its own.
        by_stage: whether each stage of a run may have a value of its own.
        also_called: what other trainers call it, so that their users are led here.
        for_objects: what takes an object of Python in the place of a value, such as "train(config, model=…)".
    """

    group: str
    takes_effect: TakesEffect
    belongs: Belongs
    help_text: str
    between: tuple[float, float] | None = None
    unit: str | None = None
    option: tuple[str, ...] | None = None
    default_text: str | None = None
    details: str = ""
    completion: Completion | None = None
    in_place_of: str | None = None
    set_by: str | None = None
    joined_by: str | None = None
    parsed_by: type[Any] | None = None
    by_stage: bool = False
    also_called: tuple[str, ...] = ()
    for_objects: str = ""


def setting[T](
    default: T, group: str, takes_effect: TakesEffect, belongs: Belongs, help_text: str, /, **declared: Any
) -> T:
    """Return a dataclass field that declares a setting; the arguments are those of `Declaration`."""
    declaration = Declaration(group=group, takes_effect=takes_effect, belongs=belongs, help_text=help_text, **declared)
    field: Any = dataclasses.field(default=default, metadata={_KEY: declaration})
    return field


class ConfigError(ValueError):
    """Settings are invalid; the message states the rule, the invalid value and the remedy."""


class SettingError(ConfigError):
    """A setting is invalid; the message uses the Python names of settings, but `render` can use option names instead.

    Args:
        setting: the name of the invalid setting.
        template: the message. `{setting}` is replaced by the invalid setting; any other name in braces by the value of
            that name in `found` or, if there is none, by the setting of that name.
        found: the values that the message shows.

    Example:
        >>> try:
        ...     TrainConfig(batch=0)
        ... except SettingError as error:
        ...     error.setting
        'batch'
    """

    def __init__(self, setting: str, template: str, **found: Any) -> None:
        # Not the message: copying and unpickling call the constructor with these.
        super().__init__(setting, template)
        self.setting = setting
        self._found = {name: shown(value) for name, value in found.items()}

    def render(self, name_setting: Callable[[str], str]) -> str:
        """Return the message; `name_setting` maps the name of each setting to the name to show, such as its option."""
        return str(self.args[1]).format_map(_Placeholders(self._found, self.setting, name_setting))

    def __str__(self) -> str:
        return self.render(str)


class UnknownSettingError(SettingError, TypeError):
    """There is no setting with this name. The error is also a TypeError, as for any unknown keyword argument."""


class _Placeholders(dict[str, Any]):
    def __init__(self, found: Mapping[str, Any], setting: str, name_setting: Callable[[str], str]) -> None:
        super().__init__(found)
        self["setting"] = name_setting(setting)
        self._name_setting = name_setting

    def __missing__(self, name: str) -> str:
        return self._name_setting(name)


@dataclass(frozen=True, kw_only=True)
class Setting(Declaration):
    """A declared setting: its declaration together with its name, type and default.

    Attributes:
        name: its name in Python and in JSON.
        kind: bool, int, float, str, tuple for three floats, one for each channel, or the class that it is parsed by.
        is_optional: whether it may be None.
        choices: its allowed values if it is a choice among strings, else empty.
        default: its default.
    """

    name: str
    kind: type[Any]
    is_optional: bool
    choices: tuple[str, ...]
    default: Any

    @property
    def owner(self) -> Owner:
        """Whose the setting is."""
        return self.belongs.owner

    @property
    def on_resume(self) -> OnResume:
        """Whether a resume may change the setting."""
        return self.belongs.on_resume

    @property
    def options(self) -> tuple[str, ...]:
        """The setting's option and aliases on the command line; a switch is followed by a slash and its negation.

        Empty if the setting has no option.
        """
        dashed = self.name.replace("_", "-")
        usual = f"--{dashed}/--no-{dashed}" if self.kind is bool else f"--{dashed}"
        return (usual,) if self.option is None else self.option

    @property
    def kind_name(self) -> str:
        """The name of the type, for the reference."""
        return "three floats" if self.kind is tuple else self.kind.__name__

    def render_help(self, name_setting: Callable[[str], str]) -> str:
        """Return the help text, in which the name of each setting is replaced by `name_setting(name)`."""
        return self.help_text.format_map(_Placeholders({}, self.name, name_setting))

    def render_default(self, name_setting: Callable[[str], str] = str) -> str:
        """Return a description of the default, in which each setting's name is replaced by `name_setting(name)`."""
        return (self.default_text or str(self.default)).format_map(_Placeholders({}, self.name, name_setting))

    @property
    def largest(self) -> float:
        """The largest allowed value; infinity if there is no limit."""
        return math.inf if self.between is None else self.between[1]

    @property
    def range_text(self) -> str:
        """A description of the allowed values; empty if every value of the type is allowed."""
        if self.choices:
            return ", ".join(self.choices)
        if self.between is None:
            return ""
        low, high = self.between
        return f"at least {low}, finite in float32" if high == LARGEST_FLOAT32 else f"{low} … {high}"

    def checked(self, value: Any) -> Any:
        """Validate a value and return it, converted to the built-in type of the setting.

        Raises:
            SettingError: the value has the wrong type, is empty, is out of range, or is not one of the choices.
        """
        if value is None and self.is_optional:
            return None
        if self.kind is tuple:
            return self._checked_channels(value)
        if self.parsed_by is not None:
            return self.parsed_by.of(value)
        value = self._of_kind(value)
        if self.between is not None:
            low, high = self.between
            # Written so that NaN fails too.
            if not (low <= value <= high and (type(value) is int or math.isfinite(value))):
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
                near=did_you_mean(value, self.choices) or self._remedy_for_objects("one of your own"),
            )
        return value

    def _checked_channels(self, value: Any) -> tuple[float, ...]:
        """Validate the numbers of R, G and B, given as any sequence, and return them as a tuple of floats."""
        low, high = self.between or (-math.inf, math.inf)
        try:
            channels = tuple(float(each) for each in value if is_number(each, numbers.Real))
            num_given = len(value)
        except (TypeError, OverflowError):
            channels, num_given = (), 0
        if len(channels) != 3 or num_given != 3 or not all(low <= each <= high for each in channels):
            raise SettingError(
                self.name,
                "{setting} must be three numbers in {low:g} … {high:g} (R, G and B), got {value!r}",
                low=low,
                high=high,
                value=value,
            )
        return channels

    def _of_kind(self, value: Any) -> Any:
        kind: Any = self.kind
        if kind is str and isinstance(value, os.PathLike):
            value = os.fspath(value)
        accepted = {int: numbers.Integral, float: numbers.Real}.get(kind)
        if not (isinstance(value, kind) if accepted is None else is_number(value, accepted)):
            raise SettingError(
                self.name,
                "{setting} must be of type {kind}{optional}, got {value!r} of type {found}{remedy}",
                kind=kind.__name__,
                optional=" or None" if self.is_optional else "",
                value=value,
                found=type(value).__name__,
                remedy="" if isinstance(value, _PLAIN) else self._remedy_for_objects("an object"),
            )
        if kind is str and not value:
            raise SettingError(
                self.name,
                "{setting} must not be empty, got {value!r}: leave it out for its default or, on a resume, the run's",
                value=value,
            )
        try:
            return kind(value)
        except OverflowError:
            raise SettingError(self.name, "{setting} must be finite, got an integer larger than any float") from None

    def _remedy_for_objects(self, what: str) -> str:
        return self.for_objects and f": {what} goes to {self.for_objects}"


def is_number(value: object, kind: type) -> bool:
    """Return whether a value is a number of a kind, `numbers.Integral` or `numbers.Real`, of Python or NumPy.

    A Python bool is an integer too, and NumPy registers its differences of times as integers: neither is accepted.
    """
    is_time = getattr(getattr(value, "dtype", None), "kind", None) == "m"
    return isinstance(value, kind) and not isinstance(value, bool) and not is_time


def check_local_paths(**values: str | None) -> None:
    """Raise SettingError if the value of a setting is the URL of a store; pathlib would take it for a local path."""
    for name, value in values.items():
        if value is not None and "://" in value:
            raise SettingError(
                name,
                "{setting} must be a path on this machine, not the URL of a store, got {url}: choose another",
                url=value,
            )


def check_writable_location(name: str, value: str | None) -> None:
    """Raise SettingError if the value of a setting is a URL at which nothing can be written."""
    if value is not None and "://" in value and not value.startswith(_WRITABLE):
        raise SettingError(
            name,
            "{setting} must be a path or the URL of a folder in a store ({schemes}), got {url}: choose another",
            schemes=", ".join(_WRITABLE),
            url=value,
        )


def settings_of(declared: type) -> Mapping[str, Setting]:
    """Return the settings declared by a dataclass, by name, in the order of its fields."""
    kinds = get_type_hints(declared)
    return MappingProxyType(
        {field.name: _setting_of(field, kinds[field.name]) for field in dataclasses.fields(declared)}
    )


def _setting_of(field: "dataclasses.Field[Any]", kind: Any) -> Setting:
    is_choice, declared = get_origin(kind) is Literal, field.metadata[_KEY]
    kinds = () if is_choice else get_args(kind)
    return Setting(
        **vars(declared),
        name=field.name,
        kind=declared.parsed_by or (str if is_choice else get_origin(kinds[0]) or kinds[0] if kinds else kind),
        is_optional=type(None) in kinds,
        choices=get_args(kind) if is_choice else (),
        default=field.default,
    )


def table_of(settings: Mapping[str, Setting]) -> list[dict[str, str]]:
    """Return the settings reference as a table of strings: one row per setting; only range and unit can be empty."""
    return [
        {
            "name": each.name,
            "option": _describe_options(each, settings),
            "type": " | ".join(("choice" if each.choices else each.kind_name, *("None",) * each.is_optional)),
            "default": each.render_default(),
            "range": each.range_text,
            "unit": each.unit or "",
            "group": each.group,
            "help": f"{each.render_help(str)} {each.details}".strip(),
            "stage": each.takes_effect.value,
            "on_resume": (each.owner if each.owner in (Owner.USER, Owner.LAUNCH) else each.on_resume).value,
        }
        for each in settings.values()
    ]


def _describe_options(setting: Setting, settings: Mapping[str, Setting]) -> str:
    """Return the options of a setting, or how the option of another setting gives it."""
    if not setting.options and setting.in_place_of is not None:
        return f"{settings[setting.in_place_of].options[0]} Ee"
    if setting.set_by is not None:
        return f"set by {settings[setting.set_by].options[0]}"
    return ", ".join(setting.options).replace("/", " / ")


def attributes_section(settings: Mapping[str, Setting]) -> str:
    """Return the "Attributes" section of a docstring, with one line per setting."""
    # Not wrapped: wrapping takes longer than everything else here, and delays every command.
    lines = [
        f"{row['name']}: {row['help']} Default: {row['default']}. On resume: {row['on_resume']}."
        for row in table_of(settings)
    ]
    return "\n        ".join(["    Attributes:", *lines]) + "\n    "


def suggest_setting(name: str, known: Iterable[Setting]) -> str:
    """Return ": did you mean …?" with the setting that is called nearly `name`, here or elsewhere; "" if none is."""
    spellings: dict[str, str] = {}
    for each in known:
        options = (option.partition("/")[0].lstrip("-").replace("-", "_") for option in each.options)
        spellings |= dict.fromkeys((*each.also_called, *options, each.name), each.name)
    near = nearest(name, spellings)
    return "" if near is None else f": did you mean {spellings[near]}?"


def unknown_setting(name: str, known: Mapping[str, Setting], what: str) -> UnknownSettingError:
    """Return the error for an unknown setting name; `what` is the class or file that was given the name."""
    if is_about_weights(name):
        remedy = f": {WEIGHTS_BY_NAME}"
        return UnknownSettingError(name, "{what} has no setting {name!r}{remedy}", what=what, name=name, remedy=remedy)
    if near := suggest_setting(name, known.values()):
        return UnknownSettingError(name, "{what} has no setting {name!r}{near}", what=what, name=name, near=near)
    others = describe_nearest(name, known, "help(loopfeed.TrainConfig)")
    return UnknownSettingError(name, "{what} has no setting {name!r}{others}", what=what, name=name, others=others)
