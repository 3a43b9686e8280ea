"""How fast one host can bring images to its devices: what each stage moves, and how fast this machine does it."""

from collections.abc import Sequence
from dataclasses import dataclass

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.feed.batches import BatchSource
from loopfeed.engine.feed.feeder import batch_bytes
from loopfeed.engine.feed.shard_batches import ShardBatches
from loopfeed.engine.feed.windowed_batches import WindowedBatches
from loopfeed.engine.sizing.rates import measure_copying, measure_decoding, measure_reading
from loopfeed.engine.sizing.volumes import Volume
from loopfeed.preprocess.quantities import quantity

DEVICES = "the devices"
READ, DECODE, COPY, LINK = "read from storage", "check and decode", "copy in memory", "copy to devices"
"""The names of the stages."""
MEASURE_S = 1.5
"""How long the disk, and then the decoding of images, is measured, in seconds."""
_COPY_S = 0.3
_CACHED = {True: "page cache", False: "disk", None: "perhaps page cache"}


@dataclass(frozen=True)
class Stage:
    """One of the stages through which images come to the devices of a host.

    Attributes:
        name: what is done.
        image_bytes: bytes that it moves for each image.
        images_per_s: images per second that a host can do, None if that was not measured.
        note: how it was measured, or why not.
        is_bounding: whether every image passes through the stage again in every epoch.
    """

    name: str
    image_bytes: float
    images_per_s: float | None
    note: str
    is_bounding: bool = True


@dataclass(frozen=True)
class Flow:
    """The stages of one host, and the images per second that its devices can train on, None if unknown."""

    stages: Sequence[Stage]
    wanted: float | None

    @property
    def bound(self) -> tuple[str, float] | None:
        """What bounds the run, and the images per second of one host that it leaves; None if nothing is known."""
        known = [(each.name, each.images_per_s) for each in self.stages if each.is_bounding and each.images_per_s]
        if self.wanted is not None:
            known.insert(0, (DEVICES, self.wanted))
        return min(known, key=lambda each: each[1]) if known else None


def measure_flow(
    config: TrainConfig,
    source: BatchSource,
    volume: Volume | None,
    *,
    spare_bytes: int | None,
    link_bytes_per_s: float | None,
    wanted: float | None,
) -> Flow:
    """Measure this machine for some seconds, and return what a host moves for each image and how fast it can.

    Args:
        config: the settings.
        source: the training batches.
        volume: the size of the training split, None for batches of the user's own.
        spare_bytes: memory of this machine that the run leaves to the page cache; None if the run is not here.
        link_bytes_per_s: peak rate of a host's links to its GPUs, if the run is not here.
        wanted: images per second that the devices of a host train on, None if unknown.
    """
    image_bytes = batch_bytes(source) / source.batch
    stages = [] if volume is None else _storage_stages(config, source, volume, spare_bytes)
    stages.append(Stage(COPY, image_bytes, measure_copying(_COPY_S) / image_bytes, "1 thread"))
    if link_bytes_per_s is not None:
        stages.append(Stage(LINK, image_bytes, link_bytes_per_s / image_bytes, "peak, not measured"))
    return Flow(stages, wanted)


def _storage_stages(config: TrainConfig, source: BatchSource, volume: Volume, spare_bytes: int | None) -> list[Stage]:
    if isinstance(source, WindowedBatches):
        # Each order reads the same shards; one that looks ahead cannot be asked for the same batches again.
        source = ShardBatches(source.split, batch=source.batch, seed=config.seed)
    read_rate, read_note, decode_rate, decode_note, fits = None, "no shards are here", None, "no shards are here", False
    if isinstance(source, ShardBatches):
        count, threads = config.reader_threads, quantity(config.reader_threads, "thread")
        decode_rate = measure_decoding(source, num_threads=count, timeout_s=config.infeed_timeout_s, limit_s=MEASURE_S)
        if source.split.location.local_path is None:
            # A store delivers whole images only through the reader.
            read_rate, read_note, decode_note = decode_rate, f"{threads}, with decoding", f"{threads}, with reading"
        else:
            read = measure_reading(source.split, num_threads=count, limit_s=MEASURE_S)
            read_rate, read_note, decode_note = None, "too small a pack", threads
            if read is not None:
                read_rate, read_note = read[0] / volume.stored_bytes, f"{threads}, {_CACHED[read[1]]}"
            fits = spare_bytes is not None and volume.disk_bytes < spare_bytes
    return [
        Stage(READ, volume.stored_bytes, read_rate, read_note, is_bounding=not fits),
        Stage(DECODE, volume.image_bytes, decode_rate, decode_note),
    ]
