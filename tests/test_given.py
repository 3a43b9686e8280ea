"""Data sets in Python: each form packs the pixels and classes of the folder, and each fault has its item and remedy."""

import gc
import os
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import loopfeed
from loopfeed.preprocess.sources import spool

SIDE, NUM = 8, 24
CLASSES = ["ox", "cat", "dog"]
PIXELS = np.random.default_rng(3).integers(0, 256, (NUM, SIDE, SIDE, 3)).astype(np.uint8)
LABELS = np.arange(NUM) % 3


def pack(source: Any, dest: Path, **arguments: Any) -> dict[str, Any]:
    return loopfeed.pack(source, dest, **({"size": SIDE, "workers": 2} | arguments))


def contents(dest: Path, split: str = "train") -> set[tuple[bytes, str]]:
    """Return the pixels of each packed image with the id of its class."""
    with loopfeed.open_split(dest, split) as packed:
        ids = [each.id for each in packed.manifest.classes]
        count = packed.num_images
        words, labels = np.zeros((count, SIDE, SIDE), np.uint32), np.zeros(count, np.int32)
        packed.read_into(np.arange(count), words, labels, timeout_s=60)
    return {(pixels.tobytes(), ids[label]) for pixels, label in zip(loopfeed.unpack_rgb(words), labels, strict=True)}


def expected(numbers: Any = range(NUM), names: Any = CLASSES) -> set[tuple[bytes, str]]:
    return {(PIXELS[number].tobytes(), names[LABELS[number]]) for number in numbers}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of the images, losslessly."""
    root = tmp_path_factory.mktemp("folder")
    for number in range(NUM):
        path = root / CLASSES[LABELS[number]] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(PIXELS[number]).save(path)
    return root


class MapStyle:
    """A data set like PyTorch's, which says nothing about its labels."""

    def __init__(self, form: Any = Image.fromarray) -> None:
        self.form, self.calls = form, list[int]()

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < NUM:
            raise IndexError(index)
        self.calls.append(index)
        return self.form(PIXELS[index]), LABELS[index]


class Torchvision(MapStyle):
    """A data set like torchvision's, with a list of labels."""

    def __init__(self, form: Any = Image.fromarray) -> None:
        super().__init__(form)
        self.targets, self.classes = LABELS.tolist(), CLASSES


def default_loader(path: str) -> Any:
    raise AssertionError(path)


class ImageFolder(MapStyle):
    """A data set of files like torchvision's ImageFolder; its pixels are not those of the files."""

    transform = target_transform = transforms = None

    def __init__(self, root: Path) -> None:
        super().__init__(lambda pixels: 255 - pixels)
        self.classes = sorted(CLASSES)
        files = sorted((path.parent.name, str(path)) for path in root.rglob("*.png"))
        self.loader = default_loader
        self.samples = [(path, self.classes.index(name)) for name, path in files]


class Subset:
    """A part of a data set like PyTorch's."""

    def __init__(self, dataset: Any, indices: Any) -> None:
        self.dataset, self.indices = dataset, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.indices[index]]


class HuggingFace:
    """A data set like those of the package `datasets`: columns, of which that of images can be had undecoded."""

    class Image:
        def __init__(self, decode: bool = True) -> None:
            self.decode = decode

    class ClassLabel:
        names = CLASSES

    def __init__(self, folder: Path, columns: Any = None) -> None:
        self.folder = folder
        self.features: dict[str, Any] = columns or {"image": self.Image(), "label": self.ClassLabel()}
        self.column_names, self.format = list(self.features), {"type": None}

    def with_format(self, kind: None) -> "HuggingFace":
        assert kind is None
        return self

    def select_columns(self, names: list[str]) -> "HuggingFace":
        return HuggingFace(self.folder, {name: self.features[name] for name in names})

    def cast_column(self, name: str, feature: Any) -> "HuggingFace":
        return HuggingFace(self.folder, self.features | {name: feature})

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            return LABELS.tolist()
        assert not self.features["image"].decode
        path = self.folder / CLASSES[LABELS[index]] / f"{index}.png"
        return {
            "image": {"bytes": path.read_bytes(), "path": None} if index % 2 else {"bytes": None, "path": str(path)}
        }


