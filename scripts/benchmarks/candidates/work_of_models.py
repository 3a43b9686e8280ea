"""The work of a training step, from the shapes of its layers: floating-point operations, and bytes that must move."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopfeed.models.families import pooled_convnet, resnet
from loopfeed.models.registry import build_model, count_params

_FLOAT32_BYTES = 4


class Work(NamedTuple):
    """The work of a training step of one network.

    Attributes:
        image_flop: floating-point operations of one image: 2 · multiply-adds · 3. The forward pass, the gradient by the
            input and the gradient by the kernel take the same number; the gradient of the first convolution by its
            input is not needed and left out. Norms, activations, pools and the update are not counted.
        image_elements: activations and their gradients that layers read or write for one image, as `work_of` counts.
        num_params: learned numbers.
    """

    image_flop: float
    image_elements: int
    num_params: int

    def step_bytes(self, batch: int, element_bytes: int) -> int:
        """Return the bytes that a step of SGD with momentum must move between processor and memory.

        A learned number is read in each pass, and its gradient written and read once, in the dtype of the activations;
        the optimiser reads and writes the number and its momentum in float32, and writes a copy for products of fewer
        bytes.

        Args:
            batch: images of the step.
            element_bytes: bytes of an activation.
        """
        copy = element_bytes if element_bytes < _FLOAT32_BYTES else 0
        param_bytes = 4 * element_bytes + 4 * _FLOAT32_BYTES + copy
        return batch * self.image_elements * element_bytes + self.num_params * param_bytes


class _Layer(NamedTuple):
    """A call of a layer for one image: its multiply-adds forward, and the elements that it moves in both passes."""

    products: int
    elements: int


def work_of(name: str, image_size: int, num_classes: int) -> Work:
    """Count the work of a network of the registry.

    Each layer reads each of its inputs once and writes its result once, in the forward pass and in the backward one.
    What follows from that:

    - A convolution or dense layer reads x and writes y; backward it reads x and y's gradient, for both of its
      gradients at once, and writes x's, which the first layer leaves out.
    - A batch norm with its activation reads x and writes y; backward it reads x and y's gradient and writes x's. Its
      sums over the batch come from whoever wrote the array that is summed.
    - A max-pool, or an average or maximum over the map, reads x and writes y; backward it reads y's gradient and writes
      x's. The places of the maxima are not counted.
    - A sum with ReLU reads two and writes one; backward it reads y and its gradient, and writes one gradient for both.
    - The two gradients of an array that is used twice are added by whoever writes the second one, for nothing.
    """
    counted: list[_Layer] = []
    modules: tuple[Any, ...] = (resnet, pooled_convnet)
    originals = [
        (module, layer, getattr(module, layer)) for module in modules for layer in _ELEMENTS if hasattr(module, layer)
    ]

    def count(layer: str, original: Callable[..., Any], x: jax.Array, *others: Any, **keywords: Any) -> Any:
        result = original(x, *others, **keywords)
        y = result[0] if isinstance(result, tuple) else result
        products = math.prod(y.shape[:-1]) * others[0].size if layer in _PRODUCTS else 0
        unneeded = 0 if counted else x.size
        counted.append(_Layer(products, _ELEMENTS[layer](x.size, y.size) - unneeded))
        return result

    model = build_model(name, num_classes=num_classes, image_size=image_size)
    try:
        for module, layer, original in originals:
            setattr(module, layer, partial(count, layer, original))
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        images = jax.ShapeDtypeStruct((1, image_size, image_size, 3), jnp.float32)
        # Blocks of the same shape are traced only once under jit, but each must be counted.
        with jax.disable_jit():
            jax.eval_shape(lambda weights, x: model.apply(weights[0], weights[1], x, train=True), shapes, images)
    finally:
        for module, layer, original in originals:
            setattr(module, layer, original)
    flop = 2.0 * (3 * sum(layer.products for layer in counted) - counted[0].products)
    return Work(flop, sum(layer.elements for layer in counted), count_params(shapes[0]))


_PRODUCTS = ("convolution", "dense")
# By the name of a layer in the modules of networks: elements read and written in both passes, given those of x and y.
_ELEMENTS: dict[str, Callable[[int, int], int]] = {
    "convolution": lambda x, y: 3 * x + 2 * y,
    "dense": lambda x, y: 3 * x + 2 * y,
    "batch_norm": lambda x, y: 3 * x + 2 * y,
    "max_pool": lambda x, y: 2 * x + 2 * y,
    "global_average_pool": lambda x, y: 2 * x + 2 * y,
    "global_max_pool": lambda x, y: 2 * x + 2 * y,
    "stored_relu": lambda x, y: 3 * x + 3 * y,  # of a sum
}
