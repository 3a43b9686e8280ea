"""Versions in records: of what is installed, and of a source tree that is not."""

from importlib.metadata import version

from loopfeed.engine.records.machine import NOT_INSTALLED, version_of


def test_an_installed_package_has_its_version_and_a_missing_one_is_marked():
    assert version_of("jax") == version("jax")
    assert version_of("no-such-package") == NOT_INSTALLED
