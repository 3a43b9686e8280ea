"""The set-up scripts, run: how they pick a Python, when they install, what they say when they can't.

Fake interpreters stand on a PATH of their own. Where a fake answers at all it is the Python of this test run, with
stand-in modules before the real ones, so that the scripts' own probe is what runs.
"""

import os
import shlex
import shutil
import stat
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from loopfeed.models.kernels.onednn.library import Isa, load_library
from tests.kernels import needs_onednn

ROOT = Path(__file__).parents[1]
BASH = shutil.which("bash")
REAL = shlex.quote(sys.executable)
BASE = getattr(sys, "_base_executable", sys.executable)
TOOLS = ("bash", "cat", "dirname", "env", "mkdir", "rm")

pytestmark = pytest.mark.skipif(BASH is None, reason="the scripts are for bash")


class Machine:
    """A machine with a clone in a folder with a space, its own home and PATH, and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.clone = folder / "my clone"
        self.home = folder / "home"
        self.bin = folder / "bin"
        self.log = folder / "pip.log"
        for made in (self.clone / "tests", self.home, self.bin):
            made.mkdir(parents=True)
        shutil.copytree(ROOT / "scripts", self.clone / "scripts")
        for name in ("pyproject.toml", "tests/lowest.txt"):
            shutil.copy(ROOT / name, self.clone / name)
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found, tool
            (self.bin / tool).symlink_to(found)

    def fake(self, path: Path, body: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    def fake_version(self, path: Path, version: str) -> Path:
        """Write a Python that reports another version."""
        stub = self.home / f"stub-{version}"
        stub.mkdir(exist_ok=True)
        (stub / "sitecustomize.py").write_text(
            f"import sys\nsys.version_info = ({version.replace('.', ', ')})\n", encoding="utf-8"
        )
        return self.fake(path, f'PYTHONPATH={shlex.quote(str(stub))} exec {REAL} "$@"')

    def fake_split(self, path: Path) -> Path:
        """Write a Python without ensurepip, as in Debian and Ubuntu."""
        stub = self.home / "stub-split"
        stub.mkdir()
        (stub / "ensurepip.py").write_text("raise ImportError('split off')\n", encoding="utf-8")
        return self.fake(path, f'PYTHONPATH={shlex.quote(str(stub))} exec {REAL} "$@"')

    def fake_installer(self, path: Path, pip: str = "exit 0") -> Path:
        """A Python that makes environments of copies of itself and logs what pip is asked to do."""
        body = f"""
case "$*" in
  *ensurepip.version*) echo "$0" ;;
  '-m venv '*) echo "venv" >>"$PIP_LOG"; mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  '-m pip '*) echo "pip $*" >>"$PIP_LOG"; {pip} ;;
  *) exec {REAL} "$@" ;;
