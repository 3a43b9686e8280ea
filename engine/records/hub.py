"""Weights from the Hugging Face hub, by its own library: its cache, tokens, mirror and offline mode.

Owns the form of a name, `hf-hub:OWNER/NAME@REVISION`, which files are taken, and what each failure says. Must not know
what is in the files.
"""

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from loopfeed.engine.owners import HUB
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.workers import Worker

EXAMPLE = f"{HUB}timm/resnet18.a1_in1k"
WEIGHTS_NAMES = ("model.safetensors", "pytorch_model.bin")
"""The names of a weights file in a repository, the first of which is taken."""
_CONFIG = "config.json"
_DOWNLOAD_LIMIT_S = 1800.0
"""Time limit for all files of a repository; the library gives up a server that sends nothing within ten seconds."""
_SHA256, _GIT = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{40}")
_YES = ("1", "ON", "YES", "TRUE")


class HubError(ValueError):
    """The hub, or what is in the cache of it, does not have the weights."""


class HubFiles(NamedTuple):
    """Files of one commit of a repository, in the cache of the hub's library.

    Attributes:
        weights: the weights file.
        config: `config.json`, None if the repository has none or, offline, the cache.
        commit: the commit, 40 hexadecimal digits.
    """

    weights: Path
    config: Path | None
    commit: str


def is_hub_name(location: str) -> bool:
    """Return whether a location names a repository of the hub."""
    return location.startswith(HUB)


def fetch(location: str, revision: str | None = None) -> HubFiles:
    """Return the files of a repository, which are downloaded if the cache lacks them.

    Args:
        location: as in `EXAMPLE`, with the branch, tag or commit behind an @, else that of the branch main.
        revision: the commit to take if the location has no revision.

    Raises:
        HubError: the library is not installed, or the repository, the revision or a file cannot be had.
    """
    repository, _, given = location.removeprefix(HUB).partition("@")
    try:
        import huggingface_hub as _  # noqa: F401
    except ImportError:
        raise HubError(
            f"{printable(location)} needs the library of the Hugging Face hub, which is not installed: pip install "
            "'loopfeed[hub]', or download the file and give its path"
        ) from None
    work = Worker(partial(_fetch, location, repository, given or revision or "main"), "hub")
    try:
        return work.start().result(_DOWNLOAD_LIMIT_S)
    except TimeoutError:
        if work.failure is not None:
            raise
        raise HubError(
            f"{printable(location)} was not downloaded within {_DOWNLOAD_LIMIT_S:g} s: try again, as what was "
            f"downloaded is kept, or download it with: hf download {printable(repository)}"
        ) from None


def _fetch(location: str, repository: str, revision: str) -> HubFiles:
    weights = next(filter(None, (_file(location, repository, name, revision) for name in WEIGHTS_NAMES)), None)
    if weights is None:
        raise HubError(
            f"{printable(location)} must have {' or '.join(WEIGHTS_NAMES)}, but has neither: choose another one"
        )
    commit = weights.parent.name
    return HubFiles(weights, _file(location, repository, _CONFIG, commit), commit)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Keep the hub's library from warning of each try that failed: the error that follows says it once."""
    # A filter of this call alone, because another thread may download too, and end earlier or later.
    is_shown: Callable[[logging.LogRecord], bool] = lambda record: record.levelno >= logging.ERROR  # noqa: E731
    handlers = [*logging.getLogger("huggingface_hub").handlers]
    for handler in handlers:
        handler.addFilter(is_shown)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_shown)


def _file(location: str, repository: str, name: str, revision: str) -> Path | None:
    """Return a file of a repository, None if it has no such file."""
    from huggingface_hub import _CACHED_NO_EXIST, errors, hf_hub_download, try_to_load_from_cache

    is_offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in _YES
    where, server = printable(location), os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    cache = os.environ.get("HF_HUB_CACHE")
    try:
        with _without_warnings():
            path = hf_hub_download(
                repository,
                name,
                revision=revision,
                endpoint=server,
                cache_dir=cache,
                local_files_only=is_offline,
            )
    except errors.GatedRepoError:
        raise HubError(
            f"{where} is gated: accept its terms at {server}/{repository}, and give your token in $HF_TOKEN or with: "
            "hf auth login"
        ) from None
    except errors.RepositoryNotFoundError:
        raise HubError(
            f"{where} must be a repository that {server} shows you, but there is none: check its name, such as "
            f"{EXAMPLE}; a private one needs your token in $HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise HubError(f"{where} has no revision {printable(revision)}: give a branch, a tag or a commit") from None
    except errors.LocalEntryNotFoundError as error:
        # That the commit has no such file is in the cache, too.
        is_absent = try_to_load_from_cache(repository, name, cache, revision) is _CACHED_NO_EXIST
        if is_absent or (is_offline and name != WEIGHTS_NAMES[-1]):
            return None
        why = "$HF_HUB_OFFLINE is set" if is_offline else f"{server} cannot be reached ({_cause_of(error)})"
        raise HubError(
            f"{where} is not in the cache, and {why}: download it where there is a network (hf download {repository}), "
            "or give the path of a file"
        ) from None
    except errors.EntryNotFoundError:
        return None
    except errors.HFValidationError:
        raise HubError(f"{where} must be {HUB}OWNER/NAME, with @REVISION if wanted, such as {EXAMPLE}") from None
    # Whatever else the library, or one that it uses, raises: of its many classes, few have a common base.
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise HubError(
                f"{where} could not be kept in the cache ({error.strerror}: {printable(str(error.filename))}): set "
                "$HF_HUB_CACHE to a folder that you may write"
            ) from error
        raise HubError(
            f"{where} could not be downloaded from {server} ({_cause_of(error)}): try again later, or download it "
            f"with: hf download {repository}"
        ) from error
    _check_content(Path(path), where)
    return Path(path)


def _cause_of(error: BaseException) -> str:
    """Return a short reason of a failed download."""
    while error.__cause__ is not None:
        error = error.__cause__
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return f"status {status}"
    return printable((str(error).splitlines() or [""])[0][:200]) or type(error).__name__


def _check_content(path: Path, where: str) -> None:
    """Raise HubError if a file in the cache is not what its name, the hub's digest of its content, says."""
    if not path.is_symlink():
        return  # the library copied it, on a file system without links
    expected = path.readlink().name
    with path.open("rb") as file:
        if _SHA256.fullmatch(expected):
            found = hashlib.file_digest(file, "sha256").hexdigest()
        elif _GIT.fullmatch(expected):
            content = file.read()
            found = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        else:
            return
    if found != expected:
        raise HubError(
            f"{path.name} of {where} is damaged (its digest must be {expected[:12]}, but is {found[:12]}): remove "
            f"{path.parent / path.readlink()} and try again"
        )
