"""User-defined parts of a run, in the place of those of the settings: what they must be, and what identifies them."""

import hashlib
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from loopfeed.engine.config import NO_CLASS_WEIGHTS, OFF, SETTINGS, TrainConfig
from loopfeed.engine.feed.batches import BatchFunction, BatchSource, EvaluationArrays, EvaluationSource, takes_rows
from loopfeed.engine.feed.subsets import Indices
from loopfeed.engine.given_values import check_takes, describe_given
from loopfeed.engine.images.augment import UserAugmentation
from loopfeed.engine.named_parts import USER_SOURCES, NamedPart, recorded_named_parts
from loopfeed.engine.objective.losses import Loss
from loopfeed.engine.objective.metrics import Metric, PerExample
from loopfeed.engine.program.checked_model import takes_key
from loopfeed.engine.program.train_state import TrainModel, name_of_model
from loopfeed.engine.settings import SettingError
from loopfeed.engine.updates.checks import check_updates
from loopfeed.engine.updates.schedules import Schedule
from loopfeed.engine.updates.user_optimizer import UserOptimizer
from loopfeed.preprocess.suggestions import WEIGHTS_BY_NAME, did_you_mean, is_about_weights

# The module of what is in no file, which an earlier version recorded for scripts, too.
_NO_FILE = "__main__"
_LIBRARIES = {"site-packages", "dist-packages"}
_OWN_PACKAGE = "loopfeed"


class PartArguments(TypedDict, total=False):
    """The keyword arguments for user-defined parts, as `loopfeed.engine.run.train.train` describes them."""

    model: TrainModel | None
    batches: BatchFunction | BatchSource | None
    evaluation: EvaluationSource | EvaluationArrays | None
    loss: Loss | None
    metrics: Mapping[str, Metric | PerExample] | None
    optimizer: UserOptimizer | None
    schedule: Schedule | None
    augment: UserAugmentation | None
    indices: Indices | None


def take_parts(arguments: PartArguments) -> "UserParts":
    """Return the user-defined parts that a public function was given; raise TypeError for one that there is not."""
    known = PartArguments.__annotations__
    for name in arguments:
        if name not in known:
            near = f": {WEIGHTS_BY_NAME}" if is_about_weights(name) else did_you_mean(name, known)
            if name in SETTINGS:
                near = f": it is a setting; give it to the configuration, as TrainConfig({name}=…)"
            raise TypeError(f"unexpected keyword argument {name!r}{near}")
    return UserParts(**arguments)


@dataclass(frozen=True)
class UserParts:
    """The user-defined parts of a run; None stands for the part selected by the settings.

    Attributes:
        model, batches, evaluation, loss, metrics, optimizer, schedule, augment, indices: as
            `loopfeed.engine.run.train.train` takes them.
        named: the names and sources of the parts that were named on a command line.
    """

    model: TrainModel | None = None
    batches: BatchFunction | BatchSource | None = None
    evaluation: EvaluationSource | EvaluationArrays | None = None
    loss: Loss | None = None
    metrics: Mapping[str, Metric | PerExample] | None = None
    optimizer: UserOptimizer | None = None
    schedule: Schedule | None = None
    augment: UserAugmentation | None = None
    indices: Indices | None = None
    named: Mapping[str, NamedPart] = field(default_factory=dict)

    @property
    def determine_nothing(self) -> bool:
        """Whether the trained weights and their evaluation are those without user-defined parts."""
        own = (self.model, self.batches, self.evaluation, self.loss, self.optimizer, self.schedule, self.augment)
        return all(each is None for each in (*own, self.indices))

    @property
    def has_user_source(self) -> bool:
        """Whether code of the user makes batches while the program runs."""
        return self.batches is not None or hasattr(self.evaluation, "fill")

    def names(self) -> dict[str, Any]:
        """Return what identifies the user-defined functions in the record of a run: their names, by part."""
        loss = {} if self.loss is None else {"loss": name_of(self.loss)}
        functions: dict[str, Any] = {"optimizer": self.optimizer, "schedule": self.schedule, "augment": self.augment}
        if callable(self.indices):
            functions["indices"] = self.indices
        return (
            ({} if self.indices is None else {"indices": "indices"})
            | loss
            | ({"metrics": sorted(self.metrics)} if self.metrics else {})
            | {part: name_of(own) for part, own in functions.items() if own is not None}
        )

    def sources(self) -> dict[str, str]:
        """Return the SHA-256 of the source text of each part whose source Python finds, by part."""
        parts = {
            "model": self.model,
            "batches": self.batches,
            "loss": self.loss,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "augment": self.augment,
            "indices": self.indices,
        }
        found = {part: _source_digest(_named(own)) for part, own in parts.items() if own is not None}
        return {part: digest for part, digest in found.items() if digest is not None}


