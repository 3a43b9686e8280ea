"""`--precision bfloat16`: what is computed in it, what stays float32, and that it is as exact as eight bits allow."""

import pytest

from engine import train
from tests.toy import Linear, toy_batch, toy_config


def test_a_model_of_ones_own_decides_its_precision_itself():
    with pytest.raises(ValueError, match=r"precision must be float32 with a model of your own, got 'bfloat16': leave"):
        train(toy_config(precision="bfloat16"), model=Linear(), batches=toy_batch)
