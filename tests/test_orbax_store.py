"""What Orbax and TensorStore print around a failed read: nothing, and nothing else is silenced."""

import asyncio
import gc
import logging

import pytest

from loopfeed.engine.records.orbax_store import restore_arrays


def drop_failed_task(message):
    """Run a task that fails while nobody waits for it, and collect it, at which asyncio reports it."""

    async def fail():
        raise ValueError(message)

    async def start():
        task = asyncio.ensure_future(fail())
        await asyncio.sleep(0)
        assert task.done()

    asyncio.run(start())
    gc.collect()


@pytest.fixture
def reports(caplog):
    caplog.set_level(logging.ERROR, logger="asyncio")
    return lambda: [record.getMessage() for record in caplog.records]


def test_only_errors_of_arrays_are_not_reported_after_a_failed_read(tmp_path, reports):
    with pytest.raises(FileNotFoundError):
        restore_arrays(tmp_path / "none")
    drop_failed_task("DATA_LOSS: Error reading \"a/.zarray\" [source locations='tensorstore/internal/io.cc:1']")
    assert reports() == []
    drop_failed_task("mine")
    (report,) = reports()
    assert "never retrieved" in report
    assert "mine" in report
