from pathlib import Path

import numpy as np
import pytest

from loopfeed.preprocess.packing.pack_source import pack
from loopfeed.preprocess.shards.reader import open_split
from loopfeed.preprocess.sources.listing import SourceError
from loopfeed.preprocess.sources.open_source import open_source
from tests import container_files as forms
from tests.container_files import CLASSES, LABELS, SIDE, files, images_of

FOLDER = forms.write_folders


def zipped(root: Path) -> Path:
    return forms.write_zip(root, {f"{split}/{path}": content for split, path, _, content in files()})


def tarred(root: Path) -> Path:
    return forms.write_tar(root, {f"{split}/{path}": content for split, path, _, content in files()})


def webdataset_in_one(root: Path) -> Path:
    members = {}
    for split, path, label, content in files():
        members[f"{split}/{path}"] = content
        members[f"{split}/{path.removesuffix('.png')}.cls"] = f"{CLASSES[label]}\n".encode()
    return forms.write_tar(root, members)


# Form → how to write it, and whether its relative paths and identifiers are those of the class folders.
FORMS = {
    "webdataset": (forms.write_webdataset, True),
    "webdataset of json": (lambda root: forms.write_webdataset(root, "json"), True),
    "webdataset in one tar": (webdataset_in_one, True),
    "parquet": (forms.write_parquet, False),
    "parquet without paths": (lambda root: forms.write_parquet(root, named=False, with_paths=False), False),
    "npz": (forms.write_npz, False),
    "compressed npz": (lambda root: forms.write_npz(root, compressed=True), False),
    "npy": (forms.write_npy, False),
    "CIFAR-10 binary": (forms.write_cifar_binary, False),
    "CIFAR-100 binary": (lambda root: forms.write_cifar_binary(root, fine=True), False),
    "CIFAR-10 pickles": (forms.write_cifar_pickles, False),
    "CIFAR-10 pickles of protocol 0": (lambda root: forms.write_cifar_pickles(root, protocol=0), False),
    "CIFAR-100 pickles": (lambda root: forms.write_cifar_pickles(root, fine=True, protocol=4), False),
}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in sorted(folder.rglob("*")) if each.is_file()}


def pixels_and_classes(dest: Path, split: str) -> list[tuple[bytes, int]]:
    """Return the RGB values and the label of each packed image, sorted."""
    with open_split(dest, split) as opened:
        count = opened.manifest.num_images
        words, labels = np.empty((count, SIDE, SIDE), np.uint32), np.empty(count, np.int32)
        opened.read_into(np.arange(count), words, labels, timeout_s=60)
    pixels = words.view(np.uint8).reshape(count, SIDE, SIDE, 4)[..., :0:-1]
    return sorted((each.tobytes(), int(label)) for each, label in zip(pixels, labels, strict=True))


@pytest.fixture(scope="module")
def of_folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    pack(FOLDER(root / "images"), root / "pack", size=SIDE)
    return root / "pack"


@pytest.mark.parametrize("form", FORMS)
def test_a_container_is_packed_like_its_folder(tmp_path, of_folders, form, monkeypatch):
    monkeypatch.setattr("loopfeed.preprocess.sources.parquet._BATCH_ROWS", 2)  # of row groups of three
    write, has_same_paths = FORMS[form]
    if "parquet" in form:
        pytest.importorskip("pyarrow")
    source = write(tmp_path / f"source{'.npz' if 'npz' in form else '.tar' if 'in one' in form else ''}")
    results = pack(source, tmp_path / "pack", size=SIDE)
    splits = {"val": "test" if "CIFAR" in form else "val", "train": "train"}
    assert {name: result.manifest.num_images for name, result in results.items()} == {
        splits[name]: len(labels) for name, labels in LABELS.items()
    }
    for name, labels in LABELS.items():
        manifest = results[splits[name]].manifest
        assert manifest.class_counts == tuple(labels.count(label) for label in range(len(CLASSES)))
    if has_same_paths:
        assert contents(tmp_path / "pack") == contents(of_folders)
        return
    for name, labels in LABELS.items():
        found = pixels_and_classes(tmp_path / "pack", splits[name])
        assert found == sorted((each.tobytes(), label) for each, label in zip(images_of(name), labels, strict=True))
        assert found == pixels_and_classes(of_folders, name)


