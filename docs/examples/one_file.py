"""The whole idea in one file of plain JAX: infeed, while_loop, outfeed, update.

Nothing but jax, NumPy and TensorStore until the last section, which runs the same
training with Loopfeed and compares: pixels and labels to the bit, losses to 1e-5.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from jax import lax
from jax.experimental import io_callback

STEPS, BATCH, SEED, RATE, MOMENTUM = 50, 64, 3, 0.003, 0.9
SPLIT = Path("data/demo/train")


# %% A pack is two Zarr arrays, pixels uint32 [N, H, W] with words R<<24 | G<<16 | B<<8
# and labels uint16 [N], and a manifest with the mean and deviation of the channels.
def open_array(name: str) -> Any:
    """Open an array of the pack."""
    store = {"driver": "file", "path": f"{(SPLIT / name).absolute()}/"}
    return ts.open({"driver": "zarr3", "kvstore": store}).result()


if not SPLIT.exists():
    import loopfeed

    loopfeed.pack_demo(str(SPLIT.parent))
PIXELS, LABELS = open_array("pixels"), np.asarray(open_array("labels"))
MANIFEST = json.loads((SPLIT / "manifest.json").read_bytes())
MEAN = np.array(MANIFEST["channel_mean"], np.float32)
STD = np.array(MANIFEST["channel_std"], np.float32)
NUM_CLASSES = len(MANIFEST["classes"])


# %% The order: each epoch is a permutation of the images, a Feistel network keyed by
# (seed, epoch), so that the image at any position is known without a list.
def mix(words: Any) -> Any:
    """Apply the finaliser of SplitMix64 to uint64 words."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def image_at(position: int) -> int:
    """Return the index of the image at a position of the endless stream."""
    epoch, offset = divmod(position, len(LABELS))
    pair = SEED.to_bytes(8, "little") + epoch.to_bytes(8, "little")
    digest = hashlib.blake2b(pair, digest_size=64, person=b"feedloop-order").digest()
    half = max(2, ((len(LABELS) - 1).bit_length() + 1) // 2)
    shift, mask = np.uint64(half), np.uint64(2**half - 1)
    value = np.array([offset], np.uint64)
    while True:
        left, right = value >> shift, value & mask
        for key in np.frombuffer(digest, "<u8"):
            left, right = right, left ^ (mix(right ^ key) & mask)
        value = left << shift | right
        if value[0] < len(LABELS):
            return int(value[0])


# %% The infeed and the outfeed: two functions of the host, called by the program.
def read_batch(step: Any) -> tuple[Any, Any]:
    """Return the pixels, uint32 [B, H, W], and labels, int32 [B], of a step."""
    first = int(step) * BATCH
    images = [image_at(position) for position in range(first, first + BATCH)]
    return PIXELS[images].read().result(), LABELS[images].astype(np.int32)


LOSSES: list[float] = []


def take_loss(loss: Any) -> None:
    """Receive the loss of a step; a command would draw or write it."""
    LOSSES.append(float(loss))


# %% The network: any pure function of parameters and normalised images.
def init(key: jax.Array) -> tuple[Any, Any]:
    """Return (params, batch_stats)."""
    hidden, out = jax.random.split(key)
    num_inputs = PIXELS.shape[1] * PIXELS.shape[2] * 3
    params = {
        "hidden": jax.random.normal(hidden, (num_inputs, 64)) * (2 / num_inputs) ** 0.5,
        "out": jax.random.normal(out, (64, NUM_CLASSES)) * 0.1,
        "bias": jnp.zeros(NUM_CLASSES),
    }
    return params, {}


def apply(
    params: Any, batch_stats: Any, images: jax.Array, train: bool
) -> tuple[jax.Array, Any]:
    """Return (logits [B, K], batch_stats)."""
    del train
    x = jax.nn.relu(images.reshape(len(images), -1) @ params["hidden"])
    return x @ params["out"] + params["bias"], batch_stats


# %% The step: unpack, normalise, differentiate, and update by SGD with momentum.
def normalise(pixels: jax.Array) -> jax.Array:
    """Convert uint32 [B, H, W] words to float32 [B, H, W, 3]."""
    levels = pixels[..., None] >> jnp.array([24, 16, 8], jnp.uint32) & jnp.uint32(255)
    return (levels.astype(jnp.float32) / 255 - MEAN) / STD


def loss_of(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the cross entropy, averaged over the batch."""
    chosen = jax.nn.log_softmax(apply(params, {}, images, True)[0])
    return -jnp.mean(chosen[jnp.arange(BATCH), labels])


# %% The program: all steps are one while_loop, and the host is called from inside it.
# `ordered` keeps the calls in the order of the steps.
def train_all(key: jax.Array) -> Any:
    """Return the trained parameters."""
    params, _ = init(key)
    size = PIXELS.shape[1:]
    shapes = (
        jax.ShapeDtypeStruct((BATCH, *size), jnp.uint32),
        jax.ShapeDtypeStruct((BATCH,), jnp.int32),
    )

    def body(carry: Any) -> Any:
        step, params, momentum = carry
        pixels, labels = io_callback(read_batch, shapes, step, ordered=True)
        images = normalise(pixels)
        loss, gradient = jax.value_and_grad(loss_of)(params, images, labels)
        io_callback(take_loss, None, loss, ordered=True)
        momentum = jax.tree.map(lambda m, g: MOMENTUM * m + g, momentum, gradient)
        params = jax.tree.map(lambda p, m: p - RATE * m, params, momentum)
        return step + 1, params, momentum

    before = jnp.int32(0), params, jax.tree.map(jnp.zeros_like, params)
    return lax.while_loop(lambda carry: carry[0] < STEPS, body, before)[1]


jax.block_until_ready(jax.jit(train_all)(jax.random.key(SEED, impl="threefry2x32")))
jax.effects_barrier()
print(f"{STEPS} steps in plain JAX: loss {LOSSES[0]:.4f} to {LOSSES[-1]:.4f}")


# %% The same by Loopfeed, which adds what a run needs: reading ahead, checks,
# evaluation, snapshots, resumes, several devices, and the rest of docs/.
class Net(NamedTuple):
    """What `train` takes for a model."""

    init: Any = init
    apply: Any = apply


def check() -> None:
    """Compare with Loopfeed."""
    from loopfeed import TrainConfig, show_batch, train

    config = TrainConfig(
        data=str(SPLIT.parent),
        steps=STEPS,
        batch=BATCH,
        seed=SEED,
        optimizer="sgd",
        learning_rate=RATE,
        momentum=MOMENTUM,
        weight_decay=0.0,
        eval_every_steps=0,
    )
    pixels, labels = read_batch(0)
    shown = show_batch(config, model=Net())
    levels = pixels[..., None] >> np.array([24, 16, 8], np.uint32) & 255
    np.testing.assert_array_equal(shown.pictures, levels)
    np.testing.assert_array_equal(shown.labels, labels)
    result = train(config, model=Net())
    np.testing.assert_allclose(LOSSES, result.losses, rtol=0, atol=1e-5)
    apart = abs(np.array(LOSSES) - result.losses).max()
    print(f"the same by Loopfeed: losses within {apart:.1g}")


check()
assert len(LOSSES) == STEPS
