"""The stages of a run in words, and what they need of its data, devices and model, checked before it is compiled."""

from collections.abc import Iterator, Sequence

from loopfeed.engine.config import TrainConfig, check_stages, describe_value, stage_error
from loopfeed.engine.crossing.devices import Team
from loopfeed.engine.data.open_data import RunData, mixes_pairs
from loopfeed.engine.feed.batches import image_shape
from loopfeed.engine.feed.resizable_batches import ResizableBatches
from loopfeed.engine.program.checked_model import CheckedModel, size_refusal
from loopfeed.engine.program.loop import ProgramStage
from loopfeed.engine.program.train_state import TrainState
from loopfeed.engine.settings import SettingError
from loopfeed.engine.stages import Stage
from loopfeed.engine.updates.checks import describe_selection
from loopfeed.engine.updates.update import Weights


def describe_stages(config: TrainConfig) -> Iterator[str]:
    """Yield a line for each stage of a run with stages: its steps, and what it has of its own."""
    for number, (stage, steps) in enumerate(zip(config.stages or (), config.step_ranges, strict=False), 1):
        own = [f"{name} {describe_value(value)}" for name, value in stage.settings.items()]
        if "batch" in stage.settings and "learning_rate" not in stage.settings:
            own.append(f"learning rate × {rate_factor(config, stage):g}, as the batch")
        yield (
            f"stage {number} of {len(config.by_stage)}, steps {steps.first + 1:,} to {steps.stop:,}: "
            f"{', '.join(own) or 'the settings of the run'}"
        )


def rate_factor(config: TrainConfig, stage: Stage) -> float:
    """Return the factor on the schedule's rate in a stage: that of its batch, 1 if it has a rate of its own."""
    settings = stage.settings
    return 1.0 if "learning_rate" in settings else float(settings.get("batch", config.batch)) / config.batch


def size_batches(config: TrainConfig, data: RunData, team: Team) -> None:
    """Give the batches of each stage their size.

    Raises:
        SettingError: the source, the devices or the mixing of images cannot do that.
    """
    if not config.changes_batch:
        return
    if not isinstance(data.source, ResizableBatches):
        why = "the windowed order depends on it" if config.order == "windowed" else "your batches have one size"
        raise SettingError(
            "stages",
            "{setting}: the stages of a run on {data} must have the same batch, because {why}, got {found}: leave "
            "batch out of the stages",
            data=data.description,
            why=why,
            found=sorted({each.batch for each in config.by_stage}),
        )
    check_stages(config, lambda stage: bool(team.rows(stage.batch)))
    for number, (stage, steps) in enumerate(zip(config.by_stage, config.step_ranges, strict=True), 1):
        if steps.first_image % 2 and mixes_pairs(stage):
            raise stage_error(
                number,
                config,
                "images are mixed in pairs, so the stage must begin after an even number of images, got "
                f"{steps.first_image:,}: give even batches before it, or turn mixup and cutmix off",
            )
    data.source.resize_batches(config.batch_ranges)


def describe_selections(config: TrainConfig, shape: TrainState, *, has_user_optimizer: bool) -> str | None:
    """Return a message that says what is frozen, in each stage if they differ; None if nothing is.

    Raises:
        SettingError: a pattern matches nothing, or a stage freezes everything; or stages freeze different parameters
            with a user-defined optimizer, which sees all parameters at once and may count its updates.
    """
    found: list[str | None] = []
    check_stages(config, lambda stage: found.append(describe_selection(stage, shape.params, shape.batch_stats)))
    if len({each.freeze for each in config.by_stage}) == 1:
        return found[0]
    if has_user_optimizer:
        raise SettingError(
            "stages",
            "{setting}: the stages of a run with an optimizer of your own must freeze the same parameters, because it "
            "has one state for all of them, got {found}: freeze them in the run ({freeze}), or choose an {optimizer}",
            found=", ".join(f"stage {number}: {each.freeze}" for number, each in enumerate(config.by_stage, 1)),
        )
    return "; ".join(f"stage {number}: {text or 'nothing is frozen'}" for number, text in enumerate(found, 1))


def check_sizes(
    config: TrainConfig, data: RunData, model: CheckedModel, stages: Sequence[ProgramStage], shape: TrainState
) -> None:
    """Raise SettingError if a stage has images of a size that the data cannot give or the model cannot take."""
    largest, weights = min(image_shape(data.source)), Weights(shape.params, shape.batch_stats)
    largest = largest if config.image_size is None else config.image_size
    for number, (settings, rows) in enumerate(stages, 1):
        size = settings.augmentation.resized_to
        if size is None:
            continue
        if size > largest:
            fault = f"image_size must be at most that of the run, {largest} px, got {size}: choose a smaller one, or "
            raise stage_error(number, config, f"{fault}a larger image_size of the run")
        if (reason := size_refusal(model, weights, size, batch=rows, train=True)) is not None:
            fault = f"image_size must be a size that the model takes, but it does not take {size} px: {reason}. Choose "
            raise stage_error(number, config, f"{fault}another size, or leave it out")
