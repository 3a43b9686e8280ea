"""Checks of user-defined optimizers and schedules against the settings, and of patterns against the parameters."""

import difflib
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from loopfeed.engine.config import SETTINGS, TrainConfig
from loopfeed.engine.patterns import parse_freeze, parse_groups
from loopfeed.engine.settings import SettingError
from loopfeed.engine.updates.schedules import Schedule
from loopfeed.engine.updates.selection import dotted_paths, matches, split_frozen
from loopfeed.engine.updates.settings import CompiledSettings
from loopfeed.engine.updates.user_optimizer import UserOptimizer, check_rate_not_stored, first_line, has_user_rate

_OF_THE_OPTIMIZER = ("optimizer", "momentum", "beta2", "weight_decay", "decay_all", "cycle_momentum")
_OF_THE_SCHEDULE = (
    *("schedule", "learning_rate", "warmup_steps", "warmup_epochs"),
    *("final_fraction", "schedule_power", "restart_cycles", "restart_growth", "append_epochs"),
)
_MOST_NAMED = 3


def check_updates(config: TrainConfig, optimizer: UserOptimizer | None, schedule: Schedule | None) -> None:
    """Check the settings of the updates, and the user-defined optimizer and schedule, before anything is opened.

    Raises:
        ValueError: a user-defined part has the wrong type or makes a setting meaningless.
    """
    if config.clip_order != "2" and config.clip_norm is None:
        raise SettingError(
            "clip_order",
            "{setting} is the order of the norm that {clip_norm} limits, got {found} without a limit: give {clip_norm}",
            found=config.clip_order,
        )
    if schedule is not None:
        _check_schedule(schedule)
        _refuse(config, (*_OF_THE_SCHEDULE, "cycle_momentum"), "a schedule of your own")
    if optimizer is None:
        return
    if not isinstance(optimizer, optax.GradientTransformation) and not callable(optimizer):
        raise ValueError(
            "optimizer must be an optax.GradientTransformation or a function from a learning rate to one, got "
            f"{type(optimizer).__name__}: give one, or choose a ready-made optimizer with "
            "TrainConfig(optimizer=…)"
        )
    _refuse(config, _OF_THE_OPTIMIZER, "an optimizer of your own")
    if any(group.weight_decay != 1 for group in parse_groups(config.groups)):
        raise SettingError(
            "groups",
            "{setting} must not have factors on the weight decay with an optimizer of your own, got {found!r}: use "
            "optax.add_decayed_weights with a mask in the optimizer",
            found=config.groups,
        )
    if has_user_rate(optimizer):
        what = "an optimizer of your own that has its own learning rate"
        if schedule is not None:
            raise ValueError(
                f"a schedule has no effect with {what}: leave it out, or give a function from a learning rate to the "
                "optimizer"
            )
        _refuse(config, _OF_THE_SCHEDULE, what)


def check_user_rate(settings: CompiledSettings, params: Any) -> None:
    """Raise ValueError if the state of a user-defined optimizer would keep a learning rate; leaves may be abstract."""
    if settings.user_optimizer is not None:
        check_rate_not_stored(settings.user_optimizer, split_frozen(params, settings.frozen)[0])


def describe_selection(config: TrainConfig, params: Any, batch_stats: Any) -> str | None:
    """Return a message that says what is frozen, or None if nothing is; the leaves may be abstract.

    Raises:
        SettingError: a pattern of `freeze` or `groups` matches nothing, or everything is frozen.
    """
    names = dotted_paths(params)
    frozen = parse_freeze(config.freeze)
    known = dict.fromkeys([*names, *dotted_paths(batch_stats)])
    for pattern in frozen:
        _check_matches("freeze", pattern, list(known), "parameter or batch statistic")
    for group in parse_groups(config.groups):
        _check_matches("groups", group.pattern, names, "parameter")
    if not frozen:
        return None
    stopped = [name for name in names if matches(frozen, name)]
    if len(stopped) == len(names):
        raise SettingError(
            "freeze", "{setting} must leave parameters to train, but {found!r} matches all of them", found=config.freeze
        )
    counts = [
        sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
        for tree in (split_frozen(params, frozen)[1], params)
    ]
    kept = sum(matches(frozen, name) for name in dotted_paths(batch_stats))
    return (
        f"frozen: {counts[0]:,} of {counts[1]:,} parameters, in {len(stopped)} of {len(names)} arrays"
        + f", and {kept} arrays of batch statistics" * (kept > 0)
    )


def _check_matches(setting: str, pattern: str, names: list[str], what: str) -> None:
    if any(matches((pattern,), name) for name in names):
        return
    near = difflib.get_close_matches(pattern, names, n=_MOST_NAMED, cutoff=0.3) or names[:_MOST_NAMED]
    raise SettingError(
        setting,
        "{setting}: the pattern {pattern!r} matches the whole dotted path of no {what}; paths are, for example, {near}",
        pattern=pattern,
        what=what,
        near=", ".join(near),
    )


def _refuse(config: TrainConfig, names: tuple[str, ...], what: str) -> None:
    """Raise SettingError for the first of these settings that is not its default, because it would have no effect."""
    for name in names:
        if (found := getattr(config, name)) != SETTINGS[name].default:
            raise SettingError(
                name,
                "the setting {setting} has no effect with {what}, got {found!r}: leave it out",
                what=what,
                found=found,
            )


def _check_schedule(schedule: Any) -> None:
    rule = "schedule must be a traceable function from the step (int32 []) to a learning rate (a real number [])"
    if not callable(schedule):
        raise ValueError(f"{rule}, got {type(schedule).__name__}: give one, such as an optax schedule")
    returned: list[Any] = []

    def trace(step: jax.Array) -> jax.Array:
        returned.append(schedule(step))
        return jnp.asarray(returned[0])

    try:
        rate = jax.eval_shape(trace, jax.ShapeDtypeStruct((), jnp.int32))
    except jax.errors.JAXTypeError as error:
        raise ValueError(f"{rule}, but tracing it failed: use jnp.where instead of if") from error
    except Exception as error:
        if returned:
            raise ValueError(f"{rule}, but it returns {type(returned[0]).__name__}: return the rate") from error
        raise ValueError(f"{rule}, but tracing it failed with {first_line(error)}: correct it") from error
    is_real = jnp.issubdtype(rate.dtype, jnp.floating) or jnp.issubdtype(rate.dtype, jnp.integer)
    if rate.shape != () or not is_real:
        raise ValueError(f"{rule}, but it returns {rate.dtype} {list(rate.shape)}: return one real number")
