"""The parts of a convolution by oneDNN's kernels, where these are faster than the forms of `convolution_forms.py`."""

import math

import jax
import jax.numpy as jnp

from loopfeed.models.kernels.onednn.convolutions import Convolution, Part, padding_of_product
from loopfeed.models.kernels.onednn.library import Isa, load_library
from loopfeed.models.kernels.onednn.operations import call_operation, has_fast_kernel
from loopfeed.models.layers.convolution_forms import Geometry, image_size, pad, window_size
from loopfeed.models.layers.grouped_forms import (
    block_kernels,
    groups_per_block,
    join_channels,
    kernel_of_blocks,
    num_groups,
    split_channels,
)

# The choice, measured inside `while_loop` on two cores of an AMD EPYC with AVX-512 and its bfloat16, beside other work,
# with the two interleaved: the speed of oneDNN's kernel divided by that of the form in use without it, forward, by
# input, by filter. N = B·P·Q is the number of output positions.
#
#   B×size C→K, window       N       float32               bfloat16
#   128×32   16→16   3×3   131072    0.97  1.53  3.12      3.71  2.41  6.28
#   128×16   32→32   3×3    32768    1.57  1.53  1.79      2.68  2.66  2.43
#     8×56   64→64   3×3    25088    0.86  1.16  2.24      1.57  2.13  2.10
#    16×16   64→64   3×3     4096    1.08  0.96  2.39      2.33  2.36  3.28
#     8×14  256→256  3×3     1568    1.96  1.74  1.71      2.56  2.58  2.29
#    16×8   128→128  3×3     1024    1.57  1.65  1.84      3.31  2.39  2.56
#     8×7   512→512  3×3      392    1.33  0.90  0.70      2.07  1.44  1.57
#    16×4   256→256  3×3      256    1.18  0.96  0.85      1.48  1.75  1.46
#    16×2   512→512  3×3       64    0.78  0.44  0.22      0.86  0.77  0.37
#   stride 2
#   128×32   16→32   3×3    32768    1.67  1.03  2.97      3.91  1.56  2.81
#     8×56  128→128  3×3     6272    1.13  0.82  1.22      1.95  2.71  3.00
#    16×8   256→256  3×3      256    1.62  0.85  1.02      2.21  1.60  1.39
#    16×4   512→512  3×3       64    0.65  0.37  0.31      1.08  0.98  0.31
#   128×32   16→32   1×1    32768    0.92  0.17  1.50      1.67  0.57  1.16
#    16×16   64→128  1×1     1024    0.88  0.84  1.33      1.11  0.88  0.98
#    16×16  256→512  1×1     1024    0.88  0.87  1.15      1.61  1.40  1.56
#   1×1, stride 1
#     8×56  256→128          25088   0.97  1.15  1.77      1.73  2.08  2.39
#    16×16  256→64            4096   1.01  0.96  2.02      1.54  2.00  2.69
#     8×14 1024→256           1568   1.21  0.96  1.71      2.11  2.02  1.65
#    16×8   512→128           1024   1.12  0.87  1.56      1.84  1.83  1.46
#     8×7  2048→512            392   0.92  0.84  1.22      1.40  1.68  1.76
#    16×4   256→1024           256   1.07  0.96  0.81      0.91  1.17  1.23
#    16×2  2048→512             64   0.83  0.65  0.59      1.02  1.00  0.61
#
# A depthwise kernel 7×7, CPU time of XLA's forms / of oneDNN's kernels in ms, other work beside:
#
#   B×size C        float32                                   bfloat16
#     8×56  96      20.7 /  3.1   9.3 /  4.5   57.5 / 48.9    11.0 / 2.9   10.8 / 4.0   46.3 / 17.0
#     8×28 192      ×2.8          ×1.4         ×3.2           ×2.3         ×3.7         ×8.9
#     8×14 384      ×2.5          ×1.5         ×2.3           ×2.7         ×1.6         ×2.3
#     8×7  768      ×6.7          ×1.4         ×2.8           ×2.5         ×1.8         ×1.7
#    16×4  384      ×3.3          ×2.7         ×8.0           ×1.9         ×3.3         ×4.3
#    16×2  768      ×3.9          ×1.2         ×1.9           ×6.1         ×3.0         ×1.1
#     8×1  768      ×1.1          ×1.2         ×0.1           ×2.0         ×0.4         ×0.1
#
# Its gradient of a depthwise kernel is fast (100 GFLOP/s a core instead of 5 to 8) for up to three columns.
#
# Groups of more than one channel, on two cores of an Intel Xeon with AMX, in ms, XLA's forms / oneDNN's kernels. Fewer
# than about a million multiplications are faster by XLA (a 1×1 kernel, 64×1 512, 32 groups: 0.66 to 0.76 times by
# oneDNN):
#
#   B×size C     groups    float32                                    bfloat16
#     8×56  128    32      26.3 / 5.0   24.9 / 4.6   39.8 / 6.3       22.7 / 6.2   20.7 / 6.6   36.7 / 35.3
#     8×56  256    32 s.2  ×6.3         ×8.4         ×7.8             ×4.4         ×6.0         ×9.2
#     8×28  256    32      ×4.7         ×4.9         ×5.6             ×3.2         ×3.3         ×7.4
#     8×14  512    32      ×5.0         ×5.2         ×6.2             ×7.9         ×7.9         ×9.5
#     8×7  1024    32      ×3.3         ×4.2         ×3.3             ×7.1         ×8.9         ×4.7
#   128×16   64     4      ×4.3         ×3.7         ×6.3             ×5.3         ×5.0         ×9.3
#    16×4   256    32      ×5.2         ×3.7         ×2.7             ×5.3         ×3.4         ×1.8
#    16×2   512    32      ×3.9         ×1.8         ×2.3             ×3.9         ×1.5         ×1.5
#
# With AMX, in bfloat16, groups of fewer than 16 channels fill a small part of a tile. As many as have 32 channels are
# computed as one, with zeros in the kernel, in ms, apart / joined:
#
#   128×32   64     8        14.8 / 5.5   15.4 / 5.6    7.9 /  6.0
#   128×32  128    16 s.2    14.1 / 9.5    9.7 / 8.1   12.9 / 10.8
#     8×56  128    32         4.8 / 1.3    5.0 / 1.4   36.0 /  3.0
#     8×56  256    32 s.2     3.1 / 1.8    3.1 / 2.6    4.0 /  2.9
#     8×28  256    32         2.4 / 0.8    2.4 / 0.7    1.5 /  1.3
#   128×16   48    16         1.9 / 1.0    2.0 / 1.1    2.8 /  1.4
#
# In bfloat16, the filter gradient of a 1×1 kernel or of a small map is one product of patches and gradient. The kernel
# for AMX sums over a row of positions at a time, of which 3 to 7 fill a small part of a tile. On two cores of an
# Intel Xeon with AMX, otherwise idle, the filter gradient / the product without the copies of patches, in ms:
#
#     8×56   64→256   1×1  1.7 / 1.7        8×7   512→512   3×3        4.7 / 1.9
#     8×28  128→512   1×1  1.6 / 1.1       16×4   256→256   3×3        2.0 / 0.6
#     8×7   512→2048  1×1  2.2 / 1.0       16×2   512→512   3×3        5.6 / 1.0
#    16×4   256→1024  1×1  1.0 / 0.5        8×14 1024→2048  1×1, s. 2  7.1 / 2.0
#
# Steps became 1.15 (ResNet-50 64 px), 1.09 (convnet8) and 1.06 times (ResNet-50 224 px) as fast; maps of up to 14
# positions a side made ResNet-8 0.88 times as fast. Without AMX (emulated) and in float32 neither is faster, so it is
# used with AMX only. It has been measured on two cores only.
#
# Where positions are few, bringing the kernel into oneDNN's layout takes longer than the products.
_FEW_POSITIONS = {"float32": 512, "bfloat16": 256}
# Forward, a kernel larger than 1×1 has more products for each number that is brought there. In float32, 8×14 512→512
# 3×3 with stride 2 took 6.3 ms by oneDNN and 16.5 by XLA on the Xeon above, with stride 1 5.5 and 6.1. Steps became
# 1.016 (ResNet-50 224 px), 1.016 (ResNet-18 64 px) and 1.003 times (ResNet-50 64 px) as fast.
_FEW_POSITIONS_FORWARD = 256
# In bfloat16, forward and by input, XLA then multiplies patches of bfloat16, at 500 to 1,000 GFLOP/s with AMX. If their
# operands were widened first, steps would be 0.86 (ResNet-50 64 px) and 0.82 times (ResNet-18 64 px) as fast. With AMX,
# steps with 256 instead of 512 as the limit were 0.93 and 0.96 times as fast, with 1,024 instead of 512 0.93 and 0.88.
# Larger windows have so many slices that a program takes seconds to compile.
_FEW_POSITIONS_AMX = 512
_MOST_TAPS = 9
_FEW_POSITIONS_1X1_INPUT_GRADIENT = 4097
_FEW_CHANNELS = 32
_FEW_CHANNELS_1X1 = 128
_DEPTHWISE_COLUMNS = 3
# By product: the patches of a larger map take longer to copy, a smaller kernel has too few rows for two threads, and
# the memory of larger patches is never given back.
_SMALL_MAP_BY_PRODUCT = 7
_LEAST_ROWS_BY_PRODUCT = 64
_MOST_PATCH_BYTES = 2**26
_NONE = (0, 0)
_DEPTHWISE_KERNELS = "_dw:"
_LEAST_GROUPED_PRODUCTS = 2**20
_FEWEST_CHANNELS_AMX = 16


