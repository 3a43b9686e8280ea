"""Every shape and dtype that a type states is so while training, evaluation and all layers are traced.

In a process of its own, because jaxtyping's import hook must be there before the modules are. Nothing is compiled. A
general checker such as beartype refuses protocols and other libraries' types, and does not look into the fields of a
NamedTuple; this one looks at arrays alone.
"""

import inspect
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, wraps
from typing import Any, Union, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import AbstractArray, install_import_hook

_ENGINE = ("control.board", "feed.label_form", "images", "objective", "program", "replicas", "updates")
ROOMS = [f"loopfeed.engine.{room}" for room in _ENGINE] + ["loopfeed.models.layers", "loopfeed.models.families"]
# Which of oneDNN's kernels are used depends on the processor.
BY_PROCESSOR = "models.layers.onednn_"

stated: set[str] = set()
"""The functions that state a shape."""
reached: set[str] = set()


def test_shapes_are_as_their_types_state():
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


def fits(value: Any, hint: Any) -> bool:
    """Return whether all arrays in a value have the shapes and dtypes of its type; binds the letters of shapes."""
    hint = getattr(hint, "__value__", hint)
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        # jax's functions take NumPy's arrays too.
        if isinstance(value, (np.ndarray, np.generic)):
            return isinstance(np.asarray(value), hint.dtype[np.ndarray, hint.dim_str])
        return isinstance(value, hint)
    if isinstance(value, tuple) and type(value).__module__.startswith("loopfeed."):
        return all(map(fits, value, type(value).__annotations__.values()))
    if origin is tuple and Ellipsis not in parts:
        return isinstance(value, tuple) and len(parts) == len(value) and all(map(fits, value, parts))
    if isinstance(value, (tuple, list)) and parts:
        return all(fits(part, parts[0]) for part in value)
    if isinstance(value, Mapping) and len(parts) == 2:
        return all(fits(part, parts[1]) for part in value.values())
    if isinstance(value, (jax.Array, np.ndarray)) and isinstance(hint, type) and hint is not Any:
        return hint is jax.Array or isinstance(value, hint)
    return True


