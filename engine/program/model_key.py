"""Randomness inside a user-defined model: whether its `apply` wants keys, and the keys of a batch."""

import inspect
from typing import Any

from jaxtyping import Array, Key, UInt32

from loopfeed.engine.images.positions import Positions, Purpose, image_keys, key_of_purpose


def takes_key(model: Any) -> bool:
    """Return whether the model's `apply` has a parameter named `key`; called once, before tracing."""
    try:
        parameter = inspect.signature(model.apply).parameters.get("key")
    except (TypeError, ValueError):  # a built-in function has no signature
        return False
    return parameter is not None and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY


def model_keys(seed_words: UInt32[Array, "2"], at: Positions) -> Key[Array, "b"]:
    """Return one PRNG key per image for the model; it depends only on the seed and the image's position."""
    return key_of_purpose(image_keys(seed_words, at), Purpose.MODEL)