NO_PARTS = UserParts()


def name_of(function: Any) -> str:
    """Return the name of a function in its file, such as "losses.squared", or of its type if it has no name itself.

    The file counts without its folder, so that a script, a notebook that imports it, a test and a command agree. What
    is defined in no file, as in a notebook's cell, is in `__main__`. A `functools.partial` has its function's name.
    """
    named = _named(function)
    return f"{_file_of(named.__module__)}.{named.__qualname__}"


def is_same_part(before: str, now: str) -> bool:
    """Return whether two names, of which one may be of an earlier version, are those of the same part.

    Earlier versions recorded the whole module, "project.losses.squared", and `__main__` for any script.
    """
    for one, other in ((before, now), (now, before)):
        if one == other or one.endswith(f".{other}"):
            return True
        if other.startswith(f"{_NO_FILE}.") and one.endswith(other.removeprefix(_NO_FILE)):
            return True
    return False


def changed_sources(recorded: Mapping[str, Any], parts: UserParts) -> list[str]:
    """Return a warning for each part whose source is not that of the record; named parts are compared by their names.

    Args:
        recorded: the resolved part of the run's `config.json`.
        parts: the parts that are given now.
    """
    before, compared = recorded.get(USER_SOURCES, {}), recorded_named_parts(recorded).keys() & parts.named.keys()
    return [
        f"warning: the source of the {part} has changed since the run recorded it (its sha256 was "
        f"{before[part][:12]}, is now {digest[:12]}), so results may differ"
        for part, digest in parts.sources().items()
        if part not in compared and before.get(part, digest) != digest
    ]


def _source_digest(named: Any) -> str | None:
    """Return the SHA-256 of the source text of a function or class; None for one of a library, or without a source.

    Libraries are compared by their versions.
    """
    module = getattr(sys.modules.get(named.__module__), "__file__", None) or ""
    if _LIBRARIES & set(Path(module).parts) or named.__module__.partition(".")[0] == _OWN_PACKAGE:
        return None
    try:
        return hashlib.sha256(inspect.getsource(named).encode()).hexdigest()
    except (OSError, TypeError):
        return None


def _named(function: Any) -> Any:
    """Return what has a name: the function of a partial, or the type of an object without a name."""
    while isinstance(function, partial):
        function = function.func
    return function if hasattr(function, "__qualname__") else type(function)


def _file_of(module: str) -> str:
    file = getattr(sys.modules.get(module), "__file__", None)
    if not isinstance(file, str):
        return _NO_FILE if module == _NO_FILE else module.rpartition(".")[2]
    path = Path(file)
    return path.parent.name if path.stem == "__init__" else path.stem


def check_parts(config: TrainConfig, parts: UserParts) -> None:
    """Check user-defined parts before anything is opened.

    Raises:
        ValueError: a part has the wrong type, or makes a setting meaningless.
    """
    _check_user_model(config, parts.model)
    _check_user_batches(config, parts.batches)
    _check_user_indices(config, parts)
    _check_user_evaluation(config, parts.evaluation)
    _check_user_loss(config, parts.loss)
    _check_class_weights(config, parts.loss)
    check_updates(config, parts.optimizer, parts.schedule)
    _check_user_augment(parts.augment)
    check_calls(parts)


