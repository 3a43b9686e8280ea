"""Code is loaded from a folder only if nobody but the user and root can have put it there."""

import ctypes
import os
import platform
import shutil
import socket
from pathlib import Path

import jax.numpy as jnp
import pytest

from loopfeed.engine.compilation.ahead_of_time import caching_compilations, compile_traced, trace_ahead
from loopfeed.models import trusted_folder
from loopfeed.models.kernels.onednn import team_library
from loopfeed.models.trusted_folder import folder_fault, make_private_folder

OTHER = 65534  # nobody
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")


def compiled_from_cache(folder, heard=None):
    """Compile a program with a cache; return whether it was taken from there."""

    def function(x):  # jax itself remembers what it compiled for one function object
        return jnp.cosh(x) @ x

    with caching_compilations(str(folder), (heard if heard is not None else []).append):
        return compile_traced(trace_ahead(function, jnp.ones((11, 11)), platform="cpu")).from_cache


@pytest.fixture
def cache(tmp_path):
    """A cache with a program in it."""
    folder = tmp_path / "above" / "cache"
    heard: list[str] = []
    assert not compiled_from_cache(folder, heard)
    assert compiled_from_cache(folder, heard)
    assert heard == []
    return folder


@AS_ROOT
@pytest.mark.parametrize(
    ("user_map", "is_trusted"),
    [
        ("      1000       1000          1\n", True),  # Apptainer, bubblewrap
        ("         0       1000          1\n         1     100000      65536\n", True),  # Podman, Docker without root
        ("         0          0 4294967295\n", False),
        ("", False),
        (None, False),
    ],
)
def test_where_a_user_namespace_hides_root_its_folders_above_are_trusted(tmp_path, monkeypatch, user_map, is_trusted):
    monkeypatch.setattr(trusted_folder, "_USER_MAP", tmp_path / "map")
    if user_map is not None:
        (tmp_path / "map").write_text(user_map)
    above, cache = tmp_path / "above", tmp_path / "above/cache"
    cache.mkdir(parents=True)
    cache.chmod(0o700)
    os.chown(above, OTHER, OTHER)
    for mode, is_private in ((0o755, True), (0o1777, True), (0o775, False), (0o777, False)):
        above.chmod(mode)
        fault = folder_fault(cache)
        assert (fault is None) == (is_trusted and is_private), (mode, fault)
    assert is_trusted or fault == f"{above} belongs to user {OTHER}: give a folder of your own"
    above.chmod(0o755)
    # Who else the owner of the cache may be is not known.
    os.chown(cache, OTHER, OTHER)
    assert folder_fault(cache) in [
        f"{each} belongs to user {OTHER}: give a folder of your own" for each in (cache, above)
    ]


def test_folders_that_are_made_are_private(tmp_path):
    before = os.umask(0)
    try:
        make_private_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [(tmp_path / each).stat().st_mode & 0o777 for each in ("a", "a/b")] == [0o700, 0o700]
    assert folder_fault(tmp_path / "a" / "b" / "to" / "come") is None


@pytest.mark.parametrize(
    ("which", "mode", "is_refused"),
    [
        ("cache", 0o777, True),
        ("cache", 0o1777, True),
        ("cache", 0o702, True),
        ("cache", 0o755, False),
        ("above", 0o777, True),
        ("above", 0o1777, False),
    ],
)
def test_a_cache_to_which_others_can_write_is_one_warning_and_no_cache(cache, which, mode, is_refused):
    folder = cache if which == "cache" else cache.parent
    folder.chmod(mode)
    heard: list[str] = []
    assert compiled_from_cache(cache, heard) is not is_refused
    assert len(heard) == is_refused
    if is_refused:
        start = (
            f"warning: the compilation cache {cache} is not used, because the programs in it would be run, but other"
        )
        assert heard[0].startswith(f"{start} users can write to {folder}: chmod go-w {folder}, or give another folder")
        folder.chmod(mode & ~0o022)  # what it says to do
        assert compiled_from_cache(cache, heard)


@AS_ROOT
@pytest.mark.parametrize("which", ["cache", "above", "file"])
def test_what_belongs_to_another_user_is_not_loaded(cache, which):
    path = {"cache": cache, "above": cache.parent, "file": next(cache.glob("*-cache"))}[which]
    os.chown(path, OTHER, OTHER)
    heard: list[str] = []
    assert not compiled_from_cache(cache, heard)
    assert len(heard) == 1
    assert f"but {path} belongs to user {OTHER}: " in heard[0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["a pipe", "a socket", "a device", "a link", "endless", "for others"])
def test_what_is_not_a_file_of_the_user_neither_hangs_nor_fills_the_memory(cache, kind, tmp_path):
    path = next(cache.glob("*-cache"))
    path.unlink()
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        here = os.open(cache, os.O_RDONLY)  # a socket's path may not be long
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)
    elif kind == "a device":
        if os.geteuid():
            pytest.skip("only root can make a device")
        try:
            os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))
        except PermissionError:
            pytest.skip("no device can be made here")
    elif kind == "a link":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40 if kind == "endless" else 5)
        path.chmod(0o666)
        cache.chmod(0o700 if kind == "endless" else 0o711)
    heard: list[str] = []
    assert not compiled_from_cache(cache, heard)
    (said,) = heard
    expected = {"endless": "is larger than", "for others": f"other users can write to {path}"}.get(
        kind, f"is {kind}, not"
    )
    assert expected in said
    # What it says to do.
    cache.chmod(0o700) if kind == "for others" else path.unlink()
    again: list[str] = []
    compiled_from_cache(cache, again)
    assert [each for each in again if "is not used" in each] == []


@pytest.fixture
def library(tmp_path, monkeypatch):
    """The path of the library of the kernels in a cache folder of the test, built there."""
    if shutil.which("cc") is None or platform.machine() != "x86_64":
        pytest.skip("there is no C compiler, or another processor")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert team_library.load_team() is not None
    (path,) = (tmp_path / "loopfeed/kernels").iterdir()
    return path


def loaded_paths(monkeypatch):
    """Note the path of every library that is loaded from now on."""
    paths: list[str] = []
    load = ctypes.CDLL

    def noted(path):
        paths.append(path)
        return load(path)

    monkeypatch.setattr(ctypes, "CDLL", noted)
    return paths


def test_a_library_that_others_could_have_planted_is_not_loaded(library, monkeypatch):
    content = b"not a library at all"
    library.unlink()
    planted = library.with_name(f"{team_library._stem()}-{team_library._digest(content)}.so")
    planted.write_bytes(content)
    library.parent.chmod(0o1777)
    paths = loaded_paths(monkeypatch)
    assert team_library.load_team() is not None
    assert len(paths) == 1
    assert not Path(paths[0]).is_relative_to(library.parent)
    assert planted.read_bytes() == content
    heard: list[str] = []
    with caching_compilations("off", heard.append):
        pass
    (said,) = heard
    assert f"other users can write to {library.parent}" in said


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), None], ids=["fifo", "zero", "1T"]
)
def test_a_pipe_or_an_endless_file_in_the_place_of_the_library_is_replaced(library, make):
    content = library.read_bytes()
    library.unlink()
    if make is None:
        with library.open("wb") as file:
            file.truncate(1 << 40)
    else:
        make(library)
    assert team_library.load_team() is not None
    assert library.read_bytes() == content
