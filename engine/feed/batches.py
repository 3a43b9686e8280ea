"""Batch sources: their protocol, and implementations for random pixels, arrays in memory, and a user's function.

A batch source fills the buffers of one batch, addressed only by its index, so that a resumed run sees the same batches
as an uninterrupted one. Does not depend on rings, threads or devices.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from loopfeed.engine.given_values import describe_given
from loopfeed.preprocess.extents import Whole
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.read_meter import ReadMeter

if TYPE_CHECKING:
    from loopfeed.engine.feed.label_form import LabelForm

type Pixels = NDArray[np.uint32]
type Labels = NDArray[np.int32]
type BatchFunction = Callable[[int], tuple[Any, Any]] | Callable[[int, range], tuple[Any, Any]]
type EvaluationArrays = tuple[Any, Any]
type LabelKind = Literal["classes", "any", "numbers"]
"""Which labels a loss takes, as arrays with one entry for each of B images.

- "classes": class numbers, integers [B], or target distributions, non-negative floats [B, K].
- "any": any pytree of arrays; integers [B] are class numbers.
- "numbers": any pytree of arrays, never class numbers.
"""

PADDING_LABEL = -1
"""Label of a padding row in the last batch of an evaluation; padding rows are not counted."""


class HasSize(Protocol):
    """What has images of one size, in pixels; an attribute `whole` as in `BatchSource.fill`."""

    @property
    def height(self) -> int:
        """Of the images."""
        ...

    @property
    def width(self) -> int:
        """Of the images."""
        ...


class BatchSource(Protocol):
    """A source of batches for a feeder.

    Attributes:
        batch, height, width: the shape of every batch, B images of H × W pixels.
        thread_safe: whether several threads may call `fill` at once, for batches in any order.
    """

    batch: int
    height: int
    width: int
    thread_safe: bool

    def fill(self, batch_index: int, rows: range, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:
        """Write rows of batch `batch_index` (from 0) into uint32 [b, H, W] packed pixels and int32 [b] labels.

        The b rows are consecutive; all B, unless several processes train together, of which each reads its own.

        If the source has an attribute `row_words` that differs from its width, the pixels are in the dense layout,
        uint32 [b, H, row_words] (`loopfeed.preprocess.pixels`). If the source has an attribute `label_form`, a
        `LabelForm`, its labels are int32 [b, label_form.num_words], written by `label_form.pack`. If it has an
        attribute `whole`, a `loopfeed.preprocess.extents.Whole`, the word of each picture's place on its canvas
        (`loopfeed.preprocess.extents`) comes before its class number, or behind the weight. A wrapper of such a source
        must have these attributes too.
        """
        ...


def batch_of(source: BatchSource, batch_index: int) -> int:
    """Return the number of images of a batch: of a source whose batches differ, its `batch_of`, otherwise its `batch`.

    The `batch` of such a source is the largest.
    """
    found = getattr(source, "batch_of", None)
    return source.batch if found is None else int(found(batch_index))


def label_words(source: BatchSource) -> int | None:
    """Return the number of words for each image's labels and extent; None if they are class numbers, int32 [B]."""
    form = label_form_of(source)
    words = None if form is None else form.num_words
    return words if whole_of(source) is None else 1 + (words or 1)


def whole_of(source: object) -> Whole | None:
    """Return the geometry of a source's whole pictures, its `whole`; None for images that fill their pixels."""
    found = getattr(source, "whole", None)
    return found if isinstance(found, Whole) else None


def image_shape(source: HasSize) -> tuple[int, int]:
    """Return the (height, width) of what a network receives of a source's images without a setting `image_size`."""
    whole = whole_of(source)
    return (source.height, source.width) if whole is None else (whole.size, whole.size)


def largest_size(source: HasSize) -> int:
    """Return the largest `image_size` for a source: the shorter side of its images, before a central crop."""
    whole = whole_of(source)
    return min(source.height, source.width) if whole is None else whole.resize