@pytest.mark.parametrize("packed", [False, True])
def test_idx_files_are_grey_images(tmp_path, packed):
    (tmp_path / "root/MNIST").mkdir(parents=True)  # as torchvision lays them
    raw = forms.write_idx(tmp_path / "root/MNIST/raw", packed=packed)
    if not packed:
        (raw / "train-images-idx3-ubyte.gz").write_bytes(b"is not read beside the unpacked file")
    pack(tmp_path / "root", tmp_path / "pack", size=SIDE)
    for split, name in (("train", "train"), ("val", "test")):
        grey = np.repeat(images_of(split)[..., :1], 3, axis=3)
        expected = sorted((each.tobytes(), label) for each, label in zip(grey, LABELS[split], strict=True))
        assert pixels_and_classes(tmp_path / "pack", name) == expected


def described(root: Path, **options) -> str:
    with open_source(root, **options) as source:
        return source.layout


def test_what_was_recognised_is_said_in_a_line(tmp_path):
    assert described(forms.write_webdataset(tmp_path / "tars")) == (
        "5 WebDataset archives: train-000000.tar, train-000001.tar and 3 more"
    )
    assert described(forms.write_npz(tmp_path / "set.npz")) == "1 NumPy file: set.npz"
    assert described(forms.write_idx(tmp_path / "idx")) == (
        "IDX files t10k-images-idx3-ubyte and train-images-idx3-ubyte, with their labels"
    )
    assert described(forms.write_cifar_binary(tmp_path / "cifar")) == (
        "CIFAR's binary files data_batch_1.bin, test_batch.bin"
    )
    pytest.importorskip("pyarrow")
    assert described(forms.write_parquet(tmp_path / "parquet")) == (
        "3 Parquet files: train-00000-of-00002.parquet, train-00001-of-00002.parquet and 1 more"
    )


def test_classes_are_identifiers_with_the_names_that_the_container_has(tmp_path):
    def classes(root, **options):
        with open_source(root, **options) as source:
            (split,) = {name: split for name, split in source.splits.items() if name != "train"}.values()
            return [(each.id, each.name) for each in split.classes]

    named = [("0", "ant"), ("1", "bee"), ("2", "cat")]
    assert classes(forms.write_cifar_pickles(tmp_path / "cifar")) == named
    # Of one split alone, the labels are the same: no image of `val` is of the class 1.
    assert classes(forms.write_npz(tmp_path / "set.npz"), splits=("val",)) == [("0", "0"), ("1", "1"), ("2", "2")]
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\ndog\n")
    assert classes(tmp_path / "set.npz") == named
    (tmp_path / "classes.txt").write_text("2 cat\n0 ant\n1 bee, Apis\n")
    assert classes(tmp_path / "set.npz") == named
    pytest.importorskip("pyarrow")
    assert classes(forms.write_parquet(tmp_path / "parquet")) == named
    # Twelve classes are in the order of their numbers.
    np.savez(tmp_path / "many.npz", x=np.zeros((12, 4, 4), np.uint8), y=np.arange(12))
    with open_source(tmp_path / "many.npz") as source:
        assert [each.id for each in source.splits["train"].classes] == [str(number) for number in range(12)]


