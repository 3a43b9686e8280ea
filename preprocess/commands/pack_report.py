"""What `preprocess-imagenet` prints about a source before it packs it, and about a split once it is packed.

Only click is imported at the top beside small modules, so that ``--help`` responds immediately.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from loopfeed.preprocess.extents import share_of_square
from loopfeed.preprocess.packing.part import describe_parts
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.quantities import quantity

if TYPE_CHECKING:
    from loopfeed.preprocess.decoding.decode import ResizeRule
    from loopfeed.preprocess.decoding.notes import DecodeNotes
    from loopfeed.preprocess.packing.pack import PackResult
    from loopfeed.preprocess.packing.part import Part
    from loopfeed.preprocess.packing.parts import PartResult
    from loopfeed.preprocess.packing.plan import PackSettings
    from loopfeed.preprocess.shards.location import Location
    from loopfeed.preprocess.shards.manifest import Manifest
    from loopfeed.preprocess.shards.targets import TargetKind
    from loopfeed.preprocess.sources.open_source import Source

_FAILURES_SHOWN = 3
_NUM_LOOKED_AT = 16
_MOST_16_BITS = 65535


def announce(source: Source, location: Location, settings: PackSettings) -> None:
    """Print what was found in a source, how it will be packed, and how large the pack will be."""
    rule = settings.rule
    click.echo(f"Found {source.layout}.")
    if source.subfolder is not None:
        click.echo(
            f"warning: class folders contain folders, such as {printable(source.subfolder)}/, whose images get the "
            "class of the outer folder. If the inner folders are the classes, give --class-from leaf",
            err=True,
        )
    if source.unread is not None:
        click.echo(f"Not read: {source.unread}.")
    for note in source.notes:
        click.echo(f"{note}.")
    total = 0
    for name, split in source.splits.items():
        num_shards = -(-len(split) // settings.resolved_shard_images)
        targets = source.targets.get(name)
        num_bytes = len(split) * (settings.image_bytes + 4 * settings.checksum)
        num_bytes += 0 if targets is None else targets.values.nbytes
        total += num_bytes
        bound = "up to " if settings.codec == "blosc" else ""
        click.echo(
            f"  {name}: {quantity(len(split), 'image')}, "
            f"{describe_targets(len(split.classes), None if targets is None else targets.kind)}, "
            f"{quantity(num_shards, 'shard file')}, {bound}{_size(num_bytes)}"
        )
    height, width = rule.stored_shape
    kept = f"central crop of {width} x {height} px"
    if share := share_of_square(rule.to_json()):
        of_photograph = f"{100 * share:.0f} % of a 4:3 photograph; --canvas 3:2 packs all of it"
        kept += f" ({100 * share * 4 / 3:.0f} % of a square image)" if _are_squares(source) else f" ({of_photograph})"
    if rule.canvas is not None:
        kept = f"whole on a canvas of {width} x {height} px, portraits transposed"
    click.echo(
        f"Each image: shorter side resized to {rule.resize} px ({rule.resample}), {kept}; "
        f"{settings.layout} layout, codec {settings.codec}, {'with' if settings.checksum else 'without'} checksums."
    )
    folder = location.local_path
    if folder is not None:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        scarce = "; this may not be enough" if total > free else ""
        click.echo(f"Packing into {location.display} ({_size(free)} free{scarce}).")
    else:
        click.echo(f"Packing into {location.display}.")


def announce_dry_run(source: Source, settings: PackSettings, part: Part | None) -> None:
    """Print which shards of each split a part would pack, and that nothing was packed."""
    if part is not None:
        for name, split in source.splits.items():
            blocks = part.blocks(-(-len(split) // settings.resolved_shard_images))
            click.echo(f"  {name}: {describe_parts(blocks, part.count) or f'no shard for part {part}'}.")
    _warn_of_small_images(source, settings.rule)
    click.echo("This was a dry run: nothing was packed.")


def _are_squares(source: Source) -> bool:
    """Return whether a few images that are looked at are all squares."""
    from loopfeed.preprocess.packing.image_sides import read_sides
    from loopfeed.preprocess.sources.listing import SourceError

    try:
        sides = read_sides(source.splits, most=_NUM_LOOKED_AT)
    except SourceError:
        return False
    return sides.num_squares == len(sides.shorter)


def _length(rule: ResizeRule) -> str:
    """Return the option with the length to which shorter sides are resized."""
    return f"--size {rule.size}" if rule.resize == rule.size else f"--resize {rule.resize}"


def _warn_of_small_images(source: Source, rule: ResizeRule) -> None:
    """Print how many images would be enlarged, by the headers of a few; nothing if none can be read."""
    from loopfeed.preprocess.decoding.default_resize import default_resize, fitting_size
    from loopfeed.preprocess.packing.image_sides import read_sides
    from loopfeed.preprocess.sources.listing import SourceError

    with suppress(SourceError):
        sides = read_sides(source.splits)
        if count := sides.num_below(rule.resize):
            of = quantity(len(sides.shorter), "image")
            size, resize = fitting_size(sides.median, are_squares=sides.are_squares)
            as_is = ", without resizing" if resize == sides.median != default_resize(size) else ""
            click.echo(
                f"  {count:,} of {of} looked at have a shorter side of less than {_length(rule)}, and would be enlarged"
                + (f"; --size auto would be {size}{as_is}." if size < rule.size or as_is else ".")
            )


def summarise(name: str, result: PackResult, location: Location, *, can_overwrite: bool = True) -> None:
    """Print what was packed of the split `name`, and what was left out; no part suggests --overwrite."""
    manifest = result.manifest
    note = ""
    if result.repaired:
        shown = ", ".join(result.repaired[:_FAILURES_SHOWN])
        more = f" and {len(result.repaired) - _FAILURES_SHOWN:,} more" if len(result.repaired) > _FAILURES_SHOWN else ""
        note = f" (already, but files were missing or damaged and were packed again: {shown}{more})"
    elif result.was_complete:
        note = " (already complete)"
    elif result.num_resumed:
        note = f" (continued after image {result.num_resumed:,})"
    images, targets = quantity(manifest.num_images, "image"), manifest.targets
    what = describe_targets(manifest.num_classes, None if targets is None else targets.kind)
    click.echo(
        f"{name}: {images} of {what} packed{note}." if targets is None else f"{name}: {images} packed, {what}{note}."
    )
    if manifest.num_classes == 1 and targets is None:
        click.echo(
            f"warning: all images of {name} belong to one class, {printable(manifest.classes[0].id)}; if SOURCE "
            "has class folders, give the folder that contains them",
            err=True,
        )
    how = "--overwrite" if can_overwrite else "into another DEST"
    _warn_of_notes(result.notes, manifest.resize_rule.get("levels"), how)
    if result.notes.num_enlarged:
        _report_enlarged(result.notes, manifest, how)
    if not result.failures:
        return
    click.echo(f"  Left out: {len(result.failures):,} (all listed in {location.display}failures.jsonl):")
    for failure in result.failures[:_FAILURES_SHOWN]:
        click.echo(f"    {printable(failure.path)}: {failure.reason}")
    if len(result.failures) > _FAILURES_SHOWN:
        click.echo(f"    and {len(result.failures) - _FAILURES_SHOWN:,} more")


def _report_enlarged(notes: DecodeNotes, manifest: Manifest, how: str) -> None:
    """Print how many images are smaller than the size, and if most are, which size fits and what it would save."""
    from loopfeed.preprocess.decoding.decode import ResizeRule
    from loopfeed.preprocess.decoding.default_resize import default_resize, fitting_size
    from loopfeed.preprocess.pixels import words_of_row

    rule, most = ResizeRule.from_json(manifest.resize_rule), notes.enlarged_max
    click.echo(
        f"  Enlarged, because their shorter side is less than {_length(rule)}: {notes.num_enlarged:,} of "
        f"{quantity(manifest.num_images, 'image')} (at most {most} px)."
    )
    if 2 * notes.num_enlarged > manifest.num_images:
        size, resize = fitting_size(most)
        layout = manifest.pixel_layout
        before, after = (
            manifest.num_images * 4 * each.stored_shape[0] * words_of_row(each.stored_shape[1], layout)
            for each in (rule, replace(rule, size=size, resize=resize))
        )
        takes = f", and takes {_size(after)} in the place of {_size(before)}" if after < before else ""
        resized = "" if rule.resize == default_resize(rule.size) else f" --resize {resize}"
        side = notes.enlarged_square if notes.num_enlarged == manifest.num_images else 0
        all_pixels = f"; --size {side} --resize {side} keeps all their pixels" if side and side != size else ""
        click.echo(
            f"warning: --size {size}{resized} fits them{takes}{all_pixels}; run the same command again with "
            f"{'one of these' if all_pixels else 'it'} {how}",
            err=True,
        )


def _warn_of_notes(notes: DecodeNotes, levels: int | str | None, how: str) -> None:
    """Print what is remarkable about deep images, and how many images were truncated or longer than the canvas.

    Args:
        notes: about the images of the pack.
        levels: the levels that were given.
        how: how the command can be run again with others.
    """
    if notes.num_fitted:
        click.echo(f"  Made smaller, because they are longer than the canvas: {quantity(notes.num_fitted, 'picture')}.")
    if notes.num_deep and notes.deep_max <= _MOST_16_BITS // 2:
        share = 100 * (notes.deep_max + 1) / (_MOST_16_BITS + 1)
        white = (1 << notes.deep_max.bit_length()) - 1
        deep = "1 image of 16 bits has" if notes.num_deep == 1 else f"{notes.num_deep:,} images of 16 bits have"
        click.echo(
            f"warning: {deep} no value over {notes.deep_max:,}, so they use "
            f"{share:.2g} % of the range 0 to 65,535 and become dark. If {white:,} is white, run the same "
            f"command again with --levels 0:{white} {how}",
            err=True,
        )
    if notes.num_declared and notes.white_min != notes.white_max:
        click.echo(
            f"warning: the files name different values for white, from {notes.white_min:,} to {notes.white_max:,}, and "
            "each is scaled by its own. If the same values mean the same in all of them, run the same command again "
            f"with --levels 0:{notes.white_max} {how}",
            err=True,
        )
    if notes.num_deep and notes.num_declared:
        click.echo(
            f"warning: {notes.num_declared:,} images are scaled by the white value that their file names, and "
            f"{notes.num_deep:,} by 65,535, because their files name none, or have larger values. If the same values "
            f"mean the same in all of them, run the same command again with --levels {how}",
            err=True,
        )
    if notes.num_clipped:
        are = "1 image has" if notes.num_clipped == 1 else f"{notes.num_clipped:,} images have"
        click.echo(f"  {are} values beyond --levels {levels}, which became black or white.")
    if notes.num_kept:
        click.echo(f"  Truncated, but kept (--truncated keep): {quantity(notes.num_kept, 'image')}.")


def summarise_part(name: str, result: PartResult, part: Part, location: Location) -> None:
    """Print what was packed of a part of the split `name`, and the whole split once it is finished."""
    if result.finished is None or not result.finished.was_complete:
        note = f", {result.num_resumed:,} of them earlier" if result.num_resumed else ""
        click.echo(f"{name}: part {part} packed, {quantity(result.num_shards, 'shard file')}{note}.")
    if result.finished is not None:
        summarise(name, result.finished, location, can_overwrite=False)
    elif result.missing:
        click.echo(f"  Not packed yet: {describe_parts(result.missing, part.count)}.")
    else:
        click.echo("  All parts are packed; another process is finishing the split. If it was killed, use --finish.")


def describe_targets(count: int, kind: TargetKind | None) -> str:
    """Return "10 classes", "any of 10 classes each" or "2 numbers each" for the labels of a split.

    `kind` is None if each image has one class.
    """
    if kind == "numbers":
        return f"{quantity(count, 'number')} each"
    classes = quantity(count, "class")
    return classes if kind is None else f"any of {classes} each"


def _size(num_bytes: int) -> str:
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"
