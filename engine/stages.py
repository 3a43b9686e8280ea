"""Stages of a run: spans of steps, one after the other in one launch, each with other values of some settings.

Owns the form of a stage and the map between steps and images where stages change the batch.
`loopfeed.engine.config` checks the settings of a stage. Must not import jax, so that the commands start fast.
"""

import numbers
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from loopfeed.engine.settings import SettingError, is_number
from loopfeed.preprocess.quantities import quantity

if TYPE_CHECKING:
    from fractions import Fraction

UNTIL, STEP = "until", "until_step"
# Each is compiled, which takes seconds to minutes.
_MOST_STAGES = 32


class Stage:
    """A span of a run's steps, with values of its own for some settings.

    Args:
        until: where the stage ends: a number of steps since the beginning of the run, or of passes over the training
            split, such as "6e". The last stage ends with the run, and needs none.
        settings: the settings that differ from those of the run; `loopfeed.engine.config` says which may.

    Attributes:
        until_step: the step at which it ends, None until it is known.

    Raises:
        SettingError: a stage has no setting of such a name.

    Example:
        >>> Stage(until="6e", image_size=128)
        Stage(until='6e', image_size=128)
    """

    check_names: ClassVar[Callable[[Iterable[str]], None]] = staticmethod(lambda _: None)
    """Raise SettingError for a name that no stage has; from `loopfeed.engine.config`, which builds on this module.

    Without that module, as where a stage is unpickled alone, the settings are checked when they are used.
    """

    def __init__(self, /, *, until: int | str | None = None, until_step: int | None = None, **settings: Any) -> None:
        type(self).check_names(settings)
        self._until, self._until_step, self._settings = until, until_step, tuple(settings.items())

    @property
    def until(self) -> int | str | None:
        """Where the stage ends, as it was given."""
        return self._until

    @property
    def until_step(self) -> int | None:
        """The step at which it ends."""
        return self._until_step

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that differ from those of the run, by name."""
        return dict(self._settings)

    def __eq__(self, other: object) -> bool:
        """Return whether another stage is the same; where it ends may be counted already or not."""
        return isinstance(other, Stage) and (self.until, self.settings) == (other.until, other.settings)

    def __hash__(self) -> int:
        return hash((self.until, *sorted(self.settings)))

    def __repr__(self) -> str:
        given = ({} if self.until is None else {UNTIL: self.until}) | self.settings
        return f"Stage({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def ending(self, until: int | str | None, step: int | None) -> "Stage":
        """Return the stage with another end, and the step at which that is."""
        return Stage(until=until, until_step=step, **self.settings)

    def with_settings(self, settings: Mapping[str, Any]) -> "Stage":
        """Return the stage with other settings."""
        return Stage(until=self.until, until_step=self.until_step, **settings)

    def to_json(self) -> dict[str, Any]:
        """Return the stage as a dictionary of JSON values; what it leaves open is left out."""
        places = {UNTIL: self.until, STEP: self.until_step}
        return {name: value for name, value in places.items() if value is not None} | self.settings


class Stages(tuple[Stage, ...]):
    """The stages of a run, in order. They are equal if they differ only in the end of the last, that of the run.

    Raises:
        SettingError: the values are not stages whose ends are known and increase.
    """

    @classmethod
    def of(cls, value: Any) -> Self:
        """Return the stages that a sequence of stages, or of their dictionaries, stands for."""
        if isinstance(value, str | os.PathLike):
            raise _error("must be a list of stages, got {found!r}: give what read_stages(FILE) returns", value)
        given = list(value) if isinstance(value, Sequence) else None
        if not given or not all(isinstance(each, Stage | Mapping) for each in given):
            raise _error(
                'must be a list of stages, such as [Stage(until="6e", image_size=128), Stage()], got {found!r}', value
            )
        if len(given) > _MOST_STAGES:
            raise _error(f"must be at most {_MOST_STAGES} stages, got {{found}}: give fewer", len(given))
        stages = cls(_stage_of(each, f"stage {number} of {len(given)}") for number, each in enumerate(given, 1))
        for number, each in enumerate(stages, 1):
            stages._check_end(number, each)
        return stages

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stages) and [*self[:-1], self[-1].settings] == [*other[:-1], other[-1].settings]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self[:-1])

    def _check_end(self, number: int, stage: Stage) -> None:
        which = f"stage {number} of {len(self)}"
        if stage.until is None:
            if number < len(self):
                raise _error(
                    f"{which}: only the last stage may leave out where it ends, got {{found!r}}: add until, a number "
                    'of steps or of epochs, such as "6e"',
                    stage,
                )
            if stage.until_step is not None:
                raise _error(f"{which}: until_step is computed from until, got {{found!r}}: leave it out", stage)
            return
        if _steps_of(stage.until) is None and epochs_of(stage.until) is None:
            raise _error(
                f"{which}: until must be a number of steps above 0, or of epochs, got {{found!r}}: give one, such as "
                '500 or "6e"',
                stage.until,
            )


def _stage_of(given: Stage | Mapping[Any, Any], which: str) -> Stage:
    if isinstance(given, Stage):
        return given
    if faults := [name for name in given if not isinstance(name, str)]:
        raise _error("must be given by the names of settings, got {found!r}", faults[0])
    try:
        return Stage(**given)
    except SettingError as fault:
        raise SettingError("stages", "{setting}, {which}: {fault}", which=which, fault=fault) from None


def _error(rule: str, found: Any) -> SettingError:
    separator = "," if rule.startswith("stage ") else ""
    return SettingError("stages", f"{{setting}}{separator} {rule}", found=found)


def _steps_of(until: Any) -> int | None:
    """Return the steps at which a stage ends; None if its end is counted otherwise."""
    return int(until) if is_number(until, numbers.Integral) and 0 < until < 2**31 - 1 else None


def epochs_of(until: Any) -> "Fraction | None":
    """Return the passes that the end of a stage, such as "6e", stands for; None if it is counted otherwise."""
    # Here, because it delays `--help` by 5 ms, which needs no fraction.
    from fractions import Fraction

    match = re.fullmatch(r"([0-9]{1,10}(?:\.[0-9]{1,10})?)e", until) if isinstance(until, str) else None
    return (Fraction(match[1]) or None) if match else None


class StageRange(NamedTuple):
    """The updates of a stage, or its batches.

    Attributes:
        first, stop: their numbers, half-open.
        first_image: the position of the first image.
        size: images of each, over all devices.
    """

    first: int
    stop: int
    first_image: int
    size: int

    @property
    def stop_image(self) -> int:
        """The position behind the last image."""
        return self.image_at(self.stop)

    def image_at(self, number: int) -> int:
        """Return the position of the first image of an update or batch."""
        return self.first_image + (number - self.first) * self.size


class StageRanges(tuple[StageRange, ...]):
    """The ranges of all stages, in order; what is behind the last is like it."""

    @classmethod
    def of(cls, stops: Sequence[int], sizes: Sequence[int]) -> Self:
        """Return the ranges of stages that end at these numbers, with so many images for each number."""
        ranges: list[StageRange] = []
        first = image = 0
        for stop, size in zip(stops, sizes, strict=True):
            ranges.append(StageRange(first, stop, image, size))
            first, image = stop, ranges[-1].stop_image
        return cls(ranges)

    @property
    def largest(self) -> int:
        """The images of the largest update or batch."""
        return max(each.size for each in self)

    def stage_of(self, number: int) -> int:
        """Return the number of the stage, from 0, of an update or batch."""
        return next((index for index, each in enumerate(self[:-1]) if number < each.stop), len(self) - 1)

    def image_at(self, number: int) -> int:
        """Return the position of the first image of an update or batch: how many images come before it."""
        return self[self.stage_of(number)].image_at(number)

    def number_at(self, images: "Fraction | int") -> int:
        """Return how many updates or batches take at least so many images; a part of one counts as one."""
        span = next((each for each in self[:-1] if images <= each.stop_image), self[-1])
        # Of fractions too, the quotient of this division is an exact integer.
        return span.first - int((span.first_image - images) // span.size)


def in_steps(stages: Sequence[Stage]) -> Stages:
    """Return stages whose ends are counted with these ends as numbers of steps."""
    return Stages(each.ending(each.until_step, each.until_step) for each in stages)


def settle_ends(
    stages: Sequence[Stage], num_images: int | None, images_per_step: Sequence[int], batches: str
) -> Stages:
    """Return the stages with the steps at which they end, computed from epochs where these are given.

    Args:
        stages: the stages.
        num_images: N of the training split; None for an endless source of batches.
        images_per_step: of each stage.
        batches: a description of what the run trains on, for messages.

    Raises:
        SettingError: a stage ends before it begins, or counts epochs of an endless source.
    """
    settled: list[Stage] = []
    step = image = 0
    for number, (stage, images) in enumerate(zip(stages, images_per_step, strict=True), 1):
        if stage.until is None:
            settled.append(stage)
            continue
        epochs, steps = epochs_of(stage.until), _steps_of(stage.until)
        if epochs is not None:
            if num_images is None:
                raise _error(
                    f"stage {number}: a number of epochs must not be given with {batches}, which are endless, got "
                    "{found}: give until as a number of steps",
                    stage.until,
                )
            steps = step + ceil((epochs * num_images - image) / images)
        if steps is None or steps <= step:
            raise _error(
                f"stage {number}: until must be more than that of the stage before, {quantity(step, 'step')}, got "
                "{found}" + (f" ({quantity(steps, 'step')})" if epochs is not None and steps else "") + ": give more, "
                "or leave the stage out",
                stage.until,
            )
        step, image = steps, image + (steps - step) * images
        settled.append(stage.ending(stage.until if epochs is not None else steps, steps))
    return Stages(settled)