def test_the_column_of_classes_of_a_parquet_file_can_be_named(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    images = [{"bytes": b"1", "path": "1.jpg"}, {"bytes": b"2", "path": "2.jpg"}]
    pq.write_table(pa.table({"image": images, "label": [5, 6], "breed": ["pug", "corgi"]}), tmp_path / "dogs.parquet")
    for column, ids in ((None, ["5", "6"]), ("breed", ["corgi", "pug"])):
        with open_source(tmp_path / "dogs.parquet", class_column=column) as source:
            assert [each.id for each in source.splits["train"].classes] == ids
    with pytest.raises(SourceError, match=r"no column of classes named bread \(found image, label, breed\)"):
        open_source(tmp_path / "dogs.parquet", class_column="bread")
    FOLDER(tmp_path / "images")
    with pytest.raises(SourceError, match="is class folders; give the table with --labels, or leave it out"):
        open_source(tmp_path / "images", class_column="breed")


def test_class_folders_take_precedence_over_a_container_beside_them(tmp_path):
    FOLDER(tmp_path / "images")
    expected = described(tmp_path / "images")
    (tmp_path / "unsuffixed/ant").mkdir(parents=True)
    (tmp_path / "unsuffixed/ant/1").write_bytes(b"an image without a suffix")
    np.save(tmp_path / "unsuffixed/features.npy", np.zeros(3))
    assert described(tmp_path / "unsuffixed") == "a folder of class folders"
    np.save(tmp_path / "images/features.npy", np.zeros(3))
    forms.write_tar(tmp_path / "images/backup.tar", {"a.jpg": b"1", "a.cls": b"1"})
    assert described(tmp_path / "images") == expected


def test_hidden_splits_without_labels_are_left_out(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    root = forms.write_parquet(tmp_path / "set")
    table = pq.read_table(root / "data/validation-00000-of-00001.parquet")
    hidden = table.set_column(1, "label", pa.array([-1] * len(table)))
    pq.write_table(hidden.replace_schema_metadata(table.schema.metadata), root / "data/test-00000-of-00001.parquet")
    assert described(root).endswith("and 2 more (not read: test, which has no labels)")


def test_a_tar_of_class_folders_stays_one_whatever_lies_beside_its_images(tmp_path):
    members = {"ant/1.jpg": b"1", "ant/1.JPG": b"2", "bee/2.jpg": b"3", "bee/2.json": b"{", "bee/2.txt": b"a bee"}
    assert described(forms.write_tar(tmp_path / "set.tar", members)) == "a tar archive of class folders"
    members = {"ant/1.jpg": b"1", "ant/1.json": b'{"width": 3}', "bee/2.jpg": b"2"}
    assert described(forms.write_tar(tmp_path / "other.tar", members)) == "a tar archive of class folders"


@pytest.mark.parametrize("form", ["npz", "CIFAR-10 binary", "CIFAR-10 pickles"])
def test_other_pixels_with_the_same_labels_are_another_source(tmp_path, form):
    def digest(root):
        with open_source(root) as source:
            return source.splits["train"].digest()

    write = FORMS[form][0] if "pickles" not in form else lambda root: forms.write_cifar_pickles(root, protocol=4)
    before = digest(source := write(tmp_path / "source.npz"))
    if source.is_file():
        with np.load(source) as arrays:
            np.savez(
                source,
                **dict(arrays) | {"train_images": arrays["train_images"] ^ (np.arange(8) == 5)[:, None, None, None]},
            )
    else:
        file = next(each for each in source.iterdir() if each.name.startswith("data_batch"))
        content = bytearray(file.read_bytes())
        content[len(content) // 2 + 9] ^= 1
        file.write_bytes(content)
    assert digest(source) != before


def test_classes_that_are_written_otherwise_are_others(tmp_path):
    members = {
        f"{index}.{form}": each
        for index, name in enumerate([b"1", b"01", b"10"])
        for form, each in (("jpg", b"x"), ("cls", name))
    }
    with open_source(forms.write_tar(tmp_path / "set.tar", members)) as source:
        assert [each.id for each in source.splits["train"].classes] == ["01", "1", "10"]
        assert any("two classes that differ only in how a number is written: 01 and 1" in each for each in source.notes)
    np.savez(tmp_path / "set.npz", x=np.zeros((3, 4, 4), np.uint8), y=np.array(["01", "1", "10"]))
    with open_source(tmp_path / "set.npz") as source:
        assert [each.id for each in source.splits["train"].classes] == ["01", "1", "10"]
