"""The programs of docs/examples run, including their own assertions."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "docs" / "examples").glob("*.py"))
# Examples that need a library that is no dependency of the project.
LIBRARIES = {"flax_nnx": "flax", "flax_linen": "flax", "equinox_model": "equinox", "optuna_search": "optuna"}
# Examples whose steps take longer than compiling their programs.
LONG = {"first_run", "fine_tuning", "frozen_trunk"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder for all, so that the demo set is drawn once."""
    return tmp_path_factory.mktemp("examples")


@pytest.mark.integration
@pytest.mark.timeout(600)  # seconds on an idle machine, minutes on a busy one
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs_and_its_assertions_hold(example, folder):
    library = LIBRARIES.get(example.stem)
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    given = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(example.stem not in LONG))}
    done = subprocess.run([sys.executable, example], cwd=folder, env=given, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_has_assertions_and_is_on_a_page(example):
    assert "\nassert " in example.read_text(encoding="utf-8")
    pages = (Path(__file__).parents[1] / "docs" / "howto").glob("*.md")
    assert any(f"examples/{example.name}" in page.read_text(encoding="utf-8") for page in pages)