def states_shape(hint: Any) -> bool:
    hint = getattr(hint, "__value__", hint)
    return any(isinstance(each, type) and issubclass(each, AbstractArray) for each in (hint, *get_args(hint)))


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a check of its arguments and its result."""
    signature = inspect.signature(function)
    name = f"{function.__module__.removeprefix('loopfeed.')}.{function.__qualname__}"
    hints = {key: each.annotation for key, each in signature.parameters.items()}
    hints["return"] = signature.return_annotation
    if any(map(states_shape, hints.values())):
        stated.add(name)

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        reached.add(name)
        result = function(*args, **kwargs)
        for key, value in [*signature.bind(*args, **kwargs).arguments.items(), ("return", result)]:
            if not fits(value, hints[key]):
                raise TypeError(f"{name}: {key} is not {hints[key]}")
        return result

    return checked


class TracedError(Exception):
    """Ends a run whose program is traced."""


def trace_run(own: Mapping[str, Any], **settings: Any) -> None:
    """Trace the program of a run with these parts and settings."""
    from loopfeed import TrainConfig, balanced_accuracy, confusion_matrix, expected_calibration_error, top_k, train
    from loopfeed.models.families.pooled_convnet import PooledConvNet

    def stop(*_: Any, **__: Any) -> None:
        raise TracedError

    metrics = {
        "top2": top_k(2),
        "confusion": confusion_matrix(3),
        "balanced": balanced_accuracy(3),
        "calibration": expected_calibration_error(),
    }
    images = np.zeros((6, 8, 8), np.uint32), np.arange(6) % 3
    jax.stages.Lowered.compile = stop  # type: ignore[method-assign, assignment]
    parts = {
        "batches": lambda step: tuple(each[:4] for each in images),
        "evaluation": images,
        "metrics": metrics,
        **own,
    }
    try:
        config = TrainConfig(steps=2, batch=4, num_classes=3, image_size=8, kernels="xla", **settings)
        train(config, model=model_of(PooledConvNet(stem=4, stages=(8,))), **parts)
    except TracedError:
        return
    raise AssertionError("the run did not compile anything")


def model_of(net: Any) -> Any:
    from loopfeed import Model
    from loopfeed.models.registry import family_of

    family = family_of(net)

    def apply(params: Any, batch_stats: Any, images: Any, train: bool, key: Any = None) -> Any:
        return family.apply(net, params, batch_stats, images, train=train, dtype=jnp.float32)

    return Model("network", partial(family.init, net, 3), apply)


def trace_networks() -> None:
    """Trace the gradients of a network of each family, with the kernels that this processor can use."""
    from loopfeed.models.families.convnext import ConvNeXt
    from loopfeed.models.families.efficientnet import EfficientNet, Row
    from loopfeed.models.families.resnet import ResNet
    from loopfeed.models.families.vision_transformer import VisionTransformer

    mobile = EfficientNet(stem=8, stages=((Row(1, 3, 1, 2, 8, True),),), activation="silu")
    for net in (
        ResNet(stages=(1, 1), width=4, block="bottleneck", stem="deep", stride_on="conv2", pooled_shortcut=True),
        VisionTransformer(width=8, depth=1, num_heads=2, patch=8, image_size=32),
        ConvNeXt(depths=(1, 1), widths=(8, 16)),
        mobile,
        replace(mobile, activation="hard_silu", squeezed="hidden", late_features=8),
    ):
        model = model_of(net)

        def loss(params: Any, stats: Any, model: Any = model) -> Any:
            return model.apply(params, stats, jnp.zeros((2, 32, 32, 3)), train=True)[0].sum()

        jax.eval_shape(lambda key, model=model, loss=loss: jax.grad(loss)(*model.init(key)), jax.random.key(0))


def trace_functions() -> None:
    """Trace what neither those runs nor those networks call."""
    from loopfeed import convolution, mean_average_precision
    from loopfeed.engine.config import OptimizerName
    from loopfeed.engine.feed.label_form import LabelForm
    from loopfeed.engine.images import unpack
    from loopfeed.engine.images.augment import augment_images
    from loopfeed.engine.images.positions import positions
    from loopfeed.engine.images.settings import Augmentation
    from loopfeed.engine.objective.losses import LOSSES
    from loopfeed.engine.objective.objective import CROSS_ENTROPY
    from loopfeed.engine.objective.tally import empty_predictions, empty_tally, tally_outputs
    from loopfeed.engine.program.histograms import compute_histograms
    from loopfeed.engine.updates.optim import Hyperparams, init_optimizer, make_optimizer
    from loopfeed.models.layers.activations import relu6
    from loopfeed.preprocess.extents import Whole

    def sums(x: jax.Array, kernel: jax.Array, stride: int, groups: int) -> Any:
        return convolution(x, kernel, stride=stride, groups=groups).sum()

    for channels, stride, groups in ((8, 1, 1), (8, 2, 1), (4, 1, 2), (1, 2, 8)):
        call = partial(sums, stride=stride, groups=groups)
        jax.eval_shape(jax.grad(call, (0, 1)), jnp.zeros((32, 16, 16, 8)), jnp.zeros((3, 3, channels, 8)))
    jax.eval_shape(relu6, jnp.zeros(3))
    jax.eval_shape(compute_histograms, [jnp.zeros(3), jnp.zeros((300, 300))])
    metric, logits, weights = mean_average_precision(3), jnp.zeros((2, 3)), jnp.ones(2)
    for loss in LOSSES.values():
        jax.eval_shape(loss, logits, logits, weights)
    jax.eval_shape(lambda *rows: metric.finish(metric.update(metric.init(), *rows)), logits, logits > 0, weights)
    form = LabelForm.of_targets(3, are_bits=True)
    jax.eval_shape(form.unpack, jnp.zeros((2, form.num_words), jnp.int32))
    tally = empty_tally(3, predictions=empty_predictions(4, 2))
    jax.eval_shape(partial(tally_outputs, CROSS_ENTROPY), tally, logits, jnp.zeros(2, jnp.int32))
    jax.eval_shape(unpack.pack_dense, jnp.zeros((2, 8, 6), jnp.uint32))
    jax.eval_shape(unpack.to_levels, jnp.zeros((2, 8, 8, 3)), unpack.PixelScale(jnp.zeros(3), jnp.ones(3)))
    scale = unpack.PixelScale(jnp.zeros(3), jnp.ones(3))
    words, pixels, extents = jnp.zeros(2, jnp.uint32), jnp.zeros((2, 8, 12), jnp.uint32), jnp.zeros(2, jnp.int32)
    for crop in ("random", "resized"):
        whole = Augmentation(crop=crop, whole=Whole(7, 8))
        jax.eval_shape(partial(augment_images, whole), pixels, positions(jnp.int32(0), 2, 0, 2), words, scale, extents)
    params = {"kernel": jnp.zeros((3, 4))}
    for name in get_args(OptimizerName):
        optimizer = make_optimizer(name, Hyperparams(*jnp.zeros(3)))
        jax.eval_shape(optimizer.update, params, init_optimizer(name, params), params)


def trace_weighted_loss() -> None:
    """Trace the loss with weights of the classes, which only packed data have."""
    from loopfeed.engine.objective.objective import CROSS_ENTROPY

    logits, labels = jnp.zeros((2, 3)), jnp.zeros(2, jnp.int32)
    weighted = partial(CROSS_ENTROPY.training_loss, mix_weight=None, smoothing=jnp.zeros(()), class_weights=jnp.ones(3))
    jax.eval_shape(weighted, logits, labels)


def main() -> None:
    with install_import_hook(ROOMS, "stated_shapes.check"):
        from loopfeed.engine.objective.losses import cross_entropy_loss

        colours = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1, "auto_augment": "randaugment"}
        images = {"crop": "resized", "flip": 0.5, "mixup": 0.2, "cutmix": 1.0, "erasing": 0.25, "eval_mirror": True}
        updates = {"accumulate_steps": 2, "ema_decay": 0.99, "optimizer": "adamw", "schedule": "one-cycle"}
        updates |= {"stop_patience": 3, "eval_every_steps": 1}
        trace_run({}, devices="cpu:2", **colours, **images, **updates, cycle_momentum=True, clip_norm=1.0)
        own = {"loss": cross_entropy_loss, "augment": lambda images, keys: images, "optimizer": optax.sgd}
        trace_run(
            own, devices="1", crop="random", crop_padding=1, mixup=0.2, clip_norm=1.0, clip_order="3", clip_value=1.0
        )
        trace_weighted_loss()
        trace_networks()
        trace_functions()
    missed = {name for name in stated - reached if not name.startswith(BY_PROCESSOR)}
    assert not missed, f"nothing here reaches {', '.join(sorted(missed))}"


if __name__ == "__main__":
    sys.modules["stated_shapes"] = sys.modules["__main__"]
    main()
