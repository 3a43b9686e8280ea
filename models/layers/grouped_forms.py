"""Forms of grouped 2-D convolution and of its two gradients that XLA:CPU runs fast inside a loop.

XLA:CPU runs a convolution with groups as a naive loop nest. A *depthwise* convolution, one input channel a group, is
too narrow for matrix products: here it is elementwise multiplications and additions, one for each kernel element. With
more channels a group, neighbouring groups are joined in a block with a block-diagonal kernel, and each block is an
ordinary convolution. Measured inside `while_loop` on two AVX-512 cores in float32, in ms, depthwise 7×7, B×size C:

                              8×56 96   8×14 384   8×7 768
    forward: lax                 542        65        48
             one sum              39       4.0       2.1
             a sum a row          28       2.7       0.8
    filter:  a sum a tap         539                  95
             a product of ones   741
             a pair sum a row    112                  36
             " batch first       101

Letters as in `convolution_forms.py`; C_group = C / G with G groups.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from loopfeed.models.layers.convolution_forms import (
    Geometry,
    Images,
    Kernel,
    Outputs,
    Pair,
    input_gradient_correlation,
    pad,
    rows,
    taps,
    window_size,
)

BLOCK_CHANNELS = 32


def num_groups(x: Images, kernel: Kernel) -> int:
    """Return the number of groups into which a kernel divides the channels of `x`."""
    return x.shape[3] // kernel.shape[2]


# Depthwise: a kernel [kh,kw,1,K], K = m·C; input channel c has the output channels c·m to c·m + m - 1


def depthwise_forward(x: Images, kernel: Kernel, geometry: Geometry) -> Outputs:
    """Add the products of all kernel elements with the pixels that they meet; each kernel row's sum is stored."""
    window, K = window_size(kernel), kernel.shape[3]
    repeated = jnp.repeat(x, K // x.shape[3], axis=3)
    met = taps(repeated, window, geometry)
    total = jnp.zeros_like(met[0])
    for row in range(window[0]):
        for column in range(window[1]):
            total += met[row * window[1] + column] * kernel[row, column, 0]
        total = lax.optimization_barrier(total)
    return total


def depthwise_input_gradient(gradient: Outputs, kernel: Kernel, geometry: Geometry, input_size: Pair, C: int) -> Images:
    """Convolve the gradient with the rotated kernel; with a stride, once for each of its s·s phases."""
    if geometry.strides == (1, 1):

        def forward(x: jax.Array, turned: jax.Array, geometry: Geometry) -> jax.Array:
            return depthwise_forward(x, turned.swapaxes(2, 3), geometry)

        wide = input_gradient_correlation(forward, gradient, kernel, geometry, input_size)
    else:
        wide = _phases(gradient, kernel, geometry, input_size)
    return wide.reshape(*wide.shape[:3], C, wide.shape[3] // C).sum(-1)


def _phases(
    gradient: Outputs, kernel: Kernel, geometry: Geometry, input_size: Pair
) -> Float[Array, "B {input_size[0]} {input_size[1]} K"]:
    """Compute each phase of the input gradient with every s-th kernel element, and interleave the phases."""
    (kh, kw, _, K), (B, P, Q, _), (sh, sw) = kernel.shape, gradient.shape, geometry.strides
    (top, _), (left, _) = geometry.padding
    th, tw = -(-kh // sh), -(-kw // sw)
    filled = jnp.pad(kernel, ((0, th * sh - kh), (0, tw * sw - kw), (0, 0), (0, 0))).reshape(th, sh, tw, sw, 1, K)
    height, width = max(-(-(input_size[0] + top) // sh), P), max(-(-(input_size[1] + left) // sw), Q)
    around = Geometry((1, 1), ((th - 1, height - P), (tw - 1, width - Q)))
    phases = [
        depthwise_forward(gradient, filled[::-1, down, ::-1, across], around)
        for down in range(sh)
        for across in range(sw)
    ]
    apart = jnp.stack(phases).reshape(sh, sw, B, height, width, K).transpose(2, 3, 0, 4, 1, 5)
    crop = ((-top, input_size[0] + top - height * sh), (-left, input_size[1] + left - width * sw))
    return pad(apart.reshape(B, height * sh, width * sw, K), crop)


def depthwise_filter_gradient(x: Images, gradient: Outputs, geometry: Geometry, window: Pair) -> Kernel:
    """Sum the products of the gradient and the pixels met, a kernel row at a time, over images, then over positions."""
    K, (_, kw) = gradient.shape[3], window
    met = taps(jnp.repeat(x, K // x.shape[3], axis=3), window, geometry)
    zeros = (jnp.zeros((), x.dtype),) * kw
    sums = []
    for start in range(0, len(met), kw):
        products = tuple(tap * gradient for tap in met[start : start + kw])
        by_position = lax.reduce(products, zeros, _add_each, (0,))
        # Stored first: the sum over positions is a product with ones, which is faster than a reduction of columns.
        sums += [_column_sums(rows(each)) for each in lax.optimization_barrier(tuple(by_position))]
    return jnp.stack(sums).reshape(*window, 1, K)


# A function of the module: jax keeps each function that it reduces with, and what it traced for it.
def _add_each(sums: tuple[jax.Array, ...], more: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(one + other for one, other in zip(sums, more, strict=True))


def _column_sums(matrix: Float[Array, "N K"]) -> Float[Array, "K"]:
    return (jnp.ones((1, matrix.shape[0]), matrix.dtype) @ matrix)[0]


# Blocks of groups, for more than one channel a group


def groups_per_block(groups: int, channels: int) -> int:
    """Return how many groups of `channels` input channels are joined in a block: as many as have BLOCK_CHANNELS."""
    return max(
        count
        for count in range(1, groups + 1)
        if groups % count == 0 and count * channels <= max(channels, BLOCK_CHANNELS)
    )


def split_channels(x: Images, blocks: int) -> Float[Array, "{blocks} B H W C//{blocks}"]:
    """Return each block of the channels."""
    return jnp.moveaxis(x.reshape(*x.shape[:3], blocks, x.shape[3] // blocks), 3, 0)


def join_channels(x: Float[Array, "blocks B H W C_block"]) -> Float[Array, "B H W blocks*C_block"]:
    """Undo `split_channels`."""
    return jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], x.shape[0] * x.shape[4])


def block_kernels(
    kernel: Kernel, groups: int, per_block: int
) -> Float[Array, "{groups}//{per_block} kh kw {per_block}*C_group K*{per_block}//{groups}"]:
    """Return the block-diagonal kernel of each block."""
    kh, kw, channels, K = kernel.shape
    blocks = groups // per_block
    apart = kernel.reshape(kh, kw, channels, blocks, per_block, K // groups)
    diagonal = jnp.eye(per_block, dtype=kernel.dtype)
    wide = jnp.where(
        diagonal[:, None, :, None] > 0, apart.transpose(3, 0, 1, 2, 4, 5)[:, :, :, None], jnp.zeros((), kernel.dtype)
    )
    return wide.reshape(blocks, kh, kw, per_block * channels, K // blocks)


def kernel_of_blocks(
    blocks: Float[Array, "blocks kh kw C_block K_block"], per_block: int
) -> Float[Array, "kh kw C_block//{per_block} blocks*K_block"]:
    """Undo `block_kernels`."""
    number, kh, kw, C, K = blocks.shape
    apart = blocks.reshape(number, kh, kw, per_block, C // per_block, per_block, K // per_block)
    diagonal = jnp.diagonal(apart, axis1=3, axis2=5)  # [blocks, kh, kw, C/G, K/G, per_block]
    return diagonal.transpose(1, 2, 3, 0, 5, 4).reshape(kh, kw, C // per_block, number * K)
