"""Errors that occur when a run writes its files; each message gives the file and the remedy."""

import errno
import os
from pathlib import Path
from typing import Self

from loopfeed.preprocess.system_errors import remedy_of, system_reason


def name_file(error: OSError, path: Path) -> None:
    """Add the path to a write error, because the system omits it if the file is already open, and a note.

    The note gives the reason and the remedy.
    """
    error.filename = os.fspath(path)
    if error.filename2 is not None:
        del error.filename2  # None would be shown as a second name
    error.add_note(f"{path} cannot be written ({system_reason(error) or error}): {remedy_of(error)}")


class LostFileError(OSError):
    """Raised if a file that a run writes to was removed or replaced during the run."""

    @classmethod
    def of(cls, path: Path) -> Self:
        """Create the error for the file at `path`."""
        return cls(errno.ENOENT, "it was removed or replaced", os.fspath(path))

    def __str__(self) -> str:
        path = Path(self.filename)
        return (
            f"{path.name} was removed or replaced in the run folder {path.parent} during the run. The record of the "
            "run is incomplete, so the run stops: start another run (--run-dir), optionally from the weights of this "
            "one (--init-from)"
        )


def describe_unreadable(error: BaseException) -> str:
    """Return the reason why a JSON record cannot be read, without the names of Python exceptions."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, KeyError):
        return f"it has no {error}"
    return " ".join(str(error).split()) or "it has another form"
