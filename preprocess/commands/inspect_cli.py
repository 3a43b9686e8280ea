"""The command `inspect-shards`, which describes packed shards, verifies every byte and draws a contact sheet.

Only click is imported at the top, so that ``--help`` responds immediately.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from loopfeed.preprocess.commands.completion import complete_folder
from loopfeed.preprocess.commands.guarded_output import WRONG, GuardedCommand, reporting
from loopfeed.preprocess.commands.sheet_path import check_sheet_path
from loopfeed.preprocess.commands.storage import open_given, storage_option
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.storage_options import parse_pairs
from loopfeed.preprocess.system_errors import naming_file

if TYPE_CHECKING:
    from loopfeed.preprocess.shards.damages import Damage
    from loopfeed.preprocess.shards.duplicates import SamePixels
    from loopfeed.preprocess.shards.location import Location
    from loopfeed.preprocess.shards.manifest import Manifest
    from loopfeed.preprocess.shards.splits import SplitNames

_CLASSES_SHOWN = 20
_BAR_WIDTH = 30


@click.command(
    cls=GuardedCommand,
    context_settings={"max_content_width": 110, "show_default": True},
    epilog="Exit codes: 0 intact, 2 damaged or wrong usage, 130 stopped.",
)
@click.argument("dest", shell_complete=complete_folder)
@click.option(
    "--split",
    metavar="NAME",
    multiple=True,
    show_default="all",
    help="Split to inspect. Repeat the option to inspect several splits.",
)
@click.option(
    "--verify",
    is_flag=True,
    help="Read every byte and list all damaged files and images. Also compare all images that checksums do not tell "
    "apart; without it, only up to 1,024 are compared, and none without checksums.",
)
@click.option(
    "--grid",
    metavar="FILE.png",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Save a contact sheet of the first inspected split to this file.",
)
@storage_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@click.option("--traceback", is_flag=True, help="Show the full traceback of an error.")
def main(
    dest: str,
    split: tuple[str, ...],
    verify: bool,
    grid: Path | None,
    storage_option: tuple[str, ...],
    as_json: bool,
    traceback: bool,
) -> None:
    """Describe the shards that preprocess-imagenet packed at DEST, a folder or a URL."""
    with reporting("inspect-shards", "Stopped.", "", with_traceback=traceback):
        is_intact = _run(dest, split, parse_pairs(storage_option), verify=verify, grid=grid, as_json=as_json)
    if not is_intact:
        sys.exit(WRONG)


def _run(
    dest: str, wanted: tuple[str, ...], stored: dict[str, str], *, verify: bool, grid: Path | None, as_json: bool
) -> bool:
    if grid is not None:
        check_sheet_path(grid)
    from loopfeed.preprocess.shards.splits import find_splits, lost_manifest, read_manifest

    location = open_given(dest, stored)
    found = None if wanted else find_splits(dest, storage_options=stored)
    broken = () if found is None else found.broken
    for name in broken:
        click.echo(lost_manifest(location.child(name)), err=True)
    names = wanted if found is None else _complete_splits(dest, location, found)
    manifests = {name: read_manifest(location, name) for name in names}
    groups = _read_groups(dest, manifests, stored)
    if not as_json:
        for name, manifest in manifests.items():
            click.echo("\n".join(_describe(name, manifest, groups.get(name))))
        _print_shared(groups)
    damages = _verify(dest, names, stored) if verify else {}
    lost = {} if verify else _find_lost(location, manifests)
    is_intact = not any(damages.values()) and not any(lost.values())
    same = _find_same(dest, names, stored, verify=verify) if is_intact else None
    if as_json:
        _print_json(dest, manifests, damages if verify else None, same, groups)
    elif verify:
        _print_damages(damages, manifests)
    if not as_json:
        _print_same(same, verify=verify)
    if grid is not None:
        _draw(dest, names[0], grid, stored, is_quiet=as_json)
    # Flush here, where a closed output pipe is distinguished from other errors.
    sys.stdout.flush()
    return is_intact and not broken


def _complete_splits(dest: str, location: Location, found: SplitNames) -> tuple[str, ...]:
    """Return the names of the complete splits and print the unfinished ones; raise ShardError if none is complete."""
    from loopfeed.preprocess.shards.location import ShardError
    from loopfeed.preprocess.shards.splits import unfinished_remedy

    for name in found.unfinished:
        click.echo(f"{name}: not finished; {unfinished_remedy(location.child(name))}", err=True)
    if found.complete:
        return found.complete
    if found.unfinished or found.broken:
        what = "finished split yet" if found.unfinished else "complete split"
        raise ShardError(f"{location.display} has no {what}; see the messages above")
    raise ShardError(f"{location.display} contains no pack; make one with `preprocess-imagenet SOURCE {dest}`")


def _verify(dest: str, names: tuple[str, ...], stored: dict[str, str]) -> dict[str, tuple[Damage, ...]]:
    from loopfeed.preprocess.commands.progress import ImageProgress
    from loopfeed.preprocess.shards.verify import verify_split

    damages = {}
    with ImageProgress() as progress:
        for name in names:

            def show(done: int, total: int, name: str = name) -> None:
                progress.show(f"verify {name}", done, total)

            damages[name] = verify_split(dest, name, storage_options=stored, on_progress=show)
    return damages


def _find_same(dest: str, names: tuple[str, ...], stored: dict[str, str], *, verify: bool) -> list[SamePixels] | None:
    """Return the images with the same pixels; None, and a message, if they can't be compared."""
    from loopfeed.preprocess.commands.progress import ImageProgress
    from loopfeed.preprocess.shards.duplicates import MOST_COMPARED, find_same_pixels
    from loopfeed.preprocess.shards.location import ShardError

    most = None if verify else MOST_COMPARED
    try:
        with ImageProgress() as progress:

            def show(name: str, done: int, total: int) -> None:
                progress.show(f"compare {name}", done, total)

            return find_same_pixels(dest, names, storage_options=stored, most_compared=most, on_progress=show)
    except ShardError as error:
        click.echo(f"not compared with each other: {error}", err=True)
        return None


