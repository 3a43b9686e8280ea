"""A run of the training program: its host side, data, model and crossings, set up in this order; then its program.

Owns how the parts are connected, and what is compiled and executed. Does not depend on run folders:
`loopfeed.engine.run.train` owns the order of the stages, `loopfeed.engine.run.recorder` what is written.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from loopfeed.engine.compilation.ahead_of_time import (
    Compiled,
    Traced,
    caching_compilations,
    compile_traced,
    memory_warning,
    trace_ahead,
)
from loopfeed.engine.compilation.garbage_collector import without_collector
from loopfeed.engine.config import TrainConfig
from loopfeed.engine.control.board import ControlBoard
from loopfeed.engine.control.signals import StopSignals, call_on_worker, start_on_worker
from loopfeed.engine.crossing.choice import this_device, traced_platform
from loopfeed.engine.crossing.devices import Placement, place_here
from loopfeed.engine.crossing.infeed import BatchInfeed
from loopfeed.engine.crossing.outfeed import Outfeed
from loopfeed.engine.data.open_data import RunData, open_data
from loopfeed.engine.feed.batches import error_of_changes
from loopfeed.engine.images.unpack import LEAST_STD, PixelScale
from loopfeed.engine.keys import plain_keys
from loopfeed.engine.objective.batch_size_check import check_batch_size
from loopfeed.engine.parts import UserParts
from loopfeed.engine.processes import this_process
from loopfeed.engine.program.checked_model import CheckedModel
from loopfeed.engine.program.kernels import kernels_on, record_kernels
from loopfeed.engine.program.loop import make_program
from loopfeed.engine.program.slow_convolutions import slow_convolutions_warning
from loopfeed.engine.program.train_state import TrainModel, TrainState, name_of_model
from loopfeed.engine.records.machine import MACHINE
from loopfeed.engine.records.run_folder import RunFolder
from loopfeed.engine.records.stored.stored_run import StoredRun
from loopfeed.engine.records.stored_types import check_weight_types
from loopfeed.engine.records.topology import Topology
from loopfeed.engine.records.weights import check_names
from loopfeed.engine.replicas import device_put_replicated, replicate, shapes_on, unreplicate
from loopfeed.engine.run.changed_rules import check_rules, rules_of
from loopfeed.engine.run.changes import check_data, check_given_weights, machine_of
from loopfeed.engine.run.descriptions import describe_run
from loopfeed.engine.run.first_weights import draw_state, put_given_weights, read_weights_of_run
from loopfeed.engine.run.infeeds import bytes_ahead, depth_of, infeed_of_evaluations, infeed_of_training
from loopfeed.engine.run.nonfinite import nonfinite_error
from loopfeed.engine.run.profiling import Profiling
from loopfeed.engine.run.program_settings import compiled_settings_of_run, runtime_settings, seed_words
from loopfeed.engine.run.resolve import choose_model, describe_resolved
from loopfeed.engine.run.resume import Resume, find_cuts
from loopfeed.engine.runtime.compilations import recording_compilations
from loopfeed.engine.runtime.record import ProgramTimes
from loopfeed.engine.spans import COMPILING, EVALUATION, LOOP, Spans
from loopfeed.engine.stream.loss_stream import LossStream
from loopfeed.engine.stream.notices import Notices
from loopfeed.engine.stream.sinks import Sink
from loopfeed.engine.updates.checks import check_user_rate, describe_selection
from loopfeed.engine.updates.settings import CompiledSettings, RuntimeSettings
from loopfeed.models.registry import count_params
from loopfeed.preprocess.shards.reader import ChangedShardError
from loopfeed.preprocess.workers import Worker

# Time limit for closing all sinks together: long after a clean stop, short after an immediate one.
_CLOSE_TIMEOUT_S = 60.0
_QUIT_TIMEOUT_S = 1.0
# How soon the first loss is noticed.
_POLL_EVERY_S = 0.1
# jax's name for NVIDIA GPUs, the only devices for which a program is compiled where there are none.
_ABSENT_BACKEND = "gpu"


class DryRun(NamedTuple):
    """The compiled program of a run that is not started.

    Attributes:
        run: the run, which is closed.
        compiled: the program, with XLA's analysis of memory and work.
        traced: the program before XLA optimised it.
        in_all_forms: the jaxpr of the program with layers in their forms for all platforms, if it was asked for.
    """

    run: "Run"
    compiled: Compiled
    traced: Traced
    in_all_forms: Any = None


class Run:
    """The parts of one launch of a run, opened in order; `stack` closes them in reverse order.

    The constructor opens the host side. Then come `open_data`, `open_program`, and either `plan` or, inside
    `compiling`, `trace` and `prepare`, and at last `execute`.

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
        spans, programs, train_s, profiling: what the launch spends its time on, and what meters it.
        is_over: whether the loop has ended by itself, not by an error or a second signal.
        path, folder, stored: the run folder on this machine, the same if it is locked to be written, and what uploads
            it; None if there is none. Set by whoever claims them.
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
        self._paused_collector = ExitStack()

    def open_data(self) -> RunData:
        """Open the data that the settings or the user name."""
        is_new = self.start.recorded is None
        self.data = open_data(
            self.config, self.parts, self._stack, self.notify, first_batch=self.start.batch_index, is_new=is_new
        )
        return self.data

    def open_program(self, config: TrainConfig) -> None:
        """Choose the model for the data, connect the program's crossings, read initial weights, and describe it all."""
        self.config, data, start = config, self.data, self.start
        self.model: TrainModel = choose_model(config, self.parts, data)
        self.profiling = Profiling(config, data, self.place, self.chunk, start.batch_index, self.notices.say)
        profiler = self.profiling.profiler
        self.infeed = infeed_of_training(config, data.source, self.place, self.chunk, self.board, start, profiler)
        self.evaluation_infeed = None
        if data.evaluation is not None:
            self.evaluation_infeed = infeed_of_evaluations(
                config, data.evaluation, self.place, self.board, start, self._note_evaluation, profiler
            )
        self.stream = LossStream(
            batch=config.batch * config.accumulate_steps,
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
        self._stack.callback(self._paused_collector.close)
        on_push = None if profiler is None else profiler.pushed
        self.outfeed = Outfeed(
            self.stream.receive, self.board, self.transport, step=start.step, spans=self.spans, on_push=on_push
        )
        self.settings: CompiledSettings = compiled_settings_of_run(
            config, self.parts, self.model, data, len(self.team.devices)
        )
        self._draw = partial(draw_state, self.model, self.settings)
        self._state_shape = shape = jax.eval_shape(self._draw, seed_words(0))
        selected = describe_selection(config, shape.params, shape.batch_stats)
        check_user_rate(self.settings, shape.params)
        self.given = read_weights_of_run(config, self.registry_name, start, shape, self.notify, data.classes)
        self.num_params = count_params(shape.params)
        if self.registry_name is None:
            check_names(shape.params, shape.batch_stats)
            if config.run_dir is not None:
                check_weight_types(shape.params, shape.batch_stats)
        for message in describe_run(
            config, data, self.model_name, self.num_params, self.place, self.chunk,
            also=(selected, self.profiling.warning),
        ):  # fmt: skip
            self.notify(message)

    def check_is_as_recorded(self) -> None:
        """Raise ValueError if data, model, rules or initial weights are not those of the recorded run."""
        recorded = self.start.recorded
        assert recorded is not None
        check_data(self.resolved, self.data, recorded)
        check_rules(self.rules, recorded.resolved)
        check_given_weights(self.given_digest, recorded)

    # What is known of the run before its program is compiled.

    @property
    def model_name(self) -> str:
        """The name of the model in messages."""
        return name_of_model(self.model)

    @property
    def registry_name(self) -> str | None:
        """The name of the model in the registry, None for a user-defined one."""
        return name_of_model(self.model) if self.parts.model is None else None

    @property
    def resolved(self) -> dict[str, Any]:
        """What the settings resolved to, as recorded."""
        return describe_resolved(self.model, self.parts, self.data)

    @property
    def rules(self) -> dict[str, int]:
        """The numbers of the changed rules that the launch uses, by name."""
        return rules_of(self.config, self.parts, self.model, self.data, self.given)

    @property
    def given_digest(self) -> str | None:
        """The SHA-256 of the initial weights that this launch read, or None if it read none."""
        return None if self.given is None else self.given.digest

    @property
    def topology(self) -> Topology:
        """The devices and processes of this launch."""
        return Topology(str(self.team.devices[0].device_kind), len(self.team.devices), this_process().count)

    @property
    def crossings(self) -> dict[str, Any]:
        """The topology, the transport, the batches per chunk and read ahead, oneDNN and the machine, as recorded."""
        return {
            **self.topology.to_json(),
            "transport": self.transport.name,
            "chunk_batches": self.chunk,
            "prefetch": depth_of(self.config, self.data.source, self.place, self.chunk),
            **record_kernels(self.config, self.place.platform),
            MACHINE: machine_of(self.team.devices[0]),
        }

    @property
    def ring_bytes(self) -> int:
        """The number of bytes of host memory that the batches and windows read ahead occupy."""
        return bytes_ahead(self.config, self.data, self.place, self.chunk)

    @property
    def state_bytes(self) -> int:
        """The number of bytes of the training state, of which each device has a copy."""
        leaves = jax.tree.leaves(jax.eval_shape(plain_keys, self._state_shape))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    @property
    def std(self) -> tuple[float, ...]:
        """The standard deviation by which the program divides each channel, on the scale 0 … 1."""
        return tuple(max(each, LEAST_STD) for each in self.data.std)

    def values(self) -> RuntimeSettings:
        """Return the runtime settings of the program."""
        num_eval_batches = self.data.evaluation.num_batches if self.data.evaluation else 0
        scale = PixelScale(mean=jnp.array(self.data.mean, jnp.float32), std=jnp.array(self.std, jnp.float32))
        return runtime_settings(self.config, num_eval_batches, scale)

    def checked_model(self, notify: Callable[[str], None] = lambda _: None) -> CheckedModel:
        """Return the model as the programs of the run apply it."""
        data, kernels = self.data, kernels_on(self.config, self.place.platform)
        return CheckedModel(self.model, data.num_classes, data.source, kernels, notify)

    # Compile.

    def plan(self, *, is_explained: bool = False) -> DryRun:
        """Compile the program without creating its initial state.

        Args:
            is_explained: whether the program is to be read: a program in the cache must then have the same scopes and
                source lines, and the program is traced once more with layers in their forms for all platforms, one of
                which says what they compute.
        """
        if self.start.recorded is not None and self.path is not None:
            find_cuts(self.path, self.start)
        with caching_compilations(self.config.compilation_cache, self.notify, by_metadata=is_explained):
            traced = self.trace()
            compiled = self.compile(traced)
        if not is_explained:
            return DryRun(self, compiled, traced)
        program, arguments = self._whole_program(self.checked_model())
        return DryRun(self, compiled, traced, jax.make_jaxpr(program)(*arguments))

    @contextmanager
    def compiling(self, cache: str | None, *, by_metadata: bool = False) -> Iterator[None]:
        """Keep compiled programs in a cache inside the block, and Python's collector away until the first loss.

        The collector would also delay the compiler, which needs the interpreter lock. Its first collection after the
        trace takes tenths of a second, so it waits until the first loss has come.
        """
        with caching_compilations(cache, self.notify, by_metadata=by_metadata):
            self.spans[COMPILING].begin()
            self._paused_collector.enter_context(without_collector())
            yield
            self.spans[COMPILING].end()

    def trace(self) -> Traced:
        """Trace the program on this thread, whose jax settings then apply, and warn about its convolutions."""
        self.notify("compiling the training program, or loading it from the cache")
        is_here, model = self.place.is_here, self.checked_model(self.notify)
        program, arguments = self._whole_program(model)
        platform = traced_platform(self.team.devices[0]) if is_here else self.place.platform
        traced = trace_ahead(program, *arguments, donate=(0,), platform=platform)
        if is_here:
            is_evaluated = self.evaluation_infeed is not None
            objective = self.settings.evaluated_objective if is_evaluated else self.settings.objective
            check_batch_size(objective, model.outputs, self.notify)
        if self.registry_name is None and (warning := slow_convolutions_warning(traced.jaxpr)):
            self.notify(warning)
        return traced

    def prepare(self, traced: Traced) -> tuple[Compiled, TrainState]:
        """Compile the program and create its initial state at the same time, and return both."""
        finish = self._start_compiling(traced)
        try:
            state = self.starting_state()
        except Exception:
            # Wait for the compilation, during which jax's settings must not change, but raise the first error.
            with suppress(Exception):
                finish()
            raise
        return finish(), state

    def compile(self, traced: Traced) -> Compiled:
        """Compile the program without creating its initial state."""
        return self._start_compiling(traced)()

    def _whole_program(self, model: CheckedModel) -> tuple[Callable[..., Any], Any]:
        """Return the training program on all devices, and the shapes of its arguments."""
        program = make_program(model, self.settings, self.infeed, self.outfeed, self.evaluation_infeed)
        arguments: Any = (self._state_shape, self.values())
        devices = self.team.devices
        return replicate(program, devices), arguments if self.place.is_here else shapes_on(arguments, devices)

    def _start_compiling(self, traced: Traced) -> Callable[[], Compiled]:
        """Compile a traced program on a worker thread, and return a function that waits for it."""
        worker = start_on_worker(
            partial(
                compile_traced,
                traced,
                deterministic=self.config.deterministic,
                dump_folder=None if self.config.dump_hlo is None else Path(self.config.dump_hlo),
                keeps=self.transport,
                backend=None if self.place.is_here else _ABSENT_BACKEND,
                is_profiled=self.config.profile,
            )
        )

        def finish() -> Compiled:
            compiled = worker.result()
            self._note_program("training", compiled)
            origin = "loaded from the cache, " if compiled.from_cache else ""
            self.notify(
                f"compiled training program in {compiled.compile_s:.1f} s ({origin}traced in {compiled.trace_s:.1f} s)"
            )
            return compiled

        return finish

    def starting_state(self) -> TrainState:
        """Return the initial state: the state in the snapshot that the launch starts from, if any, else a new state."""
        if self.start.snapshot is not None:
            from loopfeed.engine.records.snapshot import match_state

            saved = match_state(self.start.snapshot.leaves, self._state_shape)
            if self.evaluation_infeed is None:
                # Without an infeed, the loop would wait for ever for the evaluation that is due.
                saved = saved._replace(owes_evaluation=np.zeros((), np.bool))
            # Release the host's copy of the arrays, which needs as much memory again.
            self.start = replace(self.start, snapshot=None)
            return call_on_worker(lambda: jax.block_until_ready(jax.tree.map(partial(jnp.array, copy=True), saved)))
        words = seed_words(self.config.seed)
        draw = compile_traced(trace_ahead(self._draw, words, platform=traced_platform(this_device())))
        self._note_program("initial state", draw)
        return call_on_worker(
            lambda: jax.block_until_ready(put_given_weights(self.given, draw.call(words), self.settings))
        )

    def _note_program(self, name: str, compiled: Compiled) -> None:
        self.programs.append(ProgramTimes(name, compiled.trace_s, compiled.compile_s, compiled.from_cache))

    def warn_of_memory(self, compiled: Compiled) -> None:
        """Warn if the program needs more memory than the machine has, because the system would kill it silently."""
        if (warning := memory_warning(compiled, self.ring_bytes)) is not None:
            self.notify(warning)

    # Execute.

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
                self._paused_collector.close()
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
