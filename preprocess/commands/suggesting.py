"""Click choices and commands whose error messages suggest the closest valid value or option."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from loopfeed.preprocess.suggestions import WEIGHTS_BY_NAME, did_you_mean, is_about_weights, nearest

if TYPE_CHECKING:
    # Choice is generic in the annotations of newer click versions, but not at run time in older ones.
    StringChoice = click.Choice[str]
else:
    StringChoice = click.Choice


class SuggestingChoice(StringChoice):
    """A click choice whose error message for an invalid value suggests the closest valid one."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """Return click's message, followed by a suggestion if a valid value is similar."""
        message = super().get_invalid_choice_message(value, ctx).removesuffix(".")
        return f"{message}{did_you_mean(value, map(str, self.choices)) or '.'}"


class NumberOrWord(click.IntRange):
    """A whole number in a range, or one word."""

    def __init__(self, word: str, least: int, most: int) -> None:
        super().__init__(least, most)
        self.word = word

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number or the word."""
        if isinstance(value, str) and value != self.word and not value.lstrip("+-").isdigit():
            self.fail(f"{value!r} is neither a whole number nor {self.word}.", param, ctx)
        return value if value == self.word else super().convert(value, param, ctx)


class _AsciiDigits:
    """Makes a click type of numbers refuse digits of other scripts, such as ١٢, which Python takes for 12."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number as click does."""
        kind: Any = super()
        if isinstance(value, str) and not value.isascii():
            self.fail(f"{value!r} is not a number in the digits 0 to 9.", param, ctx)  # type: ignore[attr-defined]
        return kind.convert(value, param, ctx)


def ascii_only[T: click.ParamType](kind: T) -> T:  # type: ignore[type-arg]
    """Return a click type of numbers that refuses digits of other scripts; any other type unchanged."""
    if not isinstance(kind, (click.types.IntParamType, click.types.FloatParamType)) or isinstance(kind, _AsciiDigits):
        return kind
    made: T = object.__new__(type(type(kind).__name__, (_AsciiDigits, type(kind)), {}))
    vars(made).update(vars(kind))
    return made


def refuse_nan(_context: click.Context, parameter: click.Parameter, value: float) -> float:
    """Return the number of an option, of which nan is refused."""
    if math.isnan(value):
        raise click.BadParameter("must be a number, got nan; leave it out to use the default", param=parameter)
    return value


LOG_EVERY_ELSEWHERE = ("log_interval", "log_freq", "logging_steps", "log_every_n_steps", "print_freq")
"""What other trainers call the number of steps between two lines, `--log-every`."""


class NamedElsewhere(click.Option):
    """An option with the names, in Python's spelling, that other programs have for it."""

    def __init__(self, *args: Any, also_called: tuple[str, ...] = (), **values: Any) -> None:
        super().__init__(*args, **values)
        self.also_called = also_called

    @property
    def purpose(self) -> str:
        """The first sentence of its help, because those who know another name expect another value."""
        return f" {(self.help or '').partition('. ')[0].removesuffix('.')}."


class SuggestingCommand(click.Command):
    """A click command whose error message for an unknown option suggests the closest valid one.

    The unknown option is compared with each option's spellings and its Python parameter name, which may be longer.
    Numbers are taken only in the digits 0 to 9.
    """

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__(*args, **values)
        for param in self.params:
            param.type = ascii_only(param.type)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments as click does, but if an option is unknown, suggest a similar one."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if type(error) is click.UsageError and (named := self._suggest_named(ctx)):
                raise click.UsageError(f"{error.message}: {named}", ctx=ctx) from None
            if not isinstance(error, click.NoSuchOption):
                raise
            suggestion = self._suggest_option(ctx, error.option_name)
            # Without the argument `possibilities`, no version of click adds anything to the message.
            raise click.NoSuchOption(
                error.option_name, f"No such option: {error.option_name}{'.' * bool(suggestion)}{suggestion}", ctx=ctx
            ) from None

    def _suggest_named(self, ctx: click.Context) -> str:
        """Return which option may be what was given without one, as other trainers take data sets; "" if none may."""
        has_data = any("--data" in param.opts for param in self.get_params(ctx))
        return "a data set is given with its option, as --data DIR" if has_data else ""

    def _suggest_option(self, ctx: click.Context, given: str) -> str:
        """Return what to give in the place of an unknown option, "" if nothing is near to its name without dashes."""
        if is_about_weights(given):
            return f" {WEIGHTS_BY_NAME}"
        if not given.startswith("--"):
            return ""
        spellings: dict[str, str] = {}
        elsewhere: dict[str, str] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option):
                spellings |= {(param.name or "").replace("_", "-"): param.opts[0]}
                spellings |= {each.lstrip("-"): each for each in (*param.opts, *param.secondary_opts)}
            if isinstance(param, NamedElsewhere):
                names = (each.replace("_", "-") for each in param.also_called)
                elsewhere |= dict.fromkeys(names, f"{param.opts[0]}?{param.purpose}")
        near = nearest(given.lstrip("-").replace("_", "-"), elsewhere | spellings)
        if near is None:
            return ""
        return f" Did you mean {spellings[near]}?" if near in spellings else f" Did you mean {elsewhere[near]}"
