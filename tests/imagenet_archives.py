"""Small archives in the format of ImageNet's official ones."""

import io
import tarfile

import numpy as np
from scipy import io as scipy_io  # type: ignore[import-untyped]

# Class number (ILSVRC2012_ID) to WordNet id and words; the numbers do not follow the ids, as in the original.
SYNSETS = {
    1: ("n02000003", "kit fox, Vulpes macrotis"),
    2: ("n02000001", "tench, Tinca tinca"),
    3: ("n02000002", "crane"),
}
INNER_NODE = (4, "n00000001", "entity")
SORTED_IDS = ["n02000001", "n02000002", "n02000003"]
UNSORTED_IDS = SORTED_IDS[::-1]
SORTED_NAMES = ["tench", "crane", "kit fox"]


def tar_bytes(entries, mode="w"):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:
        for name, content in entries.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def meta_mat():
    fields = [
        "ILSVRC2012_ID",
        "WNID",
        "words",
        "gloss",
        "num_children",
        "children",
        "wordnet_height",
        "num_train_images",
    ]
    rows = np.empty((len(SYNSETS) + 1, 1), [(each, object) for each in fields])
    for row, (number, (wnid, words)) in enumerate(SYNSETS.items()):
        rows[row, 0] = (
            np.uint8(number),
            wnid,
            words,
            "a gloss",
            np.uint8(0),
            np.zeros((1, 0)),
            np.uint8(0),
            np.uint16(2),
        )
    number, wnid, words = INNER_NODE
    rows[-1, 0] = (
        number,
        wnid,
        words,
        "a gloss",
        np.uint8(3),
        np.array([[1, 2, 3]], np.uint8),
        np.uint8(1),
        np.uint16(0),
    )
    file = io.BytesIO()
    scipy_io.savemat(file, {"synsets": rows}, do_compression=True)
    return file.getvalue()


def devkit(truth):
    root = "ILSVRC2012_devkit_t12"
    text = "".join(f"{number}\n" for number in truth)
    entries = {
        f"{root}/readme.txt": b"read me",
        f"{root}/data/meta.mat": meta_mat(),
        f"{root}/data/ILSVRC2012_validation_ground_truth.txt": text.encode(),
    }
    return tar_bytes(entries, "w:gz")


def train_archive(num_images=2, ids=UNSORTED_IDS):
    inner = {
        f"{each}.tar": tar_bytes({f"{each}_{k}.JPEG": f"train {each} {k}".encode() for k in range(num_images)})
        for each in ids
    }
    return tar_bytes(inner)


def val_archive(num_images):
    return tar_bytes({f"ILSVRC2012_val_{k:08d}.JPEG": f"val {k}".encode() for k in range(1, num_images + 1)})
