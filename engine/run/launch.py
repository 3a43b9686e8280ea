"""One launch of the program: opening its parts in order, compiling it, running it to completion, and closing the parts.

Owns how the parts are connected. Does not depend on run folders: the caller provides the starting point and keeps the
final state.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.crossing.choice import this_device, traced_platform, wasted_steps_warning
from loopfeed.engine.crossing.outfeed import Outfeed
from loopfeed.engine.feed.batches import CheckedSource
from loopfeed.engine.images.unpack import LEAST_STD, PixelScale
from loopfeed.engine.keys import plain_keys
from loopfeed.engine.objective.batch_size_check import check_batch_size
from loopfeed.engine.processes import this_process
from loopfeed.engine.program.checked_model import CheckedModel
from loopfeed.engine.program.kernels import describe_kernels, kernels_on, record_kernels
from loopfeed.engine.program.loop import make_program
from loopfeed.engine.program.observed import observation_of
from loopfeed.engine.program.slow_convolutions import slow_convolutions_warning
from loopfeed.engine.program.statics import run_values, seed_words
from loopfeed.engine.program.train_state import RunValues, TrainState
from loopfeed.engine.records.machine import MACHINE
from loopfeed.engine.records.stored_types import check_weight_types
from loopfeed.engine.records.topology import Topology
from loopfeed.engine.records.weights import check_names
from loopfeed.engine.replicas import Replicas, norm_groups, put_everywhere, replicate, shapes_on, take_copy
from loopfeed.engine.run.changes import machine_of
from loopfeed.engine.run.compilation import Compiled, Traced, compile_traced, trace_ahead
from loopfeed.engine.run.descriptions import describe_chunk, describe_devices, describe_infeed, describe_model
from loopfeed.engine.run.first_weights import draw_state, put_given_weights, read_weights_of_run
from loopfeed.engine.run.garbage_collector import PausedCollector
from loopfeed.engine.run.host_side import HostSide
from loopfeed.engine.run.infeeds import Infeeds
from loopfeed.engine.run.launch_parts import LaunchParts
from loopfeed.engine.run.nonfinite import nonfinite_error
from loopfeed.engine.run.own_updates import check_own_rate, describe_selection
from loopfeed.engine.run.profiling import Profiling
from loopfeed.engine.run.resolve import Resolved
from loopfeed.engine.run.resume import StartingPoint
from loopfeed.engine.run.signals import call_on_worker, start_on_worker
from loopfeed.engine.runtime.record import ProgramTimes
from loopfeed.engine.spans import COMPILING, EVALUATION, LOOP
from loopfeed.engine.stream.loss_stream import LossStream
from loopfeed.engine.stream.sinks import Sink
from loopfeed.models.registry import count_params
from loopfeed.preprocess.memory import host_memory_bytes
from loopfeed.preprocess.shards.reader import ChangedShardError
from loopfeed.preprocess.workers import Worker

# Time limit for closing all sinks together: long after a clean stop, short after an immediate one.
_CLOSE_TIMEOUT_S = 60.0
_QUIT_TIMEOUT_S = 1.0
# jax's name for NVIDIA GPUs, the only devices for which a program is compiled where there are none.
_ABSENT_BACKEND = "gpu"


class Launch:
    """The parts of one launch, opened in order; `stack` closes them in reverse order.

    Args:
        config: the settings, with epochs converted to steps.
        resolved: the model and data that the settings select.
        host: the host side of the launch, already entered as a context manager.
        stack: closes what is opened.
        start: where the launch begins.
        notify: called with a line of text.

    Attributes:
        board: the board of requests to the program.
        notices: messages to the user during the run.
        stream: the stream of what the program emits.
        team: the devices that train together.
        num_params: number of learnable parameters.
        train_s: seconds from the launch to the end of the loop.
        profiling: measures the profile, if one is wanted.
        infeeds, outfeed, transport, spans: what the launch consists of, and what it spends its time on.
        is_over: whether the loop has ended by itself, not by an error or a second signal.
        given: the initial weights that this launch read, None if it read none.
        programs: the programs that were compiled.
        has_changed_data: whether `failure` found that the data were modified during the run, so that steps may have
            been trained on other images.

    Raises:
        ValueError: settings that do not fit each other or the data.
    """

    def __init__(
        self,
        config: TrainConfig,
        resolved: Resolved,
        host: HostSide,
        stack: ExitStack,
        start: StartingPoint,
        notify: Callable[[str], None],
    ) -> None:
        self.config, self.resolved, self.start, self._notify = config, resolved, start, notify
        self._data = resolved.data
        self.train_s, self.has_changed_data = 0.0, False
        self.board, self.notices, self._signals = host.board, host.notices, host.signals
        self.transport, self._chunk, self._devices = host.transport, host.chunk, host.team.devices
        self.team, self._is_elsewhere, self._platform = host.team, host.is_elsewhere, host.platform
        self.spans, self.is_over = host.spans, False
        self.programs: list[ProgramTimes] = []
        self._program: Worker[TrainState] | None = None
        self._replicas = Replicas(len(self._devices))
        self.profiling = Profiling(config, self._data, host, start)
        self.infeeds = Infeeds(config, self._data, host, start, self._report_evaluation, self.profiling.profiler)
        self.stream = LossStream(
            batch=config.batch * config.accumulate_steps,
            step=start.step,
            wait_of=self.infeeds.wait_of,
            board=self.board,
            spans=self.spans,
            warn=self.notices.say,
            on_nonfinite=lambda step: self.notices.say(
                f"warning: the loss became NaN or infinite at step {step}; a lower learning rate may help"
            ),
        )
        stack.callback(self.stream.release)
        self._collector = PausedCollector()
        stack.callback(self._collector.resume)
        receive = self._collector.resuming(self.stream.receive)
        on_push = None if self.profiling.profiler is None else self.profiling.profiler.pushed
        self.outfeed = Outfeed(receive, self.board, self.transport, step=start.step, spans=self.spans, on_push=on_push)
        statics = resolved.statics(config)
        self._statics = statics._replace(
            replicas=self._replicas,
            norm_groups=norm_groups(
                config.batch if config.batch_norm_sync else config.batch_norm_group, config.batch, self._replicas.count
            ),
            observation=observation_of(
                config, statics.augmentation, self._replicas, self._data.source.height, self._data.source.width
            ),
        )
        self._draw = partial(draw_state, self.resolved.model, self._statics.rule, self._statics.objective)
        self._state_shape = jax.eval_shape(self._draw, seed_words(0))
        self._selected = describe_selection(config, self._state_shape.params, self._state_shape.batch_stats)
        check_own_rate(self._statics.rule, self._state_shape.params)
        self.given = read_weights_of_run(
            config, resolved.registry_name, start, self._state_shape, notify, self._data.classes
        )
        self.num_params = count_params(self._state_shape.params)
        if self.resolved.registry_name is None:
            check_names(self._state_shape.params, self._state_shape.batch_stats)
            if config.run_dir is not None:
                check_weight_types(self._state_shape.params, self._state_shape.batch_stats)
        self._describe()

    @property
    def norms_are_fixed(self) -> bool:
        """Whether batch norms average over as many images whatever the number of devices."""
        return self.config.batch_norm_sync or self.config.batch_norm_group is not None

    @property
    def topology(self) -> Topology:
        """The devices and processes of this launch."""
        return Topology(self._device_kind, len(self._devices), this_process().count)

    @property
    def crossings(self) -> dict[str, Any]:
        """The topology, the transport, the batches per chunk and read ahead, oneDNN and the machine, as recorded."""
        return {
            **self.topology.to_json(),
            "transport": self.transport.name,
            "chunk_batches": self._chunk,
            "prefetch": self.infeeds.depth,
            **record_kernels(self.config, self._platform),
            MACHINE: machine_of(self._devices[0]),
        }

    @property
    def _device_kind(self) -> str:
        """The vendor's name for the devices, such as "cpu" or "NVIDIA H100 80GB HBM3"."""
        return str(self._devices[0].device_kind)

    @property
    def given_digest(self) -> str | None:
        """The SHA-256 of the initial weights that this launch read, or None if it read none."""
        return None if self.given is None else self.given.digest

    def _describe(self) -> None:
        """Tell the user what will be trained, and warn of what has no effect."""
        self._notify(describe_model(self.resolved, self.num_params))
        for message in filter(None, (self._selected, self.profiling.warning)):
            self._notify(message)
        if self._is_elsewhere:
            return
        self._notify(
            describe_infeed(self._data, self.infeeds.depth, self.transport.name)
            + describe_devices(self._platform, self._device_kind, len(self._devices))
            + describe_chunk(self._chunk, runs_ahead=self.transport.runs_ahead)
        )
        wasted = wasted_steps_warning(self.config, self._chunk) if self.transport.runs_ahead else None
        for message in filter(None, (describe_kernels(self.config, self._platform), wasted)):
            self._notify(message)

    @property
    def inside(self) -> LaunchParts:
        """The parts from which the program is made, for looks at a batch or a step outside of it."""
        return LaunchParts(
            self._checked_model(), self._statics, self.infeeds.training, self.transport, self._devices, self._values()
        )

    def prepare(self) -> tuple[Compiled, TrainState]:
        """Compile the program and create its initial state at the same time, and return both."""
        finish: Callable[[], Compiled] | None = None
        self.spans[COMPILING].begin()
        try:
            # The collector would also delay the worker, which needs the interpreter lock before XLA has its program.
            self._collector.pause()
            finish = self._start_compiling()
            state = self.starting_state()
        except Exception:
            # Wait for the compilation, during which jax's settings must not change, but raise the first error.
            with suppress(Exception):
                if finish is not None:
                    finish()
            raise
        compiled = finish()
        self.spans[COMPILING].end()
        return compiled, state

    def compile(self, traced: Traced | None = None) -> Compiled:
        """Compile the program, traced already or not, without creating its initial state."""
        return self._start_compiling(traced)()

    def trace(self) -> Traced:
        """Trace the program on this thread, whose jax settings then apply, and warn about its convolutions."""
        self._notify("compiling the training program, or loading it from the cache")
        platform = self._platform if self._is_elsewhere else traced_platform(self._devices[0])
        model = self._checked_model(self._notify)
        program, arguments = self._whole_program(model)
        traced = trace_ahead(program, *arguments, donate=(0,), platform=platform)
        if not self._is_elsewhere:
            statics, is_evaluated = self._statics, self.infeeds.evaluation is not None
            objective = statics.evaluated_objective if is_evaluated else statics.objective
            check_batch_size(objective, model.outputs, self._notify)
        if self.resolved.registry_name is None and (warning := slow_convolutions_warning(traced.jaxpr)):
            self._notify(warning)
        return traced

    def trace_all_forms(self) -> Any:
        """Return the jaxpr of the program with layers in their forms for all platforms, not only that of the run.

        What the model warns about, `trace` has said.
        """
        program, arguments = self._whole_program(self._checked_model())
        return jax.make_jaxpr(program)(*arguments)

    def _whole_program(self, model: CheckedModel) -> tuple[Callable[..., Any], Any]:
        """Return the training program on all devices, and the shapes of its arguments."""
        program = make_program(
            model,
            self._statics,
            self.infeeds.training,
            self.outfeed,
            self.infeeds.evaluation,
        )
        arguments: Any = (self._state_shape, self._values())
        return replicate(program, self._devices), (
            shapes_on(arguments, self._devices) if self._is_elsewhere else arguments
        )

    def _checked_model(self, notify: Callable[[str], None] = lambda _: None) -> CheckedModel:
        """Return the model as the programs of the launch apply it."""
        data = self._data
        return CheckedModel(
            self.resolved.model, data.num_classes, data.source, kernels_on(self.config, self._platform), notify
        )

    def _start_compiling(self, traced: Traced | None = None) -> Callable[[], Compiled]:
        """Trace the program, unless it is traced already, and compile it on a worker thread.

        Returns:
            A function that waits for the compiled program.
        """
        traced = traced or self.trace()
        dump_folder = None if self.config.dump_hlo is None else Path(self.config.dump_hlo)
        worker = start_on_worker(
            partial(
                compile_traced,
                traced,
                deterministic=self.config.deterministic,
                dump_folder=dump_folder,
                keeps=self.transport,
                backend=_ABSENT_BACKEND if self._is_elsewhere else None,
                is_profiled=self.config.profile,
            )
        )

        def finish() -> Compiled:
            compiled = worker.result()
            self._note_program("training", compiled)
            origin = "loaded from the cache, " if compiled.from_cache else ""
            self._notify(
                f"compiled training program in {compiled.compile_s:.1f} s ({origin}traced in {compiled.trace_s:.1f} s)"
            )
            return compiled

        return finish

    def starting_state(self) -> TrainState:
        """Return the initial state: the state in the snapshot that the launch starts from, if any, else a new state."""
        if self.start.snapshot is not None:
            from loopfeed.engine.records.snapshot import match_state

            saved = match_state(self.start.snapshot.leaves, self._state_shape)
            if self.infeeds.evaluation is None:
                # Without an infeed, the loop would wait for ever for the evaluation that is due.
                saved = saved._replace(owes_evaluation=np.zeros((), np.bool))
            # Release the host's copy of the arrays, which needs as much memory again.
            self.start = replace(self.start, snapshot=None)
            return call_on_worker(lambda: jax.block_until_ready(jax.tree.map(partial(jnp.array, copy=True), saved)))
        words = seed_words(self.config.seed)
        draw = compile_traced(trace_ahead(self._draw, words, platform=traced_platform(this_device())))
        self._note_program("initial state", draw)
        return call_on_worker(
            lambda: jax.block_until_ready(put_given_weights(self.given, draw.call(words), self._statics.rule))
        )

    def _note_program(self, name: str, compiled: Compiled) -> None:
        self.programs.append(ProgramTimes(name, compiled.trace_s, compiled.compile_s, compiled.from_cache))

    def warn_of_memory(self, compiled: Compiled) -> None:
        """Warn if the program needs more memory than the machine has, because the system would kill it silently."""
        if jax.default_backend() != "cpu":
            return
        needed, available = compiled.peak_bytes + self.ring_bytes, host_memory_bytes()
        if available is not None and needed > available:
            self._notify(
                f"warning: the program needs about {needed / 1e9:,.1f} GB, but this machine has "
                f"{available / 1e9:,.1f} GB: use a smaller --batch"
            )

    @property
    def ring_bytes(self) -> int:
        """The number of bytes of host memory that the batches read ahead occupy."""
        return self.infeeds.num_bytes

    @property
    def state_bytes(self) -> int:
        """The number of bytes of the training state, of which each device has a copy."""
        leaves = jax.tree.leaves(jax.eval_shape(plain_keys, self._state_shape))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    def _report_evaluation(self, batch: int, num_batches: int) -> None:
        if self.spans[EVALUATION].since is None:
            self.spans[EVALUATION].begin()
        self.stream.report_evaluation(batch, num_batches)

    def run(
        self, compiled: Compiled, state: TrainState, sinks: Sequence[Sink], values: RunValues | None = None
    ) -> TrainState:
        """Run the program to completion and return its final state; errors on the host are returned by `failure`.

        Args:
            compiled: the program.
            state: the initial state; its memory is donated.
            sinks: the sinks of the loss stream.
            values: the runtime settings; None for those of the run.
        """
        values = self._values() if values is None else values
        started = time.perf_counter()
        self.stream.start(sinks)
        close_timeout_s = _QUIT_TIMEOUT_S
        try:
            state = self._run_loop(compiled, state, values)
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

    def _run_loop(self, compiled: Compiled, state: TrainState, values: RunValues) -> TrainState:
        with self.transport.running(), ExitStack() as infeeds:
            self.infeeds.start(infeeds)
            self._signals.launched()
            self.notices.start()
            self.spans[LOOP].begin()
            placed = put_everywhere((state, values), self._devices)
            with self.profiling.running():
                self._program = start_on_worker(lambda: jax.block_until_ready(compiled.call(*placed)))
                state = self._program.result()
            return take_copy(state, self._devices)

    @property
    def workers(self) -> list[Worker[Any]]:
        """The threads of the program and of its sinks, which may be at work after an interruption."""
        return [*([] if self._program is None else [self._program]), *self.stream.workers]

    def failure(self, state: TrainState) -> BaseException | None:
        """Return the run's error, if any. Errors on the host take precedence over others, and causes over effects."""
        infeeds = [each.failure for each in self.infeeds.all()]
        others = [self.outfeed.failure, self.stream.failure, self.transport.failure]
        failures = [failure for failure in (*infeeds, *others) if failure is not None]
        if failures:
            self.has_changed_data |= isinstance(failures[0], ChangedShardError)
            return failures[0]
        return self._changed_data() or nonfinite_error(
            int(state.step),
            int(state.update.skips.in_a_row),
            self.config.most_skips,
            has_own_part=self._statics.rule.has_own_part,
        )

    def _changed_data(self) -> BaseException | None:
        """Return the error of the first source whose files changed during the run, or None if no files changed."""
        for source in (self._data.source, self._data.evaluation):
            if isinstance(source, CheckedSource):
                try:
                    source.check_unchanged()
                except Exception as error:  # noqa: BLE001 - a user-defined source may raise anything
                    self.has_changed_data = True
                    return error
        return None

    @property
    def std(self) -> tuple[float, ...]:
        """The standard deviation by which the program divides each channel, on the scale 0 … 1."""
        return tuple(max(each, LEAST_STD) for each in self._data.std)

    def _values(self) -> RunValues:
        data = self._data
        num_eval_batches = data.evaluation.num_batches if data.evaluation else 0
        scale = PixelScale(mean=jnp.array(data.mean, jnp.float32), std=jnp.array(self.std, jnp.float32))
        return run_values(self.config, num_eval_batches, scale)
