"""One launch of the program: its parts opened in order, compiled, run to the end of the loop, closed.

Owns what is connected to what. Knows nothing of run folders: where the state begins is given, where it goes is the
caller's.
"""

import math
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
from numpy.typing import NDArray

from engine.config import TrainConfig
from engine.control.word import ControlWords
from engine.crossing.choice import choose_chunk, make_infeed, this_device, this_platform, wasted_steps_warning
from engine.crossing.infeed import BatchInfeed, WordsOf
from engine.crossing.outfeed import Outfeed
from engine.feed.batches import BatchSource, CheckedSource
from engine.feed.feeder import Feeder, batch_bytes, ring_depth
from engine.images.unpack import PixelScale
from engine.program.checked_model import CheckedModel
from engine.program.loop import make_program
from engine.program.statics import statics_of, update_values
from engine.program.train_state import RunValues, TrainModel, TrainState, init_state
from engine.records.weights import check_names
from engine.run.compilation import Compiled, compile_traced, trace_ahead, without_collector
from engine.run.host_side import HostSide
from engine.run.initial_weights import InitialWeights, load_initial_weights
from engine.run.resolve import Resolved
from engine.run.resume import StartingPoint
from engine.run.signals import call_on_worker, start_on_worker
from engine.stream.loss_stream import LossStream
from engine.stream.sinks import Sink
from engine.updates.update import UpdateRule, Weights, init_update
from models.registry import count_params
from preprocess.memory import host_memory_bytes
from preprocess.shards.reader import ChangedShardError

# A channel without any spread (a set of blank images) must not divide by zero: one level of 255 is the least.
_LEAST_STD = 1 / 255
_MOST_STEPS = 2**31 - 1
_NO_TOP1_REACHES_IT = 2.0
# How long the end waits for the sinks, all together: long after a clean stop, not after one that is to be at once.
_CLOSE_TIMEOUT_S = 60.0
_QUIT_TIMEOUT_S = 1.0


class NonFiniteError(ArithmeticError):
    """A run's gradients were not finite more often in a row than it was to bear.

    Attributes:
        first_step: of those in a row.
    """

    def __init__(self, message: str, first_step: int) -> None:
        super().__init__(message)
        self.first_step = first_step


