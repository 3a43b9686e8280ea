"""Answers a request of `loopfeed.engine.sizing.absent_cards`: compiles a program for GPUs that are not here."""

import json
import sys
from pathlib import Path

from loopfeed.engine.commands.child_program import child_program

PROGRAM = child_program("loopfeed.engine.commands.compile_for_cards", "answer_request", "answer_request(*sys.argv[1:])")
"""The program of the process that compiles."""


def answer_request(request_file: str, answer_file: str) -> None:
    """Compile what a file asks for, and write XLA's analysis, or why the run is refused, to another file."""
    asked = json.loads(Path(request_file).read_text(encoding="utf-8"))
    if (folder := asked.pop("compiler")) not in sys.path:
        # Before jax is imported, which looks for its plugins then.
        sys.path.insert(0, folder)
    try:
        answer = _compile(**asked)
    except ValueError as error:
        answer = {"refused": str(error)}
    Path(answer_file).write_text(json.dumps(answer), encoding="utf-8")


def _compile(
    settings: dict[str, object], parts: dict[str, str], card: str, num_devices: int, devices_per_host: int
) -> dict[str, object]:
    from loopfeed.engine.commands.user_parts import load_user_parts
    from loopfeed.engine.config import TrainConfig
    from loopfeed.engine.run.compiling import plan_program
    from loopfeed.engine.run.train import set_up_run
    from loopfeed.engine.sizing.absent_cards import absent_cards, card_placement, compiling_without_cards
    from loopfeed.engine.sizing.cards import CARDS
    from loopfeed.engine.sizing.planning import stand_for_imagenet

    config = TrainConfig.from_json(settings)
    devices = absent_cards(CARDS[card], num_devices, devices_per_host)
    placement = card_placement(devices, devices_per_host)
    config, loaded = stand_for_imagenet(config, load_user_parts(parts), lambda _: None)
    with (
        set_up_run(config, loaded, lambda _: None, is_dry=True, placement=placement) as run,
        compiling_without_cards(),
    ):
        compiled = plan_program(run).compiled
    return {"memory_bytes": compiled.memory_bytes, "step_flops": compiled.step_flops}