def paths_of(folder: Path) -> list[str]:
    return [str(folder / CLASSES[LABELS[number]] / f"{number}.png") for number in range(NUM)]


class Series:
    """A column of pandas, whose items are found by an index of its own."""

    def __init__(self, values: Any) -> None:
        self.values = np.array(values)
        self.shape, self.dtype = self.values.shape, self.values.dtype

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        return self.values[index - 100]

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.values


FORMS: dict[str, Any] = {
    "columns of pandas": lambda folder: (Series(paths_of(folder)), Series(LABELS)),
    "arrays": lambda _: (PIXELS, LABELS),
    "channels first": lambda _: (PIXELS.transpose(0, 3, 1, 2), list(LABELS)),
    "list of arrays": lambda _: (list(PIXELS), LABELS.astype(np.uint8)),
    "pictures": lambda _: [(Image.fromarray(each), label) for each, label in zip(PIXELS, LABELS, strict=True)],
    "files": lambda folder: list(zip(paths_of(folder), LABELS, strict=True)),
    "files and labels": lambda folder: ([Path(each) for each in paths_of(folder)], LABELS),
    "bytes": lambda folder: ([Path(each).read_bytes() for each in paths_of(folder)], LABELS),
    "generator": lambda _: ((each, label) for each, label in zip(PIXELS, LABELS, strict=True)),
    "generator of dicts": lambda _: ({"image": PIXELS[each], "label": LABELS[each]} for each in range(NUM)),
    "generator of files": lambda folder: zip(paths_of(folder), LABELS, strict=True),
    "names of classes": lambda _: (PIXELS, [CLASSES[label] for label in LABELS]),
    "map style": lambda _: MapStyle(),
    "map style, channels first": lambda _: MapStyle(lambda pixels: pixels.transpose(2, 0, 1)),
    "labels known": lambda _: Torchvision(),
    "columns of labels": lambda _: (PIXELS, LABELS[:, None]),
    "labels in arrays": lambda _: [(each, LABELS[number : number + 1]) for number, each in enumerate(PIXELS)],
    "Hugging Face": HuggingFace,
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_each_form_packs_the_images_with_their_classes(form: str, folder: Path, tmp_path: Path) -> None:
    classes = None if form in ("labels known", "Hugging Face") else CLASSES
    result = pack(FORMS[form](folder), tmp_path / "data", classes=classes)["train"]
    assert [each.id for each in result.manifest.classes] == CLASSES
    assert contents(tmp_path / "data") == expected()
    again = pack(FORMS[form](folder), tmp_path / "data", classes=classes)["train"]
    assert again.was_complete


def test_arrays_are_packed_as_the_file_that_they_are_saved_in(tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", images=PIXELS, labels=LABELS)
    saved, given = pack(tmp_path / "set.npz", tmp_path / "saved"), pack((PIXELS, LABELS), tmp_path / "given")
    assert saved["train"].manifest.shard_digests == given["train"].manifest.shard_digests


def test_arrays_and_a_generator_of_them_are_the_same_source(tmp_path: Path) -> None:
    pack((PIXELS, LABELS), tmp_path)
    assert pack(zip(PIXELS, LABELS, strict=True), tmp_path)["train"].was_complete


@pytest.mark.parametrize("form", ["files", "ImageFolder"])
def test_files_are_packed_as_their_folder_is(form: str, folder: Path, tmp_path: Path) -> None:
    source = (
        ImageFolder(folder) if form == "ImageFolder" else [(path, Path(path).parent.name) for path in paths_of(folder)]
    )
    for holdout in (0.0, 0.3):
        right = pack(folder, tmp_path / f"right{holdout}", holdout=holdout, limit=10)
        found = pack(source, tmp_path / f"found{holdout}", holdout=holdout, limit=10)
        assert {name: each.manifest for name, each in found.items()} == {
            name: each.manifest for name, each in right.items()
        }


def test_a_changed_image_folder_is_called_and_not_bypassed(folder: Path, tmp_path: Path) -> None:
    source = ImageFolder(folder)
    source.transform = len  # type: ignore[assignment]
    pack(source, tmp_path, classes=CLASSES)
    assert contents(tmp_path) == {((255 - PIXELS[number]).tobytes(), CLASSES[LABELS[number]]) for number in range(NUM)}


def test_only_a_few_images_are_read_beside_packing_if_the_labels_are_known(tmp_path: Path) -> None:
    source = Torchvision()
    pack(source, tmp_path)
    assert len(source.calls) <= NUM + 2 * 16 + 1
    unknown = MapStyle()
    pack(unknown, tmp_path / "unknown")
    assert sorted(unknown.calls) == list(range(NUM))


def test_labels_of_a_list_that_the_items_contradict_are_not_taken(tmp_path: Path) -> None:
    source = Torchvision()
    source.targets = [0] * NUM
    pack(source, tmp_path)
    assert contents(tmp_path) == expected()


def test_a_part_of_a_data_set_has_the_classes_of_the_whole(tmp_path: Path) -> None:
    whole = Torchvision()
    results = pack({"train": Subset(whole, range(0, NUM, 2)), "validation": Subset(whole, [1, 4])}, tmp_path)
    assert contents(tmp_path) == expected(range(0, NUM, 2))
    assert contents(tmp_path, "val") == expected([1, 4])
    assert [each.id for each in results["val"].manifest.classes] == CLASSES


def test_splits_share_the_classes_of_all_of_them_in_numerical_order(tmp_path: Path) -> None:
    few, labels = LABELS == 1, np.where(LABELS == 1, 10, LABELS)
    results = pack({"val": (PIXELS[few], labels[few]), "train": (PIXELS, labels)}, tmp_path)
    for each in results.values():
        assert [one.id for one in each.manifest.classes] == ["0", "2", "10"]
    assert results["val"].manifest.class_counts == (0, 0, 8)


def test_classes_that_are_named_need_no_images_in_train_and_are_said(tmp_path: Path) -> None:
    source = {"train": (PIXELS[:2], ["ox", "cat"]), "val": (PIXELS[2:4], ["cat", "yak"])}
    notes: list[str] = []
    result = pack(source, tmp_path, classes=["yak", "ox", "cat"], notify=notes.append)["val"]
    assert result.manifest.class_counts == (1, 0, 1)
    assert notes[:2] == ["train has no image of 1 class: yak", "val has no image of 1 class: ox"]


@pytest.mark.parametrize("form", ["arrays", "generator", "labels known", "map style", "Hugging Face"])
def test_an_interrupted_pack_is_continued_to_the_same_bytes(
    form: str, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stop(_split: str, progress: Any) -> None:
        if progress.done >= NUM // 2:
            raise KeyboardInterrupt

    arguments: dict[str, Any] = {"shard_images": 4, "classes": CLASSES, "workers": 1, "size": SIDE}
    right = pack(FORMS[form](folder), tmp_path / "right", **arguments)["train"]
    monkeypatch.setattr("loopfeed.preprocess.packing.pipeline._MAX_BLOCK_IMAGES", 4)
    with pytest.raises(KeyboardInterrupt):
        pack(FORMS[form](folder), tmp_path / "stopped", on_progress=stop, **arguments)
    found = pack(FORMS[form](folder), tmp_path / "stopped", **arguments)["train"]
    assert found.num_resumed >= 4
    assert found.manifest == right.manifest


def changed(pixels: np.ndarray) -> np.ndarray:
    other = pixels.copy()
    other[16, 0, 0, 0] ^= 1
    return other


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda: (PIXELS, LABELS), lambda: (changed(PIXELS), LABELS)),
        (lambda: (PIXELS, LABELS), lambda: (PIXELS, LABELS[::-1])),
        (lambda: (PIXELS, LABELS), lambda: (PIXELS[:-1], LABELS[:-1])),
        (lambda: zip(PIXELS, LABELS, strict=True), lambda: zip(changed(PIXELS), LABELS, strict=True)),
        (lambda: list(zip(PIXELS, LABELS, strict=True)), lambda: list(zip(changed(PIXELS), LABELS, strict=True))),
        (Torchvision, lambda: Torchvision(lambda pixels: pixels[::-1])),
        (MapStyle, lambda: MapStyle(lambda pixels: pixels[::-1])),
    ],
    ids=["pixel", "labels", "number", "generator", "list", "labels known", "map style"],
)
def test_another_source_is_refused(first: Any, second: Any, tmp_path: Path) -> None:
    pack(first(), tmp_path)
    with pytest.raises(loopfeed.ShardError, match=r"packed from a different source|number of images|images changed"):
        pack(second(), tmp_path)


