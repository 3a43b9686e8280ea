"""The weights in a snapshot of a run, in the form of a weights file.

Owns which arrays of a training state are the weights. Must not know: programs, data.
"""

from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from loopfeed.engine.images.unpack import LEAST_STD
from loopfeed.engine.records.evaluation_log import EvaluationLog, best_evaluation, compared_by, value_of
from loopfeed.engine.records.folder_state import check_config_digest
from loopfeed.engine.records.recorded_run import RecordedRun, read_recorded, recorded_user_parts
from loopfeed.engine.records.run_folder import CONFIG, EVALUATION_LOG, SNAPSHOTS
from loopfeed.engine.records.snapshot import SnapshotError, UnreadSnapshotError, read_snapshot, snapshot_steps
from loopfeed.engine.records.weights import StoredWeights, Tensors, name_tensors, part_of
from loopfeed.engine.records.weights_metadata import STEPS_DONE, WEIGHTS_METADATA, describe_weights
from loopfeed.engine.updates.update import Weights
from loopfeed.models.registry import build_model

_AVERAGE = "update.average."


def read_snapshot_weights(run: Path, recorded: RecordedRun, step: int | None = None) -> StoredWeights:
    """Read the weights of a snapshot, their moving average if the run keeps one; the metadata have its step.

    Args:
        run: the run folder, whose run may still be in progress.
        recorded: its settings.
        step: the step of the snapshot; None takes the newest one that is readable.

    Raises:
        ValueError: if there is no such snapshot, or it is damaged or belongs to other settings.
    """
    if step is not None:
        return _read(run, recorded, step)
    failure: SnapshotError | None = None
    for newest in reversed(snapshot_steps(run / SNAPSHOTS)):
        try:
            return _read(run, recorded, newest)
        except UnreadSnapshotError:
            raise  # an older one would be evaluated in its place
        except SnapshotError as error:  # damaged, or removed in the meantime by a run in progress
            failure = failure or error
    raise failure or SnapshotError(f"there is no snapshot in {run / SNAPSHOTS}: wait for the first one")


def find_best(run: Path, given: str | None, notify: Callable[[str], None]) -> int:
    """Return the step of the kept snapshot with the best evaluation in `eval.jsonl`.

    Args:
        run: the run folder.
        given: top1, top5, loss, or a metric of your own as NAME:max or NAME:min; None is the run's setting `keep_best`,
            else top1, or the loss if none of them has that.
        notify: called with one line that names the step and the number.

    Raises:
        ValueError: if none of the snapshots was evaluated.
    """
    steps = snapshot_steps(run / SNAPSHOTS)
    evaluations = [each for each in EvaluationLog(run / EVALUATION_LOG).read() if each.step in steps]
    metric = compared_by(evaluations, given or read_recorded(run).config.keep_best)
    best = best_evaluation(evaluations, metric)
    if best is None:
        lacking = f"has {metric.name} in {EVALUATION_LOG}" if evaluations else "was evaluated"
        raise ValueError(
            f"the best snapshot must have been evaluated at its own step, but of those of {run} "
            f"({', '.join(map(str, steps)) or 'none'}) none {lacking}: choose a step "
            "(--snapshot STEP), and evaluate as often as snapshots are taken (--eval-every)"
        )
    notify(f"best snapshot: step {best.step:,}, {metric.name} {value_of(metric, best):g}")
    return best.step


def _read(run: Path, recorded: RecordedRun, step: int) -> StoredWeights:
    snapshot = read_snapshot(run / SNAPSHOTS, step)
    if snapshot.folder is not None:
        by = run / SNAPSHOTS / str(step)
        check_config_digest(run / CONFIG, recorded.digest, recorded.continued, snapshot.folder, by)
    prefix = _AVERAGE if any(name.startswith(_AVERAGE) for name in snapshot.leaves) else ""
    found = {name.removeprefix(prefix): leaf for name, leaf in snapshot.leaves.items() if name.startswith(prefix)}
    tensors: Tensors = {name: leaf for name, leaf in found.items() if part_of(name) is not None}
    if "model" not in recorded_user_parts(recorded.resolved):
        tensors = _with_torchvision_names(recorded, tensors, f"{run / SNAPSHOTS}/{step}")
    return StoredWeights(tensors, {**_metadata(recorded), STEPS_DONE: str(step)})


def _with_torchvision_names(recorded: RecordedRun, leaves: Tensors, where: str) -> Tensors:
    """Rename and arrange the leaves of a registry model as `model.safetensors` has them."""
    name = recorded.resolved["model"]
    resolved = recorded.resolved
    size = recorded.config.image_size or min(resolved["height"], resolved["width"])
    model = build_model(name, num_classes=resolved["num_classes"], image_size=size)
    shapes = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))
    like = dict(zip(("params", "batch_stats"), shapes, strict=True))
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]
    if missing := [each for each in names if each not in leaves]:
        raise SnapshotError(f"{where} must contain the weights of {name}, but lacks {missing[0]}: choose another run")
    placed = jax.tree.unflatten(structure, [leaves[each] for each in names])
    weights = Weights(placed["params"], placed["batch_stats"])
    return name_tensors(name, weights.params, weights.batch_stats)


def _metadata(recorded: RecordedRun) -> dict[str, str]:
    """Return the metadata that the run records for its weights; those of an older run lack the classes."""
    resolved = recorded.resolved
    if WEIGHTS_METADATA in resolved:
        return dict(resolved[WEIGHTS_METADATA])
    size = recorded.config.image_size
    return describe_weights(
        model=resolved["model"],
        height=size or resolved["height"],
        width=size or resolved["width"],
        mean=resolved["mean"],
        std=np.maximum(resolved["std"], LEAST_STD).tolist(),
        num_classes=resolved["num_classes"],
    )
