"""A click command whose ``--help`` groups its options under headings."""

from __future__ import annotations

from typing import Any

import click

from loopfeed.preprocess.commands.guarded_output import GuardedCommand


class GroupedCommand(GuardedCommand):
    """A click command whose ``option_groups`` maps each heading to the names of its options in display order."""

    def __init__(self, *args: Any, option_groups: dict[str, tuple[str, ...]], **values: Any) -> None:
        super().__init__(*args, **values)
        self._option_groups = option_groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help for all options, group by group, with ungrouped options last."""
        left = {
            param.name: param.get_help_record(ctx) for param in self.get_params(ctx) if isinstance(param, click.Option)
        }
        for title, names in self._option_groups.items():
            records = [record for name in names if (record := left.pop(name)) is not None]
            with formatter.section(title):
                formatter.write_dl(records)
        others = [record for record in left.values() if record is not None]
        with formatter.section("Other"):
            formatter.write_dl(others)
