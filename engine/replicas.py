"""The devices that run one program together: each computes on its own rows of every batch, on a replica of the state.

Owns the name of the mesh axis and every reduction over it. With one device each function returns its argument, so that
the program is the one without replicas. Does not depend on what is reduced.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int32

from loopfeed.engine.keys import like_leaf, plain_key
from loopfeed.engine.settings import SettingError
from loopfeed.models.layers.batch_norm import NormGroups
from loopfeed.models.layers.platform_forms import materialize

AXIS = "data"
_EVERYWHERE = PartitionSpec()


@dataclass(frozen=True)
class Replicas:
    """The number of devices, and what the program computes over all of them; called while tracing.

    Attributes:
        count: number of devices, n.
    """

    count: int = 1

    def this_device(self) -> Int32[Array, ""]:
        """Return the number of this device, from 0."""
        return jnp.zeros((), jnp.int32) if self.count == 1 else lax.axis_index(AXIS)

    def mean[T](self, tree: T) -> T:
        """Return the mean of each leaf over the devices, in the dtype of the leaf; integers must be equal."""
        if self.count == 1:
            return tree
        leaves, structure = jax.tree.flatten(tree)
        is_float = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]
        # One call, so that one collective carries all leaves. Stored, because XLA divides it on cards where one reader
        # takes several leaves, as the check of the new weights does.
        numbers = [leaf for leaf, floats in zip(leaves, is_float, strict=True) if floats]
        means = iter(materialize(lax.pmean(numbers, AXIS), on_cards=True))
        reduced = [next(means) if floats else leaf for leaf, floats in zip(leaves, is_float, strict=True)]
        mean: T = jax.tree.unflatten(structure, reduced)
        return mean

    def mean_if[T](self, due: Bool[Array, ""], tree: T) -> T:
        """Return the mean over the devices if `due` (equal on all devices), else each device's own values."""
        if self.count == 1:
            return tree
        reduced: T = lax.cond(due, self.mean, lambda own: own, tree)
        return reduced

    def largest(self, numbers: jax.Array) -> jax.Array:
        """Return the largest of the devices' numbers, elementwise."""
        return numbers if self.count == 1 else lax.pmax(numbers, AXIS)

    def merge[T](self, merge: Callable[[T, T], T], tree: T) -> T:
        """Return the devices' values merged by an associative function, in the order of the devices."""
        if self.count == 1:
            return tree
        parts = lax.all_gather(tree, AXIS)
        merged: T = jax.tree.map(lambda leaf: leaf[0], parts)
        for number in range(1, self.count):
            merged = merge(merged, jax.tree.map(lambda leaf, number=number: leaf[number], parts))
        return merged

    def merge_if[T](self, due: Bool[Array, ""], merge: Callable[[T, T], T], tree: T) -> T:
        """Return the devices' values merged if `due` (equal on all devices), else each device's own."""
        if self.count == 1 or not jax.tree.leaves(tree):
            return tree
        merged: T = lax.cond(due, partial(self.merge, merge), lambda own: own, tree)
        return merged

    def join_rows[T](self, tree: T) -> T:
        """Return each leaf [b, …] joined over the devices to [n · b, …], in the order of the devices."""
        if self.count == 1:
            return tree
        joined: T = lax.all_gather(tree, AXIS, tiled=True)
        return joined

    def on_first[T](self, action: Callable[[T], T], carried: T, when: Bool[Array, ""] | None = None) -> T:
        """Return what `action`, such as a call to the host, makes of `carried` on the first device.

        The other devices return `carried` unchanged, and so does the first unless `when` holds; None stands for always.
        """
        is_first = None if self.count == 1 else self.this_device() == 0
        flags = [flag for flag in (when, is_first) if flag is not None]
        if not flags:
            return action(carried)
        done: T = lax.cond(
            flags[0] if len(flags) == 1 else flags[0] & flags[1], action, lambda unchanged: unchanged, carried
        )
        return done


ALONE = Replicas()
"""One device."""


def replicate(function: Callable[..., Any], devices: Sequence[jax.Device]) -> Callable[..., Any]:
    """Return a function that runs on all devices at once: arguments and results are equal on all of them.

    Args:
        function: a function of pytrees of arrays, in which `Replicas` reduces.
        devices: the devices; with one of them, the function is returned as it is.
    """
    if len(devices) == 1:
        return function
    # Fully manual, because calls to the host have no sharding; their results have no varying-axis type either.
    return jax.shard_map(function, mesh=_mesh(devices), in_specs=_EVERYWHERE, out_specs=_EVERYWHERE, check_vma=False)


def device_put_replicated[T](tree: T, devices: Sequence[jax.Device]) -> T:
    """Return a pytree of arrays with a copy on each device, as `replicate`'s arguments must be.

    Args:
        tree: arrays on one device, equal in all processes.
        devices: all devices, those of other processes included.
    """
    if len(devices) == 1:
        return tree
    sharding = NamedSharding(_mesh(devices), _EVERYWHERE)

    def place(leaf: jax.Array) -> jax.Array:
        plain = plain_key(leaf)
        # `device_put` would compare the values of all processes.
        placed = jax.make_array_from_callback(plain.shape, sharding, lambda _: np.asarray(plain))
        placed_leaf: jax.Array = like_leaf(placed, leaf)
        return placed_leaf

    copies: T = jax.tree.map(place, tree)
    return copies


def shapes_on(tree: Any, devices: Sequence[jax.Device]) -> Any:
    """Return the shapes of a pytree's leaves as arguments of a program compiled for devices that are not here.

    Args:
        tree: arrays or jax.ShapeDtypeStruct.
        devices: all devices of the program, a copy of the tree on each.
    """
    one = jax.sharding.SingleDeviceSharding(devices[0])
    place: Any = one if len(devices) == 1 else NamedSharding(_mesh(devices), _EVERYWHERE)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree)


def unreplicate[T](tree: T, devices: Sequence[jax.Device]) -> T:
    """Return the results of a replicated function as arrays on one device of this process."""
    if len(devices) == 1:
        return tree

    def take(leaf: jax.Array) -> jax.Array:
        own: jax.Array = like_leaf(plain_key(leaf).addressable_data(0), leaf)
        return own

    copies: T = jax.tree.map(take, tree)
    return copies


def _mesh(devices: Sequence[jax.Device]) -> Mesh:
    return Mesh(list(devices), AXIS)


def norm_groups(images: int | None, batch: int, count: int) -> NormGroups:
    """Return the groups over which norms average.

    Args:
        images: images per group; None makes the images of each device a group.
        batch: images of a batch over all devices.
        count: number of devices.

    Raises:
        SettingError: if a group is neither a whole part of a device's images nor the images of several whole devices.
    """
    own = batch // count
    if images is None or images == own:
        return NormGroups()
    if images < own and own % images == 0:
        return NormGroups(images)
    size = images // own
    if images % own or count % size:
        several = [str(own * each) for each in range(2, count + 1) if count % each == 0]
        raise SettingError(
            "batch_norm_group",
            "{setting} must divide {own}, the images of each device{several}, got {images}: choose another, or another "
            "{batch}",
            own=own,
            several=f", or be {' or '.join(several)}, the images of several devices" if several else "",
            images=images,
        )
    groups = tuple(tuple(range(first, first + size)) for first in range(0, count, size))
    return NormGroups(None, AXIS, None if size == count else groups, size)
