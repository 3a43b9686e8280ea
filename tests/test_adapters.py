"""The adapters of Flax and Equinox, against the libraries' own calls."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopfeed import Model, train
from loopfeed.engine.adapters import equinox, flax_linen, flax_nnx
from loopfeed.engine.records.weights import name_tensors
from tests.toy import CLASSES, SIZE, toy_batch, toy_config

eqx: Any = pytest.importorskip("equinox")
nn: Any = pytest.importorskip("flax.linen")
nnx: Any = pytest.importorskip("flax.nnx")
# jax's own would be compiled by every process that collects the tests.
IMAGES = jnp.asarray(np.random.default_rng(5).standard_normal((6, SIZE, SIZE, 3)), jnp.float32)
KEY = jax.random.key(7)


class LinenNet(nn.Module):
    rate: float = 0.5

    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Conv(4, (3, 3), strides=2)(x))
        return nn.Dense(CLASSES)(nn.Dropout(self.rate, deterministic=not train)(nn.relu(x)).mean((1, 2)))


class NnxNet(nnx.Module):
    def __init__(self, *, rngs, rate=0.5):
        self.conv = nnx.Conv(3, 4, (3, 3), strides=2, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.heads = nnx.List([nnx.Linear(4, CLASSES, rngs=rngs)])

    def __call__(self, x):
        return self.heads[0](self.drop(nnx.relu(self.norm(self.conv(x)))).mean((1, 2)))


class EquinoxNet(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout
    heads: list[Any]

    def __init__(self, key, rate=0.5):
        self.conv = eqx.nn.Conv2d(3, 4, 3, stride=2, padding=1, key=key)
        self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch")
        self.drop = eqx.nn.Dropout(rate)
        self.heads = [eqx.nn.Linear(4, CLASSES, key=key)]

    def __call__(self, x, state, *, key=None):
        x, state = self.norm(self.conv(x), state)
        return self.heads[0](self.drop(jax.nn.relu(x), key=key).mean((1, 2))), state


def linen(rate=0.5, **options):
    return flax_linen(LinenNet(rate), (SIZE, SIZE, 3), **options)


def of_nnx(rate=0.5, **options):
    return flax_nnx(lambda rngs: NnxNet(rngs=rngs, rate=rate), **options)


def of_equinox(rate=0.5, **options):
    return equinox(lambda key: eqx.nn.make_with_state(EquinoxNet)(key, rate), **options)


ADAPTED = {"linen": linen, "nnx": of_nnx, "equinox": of_equinox}
NAMES = {
    "linen": ("LinenNet", "params.Conv_0.kernel", "batch_stats.BatchNorm_0.mean"),
    "nnx": ("NnxNet", "params.heads.0.kernel", "batch_stats.norm.mean"),
    "equinox": ("EquinoxNet", "params.heads.0.weight", "batch_stats.state.1.0"),
}


def linen_itself(params, stats, train):
    given = LinenNet(0.0).apply({"params": params, "batch_stats": stats}, IMAGES, train, mutable=["batch_stats"])
    return given[0], given[1]["batch_stats"]


def nnx_itself(params, stats, train):
    network = NnxNet(rngs=nnx.Rngs(0), rate=0.0)
    for name, part in params.items():
        layer = network.heads[0] if name == "heads" else getattr(network, name)
        for leaf, value in (part["0"] if name == "heads" else part).items():
            getattr(layer, leaf).set_value(value)
    for leaf, value in stats["norm"].items():
        getattr(network.norm, leaf).set_value(value)
    (network.train if train else network.eval)()
    outputs = network(IMAGES)
    return outputs, {"norm": {leaf: getattr(network.norm, leaf).get_value() for leaf in stats["norm"]}}


def equinox_itself(params, stats, train):
    network, state = eqx.nn.make_with_state(EquinoxNet)(jax.random.key(0), 0.0)
    arrays, rest = eqx.partition(network, eqx.is_inexact_array)
    where = lambda net: [net.conv.weight, net.conv.bias, net.norm.weight, net.norm.bias]  # noqa: E731
    leaves = [params["conv"]["weight"], params["conv"]["bias"], params["norm"]["weight"], params["norm"]["bias"]]
    arrays = eqx.tree_at(where, arrays, leaves)
    head = params["heads"]["0"]
    arrays = eqx.tree_at(lambda net: [net.heads[0].weight, net.heads[0].bias], arrays, [head["weight"], head["bias"]])
    state = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(stats["state"]))
    network = eqx.nn.inference_mode(eqx.combine(arrays, rest), value=not train)
    run = jax.vmap(network, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
    outputs, state = run(IMAGES.transpose(0, 3, 1, 2), state)
    return outputs, jax.tree.unflatten(jax.tree.structure(stats), jax.tree.leaves(state))


ITSELF = {"linen": linen_itself, "nnx": nnx_itself, "equinox": equinox_itself}


@pytest.mark.parametrize("library", ADAPTED)
def test_an_adapted_model_computes_what_its_library_computes(library):
    model = ADAPTED[library](0.0)
    params, stats = model.init(jax.random.key(1))
    for train_mode in (True, False):
        # A rate of zero draws nothing that matters; NNX's and Equinox's layers skip the draw.
        outputs, new = model.apply(params, stats, IMAGES, train=train_mode)
        expected, expected_stats = ITSELF[library](params, stats, train_mode)
        # Loop-safe convolutions sum 27 products in another order.
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), outputs, expected)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), new, expected_stats)
        stats = new


@pytest.mark.parametrize("library", ADAPTED)
def test_weights_are_named_by_path_and_drawn_from_the_key(library):
    model = ADAPTED[library]()
    assert isinstance(model, Model)
    name, param, stat = NAMES[library]
    assert model.name == name
    one, same, other = (name_tensors(None, *model.init(jax.random.key(seed))) for seed in (1, 1, 2))
    assert {param, stat} <= one.keys()
    np.testing.assert_array_equal(one[param], same[param])
    assert (one[param] != other[param]).any()


@pytest.mark.parametrize("library", ADAPTED)
def test_bfloat16_computes_close_to_float32_and_stores_float32(library):
    full, half = ADAPTED[library](), ADAPTED[library](precision="bfloat16")
    params, stats = full.init(jax.random.key(1))
    expected, _ = full.apply(params, stats, IMAGES, train=False)
    outputs, _ = half.apply(params, stats, IMAGES, train=False)
    assert outputs.dtype == jnp.float32
    assert (outputs != expected).any()
    # 8 bits of significand, and values of about 1.
    np.testing.assert_allclose(outputs, expected, atol=0.05)
    _, new = half.apply(params, stats, IMAGES, train=True, key=KEY)
    assert jax.tree.map(jnp.dtype, jax.tree.map(jnp.result_type, new)) == jax.tree.map(jnp.result_type, stats)
    with pytest.raises(ValueError, match="precision must be float32 or bfloat16, got 'float8'"):
        ADAPTED[library](precision="float8")


@pytest.mark.parametrize("library", ADAPTED)
def test_dropout_depends_on_the_key_alone_and_needs_one_in_training(library):
    model = ADAPTED[library]()
    params, stats = model.init(jax.random.key(1))
    one, same, other = (
        model.apply(params, stats, IMAGES, train=True, key=jax.random.key(seed))[0] for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()
    with pytest.raises((ValueError, RuntimeError), match=r"got no key: pass key=|Dropout requires a key"):
        model.apply(params, stats, IMAGES, train=True)


@pytest.mark.parametrize("library", ADAPTED)
def test_keys_of_images_draw_for_the_batch_or_for_each_image(library):
    model = ADAPTED[library]()
    params, stats = model.init(jax.random.key(1))
    keys = jax.random.split(jax.random.key(3), len(IMAGES))
    outputs, changed = (
        model.apply(params, stats, IMAGES, train=True, key=each)[0] for each in (keys, keys.at[1].set(keys[2]))
    )
    differs = np.asarray((outputs != changed).any(axis=1))
    # Equinox's modules take one image, so that each image has draws of its own; Flax's draw once for the batch.
    np.testing.assert_array_equal(differs, np.arange(len(IMAGES)) == 1 if library == "equinox" else differs & False)
    if library != "equinox":
        np.testing.assert_array_equal(outputs, model.apply(params, stats, IMAGES, train=True, key=keys[0])[0])


def test_a_module_is_not_changed_and_gives_its_own_parameters():
    network = NnxNet(rngs=nnx.Rngs(3))
    model = flax_nnx(network)
    params, _ = model.init(KEY)
    np.testing.assert_array_equal(params["conv"]["kernel"], network.conv.kernel.get_value())
    assert network.conv.conv_general_dilated is jax.lax.conv_general_dilated
    pair = eqx.nn.make_with_state(EquinoxNet)(KEY)
    np.testing.assert_array_equal(equinox(*pair).init(KEY)[0]["conv"]["weight"], pair[0].conv.weight)


@pytest.mark.parametrize(
    ("adapt", "message"),
    [
        (lambda: flax_linen(LinenNet, (4, 4, 3)), "flax_linen needs a flax.linen.Module, got the class LinenNet"),
        (lambda: flax_linen(LinenNet(), (4, 4)), r"image_shape must be \(height, width, 3\), got \(4, 4\)"),
        (lambda: flax_nnx(3), "flax_nnx needs a flax.nnx.Module, or a function of rngs that returns one, got int"),
        (lambda: flax_nnx(lambda rngs: 3), "returns a flax.nnx.Module, but it returned int"),
        (lambda: equinox(3), "equinox needs an eqx.Module, or a function of a key that returns one, got int"),
        (lambda: equinox(lambda key: 3), "returns an eqx.Module, but it returned int"),
    ],
)
def test_what_an_adapter_cannot_take_is_refused(adapt, message):
    with pytest.raises(ValueError, match=message):
        adapt()


@pytest.mark.parametrize(
    ("module", "adapter"),
    [
        (lambda: LinenNet(), r"LinenNet, a module of flax: pass loopfeed.engine.adapters.flax_linen\(module, \(height"),
        (lambda: LinenNet, "LinenNet, a module of flax: pass loopfeed.engine.adapters.flax_linen"),
        (
            lambda: NnxNet(rngs=nnx.Rngs(0)),
            r"NnxNet, a module of flax: pass loopfeed.engine.adapters.flax_nnx\(module\)",
        ),
        (lambda: eqx.nn.make_with_state(EquinoxNet)(KEY)[0], r"EquinoxNet, a module of equinox: pass .*equinox\(model"),
    ],
    ids=["linen", "linen class", "nnx", "equinox"],
)
def test_a_bare_module_is_refused_with_its_adapter(module, adapter):
    with pytest.raises(ValueError, match=adapter):
        train(toy_config(), model=module(), batches=toy_batch)
