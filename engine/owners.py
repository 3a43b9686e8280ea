"""Whose settings are: what a command uses of a record or a recipe, which may be somebody else's.

Also makes the locations in settings independent of the working directory and the environment. Owns the rules for the
words of `loopfeed.engine.settings.Owner`. Must not know: how a record is read, or a command's options.
"""

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from loopfeed.engine.config import CLASS_WEIGHTS, OFF, SAMPLINGS, SETTINGS, TrainConfig, describe_value
from loopfeed.engine.settings import OnResume, Owner
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.quantities import listed
from loopfeed.preprocess.storage_options import (
    ANONYMOUS,
    as_text,
    expand_home,
    is_url,
    parse_text,
    recorded_options,
    with_environment,
)

DATA_VARIABLE = "LOOPFEED_DATA"
TABLES = {"sampling": SAMPLINGS, "class_weights": CLASS_WEIGHTS}
"""The settings that may name a table, which a run identifies by its digest, and the words that they may be instead."""


def with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """Return the settings with `data`, `init_from`, `cache` and tables made absolute, whatever the working directory.

    If one of the first two, or `run_dir`, is an ``s3://`` URL, `storage_options` then contains what came from the
    environment.
    """
    tables: dict[str, Any] = {
        name: absolute_location(found) for name in TABLES if names_table(name, found := getattr(config, name))
    }
    return replace(
        config,
        data=absolute_location(config.data),
        init_from=absolute_location(config.init_from),
        **tables,
        cache=config.cache if config.cache == OFF else absolute_location(config.cache),
        storage_options=recorded_storage_options(config),
    )


def storage_options_of(config: TrainConfig) -> dict[str, str]:
    """Return the storage options that the settings give, by name."""
    return parse_text(config.storage_options)


def recorded_storage_options(config: TrainConfig) -> str | None:
    """Return the storage options to record; only S3's address and region can come from the environment."""
    data = config.data or (None if config.synthetic else os.environ.get(DATA_VARIABLE))
    options = storage_options_of(config)
    for location in (data, config.init_from, config.run_dir):
        options = with_environment(options, location or "")
    return as_text(options)


def names_table(name: str, value: str) -> bool:
    """Return whether a setting may be a table, and a value of it is none of the words that it may be instead."""
    return name in TABLES and value not in TABLES[name]


def absolute_location(location: str | None) -> str | None:
    """Return a path made absolute; a URL, and a name on the hub, unchanged."""
    if location is None or is_url(location) or location.startswith(HUB):
        return location
    return str(expand_home(location).absolute())


STORAGE = "storage_options"
HUB = "hf-hub:"
"""What begins the name of a repository on the Hugging Face hub."""

OF_A_RECORD = tuple(name for name, each in SETTINGS.items() if each.owner in (Owner.RUN, Owner.DATA))
"""The settings that are taken from the record of a run."""
OF_A_RECORD_AS_RECIPE = tuple(name for name in OF_A_RECORD if SETTINGS[name].on_resume is not OnResume.COMPUTED)
"""The settings that are taken from the record of a run for another run."""
OF_A_RECIPE = tuple(name for name in OF_A_RECORD_AS_RECIPE if name != STORAGE)
"""The settings that a recipe may have. How a store is reached is in part the user's: who asks, and who pays."""
OF_A_USER = tuple(name for name, each in SETTINGS.items() if each.owner is Owner.USER)
"""The settings that each launch must give again; a line names those that a record has."""
OF_AN_EVALUATION = ("compilation_cache", "cache", "cache_gb", STORAGE)
"""Those of them that have an effect where nothing is trained, and how the data are reached."""


def take_recorded(config: TrainConfig, *, has_no_place: bool = False) -> tuple[TrainConfig, dict[str, Any]]:
    """Return the settings of a record that may be used, and the recorded values of those that were replaced, by name.

    Of the user's and the launch's, none is used. Of the options of a store, its address is used, without keys (see
    `loopfeed.preprocess.storage_options.recorded_options`), unless the user has named a URL in $LOOPFEED_DATA, and the
    record does not say where its data are.

    Args:
        config: the settings of the record.
        has_no_place: whether the data are searched for, because the record does not name their place.
    """
    changes = {name: each.default for name, each in SETTINGS.items() if name not in OF_A_RECORD}
    given = parse_text(config.storage_options)
    kept = recorded_options(given)
    if has_no_place and kept.get("credentials") == ANONYMOUS and is_url(os.environ.get(DATA_VARIABLE, "")):
        kept = {}
    if kept != given:
        changes[STORAGE] = as_text(kept)
    replaced = {name: value for name in changes if (value := getattr(config, name)) != changes[name]}
    return replace(config, **changes), replaced


def describe_replaced(
    recorded: TrainConfig,
    replaced: Mapping[str, Any],
    now: TrainConfig,
    *,
    used: Collection[str],
    options: Collection[str],
) -> str | None:
    """Return a line about what a command does not use of a record, None if that is nothing.

    Args:
        recorded, replaced: the result of `take_recorded`.
        now: the settings of the command; what the user gave differs there from `recorded`.
        used: the settings of the user that have an effect on the command, and `storage_options` if it reads data.
        options: those for which the command has an option.
    """
    left_out = [name for name in used if name in replaced and getattr(now, name) in (getattr(recorded, name), None)]
    if not left_out:
        return None
    unused = {name: describe_value(replaced[name]) for name in left_out}
    texts = []
    if STORAGE in unused:
        before, kept = parse_text(unused.pop(STORAGE)), parse_text(recorded.storage_options)
        if dropped := as_text({name: value for name, value in before.items() if name not in kept}):
            unused[STORAGE] = dropped
        if kept.get("credentials") == ANONYMOUS != before.get("credentials"):
            server = kept.get("endpoint") or kept["host-header"]
            texts = [f"no keys are sent to {printable(server)}, which the run's record names"]
    if unused:
        named = [f"{SETTINGS[name].options[0]} {printable(value)}" for name, value in unused.items()]
        texts.insert(0, f"not used from the run's record: {', '.join(named)}")
    again = [SETTINGS[name].options[0] for name in left_out if name in options]
    return "; ".join(texts) + (f" (give {listed(again)} again to use your own)" if again else "")


def with_given(recorded: TrainConfig, given: Mapping[str, Any]) -> TrainConfig:
    """Return the settings of a record, as `take_recorded` returns them, with those that the user gives now.

    The options of a store apply to all URLs of a command. If the user names a URL, it is not looked for at a server
    that only the record names, nor written there.
    """
    return replace(_without_foreign_server(recorded, given), **given)


def recorded_settings(
    recorded: TrainConfig, given: Mapping[str, Any], names: Collection[str] = OF_A_RECORD
) -> dict[str, Any]:
    """Return the settings of a record that count below those that the user gives now, see `with_given`."""
    usable = _without_foreign_server(recorded, given).to_json()
    return {name: usable[name] for name in names}


def _without_foreign_server(recorded: TrainConfig, given: Mapping[str, Any]) -> TrainConfig:
    names_url = any(is_url(given.get(name) or "") for name in ("data", "init_from", "run_dir"))
    is_foreign = parse_text(recorded.storage_options).get("credentials") == ANONYMOUS
    return replace(recorded, storage_options=None) if names_url and is_foreign else recorded
