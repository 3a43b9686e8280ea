"""The settings of a run: one frozen, validated record with a strict JSON round trip.

Owns the names, ranges and defaults of the settings; must not import jax, so that the commands start fast. What a
setting that is None resolves to (model, image size, classes) is decided in `engine.run.resolve`, once the data is open.
"""

import dataclasses
import math
import numbers
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from engine.images.settings import CropName, PaddingName

TransportName = Literal["auto", "inplace", "cuda", "callback"]
OptimizerName = Literal["sgd", "nesterov", "adamw", "lars", "lamb"]
ScheduleName = Literal["constant", "step", "cosine", "linear", "one-cycle"]
PrecisionName = Literal["float32", "bfloat16"]

COUNTED_IN_EPOCHS = (("epochs", "steps"), ("warmup_epochs", "warmup_steps"))
"""Settings that say one thing in two ways; of each pair the first, where it is given, makes the second."""

NO_VALUE = "default"
"""The word for None, which no number expresses, in options and messages."""

# What synthetic batches are where nothing else is asked for: ImageNet's.
SYNTHETIC_IMAGE_SIZE, SYNTHETIC_CLASSES = 224, 1000
# Goyal et al. (2017), arXiv:1706.02677: a rate of 0.1 for each 256 images of the batch.
_RATE_PER_IMAGE = 0.1 / 256
# They are float32 on the device.
_MOST_FLOAT32 = (2 - 2**-23) * 2.0**127
_RANGES: dict[str, tuple[float, float]] = {
    "steps": (0, 2**31 - 2),
    "epochs": (0, 2**31 - 2),
    "batch": (1, 2**20),
    "image_size": (1, 2**14),
    "num_classes": (1, 2**16),
    "learning_rate": (0, _MOST_FLOAT32),
    "momentum": (0, 1),
    "weight_decay": (0, _MOST_FLOAT32),
    "seed": (0, 2**63 - 1),
    "chunk_batches": (1, 1024),
    "prefetch": (1, 1024),
    "reader_threads": (1, 1024),
    "infeed_timeout_s": (0.001, 86_400),
    "eval_every_steps": (0, 2**31 - 2),
    "warmup_steps": (0, 2**31 - 2),
    "warmup_epochs": (0, 2**31 - 2),
    "beta2": (0, 1),
    "clip_norm": (1e-30, _MOST_FLOAT32),
    "accumulate_steps": (1, 2**20),
    "ema_decay": (0, 1),
    "label_smoothing": (0, 1),
    "skip_nonfinite": (0, 2**31 - 2),
    "stop_at_top1": (1e-9, 1),
    "snapshot_every_steps": (0, 2**31 - 2),
    "keep_snapshots": (0, 2**31 - 2),
    "crop_padding": (0, 2**14),
    "crop_area": (0, 1),
    "flip": (0, 1),
    "brightness": (0, 1),
    "contrast": (0, 1),
    "saturation": (0, 1),
    "hue": (0, 0.5),
    "mixup": (0, 1000),
    "cutmix": (0, 1000),
    "erasing": (0, 1),
}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that `train` needs to know; None means: decided from the data or from another setting.

    Attributes:
        steps: updates to make; 0 only compiles and initialises. A runtime value: changing it compiles nothing.
        epochs: passes over the training split, whole or not, in place of `steps`, which
            `engine.run.epochs.settle_epochs` fills in. None counts in steps.
        batch: images a step, over all devices.
        data: the packed data set: a folder or a TensorStore URL; None is $FEEDLOOP_DATA, else data/shards, else the
            demo set.
        split: the split to train on.
        eval_split: the split to evaluate on; None is val, else test, where the data has one; "off" evaluates never.
        eval_every_steps: updates between evaluations; 0 is one at the end of the run. A runtime value.
        eval_mirror: evaluate on the mean of the logits of an image and of its mirror image; not for classes that
            differ in left and right.
        stop_at_top1: fraction of the evaluated images; the first evaluation that reaches it ends the run. None never
            does. A runtime value.
        synthetic: draw random batches on the host instead of reading a data set.
        model: a name of `models.registry`, or "auto": resnet50 from 128 px, resnet8 below.
        num_classes: K; None is the manifest's (1000 for synthetic batches).
        image_size: height and width that the network sees, in pixels, at most those of the data; None is the data's
            (224 for synthetic batches).
        precision: of activations and products; parameters, statistics and the loss are float32 in either.
        init_from: a safetensors file of weights to start from; None draws them.
        optimizer: "sgd" and "nesterov" as PyTorch defines them, "adamw", "lars" or "lamb".
        learning_rate: at the schedule's peak; None is 0.1 · images of an update / 256. A runtime value.
        schedule: "constant", "step" (a tenth after 1/3, 2/3 and 8/9 of the steps), "cosine" and "linear" (to 0), or
            "one-cycle" (fastai's).
        warmup_steps: updates of a linear rise from 0 before the schedule. A runtime value.
        warmup_epochs: that rise in passes over the training split, in place of `warmup_steps`. None counts in steps.
        cycle_momentum: let momentum go 0.95 → 0.85 → 0.95 against the one-cycle rate.
        momentum: β1 of AdamW and LAMB. A runtime value.
        beta2: of AdamW and LAMB. A runtime value.
        weight_decay: of kernels. A runtime value.
        decay_all: decay norms and biases too.
        clip_norm: largest global norm of a gradient; None clips nothing. A runtime value.
        accumulate_steps: batches whose gradients make one update. A runtime value from 2.
        ema_decay: of a moving average of the weights, which is then evaluated and written; None keeps none. A runtime
            value.
        label_smoothing: share of a label that goes to all classes. A runtime value.
        skip_nonfinite: updates in a row that may be skipped because the gradient is not finite; one more ends the run,
            with the last good weights. A runtime value.
        stop_on_nan: end the run where more are not finite; without it every such update is skipped, however many. A
            runtime value.
        deterministic: on NVIDIA, take no operation that gives other bits when it is run again, and try no others to
            find the fastest: the same bits in every launch on the same card and versions. Elsewhere it changes nothing.
        crop: "centre", "random", or "resized" (a random part of random area and aspect, resized).
        crop_padding: pixels on every side before a random crop.
        padding_mode: what they are: "zeros" (black), or "reflect" (the picture mirrored at its border pixels).
        crop_area: least part of the image's area that a resized crop shows.
        flip: probability of mirroring left and right.
        brightness, contrast, saturation, hue: largest relative changes; hue in turns of the colour circle.
        mixup, cutmix: α of the Beta distribution that mixes neighbours; 0 is off.
        erasing: probability of blanking a rectangle.
        seed: of the initial parameters and of the order of the images. A runtime value.
        chunk_batches: batches that cross to the device at once; the steps on them are made without the host. Their
            losses come back together, and what is asked for meanwhile takes effect after them. With transport "cuda"
            steps that are enqueued ahead of the device, best a divisor of those between evaluations and snapshots;
            losses come one by one. None: 1, or 10 with "cuda".
        prefetch: batches held in memory ahead of the device; None: 4, two chunks, more of small ones
            (`feeder.ring_depth`).
        reader_threads: threads that fill them from shards; a source of your own is called from one thread, in order.
        infeed_timeout_s: seconds that a step may wait for its batch before the run ends with an error.
        transport: how batches cross to the device: "inplace" (CPU), "cuda" (NVIDIA), "callback" (anything), or "auto".
        run_dir: the run folder; None writes nothing to disk (the command makes one under runs/).
        resume: continue the run in run_dir from its newest snapshot.
        snapshot_every_steps: updates between snapshots; 0 takes one at the end alone. A runtime value.
        keep_snapshots: how many of the newest stay; 0 keeps all.
        overwrite: replace what an earlier run left in run_dir.
        compilation_cache: folder of compiled programs; None is $JAX_COMPILATION_CACHE_DIR, else the user's cache
            folder; "off" keeps none.
        dump_hlo: folder for the program's StableHLO and optimised HLO; None writes neither.

    Numbers of NumPy's are kept as Python's, whole numbers of a real setting as floats, and paths as text, so that equal
    settings are equal records and JSON takes them.

    Raises:
        ValueError: where a value is of another kind or out of its range, naming the setting, the value and what it
            must be.
    """

    steps: int = 1000
    epochs: float | None = None
    batch: int = 128
    data: str | None = None
    split: str = "train"
    eval_split: str | None = None
    eval_every_steps: int = 0
    eval_mirror: bool = False
    stop_at_top1: float | None = None
    synthetic: bool = False
    model: str = "auto"
    num_classes: int | None = None
    image_size: int | None = None
    precision: PrecisionName = "float32"
    init_from: str | None = None
    optimizer: OptimizerName = "sgd"
    learning_rate: float | None = None
    schedule: ScheduleName = "constant"
    warmup_steps: int = 0
    warmup_epochs: float | None = None
    cycle_momentum: bool = False
    momentum: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 1e-4
    decay_all: bool = False
    clip_norm: float | None = None
    accumulate_steps: int = 1
    ema_decay: float | None = None
    label_smoothing: float = 0.0
    skip_nonfinite: int = 0
    stop_on_nan: bool = True
    deterministic: bool = True
    crop: CropName = "centre"
    crop_padding: int = 0
    padding_mode: PaddingName = "zeros"
    crop_area: float = 0.08
    flip: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    erasing: float = 0.0
    seed: int = 0
    chunk_batches: int | None = None
    prefetch: int | None = None
    reader_threads: int = 2
    infeed_timeout_s: float = 60.0
    transport: TransportName = "auto"
    run_dir: str | None = None
    resume: bool = False
    snapshot_every_steps: int = 0
    keep_snapshots: int = 3
    overwrite: bool = False
    compilation_cache: str | None = None
    dump_hlo: str | None = None

    def __post_init__(self) -> None:
        for name, declared in get_type_hints(type(self)).items():
            object.__setattr__(self, name, _as_declared(name, declared, getattr(self, name)))
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            # Written so that NaN fails too.
            if value is not None and not (low <= value <= high and math.isfinite(value)):
                allowed = (
                    f"be at least {low} and finite in float32" if high == _MOST_FLOAT32 else f"lie in {low} … {high}"
                )
                raise ValueError(f"{name} must {allowed}, got {value}")
        for name, declared in get_type_hints(type(self)).items():
            if get_origin(declared) is Literal and getattr(self, name) not in get_args(declared):
                raise ValueError(f"{name} must be one of {', '.join(get_args(declared))}, got {getattr(self, name)!r}")
        if self.synthetic and self.data is not None:
            raise ValueError(f"synthetic batches need no data set, got data {self.data!r}: give one of the two")

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate with its default filled in."""
        if self.learning_rate is not None:
            return self.learning_rate
        return self.batch * self.accumulate_steps * _RATE_PER_IMAGE

    @property
    def most_skips(self) -> int:
        """Updates in a row that may be skipped."""
        return self.skip_nonfinite if self.stop_on_nan else 2**31 - 1

    def to_json(self) -> dict[str, Any]:
        """Gives the settings as a JSON object."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "TrainConfig":
        """Reads what `to_json` gave; a key that is no setting raises ValueError."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                raise ValueError(f"a setting must be one of {', '.join(known)}; got {key!r}")
        return cls(**values)


def _as_declared(name: str, declared: Any, value: Any) -> Any:
    """Gives a setting's value as its declared kind, in Python's own types.

    Raises:
        ValueError: where it is of another kind, a bool where a number is meant, or an empty text.
    """
    kinds = (str,) if get_origin(declared) is Literal else get_args(declared) or (declared,)
    if value is None and type(None) in kinds:
        return None
    kind = kinds[0] if kinds[0] in (bool, int, float) else str
    if kind is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    # NumPy registers its integers and floats as these; a bool of Python's is an integer too, and never meant as one.
    taken = {bool: bool, int: numbers.Integral, float: numbers.Real, str: str}[kind]
    if not isinstance(value, taken) or (isinstance(value, bool) and kind is not bool):
        optional = " or None" if type(None) in kinds else ""
        raise ValueError(f"{name} must be of type {kind.__name__}{optional}, got {value!r} of {type(value).__name__}")
    if kind is str and not value:
        raise ValueError(f"{name} must not be empty, got {value!r}: leave it out to take its default")
    try:
        return kind(value)
    except OverflowError:
        raise ValueError(f"{name} must be finite, got an integer beyond every float") from None


def setting_words(value: Any) -> str:
    """Gives the value of a setting as messages have it."""
    return NO_VALUE if value is None else f"{value:g}" if isinstance(value, float) else str(value)