esac"""
        for tool in ("cp", "mkdir"):
            body = body.replace(f"; {tool} ", f"; {shutil.which(tool)} ")
        return self.fake(path, body)

    def run(self, command: str, **env: str) -> subprocess.CompletedProcess[str]:
        assert BASH
        base = {"PATH": str(self.bin), "HOME": str(self.home), "PIP_LOG": str(self.log)}
        if "LD_LIBRARY_PATH" in os.environ:  # some Pythons don't start without
            base["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        return subprocess.run(
            [BASH, "-c", command], cwd=self.home, env=base | env, capture_output=True, text=True, timeout=60
        )

    def sourced(self, command: str, **env: str) -> subprocess.CompletedProcess[str]:
        clone = shlex.quote(str(self.clone))
        return self.run(f'set -euo pipefail; me=me; root={clone}; . "$root/scripts/venv.sh"; {command}', **env)

    def installs(self) -> list[str]:
        return self.log.read_text(encoding="utf-8").splitlines() if self.log.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("script", ["demo", "test", "lint", "docs", "compare-releases", "bench", "torture"])
def test_without_a_python_one_line_names_the_remedy(machine: Machine, script: str) -> None:
    machine.fake(machine.bin / "python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    machine.fake_version(machine.bin / "python3", "3.11.7")
    machine.fake(machine.bin / "uv", "exit 2")
    done = machine.run(f"{shlex.quote(str(machine.clone))}/scripts/{script}")
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line == (
        f"scripts/{script}: no Python ≥ 3.12 found; install one (uv python install 3.12 or pyenv install 3.12), "
        f"or set it: PYTHON=… scripts/{script}"
    )
    assert not (machine.clone / ".venv").exists()


def test_a_dead_shim_and_an_old_python_are_passed_over_for_pyenvs_own(machine: Machine) -> None:
    machine.fake(machine.bin / "python3.12", "exit 127")
    machine.fake_version(machine.bin / "python3", "3.9.18")
    machine.fake_version(machine.home / ".pyenv/versions/3.11.7/bin/python", "3.11.7")
    machine.fake(machine.home / ".pyenv/versions/3.12.1/bin/python", f'exec {REAL} "$@"')
    done = machine.sourced("find_python")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, BASE, "")


def test_a_named_python_is_the_only_one_tried(machine: Machine) -> None:
    machine.fake(machine.bin / "python3.12", "echo good")
    assert machine.sourced("find_python", PYTHON="python3.12").stdout == "good\n"
    machine.fake(machine.home / "my python", "echo mine")
    assert machine.sourced('cd "$root"; find_python', PYTHON="./my python").stdout == "mine\n"
    done = machine.sourced("find_python", PYTHON="/no/such/python")
    assert done.returncode == 2
    assert done.stderr == "me: PYTHON=/no/such/python is not a working CPython ≥ 3.12; unset it or set another one\n"


def ensure(machine: Machine, arguments: str = "dev") -> subprocess.CompletedProcess[str]:
    return machine.sourced(f'ensure_venv "$root/.venv" {arguments}')


def test_installs_once_and_again_when_pyproject_changes(machine: Machine) -> None:
    machine.fake_installer(machine.bin / "python3.12")
    done = ensure(machine)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in machine.installs()] == ["venv", "pip"]
    assert machine.installs()[1].endswith(f"--editable {machine.clone}[dev]")
    assert ensure(machine).stderr == ""
    for less in ("''", "kernels"):  # what has the dev extra has these
        assert ensure(machine, less).stderr == ""
    assert len(machine.installs()) == 2
    with (machine.clone / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert ensure(machine).returncode == 0
    assert [line.split()[0] for line in machine.installs()] == ["venv", "pip", "pip"]


def test_the_core_alone_does_not_stand_in_for_the_dev_extra(machine: Machine) -> None:
    machine.fake_installer(machine.bin / "python3.12")
    for arguments in ("''", "kernels", "''", "dev", "dev", "kernels", "''", "docs,dev", "docs"):
        assert ensure(machine, arguments).returncode == 0
    assert [line.rpartition("[")[2] for line in machine.installs()][2:] == ["kernels]", "dev]", "docs,dev]"]


def test_constraints_are_part_of_what_was_installed(machine: Machine) -> None:
    machine.fake_installer(machine.bin / "python3.12")
    lowest = 'dev "$root/tests/lowest.txt"'
    assert ensure(machine, lowest).returncode == 0
    assert f"--constraint {machine.clone}/tests/lowest.txt" in machine.installs()[1]
    (machine.clone / "tests/lowest.txt").write_text("numpy==2.2.0\n", encoding="utf-8")
    assert ensure(machine, lowest).returncode == 0
    assert len(machine.installs()) == 3


def test_a_failing_pip_is_shown_in_full_and_tried_again(machine: Machine) -> None:
    machine.fake_installer(machine.bin / "python3.12", pip="echo 'ERROR: no network'; exit 1")
    for times in (1, 2):
        done = ensure(machine)
        assert done.returncode == 1
        assert "ERROR: no network" in done.stderr
        assert "run the same command again to continue" in done.stderr
        assert [line.split()[0] for line in machine.installs()] == ["venv"] + ["pip"] * times


def test_an_install_stopped_half_way_begins_anew(machine: Machine) -> None:
    machine.fake_installer(machine.bin / "python3.12", pip="echo 'Installing collected packages: jax'; exit 1")
    for times in (1, 2):
        assert ensure(machine).returncode == 1
        assert [line.split()[0] for line in machine.installs()] == ["venv", "pip"] * times


@pytest.mark.parametrize("fault", ["killed", "interpreter gone", "moved"])
def test_a_broken_environment_is_created_again(machine: Machine, fault: str) -> None:
    machine.fake_installer(machine.bin / "python3.12")
    assert ensure(machine).returncode == 0
    if fault == "killed":
        (machine.clone / ".venv/.installing").touch()
    elif fault == "interpreter gone":
        (machine.clone / ".venv/bin/python").unlink()
        (machine.clone / ".venv/bin/python").symlink_to("/no/such/python")
    else:
        machine.clone = machine.clone.rename(machine.clone.with_name("moved clone"))
    done = ensure(machine)
    assert done.returncode == 0, done.stderr
    assert "creating .venv with" in done.stderr
    assert [line.split()[0] for line in machine.installs()] == ["venv", "pip"] * 2


def test_hooks_and_ci_run_the_same_commands() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert [line.split()[-1] for line in hooks.splitlines() if "entry:" in line] == ["scripts/lint", "scripts/test"]
    assert "repo: https" not in hooks
    ci = (ROOT / ".ci/run").read_text(encoding="utf-8")
    commands = ('scripts/test" </dev/null', "$scripts/docs", 'scripts/test" --integrations', "$scripts/torture")
    assert sorted(commands, key=ci.index) == list(commands)
    assert "\nscripts/lint" in (ROOT / "scripts/test").read_text(encoding="utf-8")
    for script in (
        ".ci/run",
        "scripts/test",
        "scripts/lint",
        "scripts/demo",
        "scripts/docs",
        "scripts/compare-releases",
        "scripts/bench",
        "scripts/gpu-check",
    ):
        assert os.access(ROOT / script, os.X_OK), script


def test_ci_lets_pip_compile_nothing_and_downloads_beside_the_tests(machine: Machine) -> None:
    (machine.clone / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", machine.clone / ".ci/run")
    for tool in ("grep", "mktemp", "sleep"):
        (machine.bin / tool).symlink_to(shutil.which(tool) or tool)
    said = '${PIP_NO_COMPILE:-compiles} ${PYTHONDONTWRITEBYTECODE:-keeps} ${PYTHONPYCACHEPREFIX##*/}" >>"$PIP_LOG"'
    for name in ("test", "docs", "torture"):
        machine.fake(machine.clone / "scripts" / name, f'echo "{name} $* {said}')
    # The download ends once the tests have begun.
    wait = 'n=0; until grep "^test" "$PIP_LOG"; do n=$((n + 1)); [ $n -lt 300 ] || exit 1; sleep 0.1; done'
    waits = f'echo "{said}; case "$*" in *--target*) {wait} ;; esac'
    machine.fake_installer(machine.bin / "python3.12", waits)
    done = machine.run(shlex.quote(str(machine.clone / ".ci/run")), PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 0, done.stderr
    assert "downloading XLA's compiler for NVIDIA cards" in done.stderr
    assert "skipped" not in done.stderr
    log = [line for line in machine.installs() if not line.startswith(("pip", "venv"))]
    assert log[0] == "1 keeps bytecode"
    assert sorted(log[1:]) == sorted(
        f"{each}compiles keeps bytecode"
        for each in ("", "test  ", "docs  ", "test --integrations ", "torture --minutes 1 --seed 1 ")
    )


@needs_onednn
def test_an_instruction_set_that_the_tests_pretend_is_the_newest_that_onednn_uses() -> None:
    """Later ones include earlier ones, and below AVX-512 the library is refused."""
    table = (ROOT / "scripts/test").read_text(encoding="utf-8").partition("instruction_sets='")[2].partition("'")[0]
    names = [line.split()[1] for line in table.splitlines()]
    assert names == ["AVX512_CORE_AMX", "AVX512_CORE_BF16", "AVX512_CORE", "AVX2", "SSE41"]
    expected = [[isa for isa in Isa if isa <= most and load_library().has(isa)] for most in reversed(Isa)] + [[], []]
    show = """
