"""Training in one call: `train`, and `plan_run`, which only compiles."""

from collections.abc import Callable, Mapping, Sequence
from typing import Unpack

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.run.callbacks import Callback, as_callbacks
from loopfeed.engine.run.open_run import open_run
from loopfeed.engine.run.parts import PartArguments, take_parts
from loopfeed.engine.run.result import DryRun, TrainResult
from loopfeed.engine.stream.function_sink import RecordFunction, as_sinks
from loopfeed.engine.stream.sinks import Sink


def train(
    config: TrainConfig,
    *,
    sinks: Sequence[Sink | RecordFunction] = (),
    notify: Callable[[str], None] = lambda _: None,
    origins: Mapping[str, str] | None = None,
    callbacks: Sequence[Callback | RecordFunction] = (),
    **parts: Unpack[PartArguments],
) -> TrainResult:
    """Train a model in one compiled program.

    Args:
        config: the settings.
        model: a user-defined model instead of one of the registry: `init(key)` returns (params, batch_stats), and
            `apply(params, batch_stats, images, train=True)` returns (logits [B, K], new batch_stats) for float32 images
            [B, H, W, 3]. Convolutions of `loopfeed.models.layers.convolution` stay fast inside the loop on a CPU. If
            `apply` has a parameter `key`, it gets PRNG keys [B] in training, one per image by (seed, position),
            otherwise None.
        batches: user-defined batches instead of a packed data set: a function from the step (from 0) to (uint32
            [B, H, W] packed pixels, integer [B] labels), called in order from one thread; or a `BatchSource`. A
            function of (step, rows) returns only these rows, a range; of several processes, each asks for its own. A
            resumed run asks only for the remaining steps. The cross entropy also takes target distributions, float
            [B, K]; every other loss takes labels that are any pytree of arrays [B, …] of fixed shapes and dtypes.
        evaluation: user-defined evaluation images instead of a split of the data set: a tuple of all of them (uint32
            [N, H, W] packed pixels, integer [N] labels, or labels as those of `batches`), or an `EvaluationSource`.
        loss: a user-defined loss instead of that of the setting `loss`: (outputs of the model, labels, float32 [B]
            weights) → float [B], the loss of each example; see `loopfeed.engine.objective.losses`.
        metrics: user-defined metrics by name: a `Metric`, or a function (outputs, labels) → [B] whose mean is taken.
            They are computed in every step and evaluation; numbers appear in the logs, arrays only in `eval.jsonl`.
        optimizer: a user-defined optimizer instead of that of the setting `optimizer`: an optax transformation with its
            own learning rate, or a function from a learning rate (float32 [], traced) to a transformation, such as
            `optax.adabelief`, which receives that of the schedule. The learning-rate factor of `control-run` applies
            to both. Clipping, accumulation, averages and skipped updates are unchanged.
        schedule: a user-defined schedule instead of that of the setting `schedule`: a traceable function from the
            number of updates before this one (int32 []) to the learning rate, such as an optax schedule.
        augment: a user-defined augmentation, applied to training batches after those of the settings: (float32
            [B, H, W, 3] normalised images, [B] PRNG keys by position) → images of the same shape and dtype.
        sinks: additional sinks of the loss stream, each with a thread of its own; or functions, called with each
            `LossRecord` and `EvaluationRecord`.
        notify: called with a line of text about what the run does before its first step, and about what is unusual
            later, such as a request or a snapshot that is skipped.
        origins: where settings came from, by name, for `config.json`; None distinguishes only defaults from others.
        callbacks: called in order on one thread of their own, each an `loopfeed.Callback` or a function of each record;
            they may ask for snapshots, evaluations, another learning rate and the end of the run.

    Returns:
        The trained model and its losses. If the caller is the main thread, SIGINT, SIGTERM and SIGHUP (unless ignored)
        stop the run at the next step and are named in `stopped_by`; a second signal raises KeyboardInterrupt.

    Raises:
        ValueError: the settings do not fit each other, the data or the resumed run; raised before any step.
        BaseException: the error of the batch source, a sink or a callback during the run, raised after the loop has
            ended cleanly and the weights trained so far are in the run folder.

    Example:
        >>> config = TrainConfig(data="data", steps=20, batch=4, learning_rate=1, run_dir="run")
        >>> result = train(config, model=model)
        >>> round(float(result.losses[0]), 4)  # ln 2: all weights of the example of `Model` are 0
        0.6931
        >>> result.evaluations[-1].top1
        1.0
    """
    own_sinks, own_callbacks = as_sinks(sinks), as_callbacks(callbacks)
    with open_run(config, take_parts(parts), notify) as run:
        return run.train(own_sinks, origins, own_callbacks)


def plan_run(
    config: TrainConfig,
    *,
    notify: Callable[[str], None] = lambda _: None,
    **parts: Unpack[PartArguments],
) -> DryRun:
    """Resolve and compile what `train` would run or resume, without running it.

    The arguments and errors are those of `train`.
    """
    with open_run(config, take_parts(parts), notify, is_dry=True) as run:
        return run.plan()
