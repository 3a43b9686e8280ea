"""The command `preprocess-imagenet`, which packs an image data set into shards of packed pixels.

Only click is imported at the top, so that ``--help`` responds immediately.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from loopfeed.preprocess.commands.completion import complete_file, complete_folder
from loopfeed.preprocess.commands.grouped_help import GroupedCommand
from loopfeed.preprocess.commands.guarded_output import reporting, show_only_on_stdout
from loopfeed.preprocess.commands.pack_report import announce, announce_dry_run
from loopfeed.preprocess.commands.storage import open_given, storage_option
from loopfeed.preprocess.commands.suggesting import NumberOrWord, SuggestingChoice
from loopfeed.preprocess.decoding.default_resize import AUTO, DEFAULT_SIZE, LARGEST_SIZE_WITHOUT_MARGIN, MAX_SIZE
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.storage_options import parse_pairs

if TYPE_CHECKING:
    from loopfeed.preprocess.shards.targets import TargetKind
    from loopfeed.preprocess.sources.open_source import Source

# Click keeps the line breaks of a paragraph that begins with a backspace.
_EPILOG = """\b
Examples:
  preprocess-imagenet ~/imagenet data/shards
  preprocess-imagenet cifar-10-batches-bin data/cifar --size 32
  preprocess-imagenet photos data/photos --labels photos.csv --holdout 0.1
  preprocess-imagenet --demo data/demo

