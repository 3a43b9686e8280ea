"""Parameters and statistics of any dtype: they cross to the host bit for bit, and are stored, resumed and replayed."""

import shutil
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from loopfeed import read_weights, replay_run, train
from loopfeed.engine.control.board import ControlBoard
from loopfeed.engine.crossing.choice import choose_transport
from loopfeed.engine.crossing.outfeed import Outfeed
from loopfeed.engine.crossing.token import first_token
from loopfeed.engine.records.snapshot import read_snapshot, snapshot_steps, write_snapshot
from loopfeed.engine.records.stored_types import check_weight_types
from tests.fake_xla import fake_transport
from tests.toy import BATCH, CLASSES, Linear, toy_batch, toy_config

NARROW = ["bfloat16", "int2", "int4", "uint2", "uint4", "float4_e2m1fn"]
NARROW += [f"float8_{kind}" for kind in ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz")]
NARROW += [f"float8_{kind}" for kind in ("e5m2", "e5m2fnuz", "e8m0fnu")]
PLAIN = ["bool", "int8", "uint16", "float16", "float32", "complex64"]
EVALUATED = toy_batch(100, batch=2 * BATCH)


def all_values(name):
    """Return an array with every value of a narrow dtype, NaN included, and with some of a plain one."""
    if name in PLAIN:
        return np.arange(-3, 5).astype(name)
    dtype = np.dtype(getattr(ml_dtypes, name))
    if name == "bfloat16":
        return np.arange(2**16).astype(np.uint16).view(dtype)
    if jax.dtypes.itemsize_bits(dtype) == 8:
        return np.arange(2**8).astype(np.uint8).view(dtype)
    small = np.arange(-8, 16) if "int" in name else np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    return np.unique(small[small.astype(dtype).astype(small.dtype) == small]).astype(dtype)


@pytest.mark.parametrize(
    ("transport_name", "name"),
    [*(("inplace", name) for name in NARROW + PLAIN), ("cuda", "bfloat16"), ("cuda", "int4"), ("callback", "bfloat16")],
)
def test_every_value_of_a_dtype_crosses_to_the_host_and_is_stored_in_a_snapshot(name, transport_name, tmp_path):
    values = all_values(name)
    received: list[Any] = []
    transport = fake_transport()[0] if transport_name == "cuda" else choose_transport(transport_name, "cpu")
    outfeed = Outfeed(received.append, ControlBoard(), transport)

    def program(values):
        return outfeed.push_snapshot(first_token(), jnp.int32(1), jnp.int32(1), {"values": values, "one": values[0]})

    with transport.running():
        jax.block_until_ready(jax.jit(program)(jnp.asarray(values)))
    assert outfeed.failure is None
    (pushed,) = received
    write_snapshot(tmp_path, 1, 1, pushed.state)
    for found in (pushed.state, read_snapshot(tmp_path, 1).leaves):
        assert found["values"].dtype == found["one"].dtype == values.dtype
        assert found["values"].tobytes() == values.tobytes()
        assert found["one"].tobytes() == values[:1].tobytes()


class Mixed(Linear):
    """The linear toy model with weights in bfloat16, a table that is not trained, and narrow statistics."""

    def init(self, key):
        params, batch_stats = super().init(key)
        table = jnp.arange(-4, 8).astype(jnp.int4).reshape(4, CLASSES)
        params = {"weights": params["weights"].astype(jnp.bfloat16), "bias": params["bias"], "table": table}
        return params, batch_stats | {"scale": jnp.ones(3, jnp.float8_e4m3), "count": jnp.zeros((), jnp.uint4)}

    def apply(self, params, batch_stats, images, train):
        wide = {
            "weights": params["weights"].astype(jnp.float32),
            "bias": params["bias"] + params["table"][0].astype(jnp.float32),
        }
        logits, new = super().apply(wide, batch_stats, images, train)
        return logits, batch_stats | new | {"count": batch_stats["count"] + jnp.uint4(1)}


PARTS = {
    "model": Mixed(),
    "batches": toy_batch,
    "evaluation": EVALUATED,
    "metrics": {"first": lambda logits, _: logits[:, 0].astype(jnp.bfloat16)},
}


def run(folder, **values):
    config = toy_config(
        steps=6,
        optimizer="adamw",
        freeze="table",
        eval_every_steps=2,
        snapshot_every_steps=2,
        keep_snapshots=0,
        histogram_every_steps=3,
        run_dir=folder,
        **values,
    )
    return train(config, **PARTS)


def test_a_run_with_parameters_of_several_dtypes_is_stored_resumed_and_replayed(tmp_path):
    whole = run(tmp_path / "run")
    assert whole.params["weights"].dtype == jnp.bfloat16
    weights = read_weights(tmp_path / "run/model.safetensors")
    assert weights.params["weights"].dtype == jnp.bfloat16
    assert np.asarray(weights.params["weights"]).tobytes() == np.asarray(whole.params["weights"]).tobytes()
    assert (weights.params["table"].dtype, weights.batch_stats["count"].dtype) == (np.int8, np.uint8)
    assert int(weights.batch_stats["count"]) == int(whole.batch_stats["count"]) == 6
    (record,) = [each for each in whole.evaluations if each.step == 6]
    assert isinstance(record.metrics["first"], float)

    shutil.copytree(tmp_path / "run", tmp_path / "killed")
    for step in snapshot_steps(tmp_path / "killed/snapshots")[1:]:
        shutil.rmtree(tmp_path / f"killed/snapshots/{step}")
    resumed = run(tmp_path / "killed", resume=True)
    for one, other in zip(
        *(jax.tree.leaves((each.params, each.batch_stats)) for each in (whole, resumed)), strict=True
    ):
        assert (one.dtype, np.asarray(one).tobytes()) == (other.dtype, np.asarray(other).tobytes())
    assert replay_run(tmp_path / "run", **PARTS).is_same


def test_weights_of_a_dtype_that_no_file_holds_are_refused_at_the_start_by_their_name(tmp_path):
    wide = {"inner": {"kernel": np.zeros(3, np.complex128)}}
    with pytest.raises(ValueError, match=r"but params.inner.kernel is complex128: make it complex64"):
        check_weight_types(wide, {})
