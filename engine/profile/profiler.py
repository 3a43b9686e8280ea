"""The profiler of a launch: the clock on the host, the traces of the program, and the profile they make together."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from loopfeed.engine.crossing.pushed import Pushed
from loopfeed.engine.hlo.text import parse_hlo
from loopfeed.engine.profile.attribution import TracedBatch, attribute, operations_of, read_spans
from loopfeed.engine.profile.capture import Capture, Window
from loopfeed.engine.profile.clock import HostClock, PhaseTimes
from loopfeed.engine.profile.formats import describe_seconds
from loopfeed.engine.profile.rows import Measured, make_profile
from loopfeed.engine.profile.table import STEP, STEP_OF_SEVERAL, Profile
from loopfeed.engine.scopes import TRAIN, VALID
from loopfeed.engine.stages import StageRanges
from loopfeed.preprocess.quantities import quantity

_SKIPPED_STEPS, _TRACED_STEPS = 10, 30
_TRACED_EVALUATION_BATCHES = 10
# The notes say so if the traced steps were so much slower or faster than the mean of all.
_UNEQUAL = 0.1


@dataclass(frozen=True)
class Course:
    """What is known of a launch before it begins.

    Attributes:
        first_batch, stop_batch: numbers of the training batches of the launch, half-open.
        batches_per_step: training batches of one update.
        batch: images of a training batch, over all devices.
        epoch_images: images of an epoch, None if there are no epochs.
        eval_every_steps: steps between evaluations, 0 for one at the end, None if nothing is evaluated.
        eval_batches, eval_batch: batches of an evaluation, and images of each but the last.
        num_devices: number of devices.
        runs_ahead: whether the host runs ahead of the device.
        steps: the steps to trace, counted from 0; None chooses them.
        chunk: batches of a pull.
        ranges: the batches of each stage, None in a run without stages.
    """

    first_batch: int
    stop_batch: int
    batches_per_step: int
    batch: int
    epoch_images: int | None = None
    eval_every_steps: int | None = None
    eval_batches: int = 0
    eval_batch: int = 0
    num_devices: int = 1
    runs_ahead: bool = False
    steps: range | None = None
    chunk: int = 1
    ranges: StageRanges | None = None

    @property
    def mean_batch(self) -> float:
        """The mean number of images of the training batches."""
        num_batches = self.stop_batch - self.first_batch
        if self.ranges is None or num_batches <= 0:
            return self.batch
        return (self.ranges.image_at(self.stop_batch) - self.ranges.image_at(self.first_batch)) / num_batches

    def epoch_of(self, batch_index: int) -> int | None:
        """Return the epoch of a training batch, that of its first image; None if there are no epochs."""
        if self.epoch_images is None:
            return None
        image = batch_index * self.batch if self.ranges is None else self.ranges.image_at(batch_index)
        return image // self.epoch_images

    @property
    def step_name(self) -> str:
        """The name of one training batch in the tables."""
        return STEP if self.batches_per_step == 1 else STEP_OF_SEVERAL

    def window_warning(self) -> str | None:
        """Return why none of the chosen steps can be traced, None if some can or the user chose none."""
        if self.steps is None or self.first_batch >= self.stop_batch or TRAIN in self.windows():
            return None
        start, stop = (index // self.batches_per_step for index in (self.first_batch, self.stop_batch))
        why = (
            f"the run has only {quantity(stop, 'step')}, counted from 0"
            if self.steps.start >= stop
            else f"the run resumes at step {start:,}"
        )
        return (
            f"warning: --profile-steps {self.steps.start}:{self.steps.stop} traces nothing, because {why}; choose "
            f"steps from {start} to {stop}"
        )

    def windows(self) -> dict[str, Window]:
        """Return the batches to trace, by phase."""
        num_batches = max(self.stop_batch - self.first_batch, 0)
        found: dict[str, Window] = {}
        if self.steps is not None:
            after, stop = (
                step * self.batches_per_step - self.first_batch for step in (self.steps.start, self.steps.stop)
            )
            if stop > 0 and after < num_batches:
                found[TRAIN] = Window(max(after, 0), stop - max(after, 0), is_chosen=True, chunk=self.chunk)
        elif num_batches:
            skipped = min(_SKIPPED_STEPS * self.batches_per_step, num_batches // 3)
            found[TRAIN] = Window(skipped, _TRACED_STEPS * self.batches_per_step, chunk=self.chunk)
        if self.eval_every_steps is not None:
            every = self.eval_every_steps * self.batches_per_step
            before = (self.first_batch // every + 1) * every - self.first_batch if every else num_batches
            found[VALID] = Window(min(before, num_batches), _TRACED_EVALUATION_BATCHES)
        return found


class Profiler:
    """The profiler of one launch; it observes the calls to the host, and never stops or changes the run.

    Args:
        course: the launch.
        warn: called with a line of text if the operations cannot be traced.
    """

    def __init__(self, course: Course, warn: Callable[[str], None]) -> None:
        self._course, self._warn = course, warn
        self._clock = HostClock(course.epoch_of, draws_on_device=course.runs_ahead)
        self._capture = Capture(course.windows(), warn)
        self.training = _Pulls(self._clock, self._clock.train, self._capture, TRAIN)
        self.evaluation = _Pulls(self._clock, self._clock.valid, self._capture, VALID)

    @property
    def warning(self) -> str | None:
        """What will be missing in the profile, known before the run; None if nothing is."""
        return self._course.window_warning()

    def pushed(self, pushed: Pushed | None, began: float, ended: float) -> None:
        """Note that a record was received; see `loopfeed.engine.crossing.outfeed`."""
        self._clock.pushed(pushed, began, ended)

    def waited(self, waits_s: Iterable[float]) -> None:
        """Note how long the device waited for each batch of a step, in seconds."""
        for wait_s in waits_s:
            self._clock.add_wait(wait_s)

    def start(self) -> None:
        """Start the thread that traces; called once, before the loop."""
        self._capture.start()

    def loop_ended(self) -> None:
        """Stop the clock: the loop has ended."""
        self._clock.finish()

    def abandon(self) -> None:
        """Let the thread end by itself, because there will be no profile."""
        self._capture.abandon()

    def finish(self, hlo_text: str, fit_s: float, eval_images: int | None = None) -> Profile:
        """End a trace in progress, which may last a few seconds, and return the profile; called once, after the loop.

        Args:
            hlo_text: the optimised program.
            fit_s: seconds from the launch to the end of the loop.
            eval_images: images of an evaluation, None if there was none.
        """
        self._capture.stop()
        traced, first = self._read(hlo_text)
        course = self._course
        per_batch = eval_images / course.eval_batches if eval_images and course.eval_batches else course.eval_batch
        samples = {TRAIN: course.mean_batch, VALID: float(per_batch)}
        profile = make_profile(Measured(self._clock, fit_s, traced, first, samples, course.step_name), _NOTES)
        return Profile(profile.rows, profile.scopes, profile.traced, (*self._describe(profile), *profile.notes))

    def _read(self, hlo_text: str) -> tuple[list[TracedBatch], dict[str, int]]:
        """Return the traced batches of both phases, and the number of the first of each phase."""
        batches: list[TracedBatch] = []
        first: dict[str, int] = {}
        windows = self._course.windows()
        if not self._capture.traces:
            return batches, first
        try:
            program = parse_hlo(hlo_text)
            operations = operations_of(program)
            for window, trace in self._capture.traces.items():
                found = attribute(read_spans(trace.data, program.name), operations, {TRAIN: self._course.chunk})
                for phase in (TRAIN, VALID):
                    own = [batch for batch in found if batch.phase == phase]
                    # An evaluation may be in the window of training; otherwise each phase has a trace of its own.
                    if own and (phase == window or phase not in self._capture.traces):
                        first[phase] = trace.first[phase]
                        # A fast program does a few batches more before the trace ends.
                        batches += _leading(own, windows[phase].num_batches) if phase in windows else own
        except Exception as error:  # noqa: BLE001 - a profile never stops a run
            self._warn(f"warning: the trace could not be read ({type(error).__name__}: {error})")
            return [], {}
        return batches, first

    def _describe(self, profile: Profile) -> Iterator[str]:
        """Yield what the rows of this profile were measured from."""
        names = {TRAIN: self._course.step_name, VALID: STEP}
        for traced in profile.traced:
            row = profile.row(traced.phase, names[traced.phase])
            assert row is not None
            first = traced.first + (self._course.first_batch if traced.phase == TRAIN else 0)
            ratio = traced.mean_s / row.mean_s if row.mean_s else 1.0
            yield (
                f"* {traced.phase}: divided as in the trace of {quantity(traced.count, names[traced.phase])} "
                f"from {first:,} on, {describe_seconds(traced.mean_s)} each; "
                f"{100 * traced.attributed_s / traced.mean_s:.1f} % of it belongs to an action"
                + (f", and they took {ratio:.2f} times as long as the mean of all" if abs(ratio - 1) > _UNEQUAL else "")
                + "."
            )
            if traced.phase == TRAIN:
                yield from self._describe_stage(first)
                yield from self._describe_window(first, traced.count)
        for phase in (TRAIN, VALID):
            if profile.row(phase, names[phase]) and not any(each.phase == phase for each in profile.traced):
                yield f"No batch of the phase {phase} was traced, so what it consists of is unknown."
        if self._course.num_devices > 1:
            yield f"The operations are those of the first of {self._course.num_devices} devices."

    def _describe_stage(self, first: int) -> Iterator[str]:
        """Yield in which stage of a run with several the traced batches are, from `first` on."""
        ranges = self._course.ranges
        if ranges is not None and len(ranges) > 1:
            number = ranges.stage_of(first)
            steps = [each // self._course.batches_per_step for each in (ranges[number].first, ranges[number].stop)]
            yield (
                f"The traced steps are of stage {number + 1} of {len(ranges)}, steps {steps[0] + 1:,} to {steps[1]:,}; "
                "other stages may be divided otherwise (--profile-steps)."
            )

    def _describe_window(self, first: int, count: int) -> Iterator[str]:
        """Yield which steps the user chose, if the traced batches, `count` from `first` on, are others."""
        steps, each = self._course.steps, self._course.batches_per_step
        if steps is None or (first, count) == (steps.start * each, len(steps) * each):
            return
        chosen = f"--profile-steps asked for the steps {steps.start:,} to {steps.stop - 1:,}"
        if each > 1:
            chosen += f", which are the {STEP_OF_SEVERAL}s {steps.start * each:,} to {steps.stop * each - 1:,}"
        trace = self._capture.traces.get(TRAIN)
        limit = None if trace is None else trace.limit
        yield chosen + ("." if limit is None else f"; the trace ended at its limit of {limit}.")


_NOTES = (
    "Samples/Second of draw is how many images per second waiting for batches costs. zero_grad does not exist here: "
    "each step computes new gradients, so none are set to zero.",
)


def _leading(batches: Sequence[TracedBatch], count: int) -> list[TracedBatch]:
    """Return so many batches, or a few more if several were drawn at once."""
    before = accumulate((batch.num_batches for batch in batches), initial=0)
    return [batch for batch, number in zip(batches, before, strict=False) if number < count]


class _Pulls:
    """The observer of the pulls of one phase."""

    def __init__(self, clock: HostClock, times: PhaseTimes, capture: Capture, phase: str) -> None:
        self._clock, self._times, self._capture, self._phase = clock, times, capture, phase

    def pull_began(self, batch_index: int) -> None:
        """Note that the program asks for batches from this one on; see `PullObserver`."""
        self._clock.pull_began(self._times, batch_index)
        self._capture.pull_began(self._phase)

    def pull_ended(self, num_batches: int) -> None:
        """Note that so many batches are given; see `PullObserver`."""
        self._clock.pull_ended(self._times, num_batches)
        if num_batches > 1:
            self._capture.batches_drawn(self._phase, num_batches - 1)
