"""The number of operations of a training step, from the shapes of its convolutions and products."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from models.families import pooled_convnet, resnet
from models.registry import build_model


def image_flop(name: str, image_size: int, num_classes: int) -> float:
    """Return the floating-point operations of one image's training step: 2 · multiply-adds · 3.

    The forward pass, the gradient by the input and the gradient by the kernel take the same number; the gradient of the
    first convolution by its input is not needed and left out. Norms, activations, pools and the update are not counted.
    """
    counted: list[int] = []
    modules: tuple[Any, ...] = (resnet, pooled_convnet)
    originals = [(module, module.convolution, module.dense) for module in modules]

    def counting_convolution(original: Any, x: jax.Array, kernel: jax.Array, **keywords: Any) -> jax.Array:
        y = original(x, kernel, **keywords)
        counted.append(math.prod(y.shape[:3]) * kernel.size)
        return y

    def counting_dense(original: Any, x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
        counted.append(x.shape[0] * kernel.size)
        return original(x, kernel, bias)

    model = build_model(name, num_classes=num_classes, image_size=image_size)
    try:
        for module, convolution, dense in originals:
            module.convolution = partial(counting_convolution, convolution)
            module.dense = partial(counting_dense, dense)
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        images = jax.ShapeDtypeStruct((1, image_size, image_size, 3), jnp.float32)
        # Blocks of the same shape are traced only once under jit, but each must be counted.
        with jax.disable_jit():
            jax.eval_shape(lambda weights, x: model.apply(weights[0], weights[1], x, train=True), shapes, images)
    finally:
        for module, convolution, dense in originals:
            module.convolution, module.dense = convolution, dense
    return 2.0 * (3 * sum(counted) - counted[0])
