"""Which loggers the settings of a run ask for."""

from collections.abc import Sequence
from pathlib import Path

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.crossing.pushed import PushedHistograms, PushedImages
from loopfeed.engine.loggers.experiment_log import has_package, install_hint
from loopfeed.engine.loggers.logger_sink import LoggerSink
from loopfeed.engine.records.run_folder import TENSORBOARD
from loopfeed.engine.settings import SettingError
from loopfeed.engine.stream.sinks import Sink, writer_of


def check_loggers(config: TrainConfig) -> None:
    """Raise SettingError if a logger that the settings ask for is not installed; imports nothing."""
    for name in ("tensorboard", "wandb"):
        if getattr(config, name) and not has_package(name):
            raise SettingError(name, "{setting} needs {missing}", missing=install_hint(name, name))


def make_loggers(config: TrainConfig, run_dir: Path | None) -> list[LoggerSink]:
    """Return the loggers that the settings ask for; `check_loggers` has passed.

    Args:
        config: the settings.
        run_dir: the run folder; without one, there are no event files.
    """
    found: list[LoggerSink] = []
    if config.tensorboard and run_dir is not None:
        from loopfeed.engine.loggers.tensorboard import TensorBoardSink

        found.append(TensorBoardSink(run_dir / TENSORBOARD))
    if config.wandb is not None:
        from loopfeed.engine.loggers.wandb import WandbSink

        found.append(WandbSink(config.wandb))
    return found


def unused_cadences_warning(config: TrainConfig, sinks: Sequence[Sink]) -> str | None:
    """Return a warning if histograms or images are computed although no sink takes them, else None."""
    unused = []
    if config.histogram_every_steps and not any(writer_of(sink, PushedHistograms) for sink in sinks):
        unused.append(f"--histogram-every {config.histogram_every_steps}")
    if config.log_images_every_steps and not any(writer_of(sink, PushedImages) for sink in sinks):
        unused.append(f"--log-images-every {config.log_images_every_steps}")
    if not unused:
        return None
    verb = "has" if len(unused) == 1 else "have"
    return f"warning: {' and '.join(unused)} {verb} no effect without --tensorboard or --wandb"
