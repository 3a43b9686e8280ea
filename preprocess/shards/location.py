"""The location of a pack: one interface to a folder in any TensorStore key-value store, local or remote.

Owns the parsing of paths and URLs, and small whole-value reads and writes. Knows nothing of manifests or pixels.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tensorstore as ts

from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.regular_file import (
    FileIdentity,
    LinkedPathError,
    check_regular,
    check_unlinked,
    identity_of,
    read_regular,
)
from loopfeed.preprocess.shards.store_errors import connection_fault, contact_fault, reason, remedy_for
from loopfeed.preprocess.storage_options import (
    StorageOptionError,
    check_applicable,
    check_no_user,
    check_options,
    context_members,
    expand_home,
    scheme_of,
    spec_members,
    timeout_of,
    with_environment,
)
from loopfeed.preprocess.synced_folders import make_folders
from loopfeed.preprocess.system_errors import reading_remedy, remedy_of, status_of, system_reason

STORE_TIMEOUT_S = 120.0
"""Time limit for one small read, write, listing or deletion on a mounted file system, in seconds."""

MAX_VALUE_BYTES = 1 << 30
"""Maximum size of a value that is read whole, enough for a ``failures.jsonl`` with several million failures."""


LOCK_SUFFIX = ".__lock"
"""What TensorStore appends to the name of a file that it writes until the file is whole."""

_ABSENT = b"\x02"
"""The generation of a key without a value, as TensorStore numbers generations."""


class ShardError(ValueError):
    """Error raised if a pack can't be read or written. It states the location, the value found and the remedy."""


