import io
import struct
import tarfile
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from loopfeed.preprocess.packing.pack_source import pack
from loopfeed.preprocess.sources.archives import open_archive
from loopfeed.preprocess.sources.listing import ChangedSourceError, SourceError
from loopfeed.preprocess.sources.open_source import open_source
from tests.labelled_photographs import draw_photographs, write_labels

ENTRY, LOCAL = b"PK\x01\x02", b"PK\x03\x04"


def zip_bytes(contents, method=zipfile.ZIP_DEFLATED, change=lambda info: None):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in contents.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = method
            change(info)
            archive.writestr(info, content)
    return file.getvalue()


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in sorted(folder.rglob("*")) if each.is_file()}


def class_folders(root: Path) -> dict[str, bytes]:
    for split in ("train", "val"):
        for name in ("red fox", "Füchse"):
            draw_photographs(root / split / name, 5, seed=len(split + name))
    return files_of(root)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_zip_archive_is_packed_like_its_folder(tmp_path, method):
    contents = class_folders(tmp_path / "images")
    (tmp_path / "images.zip").write_bytes(zip_bytes({f"outer/{name}": each for name, each in contents.items()}, method))
    with tarfile.open(tmp_path / "images.tar", "w") as archive:
        archive.add(tmp_path / "images", "outer")
    packs = []
    for source in ("images", "images.tar", "images.zip"):
        pack(tmp_path / source, tmp_path / "packs" / source, size=4)
        packs.append(files_of(tmp_path / "packs" / source))
    assert packs[0].keys() == packs[2].keys()
    changed = [name for name in packs[0] if packs[0][name] != packs[2][name]]
    assert packs[1] == packs[2]
    assert changed == []


def test_a_zip_archive_with_a_file_of_labels_is_packed_like_its_folder(tmp_path):
    paths = draw_photographs(tmp_path / "images", 9)
    labels = write_labels(tmp_path / "labels.csv", paths)
    (tmp_path / "images.zip").write_bytes(zip_bytes(files_of(tmp_path / "images")))
    for source in ("images", "images.zip"):
        pack(tmp_path / source, tmp_path / "packs" / source, labels=labels, size=4)
    assert files_of(tmp_path / "packs/images") == files_of(tmp_path / "packs/images.zip")


def test_names_of_windows_and_of_other_encodings(tmp_path):
    def from_windows(info):
        info.create_system, info.filename = 0, info.filename.replace("/", "\\")

    path = tmp_path / "images.zip"
    path.write_bytes(zip_bytes({"a/b.png": b"1", "é/c.png": b"2"}, change=from_windows))
    with closing(open_archive(path)) as archive:
        found = {each.name: archive.read(each.name, each.offset, each.size) for each in archive.members()}
    assert found == {"a/b.png": b"1", "é/c.png": b"2"}
    # Without the flag for UTF-8: as code page 437, unless it is UTF-8 all the same, as macOS writes it.
    for raw, name in ((b"\x82/1.png", "é/1.png"), ("é/1.png".encode(), "é/1.png")):
        content = zip_bytes({"x" * len(raw): b"1"}).replace(b"x" * len(raw), raw)
        path.write_bytes(content)
        with closing(open_archive(path)) as archive:
            assert [each.name for each in archive.members()] == [name]


def test_more_members_and_bytes_than_fit_in_32_bits(tmp_path, monkeypatch):
    contents = {f"{index % 3}/{index}.png": b"%d" % index for index in range(70_000)}
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)  # so that even these small offsets and sizes are in 64 bits
    path = tmp_path / "images.zip"
    path.write_bytes(zip_bytes(contents | {"0/large.png": b"x" * 200}, zipfile.ZIP_STORED))
    with closing(open_archive(path)) as archive:
        members = list(archive.members())
        assert [each.name for each in members] == [*contents, "0/large.png"]
        for each in (members[0], members[40_000], members[-1]):
            assert archive.read(each.name, each.offset, each.size) == (contents.get(each.name) or b"x" * 200)


def changed(content: bytes, signature: bytes, at: int, value: bytes) -> bytes:
    start = content.index(signature) + at
    return content[:start] + value + content[start + len(value) :]


def symlink(info):
    info.create_system, info.external_attr = 3, 0o120777 << 16


def far(offset: int) -> bytes:
    """Return an archive whose only member is at an offset that has 64 bits."""
    archive = zip_bytes({"a/1.png": b"1"})
    start, end = archive.index(ENTRY), archive.index(b"PK\x05\x06")
    entry = bytearray(archive[start:end])
    entry[30:32], entry[42:46] = b"\x0c\0", b"\xff" * 4
    size = struct.pack("<L", end - start + 12)
    ending = archive[end : end + 12] + size + archive[end + 16 :]
    return archive[:start] + bytes(entry) + struct.pack("<HHQ", 1, 8, offset) + ending


