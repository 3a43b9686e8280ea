"""Training on several devices of the processor, in one process or several, on batches that are always ready."""

import socket
import subprocess
import sys
from typing import Any

from gated_training import LONG_S, serve_training
from protocol import Channel
from pulls import ReadyBatches
from small_perceptron import Perceptron

from loopfeed import TrainConfig, join_processes, train

_MOST_STEPS = 2**31 - 2


def main(model: str, size: int, batch: int, num_processes: int, num_devices: int, place: str = "") -> None:
    """Serve `batch` images a step; `place` is PORT:NUMBER in the processes that this one starts."""
    source, own = ReadyBatches(batch, size), Perceptron(size, 64) if model == "perceptron" else None
    config: dict[str, Any] = {"num_classes": 10, "model": "auto" if own else model}
    if num_devices > 1:
        config["devices"] = f"cpu:{num_devices}"
    if place:
        port, _, number = place.partition(":")
        join_processes(f"localhost:{port}", num_processes, int(number), peer_timeout_s=LONG_S)
        # Waits in the reductions for the first process, which the benchmark holds back.
        settings = TrainConfig(
            steps=_MOST_STEPS, batch=batch, learning_rate=1e-3, infeed_timeout_s=LONG_S, eval_split="off", **config
        )
        train(settings, batches=source, model=own)
        return
    channel = Channel()
    if num_processes > 1:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = str(free.getsockname()[1])
        arguments = [model, str(size), str(batch), str(num_processes), str(num_devices)]
        for other in range(1, num_processes):
            subprocess.Popen([sys.executable, __file__, *arguments, f"{port}:{other}"], stdout=sys.stderr)
        join_processes(f"localhost:{port}", num_processes, 0, peer_timeout_s=LONG_S)
    serve_training(channel, config, source, amount=batch, model=own)


if __name__ == "__main__":
    model_name, *numbers = sys.argv[1:6]
    side, images, processes, devices = map(int, numbers)
    main(model_name, side, images, processes, devices, *sys.argv[6:])
