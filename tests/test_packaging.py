"""Packaging and layering: entry points, pins, import directions, the two crossings."""

import ast
import importlib
import importlib.util
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement
from packaging.version import Version

from loopfeed.models.kernels.onednn.library import DISTRIBUTION

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGES = ("engine", "preprocess", "models")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
HOST_CALLBACKS = {"buffer_callback", "io_callback", "pure_callback", "host_callback"}
CROSSINGS = {
    "loopfeed.engine.crossing.infeed",
    "loopfeed.engine.crossing.outfeed",
    "loopfeed.engine.crossing.cuda.infeed",
    "loopfeed.engine.crossing.cuda.transport",
    "loopfeed.engine.crossing.transport",
}
# Kernels of a processor run inside the program and move no data: their calls are no crossings, and stand in one room.
KERNEL_CALLS = {"ffi_call", "register_ffi_target", "pycapsule"}
KERNELS = "loopfeed.models.kernels"
TRANSPORTS = {"loopfeed.engine.crossing.transport", "loopfeed.engine.crossing.cuda.transport"}
TOKEN = "loopfeed.engine.crossing.token"
BEGIN_CHAINS = {
    "loopfeed.engine.program.loop",
    "loopfeed.engine.inspection.show_batch",
    "loopfeed.engine.evaluation.counting",
}
# The methods that cross: of transports, infeeds and outfeeds, and what calls them on one device.
PUSHES = {f"push_{what}" for what in ("losses", "evaluation", "snapshot", "histograms", "images")}
CROSSES = PUSHES | {"emit", "enqueue", "pull", "pull_part", "draw", "for_each", "on_first"}
# They hand the crossings the transport that these call.
CHOOSE_TRANSPORT = {
    "loopfeed.engine.crossing.choice",
    "loopfeed.engine.crossing.devices",
    "loopfeed.engine.evaluation.counting",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("loopfeed", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def imported(source: str, module: str, is_package: bool = False) -> set[str]:
    """Return every name that an import statement in the source may import, as absolute dotted names."""
    package = module if is_package else module.rpartition(".")[0]
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(relative, package) if node.level else relative
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return names


@cache
def mentioned(source: str) -> set[str]:
    """Return every identifier, attribute and imported name in the source, without comments and strings."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {part for alias in node.names for part in alias.name.split(".")}
    return names


@cache
def imports_of(path: Path) -> set[str]:
    return imported(path.read_text(encoding="utf-8"), module_name(path), path.name == "__init__.py")


def top_levels(path: Path) -> set[str]:
    """Return the packages that a module imports, of Loopfeed's own those below `loopfeed`."""
    return {".".join(name.split(".")[: 2 if name.startswith("loopfeed.") else 1]) for name in imports_of(path)}


def lower_bound(requirement: Requirement) -> Version:
    (bound,) = (Version(part.version) for part in requirement.specifier if part.operator == ">=")
    return bound


def pins() -> dict[str, Version]:
    lines = (ROOT / "tests/lowest.txt").read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {pin.name: Version(str(pin.specifier).removeprefix("==")) for pin in requirements}


@pytest.mark.parametrize("command", sorted(PROJECT["scripts"]))
def test_every_command_answers_help(command: str) -> None:
    module, _, function = PROJECT["scripts"][command].partition(":")
    done = CliRunner().invoke(getattr(importlib.import_module(module), function), ["--help"], prog_name=command)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"Usage: {command} ")


HELP_PROGRAM = """
import importlib, sys
from click.testing import CliRunner
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    if name.startswith("loopfeed.engine.commands") or name.startswith("loopfeed.preprocess.commands"):
        assert CliRunner().invoke(module.main, ["--help"]).exit_code == 0, name
    assert not {"jax", "numpy", "tensorstore", "PIL", "optax", "orbax"} & set(sys.modules), name
"""


def test_help_and_what_a_shell_completes_load_nothing_heavy() -> None:
    names = ("models.names", "preprocess.printable", "engine.config", "engine.recipes", "engine.control.request")
    modules = [f"loopfeed.{name}" for name in names] + [text.partition(":")[0] for text in PROJECT["scripts"].values()]
    words = [sys.executable, "-c", HELP_PROGRAM, *modules]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_preprocess_starts_without_jax() -> None:
    paths = (ROOT / "preprocess").rglob("*.py")
    # What runs on a Dask worker needs the extra `distributed`.
    modules = [module_name(path) for path in paths if path.stem not in ("__main__", "dask_worker")]
    assert {
        "loopfeed.preprocess.commands.cli",
        "loopfeed.preprocess.shards.reader",
        "loopfeed.preprocess.packing.pack",
    } <= set(modules)
    foreign = {"jax", "jaxlib", "loopfeed.engine", "loopfeed.models"}
    program = f"import sys, {', '.join(modules)}; print(*({foreign} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == ""


def test_imports_go_one_way() -> None:
    forbidden = {
        "preprocess": {"jax", "jaxlib", "loopfeed.engine", "loopfeed.models"},
        "models": {"loopfeed.engine", "loopfeed.preprocess"},
        "engine": set(),
    }
    for path in SOURCES:
        assert top_levels(path) & forbidden[path.relative_to(ROOT).parts[0]] == set(), path
        assert "loopfeed" not in top_levels(path), path  # the public face imports everything
        parts = {part for name in imports_of(path) if name.startswith("loopfeed") for part in name.split(".")}
        assert not [part for part in parts if part.endswith("cli")], path


def test_only_the_two_crossings_reach_the_host() -> None:
    for path in SOURCES:
        module, source = module_name(path), path.read_text(encoding="utf-8")
        if module not in TRANSPORTS:
            assert mentioned(source) & HOST_CALLBACKS == set(), path
            assert "jax.debug" not in imports_of(path), path  # jax.debug.print and .callback cross to the host too
            assert "jax.debug." not in source, path
        if not module.startswith(f"{KERNELS}."):
            assert mentioned(source) & KERNEL_CALLS == set(), path
        if module in CHOOSE_TRANSPORT:
            assert "transport.call(" not in source, path
        elif module not in CROSSINGS:
            assert "loopfeed.engine.crossing.transport" not in imports_of(path), path


def test_the_crossings_of_a_program_are_one_chain() -> None:
    """A program begins with the first token, and whoever makes a crossing passes on the token that it returns."""
    texts = {module_name(path): path.read_text(encoding="utf-8") for path in SOURCES}
    assert {module for module, text in texts.items() if "first_token()" in text} == BEGIN_CHAINS | {TOKEN}
    dropped = [
        f"{module}:{statement.lineno}"
        for module, text in texts.items()
        if module.startswith("loopfeed.engine.")
        for statement in ast.walk(ast.parse(text))
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and getattr(statement.value.func, "attr", getattr(statement.value.func, "id", None)) in CROSSES
    ]
    assert dropped == []


def test_the_calls_of_kernels_are_found() -> None:
    callers = {module_name(path) for path in SOURCES if mentioned(path.read_text(encoding="utf-8")) & KERNEL_CALLS}
    assert callers == {"loopfeed.models.kernels.onednn.handler"}


def test_the_kernels_are_one_version_of_the_library_where_there_is_one() -> None:
    (line,) = PROJECT["optional-dependencies"]["kernels"]
    found = Requirement(line)
    assert found.name == DISTRIBUTION
    assert [each.operator for each in found.specifier] == ["=="]
    assert found.marker is not None
    for system, machine, is_there in (
        ("linux", "x86_64", True),
        ("linux", "aarch64", False),
        ("darwin", "arm64", False),
    ):
        assert found.marker.evaluate({"sys_platform": system, "platform_machine": machine}) == is_there
    assert any("kernels" in each for each in PROJECT["optional-dependencies"]["dev"] if each.startswith("loopfeed["))


def test_lowest_pins_are_the_lower_bounds() -> None:
    bounds = {requirement.name: lower_bound(requirement) for requirement in map(Requirement, PROJECT["dependencies"])}
    assert pins() == bounds


def test_extras_ask_for_the_same_jax() -> None:
    extras = PROJECT["optional-dependencies"].values()
    jaxes = [r for r in (Requirement(line) for extra in extras for line in extra) if r.name == "jax"]
    core = next(r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "jax")
    assert jaxes
    assert {r.specifier for r in jaxes} == {core.specifier}


def test_every_package_is_described() -> None:
    for package in PACKAGES:
        assert ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8")))


def test_the_repository_has_the_layout_of_what_is_installed() -> None:
    """An editable install puts src on the path, where links stand for the folders; a wheel has the folders."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    sources = build["targets"]["wheel"]["sources"]
    assert sources == {"src/loopfeed": "loopfeed"} | {package: f"loopfeed/{package}" for package in PACKAGES}
    assert build["dev-mode-dirs"] == ["src"]
    place = ROOT / "src/loopfeed"
    assert {path.name: path.readlink().as_posix() for path in place.iterdir() if path.is_symlink()} == {
        package: f"../../{package}" for package in PACKAGES
    }
    own = {f"src/loopfeed/{path.name}" for path in place.iterdir() if path.is_file()}
    assert own == {f"src/loopfeed/{name}" for name in ("__init__.py", "__main__.py", "py.typed")}
    for target in ("wheel", "sdist"):
        assert {*own, *PACKAGES} <= set(build["targets"][target]["only-include"])
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    assert not [pattern for pattern in ignored if "toml" in pattern]
