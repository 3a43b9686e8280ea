"""Runs that record every call to the host of the first device, and the order that a plain loop would have.

    python -m tests.crossing_order NUMBER FOLDER

Runs on NUMBER devices, with the run folder FOLDER, and prints the order as one line of JSON.
"""

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from loopfeed import Metric, train
from loopfeed.engine.crossing.cuda.infeed import StreamedInfeed
from loopfeed.engine.crossing.infeed import Infeed
from loopfeed.engine.crossing.pushed import PushedLosses
from loopfeed.engine.stream.loss_stream import LossStream
from tests.toy import BATCH, Linear, toy_batch, toy_config

STEPS, EVAL_BATCHES, CHUNK = 12, 2, 4
CADENCES = {"eval_every_steps": 3, "snapshot_every_steps": 2, "histogram_every_steps": 6, "log_images_every_steps": 4}
EVALUATED = toy_batch(100, batch=EVAL_BATCHES * BATCH)


def _finish_slowly(state):
    """Return the state after products of matrices, which take longer than all that the program does beside them."""

    def turn(_, table):
        return jnp.tanh(table @ table + state)

    return state + 0 * jax.lax.fori_loop(0, 200, turn, jnp.full((96, 96), 1e-3)).sum()


METRICS = {
    "slow": Metric(
        init=lambda: jnp.zeros((), jnp.float32),
        update=lambda state, logits, labels, weights: state + (weights * logits[:, 0]).sum(),
        merge=jnp.add,
        finish=_finish_slowly,
    )
}


def recorded_order(run_dir: Path, **values: Any) -> list[list[Any]]:
    """Train, and return each pull and each push in the order in which they reached the host."""
    found: list[list[Any]] = []

    def recording(answer: Any) -> Any:
        def pull(infeed: Any, operands: Any, results: Any) -> None:
            batch_index, shard, _ = operands[0].tolist()
            if shard == 0:
                found.append(["pull" if infeed._times_waits else "evaluation pull", batch_index])
            answer(infeed, operands, results)

        return pull

    def receive(stream: LossStream, pushed: Any) -> None:
        if isinstance(pushed, PushedLosses):
            found.extend(["loss", pushed.first_step + number] for number in range(len(pushed.losses)))
        else:
            found.append([type(pushed).__name__, pushed.step])
        receive_before(stream, pushed)

    receive_before = LossStream.receive
    config = toy_config(**{"steps": STEPS, "run_dir": run_dir, "keep_snapshots": 0}, **CADENCES, **values)
    with ExitStack() as patches:
        for infeed in (Infeed, StreamedInfeed):
            patches.enter_context(mock.patch.object(infeed, "_answer", recording(infeed._answer)))
        patches.enter_context(mock.patch.object(LossStream, "receive", receive))
        train(config, model=Linear(), batches=toy_batch, evaluation=EVALUATED, metrics=METRICS)
    return found


def expected_order(chunk: int) -> list[list[Any]]:
    """Return the order of a loop in plain Python."""
    order: list[list[Any]] = []
    step = num_evaluations = 0
    while step < STEPS:
        boundary = min(STEPS, *(step + every - step % every for every in CADENCES.values()))
        while step < boundary:
            order.append(["pull", step])
            taken = min(chunk, boundary - step)
            order += [["loss", step + number + 1] for number in range(taken)]
            step += taken
        if step % CADENCES["histogram_every_steps"] == 0:
            order.append(["PushedHistograms", step])
        if step % CADENCES["log_images_every_steps"] == 0:
            order.append(["PushedImages", step])
        if step % CADENCES["eval_every_steps"] == 0 or step == STEPS:
            order += [["evaluation pull", num_evaluations * EVAL_BATCHES + number] for number in range(EVAL_BATCHES)]
            order.append(["PushedEvaluation", step])
            num_evaluations += 1
        if step % CADENCES["snapshot_every_steps"] == 0 and step < STEPS:
            order.append(["PushedSnapshot", step])
    return order


def main(number: int, folder: Path) -> None:
    print(json.dumps(recorded_order(folder, devices=f"cpu:{number}", chunk_batches=CHUNK)))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
