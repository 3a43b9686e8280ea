"""A run from its settings to its result: resolve, compile, launch, wait, raise or return.

Owns the order in which things are opened and closed and what a failure means; every part of the work has its own
module.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from engine.batches import BatchFunction, BatchSource, EvaluationArrays, EvaluationSource
from engine.checked_model import CheckedModel
from engine.compilation import Compiled, caching_compilations, compile_traced, trace_ahead
from engine.config import TrainConfig
from engine.control import ControlBoard
from engine.feeder import Feeder
from engine.infeed import Infeed
from engine.loss_stream import LossStream
from engine.machine import host_memory_bytes
from engine.outfeed import Outfeed
from engine.program import RunValues, TrainModel, TrainState, init_state, make_program
from engine.resolve import resolve
from engine.result import DryRun, TrainResult
from engine.run_folder import RunFolder
from engine.signals import StopSignals, call_on_worker
from engine.sinks import RunFolderSink, Sink
from engine.statics import statics_of, update_values
from engine.transport import Transport, choose_transport
from engine.unpack import PixelScale
from engine.update import UpdateRule
from engine.weights import check_names, name_tensors
from models.registry import count_params

# A channel without any spread (a set of blank images) must not divide by zero: one level of 255 is the least.
_LEAST_STD = 1 / 255
_MOST_STEPS = 2**31 - 1
# How long the end waits for the sinks, all together: long after a clean stop, not after one that is to be at once.
_CLOSE_TIMEOUT_S = 60.0
_QUIT_TIMEOUT_S = 1.0


def train(
    config: TrainConfig,
    *,
    model: TrainModel | None = None,
    batches: BatchFunction | BatchSource | None = None,
    evaluation: EvaluationSource | EvaluationArrays | None = None,
    sinks: Sequence[Sink] = (),
    notify: Callable[[str], None] = lambda _: None,
) -> TrainResult:
    """Trains a model in one compiled program.

    Args:
        config: the settings.
        model: your own, in place of one of the registry: `init(key)` gives (params, batch_stats), and
            `apply(params, batch_stats, images, train=True)` gives (logits [B, K], new batch_stats) for float32 images
            [B, H, W, 3]. Convolutions of `models.convolution` stay fast inside the loop on a CPU.
        batches: your own, in place of a packed data set: a function from the step (from 0) to (uint32 [B, H, W] packed
            pixels, integer [B] labels), called in order from one thread; or a `BatchSource`.
        evaluation: your own: a tuple of all the images to evaluate on (uint32 [N, H, W] packed pixels, integer [N]
            labels), or an `EvaluationSource`; in place of a split of the data set.
        sinks: further takers of the loss stream.
        notify: told in words what the run does before its first step and after its last.

    Returns:
        The trained model and its losses. SIGINT and SIGTERM, where the caller is the main thread, end the run at the
        next step and are named in `stopped_by`; a second one raises KeyboardInterrupt.

    Raises:
        ValueError: for settings that do not fit each other or the data; before any step.
        BaseException: whatever the batch source or a sink raised in mid-run, after the loop has ended cleanly and what
            was trained so far is in the run folder.
    """
    with ExitStack() as stack:
        run = _Run(config, stack, model, batches, evaluation, notify)
        with run.open_folder() as folder:
            with caching_compilations(config.compilation_cache):
                compiled = run.compile()
                state = run.draw_state()
            run.warn_of_memory(compiled)
            return run.launch(compiled, state, sinks, folder)


def plan_run(
    config: TrainConfig,
    *,
    model: TrainModel | None = None,
    batches: BatchFunction | BatchSource | None = None,
    evaluation: EvaluationSource | EvaluationArrays | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> DryRun:
    """Resolves and compiles what `train` would run, and runs nothing; arguments and errors as there."""
    with ExitStack() as stack:
        run = _Run(config, stack, model, batches, evaluation, notify)
        with caching_compilations(config.compilation_cache):
            return DryRun(run.compile(), run.num_params, run.resolved, run.ring_bytes, host_memory_bytes())


class NonFiniteError(ArithmeticError):
    """A run's gradients were not finite more often in a row than it was to bear."""


