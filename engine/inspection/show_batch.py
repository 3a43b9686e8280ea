"""The first batch of a run as the model receives it: as arrays, and as a sheet of pictures.

The batch is pulled through the run's own infeed, by a program of its own, which trains nothing and writes nothing. A
run that was used for this cannot train any more.
"""

import io
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32
from numpy.typing import NDArray
from PIL.Image import Image

from loopfeed.engine.compilation.ahead_of_time import compile_traced, trace_ahead
from loopfeed.engine.config import TrainConfig
from loopfeed.engine.control.signals import call_on_worker
from loopfeed.engine.crossing.choice import traced_platform
from loopfeed.engine.crossing.infeed import Batch, BatchInfeed
from loopfeed.engine.crossing.token import first_token
from loopfeed.engine.feed.batches import whole_of
from loopfeed.engine.feed.shard_batches import ShardBatches, WindowedBatches
from loopfeed.engine.images.mixing import WHOLE
from loopfeed.engine.parts import PartArguments, take_parts
from loopfeed.engine.processes import this_process
from loopfeed.engine.program.augmented_batch import augment_batch
from loopfeed.engine.program.pulls import for_each, pull_part
from loopfeed.engine.records.whole_file import write_whole
from loopfeed.engine.replicas import Replicas, device_put_replicated, replicate, unreplicate
from loopfeed.engine.run.run import Run
from loopfeed.engine.run.train import set_up_run
from loopfeed.engine.updates.settings import RuntimeSettings
from loopfeed.preprocess.commands.sheet_path import check_sheet_path
from loopfeed.preprocess.printable import printable, printable_line
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.classes import ImageClass
from loopfeed.preprocess.shards.targets import TargetKind


class OneBatch(NamedTuple):
    """This device's part of one batch.

    Attributes:
        batch: the images and their labels.
        learning_rate_factor: the host's factor for this batch.
        is_there: whether there is a batch; otherwise its values are undefined.
    """

    batch: Batch
    learning_rate_factor: Float32[Array, ""]
    is_there: Bool[Array, ""]


def pull_one_batch(infeed: BatchInfeed, replicas: Replicas, shapes: Batch, batch_index: Int32[Array, ""]) -> OneBatch:
    """Pull the batch with number `batch_index` as the training loop does.

    Args:
        infeed: the training infeed, from which nothing has been pulled.
        replicas: the devices.
        shapes: the shapes and dtypes of this device's part.
        batch_index: the number of the batch, from 0.
    """
    token, pulled = pull_part(infeed, first_token(), batch_index, jnp.ones((), jnp.int32), replicas, len(shapes.labels))
    empty: Batch = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
    none = jnp.zeros((), jnp.bool)
    _, (batch, is_there), _ = for_each(
        infeed,
        token,
        pulled,
        lambda _, batch: (batch, jnp.ones((), jnp.bool)),
        (empty, none),
        is_over=lambda carry: carry[1],
    )
    return OneBatch(batch, pulled.control.learning_rate_factor, is_there)


type LookAt = Callable[[OneBatch, jax.Array, RuntimeSettings], Any]
"""(a device's part of a batch, its number int32 [], runtime settings) → what to return; called while tracing."""


