"""The infeeds of a launch: one for the training batches and one for those of evaluations, if there are any."""

import math
from collections.abc import Callable
from contextlib import ExitStack

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.control.word import ControlWords
from loopfeed.engine.crossing.choice import choose_chunk, make_infeed
from loopfeed.engine.crossing.infeed import BatchInfeed, WordsOf
from loopfeed.engine.feed.batches import BatchSource, held_bytes
from loopfeed.engine.feed.feeder import Feeder, batch_bytes, ring_depth
from loopfeed.engine.feed.own_rows import rows_of
from loopfeed.engine.profile.profiler import Profiler
from loopfeed.engine.run.data import RunData
from loopfeed.engine.run.host_side import HostSide
from loopfeed.engine.run.resume import StartingPoint

_MOST_EVALUATION_PULLS = 2**31 - 1


class Infeeds:
    """The infeeds of a launch, with the depths of their rings.

    Args:
        config: the settings, with epochs converted to steps.
        data: the sources of the batches.
        host: the transport, the devices and the board of requests.
        start: where the launch begins.
        report_evaluation: called with the number of a batch and the number of batches at each pull of an evaluation.
        profiler: observes the pulls.

    Attributes:
        training, evaluation: the infeeds; the second is None if nothing is evaluated.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: RunData,
        host: HostSide,
        start: StartingPoint,
        report_evaluation: Callable[[int, int], None],
        profiler: Profiler | None = None,
    ) -> None:
        self._config, self._data, self._host = config, data, host
        self._report_evaluation, self._profiler = report_evaluation, profiler
        self.training = self._make(
            data.source, host.board.words, start.pulls, config.steps * config.accumulate_steps, self._name_pull
        )
        self.evaluation = self._make_evaluation(start.num_evaluations)

    @property
    def depth(self) -> int:
        """The number of training batches that are read ahead."""
        return self._ring_depth(self._data.source)

    @property
    def num_bytes(self) -> int:
        """The number of bytes of host memory that the batches and windows read ahead occupy."""
        sources = [each for each in (self._data.source, self._data.evaluation) if each is not None]
        return sum(self._ring_depth(source) * batch_bytes(source) + held_bytes(source) for source in sources)

    def all(self) -> list[BatchInfeed]:
        """Return the infeeds that there are."""
        return [each for each in (self.training, self.evaluation) if each is not None]

    def start(self, stack: ExitStack) -> None:
        """Start reading ahead; `stack` stops it."""
        for infeed in self.all():
            stack.callback(infeed.close)
            infeed.start()

    def wait_of(self, step: int) -> float:
        """Return how many seconds the loop waited for the batches of one update; `step` counts from 0."""
        count = self._config.accumulate_steps
        waits_s = [self.training.take_wait_s(pull) for pull in range(step * count, (step + 1) * count)]
        if self._profiler is not None:
            self._profiler.waited(waits_s)
        return math.fsum(waits_s)

    def _name_pull(self, pull: int) -> str:
        step, number = divmod(pull, self._config.accumulate_steps)
        return f"step {step + 1}" + (f", pull {number + 1}" if self._config.accumulate_steps > 1 else "")

    def _make_evaluation(self, num_evaluations: int) -> BatchInfeed | None:
        evaluated = self._data.evaluation
        if evaluated is None:
            return None
        num_batches = evaluated.num_batches

        def words_of(pull: int, num_requested: int) -> ControlWords:
            self._report_evaluation(pull % num_batches, num_batches)
            return self._host.board.stop_words(num_requested)

        return self._make(
            evaluated,
            words_of,
            num_evaluations * num_batches,
            _MOST_EVALUATION_PULLS,
            lambda pull: f"evaluation {pull // num_batches + 1}, pull {pull % num_batches + 1}",
            times_waits=False,
        )

    def _make(
        self,
        source: BatchSource,
        words_of: WordsOf,
        first_pull: int,
        stop_pull: int,
        name_pull: Callable[[int], str],
        *,
        times_waits: bool = True,
    ) -> BatchInfeed:
        config, team, profiler = self._config, self._host.team, self._profiler
        rows = team.rows(source.batch)
        return make_infeed(
            self._host.transport,
            lambda allocate: Feeder(
                rows_of(source, rows),
                start_index=first_pull,
                stop_index=max(stop_pull, first_pull),
                depth=self._ring_depth(source),
                num_threads=config.reader_threads,
                timeout_s=config.infeed_timeout_s,
                num_shards=len(team.own),
                name_batch=name_pull,
                allocate=allocate,
            ),
            self._host.board,
            words_of=words_of,
            chunk=self._chunk_of(source),
            num_shards=len(team.own),
            first_shard=team.first,
            times_waits=times_waits,
            observer=None if profiler is None else profiler.training if times_waits else profiler.evaluation,
        )

    def _chunk_of(self, source: BatchSource) -> int:
        """Return how many batches of `source` form a chunk; evaluations use the transport's default."""
        evaluated = self._data.evaluation
        if evaluated is None or source is not evaluated:
            return self._host.chunk
        return choose_chunk(None, self._host.transport)

    def _ring_depth(self, source: BatchSource) -> int:
        chunk = 1 if self._host.transport.runs_ahead else self._chunk_of(source)
        return ring_depth(source, self._config.prefetch, chunk)