class _Run:
    """The parts of one run, opened in order; `stack` closes them in reverse."""

    def __init__(
        self,
        config: TrainConfig,
        stack: ExitStack,
        model: TrainModel | None,
        batches: BatchFunction | BatchSource | None,
        evaluation: EvaluationSource | EvaluationArrays | None,
        notify: Callable[[str], None],
    ) -> None:
        self.config, self.stack, self.notify = config, stack, notify
        self.is_launched = False
        self.board = ControlBoard()
        self.signals = stack.enter_context(StopSignals(self.board, notify))
        self.resolved = resolve(config, stack, notify, model=model, batches=batches, evaluation=evaluation)
        self.transport: Transport = choose_transport(config.transport, jax.default_backend())
        self.feeders: list[Feeder] = []
        self.infeed = self._make_infeed(self.resolved.source, config.steps * config.accumulate_steps)
        self.evaluation_infeed = None
        if (evaluated := self.resolved.evaluation) is not None:
            self.evaluation_infeed = self._make_infeed(
                evaluated,
                _MOST_STEPS,
                lambda pull: f"evaluation {pull // evaluated.num_batches + 1}, pull {pull % evaluated.num_batches + 1}",
            )
        self.stream = LossStream(
            batch=config.batch * config.accumulate_steps,
            wait_of=self._wait_of,
            board=self.board,
            on_nonfinite=lambda step: notify(
                f"warning: the loss is no finite number since step {step}; a lower learning rate may help"
            ),
        )
        self.outfeed = Outfeed(self.stream.receive, self.board, self.transport)
        self.statics = statics_of(config)
        self.draw = partial(_init_from_words, self.resolved.model, self.statics.rule)
        self.state_shape = jax.eval_shape(self.draw, _key_words(0))
        self.num_params = count_params(self.state_shape.params)
        if self.resolved.registry_name is None:
            check_names(self.state_shape.params, self.state_shape.batch_stats)
        self._describe()

    def _wait_of(self, step: int) -> float:
        """Gives the seconds waited for the batches of one update (from 0)."""
        count = self.config.accumulate_steps
        return math.fsum(self.infeed.take_wait_s(pull) for pull in range(step * count, (step + 1) * count))

    def _make_infeed(
        self, source: BatchSource, stop_step: int, name_step: Callable[[int], str] = lambda step: f"step {step + 1}"
    ) -> Infeed:
        config = self.config
        feeder = Feeder(
            source,
            start_step=0,
            stop_step=stop_step,
            depth=config.prefetch,
            num_threads=config.reader_threads,
            timeout_s=config.infeed_timeout_s,
            name_step=name_step,
        )
        self.feeders.append(feeder)
        return Infeed(feeder, self.board, self.transport, height=source.height, width=source.width)

    def _describe(self) -> None:
        source, resolved = self.resolved.source, self.resolved
        self.notify(
            f"model: {resolved.model_name}, {self.num_params:,} parameters"
            + (f", {resolved.num_classes:,} classes" if resolved.num_classes else "")
        )
        self.notify(
            f"the loop waits for: batches of {source.batch} × {source.height} × {source.width} px "
            f"from {resolved.data}, {self.config.prefetch} read ahead, by the {self.transport.name} transport"
        )

    def compile(self) -> Compiled:
        """Traces the program on this thread, whose jax settings it so obeys, and compiles it on a worker."""
        model = CheckedModel(self.resolved.model, self.resolved.num_classes, self.resolved.source)
        program = make_program(model, self.statics, self.infeed, self.outfeed, self.evaluation_infeed)
        traced = trace_ahead(program, self.state_shape, self._values(), donate=(0,))
        dump_folder = None if self.config.dump_hlo is None else Path(self.config.dump_hlo)
        compiled = call_on_worker(partial(compile_traced, traced, dump_folder=dump_folder))
        origin = "loaded from the cache, " if compiled.from_cache else ""
        self.notify(
            f"compiled training program in {compiled.compile_s:.1f} s ({origin}traced in {compiled.trace_s:.1f} s)"
        )
        return compiled

    def draw_state(self) -> TrainState:
        """Draws the state before the first step, from the seed."""
        words = _key_words(self.config.seed)
        draw = compile_traced(trace_ahead(self.draw, words))
        return call_on_worker(lambda: jax.block_until_ready(draw.call(words)))

    def warn_of_memory(self, compiled: Compiled) -> None:
        """Says so where the program will not fit into memory, before the system ends it without a word."""
        if jax.default_backend() != "cpu":
            return
        needed, there = compiled.peak_bytes + self.ring_bytes, host_memory_bytes()
        if there is not None and needed > there:
            self.notify(
                f"warning: the program needs about {needed / 1e9:,.1f} GB and this machine has {there / 1e9:,.1f} GB: "
                "a smaller --batch needs less"
            )

    @property
    def ring_bytes(self) -> int:
        """Host memory of the batches read ahead."""
        source, num_rings = self.resolved.source, 1 if self.resolved.evaluation is None else 2
        return num_rings * self.config.prefetch * source.batch * (source.height * source.width + 1) * 4

    @contextmanager
    def open_folder(self) -> Iterator[RunFolder | None]:
        """Claims the run folder, before anything takes long, and records the settings in it.

        Where the run ends before its program was launched, the folder is left as it was.
        """
        if self.config.run_dir is None:
            yield None
            return
        folder = RunFolder(Path(self.config.run_dir), overwrite=self.config.overwrite)
        try:
            folder.write_config(self.config, self.resolved.to_json(), self.resolved.manifest_digest)
            yield folder
        finally:
            if not self.is_launched:
                folder.abandon()

    def launch(
        self, compiled: Compiled, state: TrainState, sinks: Sequence[Sink], folder: RunFolder | None
    ) -> TrainResult:
        """Runs the program to its end, writes what the run leaves, and raises what went wrong on the host."""
        values = self._values()
        started = time.perf_counter()
        self.stream.start([*self._folder_sinks(folder), *sinks])
        close_timeout_s = _CLOSE_TIMEOUT_S
        try:
            for feeder in self.feeders:
                feeder.start()
            self.signals.launched()
            self.is_launched = True
            state = call_on_worker(lambda: jax.block_until_ready(compiled.call(state, values)))
        except BaseException as error:
            close_timeout_s = _QUIT_TIMEOUT_S
            if folder is not None and self.is_launched:
                self._record_end(folder, error)
            raise
        finally:
            train_s = time.perf_counter() - started
            for feeder in self.feeders:
                feeder.close()
            self.stream.close(close_timeout_s)
        failure, steps_done = self._failure(), int(state.step)
        if failure is None:
            failure = self._gave_up(state)
        is_complete = steps_done >= self.config.steps
        ended_by = "steps" if is_complete else self.board.stop_reason or "steps"
        result = TrainResult(
            params=state.evaluated.params,
            batch_stats=state.evaluated.batch_stats,
            losses=np.array(self.stream.losses, np.float32),
            evaluations=tuple(self.stream.evaluations),
            steps_done=steps_done,
            stopped_by=ended_by if failure is None else "error",
            num_params=self.num_params,
            compile_s=compiled.compile_s,
            from_cache=compiled.from_cache,
            train_s=train_s,
            wait_s=self.stream.wait_s,
            run_dir=folder.path if folder else None,
        )
        if folder is not None:
            failure = self._leave(folder, result, failure)
        if failure is not None:
            raise failure
        return result

    def _folder_sinks(self, folder: RunFolder | None) -> list[Sink]:
        return [] if folder is None else [RunFolderSink(folder.loss_log, folder.evaluation_log)]

    def _leave(self, folder: RunFolder, result: TrainResult, failure: BaseException | None) -> BaseException | None:
        """Writes the weights and the run's end; gives the failure, which what cannot be written must not hide."""
        try:
            if result.steps_done:
                tensors = name_tensors(self.resolved.registry_name, result.params, result.batch_stats)
                folder.write_weights(tensors, self._weights_metadata(result))
        except Exception as error:  # noqa: BLE001 - a model of the user's own may hold anything; the end is told first
            if failure is None:
                failure = error
            else:
                failure.add_note(f"the weights could not be written either: {error}")
        self._record_end(folder, failure, result)
        return failure

    def _weights_metadata(self, result: TrainResult) -> dict[str, str]:
        """What is needed to use the weights: safetensors takes text alone."""
        resolved, size = self.resolved, self.config.image_size
        return {
            "model": resolved.model_name,
            "steps_done": str(result.steps_done),
            "image_size": f"{size or resolved.source.height}x{size or resolved.source.width}",
            "mean": " ".join(map(str, resolved.mean)),
            "std": " ".join(map(str, self._std())),
        }

    def _record_end(self, folder: RunFolder, failure: BaseException | None, result: TrainResult | None = None) -> None:
        """Writes `result.json`; where that fails, the failure that it was to tell goes first."""
        losses = self.stream.losses
        end = {
            "steps_done": result.steps_done if result else len(losses),
            "stopped_by": result.stopped_by if result else "error",
            "error": None if failure is None else f"{type(failure).__name__}: {failure}",
            "first_nonfinite_step": next((n for n, loss in enumerate(losses, 1) if not math.isfinite(loss)), None),
            "num_params": self.num_params,
        }
        if result is not None:
            end |= {
                "compile_s": round(result.compile_s, 3),
                "from_cache": result.from_cache,
                "train_s": round(result.train_s, 3),
                "wait_s": round(result.wait_s, 3),
            }
        try:
            folder.write_result(end)
        except OSError as error:
            if failure is None:
                raise
            failure.add_note(f"the run folder could not be completed either: {error}")

    def _failure(self) -> BaseException | None:
        """Gives what went wrong first on the host, in the order in which one thing causes another."""
        ends = (self.infeed, self.evaluation_infeed, self.outfeed, self.stream)
        return next((end.failure for end in ends if end is not None and end.failure is not None), None)

    def _std(self) -> tuple[float, ...]:
        return tuple(max(each, _LEAST_STD) for each in self.resolved.std)

    def _gave_up(self, state: TrainState) -> BaseException | None:
        """Gives the error of a run that left its loop because of gradients that are not finite."""
        skips = int(state.update.skips.in_a_row)
        if skips <= self.config.skip_nonfinite:
            return None
        return NonFiniteError(
            f"the gradient must be finite, and was not at step {int(state.step)}"
            + (f" and the {skips - 1} before it" if skips > 1 else "")
            + ": the weights are those of the last update that was; a lower learning rate, a warm-up or a limit of the "
            "gradient's norm may help (--learning-rate, --warmup-steps, --clip-norm), or --skip-nonfinite"
        )

    def _values(self) -> RunValues:
        config, resolved = self.config, self.resolved
        return RunValues(
            stop_step=jnp.int32(config.steps),
            eval_every_steps=jnp.int32(config.eval_every_steps),
            num_eval_batches=jnp.int32(resolved.evaluation.num_batches if resolved.evaluation else 0),
            update=update_values(config),
            label_smoothing=jnp.float32(config.label_smoothing),
            seed_words=jnp.asarray(_key_words(config.seed)),
            scale=PixelScale(mean=jnp.array(resolved.mean, jnp.float32), std=jnp.array(self._std(), jnp.float32)),
        )


def _init_from_words(model: TrainModel, rule: UpdateRule, words: jax.Array) -> TrainState:
    # The generator is named, so that a user's default of another kind neither changes the run nor the key's shape.
    return init_state(model, rule, jax.random.wrap_key_data(words, impl="threefry2x32"))


def _key_words(seed: int) -> NDArray[np.uint32]:
    """The seed's two halves, uint32 [2]: a seed may have more bits than jax takes for an integer."""
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
