"""A process that has imported the project and forks for each requested command, so that starting one costs no imports.

`python -m scripts.torture_campaign.command_server packing|training` reads one JSON request per line on stdin, and
answers with the process id of the command, then with its exit status. It never starts a thread, a jax backend or
TensorStore before a fork. Each command has its own process group and memory limits, and dies with this process.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
from importlib.metadata import distribution
from typing import Any

PRELOADED = {
    "packing": (
        "loopfeed.preprocess.commands.cli",
        "loopfeed.preprocess.commands.inspect_cli",
        "loopfeed.preprocess.packing.pack",
        "loopfeed.preprocess.sources.open_source",
        "loopfeed.preprocess.shards.verify",
        "loopfeed.preprocess.commands.progress",
        "loopfeed.engine.commands.control_cli",
        "scripts.torture_campaign.image_reference",
        "scripts.torture_campaign.pack_reader",
    ),
    "training": (
        "loopfeed.preprocess.shards.reader",
        "jax.numpy",
        "optax",
        "orbax.checkpoint",
        "safetensors.numpy",
        "loopfeed.engine.run.train",
        "loopfeed.engine.evaluation.run",
        "loopfeed.engine.replay.replay",
        "loopfeed.engine.commands.cli",
        "loopfeed.engine.commands.eval_cli",
        "loopfeed.engine.commands.verify_cli",
        "loopfeed.engine.commands.tail_cli",
        "loopfeed.engine.commands.list_cli",
        "loopfeed.engine.commands.control_cli",
        "loopfeed.engine.records.orbax_store",
        "loopfeed.engine.run.resume",
    ),
}
COMMANDS = {place.name: place.module for place in distribution("loopfeed").entry_points} | {
    "read-pack": "scripts.torture_campaign.pack_reader",
    "decode-images": "scripts.torture_campaign.image_reference",
}
DATA_LIMIT_BYTES = 3 << 30
FILE_LIMIT_BYTES = 4 << 30
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve requests until stdin ends; in a child, run the command."""
    _die_with_parent()
    for name in PRELOADED[sys.argv[1]]:
        importlib.import_module(name)
    _reply({"ready": True})
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _run_command(request)
            return
        _reply({"pid": pid})
        _, status, usage = os.wait4(pid, 0)
        _reply({"status": os.waitstatus_to_exitcode(status), "max_rss_kib": usage.ru_maxrss})


def _run_command(request: dict[str, Any]) -> None:
    """Run the command of a request, one of `COMMANDS` or a module with a ``main``, as its entry point does."""
    os.setsid()
    _die_with_parent()
    for target, name, flags in ((0, os.devnull, os.O_RDONLY), (1, "stdout", _WRITE), (2, "stderr", _WRITE)):
        opened = os.open(request.get(name, name), flags, 0o644)
        os.dup2(opened, target)
        os.close(opened)
    resource.setrlimit(resource.RLIMIT_DATA, (DATA_LIMIT_BYTES, DATA_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT_BYTES, FILE_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(request["cwd"])
    if orders := request.get("environment"):
        os.environ.update(orders)
        ctypes.CDLL(None).torture_arm()  # of the shim, which read the environment when this server started
    command, *arguments = request["command"]
    sys.argv = [command, *arguments]
    sys.exit(importlib.import_module(COMMANDS.get(command, command)).main())


_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


def _die_with_parent() -> None:
    """On Linux, have the kernel kill this process when its parent is gone; elsewhere do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _reply(document: dict[str, Any]) -> None:
    os.write(1, (json.dumps(document) + "\n").encode())


if __name__ == "__main__":
    main()
