"""Faults of whole packs: files that are swapped, copied, or taken from another split or pack."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from scripts.torture_campaign.file_faults import PLACE_FAULTS, draw_file_fault
from scripts.torture_campaign.json_faults import JSON_FAULTS
from scripts.torture_campaign.relabelling import permute_labels
from scripts.torture_campaign.sound_packs import SoundPack

PackFault = Callable[[Path, SoundPack, random.Random], str]
SHARDS = ("train/pixels/c/0/0/0", "train/pixels/c/1/0/0", "train/pixels/c/2/0/0")
VAL_SHARD = "val/pixels/c/0/0/0"


def swap(pack: Path, one: str, other: str) -> str:
    """Swap two files or folders of the pack."""
    between = pack / "between"
    (pack / one).rename(between)
    (pack / other).rename(pack / one)
    between.rename(pack / other)
    return f"{one} and {other} swapped"


def swap_shards(pack: Path, _base: SoundPack, draw: random.Random) -> str:
    """Swap two shards of a split."""
    return swap(pack, *draw.sample(SHARDS, 2))


def swap_shards_of_splits(pack: Path, _base: SoundPack, draw: random.Random) -> str:
    """Swap a shard of train with the shard of val, which has the same size."""
    return swap(pack, draw.choice(SHARDS), VAL_SHARD)


def replace_shard_from_other_pack(pack: Path, base: SoundPack, draw: random.Random) -> str:
    """Take a shard of another pack of the same shape."""
    name = draw.choice([*SHARDS, VAL_SHARD])
    if base.donor is None:
        return replace_shard_by_copy(pack, base, draw)
    shutil.copyfile(base.donor / name, pack / name)
    return f"{name} taken from another pack of the same shape"


def replace_shard_by_copy(pack: Path, _base: SoundPack, draw: random.Random) -> str:
    """Replace a shard by a copy of another."""
    one, other = draw.sample(SHARDS, 2)
    shutil.copyfile(pack / other, pack / one)
    return f"{one} replaced by a copy of {other}"


def replace_shard_by_hard_link(pack: Path, _base: SoundPack, draw: random.Random) -> str:
    """Make one shard a hard link to another."""
    one, other = draw.sample(SHARDS, 2)
    (pack / one).unlink()
    os.link(pack / other, pack / one)
    return f"{one} made a hard link to {other}"


def replace_shard_by_link(pack: Path, _base: SoundPack, draw: random.Random) -> str:
    """Make one shard a link to another, of its split or of the other one."""
    one = draw.choice(SHARDS)
    other = draw.choice([*(each for each in SHARDS if each != one), VAL_SHARD])
    (pack / one).unlink()
    (pack / one).symlink_to(pack / other)
    return f"{one} made a link to {other}"


def swap_splits(pack: Path, _base: SoundPack, _draw: random.Random) -> str:
    """Swap the folders of the two splits."""
    return swap(pack, "train", "val")


def swap_pixels(pack: Path, _base: SoundPack, _draw: random.Random) -> str:
    """Swap the pixels of the two splits."""
    return swap(pack, "train/pixels", "val/pixels")


def swap_labels(pack: Path, _base: SoundPack, _draw: random.Random) -> str:
    """Swap the label files of the two splits."""
    return swap(pack, "train/labels/c/0", "val/labels/c/0")


def swap_label_arrays(pack: Path, _base: SoundPack, _draw: random.Random) -> str:
    """Swap the label arrays of the two splits, with their metadata."""
    return swap(pack, "train/labels", "val/labels")


def swap_manifests(pack: Path, _base: SoundPack, _draw: random.Random) -> str:
    """Swap the manifests of the two splits."""
    return swap(pack, "train/manifest.json", "val/manifest.json")


def replace_manifest_from_other_pack(pack: Path, base: SoundPack, draw: random.Random) -> str:
    """Take the manifest of a pack of the same shape."""
    if base.donor is None:
        return swap_manifests(pack, base, draw)
    shutil.copyfile(base.donor / "train/manifest.json", pack / "train/manifest.json")
    return "train/manifest.json taken from another pack of the same shape"


def swap_two_labels(pack: Path, _base: SoundPack, draw: random.Random) -> str:
    """Permute the labels and write their array with valid checksums."""
    return permute_labels(pack / "train/labels", draw)


def empty_folder(pack: Path, _base: SoundPack, draw: random.Random) -> str:
    """Empty one of the folders."""
    name = draw.choice(["train/pixels/c", "train/labels/c", "train/pixels", "train/labels", "train", "val"])
    shutil.rmtree(pack / name)
    (pack / name).mkdir()
    return f"{name} emptied"


def replace_folder_by_file(pack: Path, _base: SoundPack, draw: random.Random) -> str:
    """Replace a folder by a file."""
    name = draw.choice(["train/pixels/c", "train/labels/c", "train/pixels", "train/labels", "train"])
    shutil.rmtree(pack / name)
    (pack / name).write_bytes(b"")
    return f"{name} replaced by an empty file"


def replace_folder_by_link(pack: Path, _base: SoundPack, draw: random.Random) -> str:
    """Replace a folder by a link to the pack."""
    name = draw.choice(["train/pixels/c", "train/labels", "val"])
    shutil.rmtree(pack / name)
    (pack / name).symlink_to(pack)
    return f"{name} replaced by a link to the pack"


PACK_FAULTS: dict[str, PackFault] = {
    "swap-within-split": swap_shards,
    "swap-between-splits": swap_shards_of_splits,
    "swap-between-packs": replace_shard_from_other_pack,
    "swap-by-copy": replace_shard_by_copy,
    "swap-by-hard-link": replace_shard_by_hard_link,
    "swap-by-link": replace_shard_by_link,
    "swap-splits": swap_splits,
    "swap-pixels": swap_pixels,
    "swap-labels": swap_labels,
    "swap-label-arrays": swap_label_arrays,
    "swap-manifests": swap_manifests,
    "manifest-of-another-pack": replace_manifest_from_other_pack,
    "labels-permuted": swap_two_labels,
    "folder-emptied": empty_folder,
    "folder-as-file": replace_folder_by_file,
    "folder-as-loop": replace_folder_by_link,
}


def files_by_purpose(base: SoundPack) -> dict[str, list[str]]:
    """Return the files of a pack by purpose, so that small files are damaged as often as large ones."""
    sorts: dict[str, list[str]] = {}
    for key in base.tree:
        name = Path(key).name
        sort = name if name.endswith((".json", ".jsonl")) else key.split("/")[1]
        sorts.setdefault(sort, []).append(key)
    return sorts


def draw_pack_fault(pack: Path, base: SoundPack, draw: random.Random) -> str:
    """Apply one drawn fault to a copy of the sound pack; return its description."""
    if draw.random() < 0.12:
        name = draw.choice(list(PACK_FAULTS))
        return PACK_FAULTS[name](pack, base, draw)
    sorts = files_by_purpose(base)
    key = draw.choice(sorts[draw.choice(list(sorts))]) if draw.random() < 0.6 else draw.choice(list(base.tree))
    path = pack / key
    is_json = key.endswith(".json")
    fault = draw.choice(JSON_FAULTS) if is_json and draw.random() < 0.6 else draw_file_fault(draw)
    return f"{key}: {fault(path, draw)}"


def replaced_file(key: str, how: str) -> PackFault:
    """Return the fault that replaces one file by something else."""

    def replace(pack: Path, _base: SoundPack, draw: random.Random) -> str:
        return f"{key}: {PLACE_FAULTS[how](pack / key, draw)}"

    return replace
