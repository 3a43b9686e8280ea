"""The work of a training step, from the shapes of its layers: floating-point operations, and bytes that must move."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp

from loopfeed.models.families import pooled_convnet, resnet
from loopfeed.models.registry import build_model, count_params

_FLOAT32_BYTES = 4
_PRODUCTS = ("convolution", "dense")
# By the name of a layer in the modules of networks: how often the elements of x and y are read or written in both
# passes. Each layer reads each of its inputs once and writes its result once, forward and backward:
# - A convolution or dense layer reads x and writes y; backward it reads x and y's gradient, for both of its gradients
#   at once, and writes x's, which the first layer leaves out.
# - A batch norm with its activation reads x and writes y; backward it reads x and y's gradient and writes x's. Its sums
#   over the batch come from whoever wrote the array that is summed.
# - A max-pool, or an average or maximum over the map, reads x and writes y; backward it reads y's gradient and writes
#   x's. The places of the maxima are not counted.
# - A sum with ReLU reads two and writes one; backward it reads y and its gradient, and writes one gradient for both.
# - The two gradients of an array that is used twice are added by whoever writes the second one, for nothing.
_MOVED = {
    "convolution": (3, 2),
    "dense": (3, 2),
    "batch_norm": (3, 2),
    "max_pool": (2, 2),
    "global_average_pool": (2, 2),
    "global_max_pool": (2, 2),
    "stored_relu": (3, 3),  # of a sum
}


class Work(NamedTuple):
    """The work of a training step of one network.

    Attributes:
        image_flop: floating-point operations of one image: 2 · multiply-adds · 3. The forward pass, the gradient by the
            input and the gradient by the kernel take the same number; the gradient of the first convolution by its
            input is not needed and left out. Norms, activations, pools and the update are not counted.
        image_elements: activations and their gradients that layers read or write for one image, as `_MOVED` says.
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


def work_of(name: str, image_size: int, num_classes: int) -> Work:
    """Count the work of a network of the registry."""
    products: list[int] = []
    elements: list[int] = []

    def counting(layer: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def count(x: jax.Array, *others: Any, **keywords: Any) -> Any:
            result = original(x, *others, **keywords)
            y = result[0] if isinstance(result, tuple) else result
            of_x, of_y = _MOVED[layer]
            elements.append(of_x * x.size + of_y * y.size)
            if layer in _PRODUCTS:
                products.append(math.prod(y.shape[:-1]) * others[0].size)
            return result

        return count

    model = build_model(name, num_classes=num_classes, image_size=image_size)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    images = jax.ShapeDtypeStruct((1, image_size, image_size, 3), jnp.float32)
    layers = [
        mock.patch.object(module, layer, counting(layer, getattr(module, layer)))
        for module in (resnet, pooled_convnet)
        for layer in _MOVED
        if hasattr(module, layer)
    ]
    # Blocks of the same shape are traced only once under jit, but each must be counted.
    with ExitStack() as stack, jax.disable_jit():
        for layer in layers:
            stack.enter_context(layer)
        jax.eval_shape(lambda weights, x: model.apply(weights[0], weights[1], x, train=True), shapes, images)
    # The gradient of the images is neither computed nor written.
    flop = 2.0 * (3 * sum(products) - products[0])
    return Work(flop, sum(elements) - math.prod(images.shape), count_params(shapes[0]))
