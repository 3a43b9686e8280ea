"""What the adapters need of other libraries: their import, and how a model is told its mode and its random keys."""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import jax

# Arguments by which a model's call is told that it is, or is not, in training.
_TRAINING = ("train", "training", "is_training")
_EVALUATION = ("deterministic", "use_running_average", "inference")


def load(module: str) -> Any:
    """Import a module of another library.

    Raises:
        ModuleNotFoundError: if the library is not installed.
    """
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"the adapter needs {package}, which is not installed: pip install {package}", name=error.name
        ) from None


def takes(call: Callable[..., Any], argument: str) -> bool:
    """Return whether a function has an argument of this name."""
    return argument in inspect.signature(call).parameters


def mode_arguments(call: Callable[..., Any], train: bool) -> dict[str, bool]:
    """Return the arguments that tell a model's call whether it is in training, by the names that the call declares."""
    training = {name: train for name in _TRAINING if takes(call, name)}
    return training | {name: not train for name in _EVALUATION if takes(call, name)}


def batch_key(key: jax.Array | None) -> jax.Array | None:
    """Return one PRNG key for a whole batch from the keys [B] of its images: that of the first; [] stays as it is."""
    return key if key is None or key.ndim == 0 else key[0]


def image_keys(key: jax.Array | None, batch: int) -> jax.Array | None:
    """Return one PRNG key for each of B images, [B]: the given ones, or those that one key is split into."""
    return key if key is None or key.ndim == 1 else jax.random.split(key, batch)
