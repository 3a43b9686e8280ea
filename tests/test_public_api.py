"""The public names: pinned, complete for type checkers, loaded on first use."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import loopfeed

ROOT = Path(__file__).parents[1]
PUBLIC = list(loopfeed._HOME)


def test_the_public_names_are_those_of_the_reference() -> None:
    page = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\.\. auto\w+:: loopfeed\.(\w+)(?:\(|$)", page, re.MULTILINE)) == set(PUBLIC)
    assert loopfeed.__all__ == dir(loopfeed) == sorted(PUBLIC)
    for name in PUBLIC:
        assert getattr(loopfeed, name).__doc__


def test_a_type_checker_finds_what_is_loaded() -> None:
    tree = ast.parse(Path(loopfeed.__file__).read_text(encoding="utf-8"))
    checked = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module not in ("typing", "importlib")
        for alias in node.names
    }
    assert checked == loopfeed._HOME
    for name, module in checked.items():
        found = getattr(importlib.import_module(str(module)), name)
        assert inspect.unwrap(getattr(loopfeed, name)) is found


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(AttributeError, match=r"loopfeed has no 'trian': did you mean train\?"):
        loopfeed.trian  # noqa: B018 - the access is the test


def loaded_by(program: str) -> set[str]:
    """Run a program in a new process; return the modules that it loaded, and that a bare interpreter does not."""
    show = "; import sys; print(); print(*sys.modules)"
    bare, done = (
        subprocess.run([sys.executable, "-c", each], capture_output=True, text=True, timeout=120, check=True)
        for each in (f"pass{show}", program + show)
    )
    return set(done.stdout.splitlines()[-1].split()) - set(bare.stdout.split())


def packages_of(modules: set[str]) -> set[str]:
    """Return the top-level packages of modules, without those of the standard library."""
    return {module.partition(".")[0] for module in modules} - set(sys.stdlib_module_names)


def test_importing_the_package_loads_nothing_else() -> None:
    loaded = loaded_by("import loopfeed")
    assert {module for module in loaded if module.partition(".")[0] == "loopfeed"} == {"loopfeed"}
    assert packages_of(loaded) == {"loopfeed"}


def test_the_folders_are_no_packages_of_their_own() -> None:
    """They stand beside a user's own `models` or `engine`."""
    loaded = loaded_by(f"import loopfeed; [getattr(loopfeed, name) for name in {PUBLIC!r}]")
    assert "loopfeed.engine.run.train" in loaded
    assert not packages_of(loaded) & {"engine", "models", "preprocess"}


USES = {
    "pack_demo": "loopfeed.pack_demo('demo', num_images=40)",
    "list_splits": "assert loopfeed.list_splits('demo') == ('train', 'val')",
    "open_split": "split = loopfeed.open_split('demo', 'val')",
    "ShardSplit": "assert isinstance(split, loopfeed.ShardSplit) and split.num_images == 10",
    "ShardCache": "assert loopfeed.ShardCache(pathlib.Path('copies'), 1000, print).grant(2000) == 1000",
    "pack_rgb": "words = loopfeed.pack_rgb(numpy.zeros((split.height, split.width, 3), numpy.uint8))",
    "unpack_rgb": "assert not loopfeed.unpack_rgb(words).any()",
    "verify_split": "assert loopfeed.verify_split('demo', 'val') == ()",
    "Damage": "loopfeed.Damage('labels/c/0', 'truncated')",
    "ShardError": "assert issubclass(loopfeed.ShardError, ValueError)",
    "ChangedShardError": "assert issubclass(loopfeed.ChangedShardError, loopfeed.ShardError)",
}
"""A use of each public name that packs or reads packs, to run one after the other."""
READING = "split.read_into(numpy.arange(1), words[None], numpy.zeros(1, numpy.int32), timeout_s=60)"
# numpy, Pillow and TensorStore with what they load themselves, by the names of their packages.
PREPROCESS_PACKAGES = {"PIL", "google_crc32c", "ml_dtypes", "numpy", "loopfeed", "tensorstore"}


def test_the_public_names_of_preprocess_load_no_jax_when_they_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(USES) <= set(PUBLIC)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    packages = packages_of(loaded_by("import pathlib, numpy, loopfeed; " + "; ".join([*USES.values(), READING])))
    # Cython's own modules have the number of its release in their names.
    assert {name for name in packages if not name.startswith(("_cython", "cython"))} <= PREPROCESS_PACKAGES
    assert {"PIL", "numpy", "loopfeed", "tensorstore"} <= packages


def test_a_name_is_not_hidden_by_a_module_of_its_name() -> None:
    """Importing a submodule sets an attribute of its package: none may have the name of a public one."""
    taken = {path.stem for path in Path(loopfeed.__file__).parent.iterdir()}
    assert not taken & set(PUBLIC)
