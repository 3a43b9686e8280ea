"""Which images of a listing are packed, and in which order: hashes of names, so that every machine agrees.

The hashes are BLAKE2b with a key for each purpose, so that the order says nothing about who is held out.
"""

import hashlib

import numpy as np

from preprocess.listing import Listing

_ORDER_KEY = b"feedloop order"
_HOLDOUT_KEY = b"feedloop holdout"


def name_hashes(listing: Listing, key: bytes) -> np.ndarray:
    """Returns a keyed hash of every name as uint64 `[N]`."""
    digests = (hashlib.blake2b(listing.name_bytes(i), digest_size=8, key=key).digest() for i in range(len(listing)))
    return np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)


def held_out(listing: Listing, fraction: float) -> np.ndarray:
    """Returns bool `[N]`: the images that belong to the validation split.

    An image is held out when the hash of its name falls in the first `fraction` of all hashes. So it stays on its side
    when other images come or go, and a class gives up `fraction` of its images on average rather than exactly.
    """
    return name_hashes(listing, _HOLDOUT_KEY) < np.uint64(round(fraction * 2**64))


def pack_order(listing: Listing, entries: np.ndarray, limit: int | None = None) -> np.ndarray:
    """Returns the entries (int64 indices into the listing) in the order in which they are packed.

    The order is that of the names' hashes, and of the names themselves where two hashes agree: every shard holds a
    mixture of classes, wherever the files came from. Under a limit, classes take turns to give one image each until
    `limit` are chosen, so the class counts differ by at most one unless a class runs out.
    """
    hashes = name_hashes(listing, _ORDER_KEY)[entries]
    order = np.lexsort((_name_ranks(listing, entries, hashes), hashes))
    entries, hashes = entries[order], hashes[order]
    if limit is None or limit >= len(entries):
        return entries
    turns = _turns(listing.labels[entries])
    chosen = np.sort(np.argsort(turns, kind="stable")[:limit])
    return entries[chosen]


def _name_ranks(listing: Listing, entries: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """Ranks names among entries of equal hash; zeros for all others, since 64-bit hashes hardly ever agree."""
    ranks = np.zeros(len(entries), np.int64)
    _, inverse, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    tied = np.flatnonzero(counts[inverse] > 1)
    for rank, place in enumerate(sorted(tied.tolist(), key=lambda place: listing.name_bytes(int(entries[place])))):
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
