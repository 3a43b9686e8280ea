"""The kinds of faults by their names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from scripts.torture_campaign.archive_kind import ArchiveKind
from scripts.torture_campaign.call_kind import CallKind
from scripts.torture_campaign.campaign import Kind
from scripts.torture_campaign.image_kind import ImageKind
from scripts.torture_campaign.kill_kind import KillKind
from scripts.torture_campaign.pack_kind import PackKind
from scripts.torture_campaign.run_kind import RunKind


def make_kind(name: str, base: Path) -> Kind:
    """Return a kind of faults.

    Args:
        name: one of `KINDS`.
        base: the folder of the campaign.
    """
    cache = base / "cache"
    makers: dict[str, Callable[[], Kind]] = {
        "packs": lambda: PackKind(cache),
        "runs": lambda: RunKind(cache),
        "images": ImageKind,
        "archives": ArchiveKind,
        "kills": lambda: KillKind(cache),
        "calls": lambda: CallKind(cache),
    }
    return makers[name]()
