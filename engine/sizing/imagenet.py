"""ImageNet-1k, for which synthetic batches stand in a plan: its number of images, and an evaluation of its size."""

from collections.abc import Callable
from dataclasses import replace

from loopfeed.engine.config import COUNTED_IN_EPOCHS, SYNTHETIC_IMAGE_SIZE, TrainConfig
from loopfeed.engine.feed.batches import Labels, Pixels
from loopfeed.engine.run.epochs import settle_epochs, settle_evaluations
from loopfeed.engine.run.parts import OwnParts
from loopfeed.engine.sizing.volumes import IMAGENET_TRAIN, IMAGENET_VAL


def stand_for_imagenet(
    config: TrainConfig, parts: OwnParts, notify: Callable[[str], None]
) -> tuple[TrainConfig, OwnParts]:
    """Return a run on synthetic batches as if they were ImageNet-1k; a run on other data is returned as it is.

    Its epochs and its default cadence of evaluations are those of ImageNet-1k, and it evaluates as many images, which
    are black.
    """
    if not config.synthetic:
        return config, parts
    if parts.evaluation is None and config.eval_split != "off":
        parts = replace(parts, evaluation=BlackImages(config))
    config = settle_epochs(config, IMAGENET_TRAIN, notify=notify)
    config = settle_evaluations(config, IMAGENET_TRAIN, is_evaluated=parts.evaluation is not None)
    return TrainConfig.from_json(config.to_json() | {epochs: None for epochs, _ in COUNTED_IN_EPOCHS}), parts


class BlackImages:
    """An evaluation of as many black images as ImageNet-1k has for validation."""

    thread_safe = True

    def __init__(self, config: TrainConfig) -> None:
        self.batch = config.batch
        self.height = self.width = config.image_size or SYNTHETIC_IMAGE_SIZE
        self.num_batches = -(-IMAGENET_VAL // config.batch)

    def fill(self, batch_index: int, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:  # noqa: ARG002
        """Write zeros."""
        pixels[...], labels[...] = 0, 0