def forward(geometry: Geometry, x: jax.Array, kernel: jax.Array) -> jax.Array | None:
    """Return the convolution `[B,P,Q,K]`, or None if oneDNN has no faster kernel."""
    kernel = _with_joined_groups(x, kernel)
    P, Q = geometry.output_size(image_size(x), window_size(kernel))
    y = jax.ShapeDtypeStruct((x.shape[0], P, Q, kernel.shape[3]), x.dtype)
    return _call(_operation(Part.FORWARD, geometry, x, kernel, y), (x, kernel), y)


def input_gradient(geometry: Geometry, x: jax.Array, kernel: jax.Array, gradient: jax.Array) -> jax.Array | None:
    """Return the gradient with respect to `x`, or None if oneDNN has no faster kernel."""
    kernel = _with_joined_groups(x, kernel)
    if _is_faster_without_strides(geometry, x, kernel):
        return _input_gradient_without_strides(geometry, x, kernel, gradient)
    return _call(_operation(Part.INPUT_GRADIENT, geometry, x, kernel, gradient), (gradient, kernel), x)


def _groups_to_join(x: jax.Array, kernel: jax.Array) -> int:
    """Return how many neighbouring groups are computed as one whose kernel has zeros between them: 1 for none."""
    groups, channels = num_groups(x, kernel), kernel.shape[2]
    is_narrow = groups > 1 and 1 < channels < _FEWEST_CHANNELS_AMX
    return groups_per_block(groups, channels) if is_narrow and _has_amx(str(x.dtype)) else 1


