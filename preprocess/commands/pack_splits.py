"""Packs all splits of a source for `preprocess-imagenet`: on this machine, in parts, or on a Dask cluster."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click

from loopfeed.preprocess.commands.pack_report import summarise, summarise_part
from loopfeed.preprocess.commands.progress import ImageProgress
from loopfeed.preprocess.packing.dask_cluster import DaskCluster
from loopfeed.preprocess.packing.pack import PackProgress, PackResult, pack_split
from loopfeed.preprocess.packing.part import Part
from loopfeed.preprocess.packing.parts import MissingShardsError, PartResult, finish_parts, pack_part
from loopfeed.preprocess.packing.plan import HELD_OUT_SPLITS
from loopfeed.preprocess.shards.location import ShardError

if TYPE_CHECKING:
    from loopfeed.preprocess.packing.plan import PackSettings
    from loopfeed.preprocess.shards.location import Location
    from loopfeed.preprocess.sources.open_source import Source


@dataclass(frozen=True)
class Machines:
    """Where to pack: on this machine, unless a part, the finish or the address of a Dask scheduler is given."""

    part: Part | None = None
    finish: bool = False
    scheduler: str | None = None
    overwrite: bool = False


def check_machines(
    part: str | None, finish: bool, executor: str, scheduler: str | None, *, overwrite: bool
) -> Machines:
    """Return where to pack; raise UsageError for options that contradict each other."""
    chosen = [
        name
        for name, given in (("--part", part is not None), ("--finish", finish), ("--executor dask", executor == "dask"))
        if given
    ]
    if len(chosen) > 1:
        raise click.UsageError(f"{chosen[0]} cannot be used with {chosen[1]}; remove one of them")
    if executor == "dask" and scheduler is None:
        raise click.UsageError("--executor dask needs --scheduler, the address of the Dask scheduler")
    if executor != "dask" and scheduler is not None:
        raise click.UsageError(f"--scheduler {scheduler} has no effect without --executor dask; add that or remove it")
    if scheduler is not None and not _has_port(scheduler):
        # Dask would report it only after it has looked for a scheduler in the background.
        raise click.UsageError(f"--scheduler must have a port, such as tcp://node1:8786, got {scheduler!r}: add it")
    if chosen and overwrite:
        raise click.UsageError(
            f"--overwrite cannot be used with {chosen[0]}, because other machines may be writing to DEST; "
            "delete the old pack, or choose another DEST"
        )
    try:
        parsed = None if part is None else Part.parse(part)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--part") from error
    return Machines(parsed, finish, scheduler, overwrite)


def _has_port(address: str) -> bool:
    protocol, _, place = address.rpartition("://")
    return protocol not in ("", "tcp", "tls") or re.search(r":[0-9]{1,5}/?$", place) is not None


def connect(machines: Machines) -> AbstractContextManager[DaskCluster | None]:
    """Return the context of the connection to the Dask cluster, or of None if there is none to connect to."""
    return nullcontext() if machines.scheduler is None else DaskCluster(machines.scheduler, _notify)


def pack_splits(
    source: Source, location: Location, settings: PackSettings, machines: Machines, cluster: DaskCluster | None
) -> bool:
    """Pack every split, print what was packed, and return whether all splits are complete.

    Args:
        source: the open source.
        location: DEST.
        settings: how to pack.
        machines: where to pack.
        cluster: the Dask cluster, to which the request was sent; None packs on this machine.
    """
    results: dict[str, PackResult | PartResult] = {}
    missing: list[str] = []
    with ImageProgress() as progress:
        for name, split in source.splits.items():

            def show(state: PackProgress, name: str = name) -> None:
                progress.show(name, state.done, state.total)

            rule = settings.holdout_rule if name in HELD_OUT_SPLITS else None
            chosen, folder = replace(settings, holdout_rule=rule), location.child(name)
            targets = source.targets.get(name)
            if machines.part is not None:
                results[name] = pack_part(
                    split, folder, chosen, machines.part, on_progress=show, targets=targets, notify=_notify
                )
            elif machines.finish:
                try:
                    results[name] = finish_parts(split, folder, chosen, on_progress=show, targets=targets)
                except MissingShardsError as error:
                    missing.append(str(error))
            elif cluster is not None:
                results[name] = cluster.pack_split(split, folder, chosen, on_progress=show, targets=targets)
            else:
                results[name] = pack_split(
                    split,
                    folder,
                    chosen,
                    overwrite=machines.overwrite,
                    on_progress=show,
                    targets=targets,
                    notify=_notify,
                )
    for name, result in results.items():
        if isinstance(result, PackResult):
            is_alone = not machines.finish and machines.scheduler is None
            summarise(name, result, location.child(name), can_overwrite=is_alone)
        else:
            assert machines.part is not None
            summarise_part(name, result, machines.part, location.child(name))
    if missing:
        raise ShardError("\n".join(missing))
    return all(isinstance(result, PackResult) or result.finished is not None for result in results.values())


def _notify(text: str) -> None:
    click.echo(text, err=True)
