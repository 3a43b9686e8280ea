"""The user-defined parts of a run that the command line can name, and the record of their names and sources.

A record is only compared with what a command line names now: nothing here loads code, and
`loopfeed.engine.commands.user_parts`, which does, reads no file. Must not know: jax, what a part is used for.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.quantities import listed


class UserPart(NamedTuple):
    """A kind of user-defined part.

    Attributes:
        label: the part in messages.
        help: the part in the help of the commands.
    """

    label: str
    help: str


OWN_PARTS = {
    "model": UserPart("a model", "Your own model, with init and apply."),
    "batches": UserPart("batches", "Your own batches: a function from the step to (pixels, labels), or a BatchSource."),
    "indices": UserPart(
        "indices", "Your own part of the data: indices of training images, or a function from the epoch to them."
    ),
    "loss": UserPart("a loss", "Your own loss: a function of (outputs, labels, weights)."),
    "optimizer": UserPart(
        "an optimizer", "Your own optimizer: an optax transformation, or a function from a learning rate to one."
    ),
    "schedule": UserPart(
        "a schedule", "Your own schedule: a function from the number of updates to the learning rate."
    ),
    "augment": UserPart("an augmentation", "Your own augmentation: a function of (images, keys)."),
    "metrics": UserPart("metrics", "Your own metrics: a dict from names to metrics."),
    "evaluation": UserPart(
        "evaluation images", "Your own evaluation images: a tuple (pixels, labels), or an EvaluationSource."
    ),
}
"""The arguments of `train` that the commands also take, as `--model package.module:function`; their one declaration."""
OWN_FUNCTIONS, USER_SOURCES = "own_parts", "own_sources"
"""The keys of what identifies the user's functions, and of the digests of their source texts, in the resolved part."""
NAMED_PARTS = "named_parts"
"""The key of the named parts in the resolved part of `config.json`."""
NAME_FORM = "package.module:function"


@dataclass(frozen=True)
class NamedPart:
    """The name of a part on the command line, and what identifies its source.

    Attributes:
        name: as given, "package.module:function".
        sha256: the SHA-256 of the source text of what has that name; None if Python does not find its source.

    Raises:
        ValueError: the name has another form.
    """

    name: str
    sha256: str | None

    def __post_init__(self) -> None:
        if not is_part_name(self.name):
            raise ValueError(f"the name of a part must be {NAME_FORM}, got {self.name!r}")


def is_part_name(text: object) -> bool:
    """Return whether a text has the form "package.module:function"."""
    if not isinstance(text, str):
        return False
    module, _, function = text.partition(":")
    return all(word.isidentifier() for word in (*module.split("."), *function.split(".")))


def record_named(named: Mapping[str, NamedPart]) -> dict[str, Any]:
    """Return the entry of `config.json` for the named parts, empty if there are none."""
    return {NAMED_PARTS: {name: asdict(part) for name, part in named.items()}} if named else {}


def recorded_named_parts(resolved: Mapping[str, Any]) -> dict[str, NamedPart]:
    """Return the named parts in the resolved part of a `config.json`.

    Raises:
        ValueError: they have another form than `record_named` gives them.
    """
    recorded = resolved.get(NAMED_PARTS, {})
    try:
        if unknown := sorted(set(recorded) - set(OWN_PARTS)):
            raise ValueError(f"unknown part {unknown[0]!r}")
        return {name: NamedPart(**part) for name, part in recorded.items()}
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{NAMED_PARTS} of config.json cannot be read ({error}): restore the file") from None


def options_of(named: Mapping[str, NamedPart], names: Collection[str]) -> str | None:
    """Return the options that give the parts `names` again, or None if one of them was not named."""
    if not set(names) <= set(named):
        return None
    return " ".join(f"--{name} {named[name].name}" for name in names)


def missing_parts(
    run: str | os.PathLike[str], missing: Sequence[str], resolved: Mapping[str, Any], command: str | None = None
) -> ValueError:
    """Return the error that a run trained with parts of the user's own that are not given now.

    Args:
        run: its folder or URL.
        missing: the names of all these parts, as `train` takes them.
        resolved: the resolved part of its `config.json`.
        command: the command to which the options of the parts are added; None if there is none.
    """
    names = {"model": resolved.get("model"), **resolved.get(OWN_FUNCTIONS, {})}
    texts = {name: found for name, found in names.items() if isinstance(found, str) and found != name}
    known = {name: f" ({printable(found)})" for name, found in texts.items()}
    own = listed([f"{OWN_PARTS[name].label}{known.get(name, '')}" for name in missing])
    arguments, run = listed([f"{name}=…" for name in missing]), os.fspath(run)
    if command is None:
        return ValueError(f"{run} was trained with {own} of your own, which must be given again: {arguments}")
    options = options_of(recorded_named_parts(resolved), missing)
    options = options or " ".join(f"--{name} {NAME_FORM}" for name in missing)
    return ValueError(
        f"{run} was trained with {own} of your own, which must be given again: {arguments} in Python; on the command "
        f"line `{command} {options}`"
    )


def compare_named(
    resolved: Mapping[str, Any], named: Mapping[str, NamedPart], only: Collection[str] = tuple(OWN_PARTS)
) -> list[str]:
    """Compare the parts that are named now with those recorded, and return a warning for each whose source differs.

    Args:
        resolved: the resolved part of `config.json`.
        named: the parts that are named now.
        only: the parts to compare.

    Raises:
        ValueError: a part was recorded under another name.
    """
    recorded, warnings = recorded_named_parts(resolved), []
    for name in only:
        before, now = recorded.get(name), named.get(name)
        if before is None or now is None:
            continue
        if _within_file(before.name) != _within_file(now.name):
            raise ValueError(
                f"--{name} must be the one that the run was trained with, {before.name}, got {now.name}: give that one"
            )
        if before.sha256 != now.sha256:
            warnings.append(
                f"warning: the source of --{name} {now.name} has changed since the run recorded it (its sha256 was "
                f"{_short(before.sha256)}, is now {_short(now.sha256)}), so results may differ"
            )
    return warnings


def _within_file(name: str) -> str:
    """Return the name of a part without the packages of its module, which depend on the working directory."""
    module, _, function = name.partition(":")
    return f"{module.rpartition('.')[2]}:{function}"


def _short(digest: str | None) -> str:
    return "unknown" if digest is None else digest[:12]
