"""What a resume may change of a run, what must be as it was recorded, and the record of what was changed.

Owns the rule on which settings a resume may change, and the entries `earlier` of `config.json`.
"""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from loopfeed.engine.config import SETTINGS, TrainConfig, describe_value
from loopfeed.engine.data.drawn_images import DRAWN_BY
from loopfeed.engine.data.open_data import RunData
from loopfeed.engine.named_parts import OWN_FUNCTIONS, USER_SOURCES, missing_parts
from loopfeed.engine.owners import names_table, with_absolute_paths
from loopfeed.engine.parts import UserParts, is_same_part
from loopfeed.engine.processes import exchange
from loopfeed.engine.records.machine import MACHINE, ThreadRule, Topology, describe_machine
from loopfeed.engine.records.recorded_run import RecordedRun, recorded_user_parts
from loopfeed.engine.records.run_folder import recorded_versions
from loopfeed.engine.settings import OnResume, Owner, SettingError, TakesEffect
from loopfeed.models.kernels import ONEDNN
from loopfeed.preprocess.quantities import listed

RUNTIME_SETTINGS = frozenset(
    name
    for name, declared in SETTINGS.items()
    if declared.takes_effect is not TakesEffect.HOST and declared.on_resume is not OnResume.KEPT
)
"""Settings that a resume may change although results depend on them, so that both values are recorded."""
HOST_SETTINGS = frozenset(
    name
    for name, declared in SETTINGS.items()
    if declared.takes_effect is TakesEffect.HOST and declared.on_resume is not OnResume.KEPT
)
"""Settings that a resume may change because they concern only the host, or record where another setting came from."""

_ANOTHER_RUN = "start another run from the weights of this one (--init-from RUN with another --run-dir)"
_KEPT_PROPERTIES = (
    *("model", "num_classes", "height", "width", "mean", "std", "eval_manifest_sha256", "num_eval_batches"),
    *("labels", OWN_FUNCTIONS),
)


def check_settings(config: TrainConfig, recorded: TrainConfig) -> None:
    """Raise SettingError if a resume changes settings that must not change; the message gives old and new values."""
    changed = [
        (name, before, now)
        for name, before, now in _differences(with_absolute_paths(recorded), with_absolute_paths(config))
        # A table may have moved: `check_digests` compares what it says.
        if not (_may_change(SETTINGS[name].on_resume, before, now) or are_tables(name, before, now))
    ]
    if changed:
        changes = "; ".join(f"{{{name}}} was {{{name}_before!r}}, got {{{name}_now!r}}" for name, _, _ in changed)
        found = {f"{name}_before": before for name, before, _ in changed}
        found |= {f"{name}_now": now for name, _, now in changed}
        raise SettingError(
            changed[0][0],
            "a resumed run must keep the settings that determine its program, order and data, but some differ: "
            f"{changes}. Restore their values, or begin another from its weights: {{init_from}}={{run}} "
            "with another {run_dir}",
            run=shlex.quote(str(config.run_dir or "RUN")),
            **found,
        )


def _differences(before: TrainConfig, now: TrainConfig) -> list[tuple[str, Any, Any]]:
    pairs = [(name, getattr(before, name), getattr(now, name)) for name in SETTINGS]
    return [(name, old, new) for name, old, new in pairs if old != new]


def are_tables(name: str, before: Any, now: Any) -> bool:
    """Return whether a setting names a table before and now."""
    return names_table(name, before) and names_table(name, now)


def _may_change(rule: OnResume, before: Any, now: Any) -> bool:
    if rule is OnResume.CHANGES_IF_SET:
        # It is compiled into the program if it is set.
        return before is not None and now is not None
    return rule not in (OnResume.KEPT, OnResume.COMPUTED)