@dataclass(frozen=True)
class Location:
    """A folder in a key-value store.

    Attributes:
        spec: TensorStore's JSON specification of the store; its ``path`` ends with ``/``.
        display: the location as the user would write it.
        context: the store's shared resources; it contains the data of ``memory://``.
        timeout_s: time limit for one small read, write, listing or deletion, in seconds.
        is_conditional: whether `replace` asks an S3 server other than AWS for conditional writes.
        root: the path of the folder that the user named, in which this one is; empty in a store.
    """

    spec: dict[str, Any]
    display: str
    context: ts.Context
    timeout_s: float = STORE_TIMEOUT_S
    is_conditional: bool = False
    root: str = ""

    @property
    def local_path(self) -> Path | None:
        """The folder as a path, or None if it is not on a mounted file system."""
        return Path(self.spec["path"]) if self.spec["driver"] == "file" else None

    @property
    def is_remote(self) -> bool:
        """Whether the folder is in a store that is reached over the network."""
        return bool(scheme_of(self.spec["driver"]))

    @property
    def can_list(self) -> bool:
        """Whether the names of all files can be had, which a plain web server does not give."""
        return self.spec["driver"] != "http"

    @property
    def remedy(self) -> str:
        """The remedy that error messages suggest if the split in this folder is damaged."""
        data = self.display.rstrip("/").rpartition("/")[0] or "."
        if not self.can_list:
            return f"copy the pack from {data} to a folder and run `inspect-shards --verify` there to list all damage"
        return f"run `inspect-shards --verify {data}` to list all damage"

    def child(self, name: str) -> Location:
        """Return the subfolder ``name`` of this folder."""
        return replace(self, spec=self.array_spec(name), display=f"{self.display}{name}/")

    def array_spec(self, name: str) -> dict[str, Any]:
        """Return TensorStore's JSON specification of the key-value store for the array ``name`` in this folder."""
        return self.spec | {"path": f"{self.spec['path']}{name}/"}

    def read(self, key: str, *, timeout_s: float | None = None, max_bytes: int = MAX_VALUE_BYTES) -> bytes | None:
        """Return the whole value at ``key``, or None if the key does not exist.

        Args:
            key: the name of the value.
            timeout_s: how long to wait for a remote store, by default `timeout_s`.
            max_bytes: the largest size of a file of this machine.

        Raises:
            ShardError: the store can't be reached or refuses access.
        """
        if self.local_path is not None:
            path = self.local_path / key
            try:
                return read_regular(path, max_bytes=max_bytes)
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as error:
                raise self.unreadable(path, error) from error
        value = self._wait(f"read {key}", lambda store: store.read(key), timeout_s)
        return bytes(value.value) if value.state == "value" else None

    def read_range(self, key: str, start: int, stop: int) -> bytes:
        """Return bytes ``start`` … ``stop - 1`` of the value at ``key``; raise ShardError as `read`, or if missing."""
        value = self._wait(f"read {key}", lambda store: store.read(key, byte_range=slice(start, stop)))
        if value.state != "value":
            raise ShardError(f"{self.display}{key} is missing; {self.remedy}")
        return bytes(value.value)

    def check_regular(self, key: str, *, max_bytes: int = MAX_VALUE_BYTES) -> FileIdentity | None:
        """Check that ``key``, if it exists in a local folder, is a regular file of at most ``max_bytes`` bytes.

        TensorStore would wait forever for a pipe without a writer, and run out of memory on a sparse file of a
        terabyte.

        Returns:
            The identity of the file; None if it does not exist, or in a remote store.

        Raises:
            ShardError: the key is not a regular file, or the file is larger.
        """
        if self.local_path is None:
            return None
        path = self.local_path / key
        try:
            status = path.stat()
            check_regular(status, path, max_bytes=max_bytes)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self.unreadable(path, error) from error
        return identity_of(status)

    def exists(self) -> bool:
        """Return whether a folder of this machine exists; raise ShardError if the system cannot tell."""
        folder = self.local_path or Path()
        try:
            return status_of(folder) is not None
        except OSError as error:
            raise self.unreadable(folder, error) from error

    def unreadable(self, path: Path, error: OSError) -> ShardError:
        """Return the error to raise if a file of this folder can't be read."""
        return ShardError(
            f"{printable(str(path))} can't be read: {error.strerror}; {reading_remedy(error, 'restore the file')}"
        )

    def read_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """Read ``keys`` concurrently and return their values (None if missing); raise ShardError as `read` does."""
        if self.local_path is not None:
            return [self.read(key) for key in keys]

        def start(store: ts.KvStore) -> _Several:
            return _Several([store.read(key) for key in keys])

        values = self._wait("read its records", start)
        return [bytes(value.value) if value.state == "value" else None for value in values]

    def write(self, key: str, value: bytes, *, timeout_s: float | None = None) -> None:
        """Write ``value`` at ``key`` atomically: the file store writes a temporary file, syncs it and renames it.

        Args:
            key: the name of the value.
            value: the new value.
            timeout_s: how long to wait for the store, by default `timeout_s`.

        Raises:
            ShardError: the store can't be written (full, read-only, access refused).
        """
        self.make_folder(key)
        self._wait(f"write {key}", lambda store: store.write(key, value), timeout_s)

    def check_unlinked(self, keys: Iterable[str] = ("",)) -> None:
        """Raise ShardError if one of ``keys`` in a local folder, or a folder in which it is, is a symbolic link.

        A pack of somebody else could otherwise have files elsewhere overwritten or removed.
        """
        folder = self.local_path
        if folder is None:
            return
        for key in keys:
            try:
                check_unlinked(Path(self.root or folder), folder / key)
            except LinkedPathError as error:
                raise ShardError(
                    f"{printable(error.filename)} is a link, and nothing is written through links inside a pack; "
                    f"{remedy_of(error)}"
                ) from error

    def make_folder(self, key: str) -> None:
        """Create the folder for ``key`` on a mounted file system, so that it survives a power failure with the value.

        TensorStore syncs the folder of a file that it writes, but not those in which it creates that folder.

        Raises:
            ShardError: as `write`.
        """
        if self.local_path is not None:
            # TensorStore writes a value under the second name, and renames it.
            self.check_unlinked((key, key + LOCK_SUFFIX))
            try:
                make_folders((self.local_path / key).parent)
            except OSError as error:
                raise ShardError(
                    f"{self.display}: can't write {key}: {system_reason(error)}; {remedy_for(error)}"
                ) from error

    def replace(self, key: str, value: bytes) -> bool:
        """Write ``value`` at ``key`` and return True; return False if another process writes there at the same time."""
        self.check_regular(key)
        self.make_folder(key)

        def start(store: ts.KvStore) -> ts.Future[ts.KvStore.TimestampedStorageGeneration]:
            found = store.read(key).result(timeout=self.timeout_s)
            return store.write(key, value, if_equal=found.stamp.generation)

        return bool(self._conditionally()._wait(f"write {key}", start).generation)

    def read_stamped(self, key: str) -> tuple[bytes | None, bytes]:
        """Return the whole value at ``key``, None if it does not exist, and its generation for `write_if`.

        The generation of a store that reports none is empty, and `write_if` then writes in any case.

        Raises:
            ShardError: as `read`.
        """
        found = self._conditionally()._wait(f"read {key}", lambda store: store.read(key))
        if found.state != "value":
            return None, bytes(found.stamp.generation)
        generation = bytes(found.stamp.generation)
        # Some emulators of Google's servers report no generation, which TensorStore reads as zero.
        return bytes(found.value), generation if any(generation) else b""

    def write_if(self, key: str, value: bytes, generation: bytes) -> bytes | None:
        """Write ``value`` at ``key`` if its generation is still this one, and return the new one, else None.

        A store that ignores conditions writes in any case (`refuses_to_replace`).

        Raises:
            ShardError: as `write`.
        """
        written = self._conditionally()._wait(
            f"write {key}", lambda store: store.write(key, value, if_equal=generation or None)
        )
        return bytes(written.generation) or None

    def refuses_to_replace(self, key: str, value: bytes) -> bool:
        """Return whether the store refuses to write ``value`` at ``key``, which exists, on condition that it does not.

        If not, the store ignores conditions, and ``value`` is written.

        Raises:
            ShardError: as `write`.
        """
        return (
            not self._conditionally()
            ._wait(f"write {key}", lambda store: store.write(key, value, if_equal=_ABSENT))
            .generation
        )

    def _conditionally(self) -> Location:
        """Return this folder with conditional writes; TensorStore itself asks only AWS for them."""
        return replace(self, spec=self.spec | {"use_conditional_write": True}) if self.is_conditional else self

    def create(self, key: str, value: bytes) -> bool:
        """Write ``value`` at ``key`` and return True; return False, and write nothing, if the key exists.

        If a store ignores conditions, two processes that write at the same moment may both do so.
        """
        self.check_regular(key)
        # Asked first, because such a store would overwrite it.
        if self.read(key) is not None:
            return False
        self.make_folder(key)
        written = self._conditionally()._wait(f"write {key}", lambda store: store.write(key, value, if_equal=_ABSENT))
        return bool(written.generation)

    def delete(self, key: str) -> None:
        """Delete ``key`` if it exists."""
        self.check_unlinked([str(Path(key).parent)])
        self._wait(f"delete {key}", lambda store: store.write(key, None))

    def delete_keys(self, keys: Sequence[str]) -> None:
        """Delete all of ``keys`` that exist, concurrently. Their folders remain."""
        self.check_unlinked({str(Path(key).parent) for key in keys})
        self._wait("delete its files", lambda store: _Several([store.write(key, None) for key in keys]))

    def list_keys(self, prefix: str = "") -> list[str]:
        """Return, in sorted order, all keys in this folder that start with ``prefix``."""
        last = prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""  # "" for the end of all keys
        found: Iterable[bytes] = self._wait("list it", lambda store: store.list(ts.KvStore.KeyRange(prefix, last)))
        return sorted(key.decode("utf-8", "surrogateescape") for key in found)

    def outage(self, error: BaseException) -> str | None:
        """Return what is wrong and what to do if an error means that a remote store does not answer, else None."""
        if not self.is_remote:
            return None
        fault = (
            f"no response within {self.timeout_s:g} s" if isinstance(error, TimeoutError) else connection_fault(error)
        )
        if fault is None:
            return None
        server = f" at {self.spec['endpoint']}" if "endpoint" in self.spec else ""
        return f"the store{server} does not answer ({fault}); check the server and the network"

    def _wait(self, action: str, operation: Any, timeout_s: float | None = None) -> Any:
        timeout_s = timeout_s or self.timeout_s
        try:
            store = ts.KvStore.open(self.spec, context=self.context).result(timeout=self.timeout_s)
            return operation(store).result(timeout=timeout_s)
        except TimeoutError as error:
            raise ShardError(
                f"{self.display}: can't {action}: no response within {timeout_s:.0f} s; "
                "check that the store is reachable"
            ) from error
        except (ValueError, OSError, RuntimeError) as error:
            if (outage := self.outage(error)) is not None:
                raise ShardError(f"{self.display}: can't {action}: {outage}") from error
            remedy = remedy_for(error, is_reading=action.startswith(("read", "list")))
            raise ShardError(
                f"{self.display}: can't {action}: {system_reason(error) or reason(error)}; {remedy}"
            ) from error


