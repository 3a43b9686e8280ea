"""The user's own parts from the command line, such as `--model package.module:function`.

The only place that loads code by a name. The name comes from the command line of this very process, never from a file.
"""

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from loopfeed.engine.named_parts import NAME_FORM, OWN_PARTS, NamedPart, is_part_name
from loopfeed.preprocess.suggestions import did_you_mean

if TYPE_CHECKING:
    from loopfeed.engine.parts import UserParts

type Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

OWN_GROUP = "Your own parts"
"""The heading of these options in the help."""

# The parts that may be functions, and those that are never classes.
_FUNCTIONS = ("optimizer", "schedule", "loss", "augment", "batches", "indices")
_NEVER_CLASSES = ("model", "batches", "metrics", "evaluation")
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def user_part_options(names: Collection[str]) -> Decorator:
    """Return a decorator that adds the options for the user's own parts to a command."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in reversed(tuple(names)):
            function = click.option(f"--{name}", name, metavar="MODULE:NAME", help=OWN_PARTS[name].help)(function)
        return function

    return decorate


def take_part_names(options: dict[str, Any], others: Mapping[str, Any]) -> dict[str, str]:
    """Remove the names of own parts from the options of a command, and return them.

    Args:
        options: the parsed options, changed in place.
        others: for each option that also takes other values, such as a model of the registry, its default, which
            replaces the name of an own part. Values without a colon are left alone.
    """
    taken = {}
    for name in OWN_PARTS:
        text = options.get(name)
        if text is None or (name in others and ":" not in text):
            continue
        taken[name] = text
        options[name] = others.get(name)
    return taken


def load_user_parts(names: Mapping[str, str]) -> "UserParts":
    """Load the named parts, with the working directory first on `sys.path` as for `python -m`.

    Raises:
        ValueError: a name has another form, its module or the name in it does not exist, or loading it raised an
            exception, which is the cause of the error.
    """
    for option, name in names.items():
        if not is_part_name(name):
            raise ValueError(
                f"--{option} must be {NAME_FORM}, got {name!r}: give the module's name as in an import statement, a "
                "colon, and the name in the module"
            )
    here = str(Path.cwd())
    if names and not sys.flags.safe_path and sys.path[:1] not in ([""], [here]):
        sys.path.insert(0, here)
    parts, named = {}, {}
    for option, name in names.items():
        found = _find(option, name)
        named[option] = NamedPart(name, _source_digest(found, name))
        parts[option] = _make(option, name, found)

    from loopfeed.engine.parts import UserParts

    return UserParts(**parts, named=named)


def _find(option: str, name: str) -> Any:
    """Import the module of a part, and return what has the part's name in it."""
    module_name, _, path = name.partition(":")
    _check_is_not_hidden(option, name)
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"--{option} {name}: there is no module {error.name} (sys.path[0] is {sys.path[0]!r}): check the "
                "name, or run the command in the folder that contains the module"
            ) from error
        raise _raised(option, name, f"importing {module_name}", error) from error
    place = module_name
    for each in path.split("."):
        if not hasattr(found, each):
            raise ValueError(
                f"--{option} {name}: {place} has no attribute {each}{did_you_mean(each, dir(found)) or ': check it'}"
            )
        found, place = getattr(found, each), f"{place}.{each}"
    return found


def _check_is_not_hidden(option: str, name: str) -> None:
    """Raise ValueError if another module is loaded already instead of that in the working directory."""
    package = name.partition(":")[0].partition(".")[0]
    local = [each for each in (Path(package, "__init__.py"), Path(f"{package}.py")) if each.is_file()]
    if sys.flags.safe_path or package not in sys.modules or not local:
        return
    origin = getattr(sys.modules[package], "__file__", None)
    if origin is None or not Path(origin).exists() or not Path(origin).samefile(local[0]):
        raise ValueError(
            f"--{option} {name}: another module called {package} is loaded already, {origin or 'a built-in one'}, so "
            f"{local[0].absolute()} cannot be: rename that file or folder"
        )


def _make(option: str, name: str, found: Any) -> Any:
    """Return a part: the result of what was found if that is called without arguments, else itself."""
    if not callable(found):
        return found
    parameters = _parameters_of(found)
    needed = _needed(parameters or ())
    if inspect.isclass(found) and option in _NEVER_CLASSES and (parameters is None or needed):
        wanted = f" ({', '.join(needed)})" if needed else ""
        raise ValueError(
            f"--{option} {name}: the class {found.__name__} cannot be built without arguments{wanted}: name a function "
            f"without parameters that builds and returns {OWN_PARTS[option].label}"
        )
    if not _is_called(option, found, parameters):
        return found
    try:
        part = found()
    except (Exception, SystemExit) as error:
        raise _raised(option, name, "calling it without arguments", error) from error
    if part is None:
        raise ValueError(f"--{option} {name}: it must return {OWN_PARTS[option].label}, but returned None")
    return part


def _parameters_of(found: Any) -> tuple[inspect.Parameter, ...] | None:
    """Return the parameters of a function or class, None if Python does not know them."""
    try:
        return tuple(inspect.signature(found).parameters.values())
    except (TypeError, ValueError):
        return None


def _is_called(option: str, found: Any, parameters: tuple[inspect.Parameter, ...] | None) -> bool:
    """Return whether the part is what `found` returns; if not, it is `found` itself."""
    if parameters is None:
        return False
    if inspect.isclass(found):
        return not _needed(parameters)
    if option in _FUNCTIONS:
        # A function with parameters, though all may have defaults, is the part itself, as in Python.
        return not parameters
    return not any(each.default is each.empty and each.kind is not each.VAR_KEYWORD for each in parameters)


def _needed(parameters: tuple[inspect.Parameter, ...]) -> list[str]:
    """Return the names of the parameters that a call must give."""
    return [each.name for each in parameters if each.default is each.empty and each.kind not in _VARIADIC]


def _raised(option: str, name: str, action: str, error: BaseException) -> ValueError:
    reason = " ".join(str(error).split())
    return ValueError(
        f"--{option} {name}: {action} raised {type(error).__name__}{f': {reason}' if reason else ''} "
        "(--traceback shows where)"
    )


def _source_digest(found: Any, name: str) -> str | None:
    """Return the SHA-256 of the source of a function or class; for other objects, that of their module."""
    for each in (found, sys.modules[name.partition(":")[0]]):
        try:
            return hashlib.sha256(inspect.getsource(each).encode()).hexdigest()
        except (OSError, TypeError):
            continue
    return None
