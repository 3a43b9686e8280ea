"""The profile of a launch: the profiler that its settings ask for, if any, and when it measures."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from loopfeed.engine.compilation.ahead_of_time import Compiled
from loopfeed.engine.config import TrainConfig, parse_profile_steps
from loopfeed.engine.crossing.devices import Placement
from loopfeed.engine.data.open_data import RunData
from loopfeed.engine.processes import this_process
from loopfeed.engine.profile.profiler import Course, Profiler
from loopfeed.engine.profile.table import Profile
from loopfeed.engine.stream.loss_stream import LossStream


class Profiling:
    """Measures the profile of one launch, if the setting `profile` is on; of several processes, in the first alone.

    Args:
        config: the settings, with epochs converted to steps.
        data: the sources of the batches.
        place: the transport and the devices.
        chunk: training batches per pull.
        first_batch: the first batch of the launch.
        warn: called with a line of text; it must not block.

    Attributes:
        profiler: observes the calls to the host, None if nothing is measured.
        profile: the profile, None without one or before the end.
        is_collecting: whether the run waits until the trace is collected and the profile computed; read by any thread.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: RunData,
        place: Placement,
        chunk: int,
        first_batch: int,
        warn: Callable[[str], None],
    ) -> None:
        self.profile: Profile | None = None
        self.is_collecting = False
        self._warn = warn
        is_on = config.profile and this_process().index == 0 and place.is_here
        self.profiler = Profiler(_course(config, data, place, chunk, first_batch), warn) if is_on else None
        self._has_ended = False

    @property
    def warning(self) -> str | None:
        """What will be missing in the profile, known before the run; None if nothing is."""
        return None if self.profiler is None else self.profiler.warning

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure inside the block, in which the loop runs."""
        if self.profiler is None:
            yield
            return
        self.profiler.start()
        try:
            yield
        except BaseException:
            self.profiler.abandon()
            raise
        self.profiler.loop_ended()
        self._has_ended = True

    def report(self, compiled: Compiled, fit_s: float, stream: LossStream) -> None:
        """Compute the profile and pass it to the sinks that take one, while the others close.

        Does nothing if the loop failed.

        Args:
            compiled: the program.
            fit_s: seconds from the launch to the end of the loop.
            stream: the stream of the launch, not closed.
        """
        if self.profiler is None or not self._has_ended:
            return
        # The trace may take long to collect, and the files of the losses must not wait for it.
        stream.end_sinks_without_profile()
        num_images = stream.evaluations[0].num_images if stream.evaluations else None
        self.is_collecting = True
        try:
            self.profile = self.profiler.finish(compiled.call.as_text() or "", fit_s, num_images)
        except Exception as error:  # noqa: BLE001 - a profile never stops a run
            self._warn(f"warning: there is no profile, because computing it failed ({type(error).__name__}: {error})")
            return
        finally:
            self.is_collecting = False
        stream.report_profile(self.profile)


def _course(config: TrainConfig, data: RunData, place: Placement, chunk: int, first_batch: int) -> Course:
    evaluated = data.evaluation
    return Course(
        first_batch=first_batch,
        stop_batch=config.steps * config.accumulate_steps,
        batches_per_step=config.accumulate_steps,
        batch=config.batch,
        ranges=None if config.stages is None else config.batch_ranges,
        epoch_images=data.num_images,
        eval_every_steps=None if evaluated is None else config.eval_every_steps or 0,
        eval_batches=0 if evaluated is None else evaluated.num_batches,
        eval_batch=0 if evaluated is None else evaluated.batch,
        num_devices=len(place.team.devices),
        runs_ahead=place.transport.runs_ahead,
        steps=None if config.profile_steps is None else parse_profile_steps(config.profile_steps),
        # Where the host runs ahead, the device draws the batches of a chunk one by one.
        chunk=1 if place.transport.runs_ahead else chunk,
    )
