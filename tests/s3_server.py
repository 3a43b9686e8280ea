"""An S3 server of its own process for tests: moto's, which keeps its buckets in memory."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress

import pytest

BUCKET = "feedloop-tests"
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}
_START_S = 60


def need_server() -> None:
    """Skip the test if the server is not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("moto", "flask")):
        pytest.skip("moto[server] is not installed; install the extra integrations")


class S3Server:
    """A server on a free port of this machine; as a context manager, it stops itself on exit."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> S3Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start the server, wait for it, and create the bucket."""
        command = [
            sys.executable,
            "-c",
            "from moto.server import main; main()",
            "-H",
            "127.0.0.1",
            "-p",
            str(self.port),
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stop = time.monotonic() + _START_S
        while True:
            assert self._process.poll() is None, "the server ended"
            with suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="PUT"), timeout=5)
                return
            assert time.monotonic() < stop, "the server does not start"
            time.sleep(0.1)

    def signal(self, number: int) -> None:
        """Send a signal to the server."""
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Stop the server for good; its buckets are lost."""
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self._process.wait()
            self._process = None
