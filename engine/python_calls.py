"""The public functions and classes as Python calls them: messages name arguments, tracebacks begin with the user.

A command imports the functions themselves; `loopfeed.__getattr__` gets them from here, wrapped. Thus a message that
names an option of a command is reworded for whoever reads it in Python, in one place. Must not import jax.
"""

import functools
import inspect
import linecache
import os
import re
import sys
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType, FunctionType, TracebackType
from typing import Any, NamedTuple, Unpack, cast, get_args, get_origin, get_type_hints

from loopfeed.engine.config import SETTINGS
from loopfeed.engine.python_arguments import Checks, check_arguments, checks_of
from loopfeed.engine.settings import SettingError
from loopfeed.preprocess.suggestions import did_you_mean

TRACEBACK_VARIABLE = "LOOPFEED_TRACEBACK"
"""The environment variable that keeps tracebacks whole if it is "full"."""
_HIDDEN_NOTE = f"(the frames of loopfeed and jax are left out; {TRACEBACK_VARIABLE}=full in the environment shows them)"
_JAX_NOTE = "JAX_TRACEBACK_FILTERING"
_PACKAGES = ("loopfeed",)
_PREPARED = "_is_called_from_python"
_CONSTRUCTING = ("dataclasses", "copy")
_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_HIDDEN = (*_PACKAGES, "jax", "jaxlib")
_STANDARD = f"{Path(os.__file__).parent}{os.sep}"
_INSTALLED = (
    _STANDARD,
    *(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages")),
)
_UNKNOWN_ARGUMENT = re.compile(r"(?:(\S+)\(\) got an )?unexpected keyword argument '(\w+)'")
_NO_SETTINGS = "missing 1 required positional argument: 'config'"
# What Loopfeed raises as a rule; anything else from its own lines may be a fault, which needs the whole traceback.
_RULES = (ValueError, OSError, RuntimeError, ArithmeticError, KeyboardInterrupt)


def called_from_python[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """Return a function whose errors and notices are worded for a Python program, with the user's frames alone.

    What it returns is prepared for the user too. A call by Loopfeed itself is that of the function.
    """
    shown_signature = _shown_signature(function)
    # A dataclass checks its own fields.
    checks = checks_of(shown_signature) if _is_written(cast(FunctionType, function)) else Checks({}, ())

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True
        if _is_internal(sys._getframe(1)):
            return function(*args, **kwargs)
        for name in [name for name, value in kwargs.items() if value is _LEFT_OUT]:
            del kwargs[name]  # of a decorator that fills in what the signature shows
        if callable(notify := kwargs.get("notify")):
            kwargs["notify"] = lambda line: notify(in_python_words(line, function))
        try:
            check_arguments(checks, args, kwargs)
            found = function(*args, **kwargs)
        except BaseException as error:
            for_python(error, function)
            # Without an argument, because only then Python does not add this frame again.
            raise
        if isinstance(found, Generator):
            return cast(T, _each_of(found, function))
        if type(found).__module__.partition(".")[0] in _PACKAGES:
            _prepare_class(type(found))
        return found

    cast(Any, call).__signature__ = shown_signature
    return call


def public[T](found: T) -> T:
    """Return a public object as a Python program gets it: a function by `called_from_python`, a class prepared."""
    if inspect.isclass(found):
        _prepare_class(found)
    if not inspect.isfunction(found):
        return found
    call = called_from_python(found)
    call.__module__ = "loopfeed"  # pickling refers to it by its public name
    return cast(T, call)


def _prepare_class(owner: type) -> None:
    """Let the constructor, the methods and the properties of a class do what `called_from_python` describes."""
    if _PREPARED in vars(owner) or issubclass(owner, BaseException) or getattr(owner, "_is_protocol", False):
        return
    setattr(owner, _PREPARED, True)
    for name, found in list(vars(owner).items()):
        if name.startswith("_") and name not in ("__init__", "__new__"):
            continue
        function = getattr(found, "__func__", found)
        if isinstance(found, property) and found.fget is not None:
            setattr(owner, name, found.getter(called_from_python(found.fget)))
        elif inspect.isfunction(function) and (_is_written(function) or hasattr(owner, "__post_init__")):
            call = called_from_python(function)
            setattr(owner, name, type(found)(call) if isinstance(found, staticmethod | classmethod) else call)


def _shown_signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return a signature for people: with the names that a typed dictionary declares, and no addresses of functions."""
    signature = inspect.signature(function)
    shown = []
    for each in signature.parameters.values():
        if get_origin(each.annotation) is Unpack:
            declared = get_type_hints(get_args(each.annotation)[0])
            named = each.replace(kind=each.KEYWORD_ONLY, default=_LEFT_OUT)
            shown += [named.replace(name=name, annotation=kind) for name, kind in declared.items()]
        else:
            shown.append(each.replace(default=_LEFT_OUT) if inspect.isfunction(each.default) else each)
    return signature.replace(parameters=shown)


class _LeftOut:
    """A default that a signature shows as three dots."""

    def __repr__(self) -> str:
        return "..."


_LEFT_OUT = _LeftOut()


def _each_of[T](found: Generator[T], function: Callable[..., Any]) -> Iterator[T]:
    __tracebackhide__ = True
    try:
        yield from found
    except BaseException as error:
        for_python(error, function)
        raise


def _is_internal(caller: FrameType | None) -> bool:
    """Return whether Loopfeed itself calls, perhaps by a function of Python that constructs an object anew."""
    while caller is not None and caller.f_globals.get("__name__") in _CONSTRUCTING:
        caller = caller.f_back
    return caller is not None and str(caller.f_globals.get("__name__")).partition(".")[0] in _PACKAGES


def _is_written(function: FunctionType) -> bool:
    """Return whether a function stands in a file of Loopfeed; a dataclass writes others for its class."""
    return function.__code__.co_filename.startswith(_OURS)


def is_interactive() -> bool:
    """Return whether somebody types in this session: at Python's prompt, in IPython or in a notebook."""
    return hasattr(sys, "ps1")


# ---- Tracebacks


def for_python(error: BaseException, function: Callable[..., Any] | None = None) -> None:
    """Word an error for a Python program, and leave those frames out of its traceback that are not the user's.

    The traceback of what may be a fault of Loopfeed or jax stays whole, and an error that cannot be changed, as a
    frozen dataclass, what it is.
    """
    with suppress(AttributeError):
        _reword(error, function)
        _leave_frames_out(error)


def _leave_frames_out(error: BaseException) -> None:
    chain = [*_causes(error)]
    if os.environ.get(TRACEBACK_VARIABLE) == "full" or not _is_explained(error):
        return
    # As those have that come from another process: what they say is in their text.
    num_hidden, is_unraised = 0, any(each.__traceback__ is None for each in chain[1:])
    for each in chain:
        num_hidden += len([*_links(each.__traceback__)])
        each.__traceback__ = _user_traceback(each.__traceback__)
        num_hidden -= len([*_links(each.__traceback__)])
    is_of_user = is_unraised and error.__traceback__ is not None
    if not is_of_user and not any(each.__traceback__ for each in chain[1:]):
        # What the message is made of; Python would show it above the message. It remains as the context.
        error.__cause__, error.__suppress_context__ = None, True
    notes = [note for note in getattr(error, "__notes__", ()) if _JAX_NOTE not in note and note != _HIDDEN_NOTE]
    if num_hidden and error.__traceback__ is not None:
        notes.append(_HIDDEN_NOTE)
    if notes or hasattr(error, "__notes__"):
        error.__notes__ = notes


def user_lines(error: BaseException) -> list[str]:
    """Return the part of a traceback that is the user's code, as lines; none if Loopfeed called none of it."""
    if not any(_file(link).startswith(_OURS) for link in _links(error.__traceback__)):
        return []
    return "".join(traceback.format_tb(_user_traceback(error.__traceback__))).splitlines()


def _is_explained(error: BaseException) -> bool:
    """Return whether the user's own frames and the message say what is wrong."""
    links = [*_links(error.__traceback__)]
    if _user_traceback(error.__traceback__) is not None or not links:
        return True
    last = links[-1]
    if isinstance(error, OSError):
        # Of a file, and the library of Python that opened it says no more.
        last = next((link for link in reversed(links) if not _file(link).startswith(_STANDARD)), last)
    # Of the call are arguments that the function does not take, and what is no path.
    is_of_the_call = isinstance(error, TypeError) and (len(links) == 1 or "os.PathLike" in str(error))
    return is_of_the_call or (_file(last).startswith(_OURS) and (isinstance(error, _RULES) or _is_raised(last)))


def _is_raised(link: TracebackType) -> bool:
    """Return whether a statement `raise` raised the error, and not an operation that failed."""
    return linecache.getline(_file(link), link.tb_lineno).lstrip().startswith("raise ")


def _user_traceback(found: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the first frame of the user that Loopfeed called, without Loopfeed's and jax's frames."""
    links, kept = [*_links(found)], list[TracebackType]()
    first = next((number for number, link in enumerate(links) if _file(link).startswith(_OURS)), 0)
    for link in links[first:]:
        name = _file(link)
        # What a dataclass writes for its class has no file, but the module of the class.
        is_ours = name.startswith(_OURS) or _module(link) in _HIDDEN
        if not is_ours and (kept or not any(part in name for part in _INSTALLED)):
            kept.append(link)
    chain = None
    for link in reversed(kept):
        chain = TracebackType(chain, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return chain


def _links(found: TracebackType | None) -> Iterator[TracebackType]:
    while found is not None:
        yield found
        found = found.tb_next


def _file(link: TracebackType) -> str:
    return link.tb_frame.f_code.co_filename


def _module(link: TracebackType) -> str:
    """Return the first part of the name of the module in whose scope a frame runs."""
    return str(link.tb_frame.f_globals.get("__name__", "")).partition(".")[0]


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the errors that Python would show with it."""
    seen = set[int]()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


# ---- Words


class _Spelling(NamedTuple):
    """An option as Python spells it."""

    name: str
    value: str | None  # that of a switch, None of an option that takes one


_OPTION = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*)(?: (?=[A-Z]+\b|\d|off\b|[\w.~-]*/|s3:))?")
_AGAIN = re.compile(r"run-train --recipe (\S+)/config\.json --run-dir \1 --overwrite\b")
_RESUME_OF = re.compile(r"run-train --run-dir (\S+) --resume\b")
_RESUME = re.compile(r"run-train --resume\b")
_PACK = "`preprocess-imagenet SOURCE DEST`"
# What stays as it is: texts in backquotes, and the options of commands that have no setting in Python.
_KEPT = re.compile(
    r"`[^`]*`|\b(?:control-run|run-eval|verify-run|inspect-shards|predict-images|export-\w+|report-run|pip)\b[^:;,.()]*"
)


# The way of the command line, of a remedy that names Python's before it.
_ON_THE_COMMAND_LINE = re.compile(r" in Python; on the command line `[^`]*`")


def in_python_words(text: str, function: Callable[..., Any] | None = None) -> str:
    """Return a text in which options of commands are settings, or arguments of a function, as Python spells them."""
    text = _ON_THE_COMMAND_LINE.sub("", text).replace(_PACK, "loopfeed.pack(SOURCE, DEST)")
    if "--" not in text:
        return text
    spellings, parts, at = _spellings(function), list[str](), 0
    for match in _KEPT.finditer(text):
        parts += [_respelled(text[at : match.start()], spellings), match[0]]
        at = match.end()
    return "".join([*parts, _respelled(text[at:], spellings)])


def _respelled(text: str, spellings: Mapping[str, _Spelling]) -> str:
    def word(match: re.Match[str]) -> str:
        found = spellings.get(match[1])
        if found is None:
            return match[0]
        if found.value is not None:
            return f"{found.name}={found.value}" + " " * match[0].endswith(" ")
        return found.name + "=" * match[0].endswith(" ")

    text = _AGAIN.sub(r"train(replace(run_settings('\1'), overwrite=True))", text)
    text = _RESUME_OF.sub(r"train(replace(run_settings('\1'), resume=True))", text)
    return _OPTION.sub(word, _RESUME.sub("train(…, resume=True)", text))


def _spellings(function: Callable[..., Any] | None) -> dict[str, _Spelling]:
    """Return how Python spells each option of `run-train` or, of a function of `loopfeed.preprocess`, its arguments."""
    arguments = {} if function is None else _shown_signature(function).parameters
    found = {
        name.replace("_", "-"): _Spelling(name, "True" if each.default is False else None)
        for name, each in arguments.items()
    }
    if function is not None and function.__module__.startswith("loopfeed.preprocess"):
        return found
    for setting in SETTINGS.values():
        for option in setting.options:
            for number, spelling in enumerate(option.split("/")):
                value = str(number == 0) if setting.kind is bool else None
                found[spelling.lstrip("-")] = _Spelling(setting.name, value)
    if function is not None and function.__module__.startswith("loopfeed.engine.evaluation"):
        found["split"] = found["eval-split"]  # as run-eval names it
    return found


def _reword(error: BaseException, function: Callable[..., Any] | None) -> None:
    """Respell the options in the message of an error that Loopfeed raised, and in its notes."""
    links = [*_links(error.__traceback__)]
    is_ours = bool(links) and _file(links[-1]).startswith(_OURS)
    if isinstance(error, SettingError):
        # A template, in which the settings have Python's names already.
        error.args = (error.args[0], in_python_words(str(error.args[1]), function))
    elif is_ours and not isinstance(error, OSError):
        error.args = tuple(in_python_words(each, function) if isinstance(each, str) else each for each in error.args)
    if function is not None and isinstance(error, TypeError) and str(error).endswith(_NO_SETTINGS):
        error.args = (f"{error}: give the settings, as loopfeed.{function.__name__}(TrainConfig(steps=…))",)
    unknown = _UNKNOWN_ARGUMENT.fullmatch(str(error)) if is_ours else None
    if function is not None and unknown is not None and unknown[1] in (None, function.__qualname__):
        error.args = (f"{error}{did_you_mean(unknown[2], _shown_signature(function).parameters)}",)
    if notes := getattr(error, "__notes__", None):
        notes[:] = [in_python_words(note, function) for note in notes]
