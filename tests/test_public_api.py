"""The public names: pinned, complete for type checkers, loaded on first use."""

import ast
import importlib
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PUBLIC = {
    "engine": [
        "BatchSource",
        "Callback",
        "ConfigError",
        "DeviceInfo",
        "DeviceRates",
        "Difference",
        "EvaluationRecord",
        "EvaluationResult",
        "EvaluationSource",
        "FeederError",
        "ImagePredictions",
        "LoadedRecipe",
        "LossRecord",
        "Metric",
        "NonFiniteError",
        "PredictionResult",
        "Profile",
        "ProgramReport",
        "ReplayReport",
        "RunHandle",
        "RuntimeReport",
        "SettingError",
        "ShownBatch",
        "Sink",
        "StepCheck",
        "TensorBoardSink",
        "ThisProcess",
        "TrainConfig",
        "TrainModel",
        "TrainResult",
        "WandbSink",
        "balanced_accuracy",
        "check_step",
        "confusion_matrix",
        "describe_runtime",
        "devices",
        "evaluate",
        "evaluate_weights",
        "expected_calibration_error",
        "explain_program",
        "join_processes",
        "load_recipe",
        "mean_average_precision",
        "mean_of",
        "predict",
        "read_runtime",
        "read_weights",
        "recipe_names",
        "replay_run",
        "report_run",
        "run_settings",
        "show_batch",
        "this_process",
        "top_k",
        "train",
    ],
    "models": [
        "Model",
        "RunningStats",
        "batch_norm",
        "build_model",
        "conv_general_dilated",
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
        "ShardCache",
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


@pytest.mark.parametrize(
    "program",
    ["from {0} import {1}", "import {0}; {0}.{1}", "import {0}; getattr({0}, '{1}')"],
    ids=["import", "attribute", "getattr"],
)
@pytest.mark.parametrize(
    ("package", "given", "meant"),
    [("engine", "trian", "train"), ("models", "model_nmaes", "model_names"), ("preprocess", "opn_split", "open_split")],
)
def test_python_suggests_the_public_name_for_a_misspelt_one(package: str, given: str, meant: str, program: str) -> None:
    with pytest.raises((AttributeError, ImportError)) as caught:
        exec(program.format(package, given))
    *_, last = traceback.format_exception(caught.value)
    assert last.rstrip().endswith(f". Did you mean: '{meant}'?")


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


@pytest.mark.parametrize("package", PUBLIC)
def test_importing_a_package_loads_nothing_else(package: str) -> None:
    loaded = loaded_by(f"import {package}")
    assert {module for module in loaded if module.partition(".")[0] == package} == {package}
    assert packages_of(loaded) == {package}


USES = {
    "pack_demo": "preprocess.pack_demo('demo')",
    "list_splits": "assert preprocess.list_splits('demo') == ('train', 'val')",
    "open_split": "split = preprocess.open_split('demo', 'val')",
    "ShardSplit": "assert isinstance(split, preprocess.ShardSplit)",
    "ShardCache": "assert preprocess.ShardCache(pathlib.Path('copies'), 1000, print).grant(2000) == 1000",
    "pack_rgb": "words = preprocess.pack_rgb(numpy.zeros((split.height, split.width, 3), numpy.uint8))",
    "unpack_rgb": "assert not preprocess.unpack_rgb(words).any()",
    "verify_split": "assert preprocess.verify_split('demo', 'val') == ()",
    "Damage": "preprocess.Damage('labels/c/0', 'truncated')",
    "ShardError": "assert issubclass(preprocess.ShardError, ValueError)",
    "ChangedShardError": "assert issubclass(preprocess.ChangedShardError, preprocess.ShardError)",
}
"""A use of each public name of preprocess, to run one after the other."""
# `pack_demo` with fewer images; it loads these modules itself.
FEWER = """import functools, pathlib, numpy, preprocess
from preprocess.demo import demo_set
demo_set.draw_demo = functools.partial(demo_set.draw_demo, num_images=40)
"""
READING = "split.read_into(numpy.arange(1), words[None], numpy.zeros(1, numpy.int32), timeout_s=60)"
# numpy, Pillow and TensorStore with what they load themselves, by the names of their packages.
PREPROCESS_PACKAGES = {"PIL", "google_crc32c", "ml_dtypes", "numpy", "preprocess", "tensorstore"}


def test_the_public_names_of_preprocess_load_no_jax_when_they_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sorted(USES) == PUBLIC["preprocess"]
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    packages = packages_of(loaded_by(FEWER + "; ".join([*USES.values(), READING])))
    # Cython's own modules have the number of its release in their names.
    assert {name for name in packages if not name.startswith(("_cython", "cython"))} <= PREPROCESS_PACKAGES
    assert {"PIL", "numpy", "preprocess", "tensorstore"} <= packages


def test_a_function_is_not_hidden_by_a_module_of_its_name() -> None:
    """Importing a submodule sets an attribute of its package: none may have the name of a public function."""
    for package, names in PUBLIC.items():
        taken = {path.stem for path in (ROOT / package).iterdir() if path.suffix == ".py" or path.is_dir()}
        assert not taken & set(names)
