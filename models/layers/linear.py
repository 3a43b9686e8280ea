"""Dense layers over the last axis, and over square patches of an image, as matrix products with float32 sums."""

from jaxtyping import Array, Float

from loopfeed.models.layers.bfloat16_bits import round_by_bits
from loopfeed.models.layers.head import dense


def linear(
    x: Float[Array, "*batch C"], kernel: Float[Array, "C K"], bias: Float[Array, "K"]
) -> Float[Array, "*batch K"]:
    """Return `x @ kernel + bias` in the dtype of `x`; products and sums are those of `dense`."""
    rows = x.reshape(-1, x.shape[-1])
    return round_by_bits(dense(rows, kernel, bias), x.dtype).reshape(*x.shape[:-1], kernel.shape[1])


def patch_linear(
    x: Float[Array, "B H W C"], kernel: Float[Array, "p p C K"], bias: Float[Array, "K"]
) -> Float[Array, "B H//p W//p K"]:
    """Convolve `x` with a kernel with stride p, without padding, as one matrix product, in the dtype of `x`.

    Patches do not overlap, so a reshape brings them into rows, and its gradient is another reshape. Pixels beyond the
    last whole patch are left out, as in a convolution without padding.
    """
    (B, H, W, C), (p, _, _, K) = x.shape, kernel.shape
    P, Q = H // p, W // p
    patches = x[:, : P * p, : Q * p].reshape(B, P, p, Q, p, C).transpose(0, 1, 3, 2, 4, 5)
    return linear(patches.reshape(B, P, Q, p * p * C), kernel.reshape(p * p * C, K), bias)
