"""The parts of the site that are generated from the code when it is built, so that no page copies them by hand.

Adds the directives `command-reference` (the help of every command that the project installs), `settings-reference`
(every setting of `run-train` and `TrainConfig`) and `model-reference`. Turns links between the repository's own files
into links between the pages that include them, and fails the build if a public name is not documented.
"""

import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

import loopfeed
from loopfeed.preprocess.commands.grouped_help import ALL_OPTIONS

_ROOT = Path(__file__).parents[2]
_HELP_COLUMNS = 96
_NAMES = re.compile(r"^    \w+(, \w+)+(?=: )")

# Files of the repository that a page includes, with that page.
_PAGES = {
    "SECURITY.md": "project/security.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "data/README.md": "howto/images.md",
}

logger = logging.getLogger(__name__)


def commands() -> Iterator[tuple[str, click.Command]]:
    """Yield the name and the click command of everything that pyproject.toml installs."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, place in project["scripts"].items():
        module, _, function = place.partition(":")
        yield name, getattr(importlib.import_module(module), function)


class CommandReference(SphinxDirective):
    """A section for each command, containing its help."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        return [_section(self, name, [_literal(help_text(name, command))]) for name, command in commands()]


def help_text(name: str, command: click.Command) -> str:
    """Return what `NAME --help` prints on a wide terminal."""
    with click.Context(
        command, info_name=name, terminal_width=_HELP_COLUMNS, max_content_width=_HELP_COLUMNS
    ) as context:
        context.show_default = True
        context.meta[ALL_OPTIONS] = True
        return command.get_help(context)


class SettingsReference(SphinxDirective):
    """A section for each group of settings, made of the rows of `loopfeed.engine.config.settings_table`."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        from loopfeed.engine.config import settings_table

        table = settings_table()
        coded = re.compile(
            rf"(?<![`\w-])(--[a-z][a-z0-9-]*|{'|'.join(row['name'] for row in table if '_' in row['name'])})\b"
        )
        by_group: dict[str, list[dict[str, str]]] = {}
        for row in table:
            by_group.setdefault(row["group"], []).append(row)
        return [_section(self, group, [self._list(rows, coded)]) for group, rows in by_group.items()]

    def _list(self, rows: list[dict[str, str]], coded: re.Pattern[str]) -> nodes.Node:
        found = nodes.definition_list(classes=["settings"])
        for row in rows:
            flag = row["option"].split(",")[0].split()[0]
            term = nodes.term("", "", nodes.literal(text=_option_and_unit(row)), ids=["setting" + flag[1:]])
            body = self.parse_text_to_nodes(coded.sub(r"`\1`", row["help"]))
            body += [nodes.paragraph("", "", *facts, classes=["setting-facts"]) for facts in _fact_lines(row)]
            found += nodes.definition_list_item("", term, nodes.definition("", *body))
        return found


def _option_and_unit(row: dict[str, str]) -> str:
    """Return the option as `--help` shows it; a unit that only repeats the range is left out."""
    is_range = row["unit"].startswith(tuple("0123456789"))
    return row["option"] if is_range else f"{row['option']} {row['unit']}".strip()


def _fact_lines(row: dict[str, str]) -> Iterator[list[nodes.Node]]:
    """Yield two lines: default, range and Python name; where the setting takes effect, and what a resume may do."""
    default = {"True": "on", "False": "off", "None": "none"}.get(row["default"], row["default"])
    range_label = "One of" if row["type"].startswith("choice") else "Range"
    python = f"{row['name']}: {row['type'].replace('choice', 'str')}"
    labelled = [("Default", default), (range_label, row["range"]), ("Python", python)]
    line: list[nodes.Node] = []
    for label, value in labelled:
        if value:
            line += [nodes.Text(f"{' · ' if line else ''}{label}: "), nodes.literal(text=value)]
    yield line
    stage = row["stage"].partition(":")[0]
    yield [nodes.Text(f"Takes effect: {stage} · On resume: {row['on_resume']}")]


class ModelReference(SphinxDirective):
    """A table of the models that `--model` accepts."""

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        from loopfeed.models.registry import summarise_models

        rows = [
            f"| `{each.name}` | {each.image_size} px, {each.num_classes:,} classes | {each.num_params:,} "
            f"| {each.num_products / 1e6:,.1f} | {f'`{each.timm_name}`' if each.timm_name else ''} |"
            for each in summarise_models()
        ]
        head = [
            "| name | counted for | parameters | million multiply-accumulates | in timm |",
            "|---|---|---:|---:|---|",
        ]
        return self.parse_text_to_nodes("\n".join([*head, *rows]))


def _section(directive: SphinxDirective, title: str, body: list[nodes.Node]) -> nodes.section:
    section = nodes.section("", nodes.title(text=title), *body, ids=[nodes.make_id(title)], names=[title.lower()])
    directive.state.document.note_implicit_target(section, section)
    return section


def _literal(text: str) -> nodes.Node:
    return nodes.literal_block(text, text, language="text")


def check_public_names(_app: Sphinx, environment: BuildEnvironment) -> None:
    """Warn about each public name that no page documents."""
    documented = environment.domains.python_domain.objects
    for name in loopfeed.__all__:
        if f"loopfeed.{name}" not in documented:
            logger.warning("loopfeed.%s is public but on no page of the reference: add it", name)


def join_names(_app: Sphinx, _kind: str, _name: str, _what: Any, _options: Any, lines: list[str]) -> None:
    """Join the names of "mean, std: …" in a section to "mean,std", since a field has only one name."""
    in_section = False
    for number, line in enumerate(lines):
        if line.strip() in ("Args:", "Attributes:"):
            in_section = True
        elif line and not line.startswith(" "):
            in_section = False
        elif in_section:
            lines[number] = _NAMES.sub(lambda names: names.group().replace(", ", ","), line)


def relink(_app: Sphinx, _place: Path, _page: str, content: list[str]) -> None:
    """Turn links between files of the repository, in a file that a page includes, into links between pages."""
    for file, page in _PAGES.items():
        content[0] = content[0].replace(f"]({file})", f"](/{page})")
    content[0] = content[0].replace("](docs/", "](/")


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directives and the check."""
    app.add_directive("command-reference", CommandReference)
    app.add_directive("settings-reference", SettingsReference)
    app.add_directive("model-reference", ModelReference)
    app.connect("autodoc-process-docstring", join_names, priority=400)  # before napoleon
    app.connect("include-read", relink)
    app.connect("env-check-consistency", check_public_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