def test_names_are_given_or_those_of_the_items(tmp_path: Path) -> None:
    names = [f"/film{number % 2}/{number:03}" for number in range(NUM)]
    faulty = list(zip([*PIXELS[:-1], b"nothing"], LABELS, strict=True))
    result = pack(faulty, tmp_path / "named", names=names)["train"]
    assert [each.path for each in result.failures] == ["film1/023"]
    assert [each.path for each in pack(faulty, tmp_path / "unnamed")["train"].failures] == ["item 00000023"]
    numbers = np.arange(NUM - 1)
    with loopfeed.open_split(tmp_path / "named", "train") as split:
        assert sorted(split.names(numbers) or ()) == sorted(each[1:] for each in names[:-1])
    with loopfeed.open_split(tmp_path / "unnamed", "train") as split:
        assert sorted(split.names(numbers) or (), key=int) == [f"{each:08}" for each in numbers]


def test_a_dest_that_is_no_place_for_a_pack_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "loss.jsonl").touch()
    with pytest.raises(loopfeed.ShardError, match="is the folder of a training run"):
        pack((PIXELS, LABELS), tmp_path)
    with pytest.raises(loopfeed.ShardError, match="would be lost"):
        loopfeed.pack((PIXELS, LABELS), "memory://")


def test_an_array_that_is_not_in_memory_is_read_image_by_image(tmp_path: Path) -> None:
    class OnDisk:
        """An array like those of h5py, of which one thread at a time may read, and of Zarr, which has no length."""

        shape, dtype, slices = PIXELS.shape, PIXELS.dtype, list[int]()

        def __getitem__(self, index: int) -> Any:
            self.slices.append(index)
            return PIXELS[index]

        def __array__(self, *_: Any) -> Any:
            raise MemoryError

    pack((OnDisk(), LABELS), tmp_path, classes=CLASSES)
    assert contents(tmp_path) == expected()
    assert set(OnDisk.slices) == set(range(NUM))


