"""The derivative of a kernel that is called from a program, which jax cannot derive: that of a form in jax."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax


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