def check_calls(parts: UserParts) -> None:
    """Raise ValueError if the signature of a part says that it cannot be called as the engine calls it.

    An optimizer and a schedule are called when they are checked, so they need not be here.
    """
    _check_user_metrics(parts.metrics)
    model = parts.model
    if model is not None and hasattr(model, "init") and hasattr(model, "apply"):
        name, names = name_of_model(model), ("train", "key") if takes_key(model) else ("train",)
        form = "(params, batch_stats, images, train), of which train is given by its name"
        check_takes(f"init of {name}", model.init, "(key)", 0)
        check_takes(f"apply of {name}", model.apply, form, 0, 0, 0, names=names)
    forms: list[tuple[str, Any, tuple[str, ...]]] = [
        ("the function batches", parts.batches, ("step", "rows") if takes_rows(parts.batches) else ("step",)),
        ("the function indices", parts.indices, ("epoch",)),
        ("the loss", parts.loss, ("outputs", "labels", "weights")),
        ("augment", parts.augment, ("images", "keys")),
    ]
    for name, metric in (parts.metrics or {}).items():
        if isinstance(metric, Metric):
            what = f"of the metric {name}"
            forms.append((f"init {what}", metric.init, ()))
            forms.append((f"update {what}", metric.update, ("state", "outputs", "labels", "weights")))
            forms.append((f"merge {what}", metric.merge, ("state", "state")))
            forms.append((f"finish {what}", metric.finish, ("state",)))
        else:
            forms.append((f"the metric {name}", metric, ("outputs", "labels")))
    for what, function, arguments in forms:
        if callable(function) and not hasattr(function, "fill"):
            check_takes(what, function, f"({', '.join(arguments)})", *arguments)
    for what, source in (("batches", parts.batches), ("evaluation", parts.evaluation)):
        if (fill := getattr(source, "fill", None)) is not None:
            check_takes(
                f"fill of the source of {what}, {type(source).__name__},",
                fill,
                "(batch_index, rows, pixels, labels, *, timeout_s)",
                *(0, range(1), None, None),
                names=("timeout_s",),
                remedy="write only the images of these rows, a range, into the buffers",
            )


def _check_user_model(config: TrainConfig, model: Any) -> None:
    if model is not None:
        _check_is_adapted(model)
        if isinstance(model, type):
            raise ValueError(f"a model must be an object, got the class {model.__name__}: give {model.__name__}()")
        if not callable(getattr(model, "init", None)) or not callable(getattr(model, "apply", None)):
            raise ValueError(
                f"a model must have the functions init and apply, got {type(model).__name__}: "
                "define both, or choose a model from the registry with TrainConfig(model=…)"
            )
        _refuse_setting(config, "model", "auto", "a model")
        if config.precision != "float32":
            raise SettingError(
                "precision",
                "the setting {setting} must be float32 with a model of your own, got {found!r}: leave it out, and cast "
                "inside the model's apply",
                found=config.precision,
            )


# The base classes of modules of other libraries, and how a module of each is passed.
_MODULES = {
    "flax.linen.module.Module": "pass loopfeed.engine.adapters.flax_linen(module, (height, width, 3))",
    "flax.nnx.module.Module": "pass loopfeed.engine.adapters.flax_nnx(module)",
    "equinox._module._module.Module": "pass loopfeed.engine.adapters.equinox(model)",
    "equinox._module.Module": "pass loopfeed.engine.adapters.equinox(model)",
    "torch.nn.modules.module.Module": "its code cannot be traced: write the model in JAX",
}


def _check_is_adapted(model: Any) -> None:
    """Raise ValueError if `model` is a module of another library, by the names of its base classes."""
    bases = (model if isinstance(model, type) else type(model)).__mro__
    for base in bases:
        library = base.__module__.partition(".")[0]
        if (remedy := _MODULES.get(f"{base.__module__}.{base.__qualname__}")) is not None:
            raise ValueError(
                f"a model must have functions init and apply as TrainModel describes them, got {bases[0].__name__}, a "
                f"module of {library}: {remedy}"
            )


