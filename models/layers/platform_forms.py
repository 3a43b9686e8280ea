"""The form of an operation for the platform on which it runs: the one that is known, or a choice among all of them.

jax traces a program before it is told where the program will run, so an operation whose form depends on the platform is
traced in every form. A program that will run on one platform only is traced in a fifth less time if that is known.

XLA treats elementwise operations as free and fuses them into each of their readers, which then read the operands.
Storing a value once (`materialize`) is faster if the operands are larger than the value, or if the fusion turns a
vectorised loop into a scalar one. That is mostly so on a CPU, whose memory is slow; for an NVIDIA GPU XLA has a cost
model, and values are stored there only if it decides wrongly.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import jax
from jax import lax

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
"""The platforms for which operations can be traced alone."""

PLAIN = "plain"
"""In their place: the forms that no platform has of its own, which can be lowered for any."""

ONNX = "onnx"
"""As `PLAIN`, but with the operations that ONNX has, in the place of others that make them up."""

# jax keeps what it has traced for each value separately.
_platform = jax.make_user_context(None)


def tracing_for(platform: str | None) -> AbstractContextManager[None]:
    """Return a context in which operations are traced only in their form for one platform.

    What is traced in it must be lowered for this platform only.

    Args:
        platform: a name such as "cpu", "cuda" or "tpu", as `lax.platform_dependent` takes it; None traces all forms,
            and `PLAIN` or `ONNX` those that can be lowered for every platform.

    Raises:
        ValueError: if there is no platform of that name, such as "gpu".
    """
    if platform not in (None, PLAIN, ONNX, *PLATFORMS):
        raise ValueError(f"platform must be one of {', '.join(PLATFORMS)}, or None for all, got {platform!r}")
    context: AbstractContextManager[None] = _platform(platform)
    return context


def on_platform(
    *operands: Any, default: Callable[..., Any], onnx: Callable[..., Any] | None = None, **forms: Callable[..., Any]
) -> Any:
    """Return the result of the form of the platform, or of `default` if there is none for it.

    Args:
        operands: pytrees of arrays, given to the form.
        default: the form on all platforms that have none of their own.
        onnx: the form for `ONNX`, if that is another.
        forms: forms by the name of their platform; all return arrays of the same shapes and dtypes.
    """
    platform = _platform.value
    if platform is None and forms:
        return lax.platform_dependent(*operands, default=default, **forms)
    if platform == ONNX and onnx is not None:
        return onnx(*operands)
    return forms.get(platform, default)(*operands)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def with_derivative_of(_form: Callable[..., Any], kernel: Callable[..., Any], *operands: jax.Array) -> Any:
    """Return `kernel(*operands)`, whose derivative is that of `_form`, a function that computes the same.

    The parts of a layer's gradient need it only for second derivatives, in forward or reverse mode.
    """
    return kernel(*operands)


@with_derivative_of.defjvp
def _derivative(
    form: Callable[..., Any],
    kernel: Callable[..., Any],
    operands: tuple[jax.Array, ...],
    tangents: tuple[jax.Array, ...],
) -> tuple[Any, Any]:
    return with_derivative_of(form, kernel, *operands), jax.jvp(form, operands, tangents)[1]


def materialize(values: Any, *, on_cards: bool = False) -> Any:
    """Return a pytree of arrays unchanged. On a CPU, an optimization barrier makes XLA store the arrays in memory.

    Args:
        values: the values to store.
        on_cards: whether to store them on NVIDIA GPUs too.
    """
    form = {"cpu": lax.optimization_barrier} | ({"cuda": lax.optimization_barrier} if on_cards else {})
    return on_platform(values, default=lambda values: values, **form)
