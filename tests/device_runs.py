"""Runs on several devices of the processor, for `tests/test_devices.py`.

    python -m tests.device_runs NUMBER FOLDER

Trains on NUMBER devices, and prints the results as one line of JSON.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from loopfeed import Callback, Metric, TrainConfig, devices, this_process, train
from tests.normed_network import SETTINGS, Normed
from tests.toy import CLASSES, Linear, toy_batch, toy_config

EVERYTHING: dict[str, Any] = {
    **{
        "crop": "random",
        "crop_padding": 1,
        "flip": 0.5,
        "mixup": 0.2,
        "cutmix": 0.3,
        "brightness": 0.2,
        "erasing": 0.2,
    },
    **{"auto_augment": "randaugment", "accumulate_steps": 3, "chunk_batches": 4, "ema_decay": 0.9, "clip_norm": 1.0},
    **{"label_smoothing": 0.1, "optimizer": "adamw", "learning_rate": 0.01, "eval_mirror": True},
}


class Showing(Linear):
    """The linear toy model, with noise by the keys of the images, which also returns its images."""

    def apply(self, params, batch_stats, images, train, key=None):
        if key is not None:
            images = images + 0.1 * jax.vmap(lambda each: jax.random.normal(each, images.shape[1:]))(key)
        logits, batch_stats = super().apply(params, batch_stats, images, train)
        # The statistic differs from device to device, so that it must be averaged.
        seen = jnp.mean(images).astype(jnp.float32)
        return {"logits": logits, "images": images}, {"batches": batch_stats["batches"] + seen}


def checksum(shift):
    """A metric: 16 bits of the sum of the images' bits, which does not depend on the order of the images."""

    def update(state, outputs, labels, weights):
        bits = jax.lax.bitcast_convert_type(outputs["images"], jnp.uint32).reshape(len(weights), -1).sum(axis=1)
        return state + jnp.where(weights > 0, bits * (labels + 1).astype(jnp.uint32), 0).sum()

    return Metric(
        init=lambda: jnp.zeros((), jnp.uint32),
        update=update,
        merge=jnp.add,
        finish=lambda state: (state >> shift & 0xFFFF).astype(jnp.float32),
    )


METRICS = {"low": checksum(0), "high": checksum(16)}


def slow_batches(step):
    """Batches of 12 that leave time for signals; at step 10 those of one process stall, if so asked."""
    time.sleep(0.1)
    if step == 10 and os.environ.get("STALLED_PROCESS") == str(this_process().index):
        time.sleep(600)
    return toy_batch(step, batch=12)


def rows_alone(step, rows):
    """The rows of a batch of 12 that this process asks for."""
    pixels, labels = toy_batch(step, batch=12)
    return pixels[rows.start : rows.stop], labels[rows.start : rows.stop]


class Steering(Callback):
    """Requests another learning rate, an evaluation and a snapshot."""

    def on_fit_begin(self, run):
        self._run = run

    def on_step(self, record):
        if record.step == 2:
            self._run.request(learning_rate_factor=0.5, evaluate=True, snapshot=True)


def evaluation():
    parts = [toy_batch(100 + number) for number in range(5)]
    pixels, labels = (np.concatenate(each) for each in zip(*parts, strict=True))
    return pixels[:37], labels[:37]


def pairs(step):
    """A batch of two images for each of eight devices, because mixing needs pairs."""
    return toy_batch(step, batch=16)


class MarkedEvaluation:
    """Forty batches of 12 images; with EVALUATION_MARK set, each takes a while, and the fourth makes that file."""

    batch, height, width, num_batches, thread_safe = 12, 4, 4, 40, True

    def fill(self, batch_index, rows, pixels, labels, *, timeout_s):
        del timeout_s
        if mark := os.environ.get("EVALUATION_MARK"):
            time.sleep(0.1)
            if batch_index % self.num_batches == 3:
                Path(mark).touch()
        whole = toy_batch(100 + batch_index % self.num_batches, batch=12)
        pixels[...], labels[...] = (each[rows.start : rows.stop] for each in whole)


def everything(number):
    records = []

    class Sink:
        def open(self): ...

        def write(self, record):
            records.append([record.metrics["low"], record.metrics["high"]])

        def write_evaluation(self, record): ...

        def close(self): ...

    def once(sinks=()):
        return train(
            toy_config(steps=8, batch=16, eval_every_steps=4, devices=f"cpu:{number}", **EVERYTHING),
            model=Showing(),
            batches=pairs,
            evaluation=evaluation(),
            metrics=METRICS,
            sinks=sinks,
        )

    result = once([Sink()])
    return {
        "losses": result.losses.tolist(),
        "again": once().losses.tolist() if number > 1 else None,
        "inputs": records,
        "evaluations": [[each.loss, each.top1, each.num_images, *each.metrics.values()] for each in result.evaluations],
        "weights": np.asarray(result.params["weights"]).ravel().tolist(),
        "seen": float(result.batch_stats["batches"]),
    }


def networks(spec):
    # Groups of sixteen are compared in `tests/double_runs.py`.
    norms: dict[str, dict[str, Any]] = {"whole": {"batch_norm_sync": True}, "four": {"batch_norm_group": 4}}
    return {
        name: train(TrainConfig(steps=3, devices=spec, **SETTINGS, **each), model=Normed()).losses.tolist()
        for name, each in norms.items()
    }


def interrupted(spec, folder):
    """A run that a request changes and its source ends, resumed on another number of devices."""

    def failing(step):
        if step == 14:
            raise ConnectionResetError("cut off")
        return toy_batch(step)

    config = {"steps": 10, "accumulate_steps": 2, "devices": spec, "run_dir": str(folder), "snapshot_every_steps": 3}
    try:
        train(toy_config(**config), model=Linear(), batches=failing, evaluation=evaluation(), callbacks=[Steering()])
    except ConnectionResetError as error:
        failure = str(error)
    return {"failure": failure, "files": sorted(path.name for path in Path(folder).iterdir())}


def main(number, folder):
    spec = f"cpu:{number}"
    found = {"everything": everything(number), "networks": networks(spec), "interrupted": interrupted(spec, folder)}
    found["devices"] = [each.platform for each in devices()]
    print(json.dumps(found))


if __name__ == "__main__":
    assert CLASSES
    main(int(sys.argv[1]), sys.argv[2])