def label_form_of(source: object) -> "LabelForm | None":
    """Return the form of a source's labels: its `label_form`, None if they are class numbers."""
    return getattr(source, "label_form", None)


def row_words(source: BatchSource) -> int:
    """Return the number of words per row of pixels: the source's `row_words` if it has one, otherwise its width."""
    return int(getattr(source, "row_words", source.width))


def held_bytes(source: BatchSource) -> int:
    """Return the bytes of host memory in which a source keeps images: its `held_bytes` if it has any, otherwise 0."""
    return int(getattr(source, "held_bytes", 0))


def read_meter_of(source: BatchSource) -> ReadMeter:
    """Return what meters the threads that read a source: its `read_meter` if it has one, otherwise a new one."""
    found = getattr(source, "read_meter", None)
    return found if isinstance(found, ReadMeter) else ReadMeter()


class Lent(Protocol):
    """Images in the source's own memory, lent without being copied."""

    @property
    def images(self) -> Sequence[NDArray[np.uint32]]:
        """The B images, uint32 [H, words per row] each, valid until the step is done."""
        ...

    def check(self) -> None:
        """Raise the source's error if the images became invalid while they were being copied; called after the copy."""
        ...


@runtime_checkable
class LendingSource(Protocol):
    """A `BatchSource` that can lend images already in memory, so that they are copied only once."""

    def lend(self, batch_index: int, rows: range, labels: Labels, *, timeout_s: float) -> Lent | None:
        """Write the labels of rows of a batch and return their images; None if they must be read with `fill`.

        If the result is None, the labels are undefined.
        """
        ...


@runtime_checkable
class CheckedSource(Protocol):
    """A `BatchSource` that can detect afterwards whether its files were changed while it read them."""

    def check_unchanged(self) -> None:
        """Raise an error if changes to the files may have altered any batch; called after the last batch."""
        ...


def error_of_changes(*sources: BatchSource | None) -> Exception | None:
    """Return the error of the first of these sources whose files changed, None if none did."""
    for source in sources:
        if isinstance(source, CheckedSource):
            try:
                source.check_unchanged()
            except Exception as error:  # noqa: BLE001 - a user-defined source may raise anything
                return error
    return None


class EvaluationSource(BatchSource, Protocol):
    """A source that returns each image of a split once in every `num_batches` consecutive batches.

    Batch b of evaluation e has the index e · num_batches + b; padding rows of the last batch have the label
    PADDING_LABEL.
    """

    num_batches: int


