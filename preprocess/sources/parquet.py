"""Reads Parquet files of encoded images and labels, as Hugging Face's `datasets` writes them, by pyarrow.

A pack reads images in random order, but a value of a Parquet file can only be read with its whole page. So the encoded
images of a split are copied once, in order, into a temporary file without a name: memory stays bounded, and each byte
is decompressed once.
Format of the metadata: the key `huggingface` of the schema, with the features of `datasets`.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from loopfeed.preprocess.printable import first_names, printable
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.sources.contents import file_content, head_of
from loopfeed.preprocess.sources.listing import MAX_FILE_BYTES, ByteStore, Layout, Listing, SourceError
from loopfeed.preprocess.sources.samples import ArrayLabels, class_id, samples_layout, split_of_path
from loopfeed.preprocess.sources.source_file import StoredImages, not_as_named, open_source_file
from loopfeed.preprocess.sources.spool import Spool

MAGIC = b"PAR1"
_LABEL_COLUMNS = ("label", "labels", "class", "cls", "category", "target", "class_name", "fine_label")
_IMAGE_COLUMNS = ("image", "img", "jpg", "png", "bytes", "image_bytes", "pixels")
_BATCH_ROWS = 1  # a page may repeat one large value, so that a few rows would need much memory
_MOST_REPEATED, _ALWAYS_ALLOWED_BYTES = 1_000, 2**30  # Deflate makes bytes at most 1,032 times smaller
_MAX_SHOWN = 8
# Those of pyarrow are classes of these; values that Python has no form of, such as text of other bytes, raise them too.
_DAMAGES = (OSError, ValueError, OverflowError, NotImplementedError, TypeError, LookupError)


@dataclass(frozen=True)
class _Columns:
    """The columns of images and labels, and the names of the classes, None if the file has none.

    Attributes:
        image: the column of images.
        has_paths: whether it is a struct of `bytes` and `path` rather than bytes alone.
        label: the column of labels.
    """

    image: str
    has_paths: bool
    label: str
    names: tuple[str, ...] | None


@dataclass(frozen=True)
class _Split:
    """The rows of the files of a split; `labels` are indices into `ids`."""

    files: Sequence[Path]
    columns: _Columns
    ids: Sequence[str]
    labels: np.ndarray

    @property
    def class_ids(self) -> Collection[str]:
        """The identifiers of its classes."""
        return self.ids

    def list_images(self, listing: Listing, label_of: Mapping[str, int]) -> ByteStore:
        """Copy its images into a temporary file, add them to a listing, and return the store that reads them."""
        labels = np.array([label_of[each] for each in self.ids], np.int64)[self.labels].tolist()
        has_keys = self.columns.has_paths and self._have_own_paths()
        what = f"the images of {printable(self.files[0].parent)} can be read only in their order, and are kept in"
        most = _ALWAYS_ALLOWED_BYTES + _MOST_REPEATED * sum(path.stat().st_size for path in self.files)
        with Spool(what, num_bytes=sum(map(self._image_bytes, self.files))) as copied:
            for path in self.files:
                for image in _values(path, self.columns.image):
                    index = len(listing)
                    member = image["path"].lstrip("/") if has_keys else f"{index:08d}"
                    content = _bytes_of(image, path)
                    if index == len(labels):
                        raise _rewritten(path)
                    listing.add(f"{path.name}!", member, labels[index], len(content), copied.num_bytes)
                    copied.write(content)
                    if copied.num_bytes > most:
                        raise SourceError(
                            f"{printable(path)} repeats images until they have more than {most:,} bytes, "
                            f"{_MOST_REPEATED:,} times its size; write each image once"
                        )
            if len(listing) != len(labels):
                raise _rewritten(self.files[-1])
            return StoredImages(copied.finished())

    def _have_own_paths(self) -> bool:
        """Return whether each image has a path, and no two the same."""
        images = (image for path in self.files for image in _values(path, f"{self.columns.image}.path"))
        found = [None if image is None else image["path"] for image in images]
        members = {key.lstrip("/") for key in found if key and "\0" not in key} - {""}
        return len(members) == len(found)

    def _image_bytes(self, path: Path) -> int:
        with _reading(path) as file:
            metadata = file.metadata
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            columns = [group.column(number) for group in groups for number in range(metadata.num_columns)]
            wanted = (self.columns.image, f"{self.columns.image}.bytes")
            return sum(each.total_uncompressed_size for each in columns if each.path_in_schema in wanted)


def parquet_layout(root: Path, files: Sequence[Path], class_column: str | None = None) -> Layout:
    """Return the layout of Parquet files, whose splits are in their names, such as `train-00000-of-00002.parquet`.

    Args:
        root: the folder or file that was given.
        files: the files.
        class_column: the column with the classes; None for one of the usual names.

    Raises:
        SourceError: pyarrow is not installed, a file is damaged, or has no column of encoded images or of labels.
    """
    by_split: dict[str, list[Path]] = {}
    for path in files:
        head = head_of(file_content(path), 512)
        if not head.startswith(MAGIC):
            raise not_as_named(path, head, "a Parquet file")
        by_split.setdefault(split_of_path(path, root), []).append(path)
    for split, paths in by_split.items():
        folders = list(dict.fromkeys(path.parent for path in paths))
        if len(folders) > 1:
            raise SourceError(
                f"{printable(root)} has files of the split {split} in {printable(folders[0])} and "
                f"{printable(folders[1])}; give one of them"
            )
    columns = _columns_of(files[0], class_column)
    for path in files[1:]:
        if _columns_of(path, class_column) != columns:
            raise SourceError(
                f"{printable(path)} has other columns or classes than {printable(files[0])}; give files of one set"
            )
    splits = {split: _read_labels(paths, columns) for split, paths in by_split.items()}
    unlabelled = sorted(split for split, samples in splits.items() if samples is None)
    labelled = {split: samples for split, samples in splits.items() if samples is not None}
    if not labelled:
        raise SourceError(
            f"{printable(root)} has no label in the column {printable(columns.label)}; give labelled images"
        )
    shown = first_names([each.name for each in files], 2)
    left = f" (not read: {', '.join(unlabelled)}, which has no labels)" if unlabelled else ""
    names = None if columns.names is None else {str(number): name for number, name in enumerate(columns.names)}
    layout = samples_layout(f"{quantity(len(files), 'Parquet file')}: {shown}{left}", root, labelled, names)
    return replace(layout, class_column=columns.label)


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    """Open a Parquet file; raise SourceError for whatever pyarrow finds wrong with it until it is closed."""
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise SourceError(
            f'{printable(path)} is a Parquet file, which pyarrow reads; install it with pip install "loopfeed[parquet]"'
        ) from error
    try:
        # Without them, pyarrow reads a row group as a whole.
        open_source_file(path).close()  # which checks, as after it is read, that it is the same file
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            yield file
        open_source_file(path).close()
    except SourceError:
        raise
    except _DAMAGES as error:
        line = str(error).partition("\n")[0]
        raise SourceError(
            f"{printable(path)} is a damaged or truncated Parquet file: {printable(line)}; download it again"
        ) from error


def _values(path: Path, column: str) -> Iterator[Any]:
    """Yield the values of a column."""
    with _reading(path) as file:
        for batch in file.iter_batches(_BATCH_ROWS, columns=[column], use_threads=False):
            for value in batch.column(0):
                yield value.as_py()


def _columns_of(path: Path, class_column: str | None) -> _Columns:
    with _reading(path) as file:
        schema = file.schema_arrow
        features = _features(schema.metadata or {})
        images = [each.name for each in schema if _is_image(each)]
        declared = [each for each in images if features.get(each, {}).get("_type") == "Image"]
        images = declared or images
        shown = ", ".join(printable(each) for each in schema.names[:_MAX_SHOWN])
        if not images:
            raise SourceError(
                f"{printable(path)} has no column of encoded images (found {shown}): paths and addresses are not "
                "followed, so download the images and pack them as a folder with --labels"
            )
        if len(images) > 1:
            found = ", ".join(map(printable, images))
            raise SourceError(f"{printable(path)} has several columns of images, {found}; write one of them")
        usual = _LABEL_COLUMNS if class_column is None else (class_column,)
        labels = [each for each in usual if each in schema.names]
        if class_column is None and not labels:
            labels = [each for each in schema.names if features.get(each, {}).get("_type") == "ClassLabel"]
        if not labels:
            raise SourceError(
                f"{printable(path)} has no column of classes named {printable(', '.join(usual))} (found {shown}); name "
                "it with --class-column"
            )
        named = features.get(labels[0], {}).get("names")
        names = tuple(named) if isinstance(named, list) and all(isinstance(each, str) for each in named) else ()
        has_paths = str(schema.field(images[0]).type).startswith("struct")
        return _Columns(images[0], has_paths, labels[0], names or None)


def _is_image(field: Any) -> bool:
    """Return whether a column has encoded images: a struct with bytes, or bytes in a column of a usual name."""
    import pyarrow as pa

    if pa.types.is_struct(field.type):
        names = {field.type.field(number).name: field.type.field(number) for number in range(field.type.num_fields)}
        return "bytes" in names and "path" in names and _is_binary(names["bytes"].type)
    return field.name.lower() in _IMAGE_COLUMNS and _is_binary(field.type)


def _is_binary(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _features(metadata: Mapping[bytes, bytes]) -> dict[str, dict[str, Any]]:
    """Return what `datasets` says of each column; empty if it says nothing."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError, RecursionError):
        return {}
    return (
        {name: each for name, each in features.items() if isinstance(each, dict)} if isinstance(features, dict) else {}
    )


