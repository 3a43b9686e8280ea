"""Shell completion for command-line arguments: folders, files and names.

Each function is the `shell_complete` of an option or an argument; click calls it with the text typed so far. The
functions import click's completion classes only when called, because importing them at the top would delay every
command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

type Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def complete_folder(_context: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Ask the shell to complete the path of a folder."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="dir")]


def complete_file(_context: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Ask the shell to complete the path of a file."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def complete_word(known: Callable[[], Iterable[str]], *, or_file: bool = False) -> Complete:
    """Return a completion function that offers the strings returned by ``known``.

    Args:
        known: returns the valid words.
        or_file: whether the shell completes the path of a file if no word begins with the typed text.
    """

    def complete(context: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        found = [CompletionItem(word) for word in known() if word.startswith(incomplete)]
        return found or (complete_file(context, param, incomplete) if or_file else [])

    return complete
