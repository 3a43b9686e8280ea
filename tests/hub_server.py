"""A server on this machine that answers as the Hugging Face hub does to its own library, with faults on demand."""

import hashlib
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

REPOSITORY = "timm/resnet8.t_in1k"


@dataclass
class Hub:
    """The content of the server.

    Attributes:
        url: the address to give as HF_ENDPOINT.
        commits: the files of each commit of `REPOSITORY`, by name.
        refs: the commit of each branch and tag.
        fault: what goes wrong: a status; "gated", "private", "cut", "broken", "other", "no config" or
            "silent"; None for nothing.
        asked: the requests, (method, path, authorization).
        is_over: ends a silent answer.
    """

    url: str = ""
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    fault: int | str | None = None
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    def commit(self, files: dict[str, bytes], ref: str = "main") -> str:
        """Add a commit, and let a branch or tag name it."""
        found = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[found], self.refs[ref] = files, found
        return found


_REFUSALS = {"gated": (403, "GatedRepo"), "private": (401, "RepoNotFound")}


class _Handler(http.server.BaseHTTPRequestHandler):
    server: "_Server"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, headers: dict[str, str], content: bytes = b"") -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[: len(content) // 2] if self.server.hub.fault == "cut" else content)

    def refuse(self, status: int, code: str) -> None:
        self.answer(status, {"X-Error-Code": code})

    def do_HEAD(self) -> None:
        hub = self.server.hub
        hub.asked.append((self.command, self.path, self.headers.get("Authorization")))
        if self.path.startswith("/cdn/"):
            self.answer_blob(self.path.removeprefix("/cdn/"))
        elif type(hub.fault) is int:
            self.answer(hub.fault, {})
        elif hub.fault == "no config" and self.path.endswith("config.json"):
            self.answer(503, {})
        elif hub.fault == "broken":
            self.close_connection = True
        elif hub.fault == "silent":
            hub.is_over.wait(30)
        elif hub.fault in _REFUSALS:
            self.refuse(*_REFUSALS[str(hub.fault)])
        else:
            repository, _, rest = self.path.removeprefix("/").partition("/resolve/")
            self.answer_file(repository, *rest.split("/", 1))

    def do_GET(self) -> None:
        self.do_HEAD()

    def answer_file(self, repository: str, revision: str, name: str) -> None:
        hub = self.server.hub
        commit = hub.refs.get(revision, revision)
        if repository != REPOSITORY:
            self.refuse(401, "RepoNotFound")
        elif commit not in hub.commits:
            self.refuse(404, "RevisionNotFound")
        elif name not in hub.commits[commit]:
            self.answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        else:
            self.answer_content(hub.commits[commit][name], {"X-Repo-Commit": commit}, is_small=name.endswith(".json"))

    def answer_content(self, content: bytes, headers: dict[str, str], *, is_small: bool) -> None:
        if is_small:
            digest = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            self.answer(200, headers | {"ETag": f'"{digest}"'}, content)
            return
        digest = hashlib.sha256(content).hexdigest()
        linked = {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(content))}
        self.answer(302, headers | linked | {"Location": f"http://localhost:{self.server.server_port}/cdn/{digest}"})

    def answer_blob(self, digest: str) -> None:
        hub = self.server.hub
        blobs = (each for files in hub.commits.values() for each in files.values())
        content = next(each for each in blobs if hashlib.sha256(each).hexdigest() == digest)
        self.answer(200, {}, content[::-1] if hub.fault == "other" else content)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: Hub) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub


@contextmanager
def serving() -> Iterator[Hub]:
    """Serve a hub without commits inside the block."""
    hub = Hub()
    server = _Server(hub)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.is_over.set()
        server.shutdown()
        server.server_close()
        thread.join()
