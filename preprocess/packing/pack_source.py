"""Packs a whole data set: what `preprocess-imagenet` does on one machine, from Python, and what the two share."""

import inspect
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

from loopfeed.preprocess.control_groups import num_cores
from loopfeed.preprocess.decoding.decode import ResizeRule
from loopfeed.preprocess.decoding.default_resize import AUTO, DEFAULT_SIZE, SIZE_STEP, default_resize
from loopfeed.preprocess.packing.image_sides import fit_size
from loopfeed.preprocess.packing.pack import PackProgress, PackResult, pack_split
from loopfeed.preprocess.packing.plan import HELD_OUT_SPLITS, PackSettings, ShardArguments, choose_holdout_rule
from loopfeed.preprocess.shards.duplicates import same_pixels_warnings
from loopfeed.preprocess.shards.location import Location, ShardError, open_location
from loopfeed.preprocess.shards.split_files import prepare_for_writing
from loopfeed.preprocess.sources.given import given_layout
from loopfeed.preprocess.sources.given_items import ItemError
from loopfeed.preprocess.sources.open_source import open_source
from loopfeed.preprocess.suggestions import did_you_mean

_SHARD_ARGUMENTS = ShardArguments.__annotations__


def pack(
    source: Any,
    dest: str | Path,
    *,
    labels: str | Path | None = None,
    class_column: str | None = None,
    group_by: str | None = None,
    weight_column: str | None = None,
    unlabelled: Literal["fail", "skip"] = "fail",
    class_from: Literal["top", "leaf"] = "top",
    classes: Iterable[str] | None = None,
    names: Iterable[str] | Mapping[str, Iterable[str]] | None = None,
    size: int | Literal["auto"] = DEFAULT_SIZE,
    resize: int | None = None,
    resample: str = "bicubic",
    levels: str | None = None,
    truncated: Literal["skip", "keep"] = "skip",
    canvas: str | None = None,
    splits: str | Iterable[str] | None = None,
    holdout: float = 0.0,
    limit: int | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, str] | None = None,
    on_progress: Callable[[str, PackProgress], None] = lambda _split, _progress: None,
    notify: Callable[[str], None] = lambda _: None,
    **shards: Unpack[ShardArguments],
) -> dict[str, PackResult]:
    """Pack the images at `source` into shards at `dest`, as `preprocess-imagenet` does with the options of these names.

    An interrupted pack is continued, and a finished one is left unchanged. Both need the same source: the same files,
    by path and size; of arrays, lists and iterables, the same bytes; of a data set whose labels are known without
    decoding its images, the same labels, and the same bytes of 16 images. An iterable is read from its start.

    Args:
        source: the path of a folder, archive or container in one of the layouts of `preprocess-imagenet --help`; or, of
            each image and its label,

            - a pair of arrays, or of lists, `(images, labels)`: uint8 or uint16 `[N, H, W]`, `[N, H, W, C]` or, where
              that is not possible, `[N, C, H, W]`, of NumPy, PyTorch, JAX, or a file of HDF5 or Zarr,
            - a list of `(image, label)`,
            - a data set with `__len__` and `__getitem__` whose items are `(image, label)`, or dicts with `"image"` and
              `"label"`, such as those of PyTorch, torchvision and Hugging Face; one thread at a time calls it, and
              those whose labels are not known before are read as an iterable is,
            - an iterable of these items that ends, such as a generator. It is read once, before packing, into a
              temporary file beside `dest` as large as the files or arrays that it yields,
            - a dict of splits, such as ``{"train": …, "val": …}``, of any of these.

            An image is an array, an image of Pillow, the path of a file, or its bytes.
        dest: a folder or a TensorStore URL.
        labels: a table of labels for each image, in the place of class folders; for a path.
        class_column: the column of `labels`, or of Parquet files, with the class of each image; None finds it by its
            name, such as "class".
        group_by: a column of `labels`; images with the same value, such as of a patient, are never in two splits.
        weight_column: a column of `labels` that says how often an image is drawn.
        unlabelled: whether images without a line in `labels` "fail" or are left out ("skip").
        class_from: whether the outermost folder below a split is the class ("top") or that of the file ("leaf").
        classes: the names of the classes, of which labels in Python are the numbers; None takes those that a data set
            knows (`classes`, `features`), else the labels themselves.
        names: the name of each image of Python, or a dict of them for each split; None takes the path below the folder
            that all files are in, else the number.
        size: side of the square images, in pixels; "auto" takes the largest, up to 224, for which the image with the
            median shorter side is not enlarged (squares of one size keep their pixels), or that of the pack at `dest`.
        resize: length of the shorter side before the crop, in pixels; None is 8/7 of `size` (`size` up to 64).
        resample: filter by its Pillow name, such as "bicubic", "bilinear" or "lanczos".
        levels: the values that become black and white in images of more than 8 bits per channel, such as "0:4095".
        truncated: "skip" or "keep" an image whose end is missing.
        canvas: width : height of the canvas for whole pictures, such as "3:2"; None stores the central square.
        splits: the splits to pack; None packs all.
        holdout: the fraction of the training images that becomes the split `val`, if the source has none.
        limit: at most so many images per split, spread evenly over the classes.
        workers: decoding threads; None is one per core.
        overwrite: delete an existing pack and start over.
        storage_options: how to reach a remote store, such as ``{"endpoint": "http://127.0.0.1:9000"}``.
        on_progress: called with a split's name and its progress.
        notify: called with one-line notes about the source and its images.
        **shards: `shard_images`, `layout`, `codec`, `checksum` and `on_error` of
            `loopfeed.preprocess.packing.plan.PackSettings`.

    Returns:
        The result of each split, with its manifest and the images that were left out.

    Raises:
        ValueError: an argument is out of range; as SourceError, the source cannot be packed; as ShardError, `dest`
            contains something else, or cannot be written.
        Exception: the data set's own code raised it; a note says for which item.

    Example:
        >>> results = pack("photographs", "data", size=8)  # photographs/train/red/0.png, …
        >>> {split: result.manifest.num_images for split, result in results.items()}
        {'train': 8, 'val': 8}
        >>> images, labels = np.zeros((30, 8, 8, 3), np.uint8), np.arange(30) % 3
        >>> pack((images, labels), "squares", size=8, classes=["circle", "line", "tile"])["train"].manifest.class_counts
        (10, 10, 10)
    """
    if unknown := sorted(shards.keys() - _SHARD_ARGUMENTS):
        known = [*inspect.signature(pack).parameters, *_SHARD_ARGUMENTS]
        raise TypeError(f"pack() has no argument {unknown[0]}{did_you_mean(unknown[0], known)}")
    location = open_location(str(dest), storage_options=storage_options)
    is_path = isinstance(source, str | os.PathLike)
    check_dest(source if is_path else None, location)
    for_paths = {"labels": labels, "class_from": None if class_from == "top" else class_from}
    check_given(is_path, for_paths, {"classes": classes, "names": names})
    settings = pack_settings(size, resize, resample, levels, truncated, canvas, workers, **shards)
    location = prepare_for_writing(location)
    chosen = None if splits is None else (splits,) if isinstance(splits, str) else tuple(splits)
    request = source_request(
        location,
        overwrite=overwrite,
        splits=chosen,
        holdout=holdout,
        limit=limit,
        labels=labels,
        class_column=class_column,
        group_by=group_by,
        weight_column=weight_column,
        unlabelled=unlabelled,
        class_from=class_from,
    )
    rule = request["holdout_rule"] if holdout else None
    try:
        if not is_path:
            source = given_layout(
                source, classes=classes, names=names, splits=chosen, dest=location.local_path, notify=notify
            )
        with open_source(source, **request) as found:
            for note in found.notes:
                notify(note)
            settings = fit_size(
                settings, size, found.splits, location, resize=resize, overwrite=overwrite, notify=notify
            )
            results = {
                name: pack_split(
                    split,
                    location.child(name),
                    replace(settings, holdout_rule=rule if name in HELD_OUT_SPLITS else None),
                    overwrite=overwrite,
                    on_progress=partial(on_progress, name),
                    targets=found.targets.get(name),
                    notify=notify,
                )
                for name, split in found.splits.items()
            }
            for warning in same_pixels_warnings(str(dest), storage_options=storage_options):
                notify(warning)
            return results
    except ItemError as error:
        raise error.cause from None


