"""Which of the packages that the project needs this Python has, from pyproject.toml and from importing them.

Needs only the standard library, because it runs where nothing may be installed.
"""

import importlib
import importlib.metadata
import platform
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

# Of the tools for development, those that run the tests.
_TEST_TOOLS = ("pytest", "pytest-timeout")
_PLATFORMS = ("manylinux_2_28", "manylinux2014")


def required(project: Mapping[str, Any]) -> list[str]:
    """Return the requirements of the project and of its tests on a card, as in the table `project` of pyproject.toml.

    `project` is read from `read_project`.
    """
    extras = project["optional-dependencies"]
    for_cards = {_name(each): each for each in extras["cuda"]}
    tools = [each for each in extras["dev"] if _name(each) in _TEST_TOOLS]
    return [*(for_cards.get(_name(each), each) for each in project["dependencies"]), *tools]


def read_project(root: Path) -> dict[str, Any]:
    """Return the table `project` of the pyproject.toml at `root`."""
    return dict(tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"])


def find_missing(requirements: Sequence[str]) -> dict[str, str]:
    """Return the requirements that this Python cannot import, each with the reason."""
    homes: dict[str, list[str]] = {}
    for module, distributions in importlib.metadata.packages_distributions().items():
        for each in distributions:
            homes.setdefault(_normalised(each), []).append(module)
    found = ((each, _why_missing(_name(each), homes)) for each in requirements)
    return {each: reason for each, reason in found if reason}


def find_unsupported(requirements: Sequence[str]) -> list[str]:
    """Return a description of each installed package whose version is outside the requirement.

    Empty if this Python has no `packaging`, which pytest brings.
    """
    found = []
    with suppress(ImportError):
        from packaging.requirements import Requirement

        for each in requirements:
            with suppress(importlib.metadata.PackageNotFoundError):
                version = importlib.metadata.version(_name(each))
                if not Requirement(each).specifier.contains(version, prereleases=True):
                    found.append(f"{_name(each)} {version}, but {each} is supported")
    return found


def install_commands(python: str, missing: Sequence[str]) -> str:
    """Return the commands that install requirements, with a network and without one."""
    names = " ".join(f"'{each}'" for each in missing)
    version = ".".join(platform.python_version_tuple()[:2])
    tags = " ".join(f"--platform {each}_{platform.machine()}" for each in _PLATFORMS)
    return (
        f"with a network:\n"
        f"  {python} -m pip install {names}\n"
        f"without one: on another machine\n"
        f"  python3 -m pip download --no-deps --only-binary=:all: --python-version {version} --implementation cp "
        f"{tags} -d wheels {names}\n"
        f"then here, with that folder\n"
        f"  {python} -m pip install --no-index --no-deps --target .site wheels/*.whl && export PYTHONPATH=$PWD/.site"
    )


def _why_missing(name: str, homes: Mapping[str, Sequence[str]]) -> str:
    """Return why a package cannot be imported, or nothing if it can."""
    homes_of = [each for each in homes.get(_normalised(name), ()) if each.isidentifier() and not each.startswith("_")]
    first, _, rest = name.partition("-")
    # A folder of copied modules may have no metadata.
    modules = homes_of or [name.replace("-", "_")]
    if rest and homes_of == [first]:
        modules = [f"{first}.{rest}"]  # a package of a namespace: orbax-checkpoint is orbax.checkpoint
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - whatever a broken package raises
        if not homes_of and isinstance(error, ModuleNotFoundError):
            return "is not installed"
        return f"cannot be imported ({type(error).__name__}: {error})"
    return ""


def _name(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found, requirement
    return found[0]


def _normalised(name: str) -> str:
    """Return a package's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
