"""The other projects that are measured: description, versions, and environment, created on demand.

An environment is a folder in `.bench/environments/`, created with pip and kept; it is created again if the table below
changes. If it cannot be installed, the table of results states the reason. `LOOPFEED_TORCH_PYTHON` names an interpreter
that has PyTorch already, in the place of that environment, as for the tests.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TORCH, TORCH_PYTHON = "torch", "LOOPFEED_TORCH_PYTHON"
_INSTALL_TIMEOUT_S = 1800.0
_CPU_TORCH = ("--extra-index-url", "https://download.pytorch.org/whl/cpu")
_TAIL_LINES = 6


class PeerError(RuntimeError):
    """A peer's environment cannot be created; the message states the reason."""


@dataclass(frozen=True)
class Peer:
    """Another project.

    Attributes:
        what: description.
        python: the minor version of Python for which the requirements are pinned.
        requirements: pinned requirements.
        options: options of pip for these.
        built: pinned requirements that are built afterwards, without their dependencies.
        libraries: libraries needed for building, by their pkg-config names, with the Debian package of each.
    """

    what: str
    python: str
    requirements: tuple[str, ...]
    options: tuple[str, ...] = ()
    built: tuple[str, ...] = ()
    libraries: tuple[tuple[str, str], ...] = ()


PEERS = {
    TORCH: Peer(
        what="PyTorch on oneDNN: eager, channels_last, torch.compile; torch.utils.data.DataLoader",
        python="3.11",
        requirements=("torch==2.13.0", "numpy==2.4.6", "pillow==12.0.0", "setuptools==80.9.0"),
        options=_CPU_TORCH,
    ),
    "ffcv": Peer(
        what="FFCV: a loader of fixed-size records, compiled by Numba",
        python="3.11",
        requirements=(
            "torch==2.13.0",
            "numpy==2.2.6",
            "numba==0.61.2",
            "pillow==12.0.0",
            "opencv-python-headless==4.11.0.86",
            "pandas==2.3.3",
            "psutil==7.1.3",
            "terminaltables==3.1.10",
            "fastargs==1.2.0",
            "tqdm==4.67.1",
            "assertpy==1.1",
            "setuptools==80.9.0",
            "wheel==0.45.1",
        ),
        options=_CPU_TORCH,
        built=("ffcv==1.0.2",),
        libraries=(("opencv4", "libopencv-dev"), ("libturbojpeg", "libturbojpeg0-dev")),
    ),
    "grain": Peer(
        what="Grain: Google's deterministic loader for JAX, over ArrayRecord files",
        python="3.12",
        requirements=("grain==0.2.18", "array-record==0.8.3", "numpy==2.3.5"),
    ),
    "webdataset": Peer(
        what="WebDataset: tar shards read in sequence, shuffled through a buffer",
        python="3.11",
        requirements=("webdataset==1.0.2", "torch==2.13.0", "numpy==2.4.6"),
        options=_CPU_TORCH,
    ),
    "containers": Peer(
        what="webdataset and Hugging Face's datasets, with Pillow's decoding, in PyTorch's DataLoader",
        python="3.12",
        requirements=("webdataset==1.0.2", "datasets==5.2.0", "torch==2.13.0", "numpy==2.4.6", "pillow==12.0.0"),
        options=_CPU_TORCH,
    ),
    "tensorflow": Peer(
        what="tf.data over TFRecord files of raw pixels",
        python="3.12",
        requirements=("tensorflow-cpu==2.20.0",),
    ),
}


def ensure_peer(name: str, folder: Path, *, say: Callable[[str], None]) -> Path:
    """Create the environment of a peer if it does not exist, and return its Python.

    Raises:
        PeerError: there is no such Python, a library needed for building is missing, or pip fails.
    """
    if name == TORCH and (given := os.environ.get(TORCH_PYTHON)):
        if shutil.which(given) is None:
            raise PeerError(f"{TORCH_PYTHON} must name a Python that has torch, got {given!r}, which cannot be run")
        return Path(given)
    peer, home = PEERS[name], folder / "environments" / name
    python, stamp, log = home / "bin" / "python", home / "installed.txt", home.with_name(f"{name}.log")
    wanted = "\n".join((peer.python, *peer.options, *peer.requirements, *peer.built, ""))
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    _check_libraries(name, peer)
    base = find_python(peer.python)
    say(f"creating {home} with {base}: {', '.join((*peer.requirements, *peer.built))}")
    shutil.rmtree(home, ignore_errors=True)
    home.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    pip = (str(python), "-m", "pip", "install", "--disable-pip-version-check", "--retries", "1")
    commands = [(base, "-m", "venv", str(home)), (*pip, *peer.options, *peer.requirements)]
    commands += [(*pip, "--no-build-isolation", "--no-deps", requirement) for requirement in peer.built]
    for command in commands:
        _call(command, name, log)
    stamp.write_text(wanted, encoding="utf-8")
    return python


def _check_libraries(name: str, peer: Peer) -> None:
    for library, _ in peer.libraries:
        if not _succeeds("pkg-config", "--exists", library):
            raise PeerError(
                f"{name} is built with {library}, which pkg-config does not find; on Debian or Ubuntu: "
                f"apt install g++ pkg-config {' '.join(package for _, package in peer.libraries)}"
            )


def _call(command: Sequence[str], name: str, log: Path) -> None:
    # The user's own Python settings must not affect the environment.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    with log.open("ab") as file:
        output: Any = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
        try:
            code = subprocess.run(command, **output, env=environment, timeout=_INSTALL_TIMEOUT_S).returncode
        except subprocess.TimeoutExpired:
            raise PeerError(f"{name} was not installed within {_INSTALL_TIMEOUT_S:g} s; see {log}") from None
    if code:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        tail = "".join(f"\n    {line}" for line in lines)
        raise PeerError(f"{name} could not be installed (exit code {code}); {log} ends with:{tail}")


def find_python(minor: str) -> str:
    """Return the interpreter of a version such as "3.11" from the PATH, pyenv or uv.

    Raises:
        PeerError: there is none.
    """
    check = f"import sys; sys.exit(sys.version_info[:2] != ({minor.replace('.', ', ')}))"
    found = [getattr(sys, "_base_executable", sys.executable), shutil.which(f"python{minor}")]
    for home, pattern in (
        (Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv"), f"versions/{minor}.*/bin/python"),
        (Path.home(), f".local/share/uv/python/cpython-{minor}.*/bin/python{minor}"),
    ):
        found += map(str, sorted(home.glob(pattern)))
    for python in filter(None, found):
        if _succeeds(python, "-c", check):
            return python
    raise PeerError(f"no Python {minor} found; run uv python install {minor}, or pyenv install {minor}")


def _succeeds(*command: str) -> bool:
    """Return whether a command can be run and exits with 0."""
    try:
        return subprocess.run(command, capture_output=True, timeout=30).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
