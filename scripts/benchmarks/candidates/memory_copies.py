"""The machine's copy speed: NumPy copies pieces of a large array into one buffer, in random order."""

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from protocol import Channel, timed

from loopfeed.preprocess.control_groups import num_cores


def main(piece_bytes: int, pieces: int, source_bytes: int, threads: int, unit: str) -> None:
    """Serve copies of `pieces` pieces into a buffer of `pieces · piece_bytes`, by `threads` threads (0: all cores)."""
    channel = Channel()
    num_threads = threads or num_cores()
    num_pieces = max(pieces, source_bytes // piece_bytes)
    source = np.ones((num_pieces, piece_bytes), np.uint8)
    target = np.zeros((pieces, piece_bytes), np.uint8)
    orders = np.random.default_rng(0).permutation(num_pieces)
    pool = ThreadPoolExecutor(num_threads)
    parts = np.array_split(np.arange(pieces), num_threads)

    def copy_part(start: int, places: np.ndarray) -> None:
        for place in places.tolist():
            np.copyto(target[place], source[orders[(start + place) % num_pieces]])

    def work(num_units: int) -> None:
        for start in range(0, num_units * pieces, pieces):
            if num_threads == 1:
                copy_part(start, parts[0])
            else:
                list(pool.map(partial(copy_part, start), parts))

    work(2)
    amount = {"bytes": pieces * piece_bytes, "pulls": 1, "images": pieces}[unit]
    channel.ready(amount, versions={"numpy": np.__version__}, facts={"threads": num_threads})
    channel.serve(timed(work))


if __name__ == "__main__":
    piece_bytes, pieces, source_bytes, threads = map(int, sys.argv[1:5])
    main(piece_bytes, pieces, source_bytes, threads, sys.argv[5])
