"""What a user's functions are called with and return, checked or in a few words for messages. Imports jax only late."""

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Any

_MOST_KEYS = 5
_NOT_THE_USERS = (
    f"{Path(__file__).parents[1]}{os.sep}",
    f"{Path(os.__file__).parent}{os.sep}",
    *(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages")),
)


def check_takes(
    what: str,
    function: Any,
    form: str,
    *args: object,
    names: Iterable[str] = (),
    remedy: str = "give it these parameters",
) -> None:
    """Raise ValueError if the signature of a function says that it cannot be called with such arguments.

    What has no signature is accepted. So is a wrapper of any arguments, whatever it wraps.

    Args:
        what: what messages call the function.
        function: the function, which is not called.
        form: the arguments in messages, in parentheses.
        args: as many values as there are positional arguments.
        names: the arguments given by name.
        remedy: ends the message.
    """
    import jax

    while isinstance(function, jax.stages.Wrapped) and hasattr(function, "__wrapped__"):
        function = function.__wrapped__  # a function in jax.jit, which passes all arguments on
    try:
        # A decorator may pass other arguments to what it wraps, so its own parameters count.
        signature = inspect.signature(function, follow_wrapped=False)
    except Exception:  # noqa: BLE001 - C functions have no signature, and annotations are the user's code
        return
    try:
        signature.bind(*args, **dict.fromkeys(names))
    except TypeError as error:
        raise ValueError(f"{what} must take {form}, but takes {signature}: {remedy}") from error


@contextmanager
def traced(what: str) -> Iterator[None]:
    """Raise ValueError in the place of jax's error if the block, a user's function that is traced, needs values.

    Args:
        what: what messages call the function.
    """
    try:
        yield
    except Exception as error:
        if (refusal := untraceable(what, error)) is None:
            raise
        raise refusal from error


def untraceable(what: str, error: Exception) -> ValueError | None:
    """Return what is wrong with a function that failed while it was traced; None if it did not need values."""
    from jax import errors

    if isinstance(error, errors.TracerBoolConversionError | errors.NonConcreteBooleanIndexError):
        found, remedy = (
            "chooses by one",
            "use jax.numpy.where or jax.lax.cond instead of if, and, or, and masks",
        )
    elif isinstance(error, errors.TracerArrayConversionError):
        found, remedy = "passes them to NumPy", "use the function of the same name in jax.numpy, or one of jax.lax"
    elif isinstance(error, errors.ConcretizationTypeError | errors.TracerIntegerConversionError):
        found, remedy = "needs one as a Python number", "keep it an array, with jax.numpy or jax.lax"
    else:
        return None
    lines = extract_tb(error.__traceback__)
    own = [line for line in lines if not any(part in line.filename for part in _NOT_THE_USERS)][-1:]
    where = "".join(f" in line {line.lineno} of {Path(line.filename).name}, `{line.line}`" for line in own)
    return ValueError(f"{what} is traced, so that its arrays have no values, but it {found}{where}: {remedy}")


def describe_given(value: Any) -> str:
    """Return "float32 [4, 3]" for an array, "a tuple of 3", "a dict with the keys image, label", or the type's name."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype} {list(value.shape)}"
    if value is None:
        return "None"
    if isinstance(value, tuple | list):
        return f"a {'tuple' if isinstance(value, tuple) else 'list'} of {len(value)}"
    if isinstance(value, Mapping):
        keys = [str(key) for key in value][:_MOST_KEYS]
        return f"a dict with the keys {', '.join(keys)}{'…' * (len(value) > _MOST_KEYS)}" if keys else "an empty dict"
    return (
        f"a {type(value).__name__}, which gives its values once"
        if isinstance(value, Iterator)
        else type(value).__name__
    )
