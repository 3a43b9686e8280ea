"""Listing tar archives in place, against the standard library's `tarfile`."""

import io
import os
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopfeed.preprocess.sources.listing import SourceError
from loopfeed.preprocess.sources.source_file import open_source_file
from loopfeed.preprocess.sources.tarindex import BLOCK, members


def tar_bytes(entries, form=tarfile.PAX_FORMAT):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for name, content in entries:
            info = tarfile.TarInfo(name)
            if content is None:
                info.type = tarfile.DIRTYPE
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


@pytest.fixture
def listed(tmp_path):
    opened = []

    def list_it(content, **options):
        path = tmp_path / "some.tar"
        path.write_bytes(content)
        opened.append(open_source_file(path))
        return [(each.name, opened[-1].read(each.offset, each.size)) for each in members(opened[-1], **options)]

    yield list_it
    for tar in opened:
        os.close(tar.descriptor)


LONG = "a/" + "very-long-folder-name/" * 12 + "image.jpg"
ENTRIES = [("a/1.jpg", b"one"), ("a", None), ("./b//2.jpg", b""), (LONG, bytes(1025)), ("a/ünï.jpg", b"x" * 512)]
FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


@pytest.mark.parametrize("form", FORMATS)
def test_names_and_contents(listed, form):
    entries = [each for each in ENTRIES if form != tarfile.USTAR_FORMAT or each[0] != LONG]
    expected = [
        (name.replace("./", "").replace("//", "/"), content) for name, content in entries if content is not None
    ]
    assert listed(tar_bytes(entries, form)) == expected


def test_a_size_beyond_eight_gibibytes_is_understood(listed, tmp_path):
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        info = tarfile.TarInfo("huge.bin")
        info.size = 9 * 2**30
        header = info.tobuf(form)
        path = tmp_path / "sparse.tar"
        with path.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + info.size + 1024)
        tar = open_source_file(path)
        assert [(each.name, each.offset, each.size) for each in members(tar)] == [("huge.bin", len(header), 9 * 2**30)]
        os.close(tar.descriptor)


@settings(max_examples=30)
@given(
    names=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1, max_size=150), unique=True
    ),
    form=st.sampled_from(FORMATS[1:]),
)
def test_any_name_is_what_tarfile_reads(tmp_path_factory, names, form):
    names = [name for name in names if name not in (".", "..")]
    content = tar_bytes([(f"d/{name}", name.encode()) for name in names], form)
    path = tmp_path_factory.mktemp("names") / "n.tar"
    path.write_bytes(content)
    tar = open_source_file(path)
    found = [(each.name, each.offset) for each in members(tar)]
    os.close(tar.descriptor)
    with tarfile.open(path) as reference:
        assert found == [(each.name, each.offset_data) for each in reference]


def test_an_inner_archive_is_read_at_its_place(tmp_path):
    inner = tar_bytes([("1.jpg", b"first"), ("2.jpg", b"second")])
    path = tmp_path / "outer.tar"
    path.write_bytes(tar_bytes([("x.tar", inner), ("y.tar", tar_bytes([]))]))
    tar = open_source_file(path)
    outer = list(members(tar))
    found = list(members(tar, outer[0].offset, outer[0].offset + outer[0].size, inside="x.tar"))
    content = path.read_bytes()
    assert [content[each.offset : each.offset + each.size] for each in found] == [b"first", b"second"]
    assert list(members(tar, outer[1].offset, outer[1].offset + outer[1].size, inside="y.tar")) == []
    with pytest.raises(SourceError, match=r"outer.tar!x.tar is truncated: it ends at byte 1\d+"):
        list(members(tar, outer[0].offset, outer[0].offset + BLOCK + 100, inside="x.tar"))
    os.close(tar.descriptor)


def attack(kind=tarfile.REGTYPE, name="a/x.jpg", link=""):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, link
        archive.addfile(info)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (attack(name="/etc/passwd"), r"its member /etc/passwd has a path that leads out"),
        (attack(name="../../x.jpg"), r"its member \.\./\.\./x\.jpg has a path that leads out"),
        (attack(name="a/../../x.jpg"), r"leads out of the archive"),
        (attack(tarfile.SYMTYPE, link="/etc/passwd"), r"its member a/x\.jpg is a symbolic link, not a regular file"),
        (attack(tarfile.LNKTYPE, link="b"), r"a hard link, not a regular file"),
        (attack(tarfile.CHRTYPE), r"a device, not a regular file"),
        (attack(tarfile.BLKTYPE), r"a device, not a regular file"),
        (attack(tarfile.FIFOTYPE), r"a pipe, not a regular file"),
        (attack(tarfile.GNUTYPE_SPARSE), r"a/x\.jpg is a sparse file, not a regular file"),
        (attack(b"V"), r"of type 'V', not a regular file"),
        (attack(tarfile.DIRTYPE, name="../d"), r"its member \.\./d/ has a path that leads out"),
        (attack(tarfile.DIRTYPE, name="/etc"), r"its member /etc/ has a path that leads out"),
        (attack(tarfile.SYMTYPE, link="l" * 200), r"a link, not a regular file"),
    ],
)
def test_unsafe_members_are_refused_by_name(listed, content, message):
    with pytest.raises(SourceError, match=message):
        listed(content)


