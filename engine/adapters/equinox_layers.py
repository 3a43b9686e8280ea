"""Layers that replace those of Equinox: a convolution that is fast inside a loop, and a float32 batch norm."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from loopfeed.engine.adapters.library import load
from loopfeed.models.layers.convolution import convolution

eqx: Any = load("equinox")


def with_loop_safe_layers(model: Any) -> Any:
    """Return a model whose layers `eqx.nn.Conv2d` and `eqx.nn.BatchNorm` are replaced; subclasses stay as they are."""
    layers: dict[Any, Any] = {eqx.nn.Conv2d: LoopSafeConv2d, eqx.nn.BatchNorm: WideBatchNorm}

    def replace(layer: Any) -> Any:
        if type(layer) not in layers:
            return layer
        new: Any = object.__new__(layers[type(layer)])
        for name, value in vars(layer).items():
            object.__setattr__(new, name, value)
        return new

    return jax.tree.map(replace, model, is_leaf=lambda node: type(node) in layers)


class LoopSafeConv2d(eqx.nn.Conv2d):
    """A convolution that computes a whole batch with `loopfeed.convolution` when it is mapped over images."""

    def __call__(self, x: jax.Array, *, key: Any = None) -> jax.Array:
        """Return `[K,P,Q]` for an image `[C,H,W]`."""
        plain = self.padding_mode == "ZEROS" and set(self.dilation) == {1}
        padding = self.padding if isinstance(self.padding, str) else tuple((low, high) for low, high in self.padding)
        if not plain or padding == "SAME_LOWER" or x.ndim != len("CHW") or x.dtype != self.weight.dtype:
            return super().__call__(x, key=key)
        y = _convolve(self.stride, padding, self.groups, x, self.weight)
        return y if self.bias is None else y + self.bias


class WideBatchNorm(eqx.nn.BatchNorm):
    """A batch norm that computes in float32, because its state cannot change its dtype."""

    def __call__(self, x: jax.Array, state: Any, **options: Any) -> tuple[jax.Array, Any]:
        """Return the normalised image in the dtype of `x`, and the new state."""
        y, new = super().__call__(x.astype(jnp.promote_types(x.dtype, jnp.float32)), state, **options)
        return y.astype(x.dtype), new


def _convolve(stride: Any, padding: Any, groups: int, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Convolve an image `[C,H,W]` with a kernel `[K,C/groups,kh,kw]`."""

    def of_batch(images: jax.Array, weight: jax.Array) -> jax.Array:
        kernel = weight.transpose(2, 3, 1, 0)
        y = convolution(images.transpose(0, 2, 3, 1), kernel, stride=stride, padding=padding, groups=groups)
        return y.transpose(0, 3, 1, 2)

    @custom_vmap
    def of_image(image: jax.Array, weight: jax.Array) -> jax.Array:
        return of_batch(image[None], weight)[0]

    # Otherwise each of the operations that `convolution` consists of would be mapped, over batches of one image.
    @of_image.def_vmap
    def of_images(_: int, is_mapped: list[bool], images: jax.Array, weight: jax.Array) -> tuple[jax.Array, bool]:
        if is_mapped[1]:
            one = lambda image, weight: of_batch(image[None], weight)[0]  # noqa: E731
            return jax.vmap(one, in_axes=(0 if is_mapped[0] else None, 0))(images, weight), True
        return of_batch(images, weight), True

    return of_image(x, weight)
