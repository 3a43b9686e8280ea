"""The public names: pinned, complete for type checkers, loaded on first use."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PUBLIC = {
    "engine": [
        "BatchSource",
        "ConfigError",
        "Difference",
        "EvaluationRecord",
        "EvaluationResult",
        "EvaluationSource",
        "FeederError",
        "LoadedRecipe",
        "LossRecord",
        "NonFiniteError",
        "ReplayReport",
        "SettingError",
        "Sink",
        "TrainConfig",
        "TrainModel",
        "TrainResult",
        "evaluate",
        "evaluate_weights",
        "load_recipe",
        "recipe_names",
        "replay_run",
        "run_settings",
        "train",
    ],
    "models": [
        "Model",
        "RunningStats",
        "batch_norm",
        "build_model",
        "convolution",
        "count_params",
        "dense",
        "from_torchvision",
        "global_average_pool",
        "max_pool",
        "model_names",
        "to_torchvision",
    ],
    "preprocess": [
        "ChangedShardError",
        "Damage",
        "ShardError",
        "ShardSplit",
        "list_splits",
        "open_split",
        "pack_demo",
        "pack_rgb",
        "unpack_rgb",
        "verify_split",
    ],
}


@pytest.mark.parametrize("package", PUBLIC)
def test_the_public_names_are_these(package: str) -> None:
    face = importlib.import_module(package)
    assert sorted(face.__all__) == PUBLIC[package]
    assert dir(face) == face.__all__
    for name in face.__all__:
        assert getattr(face, name).__doc__


@pytest.mark.parametrize("package", PUBLIC)
def test_a_type_checker_finds_what_is_loaded(package: str) -> None:
    face = importlib.import_module(package)
    tree = ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8"))
    checked = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module not in ("typing", "importlib")
        for alias in node.names
    }
    assert checked == face._HOME
    assert list(face._HOME) == face.__all__
    for name, module in checked.items():
        assert getattr(face, name) is getattr(importlib.import_module(str(module)), name)


@pytest.mark.parametrize("package", PUBLIC)
def test_an_unknown_name_is_refused_with_those_that_there_are(package: str) -> None:
    with pytest.raises(
        AttributeError, match=f"module '{package}' has no attribute 'nothing'; it has {PUBLIC[package][0]}"
    ):
        importlib.import_module(package).nothing  # noqa: B018 - the access is the test


@pytest.mark.parametrize("package", PUBLIC)
def test_importing_a_package_loads_nothing_else(package: str) -> None:
    program = f"import sys, {package}; print(*({{'jax', 'numpy', 'tensorstore'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""


def test_a_function_is_not_hidden_by_a_module_of_its_name() -> None:
    """Importing a submodule sets an attribute of its package: none may have the name of a public function."""
    for package, names in PUBLIC.items():
        taken = {path.stem for path in (ROOT / package).iterdir() if path.suffix == ".py" or path.is_dir()}
        assert not taken & set(names)
