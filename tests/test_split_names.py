"""Which folders are splits, and what is left out of a source, in a folder and in an archive of it alike."""

import os
import re
from pathlib import Path

import pytest

from loopfeed.preprocess.sources.open_source import SourceError, open_source
from loopfeed.preprocess.sources.selection import SPLIT_FOLDERS
from tests.imagenet_archives import tar_bytes


def sources(folder: Path, files, wrapper=""):
    """Return a folder with the files, each containing its name, and an archive of it."""
    for name in files:
        path = folder / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    tar = folder / "set.tar"
    tar.write_bytes(tar_bytes({wrapper + name: name.encode() for name in files}))
    return folder / "set", tar


def found_in(path):
    """Return the split and the class of each image of a source, by its content, and the source's notes."""
    with open_source(path) as source:
        return {
            split.read(index).decode(): (name, split.classes[split.image(index).label].id)
            for name, split in source.splits.items()
            for index in range(len(split))
        }, source.notes


def of_classes(folder, count=1):
    return [f"{folder}/{each}/{number}.png" for each in ("cat", "dog") for number in range(count)]


@pytest.mark.parametrize("name", sorted({*SPLIT_FOLDERS} - {"train", "training"}))
@pytest.mark.parametrize("cased", [str.lower, str.title])
def test_every_usual_name_of_a_split_is_one(tmp_path, name, cased):
    split = {"val": "val", "valid": "val", "validation": "val", "dev": "val", "test": "test", "testing": "test"}[name]
    for train in ("train", "Training"):
        files = [*of_classes(train), *of_classes(cased(name)), "notes/readme.txt", "readme.md"]
        for path in sources(tmp_path / train, files):
            found, _ = found_in(path)
            assert found == {
                each: ("train" if each.startswith(train) else split, each.split("/")[1]) for each in files[:4]
            }
            with open_source(path) as source:
                assert source.layout.endswith("of class folders (not read: notes/)")


@pytest.mark.parametrize("name", ["eval", "holdout", "Evaluation", "val2", "extra", "unlabelled"])
@pytest.mark.parametrize("image", ["cat/1.png", "1.JPG", "deep/er/cat/1.webp"])
def test_images_in_any_other_folder_beside_train_are_refused_with_the_rename(tmp_path, name, image):
    for path in sources(tmp_path, [*of_classes("train"), f"{name}/{image}"]):
        expected = (
            f"{path} has images in {name}/ beside train/, for example {name}/{image}, but its name is not that of a "
            f"split; rename {name}/ to val/ or test/ if it is that split, or move it elsewhere"
        )
        with pytest.raises(SourceError, match=re.escape(expected)):
            open_source(path)
    (tmp_path / "set" / name).rename(tmp_path / "elsewhere")
    assert {split for split, _ in found_in(tmp_path / "set")[0].values()} == {"train"}


def test_validation_images_outside_class_folders_are_refused_but_a_competitions_test_images_have_no_labels(tmp_path):
    for path in sources(tmp_path / "val", [*of_classes("train"), "valid/1.png"]):
        with pytest.raises(SourceError, match=r"outside any class folder in valid/ beside train/, for example valid/1"):
            open_source(path)
    for path in sources(tmp_path / "test", [*of_classes("train"), "test/1.png"]):
        assert len(found_in(path)[0]) == 2
        with open_source(path) as source:
            assert source.layout.endswith("(not read: test/)")


SYSTEM_ENTRIES = {
    "@eaDir": ["@eaDir/t.jpg", "cat/@eaDir/0.png/SYNOPHOTO_THUMB_M.jpg"],
    "$RECYCLE.BIN": ["$RECYCLE.BIN/S-1-5/$R1.jpg"],
    "#recycle": ["#recycle/d.jpg"],
    "System Volume Information": ["System Volume Information/WPSettings.dat"],
    "lost+found": ["lost+found/#123"],
    "__MACOSX": ["__MACOSX/cat/._0.png"],
    ".ipynb_checkpoints": ["cat/.ipynb_checkpoints/0-checkpoint.png"],
    "Thumbs.db": ["cat/Thumbs.db", "dog/thumbs.db"],
    "._*": ["cat/._0.png", "dog/._0.png", "._cat"],
    ".DS_Store": [".DS_Store", "cat/.DS_Store"],
    "desktop.ini": ["cat/desktop.ini", "cat/Desktop.ini"],
    "@Recycle": ["@Recycle/x.jpg"],
    ".*": [".stfolder/a", "dog/.@__thumb/default0.jpg"],
    "other": ["cat/0.png:Zone.Identifier", "found.000/file0.chk"],
}


@pytest.mark.parametrize("name", SYSTEM_ENTRIES)
def test_what_systems_and_file_servers_put_in_is_neither_class_nor_image(tmp_path, name):
    images = ["cat/0.png", "dog/0.png"]
    for prefix in ("", "train/"):
        ours = [prefix + each for each in images]
        for path in sources(tmp_path / f"in{prefix}", [*ours, *(prefix + each for each in SYSTEM_ENTRIES[name])]):
            found, notes = found_in(path)
            assert found.keys() == set(ours)
            assert len(notes) == 1
            assert re.match(
                rf"Ignored: {len(SYSTEM_ENTRIES[name])} hidden or system entr(y|ies), such as systems and file servers "
                rf"leave: {re.escape(name)}",
                notes[0],
                re.IGNORECASE,
            )


def test_a_folder_of_the_system_is_never_opened(tmp_path, monkeypatch):
    root, _ = sources(tmp_path, ["cat/0.png", "lost+found/x"])
    scandir, stat = os.scandir, os.stat

    def guarded(call):
        def refuse(path=".", *arguments, **options):
            assert "lost+found/" not in f"{os.fspath(path)}/" if isinstance(path, (str, os.PathLike)) else True
            return call(path, *arguments, **options)

        return refuse

    monkeypatch.setattr(os, "scandir", guarded(scandir))
    monkeypatch.setattr(os, "stat", guarded(stat))
    assert found_in(root)[0] == {"cat/0.png": ("train", "cat")}


@pytest.mark.parametrize("wrapper", ["", "set/"])
def test_an_archive_has_the_names_of_the_folder_that_it_was_made_of(tmp_path, wrapper):
    files = {"classes.txt": b"cat Felis\ndog Canis, a wolf\n", "readme.md": b"", "cat/0.png": b"", "dog/0.png": b""}
    tar = tmp_path / "set.tar"
    tar.write_bytes(tar_bytes({wrapper + name: content for name, content in files.items()}))
    with open_source(tar) as source:
        assert [(each.id, each.name) for each in source.splits["train"].classes] == [("cat", "Felis"), ("dog", "Canis")]
