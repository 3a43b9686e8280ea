"""Compilation of a run's program for an NVIDIA card, without a card.

XLA's compiler for NVIDIA cards is in jax's CUDA plugin; it needs a card's description, but neither a card nor a driver.
It runs in a separate process, because jax looks for a card at import if the plugin is on its path. `CardCompiler`
starts that process, `python -m tests.card_compilation FOLDER`: it reads requests, each a line of JSON, and prints a
line for each. FOLDER holds the plugin.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Self
from unittest import mock

ROOT = Path(__file__).parents[1]
LIMIT_S = 280


class CardCompiler:
    """A process that compiles programs for NVIDIA cards, one after another; each program only once."""

    def __init__(self, folder: Path) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._answers: dict[str, dict[str, Any]] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.card_compilation", str(folder)],
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def compile(self, settings: dict[str, Any], **request: Any) -> dict[str, Any]:
        """Compile a run's program, or return what was compiled before.

        Args:
            settings: those of `TrainConfig`.
            request: the other arguments of `compile_program`.

        Returns:
            The optimised program as "hlo", and the bytes of its temporaries on each card as "temporaries".
        """
        line = json.dumps({"settings": settings} | request, sort_keys=True)
        if line not in self._answers:
            self._answers[line] = self._ask(line)
        return self._answers[line]

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        limit = threading.Timer(LIMIT_S, self._process.kill)
        limit.start()
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        finally:
            limit.cancel()
        self._log.seek(0)
        assert answer, f"{line}: {self._log.read()[-4000:]}"
        found: dict[str, Any] = json.loads(answer)
        return found


class TracedError(Exception):
    """Stops a launch before its program is compiled."""


def traced_program(
    settings: dict[str, Any], cards: Any = None, *, model: Any = None, is_evaluated: bool = True
) -> tuple[Any, Any]:
    """Return the run's whole program as a jitted function, and its arguments; for several cards if they are given.

    For several cards, the crossings are those of one, whose calls XLA compiles without a card; only what the devices
    compute together is that of a run.
    """
    import jax
    import numpy as np

    from loopfeed import TrainConfig, train
    from loopfeed.engine.crossing.choice import choose_transport
    from loopfeed.engine.crossing.devices import Team, choose_team
    from tests.fake_xla import fake_transport

    found: list[Any] = []
    transport, fake = fake_transport()

    def trace_ahead(function: Any, *arguments: Any, donate: Any = (), platform: str) -> NoReturn:
        found.append((jax.jit(function, donate_argnums=donate), arguments))
        raise TracedError

    def on_fake_card(name: Any, platform: str, num_devices: int = 1) -> Any:
        return transport if name == "cuda" else choose_transport(name, platform, num_devices)

    def blank(count: int) -> Any:
        size = settings["image_size"]
        return np.zeros((count, size, size), np.uint32), np.zeros(count, np.int32)

    config = TrainConfig(transport="cuda", kernels="xla", **({"num_classes": 10} | settings))
    with (
        mock.patch("loopfeed.engine.run.compiling.trace_ahead", trace_ahead),
        # The program is lowered after the run, which would let go of its transport.
        mock.patch("loopfeed.engine.run.run.Run.release"),
        mock.patch("loopfeed.engine.crossing.devices.choose_transport", on_fake_card),
        mock.patch(
            "loopfeed.engine.crossing.devices.choose_team",
            choose_team if cards is None else lambda _: Team(cards, cards),
        ),
    ):
        try:
            evaluation = blank(config.batch + 3) if is_evaluated else None
            train(config, model=model, batches=lambda _: blank(config.batch), evaluation=evaluation)
        except TracedError:
            assert fake.violations == []
            assert fake.num_device_blocks == 0
            return found[0]
    raise AssertionError("the run did not reach its program")


def compile_program(
    settings: dict[str, Any],
    *,
    number: int = 1,
    is_evaluated: bool = True,
    stages: list[int] | None = None,
    is_normed: bool = False,
) -> dict[str, Any]:
    """Return the program as XLA optimises it for a number of cards, and the bytes of its temporaries on each of them.

    With `stages`, the registry's network has these numbers of blocks instead of its own. If `is_normed`, the model is
    that of `tests.normed_network`, and not one of the registry.
    """
    from loopfeed.engine.compilation.ahead_of_time import compiler_options
    from loopfeed.engine.replicas import shapes_on
    from loopfeed.engine.sizing.absent_cards import absent_cards, compiling_without_cards
    from loopfeed.engine.sizing.cards import CARDS
    from loopfeed.models.layers.platform_forms import tracing_for
    from loopfeed.models.registry import networks
    from tests.normed_network import Normed

    cards = absent_cards(CARDS["h100"], number, number)
    with ExitStack() as stack:
        if stages is not None:
            known: dict[str, Any] = dict(networks())
            known[settings["model"]] = replace(known[settings["model"]], stages=tuple(stages))
            stack.enter_context(mock.patch("loopfeed.models.registry.networks", return_value=known))
        function, arguments = traced_program(
            settings,
            cards if number > 1 else None,
            model=Normed() if is_normed else None,
            is_evaluated=is_evaluated,
        )
        with tracing_for("cuda"):  # as a run on a card is traced
            lowered = function.lower(*shapes_on(arguments, cards))
    options: dict[str, Any] = compiler_options(lowered, "gpu", deterministic=settings.get("deterministic", True))
    # LLVM's work on each kernel, which comes behind all that is returned here.
    options |= {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    with compiling_without_cards():
        compiled = lowered.compile(compiler_options=options)
    return {"hlo": compiled.as_text(), "temporaries": compiled.memory_analysis().temp_size_in_bytes}


def main(folder: str) -> None:
    """Answer the requests on standard input."""
    sys.path.insert(0, folder)
    for line in sys.stdin:
        print(json.dumps(compile_program(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
