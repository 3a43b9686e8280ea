"""No exception of a callback reaches XLA: the first is kept with its traceback and raised to the user."""

import itertools
import json
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from loopfeed import train
from loopfeed.engine.control.board import ControlBoard
from loopfeed.engine.crossing.cuda.driver import CudaDriver
from loopfeed.engine.crossing.cuda.ring import DeviceRing
from loopfeed.engine.crossing.cuda.transport import _Layout
from loopfeed.engine.crossing.token import first_token
from loopfeed.engine.crossing.transport import CallbackTransport, InplaceTransport
from loopfeed.engine.feed.feeder import Feeder
from loopfeed.engine.profile.profiler import Profiler, _Pulls
from loopfeed.engine.spans import Span
from loopfeed.engine.stream.loss_stream import LossStream
from tests.fake_xla import fake_transport
from tests.toy import BATCH, Linear, toy_batch, toy_config

pytestmark = pytest.mark.timeout(120)

RESULTS = (jax.ShapeDtypeStruct((3,), jnp.uint32), jax.ShapeDtypeStruct((), jnp.int32))


class FaultError(Exception):
    """An exception that nothing expects."""


def failing(function, at):
    """Return a function that raises instead of the call with this number, counted from 1."""
    numbers = itertools.count(1)

    def call(*arguments, **values):
        if next(numbers) == at:
            raise FaultError(f"call {at}")
        return function(*arguments, **values)

    return call


@pytest.fixture(params=["inplace", "callback", "cuda"])
def transport(request):
    return {"inplace": InplaceTransport, "callback": CallbackTransport, "cuda": lambda: fake_transport()[0]}[
        request.param
    ]()


def test_after_a_failure_all_calls_are_answered_with_zeros_and_what_is_emitted_is_dropped(transport):
    emitted = []

    def host(operands, results):
        results[0][...], results[1][...] = 7, -1
        if int(operands[0]) == 2:
            raise FaultError("the third call")

    def program(steps):
        def body(carry):
            token, step, table, numbers = carry
            token, (row, number) = transport.call(host, RESULTS, token, step)
            token = transport.emit(lambda operands: emitted.append(int(operands[0])), token, step)
            return token, step + 1, table.at[step].set(row), numbers.at[step].set(number)

        before = first_token(), jnp.int32(0), jnp.ones((5, 3), jnp.uint32), jnp.ones(5, jnp.int32)
        return lax.while_loop(lambda carry: carry[1] < steps, body, before)[2:]

    with transport.running():
        table, numbers = jax.block_until_ready(jax.jit(program)(jnp.int32(5)))
    assert table.tolist() == [[7] * 3] * 2 + [[0] * 3] * 3
    assert numbers.tolist() == [-1, -1, 0, 0, 0]
    assert emitted == [0, 1]
    assert isinstance(transport.failure, FaultError)
    assert [frame.name for frame in traceback.extract_tb(transport.failure.__traceback__)][-1] == "host"


PLACES = {
    "the words of a pull": (ControlBoard, "words"),
    "the words of an evaluation's pull": (ControlBoard, "stop_words"),
    "the batch of a pull": (Feeder, "take"),
    "the observer before a pull": (_Pulls, "pull_began"),
    "the observer after a pull": (_Pulls, "pull_ended"),
    "the span before a push": (Span, "begin"),
    "the span after a push": (Span, "end"),
    "the observer of a push": (Profiler, "pushed"),
    "the receiver of a push": (LossStream, "receive"),
    "the arrays of a call": (np, "from_dlpack"),
}
# A card's batches come by its ring, whose arrays are memory of the driver's; what observes is the same as elsewhere.
PLACES_OF_A_CARD = {name: PLACES[name] for name in ("the words of a pull", "the receiver of a push")} | {
    "the batch of a pull": (DeviceRing, "give"),
    "the arrays of a call": (_Layout, "arrays"),
    "the driver": (CudaDriver, "copy_to_host"),
}


@pytest.mark.parametrize(
    ("transport", "place"),
    [("inplace", place) for place in PLACES] + [("cuda", place) for place in PLACES_OF_A_CARD],
)
def test_a_run_raises_the_exception_of_its_callback(transport, place, tmp_path, monkeypatch, cards):
    owner, name = (PLACES if transport == "inplace" else PLACES_OF_A_CARD)[place]
    monkeypatch.setattr(owner, name, failing(getattr(owner, name), at=3))
    config = toy_config(
        steps=12, transport=transport, chunk_batches=1, eval_every_steps=3, profile=True, run_dir=tmp_path
    )
    with pytest.raises(FaultError, match="call 3") as raised:
        train(config, model=Linear(), batches=toy_batch, evaluation=toy_batch(100, batch=4 * BATCH))
    assert traceback.extract_tb(raised.value.__traceback__)[-1].name == "call"
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["error"], result["stopped_by"]) == ("FaultError: call 3", "error")
    assert result["steps_done"] < 12
