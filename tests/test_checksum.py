"""The checksum of the shard format: google-crc32c, and the NumPy fallback without it."""

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopfeed.preprocess.shards import checksum
from loopfeed.preprocess.shards.checksum import crc32c
from tests import test_shards


@pytest.fixture(params=["library", "numpy"], scope="module")
def kind(request):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(checksum, "google_crc32c", None)
        yield request.param


@given(data=st.binary(max_size=600))
def test_the_checksum_of_any_bytes_equals_that_of_a_plain_loop(kind, data):
    assert crc32c(data).to_bytes(4, "little") == test_shards.crc32c(data)


@pytest.mark.parametrize(("data", "expected"), [(b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"", 0)])
def test_published_sums(kind, data, expected):
    """RFC 3720, B.4, and the check value of the catalogue of parametrised CRC algorithms."""
    assert crc32c(data) == expected


@pytest.mark.parametrize("num_bytes", [1 << 12, 4100, (1 << 18) + 4])
def test_checksums_of_images_and_indices_equal_those_of_the_library(kind, num_bytes):
    array = np.random.default_rng(num_bytes).integers(256, size=num_bytes, dtype=np.uint8).view(np.uint32)
    assert crc32c(array) == google_crc32c.value(array.tobytes())
