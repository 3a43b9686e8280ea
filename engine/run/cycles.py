"""The learning rate of a resumed run: the notice where its schedule is stretched, and the cycle appended to it.

Owns what `append_epochs` makes of the settings. `loopfeed.engine.updates.schedules` owns the schedules themselves.
"""

from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from math import floor, log10
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from loopfeed.engine.config import TrainConfig, describe_value
from loopfeed.engine.run.program_settings import schedule_of
from loopfeed.engine.run.run_stages import rate_factor
from loopfeed.engine.settings import SettingError
from loopfeed.engine.updates.schedules import learning_rate_at
from loopfeed.preprocess.quantities import quantity

_PEAK_DIVISOR = 10.0  # of the peak before, for a cycle without a learning rate of its own
_RISE_SHARE = 0.05  # of a cycle, if the run had no warm-up whose share it could repeat
_OF_THE_SCHEDULE = (
    *("steps", "peak_learning_rate", "warmup_steps", "final_fraction", "schedule_power"),
    *("restart_cycles", "restart_growth"),
)

# One program a schedule, whatever the run.
_rate_at = jax.jit(learning_rate_at, static_argnums=0)


def rate_at(config: TrainConfig, step: int) -> float:
    """Return the learning rate of the schedule at one update; `step` is the number of updates before it."""
    return float(_rate_at(config.schedule, jnp.int32(step), schedule_of(config)))


def _rate_in_stage(config: TrainConfig, step: int) -> float:
    """Return the learning rate of one update, with what its stage changes."""
    if config.stages is None:
        return rate_at(config, step)
    stage = config.stages[config.step_ranges.stage_of(step)]
    peak = stage.settings.get("learning_rate", config.learning_rate)
    return rate_factor(config, stage) * rate_at(replace(config, learning_rate=peak, stages=None), step)


def describe_rate_change(config: TrainConfig, recorded: TrainConfig, step: int, factor: float = 1.0) -> str | None:
    """Return a message that names the learning rate before and after a resume that changes the schedule, else None.

    Args:
        config: the settings of the resumed run, converted to steps, with a ready-made schedule.
        recorded: its settings before.
        step: the updates done.
        factor: the factor on the learning rate that was requested and still applies.
    """
    changed = [name for name in _OF_THE_SCHEDULE if getattr(config, name) != getattr(recorded, name)]
    if not step or not changed:
        return None
    before, planned = _rate_in_stage(recorded, step - 1), _rate_in_stage(recorded, step)
    now = _rate_in_stage(config, step)
    is_appended = config.cycle_start_steps != recorded.cycle_start_steps
    if rate_text(planned) == rate_text(now) and not is_appended:
        return None
    if is_appended:
        way = "rises" if config.peak_learning_rate >= before else "falls"
        length = quantity(config.steps - config.cycle_start_steps, "step")
        peak = rate_text(factor * config.peak_learning_rate)
        was = f"the learning rate was {rate_text(factor * before)} at step {step:,}"
        return f"a cycle of {length} is appended: {was}, and {way} to {peak}"
    if "steps" in changed:
        why = f"the schedule now has {quantity(config.steps, 'step')}"
        if step >= recorded.steps and not _has_rates_of_stages(config):
            why += " (--append-epochs appends a cycle instead)"
    elif "peak_learning_rate" in changed:
        why = f"the peak is now {rate_text(factor * config.peak_learning_rate)}"
    else:
        why = f"{changed[0]} is now {describe_value(getattr(config, changed[0]))}"
    now_text, before_text = rate_text(factor * now), rate_text(factor * before)
    return f"the learning rate goes on at {now_text}; it was {before_text} at step {step:,}, because {why}"


def _has_rates_of_stages(config: TrainConfig) -> bool:
    """Return whether stages have learning rates of their own, to which no cycle can be appended."""
    return any("learning_rate" in stage.settings for stage in config.stages or ())


def rate_text(rate: float) -> str:
    """Return a learning rate with two significant digits, or one beyond the fifth decimal, as a decimal fraction."""
    if not 1e-8 <= rate < 1e8:
        return f"{rate:.2g}"
    exponent = floor(log10(rate))
    return np.format_float_positional(round(rate, min(1 - exponent, max(5, -exponent))), trim="-")