def check_same_everywhere(
    config: TrainConfig, manifest_digest: str | None, digests: Mapping[str, str] | None = None
) -> None:
    """Raise SettingError if this process has other settings, data or versions than the first one.

    Settings of the host alone may differ, such as where its data are. The `digests` are those of `RunData`.
    """
    names = [name for name in SETTINGS if name not in HOST_SETTINGS and name != "init_from"]
    # Wherever a table is here, its digest is compared.
    values = {name: "a table" if names_table(name, value) else value for name, value in config.to_json().items()}
    drawn = {f"{what} (their digest)": (digests or {}).get(name) for name, what in DRAWN_BY.items()}
    others = {"data (the digest of the manifest)": manifest_digest, **drawn, **recorded_versions()}
    text = json.dumps({"settings": {name: values[name] for name in names}, "others": others})
    first, own = json.loads(exchange("settings", text)[0]), json.loads(text)
    if first == own:
        return
    changed = [name for name in names if first["settings"].get(name) != own["settings"][name]]
    other_differences = [
        f"{name} {found}, not {first['others'].get(name)}"
        for name, found in own["others"].items()
        if first["others"].get(name) != found
    ]
    differences = [f"{{{name}}} {{{name}_here}}, not {{{name}_first}}" for name in changed]
    found = {f"{name}_here": describe_value(own["settings"][name]) for name in changed}
    found |= {f"{name}_first": describe_value(first["settings"].get(name)) for name in changed}
    raise SettingError(
        changed[0] if changed else "data",
        f"all processes of a run must have the same settings, data and versions, but this one has "
        f"{listed([*differences, *other_differences])}, as the first process has: start them with the same options",
        **found,
    )


def check_steps(config: TrainConfig, recorded: TrainConfig, steps_done: int) -> None:
    """Raise SettingError if a resume changes `steps` to a number that the run has already reached."""
    if config.steps == recorded.steps or config.steps > steps_done:
        return
    remedy = "give more steps"
    if recorded.steps > steps_done:
        remedy = "leave {setting} out to continue to step {recorded:,}, or give more steps"
    raise SettingError(
        "steps",
        "the steps of a resumed run must be more than the {done:,} already done, got {asked:,}: " + remedy,
        done=steps_done,
        asked=config.steps,
        recorded=recorded.steps,
    )


def describe_changes(config: TrainConfig, recorded: TrainConfig) -> str | None:
    """Return a message that lists the settings changed by a resume, or None if there are none."""
    changed = [
        f"{name} {describe_value(old)} → {describe_value(now)}"
        for name, old, now in _differences(with_absolute_paths(recorded), with_absolute_paths(config))
        if SETTINGS[name].owner in (Owner.RUN, Owner.DATA)
    ]
    return f"resumed with {', '.join(changed)}" if changed else None


