"""A click command whose ``--help`` groups its options under headings, or shows those that most people use."""

from __future__ import annotations

from typing import Any

import click

from loopfeed.preprocess.commands.guarded_output import GuardedCommand

ALL_OPTIONS = "loopfeed.all_options"
"""The key of `click.Context.meta` that makes the help of a command show all of its options."""

_CONTEXT_SETTINGS = {"max_content_width": 110, "show_default": True}


class GroupedCommand(GuardedCommand):
    """A click command whose ``option_groups`` maps each heading to the names of its options in display order.

    It has the option ``--traceback`` if a group has. With ``first_options``, names of parameters, ``--help`` shows only
    these, and ``--help-all`` shows all.
    """

    def __init__(
        self,
        *args: Any,
        option_groups: dict[str, tuple[str, ...]],
        first_options: tuple[str, ...] = (),
        **values: Any,
    ) -> None:
        super().__init__(*args, context_settings=_CONTEXT_SETTINGS, **values)
        self._option_groups, self._first_options = option_groups, first_options
        if any("traceback" in names for names in option_groups.values()):
            click.option("--traceback", is_flag=True, help="Show the full traceback of an error.")(self)
        if first_options:
            self.params.append(
                click.Option(
                    ["--help-all"],
                    is_flag=True,
                    is_eager=True,
                    expose_value=False,
                    callback=_show_all,
                    help="Show all options, in groups, and exit.",
                )
            )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help for all options, group by group, with ungrouped options last, or for the first options."""
        left = {
            param.name: param.get_help_record(ctx) for param in self.get_params(ctx) if isinstance(param, click.Option)
        }
        groups = self._option_groups
        if self._first_options and not ctx.meta.get(ALL_OPTIONS):
            groups = {f"Options used most, of {len(left)}": self._first_options}
            hidden = {name for names in self._option_groups.values() for name in names} - {*self._first_options}
            left = {name: record for name, record in left.items() if name not in hidden}
        for title, names in groups.items():
            records = [record for name in names if (record := left.pop(name)) is not None]
            with formatter.section(title):
                formatter.write_dl(records)
        others = [record for record in left.values() if record is not None]
        with formatter.section("Other"):
            formatter.write_dl(others)


def _show_all(context: click.Context, _parameter: click.Parameter, is_wanted: bool) -> None:
    """Print the help for all options and exit if the option is given."""
    if is_wanted and not context.resilient_parsing:
        context.meta[ALL_OPTIONS] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()
