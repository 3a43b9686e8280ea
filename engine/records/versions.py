"""The package versions that a run records."""

from importlib.metadata import PackageNotFoundError, version

NOT_INSTALLED = "not installed"
"""The version of a package that is not installed, such as Loopfeed when it runs from its source tree."""


def version_of(package: str) -> str:
    """Return the version of a package, or `NOT_INSTALLED` if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return NOT_INSTALLED
