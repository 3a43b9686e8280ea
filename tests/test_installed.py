"""What a wheel installs, in a project that has `models`, `engine` and `preprocess` of its own."""

import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[1]
SMALL = ("--synthetic", "--image-size", "8", "--num-classes", "10", "--steps", "2", "--batch", "4")
NET = """
import jax.numpy as jnp
class Net:
    def init(self, key):
        return {"weights": jnp.zeros((8 * 8 * 3, 10))}, {}
    def apply(self, params, batch_stats, images, train):
        return images.reshape(len(images), -1) @ params["weights"], batch_stats
def build():
    return Net()
"""
TRAIN = """
import engine, models.net, preprocess
assert engine.OWN and preprocess.OWN
from loopfeed import TrainConfig, train
config = TrainConfig(steps=2, batch=4, synthetic=True, image_size=8, num_classes=10, run_dir="run", overwrite=True)
print("losses", len(train(config, model=models.net.build()).losses))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(place), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    if done.returncode and "Could not find a version that satisfies the requirement hatchling" in done.stderr:
        pytest.skip("pip cannot download hatchling here")
    assert done.returncode == 0, done.stderr
    (found,) = place.glob("loopfeed-*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """Return the Python of an environment with the wheel, and with the packages of this one but no clone."""
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, symlinks=True)
    found = place / "bin/python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.check_output([found, "-c", where], text=True).strip())
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # Python follows no .pth file of a folder that a .pth file names, so the clone stays off the path.
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    return found


@pytest.fixture
def project(tmp_path) -> Path:
    (tmp_path / "models").mkdir()
    for name in ("models/__init__.py", "engine.py", "preprocess.py"):
        (tmp_path / name).write_text("OWN = True\n")
    (tmp_path / "models/net.py").write_text(NET)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def test_a_wheel_has_the_files_of_the_repository_in_one_package(wheel):
    tracked = subprocess.check_output(["git", "ls-files", "engine", "models", "preprocess"], cwd=ROOT, text=True)
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    own = {f"loopfeed/{name}" for name in ("__init__.py", "__main__.py", "py.typed")}
    assert names == own | {f"loopfeed/{name}" for name in tracked.split()}


def test_a_script_and_a_session_import_both_their_own_and_loopfeed(python, project):
    """A notebook's cells run as a session's lines do: with the folder on the path, in `__main__`."""
    for given, text in ((["train.py"], None), (["-"], TRAIN)):
        done = subprocess.run(
            [python, *given], input=text, cwd=project, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "losses 2" in done.stdout


def test_a_command_takes_a_model_of_a_folder_called_models(python, project):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    module, _, function = scripts["run-train"].partition(":")
    start = f"import sys; del sys.path[0]; sys.argv[0] = 'run-train'; from {module} import {function}; {function}()"
    options = (*SMALL, "--model", "models.net:build", "--run-dir", "run")
    done = subprocess.run([python, "-c", start, *options], cwd=project, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert len((project / "run/loss.jsonl").read_text().splitlines()) == 2
    lists = subprocess.run([python, "-m", "loopfeed"], cwd=project, capture_output=True, text=True, timeout=60)
    assert lists.returncode == 0, lists.stderr
    assert {line.split()[0] for line in lists.stdout.splitlines()[:-1]} == set(scripts) - {"loopfeed"}