@pytest.mark.parametrize("keyword", ["GNU.sparse.major", "GNU.sparse.map", "GNU.sparse.name", "GNU.sparse.realsize"])
def test_a_member_that_pax_calls_sparse_is_refused(listed, keyword):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("a/x.jpg")
        info.pax_headers = {keyword: "1"}
        archive.addfile(info)
    with pytest.raises(SourceError, match=r"its member a/x\.jpg is a sparse file, not a regular file"):
        listed(file.getvalue())


def test_global_headers_are_skipped(listed):
    file = io.BytesIO()
    with tarfile.open(
        fileobj=file, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "a note", "size": "7"}
    ) as archive:
        for name in ("a/1.jpg", LONG):
            info = tarfile.TarInfo(name)
            info.size = 3
            archive.addfile(info, io.BytesIO(b"one"))
    assert listed(file.getvalue()) == [("a/1.jpg", b"one"), (LONG, b"one")]


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_an_extension_header_that_would_fill_the_memory_is_refused(listed, kind):
    def content(num_bytes):
        info = tarfile.TarInfo("extension")
        info.type, info.size = kind, num_bytes
        if kind == tarfile.XHDTYPE:
            record = f"{num_bytes} comment=".encode()
            body = record + b"x" * (num_bytes - len(record) - 1) + b"\n"
        else:
            body = b"a/1.jpg\0" + bytes(num_bytes - 8)
        padding = bytes(-num_bytes % BLOCK)
        return info.tobuf(tarfile.GNU_FORMAT) + body + padding + tar_bytes([("a/1.jpg", b"one")])

    assert listed(content(2**20)) == [("a/1.jpg", b"one")]
    with pytest.raises(SourceError, match="damaged: the extension header at byte 512 has 1048577 bytes"):
        listed(content(2**20 + 1))


def test_members_after_the_end_are_refused_and_padding_of_any_bytes_is_not(listed):
    one, other = (tar_bytes([(f"a/{number}.jpg", bytes([number]) * 600)]) for number in (1, 2))
    end = BLOCK + 1024
    for joined in (one + other, one[:end] + bytes(3 << 20) + other):
        begin = joined.rindex(b"a/2.jpg")
        with pytest.raises(SourceError, match=f"some.tar has members after its end at byte {end}, from byte {begin} "):
            listed(joined)
    whole = bytearray(tar_bytes([(f"a/{number}.jpg", b"x" * 600) for number in range(3)]))
    whole[end : end + BLOCK] = bytes(BLOCK)  # a lost header
    with pytest.raises(SourceError, match=f"at byte {end}, from byte {2 * end} on: it is damaged"):
        listed(bytes(whole))
    assert len(listed(one + b"\xff" * 5000)) == 1


def test_truncation_names_the_file_and_the_offset(listed):
    whole = tar_bytes([("a/1.jpg", bytes(600)), ("a/2.jpg", bytes(600))])
    second = BLOCK + 1024
    with pytest.raises(
        SourceError, match=r"some\.tar is truncated: it ends at byte 612, within member a/1\.jpg, .* byte 0 "
    ):
        listed(whole[: BLOCK + 100])
    with pytest.raises(
        SourceError, match=f"within member a/2.jpg, which begins at byte {second} and needs 1 more bytes"
    ):
        listed(whole[: second + BLOCK + 599])
    with pytest.raises(SourceError, match=f"ends at byte {second} without the empty block"):
        listed(whole[:second])
    with pytest.raises(SourceError, match=f"ends at byte {second + 100} without the empty block"):
        listed(whole[: second + 100])


def test_an_archive_cut_after_it_was_listed_fails_when_read(tmp_path):
    path = tmp_path / "some.tar"
    path.write_bytes(tar_bytes([("a/1.jpg", bytes(5000))]))
    tar = open_source_file(path)
    (member,) = members(tar)
    os.truncate(path, 1000)
    with pytest.raises(OSError, match=r"some\.tar ends at byte 1000"):
        tar.read(member.offset, member.size)
    os.close(tar.descriptor)


