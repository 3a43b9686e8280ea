"""On a real card: the driver, the crossings, whole runs. Skipped elsewhere; scripts/gpu-check runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from loopfeed import train
from loopfeed.engine.crossing.choice import choose_transport, this_platform
from loopfeed.engine.crossing.token import first_token
from tests.toy import CountedBatches, Linear, toy_batch, toy_config

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[1]
RUN_TRAIN = "import sys; sys.argv[0] = 'run-train'; from loopfeed.engine.commands.cli import main; main()"
SETTINGS = ("--synthetic", "--image-size", "32", "--num-classes", "10", "--model", "resnet8", "--batch", "128")


@pytest.fixture(autouse=True)
def _needs_a_card():
    if "cuda" not in os.environ.get("JAX_PLATFORMS", "cuda") or this_platform() != "cuda":
        pytest.skip("needs an NVIDIA card and jax's CUDA plugin: scripts/gpu-check")


def run_train(folder, *arguments, platform="cuda", **environment):
    """Trains in a process of its own; gives the losses as they were written."""
    command = [sys.executable, "-c", RUN_TRAIN, *SETTINGS, "--run-dir", str(folder), *arguments]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    variables = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": platform} | environment
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["loss"] for line in (folder / "loss.jsonl").read_text().splitlines()]


def test_calls_and_what_is_emitted_carry_their_values():
    transport, called, emitted = choose_transport("cuda", "cuda"), [], []

    def host(operands, results):
        called.append(int(operands[0]))
        results[0][...] = 10 * int(operands[0]) + np.arange(6).reshape(2, 3)

    def program(steps):
        def body(carry):
            token, step, total = carry
            token, (table,) = transport.call(host, (jax.ShapeDtypeStruct((2, 3), jnp.uint32),), token, step)
            token = transport.emit(
                lambda arrays: emitted.append((int(arrays[0]), arrays[1].tolist())), token, step, table[0] * 2
            )
            return token, step + 1, total + table.sum()

        before = first_token(), jnp.int32(0), jnp.uint32(0)
        return lax.while_loop(lambda carry: carry[1] < steps, body, before)[1:]

    with transport.running():
        _, total = jax.block_until_ready(jax.jit(program)(jnp.int32(300)))
    assert called == list(range(300))
    assert emitted == [(step, [2 * (10 * step + place) for place in range(3)]) for step in range(300)]
    assert int(total) == sum(6 * 10 * step + 15 for step in range(300))


@pytest.mark.parametrize("chunk", [1, 4, 50])
def test_a_run_has_the_steps_of_the_slow_transport(chunk):
    settings = {"steps": 37, "eval_every_steps": 10}
    evaluated = toy_batch(100, batch=19)
    batches = CountedBatches()
    fast = train(
        toy_config(transport="cuda", chunk_batches=chunk, **settings),
        model=Linear(),
        batches=batches,
        evaluation=evaluated,
    )
    slow = train(toy_config(transport="callback", **settings), model=Linear(), batches=toy_batch, evaluation=evaluated)
    assert batches.calls == list(range(37))
    np.testing.assert_allclose(fast.losses, slow.losses, rtol=1e-5)
    assert [each.step for each in fast.evaluations] == [each.step for each in slow.evaluations] == [10, 20, 30, 37]
    assert [each.top1 for each in fast.evaluations] == [each.top1 for each in slow.evaluations]


def test_a_source_that_fails_in_mid_chunk_loses_no_step_before_it(tmp_path):
    config = toy_config(steps=40, transport="cuda", run_dir=tmp_path, chunk_batches=20)
    with pytest.raises(ConnectionResetError):
        train(config, model=Linear(), batches=CountedBatches(raise_at=27))
    assert len((tmp_path / "loss.jsonl").read_text().splitlines()) == 27


def test_the_library_proposes_the_kernel_of_each_convolution(tmp_path):
    """One without a proposal ran thousands of times slower on an H100."""
    run_train(tmp_path / "run", "--steps", "2", "--precision", "bfloat16", "--dump-hlo", str(tmp_path / "hlo"))
    lines = (tmp_path / "hlo" / "program.optimised.hlo").read_text().splitlines()
    convolutions = [line for line in lines if 'custom_call_target="__cudnn$conv' in line]
    assert convolutions
    assert [line for line in convolutions if '"algorithm":{"algo_id"' not in line] == []


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_two_runs_that_compile_for_themselves_have_the_same_bits(tmp_path, precision):
    losses = [
        run_train(
            tmp_path / name,
            *("--steps", "60", "--precision", precision, "--compilation-cache", str(tmp_path / f"cache-{name}")),
        )
        for name in "ab"
    ]
    assert losses[0] == losses[1]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert weights[0] == weights[1]


def test_a_resumed_run_has_the_bits_of_a_whole_one(tmp_path):
    cache = ("--compilation-cache", str(tmp_path / "cache"))
    whole = run_train(tmp_path / "whole", "--steps", "60", "--snapshot-every", "20", *cache)
    run_train(tmp_path / "part", "--steps", "40", "--snapshot-every", "20", "--chunk", "20", *cache)
    resumed = run_train(
        tmp_path / "part", "--steps", "60", "--snapshot-every", "20", "--chunk", "20", "--resume", *cache
    )
    assert resumed == whole


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_gpu_and_a_cpu_train_the_same_run(tmp_path, precision):
    """Float32 at the highest precision of products to 1e-3; bfloat16 keeps 8 bits, which twenty steps carry on."""
    arguments = ("--steps", "20", "--learning-rate", "0.02", "--precision", precision)
    highest = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"} if precision == "float32" else {}
    card = run_train(tmp_path / "card", *arguments, **highest)
    processor = run_train(tmp_path / "processor", *arguments, platform="cpu")
    np.testing.assert_allclose(card, processor, rtol=1e-3 if precision == "float32" else 2e-2)
