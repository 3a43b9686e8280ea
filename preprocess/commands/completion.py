"""What a shell completes the arguments of the commands with: folders, files, names.

Each function is an option's or an argument's `shell_complete`; click calls it with what was typed so far. Its classes
are imported there, so that a command that runs does not wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

type Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def complete_folder(_context: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Have the shell complete a folder's path."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="dir")]


def complete_file(_context: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Have the shell complete a file's path."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def complete_word(known: Callable[[], Iterable[str]], *, or_file: bool = False) -> Complete:
    """Return what completes one of the known words.

    Args:
        known: gives the words.
        or_file: whether a file is meant, and left to the shell, where no word begins with what was typed.
    """

    def complete(context: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        found = [CompletionItem(word) for word in known() if word.startswith(incomplete)]
        return found or (complete_file(context, param, incomplete) if or_file else [])

    return complete
