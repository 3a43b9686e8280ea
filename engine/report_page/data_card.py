"""What the page says about the packed data of a run, from their manifests.

Must not know: HTML, images.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from loopfeed.engine.config import OFF, OWN_BATCHES, TrainConfig
from loopfeed.engine.data.dataset import DATA_LOCATION, choose_data, data_of_record
from loopfeed.engine.data.eval_split import choose_eval_split
from loopfeed.engine.data.open_data import manifest_digest_of
from loopfeed.engine.owners import storage_options_of
from loopfeed.engine.records.recorded_run import RecordedRun
from loopfeed.engine.report_page.absent import Absent
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.shards.location import Location, open_location
from loopfeed.preprocess.shards.manifest import FAILURES_KEY, Manifest
from loopfeed.preprocess.shards.reader import read_manifest
from loopfeed.preprocess.system_errors import describe_system_error

_MOST_FAILURES = 5
_SAME = {
    True: "what the run recorded",
    False: "not what the run recorded: it was packed anew since",
    None: "unknown: the run recorded no digest",
}


@dataclass(frozen=True)
class SplitCard:
    """A packed split."""

    name: str  # its name
    role: str  # what the run did with it, "training" or "evaluation"
    manifest: Manifest  # what is in it
    is_same: bool | None  # whether it is what the run recorded; None if the run recorded no digest of it
    failures: tuple[tuple[str, str], ...]  # path and reason of the first images that could not be packed

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What the page says about the split, by name."""
        manifest, tools = self.manifest, self.manifest.tool_versions
        kind = None if manifest.targets is None else manifest.targets.kind
        several = " (several per image)" if kind == "classes" else ""
        channels = [", ".join(f"{part:.4f}" for part in each) for each in (manifest.channel_mean, manifest.channel_std)]
        held_out = "no rule recorded: the source has this split itself, or an early release held it out"
        if "holdout" in tools:
            held_out = f"by rule {tools['holdout']}, from the hashes of class and path"
        return [
            ("images", f"{manifest.num_images:,}"),
            ("numbers" if kind == "numbers" else "classes", f"{manifest.num_classes:,}{several}"),
            ("size", f"{manifest.width} × {manifest.height} px, made by {_pairs(manifest.resize_rule)}"),
            ("mean, std of R, G, B", "; ".join(channels)),
            ("source", f"SHA-256 of its listing {manifest.source_digest[:16]}…"),
            ("held out", held_out),
            ("could not be packed", f"{manifest.num_failures:,}"),
            ("content", _SAME[self.is_same]),
            ("packed with", _pairs(tools)),
        ]


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def read_data_card(
    recorded: RecordedRun, data: str | None, split: str | None
) -> tuple[str, tuple[SplitCard, ...]] | Absent:
    """Read where the data set of a run is, and the manifests of the splits that it trained and was evaluated on.

    Args:
        recorded: the record of the run.
        data: where the data set is now; None is where the run found it.
        split: the split to evaluate on; None is that of the run.
    """
    if recorded.config.synthetic:
        return Absent("the run trained on random batches, which have no data set")
    if recorded.resolved.get("data") == OWN_BATCHES:
        return Absent("the run trained on batches from a function of yours, which have no manifest")
    try:
        place = data_place(recorded, data)
        location = open_location(place, storage_options=storage_options_of(recorded.config))
        config = recorded.config
        fold = is_fold(config, split)
        role = f"training, and evaluation on fold {config.fold}" if fold else "training"
        cards = [_card(location, config.split, role, recorded.manifest_digest)]
        name = split or evaluated_split(recorded, place)
        if name is not None and name != config.split:
            cards.append(_card(location, name, "evaluation", recorded.resolved.get("eval_manifest_sha256")))
    except OSError as error:
        return Absent(f"the data set of the run cannot be read: {describe_system_error(error)}")
    except ValueError as error:
        return Absent(f"the data set of the run cannot be read: {error}")
    return place, tuple(cards)


def data_place(recorded: RecordedRun, data: str | None) -> str:
    """Return the folder or URL of the packed data set of a run; `data` replaces the one that it recorded."""
    return choose_data(data_of_record(data or recorded.config.data, recorded.resolved.get(DATA_LOCATION))).data


def evaluated_split(recorded: RecordedRun, place: str) -> str | None:
    """Return the split that the run was evaluated on or, if it never was, the one that an evaluation uses."""
    config = recorded.config
    if is_fold(config, None):
        return config.split
    if config.eval_split is not None and config.eval_split != OFF:
        return config.eval_split
    return choose_eval_split(replace(config, eval_split=None), place)


def is_fold(config: TrainConfig, split: str | None) -> bool:
    """Return whether a run is evaluated on a fold of its training split, unless another `split` is asked for."""
    return config.fold is not None and split in (None, OFF)


def _card(location: Location, name: str, role: str, recorded_digest: Any) -> SplitCard:
    manifest = read_manifest(location, name)
    is_same = None if recorded_digest is None else manifest_digest_of(manifest) == recorded_digest
    failures = _read_failures(location.child(name).read) if manifest.num_failures else ()
    return SplitCard(name, role, manifest, is_same, failures)


def _read_failures(read: Callable[[str], bytes | None]) -> tuple[tuple[str, str], ...]:
    """Return path and reason of the first failures; lines of another form are left out."""
    found = []
    for line in (read(FAILURES_KEY) or b"").split(b"\n", _MOST_FAILURES)[:_MOST_FAILURES]:
        try:
            value = json.loads(line)
            found.append((printable(str(value["path"])), str(value["reason"])))
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return tuple(found)