def _read_labels(paths: Sequence[Path], columns: _Columns) -> _Split | None:
    """Return the split with these files; None if none of its images has a label (-1 in `datasets`)."""
    values: list[Any] = []
    for path in paths:
        values += _values(path, columns.label)
    if all(each is None or each == -1 for each in values):
        return None
    ids, labels = _index(values, paths[0], columns)
    return _Split(paths, columns, ids, labels)


def _index(values: list[Any], path: Path, columns: _Columns) -> ArrayLabels:
    where = f"{printable(path.parent if path.parent.name else path)}: the column {printable(columns.label)}"
    index_of: dict[Any, int] = {}
    ids: dict[str, int] = {}
    labels = np.empty(len(values), np.int64)
    numbers = {*map(str, range(len(columns.names or ())))}
    for row, value in enumerate(values):
        if isinstance(value, list | dict):
            raise SourceError(
                f"{where} has several classes for an image; give one class for each image, or use --labels"
            )
        if value not in index_of:
            text = class_id(value, f"{where}, row {row},")
            if columns.names is not None and text not in numbers:
                raise SourceError(
                    f"{where}, row {row}, has the class {text}; its metadata name {len(columns.names)} classes"
                )
            index_of[value] = ids.setdefault(text, len(ids))
        labels[row] = index_of[value]
    return list(ids), labels


def _rewritten(path: Path) -> SourceError:
    return SourceError(f"{printable(path)} was written to while it was read; run the command again")


def _bytes_of(image: Any, path: Path) -> bytes:
    """Return the encoded image in a value, a struct with bytes or bytes alone."""
    content: bytes | None = image["bytes"] if isinstance(image, dict) else image
    if content is None:
        raise SourceError(
            f"{printable(path)} has images without bytes, only with paths or addresses, which are not followed; write "
            "it with its images, such as with datasets' push_to_hub or embed_external_files=True"
        )
    if len(content) > MAX_FILE_BYTES:
        raise SourceError(
            f"{printable(path)} has an image of {len(content):,} bytes, more than {MAX_FILE_BYTES:,}; remove it"
        )
    return content