def check_given(is_path: bool, for_paths: Mapping[str, Any], for_others: Mapping[str, Any]) -> None:
    """Raise ValueError for an argument of `pack` that means nothing for a path, or for a data set in Python."""
    for name, value in (for_others if is_path else for_paths).items():
        if value is not None:
            other = "a data set in Python, whose items have names" if is_path else "a path, such as that of a folder"
            raise ValueError(f"{name}= is for {other}; omit it")


def pack_settings(
    size: int | str,
    resize: int | None,
    resample: str,
    levels: str | None,
    truncated: Any,
    canvas: str | None,
    workers: int | None,
    **shards: Unpack[ShardArguments],
) -> PackSettings:
    """Return the settings of a pack, from the arguments of `pack`; of the size "auto", those that `fit_size` takes."""
    if isinstance(size, str):
        if size != AUTO:
            raise ValueError(f"size must be a whole number or {AUTO!r}, got {size!r}")
        size = min(SIZE_STEP, resize or SIZE_STEP)
    rule = ResizeRule(size, default_resize(size) if resize is None else resize, resample, levels, truncated, canvas)
    return PackSettings(rule=rule, num_workers=num_cores() if workers is None else workers, **shards)


def source_request(
    location: Location,
    *,
    overwrite: bool,
    splits: Collection[str] | None,
    holdout: float,
    **options: Any,
) -> dict[str, Any]:
    """Return the arguments of `open_source` for a pack at `location`, from the arguments of `pack`."""
    rule = choose_holdout_rule(location, replaced=(splits or HELD_OUT_SPLITS) if overwrite else ())
    return {"splits": splits, "holdout": holdout, "holdout_rule": rule, **options}


def check_dest(source: str | Path | None, location: Location) -> None:
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
    if source is None:
        return
    inner, outer = Path(os.path.realpath(folder)), Path(os.path.realpath(source))
    if outer.is_dir() and inner.is_relative_to(outer):
        raise ShardError(
            f"DEST {location.display} is inside SOURCE {source}, so the next run would list the shards as images; "
            "choose a folder outside SOURCE"
        )
