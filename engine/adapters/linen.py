"""The adapter of Flax Linen."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from loopfeed.engine.adapters.library import batch_key, cast_floats, cast_like, check_precision, load, mode_arguments
from loopfeed.models.layers.lax_convolution import conv_general_dilated
from loopfeed.models.model import Model

_IMAGE_AXES = 3
_STATS = "batch_stats"


def flax_linen(module: Any, image_shape: Sequence[int], *, precision: str = "float32") -> Model:
    """Adapt a Flax Linen module.

    Its call takes images `[B, H, W, 3]` and returns logits `[B, K]`. Whether it is in training is passed to the
    argument `train`, `training`, `is_training`, `deterministic`, `use_running_average` or `inference`, if the call has
    one. Every collection other than `params` is carried as running statistics, except `intermediates`. The layers
    `nn.Conv` use the loop-safe convolution, unless they were given another.

    Args:
        module: the module.
        image_shape: (H, W, 3) of the images, to draw the parameters.
        precision: "float32", or "bfloat16" to compute with images and parameters cast to it. Parameters, running
            statistics and logits are float32.

    Returns:
        The model, named after the module's class. Its `apply` takes PRNG keys as `key`, one or [B]; dropout
        and other draws use the first.

    Raises:
        ValueError: if `module` is not a Linen module, or cannot take images of this shape.
        ModuleNotFoundError: if Flax is not installed.
    """
    linen, dtype = load("flax.linen"), check_precision(precision)
    if not isinstance(module, linen.Module):
        found = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
        raise ValueError(
            f"flax_linen needs a flax.linen.Module, got {found}: give an instance of one, or use flax_nnx "
            "for a module of flax.nnx"
        )
    if len(image_shape) != _IMAGE_AXES:
        raise ValueError(f"image_shape must be (height, width, 3), got {tuple(image_shape)}")
    collections = _Collections(module, linen, (1, *image_shape))

    def init(key: jax.Array) -> tuple[Any, Any]:
        return collections.split(collections.draw(key))

    def apply(
        params: Any, batch_stats: Any, images: jax.Array, train: bool, key: jax.Array | None = None
    ) -> tuple[Any, Any]:
        variables = collections.join(cast_floats(params, dtype), batch_stats)
        names = collections.names if train else []
        with linen.intercept_methods(_loop_safe(linen)):
            outputs, new = _call(module, variables, images.astype(dtype), names, train, batch_key(key))
        new_stats = collections.split(variables | new)[1] if names else batch_stats
        return cast_floats(outputs, jnp.float32), cast_like(new_stats, batch_stats)

    return Model(type(module).__name__, init, apply)


class _Collections:
    """The collections of a module's variables, and how they become parameters and running statistics.

    Args:
        module: the module.
        linen: the module `flax.linen`.
        images_shape: the shape of the images to draw the variables with.

    Attributes:
        names: the collections that are carried as running statistics.
    """

    def __init__(self, module: Any, linen: Any, images_shape: tuple[int, ...]) -> None:
        self._module, self._linen, self._images_shape = module, linen, images_shape
        try:
            drawn = jax.eval_shape(self.draw, jax.random.key(0))
        except Exception as error:
            raise ValueError(
                f"{type(module).__name__} cannot take images of the shape {list(images_shape)}: {error}"
            ) from error
        self.names = sorted(drawn.keys() - {"params"})

    def draw(self, key: jax.Array) -> dict[str, Any]:
        params_key, dropout_key = jax.random.split(key)
        rngs = {"params": params_key, "dropout": dropout_key}
        mode = mode_arguments(type(self._module).__call__, train=False)
        variables = self._module.init(rngs, jnp.zeros(self._images_shape), **mode)
        return self._linen.unbox({name: each for name, each in variables.items() if name != "intermediates"})

    def split(self, variables: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return (params, batch_stats); with one collection of statistics, as is usual, its name is left out."""
        stats = {name: variables[name] for name in self.names}
        return variables.get("params", {}), stats[_STATS] if self.names == [_STATS] else stats

    def join(self, params: Any, batch_stats: Any) -> dict[str, Any]:
        """Return the variables; the inverse of `split`."""
        return {"params": params} | ({_STATS: batch_stats} if self.names == [_STATS] else dict(batch_stats))


def _call(
    module: Any, variables: Any, images: jax.Array, mutable: list[str], train: bool, key: jax.Array | None
) -> tuple[Any, dict[str, Any]]:
    """Apply the module; return its outputs and the collections that it changed."""
    # A stream that is not given, whatever its name, is drawn from "params".
    rngs = None if key is None else dict(zip(("params", "dropout"), jax.random.split(key), strict=True))
    mode = mode_arguments(type(module).__call__, train)
    try:
        given = module.apply(variables, images, mutable=mutable or False, rngs=rngs, **mode)
    except load("flax.errors").InvalidRngError as error:
        raise ValueError(
            f"{type(module).__name__} draws random numbers in {'training' if train else 'evaluation'}, such as those "
            f"of dropout, but got no key: pass key=… to apply, or leave the layer out ({error})"
        ) from None
    return given if mutable else (given, {})


def _loop_safe(linen: Any) -> Callable[..., Any]:
    """Return an interceptor that makes `nn.Conv` use the loop-safe convolution."""

    def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        layer = context.module
        if isinstance(layer, linen.Conv) and layer.conv_general_dilated is layer.conv_general_dilated_cls is None:
            # A bound module is a copy that lives as long as this call; its class forbids only ordinary assignment.
            object.__setattr__(layer, "conv_general_dilated", conv_general_dilated)
        return call(*args, **kwargs)

    return intercept