from loopfeed.models.kernels.onednn.library import Isa, load_library
try:
    print([isa for isa in Isa if load_library().has(isa)])
except RuntimeError as error:
    assert "no AVX-512" in str(error)
    print([])
"""
    for name, isas in list(zip(names, expected, strict=True))[1:4]:
        environment = os.environ | {"ONEDNN_MAX_CPU_ISA": name}
        found = subprocess.run(
            [sys.executable, "-c", show], env=environment, capture_output=True, text=True, timeout=60
        )
        assert (found.stdout.strip(), found.stderr) == (str(isas), ""), name


def test_the_compiler_for_cards_is_brought_once_and_can_be_done_without(machine: Machine) -> None:
    venv = machine.clone / ".venv"
    target = "--target " + str(venv / "card-compiler")
    make = f"{shutil.which('mkdir')} -p {shlex.quote(str(venv / 'card-compiler'))}"
    machine.fake_installer(venv / "bin/python", make)
    for _ in range(2):
        assert machine.sourced('ensure_card_compiler "$root/.venv"').returncode == 0
    (install,) = machine.installs()
    assert target in install
    assert f"jax-cuda13-pjrt=={version('jaxlib')} jax-cuda13-plugin=={version('jaxlib')}" in install
    machine.fake_installer(venv / "bin/python", "exit 1")
    (venv / f"card-compiler/.installed-{version('jaxlib')}").unlink()
    done = machine.sourced('ensure_card_compiler "$root/.venv"; echo goes on')
    assert (done.returncode, done.stdout) == (0, "goes on\n")
    assert "the tests that compile for a card are skipped; see" in done.stderr


def test_a_gpu_check_by_a_python_that_is_not_there_or_too_old_says_so(machine: Machine) -> None:
    script = f"{shlex.quote(str(machine.clone))}/scripts/gpu-check"
    remedy = "set another one: PYTHON=/path/to/python scripts/gpu-check\n"
    done = machine.run(script)
    assert (done.returncode, done.stderr) == (2, f"scripts/gpu-check: there is no python3; {remedy}")
    machine.fake_version(machine.bin / "python3", "3.11.2")
    done = machine.run(script)
    assert (done.returncode, done.stderr) == (2, f"scripts/gpu-check: python3 must be Python 3.12 or later; {remedy}")
