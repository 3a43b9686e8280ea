"""Nested dictionaries of parameters by dotted path, such as `head.fc`."""

from typing import Any

from loopfeed.models.model import Params


def get_at(params: Params, path: str) -> Any:
    """Return the branch or leaf at a path."""
    found: Any = params
    for key in path.split("."):
        found = found[key]
    return found


def set_at(params: Params, path: str, value: Any) -> None:
    """Set the branch or leaf at a path, and create the branches above it that do not exist."""
    *above, last = path.split(".")
    for key in above:
        params = params.setdefault(key, {})
    params[last] = value


def replace_at(params: Params, path: str, value: Any) -> Params:
    """Return parameters with another branch or leaf at a path; the others are not copied."""
    key, _, rest = path.partition(".")
    return params | {key: replace_at(params[key], rest, value) if rest else value}
