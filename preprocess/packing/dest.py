"""Checks where a pack is to be written."""

import os
from pathlib import Path

from loopfeed.preprocess.shards.location import Location, ShardError


def check_dest(source: str | Path, location: Location) -> None:
    """Raise ShardError if DEST is an in-memory store, the folder of a run, or a folder inside SOURCE."""
    if location.spec["driver"] == "memory":
        raise ShardError(
            f"{location.display} would be lost when this process exits; use a folder, gs:// or s3:// as DEST"
        )
    folder = location.local_path
    if folder is None:
        return
    for each in (folder, *folder.parents):
        if (each / "config.json").is_file() and (each / "loss.jsonl").is_file():
            where = "is" if each == folder else f"is inside {each},"
            raise ShardError(
                f"DEST {location.display} {where} the folder of a training run, which must contain only its run; "
                "choose another folder"
            )
    # Path.resolve raises RuntimeError for symbolic links that form a loop.
    inner, outer = Path(os.path.realpath(folder)), Path(os.path.realpath(source))
    if outer.is_dir() and inner.is_relative_to(outer):
        raise ShardError(
            f"DEST {location.display} is inside SOURCE {source}, so the next run would list the shards as images; "
            "choose a folder outside SOURCE"
        )
