"""What can go wrong with the files of a run folder while a run writes them, told with the file and the remedy."""

import errno
import os
from pathlib import Path
from typing import Self

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_PERMISSION = {errno.EACCES, errno.EPERM, errno.EROFS}


def name_file(error: OSError, path: Path) -> None:
    """Name the file in an error of writing it, as the system does not for a file that is open, and note the remedy."""
    error.filename = os.fspath(path)
    if error.filename2 is not None:
        del error.filename2  # None would be shown as a second name
    if error.errno in _NO_ROOM:
        remedy = "make room on its disk"
    elif error.errno in _NO_PERMISSION:
        remedy = "grant write permission"
    else:
        remedy = "see to its folder and its disk"
    error.add_note(f"{path} cannot be written: {remedy}")


class LostFileError(OSError):
    """What a run writes to is no longer the file of that name: somebody removed or replaced it in mid-run."""

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return the error of a file."""
        return cls(errno.ENOENT, "it was removed or replaced", os.fspath(path))

    def __str__(self) -> str:
        path = Path(self.filename)
        return (
            f"the run folder {path.parent} must stay as it is while its run is going, and {path.name} "
            "was removed or replaced: the record of the run is incomplete, and the run ends here; begin another "
            "(--run-dir), from the weights that this one leaves if they suit you (--init-from)"
        )


def unreadable_words(error: BaseException) -> str:
    """Return in words why a JSON record cannot be read, without the names of Python's exceptions."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, KeyError):
        return f"it has no {error}"
    return " ".join(str(error).split()) or "it is of another form"