GOOD = zip_bytes({"a/1.png": b"1" * 100, "b/2.png": b"2" * 100})
REFUSED = {
    "truncated": (GOOD[:-30], "is truncated: it ends without the directory that ends a zip archive; download"),
    "encrypted": (changed(GOOD, ENTRY, 8, b"\x01\0"), r"is encrypted \(its member a/1.png\); unpack it with its"),
    "out": (zip_bytes({"a/1.png": b"1", "a/../../2.png": b"2"}), r"a/../../2.png has a path that leads out"),
    "absolute": (zip_bytes({"/a/1.png": b"1"}), "has a path that leads out of the archive"),
    "drive": (zip_bytes({"C:/a/1.png": b"1"}), "has a path that leads out of the archive"),
    "link": (zip_bytes({"a/1.png": b"/etc/passwd"}, change=symlink), "a/1.png is a symbolic link, not a regular file"),
    "bzip2": (zip_bytes({"a/1.png": b"1"}, zipfile.ZIP_BZIP2), "compressed with bzip2, which is not read; write the"),
    "lzma": (zip_bytes({"a/1.png": b"1"}, zipfile.ZIP_LZMA), "compressed with LZMA, which is not read"),
    "volume": (changed(GOOD, ENTRY, 34, b"\x01\0"), "is one of several volumes of a zip archive; join them"),
    "moved": (
        changed(GOOD, b"PK\x05\x06", 16, b"\xff\xff\xff\0"),
        "is damaged: its directory does not fit its members; down",
    ),
    **{
        f"far {bits}": (far(2**bits), "is damaged: its directory does not fit its members; download")
        for bits in (40, 62, 63)
    },
    "inserted": (GOOD[:9] + b"x" * 50 + GOOD[9:], "is damaged: its directory does not fit its members; download"),
    "entry": (changed(GOOD, ENTRY, 0, b"XXXX"), "is damaged: Bad magic number for central directory; download"),
    "not UTF-8": (zip_bytes({"é/1.png": b"1"}).replace("é".encode(), b"\xe9\xe9"), "is damaged: .*utf-8.*; download"),
    "stored": (changed(zip_bytes({"a/1.png": b"1"}, 0), ENTRY, 24, b"\x09"), "is stored in 1 bytes but declares 9"),
    "empty": (zip_bytes({}), "is an empty archive; give one with images"),
    "no classes": (zip_bytes({"readme.txt": b"1"}), r"contains no class folders \(its first file is readme.txt\)"),
    "loose": (zip_bytes({"a/1.png": b"1", "2.png": b"2"}), "contains the image 2.png outside any class folder"),
    "twice": (GOOD.replace(b"b/2.png", b"a/1.png"), "a/1.png exists twice; write the archive again"),
    "page": (b"<!DOCTYPE html><html>", "is an HTML page, such as .* neither a folder nor a tar or zip archive"),
    "nothing": (b"", "is an empty file; download it again"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_archives_that_are_refused(tmp_path, case):
    content, message = REFUSED[case]
    (tmp_path / "images.zip").write_bytes(content)
    with pytest.raises(SourceError, match=rf"images\.zip.*{message}"):
        open_source(tmp_path / "images.zip")


MEMBERS = {
    "bomb": (
        changed(zip_bytes({"a/1.png": bytes(2**24)}), ENTRY, 24, struct.pack("<L", 9)),
        "damaged in the zip archive: Bad CRC-32",
    ),
    "short": (changed(GOOD, ENTRY, 24, b"\x65"), "unpacks to 100 instead of the 101 bytes that"),
    "crc": (changed(GOOD, ENTRY, 16, b"\0\0"), "damaged in the zip archive: Bad CRC-32"),
    "data": (changed(GOOD, LOCAL, 37, b"\xff\xff"), "damaged in the zip archive: Error -3 while decompressing"),
    "local": (changed(GOOD, LOCAL, 30, b"c"), "File name in directory 'a/1.png' and header b'c/1.png' differ"),
    "beyond": (changed(GOOD, ENTRY, 42, b"\xf0"), "damaged in the zip archive: Truncated file header"),
    "crc of stored": (changed(zip_bytes({"a/1.png": b"1"}, 0), LOCAL, 37, b"2"), "Bad CRC-32"),
}


@pytest.mark.parametrize("case", MEMBERS)
def test_a_damaged_member_is_a_fault_of_one_image(tmp_path, case):
    content, message = MEMBERS[case]
    (tmp_path / "images.zip").write_bytes(content)
    with open_source(tmp_path / "images.zip") as source:
        split = source.splits["train"]
        index = next(each for each in range(len(split)) if "a/1.png" in split.image(each).name)
        with pytest.raises(SourceError, match=message):
            split.read(index)
        for other in set(range(len(split))) - {index}:
            assert zlib.crc32(split.read(other)) == zlib.crc32(b"2" * 100)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_threads_read_members_of_an_archive_until_it_is_written_to(tmp_path, method):
    contents = {f"{index % 3}/{index}.png": b"%d" % index * (index * 7 % 5000 + 1) for index in range(300)}
    (tmp_path / "images.zip").write_bytes(zip_bytes(contents, method))
    with closing(open_archive(tmp_path / "images.zip")) as archive:
        members = list(archive.members()) * 4

        def read(member):
            return archive.read(member.name, member.offset, member.size)

        with ThreadPoolExecutor(8) as threads:
            assert [*threads.map(read, members)] == [contents[each.name] for each in members]
        with (tmp_path / "images.zip").open("ab") as file:
            file.write(b"x")
        with pytest.raises(ChangedSourceError, match="has changed since it was listed"):
            read(members[0])