@pytest.mark.parametrize("known", [False, True])
def test_items_that_are_no_images_follow_on_error(known: bool, tmp_path: Path) -> None:
    def form(pixels: np.ndarray) -> Any:
        number = int(np.flatnonzero((pixels == PIXELS).all(axis=(1, 2, 3)))[0])
        return {20: b"nothing", 21: None, 22: pixels.astype(np.float32)}.get(number, pixels)

    source = Torchvision(form) if known else MapStyle(form)
    result = pack(source, tmp_path / "skip", classes=CLASSES)["train"]
    reasons = {each.path: each.reason for each in result.failures}
    assert reasons.keys() == {"item 00000020", "item 00000021", "item 00000022"}
    assert "not an image" in reasons["item 00000020"]
    assert "got NoneType" in reasons["item 00000021"]
    assert "got float32; convert" in reasons["item 00000022"]
    assert contents(tmp_path / "skip") == expected([*range(20), 23])
    with pytest.raises(loopfeed.ShardError, match=r"item 0000002[012]: "):
        pack(source, tmp_path / "fail", classes=CLASSES, on_error="fail")


@pytest.mark.parametrize("kind", [KeyError, ValueError, OSError])
@pytest.mark.parametrize("form", ["generator", "map style", "labels known"])
def test_exceptions_of_the_users_code_come_out_with_their_item(
    form: str, kind: type[Exception], tmp_path: Path
) -> None:
    def broken(pixels: np.ndarray) -> np.ndarray:
        if (pixels == PIXELS[17]).all():
            raise kind("mine")
        return pixels

    source = Torchvision(broken) if form == "labels known" else MapStyle(broken)
    with pytest.raises(kind, match="mine") as caught:
        pack((each for each in source) if form == "generator" else source, tmp_path)  # type: ignore[attr-defined]
    assert caught.value.__notes__[0] == "(raised for item 17 of train of the given data set)"
    assert caught.traceback[-1].name == "broken"