def note_changes(
    recorded: RecordedRun,
    config: TrainConfig,
    step: int,
    topology: Topology,
    machine: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Return the record of the launches before a resume at `step`, with what changed.

    That is settings, versions, the topology and, as `machine_of` describes it, the machine.
    """
    earlier = [{**launch, "until_step": min(launch["until_step"], step)} for launch in recorded.earlier]
    changed = {name: old for name, old, _ in _differences(recorded.config, config) if name in RUNTIME_SETTINGS}
    versions = {} if recorded.versions == recorded_versions() else {"versions": recorded.versions}
    before = Topology.from_json(recorded.resolved)
    places: dict[str, Any] = {} if before == topology else {"topology": before.to_json()}
    if machine is not None and (ran_on := recorded.resolved.get(MACHINE)) != machine:
        places[MACHINE] = ran_on
    # Before the first step, nothing was done with the old settings.
    if (changed or versions or places) and step:
        earlier.append({"until_step": step, "settings": changed, **versions, **places})
    return [launch for launch in earlier if launch["until_step"]]


def machine_of(device: jax.Device) -> dict[str, str]:
    """Return what the rounding of a launch on a device depends on, besides its kind: as `describe_machine`."""
    options = {"x64": jax.config.jax_enable_x64, "matmul_precision": jax.config.jax_default_matmul_precision}
    # A device that a program is only compiled for has no client.
    client = getattr(device, "client", None)
    return describe_machine(device.platform, str(getattr(client, "platform_version", "")), options)


def thread_rule(config: TrainConfig, *, is_user_model: bool) -> ThreadRule:
    """Return how the bits of a run depend on the number of threads, one for each core.

    XLA's kernels divide their sums among its threads. oneDNN's do not, so that the models of the registry, whose
    convolutions and products they compute, have the same bits on any number of cores; they have at most a thread per
    core. Of a model of the user's own, XLA may compute a part.
    """
    if config.kernels != ONEDNN:
        return "settable"
    return "fixed" if is_user_model else "free"


def versions_warning(recorded: RecordedRun) -> str | None:
    """Return a warning if results may not be bit-identical because part of the run used other versions, else None."""
    now = recorded_versions()
    others = {
        f"{name} {before}, now {now.get(name)}"
        for versions in (recorded.versions, *(launch.get("versions", {}) for launch in recorded.earlier))
        for name, before in versions.items()
        if before != now.get(name)
    }
    if not others:
        return None
    return f"warning: only the same versions guarantee bit-identical results; the run used {'; '.join(sorted(others))}"


def check_user(recorded: RecordedRun, run: Path, parts: UserParts) -> None:
    """Raise ValueError if a run used a user-defined part that is not given now."""
    if missing := [name for name in recorded_user_parts(recorded.resolved) if getattr(parts, name, None) is None]:
        how = f"run-train --run-dir {shlex.quote(str(run))} --resume"
        raise missing_parts(run, missing, recorded.resolved, how)


def check_digests(now: Mapping[str, Any], recorded: Mapping[str, Any]) -> None:
    """Raise ValueError if a file that says how images are drawn has changed since a run recorded it.

    Args:
        now, recorded: the resolved values of the launch and of the run.
    """
    for name, what in DRAWN_BY.items():
        if (before := recorded.get(name)) != (found := now.get(name)):
            raise ValueError(
                f"a resumed or replayed run must keep {what}, which have changed since (their digest was "
                f"{_short(before)}, is now {_short(found)}): restore them, or {_ANOTHER_RUN}"
            )


def check_data(resolved: Mapping[str, Any], data: RunData, recorded: RecordedRun) -> None:
    """Raise ValueError if the data or the model, which `resolved` describes, are not those of the recorded run."""
    check_manifest(data, recorded)
    now = json.loads(json.dumps(resolved))
    check_digests(now, recorded.resolved)
    for name in _KEPT_PROPERTIES:
        if now.get(name) != recorded.resolved.get(name) and not (
            name == OWN_FUNCTIONS and _have_same_parts(recorded.resolved, now)
        ):
            raise ValueError(
                f"a resumed or replayed run must keep its {name}, which was {recorded.resolved.get(name)!r}, got "
                f"{now.get(name)!r}: use the data and the model that it started with, or {_ANOTHER_RUN}"
            )


def _have_same_parts(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether two records have the same user-defined functions, by their names or else by their sources."""
    names, sources = (tuple(each.get(key, {}) for each in (before, now)) for key in (OWN_FUNCTIONS, USER_SOURCES))

    def is_same(part: str) -> bool:
        was, found = (each[part] for each in names)
        if was == found or (isinstance(was, str) and isinstance(found, str) and is_same_part(was, found)):
            return True
        digests = [each.get(part) for each in sources]
        return digests[0] is not None and digests[0] == digests[1]

    return names[0].keys() == names[1].keys() and all(map(is_same, names[0]))


def check_manifest(data: RunData, recorded: RecordedRun) -> None:
    """Raise ValueError if the training split is not that of the recorded run."""
    if data.manifest_digest != recorded.manifest_digest:
        raise ValueError(
            f"a resumed or replayed run must have its original data, but these differ: {data.description} (the "
            f"manifest's digest was {_short(recorded.manifest_digest)}, is now {_short(data.manifest_digest)}). "
            f"Give the folder where the original data are now (--data), or {_ANOTHER_RUN}"
        )


def _short(digest: str | None) -> str:
    return "none" if digest is None else digest[:12]
