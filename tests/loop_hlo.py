"""The optimised HLO of a training loop on a CPU, and what in it is slow."""

import re

import jax
import jax.numpy as jnp
from jax import lax

# Convolutions that XLA:CPU runs fast wherever they stand: NHWC by HWIO, neither operand dilated, no window reversed.
CANONICAL = "dim_labels=b01f_01io->b01f"
SLOW = ("lhs_dilate", "rhs_dilate", "rhs_reversal", "feature_group_count", "batch_group_count")


def slow_convolutions(hlo):
    """Lines of optimised HLO that hold a convolution which is not canonical, or whose kernel overhangs its input."""
    found = []
    for line in hlo.splitlines():
        if re.search(r"[\])}] convolution\(", line):
            padding = re.search(r"pad=(\S+?)[ }]", line)
            negative = padding is not None and "-" in padding.group(1)
            if CANONICAL not in line or any(word in line for word in SLOW) or negative:
                found.append(line.strip())
    return found


def slow_products(hlo):
    """Lines of optimised HLO that hold a product of other operands than matrices, or rows of them along axis 0."""
    found = []
    for line in hlo.splitlines():
        if re.search(r"[\])}] dot\(", line):
            axes = dict(re.findall(r"(\w+_dims)={([\d,]*)}", line))
            batch = axes.get("lhs_batch_dims", ""), axes.get("rhs_batch_dims", "")
            summed = axes["lhs_contracting_dims"] + axes["rhs_contracting_dims"]
            if batch not in (("", ""), ("0", "0")) or len(summed) != 2:
                found.append(line.strip())
    return found


def training_loop(model, batch, image_size):
    """The optimised HLO of a `while_loop` of training steps."""

    def step(carry):
        count, params, batch_stats, images = carry

        def loss(params):
            logits, new = model.apply(params, batch_stats, images, train=True)
            return jnp.square(logits).mean(), new

        grads, new = jax.grad(loss, has_aux=True)(params)
        return count + 1, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), new, images

    params, batch_stats = jax.eval_shape(model.init, jax.random.key(0))
    images = jax.ShapeDtypeStruct((batch, image_size, image_size, 3), jnp.float32)
    loop = jax.jit(lambda *state: lax.while_loop(lambda carry: carry[0] < 10, step, (jnp.int32(0), *state)))
    # LLVM's optimiser comes after all of this, and would take half of the time.
    options = {"xla_backend_optimization_level": 0}
    return loop.lower(params, batch_stats, images).compile(compiler_options=options).as_text()