def test_a_file_that_pillow_refuses_in_the_users_code_is_a_faulty_image(tmp_path: Path) -> None:
    (tmp_path / "faulty.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")

    def opened(pixels: np.ndarray) -> Any:
        return Image.open(tmp_path / "faulty.png") if (pixels == PIXELS[17]).all() else Image.fromarray(pixels)

    result = pack(Torchvision(opened), tmp_path / "data")["train"]
    assert [(each.path, each.reason[:27]) for each in result.failures] == [
        ("item 00000017", "its file cannot be decoded:")
    ]
    with pytest.raises(ValueError, match=r"item 17 of train: its file cannot be decoded.*leave it out"):
        pack(MapStyle(opened), tmp_path / "unknown")


@pytest.mark.parametrize("mode", ["L", "RGB", "1", "P", "LA", "RGBA", "CMYK", "HSV", "I;16", "I", "F"])
def test_images_of_pillow_of_every_mode_are_packed_as_their_file(mode: str, tmp_path: Path) -> None:
    picture = Image.fromarray(PIXELS[0])
    if mode in ("I;16", "I", "F"):
        grey = PIXELS[0, ..., 0]
        values = {"I;16": grey * np.uint16(257), "I": grey * np.int32(200), "F": grey / np.float32(255)}
        picture = Image.fromarray(values[mode])
    elif mode in ("RGBA", "LA"):
        picture.putalpha(Image.fromarray(PIXELS[1, ..., 0]))
        picture = picture.convert(mode)
    else:
        picture = picture.convert(mode)
    assert picture.mode == mode
    pack([(picture, 0)], tmp_path / "given")
    suffix = "tif" if mode in ("CMYK", "I;16", "I", "F") else "png"
    (picture if mode != "HSV" else picture.convert("RGB")).save(tmp_path / f"saved.{suffix}")
    pack([(tmp_path / f"saved.{suffix}", 0)], tmp_path / "saved")
    assert contents(tmp_path / "given") == contents(tmp_path / "saved")


def test_the_orientation_of_a_picture_is_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(PIXELS[0]).save(tmp_path / "turned.png", exif=exif)
    with Image.open(tmp_path / "turned.png") as picture:
        pack([(picture.convert("RGB"), 0)], tmp_path / "data")
    assert contents(tmp_path / "data") == {(np.rot90(PIXELS[0], -1).tobytes(), "0")}


def test_one_thread_at_a_time_calls_a_data_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("loopfeed.preprocess.packing.pipeline._MAX_BLOCK_IMAGES", 1)  # a task for each thread
    busy = threading.Lock()

    def alone(pixels: np.ndarray) -> np.ndarray:
        assert busy.acquire(blocking=False)
        try:
            threading.Event().wait(0.001)
            return pixels
        finally:
            busy.release()

    pack(Torchvision(alone), tmp_path, workers=4)
    assert contents(tmp_path) == expected()


@pytest.mark.parametrize("train", [iter([(PIXELS[label], label) for label in range(3)]), Torchvision()])
def test_a_split_that_is_packed_alone_has_the_classes_of_all(tmp_path: Path, train: Any) -> None:
    results = pack({"train": train, "val": (PIXELS[:2], [0, 2])}, tmp_path, splits="val")
    assert results["val"].manifest.class_counts[:3] == (1, 0, 1)


