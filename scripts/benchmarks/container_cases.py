"""The cases of the bench `containers`: packing each container, beside the folder of its images and its library."""

import io
import json
import pickle
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from loopfeed.preprocess.control_groups import num_cores
from scripts.benchmarks.bench import Candidate, Case, Settings, Unit
from scripts.benchmarks.data import Say, ensure_jpegs, jpeg_files

_IMAGES_PER_S = Unit("images/s")
_LEAST, _PER_TAR, _PER_FILE, _ROW_GROUP = 2000, 500, 1000, 100
_NUM_SMALL, _SMALL, _BATCH = 10_000, 32, 2000
_PEER = "containers"
# What is packed, below the folder of the case, by its name in the table.
_FILES = {
    "folder": "folder",
    "tar": "tar/set.tar",
    "zip": "zip/set.zip",
    "WebDataset": "WebDataset",
    "Parquet": "Parquet",
}
_ARRAYS = ("folder", "npz", "compressed npz", "CIFAR binary", "CIFAR pickles")


def container_cases(settings: Settings) -> Iterator[Case]:
    """Yield the cases: photographs as encoded files, and small images as arrays."""
    root = settings.folder / "data" / f"containers-{'drawn' if settings.images is None else settings.images.name}"
    workers = num_cores()
    peers = {"WebDataset": "webdataset", "Parquet": "datasets"}
    candidates = (
        *(_pack(name, root / "files", source, 224) for name, source in _FILES.items()),
        *(
            Candidate(
                f"{library}: decode, resize", "read_container.py", (library, root / "files" / form, workers), _PEER
            )
            for form, library in peers.items()
        ),
    )
    name = f"JPEG{'' if settings.images is None else f' ({settings.images.name})'} to 224 px"
    yield Case(name, _IMAGES_PER_S, candidates, round_s=3.0, prepare=partial(_ensure_files, settings, root / "files"))
    arrays = (
        *(_pack(name, root / "arrays", name, _SMALL) for name in _ARRAYS),
        Candidate("numpy: x[i], random", "read_container.py", ("numpy", root / "arrays" / "npz", 1)),
    )
    name = f"{_NUM_SMALL:,} images of {_SMALL} px"
    yield Case(name, _IMAGES_PER_S, arrays, prepare=partial(_ensure_arrays, root / "arrays"))


def _pack(name: str, root: Path, source: str, size: int) -> Candidate:
    return Candidate(name, "pack_images.py", ("pack", root / source, root.parent / "packed" / name, size))


def _ensure_files(settings: Settings, root: Path, say: Say) -> None:
    """Write photographs in each form, if that has not been done."""
    if root.exists():
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    say(f"making {root}")
    unfinished = root.with_name("files.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    folder = unfinished / "folder"
    ensure_jpegs(settings, say, folder, _LEAST)
    files = jpeg_files(folder)
    rows = [(file.parent.name, f"{file.parent.name}/{file.name}", file.read_bytes()) for file in files]
    np.random.default_rng(0).shuffle(rows)
    for name in ("tar", "zip", "WebDataset", "Parquet"):
        (unfinished / name).mkdir()
    with tarfile.open(unfinished / "tar/set.tar", "w") as tar:
        for _, path, content in rows:
            _add(tar, path, content)
    with zipfile.ZipFile(unfinished / "zip/set.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for _, path, content in rows:
            archive.writestr(path, content)
    for first in range(0, len(rows), _PER_TAR):
        with tarfile.open(unfinished / f"WebDataset/train-{first:06d}.tar", "w") as tar:
            for label, path, content in rows[first : first + _PER_TAR]:
                stem, _, suffix = path.rpartition(".")
                _add(tar, f"{stem}.{suffix.lower()}", content)
                _add(tar, f"{stem}.cls", label.encode())
    names = sorted({label for label, _, _ in rows})
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": names}}
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    schema = pa.schema([("image", kind), ("label", pa.int64())], metadata)
    for first in range(0, len(rows), _PER_FILE):
        part = rows[first : first + _PER_FILE]
        images = pa.array([{"bytes": content, "path": path} for _, path, content in part], kind)
        labels = pa.array([names.index(label) for label, _, _ in part])
        table = pa.Table.from_arrays([images, labels], schema=schema)
        pq.write_table(table, unfinished / f"Parquet/train-{first:05d}.parquet", row_group_size=_ROW_GROUP)
    unfinished.rename(root)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def _ensure_arrays(root: Path, say: Say) -> None:
    """Write small images of noise in each form, if that has not been done."""
    if root.exists():
        return
    say(f"making {root}")
    unfinished = root.with_name("arrays.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    for name in _ARRAYS[1:]:
        (unfinished / name).mkdir(parents=True)
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (_NUM_SMALL, _SMALL, _SMALL, 3), np.uint8)
    labels = random.integers(0, 10, _NUM_SMALL, np.uint8)
    for index, (pixels, label) in enumerate(zip(images, labels, strict=True)):
        path = unfinished / "folder" / str(label) / f"{index:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    arrays: dict[str, Any] = {"x_train": images, "y_train": labels}
    np.savez(unfinished / "npz/set.npz", **arrays)
    np.savez_compressed(unfinished / "compressed npz/set.npz", **arrays)
    rows = images.transpose(0, 3, 1, 2).reshape(_NUM_SMALL, -1)
    for number, first in enumerate(range(0, _NUM_SMALL, _BATCH), start=1):
        part = slice(first, first + _BATCH)
        records = np.concatenate([labels[part, None], rows[part]], 1)
        (unfinished / f"CIFAR binary/data_batch_{number}.bin").write_bytes(records.tobytes())
        batch = {"data": rows[part], "labels": labels[part].tolist()}
        (unfinished / f"CIFAR pickles/data_batch_{number}").write_bytes(pickle.dumps(batch, 4))
    unfinished.rename(root)
