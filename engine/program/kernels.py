"""The kernels of a run: which ones the setting means on this machine, what is said about them, and where none helps."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import jax

import loopfeed.models.layers
from loopfeed.engine.config import TrainConfig
from loopfeed.engine.settings import SettingError
from loopfeed.models.kernels import ONEDNN, XLA, MissingKernelsError
from loopfeed.models.kernels.onednn.library import Isa, load_library

AUTO = "auto"
"""The value of the setting `kernels` that stands for the fastest kernels of the machine."""
RECORDED = "kernels"
"""The key of oneDNN's version and instruction sets in the resolved part of `config.json`."""
_CPU = "cpu"
_ELSEWHERE = (
    ". Go on where they can be used, or start another run from its weights: --init-from RUN, or "
    "RUN@best or RUN@STEP for one of its snapshots"
)


def settle_kernels(config: TrainConfig, platform: str, *, is_kept: bool = False) -> TrainConfig:
    """Return the settings with the kernels by name: "auto" is replaced by the fastest kernels of this machine.

    Args:
        config: the settings.
        platform: the platform of the run's devices, such as "cpu" or "cuda".
        is_kept: whether the name comes from the record of a run, which may continue on another platform: there it has
            no effect, and is no error.

    Raises:
        SettingError: if the kernels that the settings name cannot be used here.
    """
    if config.kernels == AUTO:
        return replace(config, kernels=XLA if _why_not_onednn(platform) else ONEDNN)
    if config.kernels != ONEDNN or (is_kept and platform != _CPU):
        return config
    if fault := _why_not_onednn(platform):
        run = ", which the run has used from its beginning," if is_kept else ""
        elsewhere = _ELSEWHERE if is_kept else ""
        raise SettingError(
            "kernels",
            "oneDNN's kernels ({setting}){run} cannot be used here: {fault}{elsewhere}",
            run=run,
            fault=fault,
            elsewhere=elsewhere,
        )
    return config


def kernels_on(config: TrainConfig, platform: str) -> str:
    """Return the name of the kernels that a program for a platform uses, given settled settings."""
    return config.kernels if platform == _CPU else XLA


def record_kernels(config: TrainConfig, platform: str) -> dict[str, str]:
    """Return what `config.json` records of oneDNN besides its name: what else rounding depends on; empty for XLA's.

    Args:
        config: the settled settings.
        platform: the platform of the run's devices.
    """
    if kernels_on(config, platform) != ONEDNN:
        return {}
    return {RECORDED: load_library().describe()}


