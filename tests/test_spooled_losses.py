"""Losses beyond a bound go to a file, and come back to the bit."""

import tempfile
from contextlib import ExitStack, closing

import numpy as np
import pytest

from loopfeed.engine.stream.spooled_losses import SpooledLosses

VALUES = [0.1, float("nan"), -0.0, float("inf"), 1e-40, 7.0, 8.5, 2.0, 3.0, 4.0, 5.0]


@pytest.fixture
def opened():
    """Make what is closed after the test."""
    with ExitStack() as stack:
        yield lambda held: stack.enter_context(closing(SpooledLosses(held)))


@pytest.mark.parametrize("held", [1, 3, 4, 11, 100])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 8, 11])
def test_every_loss_is_returned_bit_for_bit(opened, held, count):
    losses = opened(held)
    for number, value in enumerate(VALUES[:count], start=1):
        losses.append(value)
        assert len(losses) == number
        assert losses.to_array().tobytes() == np.array(VALUES[:number], np.float32).tobytes()
    found = losses.to_array()
    assert type(found) is np.ndarray
    assert (found.dtype, found.shape) == (np.dtype(np.float32), (count,))
    found[:1] = 3
    assert losses.to_array().tobytes() == np.array(VALUES[:count], np.float32).tobytes()


@pytest.mark.parametrize("after", [0, 2])
def test_a_failing_disk_loses_nothing(monkeypatch, opened, after):
    real, calls = tempfile.TemporaryFile, 0

    class Refusing:
        def __init__(self):
            self._file = real(buffering=0)

        def write(self, content):
            nonlocal calls
            calls += 1
            if calls > after:
                raise OSError(28, "No space left on device")
            return self._file.write(content)

        def __getattr__(self, name):
            return getattr(self._file, name)

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: Refusing())
    losses = opened(4)
    for step in range(50):
        losses.append(step)
    np.testing.assert_array_equal(losses.to_array(), np.arange(50, dtype=np.float32))


def test_where_no_temporary_file_can_be_made_they_stay_in_memory(monkeypatch, opened):
    def refuse(**_):
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    losses = opened(4)
    for step in range(50):
        losses.append(step)
    np.testing.assert_array_equal(losses.to_array(), np.arange(50, dtype=np.float32))


def test_what_was_handed_out_outlives_the_file():
    losses = SpooledLosses(4)
    for step in range(10):
        losses.append(step)
    found = losses.to_array()
    losses.close()
    np.testing.assert_array_equal(found, np.arange(10, dtype=np.float32))
    assert len(losses) == 0