class Launch:
    """The parts of one launch, opened in order; `stack` closes them in reverse.

    Args:
        config: the settings, epochs settled.
        resolved: what the settings stand for.
        host: entered.
        stack: closes what is opened.
        start: where the launch begins.
        notify: called with a line of text.

    Attributes:
        board: of requests to the program.
        notices: what is said while the program runs.
        stream: of what the program emits.
        num_params: learnable numbers.
        train_s: seconds from the launch to the end of the loop.
        has_changed_data: whether `failure` found that the data were written to meanwhile, so that steps may have been
            trained on other images.

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
        self.train_s, self.has_changed_data = 0.0, False
        self.board, self.notices, self._signals = host.board, host.notices, host.signals
        self._transport, self._chunk = host.transport, host.chunk
        self._infeeds: list[BatchInfeed] = []
        self._infeed = self._make_infeed(
            self.resolved.source,
            self.board.words,
            start.pulls,
            config.steps * config.accumulate_steps,
            self._name_pull,
        )
        self._evaluation_infeed = self._make_evaluation_infeed()
        self.stream = LossStream(
            batch=config.batch * config.accumulate_steps,
            step=start.step,
            wait_of=self._wait_of,
            board=self.board,
            on_nonfinite=lambda step: self.notices.say(
                f"warning: the loss is no finite number since step {step}; a lower learning rate may help"
            ),
        )
        stack.callback(self.stream.release)
        self._outfeed = Outfeed(self.stream.receive, self.board, self._transport)
        self._statics = statics_of(config)
        self._draw = partial(_init_from_words, self.resolved.model, self._statics.rule)
        self._state_shape = jax.eval_shape(self._draw, _key_words(0))
        self._given = self._read_given_weights()
        self.num_params = count_params(self._state_shape.params)
        if self.resolved.registry_name is None:
            check_names(self._state_shape.params, self._state_shape.batch_stats)
        self._describe()

    def _name_pull(self, pull: int) -> str:
        step, number = divmod(pull, self.config.accumulate_steps)
        return f"step {step + 1}" + (f", pull {number + 1}" if self.config.accumulate_steps > 1 else "")

    def _wait_of(self, step: int) -> float:
        """Gives the seconds waited for the batches of one update (from 0)."""
        count = self.config.accumulate_steps
        return math.fsum(self._infeed.take_wait_s(pull) for pull in range(step * count, (step + 1) * count))

    def _make_evaluation_infeed(self) -> BatchInfeed | None:
        evaluated = self.resolved.evaluation
        if evaluated is None:
            return None
        num_batches = evaluated.num_batches

        def words_of(pull: int, num_wanted: int) -> ControlWords:
            self.stream.tell_evaluation(pull % num_batches, num_batches)
            return self.board.stop_words(num_wanted)

        return self._make_infeed(
            evaluated,
            words_of,
            self.start.num_evaluations * num_batches,
            _MOST_STEPS,
            lambda pull: f"evaluation {pull // num_batches + 1}, pull {pull % num_batches + 1}",
            times_waits=False,
        )

    def _make_infeed(
        self,
        source: BatchSource,
        words_of: WordsOf,
        first_pull: int,
        stop_pull: int,
        name_pull: Callable[[int], str],
        *,
        times_waits: bool = True,
    ) -> BatchInfeed:
        config = self.config
        infeed = make_infeed(
            self._transport,
            lambda allocate: Feeder(
                source,
                start_index=first_pull,
                stop_index=max(stop_pull, first_pull),
                depth=self._ring_depth(source),
                num_threads=config.reader_threads,
                timeout_s=config.infeed_timeout_s,
                name_batch=name_pull,
                allocate=allocate,
            ),
            self.board,
            words_of=words_of,
            chunk=self._chunk_of(source),
            times_waits=times_waits,
        )
        self._infeeds.append(infeed)
        return infeed

    def _chunk_of(self, source: BatchSource) -> int:
        """Batches of a source that cross at once: an evaluation's as it suits the transport."""
        evaluated = self.resolved.evaluation
        if evaluated is None or source is not evaluated:
            return self._chunk
        return choose_chunk(None, self._transport)

    def _ring_depth(self, source: BatchSource) -> int:
        return ring_depth(source, self.config.prefetch, 1 if self._transport.runs_ahead else self._chunk_of(source))

    @property
    def crossings(self) -> dict[str, Any]:
        """How the program and the host meet, for the record: device, transport, batches a chunk and read ahead."""
        return {
            "device": this_device(),
            "transport": self._transport.name,
            "chunk_batches": self._chunk,
            "prefetch": self._ring_depth(self.resolved.source),
        }

    @property
    def given_digest(self) -> str | None:
        """sha256 of the weights that the run starts from, None where there are none or they were read long ago."""
        return None if self._given is None else self._given.digest

    def _read_given_weights(self) -> InitialWeights | None:
        """Reads the weights to start from, before anything takes long."""
        if self.config.init_from is None or self.start.snapshot is not None:
            return None
        shape = self._state_shape
        given = load_initial_weights(
            self.config.init_from, self.resolved.registry_name, shape.params, shape.batch_stats
        )
        self._notify(f"weights: {self.config.init_from}")
        for note in given.notes:
            self._notify(note)
        return given

    def _describe(self) -> None:
        source, resolved = self.resolved.source, self.resolved
        self._notify(
            f"model: {resolved.model_name}, {self.num_params:,} parameters"
            + (f", {resolved.num_classes:,} classes" if resolved.num_classes else "")
        )
        depth, chunk = self._ring_depth(source), self._chunk
        self._notify(
            f"the loop waits for: batches of {source.batch} × {source.height} × {source.width} px "
            f"from {resolved.data}, {depth} read ahead, by the {self._transport.name} transport"
            + ("" if this_platform() == "cpu" else f" on {this_device()}")
            + (f", {chunk} {'steps enqueued ' * self._transport.runs_ahead}at once" if chunk > 1 else "")
        )
        if self._transport.runs_ahead and (warning := wasted_steps_warning(self.config, chunk)):
            self._notify(warning)

    def prepare(self) -> tuple[Compiled, TrainState]:
        """Gives the program and the state that it begins with, which is made while the program is compiled."""
        finish: Callable[[], Compiled] | None = None
        try:
            # Nor does the collector hold up the worker, which needs the interpreter lock before XLA has its program.
            with without_collector():
                finish = self._begin_to_compile()
                state = self.starting_state()
        except Exception:
            # Its error is the one that counts, and jax's settings are not to change under a compilation.
            with suppress(Exception):
                if finish is not None:
                    finish()
            raise
        return finish(), state

    def compile(self) -> Compiled:
        """Gives the program, compiled."""
        return self._begin_to_compile()()

    def _begin_to_compile(self) -> Callable[[], Compiled]:
        """Traces the program on this thread, whose jax settings it so obeys, and has a worker compile it."""
        self._notify("compiling the training program, or loading it from the cache")
        model = CheckedModel(self.resolved.model, self.resolved.num_classes, self.resolved.source)
        program = make_program(model, self._statics, self._infeed, self._outfeed, self._evaluation_infeed)
        traced = trace_ahead(program, self._state_shape, self._values(), donate=(0,))
        dump_folder = None if self.config.dump_hlo is None else Path(self.config.dump_hlo)
        wait = start_on_worker(
            partial(
                compile_traced,
                traced,
                deterministic=self.config.deterministic,
                dump_folder=dump_folder,
                keeps=self._transport,
            )
        )

        def finish() -> Compiled:
            compiled = wait()
            origin = "loaded from the cache, " if compiled.from_cache else ""
            self._notify(
                f"compiled training program in {compiled.compile_s:.1f} s ({origin}traced in {compiled.trace_s:.1f} s)"
            )
            return compiled

        return finish

    def starting_state(self) -> TrainState:
        """Gives the state of the snapshot that the launch begins with, or draws that before the first step."""
        if self.start.snapshot is not None:
            from engine.records.snapshot import match_state

            saved = match_state(self.start.snapshot.leaves, self._state_shape)
            if self._evaluation_infeed is None:
                # Nothing would ever make it, and the loop would wait for it without end.
                saved = saved._replace(owes_evaluation=np.zeros((), np.bool))
            # The arrays on the host are as much memory again, for as long as somebody holds them.
            self.start = replace(self.start, snapshot=None)
            return call_on_worker(lambda: jax.block_until_ready(jax.tree.map(partial(jnp.array, copy=True), saved)))
        words = _key_words(self.config.seed)
        draw = compile_traced(trace_ahead(self._draw, words))
        return call_on_worker(lambda: jax.block_until_ready(self._with_given_weights(draw.call(words))))

    def _with_given_weights(self, drawn: TrainState) -> TrainState:
        if self._given is None:
            return drawn
        weights = jax.tree.map(
            partial(jnp.array, copy=True), self._given.over(Weights(drawn.params, drawn.batch_stats))
        )
        params, batch_stats = weights
        return drawn._replace(params=params, batch_stats=batch_stats, update=init_update(self._statics.rule, weights))

    def warn_of_memory(self, compiled: Compiled) -> None:
        """Says so where the program will not fit into memory, before the system ends it without a word."""
        if jax.default_backend() != "cpu":
            return
        needed, there = compiled.peak_bytes + self.ring_bytes, host_memory_bytes()
        if there is not None and needed > there:
            self._notify(
                f"warning: the program needs about {needed / 1e9:,.1f} GB and this machine has {there / 1e9:,.1f} GB: "
                "a smaller --batch needs less"
            )

    @property
    def ring_bytes(self) -> int:
        """Host memory of the batches read ahead."""
        sources = (self.resolved.source, self.resolved.evaluation)
        return sum(self._ring_depth(source) * batch_bytes(source) for source in sources if source is not None)

    def run(self, compiled: Compiled, state: TrainState, sinks: Sequence[Sink]) -> TrainState:
        """Runs the program to its end and gives the state that it leaves; what failed on the host is `failure`'s.

        Args:
            compiled: the program.
            state: that it begins with; its memory is given up.
            sinks: of the loss stream.
        """
        values = self._values()
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
            self.stream.close(close_timeout_s)
        return state

    def _run_loop(self, compiled: Compiled, state: TrainState, values: RunValues) -> TrainState:
        with self._transport.running(), ExitStack() as infeeds:
            for infeed in self._infeeds:
                infeeds.callback(infeed.close)
                infeed.start()
            self._signals.launched()
            self.notices.start()
            return call_on_worker(lambda: jax.block_until_ready(compiled.call(state, values)))

    def failure(self, state: TrainState) -> BaseException | None:
        """Gives what went wrong: first on the host, in the order of cause and effect, then in the loop."""
        ends = (self._infeed, self._evaluation_infeed, self._outfeed, self.stream, self._transport)
        failures = [end.failure for end in ends if end is not None and end.failure is not None]
        if failures:
            self.has_changed_data |= isinstance(failures[0], ChangedShardError)
            return failures[0]
        return self._changed_data() or self._gave_up(state)

    def _changed_data(self) -> BaseException | None:
        """Return the error of a source whose files were written to in the midst of the run."""
        for source in (self.resolved.source, self.resolved.evaluation):
            if isinstance(source, CheckedSource):
                try:
                    source.check_unchanged()
                except Exception as error:  # noqa: BLE001 - a source of the user's own may raise anything
                    self.has_changed_data = True
                    return error
        return None

    @property
    def std(self) -> tuple[float, ...]:
        """Of each channel on the scale 0 … 1, as the program divides by it."""
        return tuple(max(each, _LEAST_STD) for each in self.resolved.std)

    def _gave_up(self, state: TrainState) -> BaseException | None:
        """Gives the error of a run that left its loop because of gradients that are not finite."""
        skips = int(state.update.skips.in_a_row)
        if skips <= self.config.most_skips:
            return None
        return NonFiniteError(
            f"the gradient must be finite, and was not at step {int(state.step)}"
            + (f" and the {skips - 1} before it" if skips > 1 else "")
            + ": the weights are those of the last update that was; a lower learning rate, a warm-up or a limit of the "
            "gradient's norm may help (--learning-rate, --warmup-steps, --clip-norm), or --skip-nonfinite",
            first_step=int(state.step) - skips + 1,
        )

    def _values(self) -> RunValues:
        config, resolved = self.config, self.resolved
        stop_at_top1 = _NO_TOP1_REACHES_IT if config.stop_at_top1 is None else config.stop_at_top1
        return RunValues(
            stop_step=jnp.int32(config.steps),
            eval_every_steps=jnp.int32(config.eval_every_steps),
            num_eval_batches=jnp.int32(resolved.evaluation.num_batches if resolved.evaluation else 0),
            stop_at_top1=jnp.float32(stop_at_top1),
            snapshot_every_steps=jnp.int32(config.snapshot_every_steps),
            update=update_values(config),
            smoothing=jnp.float32(config.label_smoothing),
            seed_words=jnp.asarray(_key_words(config.seed)),
            scale=PixelScale(mean=jnp.array(resolved.mean, jnp.float32), std=jnp.array(self.std, jnp.float32)),
        )


def _init_from_words(model: TrainModel, rule: UpdateRule, words: jax.Array) -> TrainState:
    # The generator is named, so that a user's default of another kind neither changes the run nor the key's shape.
    return init_state(model, rule, jax.random.wrap_key_data(words, impl="threefry2x32"))


def _key_words(seed: int) -> NDArray[np.uint32]:
    """The seed's two halves, uint32 [2]: a seed may have more bits than jax takes for an integer."""
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
