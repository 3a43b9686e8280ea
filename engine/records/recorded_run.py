"""What `config.json` records of a run, read back. Needs no jax, so that the commands can refuse quickly."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import TrainConfig
from engine.records.run_folder import CONFIG


@dataclass(frozen=True)
class RecordedRun:
    """What `config.json` holds.

    Attributes:
        config: the settings of the last launch.
        resolved: what they resolved to.
        manifest_digest: of the data, None where they had none.
        origins: where each setting came from.
        versions: of what took part.
        earlier: of earlier launches, oldest first: `until_step` and the `settings` that were others until then.
    """

    config: TrainConfig
    resolved: dict[str, Any]
    manifest_digest: str | None
    origins: dict[str, str]
    versions: dict[str, str]
    earlier: tuple[dict[str, Any], ...]

    def config_at(self, step: int) -> TrainConfig:
        """Gives the settings that the update `step` (from 1) was made with."""
        config = self.config
        for launch in reversed(self.earlier):
            if step <= launch["until_step"]:
                config = dataclasses.replace(config, **launch["settings"])
        return config

    def changes(self) -> tuple[int, ...]:
        """Gives the steps after which settings changed, ascending."""
        return tuple(sorted({launch["until_step"] for launch in self.earlier}))


def read_recorded(run: Path) -> RecordedRun:
    """Reads `config.json`.

    Raises:
        ValueError: where it is missing, unreadable or of another form.
    """
    path = run / CONFIG
    try:
        values = json.loads(path.read_bytes())
        return RecordedRun(
            config=TrainConfig.from_json(values["config"]),
            resolved=dict(values["resolved"]),
            manifest_digest=values["manifest_sha256"],
            origins=dict(values["origins"]),
            versions=dict(values["versions"]),
            earlier=tuple(
                {**e, "until_step": int(e["until_step"]), "settings": dict(e["settings"])} for e in values["earlier"]
            ),
        )
    except FileNotFoundError:
        raise ValueError(f"a run folder must hold {CONFIG}, and {run} does not: name the folder of a run") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} must be what run-train wrote, and cannot be read ({type(error).__name__}: {error}): "
            "restore it, or begin another run"
        ) from error
