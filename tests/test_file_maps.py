"""Mapped files need no descriptor each, and stay mapped while they are used."""

import gc
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from loopfeed.preprocess.shards.file_maps import map_file


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 64)
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def mappings():
    with open("/proc/self/maps", encoding="utf-8") as lines:  # noqa: PTH123
        return sum("/file" in line for line in lines)


def test_a_view_keeps_the_file_mapped_and_nothing_else_does(file):
    before = mappings()
    view = map_file(file, 256 * 64).array[256:].view(np.uint32)[::2]
    gc.collect()
    assert mappings() == before + 1
    assert view[1] == int.from_bytes(bytes([8, 9, 10, 11]), sys.byteorder)
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    del view
    gc.collect()
    assert mappings() == before


def test_a_file_that_cannot_be_mapped_is_an_oserror(tmp_path):
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match=r"No such device|Operation not"):
            map_file(folder, 10)
    finally:
        os.close(folder)


def test_more_shards_are_mapped_than_descriptors_may_be_open(tmp_path):
    """In a process of its own, which may open 64 files."""
    program = """
import resource, sys
import numpy as np
from loopfeed.preprocess.shards.reader import open_split
from tests.fake_source import fake_source, pack, packed_words

source = fake_source(150, size=64)
pack(source, sys.argv[1], shard_images=1)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
with open_split(sys.argv[1], "train") as split:
    indices = np.arange(150)
    lent = split.lend(indices, np.zeros(150, np.int32), timeout_s=30.0)
    assert lent is not None
    np.testing.assert_array_equal(np.stack(lent.images), packed_words(source)[0])
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


FOREIGN = """
import ctypes, mmap, os, signal, sys
import numpy as np
from loopfeed.preprocess.shards.file_maps import map_file

path, kind = sys.argv[1:]
file = os.open(path, os.O_RDONLY)
mapped = map_file(file, 1 << 20)
if kind == "fault":
    other = mmap.mmap(file, 1 << 20, prot=mmap.PROT_READ)
    os.truncate(path, 0)
    other[5000]
os.kill(os.getpid(), signal.SIGBUS)
print("survived")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs the handler, which is Linux's")
@pytest.mark.parametrize("kind", ["fault", "signal"])
def test_other_faults_and_sent_signals_end_the_process_as_usual(tmp_path, kind):
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    arguments = [sys.executable, "-c", FOREIGN, str(tmp_path / "file"), kind]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (-signal.SIGBUS, "")
