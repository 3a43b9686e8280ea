"""Which images of a listing are packed, and in which order: hashes of keys, so that every machine agrees.

A key is class id and path below the class (see `preprocess.sources.listing`), so it does not matter how the source is
spelt.

The hashes are BLAKE2b with a key for each purpose, so that the order says nothing about who is held out.
"""

import hashlib
from itertools import pairwise

import numpy as np

from preprocess.printable import printable
from preprocess.sources.listing import Listing, SourceError

_ORDER_KEY = b"feedloop order"
_HOLDOUT_KEY = b"feedloop holdout"


def key_hashes(listing: Listing, purpose: bytes) -> np.ndarray:
    """Returns a hash of every image's key, another one for each purpose, as uint64 `[N]`."""
    digests = (hashlib.blake2b(listing.key_bytes(i), digest_size=8, key=purpose).digest() for i in range(len(listing)))
    return np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)


def held_out(listing: Listing, fraction: float) -> np.ndarray:
    """Returns bool `[N]`: the images that belong to the validation split.

    An image is held out when the hash of its key falls in the first `fraction` of all hashes, unless it has the largest
    hash of its class: so every class keeps an image to train on. An image stays on its side when others come or go, but
    for one that was the only one left to train on; a class gives up `fraction` of its images on average, not exactly.
    """
    hashes = key_hashes(listing, _HOLDOUT_KEY)
    taken = hashes < np.uint64(round(fraction * 2**64))
    labels = listing.labels
    by_class = np.lexsort((hashes, labels))
    last_of_class = np.flatnonzero(np.diff(labels[by_class], append=-1))
    taken[by_class[last_of_class]] = False
    return taken


def pack_order(listing: Listing, entries: np.ndarray, limit: int | None = None) -> np.ndarray:
    """Returns the entries (int64 indices into the listing) in the order in which they are packed.

    The order is that of the keys' hashes, and of the keys themselves where two hashes agree: every shard holds a
    mixture of classes, wherever the files came from. Under a limit, classes take turns to give one image each until
    `limit` are chosen, so the class counts differ by at most one unless a class runs out.

    Raises:
        SourceError: two entries have the same key, as two members of an archive may.
    """
    hashes = key_hashes(listing, _ORDER_KEY)[entries]
    order = np.lexsort((_key_ranks(listing, entries, hashes), hashes))
    entries, hashes = entries[order], hashes[order]
    if limit is None or limit >= len(entries):
        return entries
    turns = _turns(listing.labels[entries])
    chosen = np.sort(np.argsort(turns, kind="stable")[:limit])
    return entries[chosen]


def _key_ranks(listing: Listing, entries: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """Ranks keys among entries of equal hash; zeros for all others, for 64-bit hashes hardly ever agree."""
    ranks = np.zeros(len(entries), np.int64)
    _, inverse, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    tied = [(listing.key_bytes(int(entries[place])), place) for place in np.flatnonzero(counts[inverse] > 1).tolist()]
    tied.sort()
    for (key, place), (following, _) in pairwise(tied):
        if key == following:
            raise SourceError(
                f"{printable(listing.name(int(entries[place])))} is there twice; write the archive again with it once"
            )
    for rank, (_, place) in enumerate(tied):
        ranks[place] = rank
    return ranks


def _turns(labels: np.ndarray) -> np.ndarray:
    """Returns for each image how many of its class come before it."""
    by_class = np.argsort(labels, kind="stable")
    counts = np.bincount(labels)
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    turns = np.empty(len(labels), np.int64)
    turns[by_class] = np.arange(len(labels)) - np.repeat(starts, counts)
    return turns
