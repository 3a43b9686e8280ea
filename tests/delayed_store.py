"""A read-only S3 server of a folder that answers each request after a delay, as a distant store does.

    python -m tests.delayed_store FOLDER DELAY_MS

Prints its port, and ends with its input. It knows what TensorStore asks for: objects, byte ranges and listings. The
first part of a path is the bucket and is ignored. Requests need no signature. For benchmarks and tests only.
"""

import asyncio
import re
import sys
import threading
import urllib.parse
from concurrent.futures import Future
from pathlib import Path
from typing import Self
from xml.sax.saxutils import escape

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_MOST_HEAD_BYTES = 1 << 16


class DelayedStore:
    """A server on a free port of this machine, on a thread of its own; as a context manager, it stops itself on exit.

    Args:
        folder: the folder that it serves.
        delay_s: how long it waits before it answers a request.

    Attributes:
        folder: as given.
        endpoint: the address of the server.
        requests: the key and the byte range of each request for an object so far, in order.
        num_signed: number of requests so far that were signed with someone's keys.
        delay_s: as given; may be changed.
    """

    def __init__(self, folder: Path, delay_s: float = 0.0) -> None:
        self.folder, self.delay_s = folder, delay_s
        self.requests: list[tuple[str, str]] = []
        self.num_signed = 0
        self.endpoint = ""
        self._port: Future[int] = Future()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="delayed-store", daemon=True)

    @property
    def port(self) -> int:
        """The port of the server."""
        return self._port.result(timeout=30)

    def __enter__(self) -> Self:
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_MOST_HEAD_BYTES)
        )
        self._port.set_result(int(server.sockets[0].getsockname()[1]))
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                await asyncio.sleep(self.delay_s)
                await self._answer(head, writer)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, head: str, writer: asyncio.StreamWriter) -> None:
        lines = head.split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        self.num_signed += "authorization" in headers
        method, target, _ = lines[0].split(" ")
        address = urllib.parse.urlsplit(target)
        query = urllib.parse.parse_qs(address.query)
        key = urllib.parse.unquote(address.path).lstrip("/").partition("/")[2]
        if "list-type" in query:
            await _send(writer, "200 OK", self._listing(query.get("prefix", [""])[0]))
            return
        given = headers.get("range", "")
        self.requests.append((key, given))
        try:
            file = (self.folder / key).open("rb")
        except OSError:
            await _send(writer, "404 Not Found", b"<Error><Code>NoSuchKey</Code></Error>")
            return
        with file:
            size = file.seek(0, 2)
            start, stop = _bounds(given, size)
            if start >= stop and size:
                await _send(writer, "416 Range Not Satisfiable", b"")
                return
            status = "206 Partial Content" if given else "200 OK"
            writer.write(
                f'HTTP/1.1 {status}\r\nETag: "{size}"\r\nContent-Length: {stop - start}\r\n'
                f"Content-Range: bytes {start}-{stop - 1}/{size}\r\n\r\n".encode()
            )
            await writer.drain()
            if method == "GET" and stop > start:
                await self._loop.sendfile(writer.transport, file, start, stop - start)

    def _listing(self, prefix: str) -> bytes:
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
        keys = [path.relative_to(self.folder).as_posix() for path in paths]
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>0</Size></Contents>" for key in keys if key.startswith(prefix)
        )
        return (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult>'
            f"<KeyCount>{len(keys)}</KeyCount><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"
        ).encode()


def _bounds(given: str, size: int) -> tuple[int, int]:
    """Return the start and the stop of a range header in a file of `size` bytes."""
    found = _RANGE.fullmatch(given)
    if found is None:
        return 0, size
    first, last = found.groups()
    if not first:
        return max(0, size - int(last)), size
    return int(first), min(size, int(last) + 1) if last else size


async def _send(writer: asyncio.StreamWriter, status: str, content: bytes) -> None:
    writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
    await writer.drain()


if __name__ == "__main__":
    with DelayedStore(Path(sys.argv[1]), float(sys.argv[2]) / 1e3) as store:
        print(store.port, flush=True)
        sys.stdin.read()