def test_the_classes_of_splits_are_united_as_those_of_folders(tmp_path: Path) -> None:
    for train, val, fault in (
        (["cat", "dog"], ["Cat", "dog"], "train has cat, which differs from Cat only in case; rename it"),
        (
            [0, 1],
            [1, 2],
            "1 class that train lacks: 2; .*remove it from val, or name all classes with classes= if train",
        ),
        ([0, 1], ["a", "b"], "val has 2 classes that train lacks: a, b"),
    ):
        parts = {"train": (PIXELS[:2], train), "val": (PIXELS[:2], val)}
        with pytest.raises(ValueError, match=fault):
            pack(parts, tmp_path / "data")
    notes: list[str] = []
    results = pack({"train": (PIXELS[:2], [0, 2]), "val": (PIXELS[:1], [2])}, tmp_path, notify=notes.append)
    assert results["val"].manifest.class_counts == (0, 1)
    assert "val has no image of 1 class: 0" in notes
    results = pack({"train": (PIXELS[:2], [0, 1]), "val": (PIXELS[:1], [2])}, tmp_path / "2", classes=["a", "b", "c"])
    assert results["val"].manifest.class_counts == (0, 0, 1)


def test_no_temporary_file_stays_open(tmp_path: Path) -> None:
    def count() -> int:
        gc.collect()
        # Temporary files have no name; other threads of the process open and close files of their own.
        opened = [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]
        return len([each for each in opened if each.endswith("(deleted)")])

    def items() -> Any:
        return iter([(PIXELS[label], label) for label in range(3)])

    before = count()
    pack({"train": items(), "test": items()}, tmp_path / "1", splits="test")
    for source, arguments in (
        ({"train": items(), "val": items()}, {"holdout": 0.5}),
        ({"train": items(), "val": (PIXELS[:1], ["a"])}, {}),
        (items(), {"splits": "test"}),
    ):
        with pytest.raises(ValueError, match=r"val split|has 1 class that|has no split test"):
            pack(source, tmp_path / "2", **arguments)
    assert count() == before


def test_an_endless_generator_ends_with_the_room_on_the_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free = iter([2**40, 2**40, 100])
    usage = type("Usage", (), {"free": property(lambda _: next(free))})
    monkeypatch.setattr(spool, "_LEFT_FREE_BYTES", 10_000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage())
    with pytest.raises(
        ValueError,
        match=r"in a temporary file in .*, which lacks room: after 0\.0 GiB, .*; make.*islice",
    ):
        pack(iter(lambda: (PIXELS[0], 1), None), tmp_path / "data")
    assert [each.name for each in tmp_path.rglob("*") if each.is_file()] == []


