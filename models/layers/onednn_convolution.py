"""The parts of a convolution by oneDNN's kernels, where these are faster than the forms of `convolution_forms.py`."""

import jax
import jax.numpy as jnp

from models.kernels.onednn.convolutions import Convolution, Part
from models.kernels.onednn.operations import call_operation
from models.layers.convolution_forms import Geometry, image_size, window_size

_DTYPES = (jnp.float32, jnp.bfloat16)


def forward(geometry: Geometry, x: jax.Array, kernel: jax.Array) -> jax.Array | None:
    """Return the convolution `[B,P,Q,K]`, or None if oneDNN has no faster kernel."""
    P, Q = geometry.output_size(image_size(x), window_size(kernel))
    y = jax.ShapeDtypeStruct((x.shape[0], P, Q, kernel.shape[3]), x.dtype)
    return _call(_operation(Part.FORWARD, geometry, x, kernel, y), (x, kernel), y)


def input_gradient(geometry: Geometry, x: jax.Array, kernel: jax.Array, gradient: jax.Array) -> jax.Array | None:
    """Return the gradient with respect to `x`, or None if oneDNN has no faster kernel."""
    return _call(_operation(Part.INPUT_GRADIENT, geometry, x, kernel, gradient), (gradient, kernel), x)


def filter_gradient(geometry: Geometry, x: jax.Array, kernel: jax.Array, gradient: jax.Array) -> jax.Array | None:
    """Return the gradient with respect to `kernel`, or None if oneDNN has no faster kernel."""
    return _call(_operation(Part.FILTER_GRADIENT, geometry, x, kernel, gradient), (x, gradient), kernel)


def _operation(
    part: Part, geometry: Geometry, x: jax.Array, kernel: jax.Array, y: jax.Array | jax.ShapeDtypeStruct
) -> Convolution:
    return Convolution(str(part), str(x.dtype), x.shape, kernel.shape, y.shape, *geometry)


def _call(
    operation: Convolution, operands: tuple[jax.Array, ...], like: jax.Array | jax.ShapeDtypeStruct
) -> jax.Array | None:
    if like.dtype not in _DTYPES:
        return None
    return call_operation(operation, [jax.ShapeDtypeStruct(like.shape, like.dtype)], *operands)[0]
