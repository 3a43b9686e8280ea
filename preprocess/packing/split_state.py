"""What a split's folder contains before it is packed: nothing, an unfinished pack, a finished pack, or other files."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

from loopfeed.preprocess.packing.journal import Journal
from loopfeed.preprocess.packing.owner import LOCK_KEY, OWNER_KEY
from loopfeed.preprocess.packing.plan import PackSettings, check_same_plan, is_plan, plan_of
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.shards.location import Location, ShardError
from loopfeed.preprocess.shards.manifest import FORMAT_VERSION, MANIFEST_KEY, READABLE_VERSIONS, Manifest, is_manifest
from loopfeed.preprocess.shards.split_files import PLAN_KEY, split_files

CLEARING = {"clearing": True}
"""Replaces the plan in the journal while an old pack is being deleted."""


def existing_plan(location: Location) -> dict[str, Any] | None:
    """Return the plan of the finished or unfinished pack of a split; None if there is none."""
    found = Journal(location).plan()
    if found is None or not is_plan(found):
        text = location.read(MANIFEST_KEY)
        if text is None or not is_manifest(text):
            return None
        found = plan_of(Manifest.from_json(text, where=f"{location.display}{MANIFEST_KEY}"))
    return found


def with_existing_shard_images(location: Location, settings: PackSettings) -> PackSettings:
    """Return the settings with the ``shard_images`` of any existing pack, because the default may have changed."""
    found = existing_plan(location)
    if found is None or found.get("resize_rule") != settings.rule.to_json():
        return settings  # packed with other settings, which is reported later
    return replace(settings, shard_images=found.get("shard_images"))


def version_to_pack(location: Location) -> int:
    """Return the format version to write: the version of the unfinished pack if there is one, otherwise the newest."""
    found = (Journal(location).plan() or {}).get("format_version")
    return found if found in READABLE_VERSIONS else FORMAT_VERSION


def find_complete(location: Location, plan: dict[str, Any], *, can_overwrite: bool = True) -> Manifest | None:
    """Return the manifest, or None if the split is incomplete.

    Raises:
        ShardError: the split has a different plan; `can_overwrite` is that of `check_same_plan`.
    """
    text = location.read(MANIFEST_KEY)
    if text is None or Journal(location).plan() == CLEARING:
        return None
    if not is_manifest(text):
        check_ours(location)
    manifest = Manifest.from_json(text, where=f"{location.display}{MANIFEST_KEY}")
    # A complete pack remains valid whatever versions of the tools and of the format it was made with.
    unchecked = {"tool_versions": dict(manifest.tool_versions), "format_version": manifest.format_version}
    check_same_plan(plan_of(manifest), plan | unchecked, location.display, can_overwrite=can_overwrite)
    return manifest


def check_ours(location: Location) -> None:
    """Raise ShardError if the folder contains files but no pack, to protect other programs' files."""
    plan = Journal(location).plan()
    if plan is not None and (plan == CLEARING or is_plan(plan)):
        return
    text = location.read(MANIFEST_KEY)
    if text is not None and is_manifest(text):
        return
    others = [key for key in location.list_keys() if key not in (OWNER_KEY, LOCK_KEY)]
    # Another part may have begun in the meantime, and the plan is its first file.
    if others and (plan is not None or Journal(location).plan() is None):
        named = next((key for key in (MANIFEST_KEY, PLAN_KEY) if key in others), others[0])
        raise ShardError(
            f"{location.display} contains files but no pack ({printable(named)}); choose an empty folder as DEST or "
            "clear this one by hand"
        )


def check_room_of_new(location: Location, settings: PackSettings, num_images: int) -> None:
    """Raise ShardError if a pack cannot fit in the place of the one that it replaces; nothing is deleted before.

    Compressed shards may be smaller than their images, so they are not judged.
    """
    folder = location.local_path
    if folder is None or settings.codec != "raw":
        return
    usage = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists()))
    needed = num_images * settings.image_bytes
    replaced = sum((folder / key).lstat().st_size for key in split_files(location))
    if usage.total and needed > usage.free + replaced:  # some file systems report no sizes
        raise ShardError(
            f"the new pack needs {needed / 1e6:.1f} MB in {location.display}, but only {usage.free / 1e6:.1f} MB are "
            f"free there and the pack that it replaces has {replaced / 1e6:.1f} MB, which is kept: make room, or "
            "choose another DEST"
        )