def append_cycle(
    config: TrainConfig,
    recorded: TrainConfig,
    steps_done: int,
    num_images: int | None,
    batches: str,
    notify: Callable[[str], None],
) -> TrainConfig:
    """Return the settings of a resumed run with the cycle that `append_epochs` asks for, or unchanged without it.

    The cycle repeats the schedule of the run on steps of its own, up to `learning_rate` or a tenth of the peak before.
    Its warm-up begins at the run's last learning rate and has the share of the steps that the warm-up had before, or a
    twentieth of them, unless another is given; with one-cycle and no warm-up, the cycle's own rise begins there.

    Asked for again while the cycle goes on, as by a script that is run again, the same cycle goes on.

    Args:
        config: the settings of the launch, not converted to steps yet.
        recorded: the recorded settings of the run.
        steps_done: the updates done.
        num_images: N of the training split; None for an endless source of batches.
        batches: a description of what the run trains on, for messages.
        notify: called with a line of text if the cycle goes on.

    Raises:
        SettingError: the run is not complete, has no epochs, or the length is given in another way too.
    """
    if config.append_epochs is None:
        return config
    if num_images is None:
        raise SettingError(
            "append_epochs",
            "{setting} must not be given with {batches}, which are endless, got {found:g}: give {steps}",
            batches=batches,
            found=config.append_epochs,
        )
    _check_length_is_kept(config, recorded)
    if _has_rates_of_stages(recorded):
        raise SettingError(
            "append_epochs",
            "{setting} appends a cycle of the run's learning rate, but stages of the run have rates of their own, got "
            "{found:g}: give more {steps} to go on in the last stage, or start a run from its weights ({init_from})",
            found=config.append_epochs,
        )
    ranges = recorded.step_ranges

    def in_steps(epochs: float, since: int = 0) -> int:
        """Return the updates after step `since` that take so many passes."""
        return ranges.number_at(ranges.image_at(since) + Fraction(repr(epochs)) * num_images) - since

    if steps_done < recorded.steps:
        return _go_on(config, recorded, steps_done, in_steps(config.append_epochs, recorded.steps), notify)
    steps, epochs = recorded.steps + in_steps(config.append_epochs, recorded.steps), None
    if recorded.epochs is not None:
        # As decimal numbers: the binary fractions of 0.1 and 0.2 have another sum than 0.3.
        epochs = float(Decimal(repr(recorded.epochs)) + Decimal(repr(config.append_epochs)))
        steps = in_steps(epochs)
    if steps <= recorded.steps:
        raise SettingError("append_epochs", "{setting} must be more than 0, got {found:g}", found=config.append_epochs)
    peak = recorded.peak_learning_rate / _PEAK_DIVISOR if config.learning_rate is None else config.learning_rate
    return replace(
        config,
        steps=steps,
        epochs=epochs,
        append_epochs=None,  # done: a launch that resumes from here does not append again
        learning_rate=peak,
        cycle_start_steps=recorded.steps,
        cycle_start_rate=rate_at(recorded, recorded.steps - 1),
        **_warm_up(config, recorded, steps - recorded.steps),
    )


def check_cycle(config: TrainConfig, steps_done: int, *, is_new: bool) -> None:
    """Raise ValueError if a run would begin before the current cycle of its schedule, which does not know what was."""
    if steps_done >= config.cycle_start_steps:
        return
    if is_new:
        raise SettingError(
            "cycle_start_steps",
            "a new run has no appended cycle, got {setting} {found:,}: give 0, and the {steps} and {learning_rate} of "
            "the whole run",
            found=config.cycle_start_steps,
        )
    raise ValueError(
        f"a run with an appended cycle must be resumed from step {config.cycle_start_steps:,}, at which the cycle "
        f"begins, or later, but its newest readable snapshot is of step {steps_done:,}: restore a later one, or start "
        "another run from its weights (--init-from RUN with another --run-dir)"
    )


def _check_length_is_kept(config: TrainConfig, recorded: TrainConfig) -> None:
    """Raise SettingError if the length of the run is given beside that of the cycle."""
    if not _is_kept(config, recorded, "epochs", "steps"):
        name = "steps" if config.epochs is None else "epochs"
        raise SettingError(
            "append_epochs",
            f"{{setting}} and {{{name}}} must not both be given, got {{found:g}} and {{other}}: leave one out",
            found=config.append_epochs,
            other=describe_value(getattr(config, name)),
        )


def _is_kept(config: TrainConfig, recorded: TrainConfig, epochs: str, steps: str) -> bool:
    """Return whether a number of steps, or of epochs in their place, is that of the record."""
    now, before = ((getattr(each, epochs), getattr(each, steps)) for each in (config, recorded))
    # On the command line, the epochs of a record displace its steps, which are then the default.
    is_displaced = now[0] is not None and now[1] == getattr(TrainConfig, steps)
    return now[0] == before[0] and (now[1] == before[1] or is_displaced)


def _go_on(
    config: TrainConfig, recorded: TrainConfig, steps_done: int, length: int, notify: Callable[[str], None]
) -> TrainConfig:
    """Return the settings with which a cycle goes on that was appended by an earlier launch with the same epochs."""
    # A cycle is counted from the beginning of the run, so that it may have a step more or less.
    is_same = recorded.cycle_start_steps and abs(recorded.steps - recorded.cycle_start_steps - length) <= 1
    if not is_same:
        raise SettingError(
            "append_epochs",
            "{setting} needs a complete run, got {found:g} for one with {done:,} of {all:,} steps done: resume it "
            "without {setting} first",
            found=config.append_epochs,
            done=steps_done,
            all=recorded.steps,
        )
    notify(f"the cycle of {config.append_epochs:g} epochs, appended at step {recorded.cycle_start_steps:,}, goes on")
    rate = recorded.learning_rate if config.learning_rate is None else config.learning_rate
    return replace(config, append_epochs=None, learning_rate=rate)


def _warm_up(config: TrainConfig, recorded: TrainConfig, length: int) -> dict[str, Any]:
    """Return the settings of the warm-up of a cycle of `length` steps."""
    if not _is_kept(config, recorded, "warmup_epochs", "warmup_steps"):
        return {}
    share = recorded.warmup_steps / max(recorded.steps - recorded.cycle_start_steps, 1)
    if not share and recorded.schedule == "one-cycle":
        return {}
    return {"warmup_epochs": None, "warmup_steps": max(round((share or _RISE_SHARE) * length), 1)}
