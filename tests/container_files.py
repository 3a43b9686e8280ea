"""Writes a small set of pictures in each form of container that is read, by the standard library, NumPy and pyarrow."""

import gzip
import io
import json
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIDE = 32
CLASSES = ("ant", "bee", "cat")
# Split → class of each image: the second class has no image in val.
LABELS = {"train": (0, 1, 2, 1, 0, 2, 0, 1), "val": (2, 0, 0, 2)}


def images_of(split: str) -> np.ndarray:
    """Return uint8 `[N, 32, 32, 3]`."""
    return np.random.default_rng(len(split)).integers(0, 256, (len(LABELS[split]), SIDE, SIDE, 3), np.uint8)


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def files() -> Iterator[tuple[str, str, int, bytes]]:
    """Yield the split, the path below it, the class and the encoded form of each image."""
    for split, labels in LABELS.items():
        for index, (label, pixels) in enumerate(zip(labels, images_of(split), strict=True)):
            yield split, f"{CLASSES[label]}/{index:03d}.png", label, png(pixels)


def write_folders(root: Path) -> Path:
    for name in CLASSES:
        (root / "val" / name).mkdir(parents=True)
    for split, path, _, content in files():
        (root / split / path).parent.mkdir(parents=True, exist_ok=True)
        (root / split / path).write_bytes(content)
    return root


def add_member(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            add_member(archive, name, content)
    return path


def write_webdataset(root: Path, form: str = "cls", per_tar: int = 3) -> Path:
    """Write archives whose keys are relative paths; classes are names in .cls, or `class` in .json."""
    root.mkdir()
    for split in LABELS:
        chosen = [each for each in files() if each[0] == split]
        for first in range(0, len(chosen), per_tar):
            members = {}
            for _, path, label, content in chosen[first : first + per_tar]:
                key = path.removesuffix(".png")
                members[path] = content
                text = (
                    CLASSES[label] if form == "cls" else json.dumps({"caption": "a picture", "class": CLASSES[label]})
                )
                members[f"{key}.{form}"] = text.encode()
            write_tar(root / f"{split}-{first // per_tar:06d}.tar", members)
    return root


def write_zip(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def write_parquet(root: Path, *, named: bool = True, with_paths: bool = True) -> Path:
    """Write files as `datasets` does, two of the training set."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": list(CLASSES)}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})} if named else None
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema([("image", kind), ("label", pa.int64())], metadata)
    (root / "data").mkdir(parents=True)
    for split, name, part in (
        ("train", "train-00000-of-00002", slice(0, 5)),
        ("train", "train-00001-of-00002", slice(5, None)),
        ("val", "validation-00000-of-00001", slice(None)),
    ):
        rows = [each for each in files() if each[0] == split][part]
        images = [{"bytes": content, "path": path if with_paths else None} for _, path, _, content in rows]
        table = pa.Table.from_arrays([pa.array(images, kind), pa.array([each[2] for each in rows])], schema=schema)
        pq.write_table(table, root / "data" / f"{name}.parquet", row_group_size=3)
    return root


def arrays() -> dict[str, np.ndarray]:
    """Return the arrays in Keras's names."""
    found = {}
    for split, labels in LABELS.items():
        found[f"x_{split}"], found[f"y_{split}"] = images_of(split), np.array(labels)
    return found


def write_npz(path: Path, *, compressed: bool = False) -> Path:
    """Write the arrays in MedMNIST's names and shapes."""
    found = {}
    for split, labels in LABELS.items():
        found[f"{split}_images"], found[f"{split}_labels"] = images_of(split), np.array(labels, np.uint8)[:, None]
    save: Any = np.savez_compressed if compressed else np.savez
    save(path, **found)
    return path


def write_npy(root: Path) -> Path:
    for split, labels in LABELS.items():
        (root / split).mkdir(parents=True)
        np.save(root / split / "images.npy", images_of(split))
        np.save(root / split / "labels.npy", np.array(labels))
    return root


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()


def write_idx(root: Path, *, packed: bool = False) -> Path:
    """Write the red channels as MNIST's files."""
    root.mkdir()
    for split, name in (("train", "train"), ("val", "t10k")):
        for role, form, values in (
            ("images", "idx3", images_of(split)[..., 0]),
            ("labels", "idx1", np.array(LABELS[split], np.uint8)),
        ):
            content = idx(values)
            path = root / f"{name}-{role}-{form}-ubyte{'.gz' * packed}"
            path.write_bytes(gzip.compress(content) if packed else content)
    return root


def rows_of(split: str) -> np.ndarray:
    """Return the images as CIFAR has them: uint8 `[N, 3072]`, channel by channel."""
    return images_of(split).transpose(0, 3, 1, 2).reshape(len(LABELS[split]), -1)


def write_cifar_binary(root: Path, *, fine: bool = False) -> Path:
    root.mkdir(exist_ok=True)
    names = (
        {"train": "train.bin", "val": "test.bin"} if fine else {"train": "data_batch_1.bin", "val": "test_batch.bin"}
    )
    for split, name in names.items():
        labels = np.array(LABELS[split], np.uint8)[:, None]
        columns = [np.zeros_like(labels)] * fine + [labels, rows_of(split)]
        (root / name).write_bytes(np.concatenate(columns, 1).tobytes())
    file = "fine_label_names.txt" if fine else "batches.meta.txt"
    (root / file).write_text("".join(f"{name}\n" for name in CLASSES) + "\n")
    return root


def write_cifar_pickles(root: Path, *, fine: bool = False, protocol: int = 2) -> Path:
    root.mkdir()
    names = {"train": "train", "val": "test"} if fine else {"train": "data_batch_1", "val": "test_batch"}
    key = "fine_labels" if fine else "labels"
    for split, name in names.items():
        batch = {"data": rows_of(split), key: list(LABELS[split]), "filenames": ["a.png"] * len(LABELS[split])}
        (root / name).write_bytes(pickle.dumps(batch, protocol))
    meta = {"fine_label_names" if fine else "label_names": list(CLASSES)}
    (root / ("meta" if fine else "batches.meta")).write_bytes(pickle.dumps(meta, protocol))
    return root
