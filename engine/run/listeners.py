"""Who is told of a run beside its own record: the sinks of the caller, the loggers, and the user's command.

Owns what they are told before the first step and after the last one. The records in between are the stream's.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from loopfeed.engine.loggers.choice import make_loggers, unused_cadences_warning
from loopfeed.engine.loggers.event_command import EventCommand
from loopfeed.engine.peers import is_of_runtime
from loopfeed.engine.processes import this_process
from loopfeed.engine.records.loss_log import end_words
from loopfeed.engine.run.descriptions import crossings_of, resolved_of
from loopfeed.engine.run.result import TrainResult
from loopfeed.engine.run.run import Run
from loopfeed.engine.stream.sinks import RunDescription, Sink
from loopfeed.preprocess.system_errors import error_text


@contextmanager
def telling(run: Run, sinks: Sequence[Sink]) -> Iterator[tuple[list[Sink], Callable[[TrainResult], None]]]:
    """Describe an open run to its sinks, and tell after the block how it ended.

    Args:
        run: the run.
        sinks: the sinks of the caller.

    Yields:
        All sinks of the run, and what takes its result.
    """
    config, events = run.config, None
    # Of several processes, the first alone logs.
    is_first = this_process().index == 0
    loggers = make_loggers(config, run.path) if is_first else []
    if config.on_event is not None and is_first:
        events = EventCommand(config.on_event, config.keep_best)
        run.on_stall = events.stalled
    every = [*sinks, *loggers, *([] if events is None else [events])]
    if is_first and (warning := unused_cadences_warning(config, every)):
        run.notify(warning)
    description = _description_of(run)
    for sink in every:
        getattr(sink, "describe_run", lambda _: None)(description)
    # Not the starting point itself, whose snapshot is released before the first step.
    done_before = run.start.step if run.start.end is not None and run.start.end.is_complete else None
    with _telling_end(events, done_before) as tell_end, _finishing(every):
        yield every, tell_end


def _description_of(run: Run) -> RunDescription:
    ranges, num_images = run.config.step_ranges, run.data.num_images
    return RunDescription(
        settings=run.config.to_json(),
        facts={
            **resolved_of(run),
            **crossings_of(run),
            "num_params": run.num_params,
            "learning_rate": run.config.peak_learning_rate,
        },
        run_dir=run.path,
        step=run.start.step,
        classes=tuple(each.name for each in run.data.classes) or None,
        notify=run.notices.say,
        epoch_at=(lambda step: ranges.image_at(step) / num_images) if num_images else None,
    )


@contextmanager
def _telling_end(events: EventCommand | None, done_before: int | None) -> Iterator[Callable[[TrainResult], None]]:
    """Run the user's command after the block, with how the run ended, but not that it is done a second time.

    `done_before` is the steps of a run that was complete before, else None.
    """
    ended: list[TrainResult] = []
    try:
        yield ended.append
    except BaseException as error:
        if events is not None:
            is_interrupted = isinstance(error, KeyboardInterrupt)
            what = "interrupted" if is_interrupted else f"failed: {error_text(error)}"
            if this_process().count > 1 and is_of_runtime(error):
                what = f"failed, perhaps because another process did (its own output says more): {error_text(error)}"
            events.end("stopped" if is_interrupted else "failed", what, is_interrupted=is_interrupted)
        raise
    if events is not None:
        result, loss = ended[0], float(ended[0].losses[-1]) if len(ended[0].losses) else None
        event = "stopped" if not result.is_complete else None if result.steps_done == done_before else "done"
        events.end(event, f"{end_words(result.stopped_by)} at step {result.steps_done}", loss=loss)


@contextmanager
def _finishing(sinks: Sequence[Sink]) -> Iterator[None]:
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
        getattr(sink, "finish", lambda: None)()