def _print_same(same: list[SamePixels] | None, *, verify: bool) -> None:
    for each in same or ():
        click.echo(f"warning: {each}")
    if verify and same == []:
        click.echo("No image is in two splits, or twice in one under two labels, pixel for pixel.")


def _find_lost(location: Location, manifests: dict[str, Manifest]) -> dict[str, tuple[Damage, ...]]:
    """Return the files that each split lacks, and print them."""
    from loopfeed.preprocess.shards.verify import find_lost_files

    lost = {name: find_lost_files(location.child(name), manifest) for name, manifest in manifests.items()}
    for name, found in lost.items():
        if found:
            are = "1 file is" if len(found) == 1 else f"{len(found):,} files are"
            click.echo(
                f"{name}: {are} missing or damaged. Restore the files below, or run the command again that packed the "
                "split, which packs them again",
                err=True,
            )
        for each in found:
            click.echo(f"  {name}/{each}", err=True)
    return lost


def _draw(dest: str, name: str, grid: Path, stored: dict[str, str], *, is_quiet: bool) -> None:
    from loopfeed.preprocess.commands.contact_sheet import draw_contact_sheet
    from loopfeed.preprocess.shards.reader import open_split

    with open_split(dest, name, storage_options=stored) as split:
        sheet = draw_contact_sheet(split, title=f"{dest}  {name}")
    with naming_file(grid):
        sheet.save(grid)
    if not is_quiet:
        click.echo(f"Contact sheet of {name}: {grid}")


def _read_groups(dest: str, manifests: dict[str, Manifest], stored: dict[str, str]) -> dict[str, frozenset[int]]:
    """Return the numbers of the groups of each split that has them; without splits whose groups cannot be read."""
    from loopfeed.preprocess.shards.location import ShardError
    from loopfeed.preprocess.shards.reader import open_split

    found = {}
    for name, manifest in manifests.items():
        if manifest.num_groups:
            try:
                with open_split(dest, name, storage_options=stored) as split:
                    numbers = split.groups()
            except ShardError as error:
                click.echo(f"{name}: the groups cannot be read: {error}", err=True)
            else:
                found[name] = frozenset(() if numbers is None else numbers.tolist())
    return found


def _print_shared(groups: Mapping[str, frozenset[int]]) -> None:
    """Print whether groups are in two splits."""
    shared = {(one, other): len(groups[one] & groups[other]) for one, other in combinations(groups, 2)}
    for (one, other), count in shared.items():
        if count:
            are = "1 group is" if count == 1 else f"{count:,} groups are"
            click.echo(f"warning: {are} in both {one} and {other}")
    if shared and not any(shared.values()):
        click.echo("No group is in two splits.")


