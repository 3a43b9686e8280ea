"""Transfers of batches from host memory to a GPU's, through the ring that feeds a program, or by plain copies.

"ring": the feeder's page-locked slots, the copying thread, the slots on the card and the copy out of them, for an
otherwise idle stream. "copies": the driver's own copies of the same number of bytes, one after the other.
"""

import sys
import time

from protocol import Channel
from pulls import ReadyBatches

from loopfeed.engine.crossing.cuda.arena import Arena
from loopfeed.engine.crossing.cuda.driver import CudaDriver
from loopfeed.engine.crossing.cuda.ring import DeviceRing, Places
from loopfeed.engine.feed.feeder import Feeder, ring_depth

LAST_STEP = 2**31 - 1


def main(kind: str, batch: int, size: int) -> None:
    """Serve batches; the amount is their bytes."""
    channel = Channel()
    driver, source = CudaDriver(), ReadyBatches(batch, size)
    arena = Arena(driver)
    pixel_bytes, label_bytes, next_step = 4 * batch * size * size, 4 * batch, 0
    with driver.current():
        stream = arena.stream()
        places = Places(arena.device(pixel_bytes), arena.device(label_bytes))
        block = arena.pinned(pixel_bytes)
        feeder = Feeder(
            source,
            start_index=0,
            stop_index=LAST_STEP,
            depth=ring_depth(source, None),
            num_threads=2,
            timeout_s=60,
        )
        ring = DeviceRing(driver, feeder, pixel_bytes=pixel_bytes, label_bytes=label_bytes)
        if kind == "ring":
            feeder.start(arena.pinned)
            ring.start(arena)

        def run(num_units: int) -> float:
            nonlocal next_step
            started = time.perf_counter()
            for step in range(next_step, next_step + num_units):
                if kind == "ring":
                    ring.give(step, places, stream)
                else:
                    driver.copy_to_device(places.pixels, block.ctypes.data, pixel_bytes, stream)
            driver.synchronize_stream(stream)
            next_step += num_units
            return time.perf_counter() - started

        run(8)
        channel.ready(pixel_bytes)
        channel.serve(run)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
