"""The hold-out rule of a data set: which rule its packs record, and which one the next split there must use.

A pack records its rule in its plan's `tool_versions`, which earlier versions of Loopfeed can read; see
`loopfeed.preprocess.sources.selection.held_out`.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from loopfeed.preprocess.shards.location import Location
from loopfeed.preprocess.shards.manifest import MANIFEST_KEY
from loopfeed.preprocess.shards.split_files import PLAN_KEY
from loopfeed.preprocess.sources.selection import HOLDOUT_RULE

HELD_OUT_SPLITS = ("train", "val")
"""The splits that are made from one by holding out images."""

_VERSION = "holdout"


def holdout_version(rule: int | None) -> dict[str, str]:
    """Return the entry of a plan's `tool_versions`; rule 1 and no rule have none, as in packs of earlier versions."""
    return {} if rule is None or rule == 1 else {_VERSION: str(rule)}


def choose_holdout_rule(location: Location, *, replaced: Collection[str] = ()) -> int:
    """Return the rule by which to hold out images for a data set: that of a split which stays there, else the newest.

    Under another rule, an image could be in both splits, and an unfinished pack could not be completed.

    Args:
        location: the data set.
        replaced: the splits that will be packed anew.
    """
    for name in HELD_OUT_SPLITS:
        if name not in replaced and (rule := _recorded_rule(location.child(name))) is not None:
            return rule
    return HOLDOUT_RULE


def _recorded_rule(location: Location) -> int | None:
    """Return the rule of a pack, finished or not; None if there is no readable pack."""
    for key in (PLAN_KEY, MANIFEST_KEY):
        try:
            values = json.loads(location.read(key) or b"null")
        except (ValueError, RecursionError):
            continue  # packing reports it
        if isinstance(values, dict) and isinstance(versions := values.get("tool_versions"), dict):
            rule = str(versions.get(_VERSION, 1))
            return int(rule) if rule.isdecimal() else 1
    return None