class _Several:
    """A group of concurrent operations whose results are returned together."""

    def __init__(self, futures: list[Any]) -> None:
        self._futures = futures

    def result(self, timeout: float) -> list[Any]:
        """Return the values, waiting at most ``timeout`` seconds for each."""
        return [future.result(timeout=timeout) for future in self._futures]


def open_location(
    data: str | os.PathLike[str],
    *,
    context: ts.Context | None = None,
    memory_mapped: bool = False,
    storage_options: Mapping[str, str] | None = None,
) -> Location:
    """Return the location for a path or a TensorStore URL (``file://``, ``gs://``, ``s3://``, ``memory://``…).

    Args:
        data: the folder; without ``://`` a path on this machine, with ``~`` for the home folder.
        context: shared resources; a new one by default. ``memory://`` folders are visible only in the same context.
        memory_mapped: whether to map local files instead of reading them, which gives 1.4 to 2.4 times as many images
            per second if the files are cached.
        storage_options: how to reach a remote store, see `loopfeed.preprocess.storage_options.STORAGE_OPTIONS`; for ``s3://``,
            environment variables give what is missing. No effect on a folder of this machine.

    Raises:
        ShardError: TensorStore does not support the URL, a path is not UTF-8, an option is wrong, or nothing answers at
            its address within 15 s.
    """
    data = os.fspath(data)
    spec = _spec_of(data)
    path, root = spec.get("path", ""), ""
    if spec["driver"] == "file":
        # TensorStore does not accept "..", and the parent of a link's target is not the parent of the link.
        path = os.path.realpath(path) if ".." in Path(path).parts else str(Path(path).absolute())
        _check_is_utf8(path)
        root = path
    spec["path"] = path if path.endswith("/") or not path else f"{path}/"
    if memory_mapped and spec["driver"] == "file":
        spec["file_io_mode"] = {"mode": "memmap"}
    location = _with_options(
        Location(spec, data if data.endswith("/") else f"{data}/", context or ts.Context(), root=root),
        storage_options or {},
        has_context=context is not None,
    )
    return _contacted(location, data)


