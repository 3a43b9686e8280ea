"""Runs Loopfeed's commands as a user does, each in a process of its own that finds the server of a test.

Only their programs are compiled without LLVM's optimiser, and of smaller networks under the names of the registry,
which is faster.
"""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[1]


def environment_of(folder, server):
    """Return the environment of a command; without a server, it finds none."""
    found = {} if server is None else server.environment
    return os.environ | found | {"HOME": str(folder), "PYTHONPATH": str(ROOT)}


def start(folder, server, *arguments, is_small=True):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, function = project["scripts"][arguments[0]].partition(":")
    program = f"import sys; from {module} import {function} as main; sys.argv[0] = {arguments[0]!r}\n"
    if is_small and arguments[0] in {"run-train", "run-eval"}:
        program += "from tests.small_resnets import small_resnets\nwith small_resnets(): main()"
    else:
        program += "main()"
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments[1:])],
        cwd=folder,
        env=environment_of(folder, server),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def command(folder, server, *arguments, code=0, **how):
    process = start(folder, server, *arguments, **how)
    out, err = process.communicate(timeout=600)
    assert process.returncode == code, out + err
    return out + err


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "loss.jsonl").read_text(encoding="utf-8").splitlines()]


def same_weights(left, right):
    left, right = load_file(left), load_file(right)
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)
