"""Checks that an optional package is installed, before anything slow happens."""

from importlib.util import find_spec


def has_package(package: str) -> bool:
    """Return whether a package is installed, without importing it."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def install_hint(package: str, extra: str) -> str:
    """Return what is missing and how to install it."""
    return f"the package {package}, which is not installed: pip install 'loopfeed[{extra}]'"


def check_package(package: str, user: str, extra: str) -> None:
    """Raise ModuleNotFoundError if a package that `user` needs is not installed; `extra` of loopfeed installs it."""
    if not has_package(package):
        raise ModuleNotFoundError(f"{user} needs {install_hint(package, extra)}", name=package)