def _check_is_utf8(path: str) -> None:
    """Raise ShardError unless a path of this machine is UTF-8: TensorStore takes no others."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ShardError(
            f"the path of a pack must be UTF-8, but {printable(path)} is not: rename that folder, or give the path of "
            "a symbolic link to it"
        ) from None


def reopen_location(spec: dict[str, Any], display: str, storage_options: Mapping[str, str]) -> Location:
    """Return a location that another machine opened, with the keys of this one.

    Args:
        spec: its specification there, with the address and the region of the store.
        display: how the user wrote it.
        storage_options: its options there, with those that came from the environment. No variable of this machine
            replaces one of them.

    Raises:
        ShardError: nothing answers at its address within 15 s.
    """
    return _contacted(_with_resources(Location(spec, display, ts.Context()), storage_options), display)


def _contacted(location: Location, data: str) -> Location:
    """Return the location; raise ShardError if it is remote and nothing answers at its address."""
    fault = contact_fault(location.spec, location.context)
    if fault is not None:
        server = f" at {location.spec['endpoint']}" if "endpoint" in location.spec else ""
        raise ShardError(f"{data}{server} cannot be reached ({fault}); check the address and the network")
    return location


def _spec_of(data: str) -> dict[str, Any]:
    """Return TensorStore's specification of the store for a path or URL; raise ShardError as `open_location`."""
    if not data:
        raise ShardError("the data folder is an empty string; give a folder or a URL such as gs://bucket/imagenet")
    if "://" in data:
        try:
            check_no_user(data)
        except StorageOptionError as error:
            raise ShardError(str(error)) from None
        try:
            spec: dict[str, Any] = ts.KvStore.Spec(data).to_json()
        except (ValueError, RuntimeError) as error:
            raise ShardError(
                f"{data} is not the URL of a supported store: {reason(error)}; use a path or a gs:// or s3:// URL"
            ) from error
    else:
        spec = {"driver": "file", "path": str(expand_home(data))}
    # A store within another ("file:///x|zip:y") would be opened by TensorStore without the checks of local files.
    if not isinstance(spec.get("path", ""), str) or "driver" not in spec or "base" in spec:
        raise ShardError(
            f"{data} does not name a folder in a single store; use a path, gs://bucket/folder or s3://bucket/folder"
        )
    return spec


def _with_options(location: Location, given: Mapping[str, str], *, has_context: bool) -> Location:
    """Return a location with the options of its store; a local folder is returned unchanged."""
    driver = location.spec["driver"]
    if not location.is_remote:
        return location
    try:
        options = with_environment(given, location.display)
        check_options(options)
        check_applicable(given, scheme_of(driver), location.display)
    except StorageOptionError as error:
        raise ShardError(str(error)) from error
    found = replace(location, spec=location.spec | spec_members(driver, options))
    return _with_resources(found, options, context=location.context if has_context else None)


def _with_resources(location: Location, options: Mapping[str, str], *, context: ts.Context | None = None) -> Location:
    """Return a location with the time limit, the credentials and the retries of its options."""
    driver = location.spec["driver"]
    return replace(
        location,
        context=context or ts.Context(context_members(driver, options)),
        timeout_s=timeout_of(driver, options) or STORE_TIMEOUT_S,
        is_conditional=driver == "s3" and options.get("conditional-writes", "true") == "true",
    )