def _check_user_batches(config: TrainConfig, batches: Any) -> None:
    if batches is not None:
        if not callable(batches) and not hasattr(batches, "fill"):
            raise ValueError(
                f"batches must be a function from the step to (pixels, labels), or a BatchSource; "
                f"got {type(batches).__name__}, which cannot return the batch of a given step again: write such a "
                "function, or pack the images with loopfeed.pack(IMAGES, DEST) and give TrainConfig(data=DEST)"
            )
        _refuse_setting(config, "data", None, "batches")
        _refuse_setting(config, "synthetic", False, "batches")


def _check_user_indices(config: TrainConfig, parts: "UserParts") -> None:
    if parts.indices is not None and (parts.batches is not None or config.synthetic):
        raise ValueError(
            "indices choose among the images of a packed data set, and must not be given with other batches: leave "
            "them out, or give a data set (TrainConfig(data=…))"
        )


def _refuse_setting(config: TrainConfig, name: str, default: Any, part: str) -> None:
    """Raise SettingError if a setting has not its default, although a user's own part takes its place."""
    if (found := getattr(config, name)) != default:
        raise SettingError(
            name,
            "the setting {setting} must not be given with {part} of your own, got {found!r}: leave it out",
            part=part,
            found=found,
        )


def _check_user_evaluation(config: TrainConfig, evaluation: Any) -> None:
    if evaluation is not None and config.fold is not None and config.eval_split != OFF:
        raise SettingError(
            "fold",
            "{setting} {found} is the evaluation set, so it must not be given with an evaluation of your own: leave "
            "one out, or give {eval_split} off to train on the other folds only",
            found=config.fold,
        )
    check_evaluation(evaluation)


def check_evaluation(evaluation: Any) -> None:
    """Raise ValueError if evaluation images of the user's own have neither of their two forms."""
    if evaluation is None or hasattr(evaluation, "num_batches"):
        return
    if isinstance(evaluation, tuple) and len(evaluation) == len(("pixels", "labels")):
        return
    raise ValueError(
        f"evaluation must be a tuple (pixels, labels) of all evaluation images, or an EvaluationSource, got "
        f"{describe_given(evaluation)}: give the arrays themselves"
    )


def _check_user_loss(config: TrainConfig, loss: Any) -> None:
    if loss is not None and not callable(loss):
        raise ValueError(
            f"loss must be a function of (outputs, labels, weights), got {type(loss).__name__}: define one, or choose "
            "a ready-made loss with TrainConfig(loss=…)"
        )
    if loss is not None:
        _refuse_setting(config, "loss", "cross-entropy", "a loss")
    if config.label_smoothing and (loss is not None or config.loss != "cross-entropy"):
        raise SettingError(
            "label_smoothing",
            "{setting} smooths only the targets of the ready-made cross-entropy, got {found} with another loss: leave "
            "it out, or smooth inside the loss",
            found=config.label_smoothing,
        )


def _check_class_weights(config: TrainConfig, loss: Any) -> None:
    if config.class_weights != NO_CLASS_WEIGHTS and (loss is not None or config.loss == "mean-squared-error"):
        raise SettingError(
            "class_weights",
            "{setting} weighs the ready-made cross-entropy and binary-cross-entropy, got {found!r} with another loss: "
            "leave it out, or weigh inside the loss",
            found=config.class_weights,
        )


def _check_user_metrics(metrics: Any) -> None:
    if metrics is None:
        return
    if not isinstance(metrics, Mapping):
        raise ValueError(f"metrics must be a mapping from names to metrics, got {type(metrics).__name__}: give a dict")
    for name, metric in metrics.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"the name of a metric must be an identifier, such as top3, got {name!r}: rename it")
        if not isinstance(metric, Metric) and not callable(metric):
            raise ValueError(
                f"the metric {name} must be a Metric or a function of (outputs, labels), got {type(metric).__name__}"
            )


def _check_user_augment(augment: Any) -> None:
    if augment is not None and not callable(augment):
        raise ValueError(
            f"augment must be a function of (images, keys), got {type(augment).__name__}: define one, or choose "
            "ready-made augmentations with settings such as TrainConfig(flip=…)"
        )