def _with_joined_groups(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Return a kernel `[kh,kw,C/groups,K]` with as many joined groups as `_groups_to_join` says, one after another."""
    per_block = _groups_to_join(x, kernel)
    if per_block == 1:
        return kernel
    return join_channels(block_kernels(kernel, num_groups(x, kernel), per_block))


def _is_faster_without_strides(geometry: Geometry, x: jax.Array, kernel: jax.Array) -> bool:
    """Return whether the input gradient of a 1×1 kernel is faster if oneDNN computes only the positions it meets.

    oneDNN's own is slow with AMX: steps became 1.01 to 1.04 times as fast without it.
    """
    is_pointwise = window_size(kernel) == (1, 1) and geometry.padding == (_NONE, _NONE)
    return is_pointwise and max(geometry.strides) > 1 and _has_amx(str(x.dtype))


def _has_amx(dtype: str) -> bool:
    return dtype == "bfloat16" and load_library().has(Isa.AMX)


def _input_gradient_without_strides(
    geometry: Geometry, x: jax.Array, kernel: jax.Array, gradient: jax.Array
) -> jax.Array | None:
    (H, W), (P, Q), (sh, sw) = image_size(x), image_size(gradient), geometry.strides
    met = jax.ShapeDtypeStruct((x.shape[0], P, Q, x.shape[3]), x.dtype)
    without = Geometry((1, 1), (_NONE, _NONE))
    found = _call(_operation(Part.INPUT_GRADIENT, without, met, kernel, gradient), (gradient, kernel), met)
    if found is None:
        return None
    after = (0, H - 1 - (P - 1) * sh), (0, W - 1 - (Q - 1) * sw)
    return pad(found, after, geometry.strides)


def filter_gradient(geometry: Geometry, x: jax.Array, kernel: jax.Array, gradient: jax.Array) -> jax.Array | None:
    """Return the gradient with respect to `kernel`, or None if that of `convolution_forms.py` is as fast."""
    is_enough = math.prod(gradient.shape[:3]) * math.prod(kernel.shape) >= _LEAST_GROUPED_PRODUCTS
    if is_enough and (per_block := _groups_to_join(x, kernel)) > 1:
        of_blocks = filter_gradient(geometry, x, jax.eval_shape(_with_joined_groups, x, kernel), gradient)
        blocks = num_groups(x, kernel) // per_block
        return None if of_blocks is None else kernel_of_blocks(split_channels(of_blocks, blocks), per_block)
    if _is_depthwise(x.shape, kernel.shape) and kernel.shape[1] > _DEPTHWISE_COLUMNS:
        return _filter_gradient_by_columns(geometry, x, kernel, gradient)
    if _is_faster_as_product(x, kernel, gradient):
        return _filter_gradient_by_product(geometry, x, kernel, gradient)
    return _call(_operation(Part.FILTER_GRADIENT, geometry, x, kernel, gradient), (x, gradient), kernel)


def _is_faster_as_product(x: jax.Array, kernel: jax.Array, gradient: jax.Array) -> bool:
    """Return whether a filter gradient is faster as one product of patches and gradient."""
    window, row, positions = window_size(kernel), math.prod(kernel.shape[:3]), math.prod(gradient.shape[:3])
    is_dense, is_large = kernel.shape[2] == x.shape[3], row >= _LEAST_ROWS_BY_PRODUCT and positions > 0
    has_few_copies = window == (1, 1) or max(image_size(gradient)) <= _SMALL_MAP_BY_PRODUCT
    fits = positions * row * x.dtype.itemsize <= _MOST_PATCH_BYTES or window == (1, 1)
    return is_dense and is_large and has_few_copies and fits and _has_amx(str(x.dtype))


def _filter_gradient_by_product(geometry: Geometry, x: jax.Array, kernel: jax.Array, gradient: jax.Array) -> jax.Array:
    padding = padding_of_product(x.shape, gradient.shape, *geometry)
    padded, wide = pad(x, padding), jax.ShapeDtypeStruct(kernel.shape, jnp.float32)
    operation = _operation(
        Part.FILTER_GRADIENT_BY_PRODUCT, Geometry(geometry.strides, padding), padded, kernel, gradient
    )
    return call_operation(operation, [wide], padded, gradient)[0].astype(kernel.dtype)


def _filter_gradient_by_columns(
    geometry: Geometry, x: jax.Array, kernel: jax.Array, gradient: jax.Array
) -> jax.Array | None:
    """Compute the gradients of as many columns of a depthwise kernel at a time as oneDNN has a fast kernel for."""
    (kh, kw), stride, (vertical, horizontal) = window_size(kernel), geometry.strides[1], geometry.padding
    # Nor has it a fast one for a map with fewer rows than the kernel.
    above, inside = (_NONE, vertical) if x.shape[1] >= kh else (vertical, _NONE)
    padded = pad(x, (above, horizontal))
    without = Geometry(geometry.strides, (inside, _NONE))
    found: list[jax.Array] = []
    for start in range(0, kw, _DEPTHWISE_COLUMNS):
        columns = min(_DEPTHWISE_COLUMNS, kw - start)
        met = padded[:, :, start : start + (gradient.shape[2] - 1) * stride + columns]
        part = jax.ShapeDtypeStruct((kh, columns, *kernel.shape[2:]), kernel.dtype)
        own = _call(_operation(Part.FILTER_GRADIENT, without, met, part, gradient), (met, gradient), part)
        if own is None:
            return None
        found.append(own)
    return jnp.concatenate(found, axis=1)


def _is_depthwise(x: tuple[int, ...], kernel: tuple[int, ...]) -> bool:
    return kernel[2] == 1 < x[3]


def is_narrow_product(geometry: Geometry, x: tuple[int, ...], kernel: tuple[int, ...], dtype: str) -> bool:
    """Return whether, forward and by input, XLA's products of bfloat16 operands are fastest for these operands."""
    is_dense, has_few_taps = kernel[2] == x[3], math.prod(kernel[:2]) <= _MOST_TAPS
    is_narrow = dtype == "bfloat16" and load_library().supports(dtype)
    positions = x[0] * math.prod(geometry.output_size((x[1], x[2]), (kernel[0], kernel[1])))
    return is_dense and has_few_taps and is_narrow and _are_few(positions, dtype)


def _are_few(positions: int, dtype: str) -> bool:
    return positions < (_FEW_POSITIONS_AMX if _has_amx(dtype) else _FEW_POSITIONS[dtype])


def is_faster(operation: Convolution) -> bool:
    """Return whether oneDNN's kernel for a part of a convolution is faster here than the form of that part."""
    if not load_library().supports(operation.dtype):
        return False
    positions = math.prod(operation.y[:3])
    if _is_depthwise(operation.x, operation.kernel):
        return math.prod(operation.y[1:3]) > 1 and has_fast_kernel(operation, _DEPTHWISE_KERNELS)
    if operation.kernel[2] != operation.x[3]:
        return positions * math.prod(operation.kernel) >= _LEAST_GROUPED_PRODUCTS and has_fast_kernel(operation)
    return (
        (not _are_few(positions, operation.dtype) or _is_fast_forward(operation, positions))
        and (operation.part != Part.INPUT_GRADIENT or _has_faster_input_gradient(operation, positions))
        and has_fast_kernel(operation)
    )


def _is_fast_forward(operation: Convolution, positions: int) -> bool:
    """Return whether few positions are still enough for a float32 forward pass."""
    is_forward, is_pointwise = operation.part == Part.FORWARD, operation.kernel[:2] == (1, 1)
    return operation.dtype == "float32" and is_forward and not is_pointwise and positions >= _FEW_POSITIONS_FORWARD


def _has_faster_input_gradient(operation: Convolution, positions: int) -> bool:
    is_narrow, has_stride, C = operation.dtype != "float32", max(operation.strides) > 1, operation.x[3]
    if operation.kernel[:2] != (1, 1):
        return is_narrow or not has_stride or C <= _FEW_CHANNELS
    if has_stride:
        return is_narrow and C >= _FEW_CHANNELS_1X1
    return is_narrow or positions >= _FEW_POSITIONS_1X1_INPUT_GRADIENT


def _operation(
    part: Part,
    geometry: Geometry,
    x: jax.Array | jax.ShapeDtypeStruct,
    kernel: jax.Array | jax.ShapeDtypeStruct,
    y: jax.Array | jax.ShapeDtypeStruct,
) -> Convolution:
    return Convolution(str(part), str(x.dtype), x.shape, kernel.shape, y.shape, *geometry)


def _call(
    operation: Convolution, operands: tuple[jax.Array, ...], like: jax.Array | jax.ShapeDtypeStruct
) -> jax.Array | None:
    if not is_faster(operation):
        return None
    return call_operation(operation, [jax.ShapeDtypeStruct(like.shape, like.dtype)], *operands)[0]
