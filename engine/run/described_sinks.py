"""What sinks learn of a run before it begins, and the wait for those that are still at work after it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from loopfeed.engine.run.launch import Launch
from loopfeed.engine.stream.sinks import Finishes, RunDescription, Sink, TakesDescription


def describe_run(launch: Launch, run_dir: Path | None, sinks: Sequence[Sink]) -> None:
    """Pass what is known of the run to the sinks that use it; called before the launch opens them."""
    resolved = launch.resolved
    description = RunDescription(
        settings=launch.config.to_json(),
        facts={
            **resolved.to_json(),
            **launch.crossings,
            "num_params": launch.num_params,
            "learning_rate": launch.config.peak_learning_rate,
        },
        run_dir=run_dir,
        step=launch.start.step,
        classes=tuple(each.name for each in resolved.data.classes) or None,
        notify=launch.notices.say,
    )
    for sink in sinks:
        if isinstance(sink, TakesDescription):
            sink.describe_run(description)


@contextmanager
def finishing(sinks: Sequence[Sink]) -> Iterator[None]:
    """Let the sinks that are still at work after the block finish, unless the user stops the block at once."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException:
        _finish(sinks)
        raise
    _finish(sinks)


def _finish(sinks: Sequence[Sink]) -> None:
    for sink in sinks:
        if isinstance(sink, Finishes):
            sink.finish()
