"""`loopfeed`, or `python -m loopfeed`: names the commands, with a line each."""

import sys
from importlib.metadata import PackageNotFoundError, distribution

import click

from loopfeed.preprocess.commands.guarded_output import GuardedCommand


@click.command(cls=GuardedCommand)
def main() -> None:
    """Name the commands of Loopfeed, with a line each; `COMMAND --help` explains one."""
    try:
        places = distribution("loopfeed").entry_points.select(group="console_scripts")
    except PackageNotFoundError:
        sys.exit("loopfeed: its commands are not installed; in a clone of the repository: pip install .")
    commands = {place.name: place.load() for place in places if place.name != "loopfeed"}
    width = max(map(len, commands))
    for name, command in commands.items():
        click.echo(f"{name:{width}}  {command.get_short_help_str(limit=200)}")
    click.echo("COMMAND --help explains one.")


if __name__ == "__main__":
    main(prog_name="loopfeed")
