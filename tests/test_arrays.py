"""The arrays on disk: existing metadata is replaced, and damage is described."""

import pytest

from loopfeed.preprocess.shards.arrays import damage


@pytest.mark.parametrize("place", ["{0, 0, 0}/{8, 1, 1}", "{7, 0, 0}/{8, 1, 1}"])
def test_the_same_damage_has_the_same_message_for_every_image(place):
    where = f'DATA_LOSS: Error reading shard entry {place} in local file "/x/c/0/0/0": '
    assert damage(ValueError(where + "Unexpected thing")) == "DATA_LOSS: Unexpected thing"
    assert damage(ValueError(where + "Existing shard has size of 0 bytes, but")) == "the shard file is truncated"
