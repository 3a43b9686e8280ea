"""A run as Python reads it: its losses, evaluations, weights, settings, images and mistakes, also while it trains.

Every answer is read from the folder when it is asked for. Owns no format: what reads each file is elsewhere.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy as np
from numpy.typing import NDArray

from loopfeed.engine.charts.card import html_card, text_card
from loopfeed.engine.charts.figure import Figure
from loopfeed.engine.charts.history import History, data_frame, read_history
from loopfeed.engine.config import TrainConfig
from loopfeed.engine.evaluation.result import EvaluationResult
from loopfeed.engine.evaluation.run import evaluate
from loopfeed.engine.feed.batches import EvaluationArrays, EvaluationSource
from loopfeed.engine.inspection.show_batch import ShownBatch, show_recorded_batch
from loopfeed.engine.named_parts import missing_parts
from loopfeed.engine.objective.losses import Loss
from loopfeed.engine.objective.metrics import Metric, PerExample
from loopfeed.engine.parts import PartArguments
from loopfeed.engine.program.train_state import TrainModel
from loopfeed.engine.records.evaluation_log import describe_evaluations
from loopfeed.engine.records.recorded_run import read_recorded, recorded_user_parts
from loopfeed.engine.records.run_folder import SNAPSHOTS
from loopfeed.engine.records.run_summary import RunState, RunSummary, summarise_run
from loopfeed.engine.records.saved_weights import SavedWeights, weights_as_pytrees
from loopfeed.engine.records.snapshot import snapshot_steps
from loopfeed.engine.records.stored.reading import every_file, local_copy, logs_only, settings_only
from loopfeed.engine.records.trained_run import check_folder, reading_run, run_settings
from loopfeed.engine.stream.sinks import EvaluationRecord
from loopfeed.preprocess.storage_options import is_url

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Mistakes:
    """The images that a run takes for another class, the most confident first.

    Attributes:
        index: int64 [m], the place of each image in the split.
        label: int32 [m], its class.
        predicted: int32 [m], the class that it was taken for.
        probability: float32 [m], the probability of that class.
        loss: float32 [m], the loss of the image.
        names: the name of each image in the pack, None if the images have no names.
        num_images: the number of all images that were evaluated.
    """

    index: NDArray[np.int64]
    label: NDArray[np.int32]
    predicted: NDArray[np.int32]
    probability: NDArray[np.float32]
    loss: NDArray[np.float32]
    names: tuple[str, ...] | None
    num_images: int

    def __len__(self) -> int:
        return len(self.index)

    def __repr__(self) -> str:
        return f"Mistakes({len(self):,} of {self.num_images:,} images)"

    def frame(self) -> "pd.DataFrame":
        """Return them as a data frame of pandas, a row for each image; raises ModuleNotFoundError without pandas."""
        names = ("index", "label", "predicted", "probability", "loss")
        columns = {name: getattr(self, name) for name in names}
        return data_frame(columns | ({} if self.names is None else {"name": list(self.names)}))


class OpenedRun:
    """A run, which may still train: each attribute and method reads what its folder says now.

    Attributes:
        path: the folder or URL.
    """

    def __init__(self, path: str | os.PathLike[str], storage_options: Mapping[str, str] | None = None) -> None:
        self.path = os.fspath(path) if is_url(os.fspath(path)) else str(Path(path).absolute())
        self._options = storage_options

    @property
    def status(self) -> RunState:
        """What the run does, or how it ended (starting, running, done, stopped, failed, killed, damaged, foreign)."""
        return self._summary().state

    @property
    def settings(self) -> TrainConfig:
        """The settings of its last launch, as `run_settings` returns them."""
        return run_settings(self.path, storage_options=self._options)

    @property
    def resolved(self) -> dict[str, Any]:
        """What the settings resolved to, such as the model, the data, the learning rate and the devices."""
        with local_copy(self.path, self._options, settings_only) as folder:
            return read_recorded(folder).resolved

    @property
    def history(self) -> History:
        """All steps and evaluations so far, of all launches."""
        with local_copy(self.path, self._options, logs_only) as folder:
            return read_history(folder)

    @property
    def losses(self) -> NDArray[np.float32]:
        """The loss of every step so far, float32 [n]."""
        return self.history.loss

    @property
    def evaluations(self) -> tuple[EvaluationRecord, ...]:
        """The evaluations so far."""
        return self.history.evaluations

    @property
    def snapshots(self) -> tuple[int, ...]:
        """The steps of the snapshots that are kept, in order."""
        with local_copy(self.path, self._options, every_file) as folder:
            return tuple(snapshot_steps(folder / SNAPSHOTS))

    def weights(
        self, snapshot: int | Literal["best"] | None = None, *, notify: Callable[[str], None] = lambda _: None
    ) -> SavedWeights:
        """Return weights of the run as pytrees of arrays, and check their digest.

        Args:
            snapshot: the step of a snapshot, or "best"; None is the end of the run or, before it, the newest snapshot.
            notify: called with a line about the best snapshot.

        Raises:
            ValueError: there are no such weights, or they have changed since they were written.
        """
        with reading_run(self.path, snapshot, notify, storage_options=self._options) as (found, _):
            return weights_as_pytrees(found.weights, self.path)

    def batch(self, step: int = 1, **parts: Unpack[PartArguments]) -> ShownBatch:
        """Return the batch of a step as the model received it, with its labels; a notebook shows the pictures.

        The data must be where the run found them.

        Args:
            step: the update, from 1.
            parts: your own parts, such as the model, as the run had them.

        Raises:
            ValueError: the run has no such step, or as `show_batch`.
        """
        with local_copy(self.path, self._options, settings_only) as folder:
            recorded = read_recorded(folder)
        needed = [name for name in recorded_user_parts(recorded.resolved) if name in _MAKE_IMAGES]
        if missing := [name for name in needed if parts.get(name) is None]:
            raise missing_parts(self.path, missing, recorded.resolved)
        config = replace(recorded.config_at(step), run_dir=None, **_WITHOUT_A_FOLDER)
        return show_recorded_batch(config, step, recorded.manifest_digest, parts)

    def evaluate(
        self,
        *,
        snapshot: int | Literal["best"] | None = None,
        model: TrainModel | None = None,
        evaluation: EvaluationSource | EvaluationArrays | None = None,
        loss: Loss | None = None,
        metrics: Mapping[str, Metric | PerExample] | None = None,
        predictions: bool = False,
        notify: Callable[[str], None] = lambda _: None,
    ) -> EvaluationResult:
        """Evaluate weights of the run; arguments and errors are those of `loopfeed.evaluate`."""
        return evaluate(
            self.settings,
            model=model,
            evaluation=evaluation,
            loss=loss,
            metrics=metrics,
            snapshot=snapshot,
            predictions=predictions,
            notify=notify,
        )

    def mistakes(
        self,
        *,
        snapshot: int | Literal["best"] | None = None,
        model: TrainModel | None = None,
        evaluation: EvaluationSource | EvaluationArrays | None = None,
        loss: Loss | None = None,
        notify: Callable[[str], None] = lambda _: None,
    ) -> Mistakes:
        """Evaluate weights of the run, and return the images that are taken for another class, with their names.

        Arguments and errors are those of `loopfeed.evaluate`; the labels must be class numbers.
        """
        result = self.evaluate(
            snapshot=snapshot, model=model, evaluation=evaluation, loss=loss, predictions=True, notify=notify
        )
        found = result.predictions
        assert found is not None
        predicted, probability = found.classes[:, 0], found.probabilities[:, 0]
        wrong = np.flatnonzero(predicted != found.labels)
        wrong = wrong[np.argsort(-np.nan_to_num(probability[wrong]), kind="stable")]
        return Mistakes(
            index=wrong if found.images is None else found.images[wrong],
            label=found.labels[wrong],
            predicted=predicted[wrong],
            probability=probability[wrong],
            loss=found.losses[wrong],
            names=None if found.names is None else tuple(found.names[at] for at in wrong.tolist()),
            num_images=len(found.labels),
        )

    def plot(self) -> Figure:
        """Return charts of `history`, which a notebook shows."""
        return self.history.plot()

    def __repr__(self) -> str:
        return text_card(*self._card)

    def _repr_html_(self) -> str:
        """Return the card as a notebook shows it."""
        return html_card(*self._card)

    @property
    def _card(self) -> tuple[str, list[tuple[str, str]]]:
        found = self._summary()
        done = "" if found.step is None else f", step {found.step:,}"
        facts = [("model", str(found.resolved.get("model", "unknown")))]
        facts += [] if found.loss is None else [("loss", f"{found.loss:z.4f}")]
        if evaluations := self.evaluations:
            facts.append(("evaluation", describe_evaluations(evaluations, found.keep_best)))
        facts += [] if found.fault is None else [("fault", found.fault)]
        of_all = "" if found.steps is None or found.step is None else f" of {found.steps:,}"
        return f"run {found.state}{done}{of_all}", [*facts, ("folder", self.path)]

    def _summary(self) -> RunSummary:
        with local_copy(self.path, self._options, _few_files) as folder:
            return summarise_run(folder, time.time(), self.path)


# The parts of a user that determine the images of a step.
_MAKE_IMAGES = ("batches", "indices", "augment")
# What makes a run write, of which nothing concerns its batches.
_WITHOUT_A_FOLDER: dict[str, Any] = {
    "resume": False,
    "overwrite": False,
    "snapshot_every_steps": None,
    "snapshot_every_epochs": None,
    "keep_best": None,
    "tensorboard": False,
}


def _few_files(names: Any) -> list[str]:
    return [name for name in names if "/" not in name and not name.endswith(".safetensors")]


def open_run(run: str | os.PathLike[str], *, storage_options: Mapping[str, str] | None = None) -> OpenedRun:
    """Open a run to read its losses, evaluations, weights, settings, images and mistakes, as arrays.

    A run that still trains can be opened, and read again: everything is read when it is asked for.

    Args:
        run: the folder or URL of a run.
        storage_options: how to reach the store of a URL, see `loopfeed.preprocess.storage_options.STORAGE_OPTIONS`.

    Raises:
        ValueError: it is not the folder of a run.

    Example:
        >>> run = open_run("run")
        >>> run.status, run.losses.shape, run.settings.batch, run.snapshots
        ('done', (20,), 4, (20,))
        >>> run.weights().params["kernel"].shape
        (3, 2)
        >>> run.mistakes(model=model)
        Mistakes(0 of 8 images)
    """
    found = OpenedRun(run, storage_options)
    with local_copy(found.path, storage_options, settings_only) as folder:
        check_folder(folder, found.path)
    return found
