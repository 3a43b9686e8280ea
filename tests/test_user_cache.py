"""The folders in which the project keeps its own files."""

from pathlib import Path

import pytest

from models.user_cache import user_cache_folder


@pytest.mark.parametrize("named", [None, "", "relative/cache"])
def test_the_cache_is_in_the_home_folder(monkeypatch, named):
    monkeypatch.setenv("HOME", "/home/someone")
    if named is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", named)
    assert user_cache_folder() == Path("/home/someone/.cache/feedloop")


def test_the_cache_is_where_xdg_says(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch/cache")
    assert user_cache_folder() == Path("/scratch/cache/feedloop")
