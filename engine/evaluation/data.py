"""The images that weights are evaluated on: which split, and whether it belongs to them.

Owns the choice and the checks; knows nothing of models, weights or programs.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from engine.config import TrainConfig
from engine.feed.batches import ArrayBatches, EvaluationArrays, EvaluationSource
from engine.feed.shard_batches import SequentialBatches
from engine.run.data import choose_eval_split, manifest_digest_of
from engine.run.dataset import choose_data, make_demo
from preprocess.shards.classes import ImageClass
from preprocess.shards.location import open_location
from preprocess.shards.manifest import Manifest
from preprocess.shards.reader import list_splits, open_split, read_manifest


@dataclass(frozen=True)
class TrainedOn:
    """What is known of the data that weights were trained on.

    Attributes:
        words: for people.
        manifest_digest, eval_manifest_digest: sha256 of the manifests of the training split and of the split that
            they were evaluated on, None where there was none.
        num_classes: K of the weights, None where nobody knows.
    """

    words: str
    manifest_digest: str | None
    eval_manifest_digest: str | None
    num_classes: int | None


@dataclass(frozen=True)
class EvaluationData:
    """An open evaluation set.

    Attributes:
        source: of its batches.
        words: what it is, for people.
        classes: by label, None where the images are arrays of the user's own.
    """

    source: EvaluationSource
    words: str
    classes: tuple[ImageClass, ...] | None


def open_own(evaluation: EvaluationSource | EvaluationArrays, *, batch: int, num_classes: int | None) -> EvaluationData:
    """Takes the user's own evaluation set: arrays, checked, or a source of batches.

    Raises:
        ValueError: where arrays are not pixels and labels of the classes, or a source has batches of another size.
    """
    if isinstance(evaluation, tuple):
        evaluation = ArrayBatches(*evaluation, batch=batch, num_classes=num_classes)
    return EvaluationData(evaluation, "images of your own", None)


def open_evaluation_split(
    config: TrainConfig, trained_on: TrainedOn, stack: ExitStack, notify: Callable[[str], None]
) -> EvaluationData:
    """Opens the split to evaluate on, as a run with these settings does; `stack` closes it.

    Args:
        config: names data and split, or leaves the choice.
        trained_on: what the weights were trained on; other images are told to `notify`, other classes are an error.
        stack: of what is open.
        notify: told in words what is evaluated on.

    Raises:
        ValueError: where there is no such split, or its classes are not those of the weights.
    """
    data = _choose(config, trained_on, notify)
    name = choose_eval_split(config, data)
    if name is None and (there := list_splits(data)):
        raise ValueError(
            f"the split must be named, since {data} has none of the usual ones to evaluate on: --split, one of "
            f"{', '.join(there)}"
        )
    name = name or config.split  # where there is none at all, opening it says why
    split = stack.enter_context(open_split(data, name))
    is_known = _compare(config, data, trained_on, split.manifest, name, notify)
    _check_num_classes(split.manifest, f"{data}/{name}", trained_on, is_subset_allowed=is_known)
    words = f"{data}/{name}, {split.num_images:,} images"
    return EvaluationData(SequentialBatches(split, batch=config.batch), words, split.manifest.classes)


def _choose(config: TrainConfig, trained_on: TrainedOn, notify: Callable[[str], None]) -> str:
    if config.data is None and (config.synthetic or trained_on.manifest_digest is None):
        raise ValueError(
            f"the images to evaluate on must be named, since the weights were trained on {trained_on.words}: --data DIR"
        )
    choice = choose_data(config.data)
    if choice.is_demo:
        if not trained_on.words.startswith(choice.data):
            raise ValueError(
                f"the images to evaluate on must be named, since {trained_on.words}, is not what is found from here: "
                "--data DIR"
            )
        make_demo(Path(choice.data), notify)
    return choice.data


def _compare(
    config: TrainConfig, data: str, trained_on: TrainedOn, manifest: Manifest, name: str, notify: Callable[[str], None]
) -> bool:
    """Tells whether a split is of the data set of the training, and so has its classes; says so where it is not.

    Raises:
        ValueError: where it is, and has other classes than the training split.
    """
    if trained_on.manifest_digest is None:
        return False
    if manifest_digest_of(manifest) in (trained_on.manifest_digest, trained_on.eval_manifest_digest):
        return True
    trained = read_manifest(open_location(data), config.split) if config.split in list_splits(data) else None
    if trained is None or manifest_digest_of(trained) != trained_on.manifest_digest:
        notify(
            f"warning: {data}/{name} is not known to be of the data that the weights were trained on "
            f"({trained_on.words}): the counts hold for these images, whose classes must be those in the same order"
        )
        return False
    if [each.id for each in trained.classes] != [each.id for each in manifest.classes]:
        raise ValueError(
            f"the split must have the classes of the training split, and {data}/{name} has others than "
            f"{data}/{config.split}: pack both from one source, or name another (--split)"
        )
    return True


def _check_num_classes(manifest: Manifest, where: str, trained_on: TrainedOn, *, is_subset_allowed: bool) -> None:
    found, wanted = manifest.num_classes, trained_on.num_classes
    if wanted is None or found == wanted or (is_subset_allowed and found < wanted):
        return
    raise ValueError(
        f"the data must have the {wanted:,} classes of the weights, and {where} has {found:,}: name the data that "
        "they were trained for (--data)"
    )
