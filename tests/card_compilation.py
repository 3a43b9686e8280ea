"""Compilation of a run's program for an NVIDIA card, without a card.

`python -m tests.card_compilation FOLDER SETTINGS NUMBER [--evaluate] [--memory]` prints the optimised program for
NUMBER cards, or the bytes of its temporaries.

XLA's compiler for NVIDIA cards is in jax's CUDA plugin; it needs a card's description, but neither a card nor a driver.
It runs in a separate process, because jax looks for a card at import if the plugin is on its path.

FOLDER holds the plugin; SETTINGS are those of `TrainConfig`, as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock


class TracedError(Exception):
    """Stops a launch before its program is compiled."""


def traced_program(settings: dict[str, Any], cards: Any = None, *, is_evaluated: bool = True) -> tuple[Any, Any]:
    """Return the run's whole program as a jitted function, and its arguments; for several cards if they are given.

    For several cards, the crossings are those of one, whose calls XLA compiles without a card; only what the devices
    compute together is that of a run.
    """
    import jax
    import numpy as np

    from engine import TrainConfig, train
    from engine.crossing.choice import choose_transport
    from engine.crossing.devices import Team, choose_team
    from tests.fake_xla import fake_transport

    found: list[Any] = []
    transport, fake = fake_transport()

    def trace_ahead(function: Any, *arguments: Any, donate: Any = ()) -> NoReturn:
        found.append((jax.jit(function, donate_argnums=donate), arguments))
        raise TracedError

    def on_fake_card(name: Any, platform: str, num_devices: int = 1) -> Any:
        return transport if name == "cuda" else choose_transport(name, platform, num_devices)

    def blank(count: int) -> Any:
        size = settings["image_size"]
        return np.zeros((count, size, size), np.uint32), np.zeros(count, np.int32)

    config = TrainConfig(transport="cuda", **({"num_classes": 10} | settings))
    with (
        mock.patch("engine.run.launch.trace_ahead", trace_ahead),
        mock.patch("engine.run.host_side.choose_transport", on_fake_card),
        mock.patch("engine.run.host_side.choose_team", choose_team if cards is None else lambda _: Team(cards, cards)),
    ):
        try:
            evaluation = blank(config.batch + 3) if is_evaluated else None
            train(config, batches=lambda _: blank(config.batch), evaluation=evaluation)
        except TracedError:
            assert fake.violations == []
            assert fake.num_device_blocks == 0
            return found[0]
    raise AssertionError("the run did not reach its program")


def main(folder: str, settings: dict[str, Any], number: int, *, is_evaluated: bool, prints_memory: bool) -> None:
    """Print the program as XLA optimises it for the cards, or the bytes of its temporaries on each of them."""
    sys.path.insert(0, folder)
    from engine.replicas import shapes_on
    from engine.run.compilation import compiler_options
    from engine.sizing.absent_cards import absent_cards, compiling_without_cards
    from engine.sizing.cards import CARDS

    cards = absent_cards(CARDS["h100"], number, number)
    function, arguments = traced_program(settings, cards if number > 1 else None, is_evaluated=is_evaluated)
    lowered = function.lower(*shapes_on(arguments, cards))
    options: dict[str, Any] = compiler_options(lowered, "gpu", deterministic=settings.get("deterministic", True))
    with compiling_without_cards():
        compiled = lowered.compile(compiler_options=options)
    print(compiled.memory_analysis().temp_size_in_bytes if prints_memory else compiled.as_text())


if __name__ == "__main__":
    flags = {"is_evaluated": "--evaluate" in sys.argv[4:], "prints_memory": "--memory" in sys.argv[4:]}
    main(str(Path(sys.argv[1])), json.loads(sys.argv[2]), int(sys.argv[3]), **flags)
