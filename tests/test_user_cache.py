"""The folder in which the project keeps its own files, or none."""

import os
from pathlib import Path

import pytest

from loopfeed.engine.compilation.ahead_of_time import caching_compilations
from loopfeed.engine.data.dataset import choose_data
from loopfeed.engine.records.stored.working_copy import working_copies
from loopfeed.models.kernels.onednn.team_library import load_team
from loopfeed.models.trusted_folder import user_cache_folder


@pytest.mark.parametrize("named", [None, "", "relative/cache"])
def test_the_cache_is_in_the_home_folder(monkeypatch, tmp_path, named):
    monkeypatch.setenv("HOME", str(tmp_path))
    if named is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", named)
    assert user_cache_folder() == tmp_path / ".cache/loopfeed"


def without_home(monkeypatch):
    """Have neither $HOME nor an entry for the user ID."""

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)


def with_unwritable_home(monkeypatch):
    """Have a home folder in which nothing can be created, as the user nobody has it."""
    monkeypatch.setenv("HOME", "/nonexistent")
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != Path("/") and access(path, mode))


@pytest.fixture(params=[without_home, with_unwritable_home])
def no_cache(request, monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("LOOPFEED_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    request.param(monkeypatch)
    return tmp_path


def test_without_a_folder_what_needs_one_says_which_variable_to_set(no_cache):
    assert user_cache_folder() is None
    assert load_team() is None
    assert choose_data("given").data == "given"
    with pytest.raises(ValueError, match=r"the demo set is used, .*: set XDG_CACHE_HOME"):
        choose_data(None)
    with pytest.raises(ValueError, match=r"the working copy of a run in a store .*: set XDG_CACHE_HOME"):
        working_copies()
    said: list[str] = []
    with caching_compilations(None, said.append):
        pass
    assert len(said) == 1
    assert said[0].startswith("warning: this user has no cache folder")
    assert list(no_cache.iterdir()) == []


def test_a_folder_that_cannot_be_written_can_still_be_read(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert user_cache_folder() is None
    (tmp_path / "loopfeed").mkdir()
    assert user_cache_folder() == tmp_path / "loopfeed"
