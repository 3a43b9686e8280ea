"""The option `--storage-option` of commands that read or write a pack or a run, and the opening of a given pack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from loopfeed.preprocess.storage_options import STORAGE_OPTIONS, check_applicable

if TYPE_CHECKING:
    from loopfeed.preprocess.shards.location import Location

storage_option = click.option(
    "--storage-option",
    multiple=True,
    metavar="KEY=VALUE",
    show_default="$AWS_ENDPOINT_URL, $AWS_REGION",
    help=f"How to reach an object store: {', '.join(STORAGE_OPTIONS)}. Repeat the option to give several.",
)
"""The decorator that adds the option to a command."""


def open_given(data: str, options: Mapping[str, str]) -> Location:
    """Open a location given on the command line; options for a local folder are an error.

    Raises:
        ShardError, StorageOptionError: as `loopfeed.preprocess.shards.location.open_location`.
    """
    from loopfeed.preprocess.shards.location import open_location

    if "://" not in data or data.startswith("file://"):
        check_applicable(options, "", data)
    return open_location(data, storage_options=options)