def _describe(name: str, manifest: Manifest, groups: frozenset[int] | None) -> list[str]:
    rule = manifest.resize_rule
    mean, std = (
        ", ".join(f"{part:.4f}" for part in figure) for figure in (manifest.channel_mean, manifest.channel_std)
    )
    from loopfeed.preprocess.commands.pack_report import describe_targets

    kind = "whole pictures on canvases " if manifest.is_whole else ""
    labels = describe_targets(manifest.num_classes, None if manifest.targets is None else manifest.targets.kind)
    # Damage that reading does not detect.
    undetected = ": only --verify detects swapped shard files" if manifest.format_version == 1 else ""
    if not manifest.checksum:
        undetected = ": without checksums, only --verify detects damage"
    lines = [
        f"{name}",
        f"  images     {manifest.num_images:,} {kind}of {manifest.width} x {manifest.height} pixels, {labels}",
        f"  shards     {quantity(manifest.num_shards, 'file')} of up to "
        f"{quantity(manifest.shard_images, 'image')}, layout "
        f"{manifest.pixel_layout}, codec {manifest.codec}, {'with' if manifest.checksum else 'without'} checksums",
        f"  format     version {manifest.format_version}{undetected}",
        f"  resizing   {', '.join(f'{key} {value}' for key, value in rule.items())}",
        f"  channels   mean {mean}; std {std} (red, green, blue on 0..1)",
        f"  left out   {manifest.num_failures:,}" + (", see failures.jsonl" if manifest.num_failures else ""),
        f"  source     {manifest.source_digest}",
        f"  made with  {', '.join(f'{tool} {version}' for tool, version in manifest.tool_versions.items())}",
    ]
    numbered = "groups" if groups is None else quantity(len(groups), "group")
    if columns := ["weights"] * ("weights" in manifest.column_digests) + [numbered] * bool(manifest.num_groups):
        lines.append(f"  also       {' and '.join(columns)} of the images")
    if manifest.targets is None:
        return lines + _balance(manifest)
    lines.append(f"  labels     {manifest.targets.labels_file}")
    return lines + (_balance(manifest) if manifest.targets.kind == "classes" else _ranges_of_numbers(manifest))


def _ranges_of_numbers(manifest: Manifest) -> list[str]:
    from loopfeed.preprocess.printable import printable

    assert manifest.targets is not None
    names = [printable(each.name) for each in manifest.classes[:_CLASSES_SHOWN]]
    width = max(map(len, names))
    ranges = zip(names, manifest.targets.minima, manifest.targets.maxima, strict=False)
    lines = [f"    {name:<{width}}  {least:.6g} to {most:.6g}" for name, least, most in ranges]
    if (more := manifest.num_classes - len(names)) > 0:
        lines.append(f"    and {quantity(more, 'more number')}")
    return ["  numbers", *lines]


def _balance(manifest: Manifest) -> list[str]:
    counts = sorted(manifest.class_counts)
    each = f"{counts[0]:,} to {quantity(counts[-1], 'image')} per class, median {counts[len(counts) // 2]:,}"
    if counts[0] == counts[-1]:
        each = f"{quantity(counts[0], 'image')} per class"
    lines = [f"  balance    {each}"]
    if empty := counts.count(0):
        lines.append(f"             {quantity(empty, 'class')} {'has' if empty == 1 else 'have'} no images")
    if manifest.num_classes > _CLASSES_SHOWN:
        return lines
    from loopfeed.preprocess.printable import printable

    names = [printable(each.name) for each in manifest.classes]
    width = max(map(len, names))
    for name, count in zip(names, manifest.class_counts, strict=True):
        bar = "#" * round(_BAR_WIDTH * count / max(counts[-1], 1))
        lines.append(f"    {name:<{width}}  {count:>9,}  {bar}")
    return lines


def _print_damages(damages: dict[str, tuple[Damage, ...]], manifests: dict[str, Manifest]) -> None:
    for name, found in damages.items():
        if not found:
            # A decoder does not read every bit of a compressed image.
            is_decoded = manifests[name].codec != "raw" and not manifests[name].checksum
            click.echo(f"{name}: every {'pixel and label' if is_decoded else 'byte'} is as it was packed.")
            continue
        if damaged := [each for each in found if not each.remedy]:
            click.echo(
                f"{name}: damaged in {_places(damaged)}. Restore the files below, or pack again with --overwrite and "
                "the original options (--size, --holdout, …). Without --overwrite, whatever is missing or truncated is "
                "packed again, and changed labels, checksums, extents, names, weights, groups, failures and metadata "
                "are too, but not changed images."
            )
            _print_lines(name, damaged)
        if refused := [each for each in found if each.remedy]:
            click.echo(f"{name}: not read in {_places(refused)}, so these files may be intact:")
            _print_lines(name, refused)


def _places(damages: Sequence[Damage]) -> str:
    return "1 place" if len(damages) == 1 else f"{len(damages):,} places"


def _print_lines(name: str, damages: Sequence[Damage]) -> None:
    for each in damages:
        click.echo(f"  {name}/{each}")


def _print_json(
    dest: str,
    manifests: dict[str, Manifest],
    damages: dict[str, tuple[Damage, ...]] | None,
    same: list[SamePixels] | None,
    groups: Mapping[str, frozenset[int]],
) -> None:
    splits: dict[str, Any] = {}
    for name, manifest in manifests.items():
        splits[name] = {"manifest": json.loads(manifest.to_json())}
        if damages is not None:
            splits[name]["damages"] = [
                {"file": each.file, "what": each.what, "images": list(each.images), "names": list(each.names)}
                for each in damages[name]
            ]
    for name, numbers in groups.items():
        splits[name]["num_groups"] = len(numbers)
        splits[name]["shared_groups"] = {other: len(numbers & groups[other]) for other in groups if other != name}
    found = None if same is None else [asdict(each) for each in same]
    click.echo(json.dumps({"data": dest, "splits": splits, "same_pixels": found}, indent=1))
