"""The rules of training whose results changed since runs were first recorded.

A run records the number of each such rule that it uses, so that a run of an earlier version is never continued or
replayed by another rule: it is refused by name. A rule that is missing in a record has the number 1.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.data.open_data import RunData, mixes_pairs
from loopfeed.engine.parts import UserParts
from loopfeed.engine.program.train_state import TrainModel, name_of_model
from loopfeed.engine.records.initial_weights import InitialWeights
from loopfeed.models.families.pooled_convnet import PooledConvNet
from loopfeed.models.registry import networks

RULES = "rules"
"""The key of the numbers of a run's rules in the resolved part of `config.json`."""


class ChangedRule(NamedTuple):
    """A rule that changed: its number now, and what it was and is, for the message that refuses earlier runs."""

    number: int
    was: str
    now: str


_CLASSIFIER = "the classifier of initial weights with other classes"
_CHANGED_RULES = {
    "the local rate of lars": ChangedRule(2, "divided by ‖g + λ·w‖", "divides by ‖g‖ + λ·‖w‖"),
    "the gradient of binary-cross-entropy": ChangedRule(
        2, "was off by half at logits of exactly 0", "is the sigmoid less the target everywhere"
    ),
    "the gradient of the global maximum": ChangedRule(
        2, "went to all positions that equal it, of which XLA may find none", "goes to its first position"
    ),
    "the translation of trivialaugment": ChangedRule(
        2, "moved images by 16 pixels at strength 15 of 30", "moves them by 15, as torchvision's"
    ),
    "the translation of randaugment": ChangedRule(
        2, "moved images of a multiple of 331 pixels by a pixel less at this magnitude", "moves them as torchvision's"
    ),
    "the windowed order of images that are mixed": ChangedRule(
        2, "mixed neighbours of one block", "mixes images of different blocks"
    ),
    _CLASSIFIER: ChangedRule(
        2, "kept the rows of the file by their number", "compares the classes by their identifiers"
    ),
}
# Where a share of such a size was a whole number, and rounding passed by it.
_SIDE, _MAGNITUDES = 331, (11, 21, 22)


def rules_of(
    config: TrainConfig, parts: UserParts, model: TrainModel, data: RunData, given: InitialWeights | None = None
) -> dict[str, int]:
    """Return the numbers of the changed rules that a launch uses, by name.

    Args:
        config, parts, model, data: of the launch.
        given: the initial weights that it read, None if it read none.
    """
    used = {
        "the local rate of lars": config.optimizer == "lars" and parts.optimizer is None,
        "the gradient of binary-cross-entropy": config.loss == "binary-cross-entropy",
        "the gradient of the global maximum": (
            parts.model is None and isinstance(networks().get(name_of_model(model)), PooledConvNet)
        ),
        "the translation of trivialaugment": config.auto_augment == "trivialaugment",
        "the translation of randaugment": _has_moved_randaugment(config, data),
        "the windowed order of images that are mixed": (
            config.order == "windowed" and data.location is not None and mixes_pairs(config)
        ),
        _CLASSIFIER: given is not None and given.is_by_identifier,
    }
    return {name: _CHANGED_RULES[name].number for name, is_used in used.items() if is_used}


def _has_moved_randaugment(config: TrainConfig, data: RunData) -> bool:
    source, size = data.source, config.image_size
    sides = (source.height, source.width) if size is None else (size,)
    is_rounded = config.auto_augment_magnitude in _MAGNITUDES and any(side % _SIDE == 0 for side in sides)
    return config.auto_augment == "randaugment" and is_rounded


def check_rules(rules: Mapping[str, int], recorded: Mapping[str, Any]) -> None:
    """Raise ValueError if a run was recorded with another number of a rule that it uses.

    Args:
        rules: those of the launch, as `rules_of` returns them.
        recorded: the resolved part of the run's `config.json`.
    """
    before = recorded.get(RULES, {})
    for name, number in rules.items():
        if before.get(name, 1) != number:
            was, now = _CHANGED_RULES[name][1:]
            raise ValueError(
                f"a resumed or replayed run must keep its rules, but {name} has changed since the version that made "
                f"this run: then it {was}, now it {now}. Start another run from its weights (--init-from with its "
                "model.safetensors), or install that version"
            )