ZEROS = np.zeros((3, 4, 4, 3), np.uint8)
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ((ZEROS.astype(np.float32), [0, 1, 2]), {}, r"float32 \[3, 4, 4, 3\]: pixels must be uint8.*convert"),
    ((np.zeros((3, 6, 7, 5), np.uint8), [0, 1, 2]), {}, r"uint8 \[3, 6, 7, 5\]: the shape of an image must be"),
    ((ZEROS, [0, 1]), {}, "3 images but 2 labels; give each image one"),
    ((ZEROS, np.eye(3)), {}, r"labels of train must be .* got float64 \[3, 3\]; of one-hot rows give \.argmax\(1\)"),
    ((ZEROS, np.array([0.5, 1.0, 2.0])), {}, r"got float64 \[3\].* a table with labels="),
    ((ZEROS, np.array([0.0, 1.0, 2.0])), {}, r"got float64 \[3\]; of whole numbers give \.astype\(int\)"),
    (([0, 1, 2], ZEROS), {}, r"got uint8 .*; these look like images; give \(images, labels\) in this order"),
    (default_loader, {}, r"train is a function \(default_loader\); call it"),
    ((ZEROS, [[0], [1], [0, 1]]), {}, r"item 0 of train has the label \[0\], but a label must be .* labels="),
    ((ZEROS, [0, 1, None]), {}, "item 2 of train has the label None"),
    ((ZEROS, [0, 1, -1]), {}, "item 2 of train has the label -1, but labels must be numbers from 0; leave out"),
    ((ZEROS, [0, "b", 1]), {}, "item 1 of train has the label 'b', but item 0 of train has 0; give all"),
    ((ZEROS, [0, 1, 2]), {"classes": ["a", "b"]}, "item 2 of train has the label 2, .* from 0 to 1, for 2 classes"),
    ((ZEROS, ["a", "b", "c"]), {"classes": ["a", "b"]}, "item 2 of train has the label 'c', which is not one of the 2"),
    ((ZEROS, [0, 1, 0]), {"classes": ["a", "a"]}, r"classes must be .* but classes\[1\] is 'a'"),
    ((ZEROS, [0, 1, 0]), {"classes": "ab"}, "classes must be a list of names in .* got a str"),
    ((ZEROS, [0, 1, 0]), {"classes": {"a": 1, "b": 0}}, "in the order of their numbers, got a dict"),
    (((ZEROS, [0, 1, 2]), (ZEROS, [0, 1, 2])), {}, "two pairs of arrays are two splits; give a dict"),
    ({"train": "photographs", "val": "other"}, {}, "train is a path; give the path of the folder"),
    ((ZEROS, [0, 1, 0]), {"names": ["x", "y"]}, "3 images but 2 names"),
    ((ZEROS, [0, 1, 0]), {"names": ["x", "y", "x"]}, "item 2 of train has the name 'x', which is that of an earlier"),
    ((ZEROS, [0, 1, 0]), {"names": ["x", "y", 3]}, "item 2 of train has the name 3, which is not"),
    ((ZEROS, [0, 1, 0]), {"labels": "a.csv"}, "labels= is for a path"),
    ((ZEROS, [0, 1, 0]), {"splits": "val"}, "has no split val"),
    ((ZEROS, "abc"), {}, r"must be \(images, labels\), but the labels of train are str"),
    (type("DataFrame", (), {"iloc": 0})(), {}, r'train is a table; give two of its columns, such as \(table\["path"\]'),
    (ZEROS, {}, r"array of images without labels; give \(images, labels\)"),
    ([(ZEROS[0], 0), (ZEROS[1], 0, "a")], {}, r"item 1 of train must be \(image, label\), got 3 values"),
    ([ZEROS[0]], {}, r"item 0 of train must be \(image, label\), got ndarray"),
    ([({"picture": 1}, 0)], {}, "item 0 of train: an image must be an array, .* got dict"),
    ([{"picture": 1, "label": 0}], {}, "item 0 of train must have the keys image and label, got picture, label"),
    ([("there/is/none.jpg", 0)], {}, "item 0 of train: there/is/none.jpg does not exist; correct its path"),
    ([("https://a.org/b.jpg", 0)], {}, "item 0 of train: https://a.org/b.jpg is a URL; download it first"),
    ([(__file__, 0), (ZEROS[0], 1)], {}, "item 1 of train is of type ndarray, but the first is a path"),
    ([(__file__, 0), (__file__, 1)], {}, r"item 1 of train is the file test_given\.py, as item 0 is; give each"),
    ([], {}, "train has no images"),
    (iter(()), {}, "train has no images"),
    (7, {}, r"train must be \(images, labels\), a list .* got int"),
    ({"image": ZEROS, "label": [0, 1, 2]}, {}, "keys of a dict must be splits, .* got 'image', 'label'; give images"),
    ({"val": (ZEROS, [0, 1, 2]), "valid": (ZEROS, [0, 1, 2])}, {}, "must be splits, each once"),
    ({"train": (ZEROS, [0, 1, 2]), "val": (ZEROS, [0, 1, 2])}, {"names": ["a"] * 6}, "names must be a dict"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "arguments", "message"), REFUSED, ids=[re.sub(r"\W+", " ", each[2])[:50] for each in REFUSED]
)
def test_each_fault_has_one_clear_error(source: Any, arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        pack(source, tmp_path / "data", **arguments)
    assert not list(tmp_path.rglob("plan.json"))


def test_a_loader_of_batches_is_refused(tmp_path: Path) -> None:
    loader = type(
        "DataLoader", (), {"dataset": MapStyle(), "batch_size": 4, "__len__": lambda _: 6, "__iter__": iter}
    )()
    with pytest.raises(ValueError, match=r"loader of batches \(DataLoader\); give its \.dataset"):
        pack(loader, tmp_path)


@pytest.mark.parametrize("arguments", [{"classes": ["a"]}, {"names": ["a"]}])
def test_arguments_of_data_sets_are_refused_for_a_path(arguments: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(classes|names)= is for a data set in Python"):
        pack(folder, tmp_path, **arguments)
