"""A run of the training program: its host side, data, model and crossings, set up in this order, and its execution.

Owns how the parts are connected. Does not depend on run folders: `loopfeed.engine.run.train` owns the order of the
stages, `loopfeed.engine.run.compiling` the compilation, `loopfeed.engine.run.recorder` what is written.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from loopfeed.engine.compilation.ahead_of_time import (
    Compiled,
)
from loopfeed.engine.config import TrainConfig
from loopfeed.engine.control.board import ControlBoard
from loopfeed.engine.control.signals import StopSignals, start_on_worker
from loopfeed.engine.crossing.devices import Placement, place_here
from loopfeed.engine.crossing.infeed import BatchInfeed
from loopfeed.engine.crossing.outfeed import Outfeed
from loopfeed.engine.data.open_data import RunData, open_data
from loopfeed.engine.feed.batches import error_of_changes
from loopfeed.engine.images.unpack import LEAST_STD, PixelScale
from loopfeed.engine.keys import plain_keys
from loopfeed.engine.parts import UserParts
from loopfeed.engine.program.checked_model import CheckedModel, size_refusal
from loopfeed.engine.program.kernels import kernels_on
from loopfeed.engine.program.loop import ProgramStage
from loopfeed.engine.program.train_state import TrainModel, TrainState, name_of_model
from loopfeed.engine.records.run_folder import RunFolder
from loopfeed.engine.records.stored.stored_run import StoredRun
from loopfeed.engine.records.stored_types import check_weight_types
from loopfeed.engine.records.weights import check_names
from loopfeed.engine.replicas import device_put_replicated, unreplicate
from loopfeed.engine.run.infeeds import bytes_ahead, infeed_of_evaluations, infeed_of_training
from loopfeed.engine.run.profiling import Profiling
from loopfeed.engine.run.program_settings import (
    compiled_settings_of_run,
    compiled_settings_of_stages,
    runtime_settings,
    seed_words,
)
from loopfeed.engine.run.resolve import choose_model
from loopfeed.engine.run.resume import Resume, draw_state
from loopfeed.engine.run.run_stages import check_sizes, describe_selections, size_batches
from loopfeed.engine.run.starting_weights import read_weights_of_run, with_statistics
from loopfeed.engine.runtime.goodput import recording_compilations
from loopfeed.engine.runtime.record import ProgramTimes
from loopfeed.engine.settings import SettingError
from loopfeed.engine.spans import EVALUATION, LOOP, Spans
from loopfeed.engine.stream.loss_stream import LossStream
from loopfeed.engine.stream.notices import Notices
from loopfeed.engine.stream.sinks import Sink
from loopfeed.engine.updates.checks import check_user_rate
from loopfeed.engine.updates.settings import CompiledSettings, RuntimeSettings
from loopfeed.engine.updates.update import Weights
from loopfeed.models.registry import count_params
from loopfeed.preprocess.shards.reader import ChangedShardError
from loopfeed.preprocess.workers import Worker, wait_for


class NonFiniteError(ArithmeticError):
    """Raised if the gradients of a run, or the weights that they would make, were not finite too often in a row.

    Attributes:
        first_step: the first of these consecutive steps.
    """

    def __init__(self, message: str, first_step: int) -> None:
        super().__init__(message)
        self.first_step = first_step


def nonfinite_error(
    step: int, num_skips: int, most_skips: int, *, has_user_part: bool = False
) -> NonFiniteError | None:
    """Return an error if NaN or infinite gradients or weights ended the run, else None.

    Args:
        step: the last step.
        num_skips: number of updates skipped in a row, up to and including the last.
        most_skips: largest allowed number of updates skipped in a row.
        has_user_part: whether a user-defined optimizer or schedule may have made the updates NaN or infinite.
    """
    if num_skips <= most_skips:
        return None
    message = (
        f"the gradient, or a weight that it would make, was NaN or infinite at step {step}"
        + (f", the last of {num_skips} such steps in a row" if num_skips > 1 else "")
        + "; the weights are those of the last finite update. Try a lower learning rate (--learning-rate), a warm-up "
        "(--warmup-steps), a limit on the norm of the gradient (--clip-norm), or --skip-nonfinite"
    )
    if has_user_part:
        message = message.replace("that it would make", "that your optimizer or schedule would make of it", 1)
    return NonFiniteError(message, first_step=step - num_skips + 1)


# Time limit for closing all sinks together: long after a clean stop, short after an immediate one.
_CLOSE_TIMEOUT_S = 60.0
_QUIT_TIMEOUT_S = 1.0
# How soon the first loss is noticed.
_POLL_EVERY_S = 0.1


class Run:
    """The parts of one launch of a run, opened in order; `stack` closes them in reverse order.

    The constructor opens the host side. Then come `open_data`, `open_program`, the compilation and `execute`.

    Args:
        config: the settings; `open_program` takes them with epochs converted to steps.
        parts: the user-defined parts.
        notify: called with a line of text.
        stack: closes what is opened.
        start: where the launch begins.
        board: the board of requests to the program; None makes one.
        placement: devices for which the program is only compiled; None chooses those of this machine.

    Attributes:
        board, notices, stream: the requests to the program, the messages to the user, and what the program emits.
        team, transport: the devices that train together, and the way in which the program calls the host.
        data, model: the opened data and the model to train.
        infeed, evaluation_infeed, outfeed: the crossings; the second is None if nothing is evaluated.
        num_params: number of learnable parameters.
        given: the initial weights that this launch read, None if it read none.
        selection: a message that says what is frozen, None if nothing is.
        spans, programs, train_s, profiling: what the launch spends its time on, and what meters it.
        is_over: whether the loop has ended by itself, not by an error or a second signal.
        path, folder, stored: the run folder on this machine, the same if it is locked to be written, and what uploads
            it; None if there is none. Set by whoever claims them.
        on_stall: called with a line, from another thread, when no step has ended for `stall_warn_s`; must not block.
        given_config: the settings before epochs were converted to steps.
        has_changed_data: whether `failure` found that the data were modified during the run, so that steps may have
            been trained on other images.

    Raises:
        ValueError: settings that do not fit each other, the data or this machine, here or in `open_…`.
    """

    def __init__(
        self,
        config: TrainConfig,
        parts: UserParts,
        notify: Callable[[str], None],
        stack: ExitStack,
        start: Resume,
        *,
        board: ControlBoard | None = None,
        placement: Placement | None = None,
    ) -> None:
        self.config, self.parts, self.start = config, parts, start
        self.notify, self._stack = notify, stack
        self.spans, self.is_over = Spans(), False
        self.board, self.notices = board or ControlBoard(), Notices(notify)
        self.place = place_here(config) if placement is None else placement
        self.team, self.transport = self.place.team, self.place.transport
        self.chunk = self.place.chunk_of(config)
        where = "after the current chunk of steps" if self.chunk > 1 else "at the next step"
        self._signals = StopSignals(self.board, self.notices.say, where)
        stack.enter_context(self._signals)
        stack.enter_context(recording_compilations(self.spans))
        stack.callback(self.notices.close)
        self.given_config = config
        self.path: Path | None = None
        self.folder: RunFolder | None = None
        self.stored: StoredRun | None = None
        self.programs: list[ProgramTimes] = []
        self.train_s, self.has_changed_data = 0.0, False
        self._program: Worker[TrainState] | None = None
        self._kept_stage: int | None = None
        self.paused_collector = ExitStack()
        self.on_stall: Callable[[str], None] = lambda _: None

    def open_data(self) -> RunData:
        """Open the data that the settings or the user name."""
        is_new = self.start.recorded is None
        self.data = open_data(
            self.config, self.parts, self._stack, self.notify, first_batch=self.start.batch_index, is_new=is_new
        )
        return self.data

    def open_program(self, config: TrainConfig) -> None:
        """Choose the model for the data, connect the program's crossings, and read initial weights."""
        self.config, data, start = config, self.data, self.start
        self.model: TrainModel = choose_model(config, self.parts, data)
        self.profiling = Profiling(config, data, self.place, self.chunk, start.batch_index, self.notices.say)
        profiler = self.profiling.profiler
        size_batches(config, data, self.team)
        self.infeed = infeed_of_training(config, data.source, self.place, self.chunk, self.board, start, profiler)
        self.evaluation_infeed = None
        if data.evaluation is not None:
            self.evaluation_infeed = infeed_of_evaluations(
                config, data.evaluation, self.place, self.board, start, self._note_evaluation, profiler
            )
        self.stream = LossStream(
            batch=config.images_per_step,
            ranges=config.step_ranges,
            step=start.step,
            wait_of=self._wait_of,
            board=self.board,
            spans=self.spans,
            warn=self.notices.say,
            on_nonfinite=lambda step: self.notices.say(
                f"warning: the loss became NaN or infinite at step {step}; a lower learning rate may help"
            ),
        )
        self._stack.callback(self.stream.release)
        self._stack.callback(self.paused_collector.close)
        on_push = None if profiler is None else profiler.pushed
        self.outfeed = Outfeed(
            self.stream.receive, self.board, self.transport, step=start.step, spans=self.spans, on_push=on_push
        )
        num_devices = len(self.team.devices)
        settings = compiled_settings_of_stages(config, self.parts, self.model, data, num_devices)
        self.stages = [
            ProgramStage(each, stage.batch // num_devices)
            for each, stage in zip(settings, config.by_stage, strict=True)
        ]
        self.settings: CompiledSettings = settings[0]
        if config.stages is not None:
            of_run = compiled_settings_of_run(config, self.parts, self.model, data, num_devices)
            self.settings = replace(of_run, frozen_by_stage=settings[0].frozen_by_stage)
        self.draw = partial(draw_state, self.model, self.settings)
        self.state_shape = shape = jax.eval_shape(self.draw, seed_words(0))
        self._check_evaluated_size()
        self.selection = describe_selections(config, shape, has_user_optimizer=self.parts.optimizer is not None)
        check_user_rate(self.settings, shape.params)
        check_sizes(config, data, self.checked_model(), self.stages, shape)
        self.given = read_weights_of_run(config, self.registry_name, start, shape, self.notify, data)
        self.data = with_statistics(config, data, self.given, start)
        self.num_params = count_params(shape.params)
        if self.registry_name is None:
            check_names(shape.params, shape.batch_stats)
            if config.run_dir is not None:
                check_weight_types(shape.params, shape.batch_stats)

    def _check_evaluated_size(self) -> None:
        """Raise SettingError if the model cannot be applied to images of the size of evaluations."""
        size, shape = self.config.eval_image_size, self.state_shape
        if size is None:
            return
        weights, batch = Weights(shape.params, shape.batch_stats), self.config.batch // len(self.team.devices)
        if (reason := size_refusal(self.checked_model(), weights, size, batch=batch)) is not None:
            raise SettingError(
                "eval_image_size",
                "{setting} must be a size of images that the model takes, but {model} does not take {size} × {size} "
                "px: {reason}. Choose another size, or leave it out",
                model=self.model_name,
                size=size,
                reason=reason,
            )

    # What is known of the run before its program is compiled.

    @property
    def stage_number(self) -> int:
        """The stage in which the launch begins, from 0."""
        return self.config.step_ranges.stage_of(self.start.step)

    def keep_stage(self, number: int) -> None:
        """Let the program have one stage alone, so that it can be analysed; the run can then not be executed."""
        self._kept_stage, self.stages = number, [self.stages[number]]

    @property
    def stage(self) -> ProgramStage:
        """What is compiled for the stage in which the launch begins."""
        return self.stages[self.stage_number]

    @property
    def model_name(self) -> str:
        """The name of the model in messages."""
        return name_of_model(self.model)

    @property
    def registry_name(self) -> str | None:
        """The name of the model in the registry, None for a user-defined one."""
        return name_of_model(self.model) if self.parts.model is None else None

    @property
    def given_digest(self) -> str | None:
        """The SHA-256 of the initial weights that this launch read, or None if it read none."""
        return None if self.given is None else self.given.digest

    @property
    def given_origin(self) -> dict[str, Any] | None:
        """Where the initial weights that this launch read are from, as recorded; None if it read none."""
        return None if self.given is None else self.given.origin._asdict()

    @property
    def ring_bytes(self) -> int:
        """The number of bytes of host memory that the batches and windows read ahead occupy."""
        return bytes_ahead(self.config, self.data, self.place, self.chunk)

    @property
    def state_bytes(self) -> int:
        """The number of bytes of the training state, of which each device has a copy."""
        leaves = jax.tree.leaves(jax.eval_shape(plain_keys, self.state_shape))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    @property
    def std(self) -> tuple[float, ...]:
        """The standard deviation by which the program divides each channel, on the scale 0 … 1."""
        return tuple(max(each, LEAST_STD) for each in self.data.std)

    def values(self) -> RuntimeSettings:
        """Return the runtime settings of the program."""
        num_eval_batches = self.data.evaluation.num_batches if self.data.evaluation else 0
        scale = PixelScale(mean=jnp.array(self.data.mean, jnp.float32), std=jnp.array(self.std, jnp.float32))
        values = runtime_settings(self.config, num_eval_batches, scale, self.data.class_weights)
        return values if self._kept_stage is None else values._replace(stages=(values.stages[self._kept_stage],))

    def checked_model(self, notify: Callable[[str], None] = lambda _: None) -> CheckedModel:
        """Return the model as the programs of the run apply it."""
        data, kernels = self.data, kernels_on(self.config, self.place.platform)
        return CheckedModel(self.model, data.num_classes, data.source, kernels, notify)

    def execute(
        self, compiled: Compiled, state: TrainState, sinks: Sequence[Sink], values: RuntimeSettings | None = None
    ) -> TrainState:
        """Run the program to completion and return its final state; errors on the host are returned by `failure`.

        Args:
            compiled: the program.
            state: the initial state; its memory is donated.
            sinks: the sinks of the loss stream.
            values: the runtime settings; None for those of the run.
        """
        started = time.perf_counter()
        self.stream.start(sinks)
        close_timeout_s = _QUIT_TIMEOUT_S
        try:
            state = self._run_loop(compiled, state, self.values() if values is None else values)
            close_timeout_s = _CLOSE_TIMEOUT_S
        except Exception:
            self._signals.failed()
            raise
        finally:
            self.train_s = time.perf_counter() - started
            self.is_over = close_timeout_s == _CLOSE_TIMEOUT_S
            self.spans[LOOP].end()
            self.profiling.report(compiled, self.train_s, self.stream)
            self.stream.close(close_timeout_s)
        return state

    def _run_loop(self, compiled: Compiled, state: TrainState, values: RuntimeSettings) -> TrainState:
        with self.transport.running(), ExitStack() as infeeds:
            for infeed in self.infeeds:
                infeeds.callback(infeed.close)
                infeed.start()
            self._signals.launched()
            self.notices.start()
            self.spans[LOOP].begin()
            placed = device_put_replicated((state, values), self.team.devices)
            with self.profiling.running():
                self._program = start_on_worker(lambda: jax.block_until_ready(compiled.call(*placed)))
                while not (self.stream.num_losses or self._program.wait(_POLL_EVERY_S)):
                    pass
                self.paused_collector.close()
                state = self._program.result()
            return unreplicate(state, self.team.devices)

    @property
    def infeeds(self) -> list[BatchInfeed]:
        """The infeeds that there are."""
        return [each for each in (self.infeed, self.evaluation_infeed) if each is not None]

    @property
    def steps_begun(self) -> int:
        """The number of updates whose batches the program has asked for, also while it runs."""
        return (self.board.last_batch + 1) // self.config.accumulate_steps

    def _wait_of(self, step: int) -> float:
        """Return how many seconds the loop waited for the batches of one update; `step` counts from 0."""
        count = self.config.accumulate_steps
        waits_s = [self.infeed.take_wait_s(index) for index in range(step * count, (step + 1) * count)]
        if self.profiling.profiler is not None:
            self.profiling.profiler.waited(waits_s)
        return math.fsum(waits_s)

    def _note_evaluation(self, batch: int, num_batches: int) -> None:
        if self.spans[EVALUATION].since is None:
            self.spans[EVALUATION].begin()
        self.stream.report_evaluation(batch, num_batches)

    @property
    def workers(self) -> list[Worker[Any]]:
        """The threads of the program and of its sinks, which may be at work after an interruption."""
        return [*([] if self._program is None else [self._program]), *self.stream.workers]

    def release(self) -> None:
        """Let go of the program, its arrays and the data now; nothing may use this run afterwards.

        The parts refer to each other, so that Python would find them only when its collector looks at all objects,
        which it does once in dozens of runs. If a thread of the run is still at work, it keeps them.
        """
        if self._program is None or wait_for(self.workers, 0):
            vars(self.transport).clear()
            vars(self).clear()

    def failure(self, state: TrainState) -> BaseException | None:
        """Return the run's error, if any. Errors on the host take precedence over others, and causes over effects."""
        infeeds = [each.failure for each in self.infeeds]
        others = [self.outfeed.failure, self.stream.failure, self.transport.failure]
        failures = [failure for failure in (*infeeds, *others) if failure is not None]
        if failures:
            self.has_changed_data |= isinstance(failures[0], ChangedShardError)
            return failures[0]
        if (change := error_of_changes(self.data.source, self.data.evaluation)) is not None:
            self.has_changed_data = True
            return change
        return nonfinite_error(
            int(state.step),
            int(state.update.skips.in_a_row),
            self.config.most_skips,
            has_user_part=self.settings.has_user_part,
        )