def look_at_first_batch(run: Run, look: LookAt) -> Any:
    """Pull the batch that comes next, call `look` with it inside a program on the devices, and return its result.

    Args:
        run: a run that is open and has not been executed.
        look: returns arrays that are equal on all devices.

    Raises:
        BaseException: the error of the batch source.
        KeyboardInterrupt: a signal came first.
    """
    config, infeed, transport, devices = run.config, run.infeed, run.transport, run.team.devices
    replicas, source, form = run.settings.replicas, run.data.source, run.settings.objective.label_form
    rows = run.stage.num_rows
    label_shape = (rows,) if form is None else (rows, form.num_words)
    extents = jnp.zeros(rows, jnp.int32) if whole_of(source) else None
    pixel_shape = rows, source.height, source.width
    shapes = jax.eval_shape(
        lambda: Batch(jnp.zeros(pixel_shape, jnp.uint32), jnp.zeros(label_shape, jnp.int32), extents)
    )

    def program(batch_index: jax.Array, values: RuntimeSettings) -> tuple[Any, jax.Array]:
        one = pull_one_batch(infeed, replicas, shapes, batch_index)
        return look(one, batch_index, values), one.is_there

    run.board.prepare(
        first_batch=run.start.batch_index,
        batches_per_step=config.accumulate_steps,
        replayed=run.start.events,
        record=lambda _: None,
    )
    arguments = jnp.int32(run.start.batch_index), run.values().in_stage(run.stage_number)
    traced = trace_ahead(replicate(program, devices), *arguments, platform=traced_platform(devices[0]))
    compiled = compile_traced(traced, deterministic=config.deterministic, keeps=transport)
    with transport.running(), ExitStack() as stack:
        stack.callback(infeed.close)
        infeed.start()
        placed = device_put_replicated(arguments, devices)
        result = call_on_worker(partial(_call, compiled.call, placed))
        found, is_there = unreplicate(result, devices)
    failure = infeed.failure or transport.failure
    if failure is not None:
        raise failure
    if not is_there:
        raise KeyboardInterrupt(f"stopped by {run.board.stop_reason}; nothing was written")
    return found