def changed_kernels_notice(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return a line if oneDNN rounds otherwise here than where a run was recorded; None if it does not.

    Args:
        recorded, now: the resolved values of the run before and now, with what `record_kernels` returned.
    """
    before, found = recorded.get(RECORDED), now.get(RECORDED)
    if before is None or found is None or before == found:
        return None
    return f"the run used {before} and goes on with {found}: other rounding"


def refuse_missing_kernels(config: TrainConfig, given: Mapping[str, Any], platform: str) -> None:
    """Raise SettingError if a user names kernels for an evaluation of a run that cannot be used here.

    Args:
        config: the settings of the run.
        given: the settings that the user gives for the evaluation; without kernels among them, nothing is refused,
            since those of the run are replaced where they are missing.
        platform: the platform of the evaluation.
    """
    if "kernels" in given:
        settle_kernels(replace(config, kernels=given["kernels"]), platform)


def replace_missing_kernels(
    config: TrainConfig, recorded: TrainConfig, platform: str, notify: Callable[[str], None]
) -> TrainConfig:
    """Return the settings for an evaluation of a run, with XLA's kernels if the run's own cannot be used here.

    Args:
        config: the settings of the evaluation. Kernels that a user names for it must be checked by
            `refuse_missing_kernels` before: here they cannot be told from those of the run.
        recorded: those of the run.
        platform: the platform of the evaluation.
        notify: called with a line about the replaced kernels.
    """
    if not config.kernels == recorded.kernels == ONEDNN or not (fault := _why_not_onednn(platform)):
        return config
    if platform == _CPU:
        notify(
            f"the run used oneDNN's kernels, which cannot be used here ({fault}); XLA's round differently, so that "
            "losses differ in their last digits"
        )
    return replace(config, kernels=XLA)


def describe_kernels(config: TrainConfig, platform: str, *, is_user_model: bool = False) -> str | None:
    """Return the line about a run's kernels; None where there is no choice.

    Args:
        config: the settled settings.
        platform: the platform of the run's devices.
        is_user_model: whether the model is user-defined, which has a precision of its own.
    """
    if platform != _CPU:
        return None
    try:
        library = load_library()
    except MissingKernelsError as error:
        return f"kernels: XLA's; on this processor oneDNN's are faster: {error.remedy}" if error.remedy else None
    if config.kernels != ONEDNN:
        return f"kernels: XLA's; on this processor oneDNN's are faster: start a run with --kernels {ONEDNN}"
    of_half = ", in bfloat16" if config.precision == "bfloat16" else ""
    if uses_amx_in_bfloat16(config, platform, is_user_model=is_user_model):
        of_half = "; only bfloat16 uses AMX: --precision bfloat16 is faster"
    return f"kernels: {library.describe()}{of_half}"


def uses_amx_in_bfloat16(config: TrainConfig, platform: str, *, is_user_model: bool) -> bool:
    """Return whether `--precision bfloat16` would make a run faster, because oneDNN's kernels then use AMX.

    Args:
        config: the settled settings.
        platform: the platform of the run's devices.
        is_user_model: whether the model is user-defined, to which that setting does not apply.
    """
    is_wide = config.precision == "float32" and not is_user_model and kernels_on(config, platform) == ONEDNN
    return is_wide and load_library().has(Isa.AMX)


def _why_not_onednn(platform: str) -> str:
    """Return why oneDNN's kernels cannot be used on a platform of this machine, with the remedy; "" if they can."""
    if platform != _CPU:
        return f"they are for CPUs, and jax runs on {platform}: set the environment variable JAX_PLATFORMS={_CPU}"
    try:
        load_library()
    except MissingKernelsError as error:
        return str(error)
    return ""


_OURS = PurePath(str(loopfeed.models.layers.__file__)).parent


def slow_convolutions_warning(jaxpr: Any) -> str | None:
    """Return a warning about the convolutions of a program that are `lax`'s own, None on a GPU or if there are none.

    Args:
        jaxpr: the traced training program.
    """
    if jax.default_backend() != "cpu":
        return None
    count = count_lax_convolutions(jaxpr)
    if not count:
        return None
    return (
        f"warning: {count:,} convolution{' of the model is' if count == 1 else 's of the model are'} "
        "jax.lax.conv_general_dilated, whose gradients are many times slower inside a loop on a CPU: use "
        "loopfeed.convolution, loopfeed.conv_general_dilated or an adapter of loopfeed.engine.adapters"
    )


def count_lax_convolutions(jaxpr: Any) -> int:
    """Count the convolutions that a program differentiates, other than those of `loopfeed.models.layers`."""
    return sum(1 for _ in _forward_convolutions(jaxpr, ""))


def _forward_convolutions(jaxpr: Any, outer: str) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        names = f"{outer}/{equation.source_info.name_stack}"
        if equation.primitive is jax.lax.conv_general_dilated_p:
            # "jvp" is in the name of what is differentiated, "transpose" in that of the gradients.
            if "jvp" in names and "transpose" not in names and not _is_ours(equation):
                yield equation
            continue
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from _forward_convolutions(inner, names)


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns")


def _is_ours(equation: Any) -> bool:
    traceback = equation.source_info.traceback
    frames = () if traceback is None else traceback.frames
    return any(PurePath(frame.file_name).parent == _OURS for frame in frames)
