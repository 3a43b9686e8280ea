"""Conversion of epochs (passes over the training split) to steps (updates), and cadences that the settings leave open.

Counts a run in images, as `loopfeed.engine.stages` does for stages; everything after it reads `steps`, `warmup_steps`
and the like. A snapshot changes no bit of the training, so why it was taken need not be recorded. Needs no jax.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction
from math import ceil

from loopfeed.engine.config import COUNTED_IN_EPOCHS, MOST_EVALUATIONS, SETTINGS, TrainConfig
from loopfeed.engine.control.request import ControlEvent
from loopfeed.engine.settings import SettingError
from loopfeed.engine.stages import settle_ends
from loopfeed.preprocess.quantities import quantity

_UNCOUNTED = TrainConfig()
# Counted by the batches of the stages, since the beginning of the cycle; a cadence is one number of steps.
_FROM_THE_START = ("epochs", "warmup_epochs")
# More than any recipe has: whoever gives so many steps may have thought of epochs, or of a larger data set.
_MANY_EPOCHS = 300


def settle_epochs(
    config: TrainConfig, num_images: int | None, batches: str = "", notify: Callable[[str], None] = lambda _: None
) -> TrainConfig:
    """Return the settings with each number of steps computed from the epochs that are given in its place.

    The epochs are kept, so that a second conversion changes nothing.

    Args:
        config: the settings.
        num_images: N of the training split; None for an endless source of batches.
        batches: a description of what the run trains on, for messages.
        notify: called with a line of text about the number of steps.

    Raises:
        ValueError: epochs are given for an endless source of batches, or together with a different number of steps, or
            they are more steps than a run may have.
    """
    config = _settle_stages(config, num_images, batches)
    given = [(epochs, steps) for epochs, steps in COUNTED_IN_EPOCHS if getattr(config, epochs) is not None]
    if config.epochs is None and num_images is not None and not config.resume:
        _notify_of_many_epochs(config, num_images, notify)
    if not given:
        return _with_checked_end(config)
    if num_images is None:
        name, counted = given[0]
        raise SettingError(
            name,
            f"a number of epochs must not be given with {batches}, which are endless, got {{setting}} {{found:g}}: "
            f"give {{{counted}}} as a number of steps",
            found=getattr(config, name),
        )
    counts = {counted: _settled_count(config, name, counted, num_images) for name, counted in given}
    settled = TrainConfig.from_json(config.to_json() | counts)
    if settled != config:
        _notify_of_length(settled, num_images, notify)
    return _with_checked_end(settled)


def _settle_stages(config: TrainConfig, num_images: int | None, batches: str) -> TrainConfig:
    """Return the settings with the end of each stage counted in steps."""
    if config.stages is None:
        return config
    images_per_step = [each.images_per_step for each in config.by_stage]
    return replace(config, stages=settle_ends(config.stages, num_images, images_per_step, batches))


def _with_checked_end(config: TrainConfig) -> TrainConfig:
    """Return the settings of stages that end before the run; the end of the last, if given, is that of the run.

    Raises:
        SettingError: a stage does not end before the run, or the last one does not end with it.
    """
    if not config.stages or not config.steps:
        return config
    *before, last = config.stages
    if last.until_step is not None:
        if config.epochs is None and config.steps == _UNCOUNTED.steps:
            config = replace(config, steps=last.until_step)
        # A run that is resumed with more steps goes on in its last stage.
        elif config.steps != last.until_step and not config.resume:
            raise SettingError(
                "stages",
                "{setting}: the last stage must end with the run, at step {end:,}, got step {last:,}: leave its until "
                "out",
                end=config.steps,
                last=last.until_step,
            )
        config = replace(config, stages=[*before, last.ending(None, None)])
    for number, stage in enumerate(before, 1):
        if stage.until_step is not None and stage.until_step >= config.steps:
            raise SettingError(
                "stages",
                "{setting}: stage {number} must end before the run, at step {end:,}, got step {until:,}: "
                + ("" if config.resume else "let it end earlier (until), or ")
                + ("give more {epochs}" if config.epochs is not None else "give more {steps}"),
                number=number,
                end=config.steps,
                until=stage.until_step,
            )
    return config


def settle_evaluations(config: TrainConfig, num_images: int | None, *, is_evaluated: bool) -> TrainConfig:
    """Return the settings with a cadence of evaluations: if none is given, an epoch, or more for `MOST_EVALUATIONS`.

    It depends only on the settings and on N, so that equal runs are evaluated at equal steps; and it is recorded, so
    that a run that is resumed with more steps keeps it. It is recorded as steps, because epochs would have to be taken
    back by whoever chooses other steps from the record.

    Args:
        config: the settings, converted by `settle_epochs`.
        num_images: N of the training split; None for an endless source of batches, with which runs are evaluated only
            at the end.
        is_evaluated: whether there are images to evaluate on, and a run folder to record the evaluations in or a rule
            that compares them.
    """
    if config.eval_every_steps is not None or num_images is None or not is_evaluated:
        return config
    epochs = _epochs_between_evaluations(config, num_images)
    every = steps_of_epochs(epochs, num_images=num_images, images_per_step=config.images_per_step)
    if every > SETTINGS["eval_every_steps"].largest:
        return config  # the run ends before
    return replace(config, eval_every_steps=every)


def _epochs_between_evaluations(config: TrainConfig, num_images: int) -> float:
    """Return the least whole number of epochs that makes at most `MOST_EVALUATIONS` evaluations."""
    # As many epochs as have at least `fewest` steps, where a part of a step counts as one.
    fewest = ceil(config.steps / MOST_EVALUATIONS)
    return float(max((fewest - 1) * config.images_per_step // num_images + 1, 1))


def describe_cadence(
    config: TrainConfig, given: TrainConfig, num_images: int | None, *, is_evaluated: bool, has_folder: bool
) -> str | None:
    """Return a message that names the cadences that were computed or are kept by the clock, or None if there are none.

    Args:
        config: the settings, converted by `settle_epochs` and `settle_evaluations`.
        given: the settings before they were converted.
        num_images: N of the training split; None for an endless source of batches.
        is_evaluated: whether there are images to evaluate on.
        has_folder: whether there is a run folder, and so snapshots.
    """
    cadences, epochs = [], config.eval_every_epochs
    if epochs is None and given.eval_every_steps is None and num_images is not None:
        epochs = _epochs_between_evaluations(config, num_images)
    if epochs is not None and config.eval_every_steps and is_evaluated:
        cadences.append(f"an evaluation {_describe_epochs(epochs, config.eval_every_steps, config)}")
    elif given.resume and config.eval_every_steps and is_evaluated:
        cadences.append(f"an evaluation every {quantity(config.eval_every_steps, 'step')}")
    if has_folder and config.snapshot_every_epochs is not None and config.snapshot_every_steps:
        every = _describe_epochs(config.snapshot_every_epochs, config.snapshot_every_steps, config)
        cadences.append(f"a snapshot {every}")
    elif has_folder and config.snapshot_every_steps is None:
        best = " after each evaluation that is the best so far, and" if config.keeps_best_evaluation else ""
        cadences.append(f"a snapshot{best} every {MINUTES_BETWEEN_SNAPSHOTS} minutes")
    return f"cadence: {', '.join(cadences)}" if cadences else None


def _describe_epochs(epochs: float, steps: int, config: TrainConfig) -> str:
    counted = f", counted in batches of {config.batch:,}" if config.changes_batch else ""
    return f"every {'epoch' if epochs == 1 else f'{epochs:g} epochs'} ({quantity(steps, 'step')}{counted})"


def steps_of_epochs(epochs: float, *, num_images: int, images_per_step: int) -> int:
    """Return the number of updates in `epochs` passes over the training split; a final partial update counts as one.

    `epochs` is used as the decimal number that it prints as: 0.1 of 1,000 images are 100. The binary fraction is
    slightly more, and would take another step.
    """
    return ceil(Fraction(repr(epochs)) * num_images / images_per_step)


def _notify_of_length(settled: TrainConfig, num_images: int, notify: Callable[[str], None]) -> None:
    if settled.epochs is not None:
        steps = quantity(settled.steps, "step")
        notify(f"epochs: {settled.epochs:g} of {quantity(num_images, 'image')} each, {steps} in total")


def _notify_of_many_epochs(config: TrainConfig, num_images: int, notify: Callable[[str], None]) -> None:
    epochs = config.step_ranges.image_at(config.steps) / num_images
    if epochs > _MANY_EPOCHS:
        given = f"{quantity(config.steps, 'step')} of {quantity(config.images_per_step, 'image')}"
        notify(f"steps: {given} are {epochs:,.0f} epochs of the {num_images:,}; --epochs counts in epochs")


def _settled_count(config: TrainConfig, name: str, counted: str, num_images: int) -> int:
    epochs, count = getattr(config, name), getattr(config, counted)
    if name in _FROM_THE_START:
        ranges, since = config.step_ranges, config.cycle_start_steps if name == "warmup_epochs" else 0
        settled = ranges.number_at(ranges.image_at(since) + Fraction(repr(epochs)) * num_images) - since
    else:
        settled = steps_of_epochs(epochs, num_images=num_images, images_per_step=config.images_per_step)
    if settled > SETTINGS[counted].largest:
        raise SettingError(
            name,
            "{setting} must be at most {most} steps, got {found:g}, which is {settled} steps for {num_images:,} images"
            ": give fewer epochs",
            most=SETTINGS[counted].largest,
            found=epochs,
            num_images=num_images,
            settled=settled,
        )
    if count not in (getattr(_UNCOUNTED, counted), settled):
        raise SettingError(
            name,
            f"{{{name}}} and {{{counted}}} must not both be given, got {{found:g}} ({{settled}} steps "
            "for {num_images:,} images) and {count}: leave one out",
            found=epochs,
            num_images=num_images,
            settled=settled,
            count=count,
        )
    return settled


MINUTES_BETWEEN_SNAPSHOTS = 10
_INTERVAL_S = 60.0 * MINUTES_BETWEEN_SNAPSHOTS
_LARGEST_SHARE = 1 / 20  # of the time, for snapshots


class SnapshotChoice:
    """Chooses the snapshots of a launch beyond those at the steps that the settings give.

    Without steps between snapshots, the next one is due ten minutes after the one before, and after one that took t
    seconds not within 20 t seconds: snapshots take at most a twentieth of the time. With `keep_best` alone, the program
    pushes one after each evaluation too, and it is written if that evaluation is the best so far.

    Args:
        config: the settings.
        events: requests of earlier launches, which take effect again.
        is_best: whether a snapshot of a step would be the best of all.
        copied_s: the seconds that the program has spent on copies of its state so far.
        clock: returns seconds that never go back.
    """

    def __init__(
        self,
        config: TrainConfig,
        events: Iterable[ControlEvent],
        is_best: Callable[[int], bool],
        copied_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._is_best, self._copied_s, self._clock = config, is_best, copied_s, clock
        self._due_s, self._copied_before_s = math.inf, 0.0
        self._wanted_steps: set[int] = set()
        for event in events:
            self.note_event(event)

    def start(self) -> None:
        """Begin to count the time: the program is about to run."""
        self._due_s = self._clock() + _INTERVAL_S

    def is_due(self, step: int) -> bool:
        """Return whether the time has come for a snapshot, which will be of this step; then, none until one `ended`."""
        if self._config.snapshot_every_steps is not None or self._clock() < self._due_s:
            return False
        self._due_s = math.inf
        self._wanted_steps.add(step)
        return True

    def note_event(self, event: ControlEvent) -> None:
        """Note a request that takes effect."""
        if event.snapshot:
            self._wanted_steps.add(event.step)

    def is_written(self, step: int) -> bool:
        """Return whether the snapshot of this step, which the program has pushed, is to be written."""
        is_wanted = not self._config.keeps_best_evaluation or step in self._wanted_steps
        return is_wanted or self._is_best(step)

    def ended(self, write_s: float) -> None:
        """Note that the disk was busy with a snapshot for so long, successfully or not; may be called on any thread."""
        copied_s = self._copied_s()
        took_s, self._copied_before_s = write_s + copied_s - self._copied_before_s, copied_s
        self._due_s = self._clock() + max(_INTERVAL_S, took_s / _LARGEST_SHARE)
