"""Files of stages: TOML with a list of tables, as in a recipe; `loopfeed.engine.stages` owns what a stage may be."""

import os
import tomllib
from pathlib import Path

from loopfeed.engine.settings import SettingError
from loopfeed.engine.stages import Stages
from loopfeed.preprocess.regular_file import read_regular
from loopfeed.preprocess.shown_values import shown
from loopfeed.preprocess.system_errors import reading_remedy

_MAX_BYTES = 1 << 15


def read_stages(path: str | os.PathLike[str]) -> Stages:
    r"""Read stages from a TOML file with a list of tables `stages`, each with the settings of a stage.

    Raises:
        SettingError: the file cannot be read, is no such file, or its stages are invalid.

    Example:
        >>> _ = Path("sizes.toml").write_text('[[stages]]\nuntil = "6e"\nimage_size = 128\n[[stages]]\n')
        >>> read_stages("sizes.toml")
        (Stage(until='6e', image_size=128), Stage())
    """
    try:
        document = tomllib.loads(read_regular(Path(path), max_bytes=_MAX_BYTES).decode("utf-8"))
    except OSError as error:
        remedy = reading_remedy(error, "check the path")
        raise SettingError(
            "stages",
            "{setting}: {path} must be a readable file ({fault}): {remedy}",
            path=str(path),
            fault=error.strerror,
            remedy=remedy,
        ) from error
    except (ValueError, RecursionError) as error:  # invalid syntax or encoding
        raise SettingError(
            "stages",
            '{setting}: {path} must be TOML in UTF-8: {fault}; epochs are quoted, as in until = "6e"',
            path=str(path),
            fault=error,
        ) from error
    if others := [name for name in document if name != "stages"]:
        raise SettingError(
            "stages",
            "{setting}: {path} must have tables [[stages]] and nothing else, got {found!r}: settings of the "
            "whole run belong into a recipe (--recipe)",
            path=str(path),
            found=shown(others[0]),
        )
    if not isinstance(document.get("stages"), list):
        raise SettingError(
            "stages",
            "{setting}: {path} must have tables [[stages]], in double brackets, one for each stage, got {found}",
            path=str(path),
            found="a table [stages]" if "stages" in document else "none",
        )
    return Stages.of(document["stages"])