class ArrayBatches:
    """An evaluation set held in memory as arrays of images and labels, read in order and repeated endlessly.

    Args:
        pixels: uint32 [N, H, W], packed.
        labels: integers [N], or what `kind` allows.
        batch: images per batch.
        num_classes: K; labels must lie in 0 … K - 1. None accepts every nonnegative int32.
        kind: which labels are allowed.

    Attributes:
        label_form: the form of the labels, None for class numbers.

    Raises:
        ValueError: if the arrays do not have these shapes, dtypes and labels.
    """

    thread_safe = True

    def __init__(
        self, pixels: Any, labels: Any, *, batch: int, num_classes: int | None = None, kind: LabelKind = "classes"
    ) -> None:
        self._pixels, self._labels = _checked(
            pixels, labels, num_classes=num_classes, kind=kind, origin="the evaluation set"
        )
        self.label_form = _form_of(self._labels, len(self._pixels), "the evaluation set", kind=kind)
        num_images, self.height, self.width = self._pixels.shape
        self.batch = batch
        self.num_batches = -(-num_images // batch)

    def fill(self, batch_index: int, rows: range, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:  # noqa: ARG002
        """Copy images and labels of the batch; padding rows are black and have PADDING_LABEL or the weight 0."""
        start = batch_index % self.num_batches * self.batch + rows.start
        count = max(0, min(len(rows), len(self._pixels) - start))
        found = slice(start, start + count)
        pixels[:count], pixels[count:] = self._pixels[found], 0
        if self.label_form is None:
            labels[:count], labels[count:] = self._labels[found], PADDING_LABEL
        else:
            part = self.label_form.take(self._labels, found)
            self.label_form.pack(part, np.ones(count, np.float32), labels[:count], "the evaluation set")
            labels[count:] = 0


class FunctionBatches:
    """Batches from a user's function: batch index (from 0) → (uint32 [B, H, W] pixels, labels).

    The function is called once for each batch, in order, from one thread. The constructor calls it for batch
    `first_batch`, because the shape of a batch is part of the program, and keeps the result until `fill`.

    Args:
        function: the user's function.
        first_batch: index of the run's first batch.
        num_classes: K; class numbers must lie in 0 … K - 1. None accepts every nonnegative int32.
        kind: which labels are allowed.
        rows: the rows that the function is asked for as its second argument, those of this process; None if it has no
            such parameter and returns whole batches.
        batch: B, if the function is asked for rows.

    Attributes:
        label_form: the form of the labels, None for class numbers.

    Raises:
        ValueError: if a batch does not have the stated form; exceptions of the function pass through.
    """

    thread_safe = False

    def __init__(
        self,
        function: BatchFunction,
        *,
        first_batch: int = 0,
        num_classes: int | None = None,
        kind: LabelKind = "classes",
        rows: range | None = None,
        batch: int | None = None,
    ) -> None:
        self._function, self._num_classes, self._kind, self._rows = function, num_classes, kind, rows
        pixels, labels = self._call(first_batch)
        if rows is not None and len(pixels) != len(rows):
            raise ValueError(
                f"a batch source that takes rows must return those that it is asked for, {len(rows)}, got {len(pixels)}"
            )
        self._first: tuple[int, Pixels, Any] | None = (first_batch, pixels, labels)
        self.label_form = _form_of(labels, len(pixels), _origin(first_batch), kind=kind)
        self._shape = pixels.shape
        self.batch, self.height, self.width = batch or len(pixels), *pixels.shape[1:]

    def fill(self, batch_index: int, rows: range, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:  # noqa: ARG002
        """Copy the rows of the batch that the function returns; the feeder limits the time it may take."""
        first, self._first = self._first, None
        given_pixels, given_labels = first[1:] if first and first[0] == batch_index else self._call(batch_index)
        if given_pixels.shape != self._shape:
            raise ValueError(
                f"every batch must have the shape of the first, {self._shape}, but "
                f"the batch source returned {given_pixels.shape} for batch {batch_index}"
            )
        found = slice(None) if self._rows is not None else slice(rows.start, rows.stop)
        pixels[...] = given_pixels[found]
        count = len(given_pixels)
        if self.label_form is None:
            if np.shape(given_labels) != (count,):
                raise ValueError(
                    f"labels must be integers [{count}], as in the first batch, but {_origin(batch_index)} "
                    f"has {np.asarray(given_labels).dtype} {list(np.shape(given_labels))}"
                )
            labels[...] = given_labels[found]
        else:
            packed = labels if len(labels) == count else np.zeros((count, *labels.shape[1:]), labels.dtype)
            self.label_form.pack(given_labels, np.ones(count, np.float32), packed, _origin(batch_index))
            if packed is not labels:
                labels[...] = packed[found]

    def limit_labels(self, num_classes: int) -> None:
        """Set K, the number of classes; raise ValueError if the first batch has a label outside 0 … K - 1."""
        if self.label_form is not None:
            return
        self._num_classes = num_classes
        if self._first is not None:
            batch_index, pixels, labels = self._first
            self._check(pixels, labels, batch_index)

    def _check(self, pixels: Any, labels: Any, batch_index: int) -> tuple[Pixels, Any]:
        return _checked(
            pixels,
            labels,
            num_classes=self._num_classes,
            kind=self._kind,
            origin="the batch source",
            suffix=f" for batch {batch_index}",
        )

    def _call(self, batch_index: int) -> tuple[Pixels, Any]:
        try:
            function: Any = self._function
            given = function(batch_index) if self._rows is None else function(batch_index, self._rows)
        except StopIteration as error:
            raise ValueError(
                f"the batch source has ended after {quantity(batch_index, 'batch')}, but the run needs more: raise an "
                "exception with a text to end the run on purpose, or give fewer steps"
            ) from error
        if not isinstance(given, tuple) or len(given) != 2:
            raise ValueError(
                f"a batch must be a tuple (pixels, labels), but the source returned {describe_given(given)} for batch "
                f"{batch_index}: return these two, in this order"
            )
        return self._check(*given, batch_index)


def takes_rows(function: Any) -> bool:
    """Return whether a user's batch function has a parameter named `rows`."""
    try:
        return "rows" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a built-in function has no signature
        return False


def _origin(batch_index: int) -> str:
    return f"batch {batch_index} of the batch source"


def _are_classes(labels: Any, num_images: int, kind: LabelKind) -> bool:
    """Return whether labels are, or must be, class numbers."""
    if kind == "numbers":
        return False
    array = np.asarray(labels) if hasattr(labels, "dtype") else None
    if kind == "any":
        return array is not None and np.issubdtype(array.dtype, np.integer) and array.shape == (num_images,)
    is_float = array is not None and np.issubdtype(array.dtype, np.floating)
    return array is None or not (is_float and array.ndim == 2 and len(array) == num_images and (array >= 0).all())


def _form_of(labels: Any, num_images: int, origin: str, *, kind: LabelKind) -> "LabelForm | None":
    """Return the form of checked labels; None for class numbers."""
    if _are_classes(labels, num_images, kind):
        return None
    # Here, because it needs jax, which sources of class numbers do not.
    from loopfeed.engine.feed.label_form import LabelForm

    return LabelForm.of(labels, num_images, origin)


def _as_array(values: Any, what: str) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except ValueError as error:  # NumPy's text is about "inhomogeneous shapes"
        raise ValueError(
            f"{what} must be one array, but are {describe_given(values)} whose items have different shapes: give all "
            "images the same size, and each the same kind of label"
        ) from error


def _checked(
    pixels: Any, labels: Any, *, num_classes: int | None, kind: LabelKind, origin: str, suffix: str = ""
) -> tuple[Pixels, Any]:
    """Check a batch and return uint32 [B, H, W] pixels and the labels; raise ValueError if it is invalid.

    Class numbers are returned as int32 [B], other labels unchanged.
    """
    pixels = _as_array(pixels, f"the pixels that {origin} has{suffix}")
    if pixels.dtype != np.uint32 or pixels.ndim != 3:
        raise ValueError(
            f"pixels must be uint32 [B, H, W], packed R<<24 | G<<16 | B<<8 (loopfeed.pack_rgb), but "
            f"{origin} has {pixels.dtype} {list(pixels.shape)}{suffix}"
        )
    if not _are_classes(labels, len(pixels), kind):
        return pixels, labels
    labels = _as_array(labels, f"the labels that {origin} has{suffix}")
    if not np.issubdtype(labels.dtype, np.integer) or labels.shape != pixels.shape[:1]:
        raise ValueError(
            f"labels must be integers [{pixels.shape[0]}], one for each image, but "
            f"{origin} has {labels.dtype} {list(labels.shape)}{suffix}"
        )
    highest = np.iinfo(np.int32).max if num_classes is None else num_classes - 1
    if labels.size and not 0 <= labels.min() <= labels.max() <= highest:
        raise ValueError(f"labels must lie in 0 … {highest}, but {origin} has {labels.min()} … {labels.max()}{suffix}")
    return pixels, labels.astype(np.int32)
