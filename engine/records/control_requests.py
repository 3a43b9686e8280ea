"""Requests to a run in progress: files that another process writes to `RUN/control/`, where the run reads them.

Owns the files and the thread that polls for them. Must not know: the control word, when a request takes effect, jax.
"""

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from loopfeed.engine.control.request import ControlRequest, check_request_id
from loopfeed.engine.records.whole_file import write_whole
from loopfeed.preprocess.regular_file import check_unlinked
from loopfeed.preprocess.workers import Worker

CONTROL_FOLDER_NAME = "control"

_SUFFIX = ".json"
_POLL_EVERY_S = 0.25
_CLOSE_TIMEOUT_S = 2.0
_LONGEST_REQUEST_BYTES = 4096


def send_request(run: Path, request: ControlRequest) -> None:
    """Write a request file atomically for the process that is training in the run folder.

    Raises:
        OSError: if it cannot be written; LinkedPathError if the folder of requests is a link.
    """
    folder = run / CONTROL_FOLDER_NAME
    check_unlinked(run, folder)
    folder.mkdir(exist_ok=True)
    path, content = _path_of(folder, request.id), (request.to_json() + "\n").encode()
    try:
        write_whole(path, content)
    except FileNotFoundError:
        # A run that has just locked its folder removes earlier requests, including unfinished ones.
        write_whole(path, content)


def withdraw(run: Path, request_id: str) -> bool:
    """Remove a pending request, so that it never takes effect.

    Returns:
        True if it was still pending, so that it will never take effect; False if it was already claimed, or does not
        exist.

    Raises:
        OSError: if it cannot be removed.
    """
    check_request_id(request_id)
    check_unlinked(run, run / CONTROL_FOLDER_NAME)
    try:
        _path_of(run / CONTROL_FOLDER_NAME, request_id).unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _path_of(folder: Path, request_id: str) -> Path:
    return folder / f"{request_id}{_SUFFIX}"


def find_requests(run: Path) -> list[str]:
    """Return the names of the pending requests in a run folder, unfinished ones too; disk errors are ignored."""
    folder = run / CONTROL_FOLDER_NAME
    with suppress(OSError):
        check_unlinked(run, folder)
        return _names(folder, with_unfinished=True)
    return []


def remove_requests(run: Path, names: Iterable[str]) -> None:
    """Remove requests that `find_requests` found just before the folder was locked; disk errors are ignored.

    The senders of these requests no longer wait. Requests that arrive later are for the process that holds the lock,
    from the instant it has it and even before it polls: `control-run` sends as soon as the folder is locked.
    """
    folder = run / CONTROL_FOLDER_NAME
    with suppress(OSError):
        check_unlinked(run, folder)
        for name in names:
            with suppress(OSError):
                (folder / name).unlink()


def _names(folder: Path, *, with_unfinished: bool = False) -> list[str]:
    """Return the names of the request files, oldest first, optionally followed by `write_whole`'s temporary files."""
    names = [path.name for path in folder.iterdir()]
    finished = [name for name in names if name.endswith(_SUFFIX)]
    unfinished = [name for name in names if name.startswith(".") and f"{_SUFFIX}." in name]
    return sorted(finished) + (unfinished if with_unfinished else [])


class ControlMailbox:
    """A thread that polls a run folder for requests and delivers each request once, oldest first.

    A request is claimed by removing its file, which happens before it is delivered; so `withdraw` knows for certain
    whether a request will take effect. A file that is not a request is removed. If the disk fails, no requests arrive.

    Args:
        run: the run folder.
        deliver: called with each request on the mailbox's thread; must not block. Its exceptions are dropped.
    """

    def __init__(self, run: Path, deliver: Callable[[ControlRequest], None]) -> None:
        self._run, self._folder, self._deliver = run, run / CONTROL_FOLDER_NAME, deliver
        self._closing = threading.Event()
        self._worker = Worker(self._work, "control-mailbox")

    def start(self) -> None:
        """Start polling; call this once."""
        self._worker.start(is_attended=False)

    def close(self) -> None:
        """Stop polling, and wait at most two seconds for the thread to end, because the disk may hang."""
        self._closing.set()
        self._worker.wait(_CLOSE_TIMEOUT_S)

    def _work(self) -> None:
        while not self._closing.is_set():
            # A failed request must not stop the training; its sender watches the log and reports the failure.
            with suppress(Exception):
                self._poll()
            self._closing.wait(_POLL_EVERY_S)

    def _poll(self) -> None:
        check_unlinked(self._run, self._folder)
        try:
            names = _names(self._folder)
        except FileNotFoundError:
            return  # no request has been sent yet
        for name in names:
            if self._closing.is_set():
                return
            # A request that fails must not block the others.
            with suppress(Exception):
                request = self._claim(name)
                if request is not None:
                    self._deliver(request)

    def _claim(self, name: str) -> ControlRequest | None:
        """Read and remove a request file; return the request, or None if it is invalid or was withdrawn meanwhile."""
        path = self._folder / name
        # Does not block if the file is a pipe.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            content = file.read(_LONGEST_REQUEST_BYTES + 1) or b""
        try:
            path.unlink()
        except FileNotFoundError:
            return None
        try:
            request = ControlRequest.from_json(content if len(content) <= _LONGEST_REQUEST_BYTES else b"")
        except ValueError:
            return None
        return request if _path_of(self._folder, request.id) == path else None