@settings(max_examples=100)
@given(data=st.data())
def test_damage_ends_in_members_or_a_reason(tmp_path_factory, data):
    content = bytearray(tar_bytes([("a/1.jpg", b"one"), (LONG, b"two")]))
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=4)):
        content[place] = value
    path = tmp_path_factory.mktemp("damage") / "d.tar"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    tar = open_source_file(path)
    try:
        assert all(each.offset + each.size <= tar.num_bytes for each in members(tar))
    except SourceError:
        pass
    finally:
        os.close(tar.descriptor)


def header(kind, num_bytes, *, name="a/1.jpg", size_field=None, fields=()):
    """A header block of a type and size, with a valid checksum whatever stands in its fields (position, bytes)."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, num_bytes
    block = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    if size_field is not None:
        block[124:136] = size_field
    for position, content in fields:
        block[position : position + len(content)] = content
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def pax(*records):
    body = b"".join(records)
    return header(tarfile.XHDTYPE, len(body)) + body + bytes(-len(body) % BLOCK)


def record(key, value):
    rest = b" " + key + b"=" + value + b"\n"
    length = len(rest)
    while length != len(str(length)) + len(rest):
        length = len(str(length)) + len(rest)
    return str(length).encode() + rest


REST = tar_bytes([("a/1.jpg", b"one")])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            pax(record(b"size", b"9" * 5000)) + REST,
            r"the header at byte 5632 has the size '9{19}…', which is not valid; download",
        ),
        (pax(record(b"size", "٣".encode())) + REST, "the header at byte 1024 has the size '٣'"),
        (pax(record(b"size", b"-1")) + REST, "the header at byte 1024 has the size '-1'"),
        (pax(b"9" * 5000 + b" path=x\n") + REST, "the pax header at byte 512 has an invalid record, or more than 1000"),
        (pax(b"0 path=x\n") + REST, "the pax header at byte 512 has an invalid record, or more than 1000"),
        (
            pax(record(b"path", b"a/" + b"x" * 4095)) + REST,
            r"the member at byte \d+ has a name of 4,097 bytes, more than the 4,096",
        ),
        (pax(record(b"path", b"a/\0x")) + REST, r"its member 'a/\\x00x' at byte 1024 has a NUL character in its name"),
        (
            pax(record(b"path", b"../\x1b]0;x\x07")) + REST,
            r"its member '\.\./\\x1b\]0;x\\x07' has a path that leads out",
        ),
        (
            pax(*[record(b"a", b"b")] * 1001) + REST,
            "the pax header at byte 512 has an invalid record, or more than 1000",
        ),
        (
            pax(record(b"a", b"b")) * 17 + REST,
            "more than 16 extension headers in a row, the last at byte 16384",
        ),
        (header(tarfile.XGLTYPE, 0) * 17 + REST, "more than 16 extension headers in a row"),
        (header(tarfile.REGTYPE, 0, size_field=b"\xff" * 12) + REST, "the header at byte 0 has the size"),
        (header(tarfile.REGTYPE, 0, size_field=b"-0000000100\0") + REST, "the header at byte 0 has the size"),
        (header(tarfile.REGTYPE, 0, size_field=b"1_0".ljust(12, b"\0")) + REST, "the header at byte 0 has the size"),
        (header(tarfile.REGTYPE, 0, size_field=b"0o17".ljust(12, b"\0")) + REST, "the header at byte 0 has the size"),
        (header(tarfile.REGTYPE, 0, size_field=b"\x80" + b"\xff" * 11) + REST, "the header at byte 0 has the size"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else value[:30],
)
def test_the_sizes_that_an_archive_declares_are_limited(listed, content, message):
    with pytest.raises(SourceError, match=message) as caught:
        listed(content)
    assert "some.tar" in str(caught.value)
    assert len(str(caught.value)) < 500


def test_times_and_owners_of_a_header_are_ignored(listed):
    times = (257, b"ustar  \0"), (345, b"14700000000\0" * 2)  # as `tar --incremental` writes them
    owner = (108, b"nobody\0\0")
    assert listed(header(tarfile.REGTYPE, 3, fields=(*times, owner)) + REST[BLOCK:]) == [("a/1.jpg", b"one")]


def test_at_the_bounds_an_archive_is_listed(listed):
    name = b"a/" + b"x" * 4094
    assert listed(pax(record(b"path", name)) + REST) == [(name.decode(), b"one")]
    assert listed(pax(record(b"a", b"b")) * 16 + REST) == [("a/1.jpg", b"one")]
    assert listed(pax(*[record(b"a", b"b")] * 1000) + REST) == [("a/1.jpg", b"one")]
    assert listed(pax(record(b"size", b""), record(b"size", b"3")) + REST) == [("a/1.jpg", b"one")]
    binary = header(tarfile.REGTYPE, 3, size_field=b"\x80" + (3).to_bytes(11))
    assert listed(binary + REST[BLOCK:]) == [("a/1.jpg", b"one")]