To continue after an interruption, run the same command again.
Exit codes: 0 done, 2 wrong usage or data, 130 stopped by SIGINT, SIGTERM or SIGHUP."""

_TABLE_OPTIONS = ("labels", "class_column", "group_by", "weight_column", "unlabelled")
_GROUPS = {
    "What to pack": ("split", "class_from", *_TABLE_OPTIONS, "holdout", "limit", "demo"),
    "Images": ("size", "resize", "canvas", "resample", "levels", "truncated", "on_error"),
    "Shards": ("shard_images", "layout", "codec", "checksum"),
    "Several machines": ("part", "finish", "executor", "scheduler"),
    "Running": ("workers", "storage_option", "overwrite", "dry_run", "traceback"),
}


_SQUARE = "square"


@click.command(cls=GroupedCommand, option_groups=_GROUPS, epilog=_EPILOG)
@click.argument("source", required=False, shell_complete=complete_file)
@click.argument("dest", required=False, shell_complete=complete_folder)
@click.option(
    "--split",
    multiple=True,
    metavar="NAME",
    show_default="all",
    help="Split to pack. Repeat the option to pack several splits.",
)
@click.option(
    "--labels",
    metavar="FILE",
    shell_complete=complete_file,
    show_default="the folder of each image is its class",
    help="Table (CSV, TSV or JSON lines) with a class, several classes, or numbers, for each image of SOURCE.",
)
@click.option(
    "--class-from",
    type=SuggestingChoice(["top", "leaf"]),
    default="top",
    help="top: the outermost folder below a split is the class. leaf: the folder that contains the image is.",
)
@click.option(
    "--class-column",
    metavar="COLUMN",
    show_default="class or label",
    help="Column of --labels, or of Parquet files, with the one class of each image.",
)
@click.option(
    "--group-by",
    metavar="COLUMN",
    help="Column of --labels, such as a patient or a camera, whose images --holdout keeps in the same split.",
)
@click.option("--weight-column", metavar="COLUMN", help="Column of --labels that says how often an image is drawn.")
@click.option(
    "--unlabelled",
    type=SuggestingChoice(["fail", "skip"]),
    default="fail",
    help="fail: stop if an image has no line in --labels. skip: leave such images out.",
)
@click.option(
    "--holdout",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    metavar="FRACTION",
    help="Fraction of each class of the train split (with several classes or numbers: of all its images) to hold out "
    "as val if SOURCE has no val split.",
)
@click.option(
    "--limit",
    type=click.IntRange(1),
    metavar="IMAGES",
    show_default="none",
    help="Pack at most this many images of each split.",
)
@click.option("--demo", is_flag=True, help="Draw the small demo data set and pack it at 32 px; give only DEST.")
@click.option(
    "--size",
    type=NumberOrWord(AUTO, 1, MAX_SIZE),
    default=DEFAULT_SIZE,
    metavar=f"PIXELS|{AUTO}",
    help="Side length of the square that is packed or, of whole pictures, that evaluation crops. auto: the largest, up "
    f"to {DEFAULT_SIZE}, for which the image with the median shorter side is not enlarged; squares of one size "
    "keep their pixels.",
)
@click.option(
    "--resize",
    type=click.IntRange(1, MAX_SIZE),
    metavar="PIXELS",
    show_default=f"8/7 of --size (e.g. 256 for 224), or --size itself if it is at most {LARGEST_SIZE_WITHOUT_MARGIN}",
    help="Resize the shorter side to this length before the central crop, or before a picture is packed whole.",
)
@click.option(
    "--canvas",
    metavar="W:H",
    default=_SQUARE,
    callback=lambda _context, _parameter, value: None if value == _SQUARE else value,
    help="Pack whole pictures, each on a canvas of this width and height, such as 3:2; portraits are transposed, and "
    "longer pictures are made smaller. Give 3:2 for a training with --crop resized, as the recipes of ImageNet are: it "
    "takes twice the disk. square: pack only the central crop, which is all that --crop centre and evaluations use.",
)
@click.option(
    "--resample",
    type=SuggestingChoice(["bicubic", "bilinear", "lanczos"]),
    default="bicubic",
    help="Filter for resizing.",
)
@click.option(
    "--levels",
    metavar="LOW:HIGH",
    show_default="those that a file names, else 0:65535, and 0:1 for floats",
    help="Values that become black and white in images of more than 8 bits, e.g. 0:4095 for 12 bits in 16-bit files.",
)
@click.option(
    "--truncated",
    type=SuggestingChoice(["skip", "keep"]),
    default="skip",
    help="skip: leave out files that end too early. keep: pack what is there of them; the rest is black or grey.",
)
@click.option(
    "--on-error",
    type=SuggestingChoice(["skip", "fail"]),
    default="skip",
    help="skip: leave out images that can't be packed and list them in failures.jsonl. fail: stop at the first such "
    "image.",
)
@click.option(
    "--shard-images",
    type=click.IntRange(1),
    metavar="IMAGES",
    show_default="the largest power of two whose images fit in 64 MiB, at most 16,384",
    help="Number of images per shard file.",
)
@click.option(
    "--layout",
    type=SuggestingChoice(["packed", "dense"]),
    default="packed",
    help="packed: one 32-bit word per pixel. dense: four pixels in three words, a quarter smaller; --size must be a "
    "multiple of 4 (a --canvas always is).",
)
@click.option(
    "--codec",
    type=SuggestingChoice(["raw", "blosc"]),
    default="raw",
    help="raw: fastest to read. blosc: compressed, about a quarter smaller.",
)
@click.option(
    "--checksum/--no-checksum", default=True, help="Store a CRC-32C of each image, so that readers detect flipped bits."
)
@click.option(
    "--part",
    metavar="I/N",
    show_default="everything",
    help="Pack only part I of N, e.g. 2/8. The parts may run at once, on machines that share SOURCE and DEST. The last "
    "one to end finishes the pack.",
)
@click.option(
    "--finish",
    is_flag=True,
    help="Pack nothing, but finish a pack of which all parts are packed, or name the missing ones. Give the same "
    "options as for the parts, without --part.",
)
@click.option(
    "--executor",
    type=SuggestingChoice(["threads", "dask"]),
    default="threads",
    help="threads: pack on this machine. dask: pack on the workers of a Dask cluster that share SOURCE and DEST.",
)
@click.option("--scheduler", metavar="ADDRESS", help="Address of the Dask scheduler, e.g. tcp://node1:8786.")
@click.option(
    "--workers",
    type=click.IntRange(1),
    metavar="THREADS",
    show_default="one per core; with --executor dask, one per shard file in progress",
    help="Number of decoding threads. Each needs about 80 MB; images larger than 4 megapixels need more and wait until "
    "enough memory is free.",
)
@storage_option
@click.option("--overwrite", is_flag=True, help="Delete the existing pack at DEST and start over.")
@click.option("--dry-run", is_flag=True, help="Show what would be packed and how large it would be, but write nothing.")
@click.pass_context
def main(ctx: click.Context, /, **values: Any) -> None:
    """Pack the images at SOURCE into shards at DEST, ready for run-train.

    SOURCE is a folder with one folder per class (directly in it, or in train/ and val/), a folder with the official
    ImageNet archives, the folder tree of Kaggle's ImageNet, a tar or zip archive of class folders, or a container:
    WebDataset archives, Parquet files, NumPy's .npz and .npy, MNIST's or CIFAR's files. With --labels, SOURCE is any
    folder or archive of images. DEST is a folder or a URL such as gs://bucket/imagenet.
    """
    options = SimpleNamespace(**values)
    stopped = "Stopped. Run the same command again to continue."
    remedy = "; use fewer --workers or a smaller --shard-images"
    with reporting("preprocess-imagenet", stopped, remedy, with_traceback=options.traceback):
        if options.demo:
            _check_demo_options(ctx)
        _run(options)


def _run(options: SimpleNamespace) -> None:
    if options.demo:
        _pack_demo(options)
        return
    if options.source is None or options.dest is None:
        raise click.UsageError("SOURCE and DEST are required; to try the command without a data set, use --demo DEST")
    from loopfeed.preprocess.commands.pack_splits import Machines, check_machines, connect, pack_splits
    from loopfeed.preprocess.packing.dask_request import PackRequest
    from loopfeed.preprocess.packing.image_sides import fit_size
    from loopfeed.preprocess.packing.pack_source import check_dest, pack_settings, source_request
    from loopfeed.preprocess.shards.split_files import prepare_for_writing
    from loopfeed.preprocess.sources.open_source import open_source

    names = ("size", "resize", "resample", "levels", "truncated", "canvas", "workers")
    shards = ("shard_images", "layout", "codec", "checksum", "on_error")
    settings = pack_settings(**{name: getattr(options, name) for name in (*names, *shards)})
    machines = check_machines(
        options.part, options.finish, options.executor, options.scheduler, overwrite=options.overwrite
    )
    stored = parse_pairs(options.storage_option)
    location = open_given(options.dest, stored)
    check_dest(options.source, location)
    location = prepare_for_writing(location)
    if machines.scheduler is not None:
        settings = replace(settings, num_workers=options.workers or 1)
    request = source_request(
        location,
        overwrite=options.overwrite,
        splits=options.split or None,
        holdout=options.holdout,
        limit=options.limit,
        class_from=options.class_from,
        **{name: getattr(options, name) for name in _TABLE_OPTIONS},
    )
    if not options.dry_run:
        show_only_on_stdout()
    with connect(Machines() if options.dry_run else machines) as cluster:
        click.echo(f"Listing {options.source} ...", err=True)
        with open_source(options.source, **request) as source:
            settings = fit_size(
                settings,
                options.size,
                source.splits,
                location,
                resize=options.resize,
                overwrite=options.overwrite,
                notify=click.echo,
            )
            announce(source, location, settings)
            if options.overwrite:
                _warn_about_other_splits(source, options.dest, stored)
            if options.dry_run:
                announce_dry_run(source, settings, machines.part)
                return
            settings = replace(settings, holdout_rule=request["holdout_rule"] if options.holdout else None)
            if cluster is not None:
                cluster.send_request(PackRequest.of(options.source, request, location, stored, settings))
            if pack_splits(source, location, settings, machines, cluster):
                from loopfeed.preprocess.shards.duplicates import same_pixels_warnings

                for warning in same_pixels_warnings(options.dest, storage_options=stored):
                    click.echo(warning, err=True)
                _suggest(options.dest, next((each.kind for each in source.targets.values()), None), stored)


def _warn_about_other_splits(source: Source, dest: str, stored: dict[str, str]) -> None:
    """Warn if splits at DEST are left unchanged, because a new --holdout may put their images into new splits too."""
    from loopfeed.preprocess.shards.reader import list_splits

    others = [name for name in list_splits(dest, storage_options=stored) if name not in source.splits]
    if others:
        click.echo(
            f"warning: this command leaves {', '.join(others)} at DEST unchanged. Images that were held out with "
            "--holdout will be in two splits unless you use the same --holdout again"
        )


def _pack_demo(options: SimpleNamespace) -> None:
    if options.dest is not None or options.source is None:
        raise click.UsageError("--demo draws its own images; give only DEST")
    from loopfeed.preprocess.commands.progress import ImageProgress
    from loopfeed.preprocess.demo.demo_set import pack_demo

    dest, stored = options.source, parse_pairs(options.storage_option)
    if options.dry_run:
        click.echo(f"Would draw the demo set and pack it into {dest}.")
        return
    show_only_on_stdout()
    click.echo("Drawing the demo set ...", err=True)
    with ImageProgress() as progress:
        pack_demo(
            dest,
            overwrite=options.overwrite,
            on_progress=lambda name, state: progress.show(name, state.done, state.total),
            storage_options=stored,
        )
    from loopfeed.preprocess.shards.reader import list_splits, read_manifest

    location = open_given(dest, stored)
    for name in list_splits(dest, storage_options=stored):
        manifest = read_manifest(location, name)
        click.echo(
            f"{name}: {quantity(manifest.num_images, 'image')} of {quantity(manifest.num_classes, 'class')} packed."
        )
    _suggest(dest, stored=stored)


def _check_demo_options(ctx: click.Context) -> None:
    """Raise UsageError if an option is given that has no effect with ``--demo``."""
    supported = {"demo", "source", "dest", "storage_option", "overwrite", "dry_run", "traceback"}
    for param in ctx.command.params:
        name = param.name or ""
        if name not in supported and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{param.opts[0]} cannot be used with --demo, whose settings are fixed; remove it")


def _suggest(dest: str, targets: TargetKind | None = None, stored: Mapping[str, str] | None = None) -> None:
    import shlex

    where = shlex.quote(dest if "://" in dest else str(Path(dest)))
    where += "".join(f" --storage-option {shlex.quote(f'{name}={value}')}" for name, value in (stored or {}).items())
    loss = {"classes": " --loss binary-cross-entropy", "numbers": " --loss mean-squared-error", None: ""}[targets]
    click.echo(f"Inspect it:  inspect-shards {where}\nTrain on it: run-train --data {where}{loss}")
