"""The infeeds of a run: one for the training batches and one for those of evaluations."""

from collections.abc import Callable

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.control.board import ControlBoard, ControlWords
from loopfeed.engine.crossing.choice import choose_chunk, make_infeed
from loopfeed.engine.crossing.devices import Placement
from loopfeed.engine.crossing.infeed import BatchInfeed
from loopfeed.engine.data.open_data import RunData
from loopfeed.engine.feed.batches import BatchSource, EvaluationSource, held_bytes
from loopfeed.engine.feed.feeder import Feeder, batch_bytes, ring_depth
from loopfeed.engine.profile.profiler import Profiler
from loopfeed.engine.run.resume import Resume

_MOST_EVALUATION_BATCHES = 2**31 - 1


def infeed_of_training(
    config: TrainConfig,
    source: BatchSource,
    place: Placement,
    chunk: int,
    board: ControlBoard,
    start: Resume,
    profiler: Profiler | None,
) -> BatchInfeed:
    """Return the infeed of the training batches.

    Args:
        config: the settings, with epochs converted to steps.
        source: the source of the batches.
        place: the devices and the transport.
        chunk: batches per pull.
        board: the requests to the program.
        start: where the launch begins.
        profiler: observes the pulls.
    """
    count = config.accumulate_steps

    def name_batch(batch_index: int) -> str:
        step, number = divmod(batch_index, count)
        return f"step {step + 1}" + (f", pull {number + 1}" if count > 1 else "")

    return make_infeed(
        place.transport,
        _feeder_of(config, source, place, chunk, (start.batch_index, config.steps * count), name_batch),
        board,
        words_of=board.words,
        chunk=chunk,
        num_shards=len(place.team.own),
        first_shard=place.team.first,
        observer=None if profiler is None else profiler.training,
    )


def infeed_of_evaluations(
    config: TrainConfig,
    source: EvaluationSource,
    place: Placement,
    board: ControlBoard,
    start: Resume,
    note_pull: Callable[[int, int], None],
    profiler: Profiler | None,
) -> BatchInfeed:
    """Return the infeed of the evaluation batches, with the chunks that the transport takes by default.

    Args:
        config, source, place, board, start, profiler: as for `infeed_of_training`.
        note_pull: called with the number of a batch and the number of batches at each pull.
    """
    num_batches, chunk = source.num_batches, choose_chunk(None, place.transport)

    def words_of(batch_index: int, num_requested: int) -> ControlWords:
        note_pull(batch_index % num_batches, num_batches)
        return board.stop_words(num_requested)

    def name_batch(batch_index: int) -> str:
        return f"evaluation {batch_index // num_batches + 1}, pull {batch_index % num_batches + 1}"

    batches = (start.num_evaluations * num_batches, _MOST_EVALUATION_BATCHES)
    return make_infeed(
        place.transport,
        _feeder_of(config, source, place, chunk, batches, name_batch),
        board,
        words_of=words_of,
        chunk=chunk,
        num_shards=len(place.team.own),
        first_shard=place.team.first,
        times_waits=False,
        observer=None if profiler is None else profiler.evaluation,
    )


def depth_of(config: TrainConfig, source: BatchSource, place: Placement, chunk: int) -> int:
    """Return the number of batches of a source that are read ahead for pulls of `chunk` batches."""
    return ring_depth(source, config.prefetch, 1 if place.transport.runs_ahead else chunk)


def bytes_ahead(config: TrainConfig, data: RunData, place: Placement, chunk: int) -> int:
    """Return the number of bytes of host memory that the batches and windows read ahead occupy."""
    found = depth_of(config, data.source, place, chunk) * batch_bytes(data.source) + held_bytes(data.source)
    if (source := data.evaluation) is not None:
        depth = depth_of(config, source, place, choose_chunk(None, place.transport))
        found += depth * batch_bytes(source) + held_bytes(source)
    return found


def _feeder_of(
    config: TrainConfig,
    source: BatchSource,
    place: Placement,
    chunk: int,
    batches: tuple[int, int],
    name_batch: Callable[[int], str],
) -> Feeder:
    return Feeder(
        source,
        rows=place.team.rows(source.batch),
        start_index=batches[0],
        stop_index=max(batches),
        depth=depth_of(config, source, place, chunk),
        num_threads=config.reader_threads,
        timeout_s=config.infeed_timeout_s,
        num_shards=len(place.team.own),
        name_batch=name_batch,
    )
