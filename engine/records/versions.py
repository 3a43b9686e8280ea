"""The package versions that a run records."""

from importlib.metadata import PackageNotFoundError, version

RECORDED_NAME = "feedloop"
"""The name under which records have Loopfeed's version: that of the package in the first runs."""

NOT_INSTALLED = "not installed"
"""The version of a package that is not installed, such as Loopfeed when it runs from its source tree."""


def version_of(package: str) -> str:
    """Return the version of a package, or `NOT_INSTALLED` if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return NOT_INSTALLED


def versions_of(*others: str) -> dict[str, str]:
    """Return the versions of Loopfeed and of other packages, as records have them."""
    return {RECORDED_NAME: version_of("loopfeed")} | {name: version_of(name) for name in others}
