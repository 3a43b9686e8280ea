"""The kinds of faults by their names."""

from __future__ import annotations

from pathlib import Path

from scripts.torture_campaign.campaign import Kind
from scripts.torture_campaign.pack_kind import PackKind


def make_kind(name: str, base: Path) -> Kind:
    """Return a kind of faults.

    Args:
        name: of `KINDS`.
        base: the folder of the campaign.
    """
    cache = base / "cache"
    return {"packs": lambda: PackKind(cache)}[name]()
