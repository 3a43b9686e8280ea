"""Requests to a running training: files that one process leaves in `RUN/control/` and the running one picks up.

Owns the files and the thread that looks for them. Must not know: the control word, when a request takes effect, jax.
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from engine.control.request import ControlRequest, check_request_id
from engine.records.whole_file import write_whole

CONTROL_FOLDER_NAME = "control"

_SUFFIX = ".json"
_LOOK_EVERY_S = 0.25
_CLOSE_TIMEOUT_S = 2.0
_LONGEST_REQUEST_BYTES = 4096


def send_request(run: Path, request: ControlRequest) -> None:
    """Leaves a request for the process that works in the run folder; it is there whole or not at all.

    Raises:
        OSError: where it cannot be written.
    """
    folder = run / CONTROL_FOLDER_NAME
    folder.mkdir(exist_ok=True)
    write_whole(_path_of(folder, request.id), (request.to_json() + "\n").encode())


def withdraw(run: Path, request_id: str) -> bool:
    """Takes a request back.

    Returns:
        True where it was there still, and so will never be taken up; False where it was taken up already, or there
        was none.

    Raises:
        OSError: where it cannot be removed.
    """
    check_request_id(request_id)
    try:
        _path_of(run / CONTROL_FOLDER_NAME, request_id).unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _path_of(folder: Path, request_id: str) -> Path:
    return folder / f"{request_id}{_SUFFIX}"


def remove_requests(run: Path) -> None:
    """Removes the requests in a run folder, whose senders have given up; for whoever has just locked it.

    Those that come from then on are to him, even before he looks for them. Where the disk fails, they stay.
    """
    folder = run / CONTROL_FOLDER_NAME
    with suppress(OSError):
        for name in _names(folder, with_unfinished=True):
            with suppress(OSError):
                (folder / name).unlink()


def _names(folder: Path, *, with_unfinished: bool = False) -> list[str]:
    """Gives the names of the files of requests, in order of time; the unfinished are those of `write_whole`."""
    names = [path.name for path in folder.iterdir()]
    finished = [name for name in names if name.endswith(_SUFFIX)]
    unfinished = [name for name in names if name.startswith(".") and f"{_SUFFIX}." in name]
    return sorted(finished) + (unfinished if with_unfinished else [])


class ControlMailbox:
    """Looks for requests in a run folder, on a thread of its own, and hands each on once, in order of time.

    A request's file is removed before it is handed on. To remove it is to claim it: whoever withdraws a request learns
    for certain whether it will take effect. What is no request is removed. Where the disk fails, no requests come.

    Args:
        run: the run folder.
        deliver: gets each request on the mailbox's thread; must not block. Whatever it raises is dropped.
    """

    def __init__(self, run: Path, deliver: Callable[[ControlRequest], None]) -> None:
        self._folder, self._deliver = run / CONTROL_FOLDER_NAME, deliver
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="control-mailbox", daemon=True)

    def start(self) -> None:
        """Begins to look; called once."""
        self._thread.start()

    def close(self) -> None:
        """Ends the looking; what is under way is waited for, not longer than two seconds (a disk may hang)."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _work(self) -> None:
        while not self._closing.is_set():
            # The training goes on, whatever becomes of a request: its sender waits for the log, and tells of it.
            with suppress(Exception):
                self._look()
            self._closing.wait(_LOOK_EVERY_S)

    def _look(self) -> None:
        try:
            names = _names(self._folder)
        except FileNotFoundError:
            return  # nobody has asked for anything yet
        for name in names:
            if self._closing.is_set():
                return
            # One that fails must not hold up the others.
            with suppress(Exception):
                request = self._claim(name)
                if request is not None:
                    self._deliver(request)

    def _claim(self, name: str) -> ControlRequest | None:
        """Reads and removes a file; None where it holds no request, or was withdrawn meanwhile."""
        path = self._folder / name
        content = _read_start(path)
        try:
            path.unlink()
        except FileNotFoundError:
            return None
        try:
            request = ControlRequest.from_json(content)
        except ValueError:
            return None
        return request if _path_of(self._folder, request.id) == path else None


def _read_start(path: Path) -> bytes:
    """Reads a file, and of one longer than any request nothing; never waits for the writer of a pipe."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        content = file.read(_LONGEST_REQUEST_BYTES + 1) or b""
    return content if len(content) <= _LONGEST_REQUEST_BYTES else b""
