"""The convolutions of a traced program: their shapes, their products, and the form that each takes on the platform.

Read from the jaxpr, so nothing has to be compiled. A convolution of `loopfeed.models.layers` is a choice between
platforms, in which one branch is `lax`'s own convolution: that one says what is computed, and the platform's branch
how.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import jax

import loopfeed.models.layers
from loopfeed.engine.hlo.program import Source
from loopfeed.engine.scopes import FORWARD, TRAIN, Scope, parse_op_name
from loopfeed.models.kernels import XLA
from loopfeed.models.layers.chosen_forms import ChosenForm, chosen_forms
from loopfeed.models.layers.convolution_forms import Geometry

_OURS = PurePath(str(loopfeed.models.layers.__file__)).parent
_JAX = PurePath(jax.__file__).parent
_CONVOLUTION = _OURS / "convolution.py"
_PRODUCTS = (jax.lax.dot_general_p, jax.lax.conv_general_dilated_p)
# What `jax.lax.conv_general_dilated` is when it is called outside of loopfeed.models.layers.
_LAX_FORM = "XLA's own (lax)"


@dataclass(frozen=True)
class Convolution:
    """A convolution of the forward pass.

    Attributes:
        scope: where it stands in the model, such as "layer1/0/conv1".
        source: the line that calls it, None if unknown.
        x_shape, y_shape: the shapes of input and output, as `[B,H,W,C]` whatever their order in the program.
        kernel_shape: the shape of the kernel, as `[kh,kw,C/groups,K]`.
        dtype: the dtype of its operands.
        strides: the steps of the window.
        padding: zeros before and after, by axis.
        groups: groups of channels.
        products: multiply-accumulates for the whole batch, those with padding included, as papers count them.
        forms: the form of each part on the platform, and why; empty for `lax`'s own.
        times: how often a forward pass makes it: more than once inside `lax.scan`.
    """

    scope: str
    source: Source | None
    x_shape: tuple[int, ...]
    kernel_shape: tuple[int, ...]
    y_shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    groups: int
    products: int
    forms: tuple[ChosenForm, ...]
    times: int = 1

    @property
    def is_lax(self) -> bool:
        """Whether it is `jax.lax.conv_general_dilated`, called by the model itself."""
        return not self.forms

    @property
    def form(self) -> str:
        """The form of its forward pass."""
        return self.forms[0].form if self.forms else _LAX_FORM


@dataclass(frozen=True)
class TracedWork:
    """The products of a traced program.

    Attributes:
        convolutions: the convolutions of the forward pass of training, in order.
        forward_products: multiply-accumulates of all products of the forward pass of a training batch on one device,
            convolutions included.
    """

    convolutions: tuple[Convolution, ...]
    forward_products: int

    @property
    def convolution_products(self) -> int:
        """The multiply-accumulates of the convolutions among them."""
        return sum(each.times * each.products for each in self.convolutions)

    @property
    def num_convolutions(self) -> int:
        """The number of convolutions of a forward pass."""
        return sum(each.times for each in self.convolutions)


def trace_work(jaxpr: Any, platform: str, kernels: str = XLA) -> TracedWork:
    """Return the products of a traced training program.

    Args:
        jaxpr: the program.
        platform: the platform for which it is compiled: "cpu", "cuda", …
        kernels: the kernels with which it was traced, as `loopfeed.models.kernels.using_kernels` takes them.
    """
    found: list[Convolution] = []
    products = 0
    for equation, names, times in _equations(jaxpr):
        is_own = _is_own_convolution(equation)
        if not is_own and equation.primitive not in _PRODUCTS:
            continue
        # The primitive that ends an operation's name is not among the scopes.
        scope = parse_op_name(f"{names}/{equation.primitive.name}")
        if (scope.phase, scope.action) != (TRAIN, FORWARD):
            continue
        if equation.primitive is jax.lax.dot_general_p:
            products += times * _dot_products(equation)
            continue
        one = _own_convolution(equation, scope, platform, kernels) if is_own else _lax_convolution(equation, scope)
        found.append(replace(one, times=times))
        products += times * one.products
    return TracedWork(tuple(found), products)


def trace_order(jaxpr: Any) -> tuple[Scope, ...]:
    """Return the scopes of a traced program in the order in which they first occur, outer ones too."""
    names = dict.fromkeys(names for _, names, _ in _equations(jaxpr))
    return tuple(dict.fromkeys(parse_op_name(f"{name}/x") for name in names))


def _equations(jaxpr: Any, outer: str = "", times: int = 1) -> Iterator[tuple[Any, str, int]]:
    """Yield the equations of a program, those inside a convolution of models.layers left out.

    Each comes with its scopes and with how often it runs, which is more than once inside `lax.scan`.
    """
    for equation in jaxpr.eqns:
        names = f"{outer}/{equation.source_info.name_stack}"
        yield equation, names, times
        if not _is_own_convolution(equation):
            turns = times * equation.params.get("length", 1) if equation.primitive.name == "scan" else times
            for inner in _inner_jaxprs(equation):
                yield from _equations(inner, names, turns)


def _inner_jaxprs(equation: Any) -> Iterator[Any]:
    if "branches_platforms" in equation.params:
        # Each branch computes the same: the last one is that of the platforms without a form of their own.
        yield equation.params["branches"][-1]
        return
    for each in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
        if _is_jaxpr(each):
            yield each


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns")


def _is_own_convolution(equation: Any) -> bool:
    """Return whether an equation is the choice between platforms that `loopfeed.models.layers.convolution` makes."""
    if "branches_platforms" not in equation.params:
        return False
    return any(PurePath(frame.file_name) == _CONVOLUTION for frame in _frames(equation))


def _own_convolution(equation: Any, scope: Scope, platform: str, kernels: str) -> Convolution:
    branch = equation.params["branches"][-1]
    (conv,) = (each for each, _, _ in _equations(branch) if each.primitive is jax.lax.conv_general_dilated_p)
    what = _lax_convolution(conv, scope)
    (top, bottom), (left, right) = what.padding
    geometry = Geometry((what.strides[0], what.strides[1]), ((top, bottom), (left, right)))
    forms = chosen_forms(what.x_shape, what.kernel_shape, geometry, what.dtype, platform, kernels)
    return replace(what, source=_source_of(equation), forms=forms)


def _lax_convolution(equation: Any, scope: Scope) -> Convolution:
    params = equation.params
    (x, kernel), (y,) = ([each.aval for each in ends] for ends in (equation.invars, equation.outvars))
    axes = params["dimension_numbers"]
    # jax names the axes of the kernel as those of the output and the input channels, then the others.
    out_axis, in_axis, *others = axes.rhs_spec
    kernel_shape = tuple(kernel.shape[axis] for axis in (*others, in_axis, out_axis))
    return Convolution(
        scope=scope.path,
        source=_source_of(equation),
        x_shape=_channels_last(x.shape, axes.lhs_spec),
        kernel_shape=kernel_shape,
        y_shape=_channels_last(y.shape, axes.out_spec),
        dtype=str(x.dtype),
        strides=tuple(params["window_strides"]),
        padding=tuple(params["padding"]),
        groups=params["feature_group_count"],
        products=math.prod(y.shape) * math.prod(kernel_shape[:-1]),
        forms=(),
    )


def _channels_last(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    batch, channels, *others = axes
    return tuple(shape[axis] for axis in (batch, *others, channels))


def _dot_products(equation: Any) -> int:
    ((left_axes, _), _) = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in left_axes)


def _source_of(equation: Any) -> Source | None:
    """Return the line, outside of jax and of loopfeed.models.layers, that an equation comes from."""
    for frame in _frames(equation):
        path = PurePath(frame.file_name)
        if path.parent != _OURS and not path.is_relative_to(_JAX):
            return Source(frame.file_name, frame.function_name, frame.line_num)
    return None


def _frames(equation: Any) -> list[Any]:
    traceback = equation.source_info.traceback
    return [] if traceback is None else list(traceback.frames)
