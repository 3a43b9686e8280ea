"""The number by which evaluations are compared: its name and its direction. Must not import jax: commands read logs."""

import re
from typing import NamedTuple

_READY_MADE = {"top1": True, "top5": True, "loss": False}
_OWN = re.compile(r"([A-Za-z_]\w*):(max|min)")


class BestMetric(NamedTuple):
    """A number of an evaluation, and whether larger is better."""

    name: str
    is_larger_better: bool

    @property
    def text(self) -> str:
        """The text that `parse_metric` takes for it."""
        return f"{self.name}:{'max' if self.is_larger_better else 'min'}" if self.is_own else self.name

    @property
    def title(self) -> str:
        """What people are shown of its name."""
        return {"top1": "top-1", "top5": "top-5"}.get(self.name, self.name)

    @property
    def is_accuracy(self) -> bool:
        """Whether it is a fraction of the images, shown in percent."""
        return self.name in ("top1", "top5")

    @property
    def is_own(self) -> bool:
        """Whether it is a user-defined metric."""
        return self.name not in _READY_MADE


def parse_metric(text: str) -> BestMetric:
    """Parse top1, top5, loss, NAME:max or NAME:min.

    Raises:
        ValueError: if the text is anything else.
    """
    if text in _READY_MADE:
        return BestMetric(text, _READY_MADE[text])
    own = _OWN.fullmatch(text)
    if own is None or own[1] in _READY_MADE:
        raise ValueError(
            f"a metric must be top1, top5, loss, or a metric of your own as NAME:max or NAME:min, got {text!r}"
        )
    return BestMetric(own[1], own[2] == "max")