def _call(compiled: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return jax.block_until_ready(compiled(*arguments))


_MOST_NUMBERS = 4
_SHOWN_SHARE = 0.005  # of a target distribution, what rounds to more than 0.00

_LARGEST_THUMBNAIL = 224
_MOST_LARGE_PICTURES = 64  # more are shown smaller
_FEWEST_COLUMNS = 8
_LINE_HEIGHT = 14


@dataclass(frozen=True, eq=False, repr=False)
class ShownBatch:
    """A training batch as the model receives it.

    Attributes:
        images: float32 [B, h, w, 3], the model's input: augmented and normalised.
        pictures: uint8 [B, h, w, 3], the same without the normalisation, clipped to 0 … 255.
        labels: int32 [B] class numbers, or the pytree of arrays [B, …] that the loss takes.
        mix_weight: float64 [B], the share of each image's own label in its target; the rest is that of its partner,
            image 2k + 1 of 2k and the reverse. None if nothing is mixed.
        captions: what the label of each image says.
        step: the update to which the batch belongs, from 1.
        title: what the sheet says at its top.
        names: the name of each image in the pack (`ShardSplit.names`); None if the images have no names.
    """

    images: NDArray[np.float32]
    pictures: NDArray[np.uint8]
    labels: Any
    mix_weight: NDArray[np.float64] | None
    captions: tuple[str, ...]
    step: int
    title: str
    names: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        return f"ShownBatch({self.title}, {self.facts})"

    @property
    def facts(self) -> str:
        """The number of pictures and their size, in words."""
        height, width = self.pictures.shape[1:3]
        return f"{quantity(len(self.pictures), 'image')} of {width} × {height} px"

    def draw(self) -> Image:
        """Return a sheet of all pictures with their captions."""
        from loopfeed.preprocess.commands.contact_sheet import Geometry, draw_sheet, geometry_for

        count, side = len(self.pictures), max(self.pictures.shape[1:3])
        geometry = geometry_for(side)
        if count <= _MOST_LARGE_PICTURES and side > geometry.thumbnail:
            geometry = Geometry(thumbnail=min(side, _LARGEST_THUMBNAIL))
        captions = self.captions
        if self.names is not None:
            files = (printable_line(name.rpartition("/")[2]) for name in self.names)
            captions = tuple(f"{caption}\n{file}" for caption, file in zip(captions, files, strict=True))
        num_lines = max(caption.count("\n") for caption in captions)
        geometry = replace(geometry, caption=geometry.caption + num_lines * _LINE_HEIGHT, line=_LINE_HEIGHT)
        columns = max(_FEWEST_COLUMNS, int(np.ceil(np.sqrt(count))))
        return draw_sheet(
            self.pictures,
            captions,
            [divmod(index, columns) for index in range(count)],
            title=self.title,
            facts=f"{self.facts}, as the model receives them",
            num_columns=columns,
            geometry=geometry,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the sheet to a PNG file, whole or not at all; raise ValueError as `check_sheet_path`, or OSError."""
        check_sheet_path(path)
        write_whole(Path(path), self._repr_png_())

    def _repr_png_(self) -> bytes:
        """Return the sheet as a PNG file, which is what a notebook shows."""
        content = io.BytesIO()
        self.draw().save(content, "PNG")
        return content.getvalue()


def show_batch(
    config: TrainConfig,
    path: str | os.PathLike[str] | None = None,
    *,
    step: int | None = None,
    notify: Callable[[str], None] = lambda _: None,
    **parts: Unpack[PartArguments],
) -> ShownBatch:
    """Return the first batch that `train` would train on, after augmentation, without training; a notebook shows it.

    The batch is pulled and augmented on the devices by the code of the training step. With `resume`, it is the batch
    that the run would take next. A batch source is asked for further batches, which the run reads ahead.

    Args:
        config: the settings.
        path: a PNG file to write the pictures to; None writes none.
        step: the batch of this update, from 1, in place of the first; not with `resume`.
        model, batches, evaluation, loss, metrics, optimizer, schedule, augment, notify: as `train` takes them.

    Raises:
        ValueError: as `train`; or `path` is not a PNG file in a folder that exists, or the run has no such step.
        BaseException: the error of the batch source.

    Example:
        >>> show_batch(TrainConfig(data="data", batch=4), model=model).pictures.shape
        (4, 8, 8, 3)
    """
    if path is not None:
        check_sheet_path(path)
    if step is not None and (config.resume or step < 1):
        found = f"{step} with resume=True" if config.resume else str(step)
        raise ValueError(f"step must be an update of a new run, from 1, got {found}: leave one of them out")
    shown = _shown(config, step, parts, notify)
    if path is not None and this_process().index == 0:
        shown.save(path)
    return shown


def show_recorded_batch(
    config: TrainConfig, step: int, manifest_digest: str | None, parts: PartArguments
) -> ShownBatch:
    """Return the batch of a step of a recorded run.

    Args:
        config: the settings in effect at the step, of which the number of steps counts, not that of epochs: a resume
            records both.
        step: the update, from 1.
        manifest_digest: SHA-256 of the manifest of the images that the run was trained on, None if there is none.
        parts: your own parts.

    Raises:
        ValueError: the run has no such step, or the images have changed.
    """
    return _shown(replace(config, epochs=None), step, parts, lambda _: None, manifest_digest)


def _shown(
    config: TrainConfig,
    step: int | None,
    parts: PartArguments,
    notify: Callable[[str], None],
    manifest_digest: str | None = None,
) -> ShownBatch:
    with set_up_run(config, take_parts(parts), notify, is_dry=True, first_step=step or 1) as run:
        if manifest_digest is not None and run.data.manifest_digest != manifest_digest:
            raise ValueError(
                f"the images of a step are those of the pack that the run was trained on, but {config.data} has been "
                "packed again with other images since: give back the old pack"
            )
        if run.start.step >= run.config.steps:
            raise ValueError(f"step must be a step of the run, 1 … {run.config.steps:,}, got {step}: choose another")
        return first_batch_of(run)


def first_batch_of(run: Run) -> ShownBatch:
    """Return the batch that an open run would train on next; see `show_batch`."""
    settings, data = run.stage.settings, run.data

    def look(one: OneBatch, batch_index: jax.Array, values: RuntimeSettings) -> Any:
        images, mix_weight, _ = augment_batch(settings, one.batch, batch_index, values)
        return settings.replicas.join_rows((images, one.batch.labels, mix_weight))

    images, words, mix_weight = look_at_first_batch(run, look)
    labels, _ = settings.objective.read_labels(jnp.asarray(words))
    labels, images, mix_weight = jax.tree.map(np.asarray, (labels, images, mix_weight))
    levels = (images * np.asarray(run.std, np.float32) + np.asarray(data.mean, np.float32)) * 255
    step = run.start.step + 1
    return ShownBatch(
        images=images,
        pictures=np.clip(np.rint(np.nan_to_num(levels)), 0, 255).astype(np.uint8),
        labels=labels,
        mix_weight=None if mix_weight is None else mix_weight / WHOLE,
        captions=tuple(captions_of(labels, mix_weight, data.classes, data.targets)),
        step=step,
        title=printable_line(f"step {step:,}: {data.description.partition(';')[0]}"),
        names=names_of_first_batch(run),
    )


def names_of_first_batch(run: Run) -> tuple[str, ...] | None:
    """Return the name of each image of the batch that an open run would train on next; None if they have none."""
    source = run.data.source
    if not isinstance(source, ShardBatches | WindowedBatches):
        return None
    names = source.split.names(source.images_of(run.start.batch_index))
    return None if names is None else tuple(names)


def captions_of(
    labels: Any, mix_weight: NDArray[np.int32] | None, classes: Sequence[ImageClass], targets: TargetKind | None
) -> list[str]:
    """Return a caption for each image of a batch: its class, or what else its label says; of a mixed image, both.

    Args:
        labels: int32 [B] class numbers, or any pytree of arrays [B, …].
        mix_weight: int32 [B] in units of 2**-16, the share of each image's own label; None if nothing is mixed.
        classes: the classes by number, empty if they have no names.
        targets: what an array of labels [B, K] of a packed split contains.
    """
    leaves = jax.tree_util.tree_leaves_with_path(labels)
    num_images = len(leaves[0][1])
    alone = [
        "\n".join(_describe(path, np.asarray(leaf)[row], classes, targets) for path, leaf in leaves)
        for row in range(num_images)
    ]
    if mix_weight is None:
        return alone
    return [_mixed(alone[row], alone[row ^ 1], int(mix_weight[row]) / WHOLE) for row in range(num_images)]


def _mixed(own: str, partner: str, share: float) -> str:
    # A picture that is not mixed, or with another of its class, has one label.
    if share == 1.0 or own == partner:
        return own
    return "\n".join(f"{part:.2f} {text}" for part, text in ((share, own), (1 - share, partner)))


def _describe(path: Any, value: NDArray[Any], classes: Sequence[ImageClass], targets: TargetKind | None) -> str:
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    prefix = f"{name}: " if name else ""
    if not name and value.ndim == 0 and value.dtype.kind in "iu":
        return _class_name(int(value), classes)
    if not name and value.ndim == 1 and _are_classes(value, targets):
        present = [index for index in np.argsort(-value, kind="stable").tolist() if value[index] > _SHOWN_SHARE]
        is_sure = set(value.tolist()) <= {0.0, 1.0}
        texts = [_class_name(index, classes) + ("" if is_sure else f" {value[index]:.2f}") for index in present]
        return ", ".join(texts) or "-"
    if value.size > _MOST_NUMBERS:
        return f"{prefix}{value.dtype} {list(value.shape)}"
    return prefix + ", ".join(f"{number:.4g}" for number in value.ravel().astype(np.float64).tolist())


def _are_classes(value: NDArray[Any], targets: TargetKind | None) -> bool:
    """Return whether an array [K] has a number for each class: of several classes, or a distribution over them."""
    if targets is not None:
        return targets == "classes"
    return value.dtype.kind == "f" and bool((value >= 0).all()) and abs(float(value.sum()) - 1) < 1e-3


def _class_name(number: int, classes: Sequence[ImageClass]) -> str:
    if 0 <= number < len(classes):
        return printable(classes[number].name)
    return f"class {number}"
