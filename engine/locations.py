"""Make the locations in settings independent of the working directory and the environment."""

import os
from dataclasses import replace

from loopfeed.engine.config import OFF, TrainConfig
from loopfeed.preprocess.storage_options import as_text, expand_home, is_url, parse_text, with_environment

DATA_VARIABLE = "LOOPFEED_DATA"


def with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """Return the settings with `data`, `init_from` and `cache` made absolute, independent of the working directory.

    If one of the first two, or `run_dir`, is an ``s3://`` URL, `storage_options` then contains what came from the
    environment.
    """
    return replace(
        config,
        data=absolute_location(config.data),
        init_from=absolute_location(config.init_from),
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


def absolute_location(location: str | None) -> str | None:
    """Return a path made absolute, or a URL unchanged."""
    if location is None or is_url(location):
        return location
    return str(expand_home(location).absolute())
