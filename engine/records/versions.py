"""The versions that a run's records name."""

from importlib.metadata import PackageNotFoundError, version

NOT_INSTALLED = "not installed"
"""The version of a package that runs where it lies, as Feedloop's own source tree may."""


def version_of(package: str) -> str:
    """Gives the version of an installed package, `NOT_INSTALLED` where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return NOT_INSTALLED
