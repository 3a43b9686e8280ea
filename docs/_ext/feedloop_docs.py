"""What the site derives from the code while it is built, so that no page copies it by hand.

Adds the directives `command-reference` (the help of every command that the project installs), `settings-reference`
(every setting of `run-train` and of `TrainConfig`) and `model-reference`. Leads links between the repository's own
files to the pages that include these, and has the build fail where a public name is documented nowhere.
"""

import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

_ROOT = Path(__file__).parents[2]
_PUBLIC = ("engine", "models", "preprocess")
_HELP_COLUMNS = 96
_FOR_LARGE_IMAGES = {"resnet18", "resnet34", "resnet50", "resnet101", "resnet152"}
_OPTION = re.compile(r"(?<![`\w-])(--[a-z][a-z0-9-]*)")
_NAMES = re.compile(r"^    \w+(, \w+)+(?=: )")

# The repository's own files that pages include, and these pages.
_PAGES = {
    "SECURITY.md": "project/security.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "data/README.md": "howto/images.md",
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setting:
    """One setting as its declaration has it.

    Attributes:
        group: under which `--help` shows it.
        flags: of the command line, `--chunk BATCHES`.
        name: the field of `TrainConfig`; None where only the command has it.
        default: in words.
        summary: the help of the option.
        details: what `TrainConfig` says of it, Markdown.
    """

    group: str
    flags: str
    name: str | None
    default: str
    summary: str
    details: str

    def words(self) -> str:
        """Return summary and details, or one of the two where it has all the words of the other."""
        summary, details = (set(re.findall(r"\w{3,}", text.lower())) for text in (self.summary, self.details))
        if details <= summary:
            return self.summary
        written = self.details[0].upper() + self.details[1:]
        return written if summary <= details else f"{self.summary} {written}"


def commands() -> Iterator[tuple[str, click.Command]]:
    """Yield the name and the click command of everything that pyproject.toml installs."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, place in project["scripts"].items():
        module, _, function = place.partition(":")
        yield name, getattr(importlib.import_module(module), function)


def run_train_settings() -> list[Setting]:
    """Return every setting of `run-train`, in the order and the groups of its help.

    The one place that knows how a setting is declared: today an option of click and an attribute of `TrainConfig`.
    """
    from engine.config import TrainConfig

    command = dict(commands())["run-train"]
    context = click.Context(command, info_name="run-train", show_default=True)
    options = {option.name: option for option in command.params if isinstance(option, click.Option)}
    details = described_attributes(TrainConfig)
    groups: dict[str, tuple[str, ...]] = command._option_groups  # type: ignore[attr-defined]
    return [
        _setting(group, options[name], context, details.get(name)) for group, names in groups.items() for name in names
    ]


def _setting(group: str, option: click.Option, context: click.Context, details: str | None) -> Setting:
    record = option.get_help_record(context)
    assert record is not None, option.name
    extra = option.get_help_extra(context)
    default = str(extra.get("default", "")) or ("off" if option.is_flag else "none")
    return Setting(
        group=group,
        flags=record[0],
        name=option.name if details is not None else None,
        default=default.removeprefix("(").removesuffix(")"),
        summary=option.help or "",
        details=details or "",
    )


def described_attributes(documented: type) -> dict[str, str]:
    """Return what the section "Attributes:" of a class's docstring says, by the attribute's name."""
    lines = inspect.cleandoc(documented.__doc__ or "").splitlines()
    start = lines.index("Attributes:") + 1
    found: dict[str, list[str]] = {}
    names: list[str] = []
    for line in lines[start:]:
        if line and not line.startswith("    "):
            break
        if line and not line.startswith("     "):
            heads, _, rest = line.strip().partition(": ")
            names = heads.split(", ")
            found |= {name: [rest] for name in names}
        else:
            for name in names:
                found[name].append(line.strip())
    return {name: " ".join(words).strip() for name, words in found.items()}


class CommandReference(SphinxDirective):
    """A section for each command, with its help."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        return [_section(self, name, [_literal(help_text(name, command))]) for name, command in commands()]


def help_text(name: str, command: click.Command) -> str:
    """Return what `NAME --help` prints on a wide terminal."""
    with click.Context(
        command, info_name=name, terminal_width=_HELP_COLUMNS, max_content_width=_HELP_COLUMNS
    ) as context:
        context.show_default = True
        return command.get_help(context)


class SettingsReference(SphinxDirective):
    """A section for each group of settings."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        by_group: dict[str, list[Setting]] = {}
        for setting in run_train_settings():
            by_group.setdefault(setting.group, []).append(setting)
        return [_section(self, group, [self._list(settings)]) for group, settings in by_group.items()]

    def _list(self, settings: list[Setting]) -> nodes.Node:
        found = nodes.definition_list(classes=["settings"])
        for setting in settings:
            flag = setting.flags.split(",")[0].split()[0]
            term = nodes.term("", "", nodes.literal(text=setting.flags), ids=["setting" + flag[1:]])
            facts = [nodes.Text("Default: "), nodes.literal(text=setting.default)]
            if setting.name is not None:
                facts += [nodes.Text(" · Python: "), nodes.literal(text=setting.name)]
            body: list[nodes.Node] = [nodes.paragraph("", "", *facts, classes=["setting-facts"])]
            body += self.parse_text_to_nodes(_OPTION.sub(r"`\1`", setting.words()))
            found += nodes.definition_list_item("", term, nodes.definition("", *body))
        return found


class ModelReference(SphinxDirective):
    """A table of the models that `--model` knows."""

    def run(self) -> list[nodes.Node]:
        """Return the table, made of Markdown."""
        rows = [f"| `{name}` | {size} px, {classes:,} classes | {count:,} |" for name, size, classes, count in models()]
        return self.parse_text_to_nodes("\n".join(["| name | counted for | parameters |", "|---|---|---:|", *rows]))


def models() -> Iterator[tuple[str, int, int, int]]:
    """Yield name, image size, classes and number of parameters of each model of the registry; computes none of them."""
    import jax

    from models.registry import build_model, count_params, model_names

    for name in model_names():
        size, classes = (224, 1000) if name.partition("-")[0] in _FOR_LARGE_IMAGES else (32, 10)
        model = build_model(name, num_classes=classes, image_size=size)
        params, _ = jax.eval_shape(model.init, jax.random.key(0))
        yield name, size, classes, count_params(params)


def _section(directive: SphinxDirective, title: str, body: list[nodes.Node]) -> nodes.section:
    section = nodes.section("", nodes.title(text=title), *body, ids=[nodes.make_id(title)], names=[title.lower()])
    directive.state.document.note_implicit_target(section, section)
    return section


def _literal(text: str) -> nodes.Node:
    return nodes.literal_block(text, text, language="text")


def check_public_names(_app: Sphinx, environment: BuildEnvironment) -> None:
    """Warn of each public name that no page documents."""
    documented = environment.domains.python_domain.objects
    for package in _PUBLIC:
        module: Any = importlib.import_module(package)
        for name in getattr(module, "__all__", ()):
            if f"{package}.{name}" not in documented and name not in ("__version__",):
                logger.warning("%s.%s is public and on no page of the reference: add it", package, name)


def join_names(_app: Sphinx, _kind: str, _name: str, _what: Any, _options: Any, lines: list[str]) -> None:
    """Write the names of "mean, std: …" in a section as one word, "mean,std", as a field has but one."""
    in_section = False
    for number, line in enumerate(lines):
        if line.strip() in ("Args:", "Attributes:"):
            in_section = True
        elif line and not line.startswith(" "):
            in_section = False
        elif in_section:
            lines[number] = _NAMES.sub(lambda names: names.group().replace(", ", ","), line)


def relink(_app: Sphinx, _place: Path, _page: str, content: list[str]) -> None:
    """Turn links between the repository's own files, in a file that a page includes, into links between pages."""
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
