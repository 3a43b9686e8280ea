"""How fast one host can bring images to its devices: what each stage moves, and how fast this machine does it."""

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.feed.batches import BatchSource
from loopfeed.engine.feed.feeder import batch_bytes
from loopfeed.engine.feed.shard_batches import ShardBatches
from loopfeed.engine.feed.windowed_batches import WindowedBatches
from loopfeed.engine.sizing.cards import Card
from loopfeed.engine.sizing.plan import COPY, DECODE, LINK, READ, Flow, Place, Stage
from loopfeed.engine.sizing.rates import measure_copying, measure_decoding, measure_reading
from loopfeed.engine.sizing.volumes import Volume
from loopfeed.preprocess.quantities import quantity

MEASURE_S = 1.5
"""How long the disk, and then the decoding of images, is measured, in seconds."""
_COPY_S = 0.3
_CACHED = {True: "page cache", False: "disk", None: "perhaps page cache"}


def measure_flow(
    config: TrainConfig,
    source: BatchSource,
    volume: Volume | None,
    place: Place,
    *,
    spare_bytes: int | None,
    card: Card | None,
    device_rate: float | None,
) -> Flow:
    """Measure this machine for some seconds, and return what a host moves for each image and how fast it can.

    Args:
        config: the settings.
        source: the training batches.
        volume: the size of the training split, None for batches of the user's own.
        place: the devices.
        spare_bytes: memory of this machine that the run leaves to the page cache; None if the run is not here.
        card: the kind of GPU, if the run is not here.
        device_rate: images per second that one device trains on, None if unknown.
    """
    image_bytes = batch_bytes(source) / source.batch
    stages = [] if volume is None else _storage_stages(config, source, volume, spare_bytes)
    copied = measure_copying(_COPY_S)
    stages.append(Stage(COPY, image_bytes, copied / image_bytes, "1 thread"))
    if card is not None:
        link = card.link_bytes_per_s * place.devices_per_host
        stages.append(Stage(LINK, image_bytes, link / image_bytes, "peak, not measured"))
    return Flow(stages, place.devices_per_host, device_rate)


def _storage_stages(config: TrainConfig, source: BatchSource, volume: Volume, spare_bytes: int | None) -> list[Stage]:
    if isinstance(source, WindowedBatches):
        # Each order reads the same shards; one that looks ahead cannot be asked for the same batches again.
        source = ShardBatches(source.split, batch=source.batch, seed=config.seed)
    if not isinstance(source, ShardBatches):
        absent = "no shards are here"
        return [Stage(READ, volume.stored_bytes, None, absent), Stage(DECODE, volume.image_bytes, None, absent)]
    count, threads = config.reader_threads, quantity(config.reader_threads, "thread")
    decoded = measure_decoding(source, num_threads=count, timeout_s=config.infeed_timeout_s, limit_s=MEASURE_S)
    if source.split.location.local_path is None:
        # A store delivers whole images only through the reader.
        return [
            Stage(READ, volume.stored_bytes, decoded, f"{threads}, with decoding"),
            Stage(DECODE, volume.image_bytes, decoded, f"{threads}, with reading"),
        ]
    read = measure_reading(source.split, num_threads=count, limit_s=MEASURE_S)
    images_per_s, how = None, "too small a pack"
    if read is not None:
        images_per_s, how = read.bytes_per_s / volume.stored_bytes, f"{threads}, {_CACHED[read.is_cached]}"
    fits = spare_bytes is not None and volume.disk_bytes < spare_bytes
    return [
        Stage(READ, volume.stored_bytes, images_per_s, how, is_bounding=not fits),
        Stage(DECODE, volume.image_bytes, decoded, threads),
    ]
