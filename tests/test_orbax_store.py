"""Snapshots have the files that Orbax writes; what is printed around a failed read is silenced, but nothing else."""

import asyncio
import gc
import json
import logging

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

from loopfeed.engine.records import orbax_store
from loopfeed.engine.records.orbax_store import arrays_store, restore_arrays, save_items


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


def test_the_files_are_those_of_orbax(tmp_path):
    """The same metadata, and the same keys and bytes in the store, for all types of numbers."""
    import orbax.checkpoint as ocp

    rng = np.random.default_rng(0)
    names = ("float32", "bfloat16", "float16", "float64", "uint32", "int32", "int64", "uint8", "int8", "bool")
    arrays = {name: {"a.b": rng.integers(0, 2, (3, 5)).astype(jnp.dtype(name))} for name in names}
    arrays["none"] = {"of no axis": np.array(3.5, np.float32), "zeros": np.zeros((2, 1, 4), np.float32)}
    facts = {"step": 3, "text": "ü"}
    save_items(tmp_path / "ours", arrays, facts)
    items = {"facts": ocp.args.JsonSave(facts), "state": ocp.args.PyTreeSave(arrays)}
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    uncompressed = ocp.PyTreeCheckpointHandler(use_compression=False)
    registry.add("state", ocp.args.PyTreeSave, uncompressed)
    handler = ocp.CompositeCheckpointHandler(handler_registry=registry)
    with orbax_store._quiet(), ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "orbax", args=ocp.args.Composite(**items))

    def content(path):
        store = ts.KvStore.open(arrays_store(path)).result()
        about = json.loads((path / "_CHECKPOINT_METADATA").read_text())
        return (
            {key: store.read(key).result().value for key in store.list().result()},
            json.loads((path / "state/_METADATA").read_text()),
            json.loads((path / "facts/metadata").read_text()),
            {key: value for key, value in about.items() if not key.endswith("_nsecs")},
            {file.relative_to(path) for file in path.rglob("commit_success.txt")},
        )

    assert content(tmp_path / "ours") == content(tmp_path / "orbax")
