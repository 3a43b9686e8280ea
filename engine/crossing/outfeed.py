"""The outfeed, through which the program sends losses, evaluation counts, snapshots and more of itself to the host.

Does not depend on terminals or files: it passes each record to a receiver, which must not block for long. If the
receiver fails, the outfeed keeps the exception and asks the control board to stop the run. Arrays of dtypes that NumPy
lacks, such as bfloat16, cross as one of its own, bit for bit or exactly widened.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from loopfeed.engine.control.board import ControlBoard
from loopfeed.engine.crossing.pushed import (
    Histogram,
    Pushed,
    PushedEvaluation,
    PushedHistograms,
    PushedImages,
    PushedLosses,
    PushedSnapshot,
    mean_of_images,
)
from loopfeed.engine.crossing.token import Token
from loopfeed.engine.crossing.transport import Array, Transport
from loopfeed.engine.images.mixing import WHOLE
from loopfeed.engine.keys import plain_keys
from loopfeed.engine.objective.tally import Tally, count_top5
from loopfeed.engine.spans import EVALUATION, LOOP, PUSH, SNAPSHOT, SNAPSHOT_PUSH, Spans

_BYTE_BITS = 8

type Restore = Callable[[NDArray[Any]], NDArray[Any]]
"""(the array that crossed) → an array of the dtype that it had; a view if that is possible."""


class Outfeed:
    """The channel that passes the program's output to a receiver on the host.

    Args:
        receive: called with each record, in the program's order, on a thread of XLA's runtime or of the transport.
        board: asked to stop the run if `receive` raises.
        transport: calls the host.
        step: number of updates before the launch.
        spans: of the launch; None makes new ones.
        on_push: called with each record, None if it failed, and when its push began and ended on the host, by
            `time.perf_counter`; must return at once.

    Attributes:
        failure: the first exception of a push on the host, such as of `receive`, or None.
        step: number of updates whose losses were pushed.
        num_bytes: bytes of what was pushed.
    """

    def __init__(
        self,
        receive: Callable[[Pushed], None],
        board: ControlBoard,
        transport: Transport,
        *,
        step: int = 0,
        spans: Spans | None = None,
        on_push: Callable[[Pushed | None, float, float], None] | None = None,
    ) -> None:
        self.step, self.num_bytes, self._on_push = step, 0, on_push
        self._receive, self._board, self._transport = receive, board, transport
        self._spans = Spans() if spans is None else spans
        self._on_host = self._spans[PUSH]
        self.failure: BaseException | None = None

    def push_losses(
        self, token: Token, step: jax.Array, num_updates: jax.Array, numbers: jax.Array, names: Sequence[str] = ()
    ) -> Token:
        """Emit the losses of the most recent updates; called while tracing.

        Args:
            token: the token of the crossing before; that of this one is returned.
            step: int32 [], number of updates done, including these.
            num_updates: int32 [], number of updates emitted, at most n.
            numbers: float32 [n, 2 + metrics], loss, learning rate and metrics of each.
            names: names of the metrics.
        """

        def read(counts: Array, numbers: Array) -> PushedLosses:
            step, num_updates = counts.tolist()
            losses, learning_rates, *values = numbers[:num_updates].T.tolist()
            metrics = dict(zip(names, values, strict=True))
            return PushedLosses(step - num_updates + 1, losses, learning_rates, time.time(), metrics)

        return self._push(read, token, jnp.stack([step, num_updates]), numbers)

    def push_evaluation(self, token: Token, step: jax.Array, tally: Tally, metrics: dict[str, jax.Array]) -> Token:
        """Emit the result of an evaluation; called while tracing.

        Args:
            token: the token of the crossing before; that of this one is returned.
            step: int32 [], number of updates done before the evaluation.
            tally: its final tally.
            metrics: the values of the metrics by name, arrays of any shape.
        """
        names, is_ranked = list(metrics), tally.top1 is not None
        ranked = [] if tally.top1 is None or tally.top5 is None else [tally.top1, tally.top5]

        def read(step: Array, num_images: Array, loss_sum: Array, *rest: Array) -> PushedEvaluation:
            top1, top5 = (int(rest[0]), count_top5(int(rest[1]))) if is_ranked else (None, None)
            values = rest[2:] if is_ranked else rest
            return PushedEvaluation(
                step=int(step),
                num_images=int(num_images),
                top1=top1,
                top5=top5,
                loss=mean_of_images(float(loss_sum), int(num_images)),
                time=time.time(),
                metrics={name: value.tolist() for name, value in zip(names, values, strict=True)},
            )

        return self._push(read, token, step, tally.num_images, tally.loss_sum, *ranked, *metrics.values())

    def push_snapshot(self, token: Token, step: jax.Array, batch_index: jax.Array, state: Any) -> Token:
        """Emit the state; called while tracing.

        Args:
            token: the token of the crossing before; that of this one is returned.
            step: int32 [], updates done.
            batch_index: int32 [], batches taken.
            state: any pytree.
        """
        leaves, structure = jax.tree.flatten(plain_keys(state))

        def read(step: Array, batch_index: Array, *leaves: Array) -> PushedSnapshot:
            # The operands are memory of the program, which its next step overwrites after this function returns.
            copies = [np.array(leaf) for leaf in leaves]
            return PushedSnapshot(int(step), int(batch_index), jax.tree.unflatten(structure, copies))

        return self._push(read, token, step, batch_index, *leaves)

    def push_histograms(
        self, token: Token, step: jax.Array, names: Sequence[str], histograms: tuple[jax.Array, ...]
    ) -> Token:
        """Emit the histograms of several arrays; called while tracing.

        Args:
            token: the token of the crossing before; that of this one is returned.
            step: int32 [], updates done.
            names: the name of each array, n of them.
            histograms: float32 [n, 65] edges, int32 [n, 64] counts, float32 [n] means and standard deviations, and
                int32 [n] numbers of elements that are NaN or infinite.
        """

        def read(step: Array, *parts: Array) -> PushedHistograms:
            edges, counts, means, stds, num_nonfinite = (np.array(part) for part in parts)
            numbers = means.tolist(), stds.tolist(), num_nonfinite.tolist()
            found = [Histogram(*each) for each in zip(edges, counts, *numbers, strict=True)]
            return PushedHistograms(int(step), time.time(), dict(zip(names, found, strict=True)))

        return self._push(read, token, step, *histograms)

    def push_images(
        self, token: Token, step: jax.Array, images: jax.Array, labels: jax.Array | None, mix_weights: jax.Array | None
    ) -> Token:
        """Emit some images of a batch; called while tracing.

        Args:
            token: the token of the crossing before; that of this one is returned.
            step: int32 [], updates done.
            images: uint8 [k, h, w, 3].
            labels: int32 [k], or None if they are not class numbers.
            mix_weights: int32 [k], the share of each image's own label in units of 2**-16; None if nothing is mixed.
        """
        has_labels = labels is not None

        def read(step: Array, images: Array, *rest: Array) -> PushedImages:
            found = [np.array(each) for each in rest]
            labels = found.pop(0) if has_labels else None
            shares = found[0].astype(np.float64) / WHOLE if found else None
            return PushedImages(int(step), time.time(), np.array(images), labels, shares)

        optional = (each for each in (labels, mix_weights) if each is not None)
        return self._push(read, token, step, images, *optional)

    def _push(self, read: Callable[..., Pushed], token: Token, *operands: jax.Array) -> Token:
        plain, restores = zip(*map(as_plain, operands), strict=True)
        if any(restores):
            read = partial(_read_restored, read, restores)
        return self._transport.emit(partial(self._accept, read), token, *plain)

    def _accept(self, read: Callable[..., Pushed], operands: Sequence[Array]) -> None:
        """Pass an emitted record to the receiver; runs on a thread of XLA's runtime or of the transport."""
        pushed = None
        try:
            self._on_host.begin()
            pushed = read(*operands)
            self._receive(pushed)
        except BaseException as error:  # noqa: BLE001 - raising through XLA would lose it: kept, and raised by the host
            self._keep(error)
        try:
            self._end(pushed, operands)
        except BaseException as error:  # noqa: BLE001 - as above
            self._keep(error)

    def _end(self, pushed: Pushed | None, operands: Sequence[Array]) -> None:
        """Note what a push ends: steps, an evaluation, or the copying of a snapshot, since the push before."""
        span = self._on_host
        before, began = span.ended_at, span.since
        took = span.end()
        if isinstance(pushed, PushedLosses):
            self.step = pushed.first_step + len(pushed.losses) - 1
            # A loss and a learning rate; counting the operands would double the price of a push.
            self.num_bytes += 8 * len(pushed.losses)
        else:
            self.num_bytes += sum(each.nbytes for each in operands)
            before = before or self._spans[LOOP].since
            since_s = took if began is None or before is None else began - before + took
            if isinstance(pushed, PushedEvaluation):
                self._spans[EVALUATION].add(since_s)
                self._spans[EVALUATION].since = None
            elif isinstance(pushed, PushedSnapshot):
                self._spans[SNAPSHOT].add(since_s)
                self._spans[SNAPSHOT_PUSH].add(took)
        if self._on_push is not None and began is not None:
            self._on_push(pushed, began, began + took)

    def _keep(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
        self._board.request_stop("the loss stream failed")


def _read_restored(read: Callable[..., Pushed], restores: Sequence[Restore | None], *operands: Array) -> Pushed:
    """Read operands of which some crossed as another dtype."""
    restored = (each if restore is None else restore(each) for each, restore in zip(operands, restores, strict=True))
    return read(*restored)


# DLPack hands NumPy only its own dtypes, so an array of another dtype crosses as one of those, bit for bit or exactly
# widened, and gets its dtype back on the host.
def as_plain(array: jax.Array) -> tuple[jax.Array, Restore | None]:
    """Return an array as one of NumPy's own dtypes, and what restores its dtype on the host; called while tracing.

    Args:
        array: of any shape and dtype.

    Returns:
        The array itself and None if its dtype is NumPy's own. The bits as unsigned integers of the same width if its
        elements fill bytes; otherwise, as of int4, the elements as the smallest dtype of NumPy that holds them all.

    Raises:
        TypeError: if it is an array of PRNG keys, which `loopfeed.engine.keys` converts.
    """
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise TypeError(f"what crosses to the host must be arrays of numbers, got {array.dtype}: convert it first")
    dtype = np.dtype(array.dtype)
    if dtype.isbuiltin == 1:
        return array, None
    if jax.dtypes.itemsize_bits(dtype) >= _BYTE_BITS:
        plain = lax.bitcast_convert_type(array, jnp.dtype(f"uint{_BYTE_BITS * dtype.itemsize}"))
        return plain, lambda crossed: crossed.view(dtype)
    return array.astype(wider_type(dtype)), lambda crossed: crossed.astype(dtype)


def wider_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of NumPy that holds every element of a dtype of at most eight bits: int8, uint8 or float32."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.dtype(np.float32)
    return np.dtype(np.uint8 if jnp.issubdtype(dtype, jnp.unsignedinteger) else np.int8)
