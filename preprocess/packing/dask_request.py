"""What a Dask worker needs to pack shards: the arguments of the source, the folder and the settings. Knows no Dask."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from loopfeed.preprocess.packing.plan import PackSettings
from loopfeed.preprocess.shards.location import Location, reopen_location
from loopfeed.preprocess.storage_options import with_environment

PACKAGES = ("loopfeed", "numpy", "pillow", "tensorstore")
"""The packages of which all machines need the same version."""


@dataclass(frozen=True)
class PackRequest:
    """The arguments of a pack, with paths that mean the same on every machine that shares the files.

    Attributes:
        source: the path of the source.
        options: the other arguments of `open_source`.
        dest: how the user wrote DEST.
        store: the specification of DEST's store.
        storage_options: the options of the store, with those from this machine's environment. They contain no keys, so
            a worker uses its own.
        settings: how to pack.
        versions: the versions of `PACKAGES`.
    """

    source: str
    options: dict[str, Any]
    dest: str
    store: dict[str, Any]
    storage_options: dict[str, str]
    settings: PackSettings
    versions: dict[str, str]

    @classmethod
    def of(
        cls,
        source: str,
        options: dict[str, Any],
        location: Location,
        storage_options: dict[str, str],
        settings: PackSettings,
    ) -> PackRequest:
        """Return the request for a source, the other arguments of `open_source`, and DEST at ``location``.

        ``storage_options`` are those that the user gave.
        """
        if (labels := options.get("labels")) is not None:
            options = options | {"labels": str(Path(labels).absolute())}
        return cls(
            source=str(Path(source).absolute()),
            options=options,
            dest=location.display,
            store=location.spec,
            storage_options=with_environment(storage_options, location.display),
            settings=settings,
            versions=installed_versions(),
        )

    def open_dest(self) -> Location:
        """Return DEST; raise ShardError if nothing answers at its address."""
        return reopen_location(self.store, self.dest, self.storage_options)

    def settings_of(self, holdout_rule: int | None, shard_images: int) -> PackSettings:
        """Return the settings of one split."""
        return replace(self.settings, holdout_rule=holdout_rule, shard_images=shard_images)


@dataclass(frozen=True)
class BlockTask:
    """A block that a worker packs.

    Attributes:
        plugin: the name of the plugin that has the request.
        split: the name of the split.
        block: the number of the block.
        run: the id of the owner on whose behalf the worker writes.
        plan: the plan of the split.
        holdout_rule: as in the settings of the split.
    """

    plugin: str
    split: str
    block: int
    run: str
    plan: dict[str, Any]
    holdout_rule: int | None


@dataclass(frozen=True)
class BlockResult:
    """What became of a task: the numbers of images and of those that could not be packed, or an error message."""

    num_images: int = 0
    num_failures: int = 0
    error: str | None = None


def installed_versions() -> dict[str, str]:
    """Return the versions of `PACKAGES` on this machine."""
    return {name: metadata.version(name) for name in PACKAGES}


def describe_versions(found: dict[str, str], wanted: dict[str, str]) -> str:
    """Return the differences, such as "numpy 2.4.0 instead of 2.5.5"."""
    return ", ".join(
        f"{name} {found[name]} instead of {wanted[name]}" if name in found else f"no {name} (needed: {wanted[name]})"
        for name in wanted
        if found.get(name) != wanted[name]
    )
