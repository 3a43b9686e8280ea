"""The cache of compiled programs, jax's settings after a compilation, and XLA's description of a program."""

import gc
import weakref
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopfeed.engine.compilation.ahead_of_time import (
    caching_compilations,
    compile_traced,
    compiler_options,
    trace_ahead,
)
from loopfeed.engine.crossing.token import first_token
from loopfeed.engine.crossing.transport import InplaceTransport
from loopfeed.models.registry import build_model
from tests.toy import Linear


def calling_program(*, is_kept):
    """Return a program that calls the host, its transport, and a weak reference to the callback."""
    transport = InplaceTransport()

    def answer(operands, results):
        results[0][...] = operands[0] + 1

    def program(x):
        return transport.call(answer, (jax.ShapeDtypeStruct((), jnp.int32),), first_token(), x)[1][0]

    traced = trace_ahead(program, jnp.int32(0), platform="cpu")
    return compile_traced(traced, keeps=transport if is_kept else None), weakref.ref(transport)


def test_the_callbacks_of_a_program_live_as_long_as_the_program():
    compiled, transport = calling_program(is_kept=True)
    gc.collect()
    assert int(compiled.call(jnp.int32(4))) == 5
    del compiled
    gc.collect()
    assert transport() is None


def test_a_program_without_its_transport_is_an_error():
    compiled, transport = calling_program(is_kept=False)
    gc.collect()
    assert transport() is None
    with pytest.raises(jax.errors.JaxRuntimeError, match="a program called a transport that has been deleted"):
        jax.block_until_ready(compiled.call(jnp.int32(4)))


def test_the_second_compilation_comes_from_the_folder(tmp_path):
    def make_function():  # jax itself remembers what it compiled for one function object
        def function(x):
            return jnp.sin(x) @ x

        return function

    x = jnp.ones((17, 17))
    with caching_compilations(str(tmp_path)):
        first = compile_traced(trace_ahead(make_function(), x, platform="cpu"))
        second = compile_traced(trace_ahead(make_function(), x, platform="cpu"))
    assert (first.from_cache, second.from_cache) == (False, True)
    assert list(tmp_path.iterdir())
    assert np.array_equal(first.call(x), second.call(x))
    with caching_compilations("off"):
        assert not compile_traced(trace_ahead(make_function(), x, platform="cpu")).from_cache


def test_a_cached_program_can_be_required_to_have_the_same_scopes(tmp_path):
    def compiled(name, *, by_metadata):
        def function(x):
            with jax.named_scope(name):
                return jnp.cos(x) @ x

        with caching_compilations(str(tmp_path), by_metadata=by_metadata):
            found = compile_traced(trace_ahead(function, jnp.ones((5, 5)), platform="cpu"))
        return found.from_cache, f"/{name}/" in (found.call.as_text() or "")

    # In one line, because the lines of all callers are among the metadata.
    calls = [("old", False), ("new", False), ("new", True), ("new", True)]
    found = [compiled(name, by_metadata=by_metadata) for name, by_metadata in calls]
    assert found[:2] == [(False, True), (True, False)]  # jax ignores scopes by default
    assert found[2:] == [(False, True), (True, True)]


def test_jax_settings_are_restored_after_a_failure(tmp_path):
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    try:
        with caching_compilations(str(tmp_path)):
            assert jax.config.jax_compilation_cache_dir == str(tmp_path)
            raise KeyError
    except KeyError:
        pass
    after = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    assert after == before


def test_a_cache_that_the_caller_chose_is_kept(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        with caching_compilations(None):
            assert jax.config.jax_compilation_cache_dir == str(tmp_path)
    finally:
        jax.config.update("jax_compilation_cache_dir", None)


def test_a_program_is_traced_once_and_its_memory_and_work_are_reported(tmp_path):
    model = Linear()
    shape = jax.eval_shape(model.init, jax.random.key(0))
    images = jax.ShapeDtypeStruct((64, 4, 4, 3), jnp.float32)
    traced = trace_ahead(partial(model.apply, train=True), *shape, images, platform="cpu")
    compiled = compile_traced(traced, dump_folder=tmp_path)
    assert model.traces == [True]
    assert compiled.memory_bytes["arguments"] == 4 * (48 * 3 + 3 + 1 + 64 * 48)
    assert compiled.step_flops is not None
    assert compiled.step_flops >= 2 * 64 * 48 * 3
    assert (tmp_path / "program.stablehlo.mlir").stat().st_size
    assert (tmp_path / "program.optimised.hlo").stat().st_size


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_collection_is_paused_during_tracing_and_restored(collects):
    seen = []

    def function(x):
        seen.append(gc.isenabled())
        if x.ndim:
            raise KeyError
        return x

    (gc.enable if collects else gc.disable)()
    try:
        trace_ahead(function, jnp.zeros(()), platform="cpu")
        with pytest.raises(KeyError):
            trace_ahead(function, jnp.zeros(1), platform="cpu")
        assert gc.isenabled() == collects
    finally:
        gc.enable()
    assert seen == [False, False]


def test_a_gpu_program_is_deterministic_unless_disabled():
    traced = trace_ahead(jnp.sin, jnp.zeros(1), platform="cpu")
    options = compiler_options(traced.lowered, "gpu", deterministic=True)
    assert options == {
        "xla_gpu_exclude_nondeterministic_ops": True,
        "xla_gpu_enable_triton_gemm": False,
    }
    # XLA refuses an option that it does not have, on any backend.
    assert traced.lowered.compile(compiler_options=options) is not None
    assert compiler_options(traced.lowered, "gpu", deterministic=False) == {}
    assert compiler_options(traced.lowered, "cpu", deterministic=True) == {}


@pytest.mark.parametrize(("name", "train"), [("resnet8", True)])
def test_a_network_in_bfloat16_equals_float32_up_to_rounding(name, train):
    images = jax.random.normal(jax.random.key(1), (64, 32, 32, 3))

    def logits(dtype):
        model = build_model(name, num_classes=10, image_size=32, dtype=dtype)
        params, batch_stats = model.init(jax.random.key(0))

        def apply(params, batch_stats, images):
            return model.apply(params, batch_stats, images, train=train)[0]

        return np.asarray(
            compile_traced(trace_ahead(apply, params, batch_stats, images, platform="cpu")).call(
                params, batch_stats, images
            )
        )

    wide = logits("float32")
    # Eight layers' roundings of 2**-9 each, of sums that partly cancel.
    assert np.abs(logits("bfloat16") - wide).max() < 0.05 * np.abs(wide).max()


def test_a_cache_that_cannot_be_written_is_one_warning_and_no_cache(tmp_path, recwarn):
    (tmp_path / "file").touch()
    heard: list[str] = []
    with caching_compilations(str(tmp_path / "file" / "cache"), heard.append):
        compiled = compile_traced(trace_ahead(lambda x: jnp.tan(x) @ x, jnp.ones((21, 21)), platform="cpu"))
    assert not compiled.from_cache
    (told,) = heard
    assert told.startswith(f"warning: the compilation cache {tmp_path}/file/cache cannot be written (")
    assert "\n" not in told
    assert not [each for each in recwarn if "compilation cache" in str(each.message)]
