"""ResNet-8 and its training step written with `lax` convolutions, without code of the project."""

import jax
import jax.numpy as jnp
from jax import lax


def conv(x, kernel, stride=1):
    margin = (kernel.shape[0] - 1) // 2
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), [(margin, margin)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def norm(x, params, stats, fixed=False):
    if fixed:
        return (x - stats["mean"]) / jnp.sqrt(stats["var"] + 1e-5) * params["scale"] + params["bias"], stats
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    count = x.size // x.shape[-1]
    moved = {
        "mean": 0.9 * stats["mean"] + 0.1 * mean,
        "var": 0.9 * stats["var"] + 0.1 * var * count / (count - 1),
    }
    return (x - mean) / jnp.sqrt(var + 1e-5) * params["scale"] + params["bias"], moved


def forward(params, stats, x, fixed=()):
    """Return logits and moved statistics; the norms of the layers `fixed` normalise with theirs, which stay."""
    new = {}
    x, new["bn1"] = norm(conv(x, params["conv1"]["kernel"]), params["bn1"], stats["bn1"], "bn1" in fixed)
    x = jax.nn.relu(x)
    for stage, stride in (("layer1", 1), ("layer2", 2), ("layer3", 2)):
        if stage not in params:  # of the small one of `small_resnets`
            continue
        still = stage in fixed
        p, s = params[stage]["0"], stats[stage]["0"]
        n = {}
        y, n["bn1"] = norm(conv(x, p["conv1"]["kernel"], stride), p["bn1"], s["bn1"], still)
        y, n["bn2"] = norm(conv(jax.nn.relu(y), p["conv2"]["kernel"]), p["bn2"], s["bn2"], still)
        if "downsample" in p:
            n["downsample"] = {}
            x, n["downsample"]["1"] = norm(
                conv(x, p["downsample"]["0"]["kernel"], stride), p["downsample"]["1"], s["downsample"]["1"], still
            )
        x = jax.nn.relu(y + x)
        new[stage] = {"0": n}
    return x.mean((1, 2)) @ params["fc"]["kernel"] + params["fc"]["bias"], new


@jax.jit
def step(state, pixels, labels, mean, std, learning_rate, momentum, weight_decay):
    """Return the state (params, stats, velocity) and the loss after a step of PyTorch's SGD on packed pixels."""
    params, stats, velocity = state
    channels = jnp.stack([(pixels >> shift) & 255 for shift in (24, 16, 8)], -1)
    images = (channels.astype(jnp.float32) / 255 - mean) / std

    def loss_of(params):
        logits, new = forward(params, stats, images)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
        return -chosen.mean(), new

    (loss, stats), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
    # Norms and biases do not decay.
    decayed = jax.tree.map(lambda g, p: g + weight_decay * p * (p.ndim > 1), gradients, params)
    velocity = jax.tree.map(lambda v, g: momentum * v + g, velocity, decayed)
    params = jax.tree.map(lambda p, v: p - learning_rate * v, params, velocity)
    return (params, stats, velocity), loss
