"""The team of threads that runs oneDNN's primitives: in C and in Python it gives the same bits, from any thread."""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from loopfeed.models.kernels.onednn import team_library
from loopfeed.models.kernels.onednn.library import DISTRIBUTION, MissingKernelsError, load_library

try:
    load_library()
except MissingKernelsError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.kernels

ROOT = Path(__file__).parents[1]

# Every program is compiled once, without LLVM's optimiser: the kernels are what is compared.
DIGESTS = """
import functools, hashlib, json, threading
import jax, jax.numpy as jnp
from loopfeed.models.kernels.choice import using_kernels
from loopfeed.models.kernels.onednn import handler
from loopfeed.models.kernels.onednn.operations import prepare
from loopfeed.models.layers.convolution import convolution

@functools.cache
def step(dtype, kernel, stride, groups):
    def loss(x, w):
        return jnp.sum(jnp.square(convolution(x, w, stride=stride, groups=groups)).astype(jnp.float32))
    return jax.jit(jax.value_and_grad(loss, (0, 1)))

def digest(dtype, seed, kernel, stride, groups):
    keys = jax.random.split(jax.random.key(seed), 2)
    x = jax.random.normal(keys[0], (29, 9, 7, 8)).astype(dtype)
    w = jax.random.normal(keys[1], (kernel, kernel, 8 // groups, 24)).astype(dtype)
    with using_kernels("onednn"):
        value, gradients = step(dtype, kernel, stride, groups)(x, w)
    return hashlib.sha256(b"".join(bytes(memoryview(jnp.asarray(each, jnp.float32))) for each in gradients)).hexdigest()

SHAPES = (3, 1, 1), (5, 2, 1), (3, 1, 8), (1, 1, 2)
CASES = [(dtype, 0, *shape) for dtype in ("float32", "bfloat16") for shape in SHAPES]
alone = [digest(*case) for case in CASES]
found = {}
threads = [
    threading.Thread(target=lambda case=case, number=number: found.setdefault(number, digest(*case)))
    for number, case in enumerate(CASES)
]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert [found[number] for number in range(len(CASES))] == alone
print(json.dumps([type(handler.register(prepare)).__name__, *alone]))
"""


def digests(tmp_path: Path, **environment: str) -> list[str]:
    given = os.environ | {"XDG_CACHE_HOME": str(tmp_path), **environment}
    done = subprocess.run(
        [sys.executable, "-c", DIGESTS], cwd=ROOT, env=given, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.integration
def test_the_handlers_in_c_and_python_give_the_same_bits(tmp_path):
    in_python, *expected = digests(tmp_path / "none", PATH="/nowhere")
    assert in_python == "PythonHandler"
    assert not (tmp_path / "none").exists()
    in_c, *found = digests(tmp_path / "built")
    assert in_c == "CompiledHandler"
    assert found == expected
    assert len(set(found)) == len(found)
    assert [path.suffix for path in (tmp_path / "built").rglob("team*")] == [".so"]


def test_the_wheel_of_the_extra_is_the_one_that_is_loaded():
    assert DISTRIBUTION in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert load_library().version == "3.2.0"


def test_without_a_home_or_with_a_relative_cache_nothing_is_built_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert (team_library.load_team() is None) == (shutil.which("cc") is None)
    assert not (tmp_path / "here").exists()

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert team_library.load_team() is None


@pytest.fixture
def built(tmp_path, monkeypatch):
    """Build the library in a cache folder of the test; return its path, and a list of the commands that build it."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    commands: list[list[str]] = []
    run = subprocess.run

    def listed(words, **how):
        commands.append(words)
        return run(words, **how)

    monkeypatch.setattr(subprocess, "run", listed)
    assert team_library.load_team() is not None
    (path,) = tmp_path.rglob("team*")
    assert team_library.load_team() is not None
    assert len(commands) == 1
    return path, commands


def test_the_name_of_the_library_says_for_which_machines_it_is(built, monkeypatch):
    path, commands = built
    assert path.name.startswith(f"team-x86_64-{''.join(platform.libc_ver())}-")
    assert [word for word in commands[0] if "march" in word] == ["-march=x86-64"]
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "9.99"))
    assert team_library.load_team() is not None
    assert len(commands) == 2
    assert len(list(path.parent.glob("team-*.so"))) == 2


@pytest.mark.parametrize("is_damaged", [True, False], ids=["damaged", "of another machine"])
def test_a_library_that_cannot_be_loaded_is_built_again(built, is_damaged):
    path, commands = built
    content = path.read_bytes()
    # Not overwritten in place: this process has it mapped.
    path.unlink()
    # Half a file, whose loading is a bus error; or one of the processor 0xB7 in the head of an ELF file, AArch64.
    wrong = content[: len(content) // 2] if is_damaged else content[:18] + b"\xb7" + content[19:]
    name = path if is_damaged else path.with_name(f"{team_library._stem()}-{team_library._digest(wrong)}.so")
    name.write_bytes(wrong)
    assert team_library.load_team() is not None
    assert len(commands) == 2
    (found,) = path.parent.iterdir()
    assert (found, found.read_bytes()) == (path, content)
