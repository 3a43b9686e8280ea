"""The settings of a run: one frozen, validated record with a strict JSON round trip.

Each setting is declared only here, as `loopfeed.engine.settings` describes; options, checks, reference and resume rules
are derived from the declaration. Must not import jax, so that the commands start fast. `loopfeed.engine.run.resolve`
replaces settings that are None (model, image size, classes) once the data are open.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self

from loopfeed.engine.images.settings import MAX_AUTO_AUGMENT_OPS, NUM_MAGNITUDES, AutoAugmentName, CropName, PaddingName
from loopfeed.engine.patterns import parse_freeze, parse_groups
from loopfeed.engine.settings import (
    LARGEST_FLOAT32,
    Belongs,
    ConfigError,
    OnResume,
    Owner,
    Setting,
    SettingError,
    TakesEffect,
    UnknownSettingError,
    attributes_section,
    check_local_paths,
    check_writable_location,
    setting,
    settings_of,
    suggest_setting,
    table_of,
    unknown_setting,
)
from loopfeed.engine.stages import UNTIL, Stage, StageRanges, Stages
from loopfeed.models.names import MODEL_NAMES
from loopfeed.preprocess.storage_options import STORAGE_OPTIONS, StorageOptionError, check_no_user
from loopfeed.preprocess.storage_options import parse_text as parse_storage_options
from loopfeed.preprocess.suggestions import did_you_mean

__all__ = ["ConfigError", "SettingError", "TrainConfig"]

TransportName = Literal["auto", "inplace", "cuda", "callback"]
OptimizerName = Literal["sgd", "nesterov", "adamw", "lars", "lamb", "adam", "lion", "muon"]
ScheduleName = Literal[
    "constant", "step", "cosine", "linear", "one-cycle", "polynomial", "exponential", "cosine-restarts"
]
PrecisionName = Literal["float32", "bfloat16"]
KernelsName = Literal["auto", "xla", "onednn"]
LossName = Literal["cross-entropy", "binary-cross-entropy", "mean-squared-error"]
OrderName = Literal["random", "windowed"]
ProfileFormat = Literal["plain", "markdown", "csv", "json"]

NO_VALUE = "default"
"""The spelling of None in options and messages."""

OFF = "off"
"""The value of `cache` that disables it."""

NATURAL, BALANCED, SQRT, WEIGHTS = "natural", "balanced", "sqrt", "weights"
SAMPLINGS = (NATURAL, BALANCED, SQRT, WEIGHTS)
"""The words of the setting `sampling`; any other value is a file."""

NO_CLASS_WEIGHTS = "none"
CLASS_WEIGHTS = (NO_CLASS_WEIGHTS, BALANCED)
"""The words of the setting `class_weights`; any other value is a file."""

OWN_BATCHES = "batches of your own"
"""The value of `data` in `config.json` for a run on user-defined batches."""

_LEAST_AREA = 2.0**-126
# The image size and number of classes of ImageNet.
SYNTHETIC_IMAGE_SIZE, SYNTHETIC_CLASSES = 224, 1000
# Goyal et al. (2017), arXiv:1706.02677: a learning rate of 0.1 per 256 images in the batch.
_RATE_PER_IMAGE = 0.1 / 256

# Headings of `--help` and of the reference.
DATA, TRAINING, OPTIMISER, AUGMENTATION = "Data", "Training", "Optimiser", "Augmentation"
INFEED, OUTPUT, MONITORING, COMPILATION = "Infeed", "Output", "Monitoring", "Compilation"

_PROGRAM, _RUNTIME, _HOST = TakesEffect.PROGRAM, TakesEffect.RUNTIME, TakesEffect.HOST
# Whose a setting is (see `Owner`), and whether a resume may change it.
_KEPT, _CHANGES = Belongs(Owner.RUN, OnResume.KEPT), Belongs(Owner.RUN, OnResume.CHANGES)
_CHANGES_IF_SET, _GROWS = Belongs(Owner.RUN, OnResume.CHANGES_IF_SET), Belongs(Owner.RUN, OnResume.GROWS)
_COMPUTED = Belongs(Owner.RUN, OnResume.COMPUTED)
_DATA_KEPT, _DATA_CHANGES = Belongs(Owner.DATA, OnResume.KEPT), Belongs(Owner.DATA, OnResume.CHANGES)
_OF_USER, _OF_LAUNCH = Belongs(Owner.USER, OnResume.CHANGES), Belongs(Owner.LAUNCH, OnResume.CHANGES)
_COUNT = (0, 2**31 - 2)
_RATE = (0, LARGEST_FLOAT32)

MOST_PARTS = 1024
"""The largest number of devices that the processor is divided into; jax takes minutes for twice as many."""

_FEWEST_FOLDS = 2

MOST_EVALUATIONS = 20
"""The largest number of evaluations that a run makes by default."""


def _in_epochs(what: str, counted: str, group: str) -> Any:
    """Declare the number of epochs that may be given in place of the cadence `counted`, as 0.5e on the command line."""
    return setting(
        None, group, _HOST, _CHANGES, f"Passes over the training split between {what}, instead of {{{counted}}}.",
        between=_COUNT, unit="E", option=(), default_text=f"set by {{{counted}}}", in_place_of=counted,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All settings of a run; a value of None is replaced by one derived from the data or from other settings.

    NumPy numbers are converted to Python numbers, integers to floats if the setting is a float, and paths to strings,
    so that equal settings compare equal and can be written as JSON.

    Raises:
        SettingError: a value has the wrong type or is out of range, or there is no setting of that name (in which case
            it is also a TypeError). A SettingError is a ConfigError and thus a ValueError. The message states the
            setting, the value and the allowed values.

    Example:
        >>> config = TrainConfig(steps=20, batch=4, learning_rate=1, num_classes=2)
        >>> config.momentum
        0.9
        >>> TrainConfig(stesp=1000)
        Traceback (most recent call last):
        loopfeed.engine.settings.UnknownSettingError: TrainConfig has no setting 'stesp': did you mean steps?
    """

    # fmt: off
    steps: int = setting(
        1000, TRAINING, _RUNTIME, _GROWS, "Number of updates.", between=_COUNT, unit="N",
        details="0 only compiles and initialises.",
        also_called=("iterations", "max_iter"),
    )
    epochs: float | None = setting(
        None, TRAINING, _HOST, _CHANGES, "Passes over the training split, instead of {steps}.", between=_COUNT,
        unit="E", default_text="set by {steps}", in_place_of="steps",
        details="Can be fractional; `loopfeed.engine.run.epochs.settle_epochs` computes `steps`.",
    )
    batch: int = setting(
        128, TRAINING, _PROGRAM, _KEPT, "Images per step.", between=(1, 2**20), unit="IMAGES",
        details="In total, over all devices.", by_stage=True,
        also_called=("bs",),
    )
    devices: str | None = setting(
        None, TRAINING, _PROGRAM, _CHANGES,
        "Number of devices to train on together; cpu:N makes N devices of the processor.", unit="N|cpu:N",
        default_text="all of this machine, or as the resumed run",
        details="Each device computes on its own rows of every batch, and {batch} is divided among them.",
        also_called=("gpus", "num_gpus", "accelerator"),
    )
    batch_norm_group: int | None = setting(
        None, TRAINING, _PROGRAM, _KEPT, "Images that a batch norm averages over.", between=(1, 2**20), unit="IMAGES",
        default_text="the images of each device",
        details="A number that does not depend on the devices makes the training independent of them, up to rounding. "
        "It divides the images of each device, or is a multiple of them.",
    )
    batch_norm_sync: bool = setting(
        False, TRAINING, _PROGRAM, _KEPT, "Average batch norms over the whole batch, whatever the devices.",
        option=("--batch-norm-sync",),
    )
    eval_every_steps: int | None = setting(
        None, TRAINING, _RUNTIME, _CHANGES, "Steps between evaluations; 0 evaluates once at the end.", between=_COUNT,
        unit="STEPS", option=("--eval-every",),
        default_text=f"an epoch, or as many epochs as give {MOST_EVALUATIONS} evaluations",
        details="There is always an evaluation at the end, and only that by default if there is no {run_dir}, or if "
        "the training images are endless, such as user-defined batches.",
        also_called=("eval", "evaluate", "val_interval", "val_every", "check_val_every_n_epoch"),
    )
    eval_every_epochs: float | None = _in_epochs("evaluations", "eval_every_steps", TRAINING)
    eval_mirror: bool = setting(
        False, TRAINING, _PROGRAM, _KEPT,
        "Average the logits of each evaluated image with the logits of its mirror image.",
        details="Not suitable if mirroring an image can change its class.",
    )
    stop_at_top1: float | None = setting(
        None, TRAINING, _RUNTIME, _CHANGES, "Stop when top-1 accuracy reaches this.", between=(1e-9, 1), unit="0…1",
        default_text="never",
        details="A fraction of the evaluated images; the first evaluation to reach this accuracy stops the run.",
    )
    stop_patience: int | None = setting(
        None, TRAINING, _RUNTIME, _CHANGES_IF_SET,
        "Stop after N evaluations in a row that are not better than the best before, by {stop_metric}.",
        between=(1, 2**31 - 2), unit="N", default_text="never",
        details="An evaluation whose number is equal, NaN or infinite is not better.",
        also_called=("early_stopping",),
    )
    stop_metric: str | None = setting(
        None, TRAINING, _PROGRAM, _KEPT, "What {stop_patience} compares.", unit="METRIC",
        default_text="that of {keep_best}, else loss",
        details="The metric is top1, top5, loss, or a metric of your own as NAME:max or NAME:min.",
    )
    stages: Sequence[Stage] | None = setting(
        None, TRAINING, _PROGRAM, _KEPT,
        "TOML file of stages: spans of steps in one launch, each with values of its own for {image_size}, {batch}, "
        "{freeze}, {label_smoothing}, {learning_rate}, crop and augmentation.",
        unit="FILE", default_text="none", completion="file", parsed_by=Stages,
        details="In Python a list of `loopfeed.Stage`, in a recipe a list of tables. The learning rate of a stage of "
        "another batch is that of the schedule, multiplied as the batch is, unless the stage gives a {learning_rate}, "
        "the peak of the schedule there. Evaluations keep the settings of the run.",
    )
    model: str = setting(
        "auto", TRAINING, _PROGRAM, _KEPT,
        f"Network to train: {', '.join(MODEL_NAMES)}; auto is resnet50 for images of at least 128 px, else resnet8.",
        unit="NAME", completion="model",
        also_called=("arch", "architecture", "network"),
        for_objects="train(config, model=…)",
    )
    init_from: str | None = setting(
        None, TRAINING, _HOST, _DATA_KEPT,
        "Weights to start from: a safetensors file, a PyTorch state dict, a run, or hf-hub:timm/NAME.",
        unit="FILE|URL", default_text="drawn from the seed", completion="file",
        also_called=("weights",),
        for_objects="a file, as safetensors.numpy.save_file writes one",
    )
    precision: PrecisionName = setting(
        "float32", TRAINING, _PROGRAM, _KEPT,
        "Precision of activations, convolutions and matrix products; weights and loss stay float32.",
        details="Parameters, optimiser state and batch statistics are always float32.",
        also_called=("amp", "mixed_precision", "dtype"),
    )
    kernels: KernelsName = setting(
        "auto", TRAINING, _PROGRAM, _KEPT,
        "Kernels of a CPU: xla, or onednn, which uses oneDNN's where they are faster and needs the extra `kernels`; "
        "auto is onednn where it can be used. No effect on other devices.",
        details="The kernels round differently. A run records the ones that it used, and a resume keeps them.",
    )
    seed: int = setting(
        0, TRAINING, _RUNTIME, _KEPT, "Seed of the initial weights, the image order and the augmentation.",
        between=(0, 2**63 - 1), unit="N",
        also_called=("random_state",),
    )
    loss: LossName = setting(
        "cross-entropy", TRAINING, _PROGRAM, _KEPT,
        "Loss to minimise: cross-entropy (one class per image, or a target distribution), binary-cross-entropy "
        "(several labels per image), or mean-squared-error (numbers).",
        also_called=("criterion",),
        for_objects="train(config, loss=…)",
    )
    label_smoothing: float = setting(
        0.0, TRAINING, _RUNTIME, _CHANGES, "Fraction of each label that is spread evenly over all classes.",
        between=(0, 1), by_stage=True,
    )
    class_weights: str = setting(
        NO_CLASS_WEIGHTS, TRAINING, _PROGRAM, _DATA_KEPT,
        "Weights of the classes in the training loss: none, balanced (each class counts equally), or a CSV table "
        "class,weight.",
        unit="WORD|FILE", completion="file",
        details="Each image's cross entropy is multiplied by the weight of its class; balanced weights are N / (K · "
        "images of the class), whose mean over the images is 1. With the binary cross entropy, the weights multiply "
        "the terms of the classes that an image has; balanced ones are images without the class / images with it, at "
        "least 0.01 and at most 100. Evaluations report the loss without weights.",
    )
    ema_decay: float | None = setting(
        None, TRAINING, _RUNTIME, _CHANGES_IF_SET,
        "Decay of a moving average of the weights; if set, the average is evaluated and saved instead of the weights.",
        between=(0, 1), default_text="no average",
        details="The average follows faster at first: after t updates its decay is at most (1 + t) / (10 + t).",
        also_called=("ema", "model_ema"),
    )
    skip_nonfinite: int = setting(
        0, TRAINING, _RUNTIME, _CHANGES,
        "Skip up to N consecutive updates with a NaN or infinite gradient or weight; one more stops the run, unless "
        "{stop_on_nan} is off.", between=_COUNT, unit="N",
        details="The run then ends with the last finite weights.",
    )
    stop_on_nan: bool = setting(
        True, TRAINING, _RUNTIME, _CHANGES,
        "Stop after more than {skip_nonfinite} consecutive updates with a NaN or infinite gradient or weight; if off, "
        "skip all such updates.",
    )
    deterministic: bool = setting(
        True, TRAINING, _PROGRAM, _KEPT,
        "On NVIDIA GPUs, produce the same bits in every launch; if off, use the fastest algorithms. No effect on "
        "CPUs.",
        details="The results are identical only on the same card with the same software versions.",
    )

    data: str | None = setting(
        None, DATA, _HOST, _DATA_CHANGES, "Packed data set: a folder or a URL.", unit="DIR|URL", completion="folder",
        default_text="$LOOPFEED_DATA, else data/shards, else the demo set",
        details="A data set in an object store is given by its TensorStore URL. A resumed run checks that the data "
        "have not changed.",
        also_called=("dataset", "train_dir", "root"),
        for_objects="loopfeed.pack(IMAGES, DEST), whose DEST is then the data, or to train(config, batches=…)",
    )
    split: str = setting("train", DATA, _HOST, _KEPT, "Split to train on.", unit="NAME")
    eval_split: str | None = setting(
        None, DATA, _HOST, _KEPT, "Split to evaluate on; off disables evaluation.", unit="NAME|off",
        default_text="val, else test, else off",
        also_called=("validation",),
    )
    fold: str | None = setting(
        None, DATA, _HOST, _KEPT,
        "Cross-validation on one split: evaluate on fold K of N of the training split, and train on the others.",
        unit="K/N", default_text="none",
        details="Each class is divided evenly among the folds, and a group of the pack (--group-by) never is. The "
        "folds depend on the images alone, not on the seed. No other split is evaluated.",
    )
    sampling: str = setting(
        NATURAL, DATA, _HOST, _DATA_KEPT,
        "How often each training image is drawn: natural (once an epoch), balanced (each class equally often), sqrt "
        "(each class in proportion to the square root of its images), weights (in proportion to those of the pack), or "
        "a CSV table class,weight or name,weight.",
        unit="WORD|FILE", completion="file",
        details="An epoch stays as many draws as the split has images. Each image and each class is drawn its expected "
        "number of times an epoch, rounded down or up. What a table does not list has the weight 1, and the weights of "
        "classes are those of each of their images. A resumed run needs the same table.",
    )
    synthetic: bool = setting(
        False, DATA, _HOST, _KEPT, "Train on random batches drawn on the host; needs no data set."
    )
    image_size: int | None = setting(
        None, DATA, _PROGRAM, _KEPT, "Height and width of the network's input; at most the size of the packed images.",
        between=(1, 2**14), unit="PX", default_text=f"from the data; {SYNTHETIC_IMAGE_SIZE} with {{synthetic}}",
        by_stage=True,
        also_called=("size", "input_size"),
    )
    eval_image_size: int | None = setting(
        None, DATA, _PROGRAM, _KEPT,
        "Height and width of the network's input in evaluations; at most what the data have.", between=(1, 2**14),
        unit="PX", default_text="{image_size}",
        details="A network trained on small images is often better on larger ones (FixRes, arXiv:1906.06423). Recorded "
        "with the weights, so that `run-eval` and `predict-images` use it too.",
    )
    num_classes: int | None = setting(
        None, DATA, _PROGRAM, _KEPT, "Number of classes, and thus of the model's outputs.", between=(1, 2**16),
        unit="K", default_text=f"from the data; {SYNTHETIC_CLASSES} with {{synthetic}}",
    )

    mean: tuple[float, float, float] | None = setting(
        None, DATA, _RUNTIME, _KEPT, "Channel means that are subtracted from the pixels, on the scale 0 … 1.",
        between=(0, 1), unit="R G B", default_text="those of the packed split; 0.5 without one",
        details="Recorded with the weights, so that evaluations normalise images in the same way.",
    )
    std: tuple[float, float, float] | None = setting(
        None, DATA, _RUNTIME, _KEPT,
        "Channel standard deviations by which the pixels are divided, on the scale 0 … 1.",
        between=(0.004, 1), unit="R G B", default_text="those of the packed split; 0.25 without one",
        details="Recorded with the weights, so that evaluations normalise images in the same way.",
    )

    optimizer: OptimizerName = setting(
        "sgd", OPTIMISER, _PROGRAM, _KEPT, "Optimisation algorithm, which computes updates from gradients.",
        details="sgd, nesterov and adam follow the definitions of PyTorch, lion and muon those of optax.",
        also_called=("opt",),
        for_objects="train(config, optimizer=…)",
    )
    learning_rate: float | None = setting(
        None, OPTIMISER, _RUNTIME, _CHANGES,
        "Peak learning rate of the schedule. The default suits sgd; the adaptive optimizers need a lower rate.",
        between=_RATE,
        unit="RATE", option=("--learning-rate", "--lr"), default_text="0.1 · images per update / 256", by_stage=True,
        also_called=("max_lr",),
    )
    schedule: ScheduleName = setting(
        "constant", OPTIMISER, _PROGRAM, _KEPT,
        "Learning-rate schedule; step divides the rate by ten after 1/3, 2/3 and 8/9 of the steps.",
        details="one-cycle is fastai's; the others fall to {final_fraction} of the peak.",
        also_called=("sched", "scheduler", "lr_scheduler"),
        for_objects="train(config, schedule=…)",
    )
    final_fraction: float | None = setting(
        None, OPTIMISER, _RUNTIME, _CHANGES,
        "Learning rate at the end, as a fraction of the peak (cosine, linear, polynomial, exponential, "
        "cosine-restarts).", between=(0, 1), default_text="0; 0.01 with the exponential schedule",
    )
    schedule_power: float = setting(
        2.0, OPTIMISER, _RUNTIME, _CHANGES, "Exponent of the polynomial schedule.", between=(0.01, 100), unit="P"
    )
    restart_cycles: int = setting(
        4, OPTIMISER, _RUNTIME, _CHANGES, "Number of cycles of the cosine-restarts schedule.", between=(1, 16), unit="N"
    )
    restart_growth: float = setting(
        1.0, OPTIMISER, _RUNTIME, _CHANGES, "Length of each cycle of cosine-restarts, divided by that of the previous "
        "cycle.", between=(1, 10), unit="FACTOR",
    )
    warmup_steps: int = setting(
        0, OPTIMISER, _RUNTIME, _CHANGES, "Steps of linear warm-up from 0, before the schedule starts.", between=_COUNT,
        unit="STEPS",
    )
    warmup_epochs: float | None = setting(
        None, OPTIMISER, _HOST, _CHANGES,
        "Length of the warm-up in passes over the training split, instead of {warmup_steps}.", between=_COUNT, unit="E",
        default_text="set by {warmup_steps}", in_place_of="warmup_steps",
    )
    append_epochs: float | None = setting(
        None, OPTIMISER, _HOST, _OF_LAUNCH,
        "With {resume}: append a cycle of the same schedule to a complete run, of so many passes over the training "
        "split, from the last learning rate up to {learning_rate}.", between=_COUNT, unit="E", default_text="none",
        details="The default of {learning_rate} is then a tenth of the peak before. The warm-up of the cycle has as "
        "large a share of it as that of the run had, or a twentieth, unless another {warmup_steps} is given. In "
        "Python, `run_settings` returns the recorded learning rate: give None for the default.",
    )
    cycle_start_steps: int = setting(
        0, OPTIMISER, _RUNTIME, _COMPUTED, "Steps before the current cycle of the schedule, set by "
        "{append_epochs}.", between=_COUNT, unit="STEPS", option=(), set_by="append_epochs",
    )
    cycle_start_rate: float = setting(
        0.0, OPTIMISER, _RUNTIME, _COMPUTED, "Learning rate from which the current cycle rises, set by "
        "{append_epochs}.", between=_RATE, unit="RATE", option=(), set_by="append_epochs",
    )
    cycle_momentum: bool = setting(
        False, OPTIMISER, _PROGRAM, _KEPT,
        "Cycle the momentum from 0.95 to 0.85 and back while the one-cycle learning rate rises and falls.",
    )
    momentum: float = setting(
        0.9, OPTIMISER, _RUNTIME, _CHANGES, "Momentum; first-moment decay for adam, adamw, lamb and lion.",
        between=(0, 1),
    )
    beta2: float = setting(
        0.999, OPTIMISER, _RUNTIME, _CHANGES, "Second-moment decay (adam, adamw, lamb, muon); momentum decay of lion.",
        between=(0, 1), details="Lion's paper uses 0.99; muon uses AdamW for biases and norms.",
    )
    weight_decay: float = setting(
        1e-4, OPTIMISER, _RUNTIME, _CHANGES, "Weight decay of the kernels.", between=_RATE, unit="RATE",
        also_called=("wd",),
    )
    decay_all: bool = setting(
        False, OPTIMISER, _PROGRAM, _KEPT, "Also apply weight decay to normalisation parameters and biases."
    )
    clip_norm: float | None = setting(
        None, OPTIMISER, _RUNTIME, _CHANGES,
        "Largest global norm of the gradient; larger gradients are scaled down to it.",
        between=(1e-30, LARGEST_FLOAT32), unit="NORM", default_text="no limit",
        also_called=("clip_grad", "gradient_clip_val", "max_grad_norm"),
    )
    clip_order: str = setting(
        "2", OPTIMISER, _PROGRAM, _KEPT, "Order of the norm that {clip_norm} limits: a number of at least 1, or inf.",
        unit="P|inf", details="inf is the largest magnitude of an element.",
    )
    clip_value: float | None = setting(
        None, OPTIMISER, _RUNTIME, _CHANGES_IF_SET,
        "Largest magnitude of an element of the gradient; larger elements are set to it, before {clip_norm}.",
        between=(1e-30, LARGEST_FLOAT32), unit="VALUE", default_text="no limit",
    )
    freeze: str | None = setting(
        None, OPTIMISER, _PROGRAM, _KEPT,
        "Regular expressions, separated by commas, that match whole dotted paths of parameters, which are not trained, "
        "and of batch statistics, which stay as they are.", unit="REGEX", default_text="nothing is frozen",
        joined_by=",",
        details="The option can be repeated. A batch norm whose running statistics are frozen normalises with them.",
        by_stage=True,
    )
    groups: str | None = setting(
        None, OPTIMISER, _PROGRAM, _KEPT,
        "Factors on the learning rate and the weight decay of matching parameters: "
        "REGEX=learning_rate:10x,weight_decay:0. The first group that matches a parameter counts.",
        unit="GROUP", option=("--group",), default_text="none", joined_by=";",
        details="The option can be repeated; in the setting, groups are separated by semicolons.",
    )
    layer_decay: float | None = setting(
        None, OPTIMISER, _PROGRAM, _KEPT,
        "Factor on the learning rate from each layer to the one before it; the classifier keeps the whole rate.",
        between=(1e-3, 1.0), unit="FACTOR", default_text="all layers have the same rate",
        details="As BEiT and timm define it (arXiv:2106.08254), for fine-tuning; 0.65 to 0.9 are usual. A layer is a "
        "block of the network. The factors of {groups} multiply it. Only for networks of the registry.",
    )
    accumulate_steps: int = setting(
        1, OPTIMISER, _RUNTIME, _KEPT, "Number of batches whose gradients are accumulated into one update.",
        between=(1, 2**20), unit="BATCHES",
        details="The value 1 compiles a different program from all larger values.",
        also_called=("grad_accum_steps", "gradient_accumulation", "accumulate_grad_batches"),
    )

    crop: CropName = setting(
        "centre", AUGMENTATION, _PROGRAM, _KEPT,
        "Training crop: centre, random (random position), or resized (random area and aspect ratio, then resized); of "
        "whole pictures, see preprocess-imagenet --canvas.", by_stage=True,
    )
    crop_padding: int = setting(
        0, AUGMENTATION, _PROGRAM, _KEPT, "Pixels added on every side before a random crop.", between=(0, 2**14),
        unit="PX", by_stage=True,
    )
    padding_mode: PaddingName = setting(
        "zeros", AUGMENTATION, _PROGRAM, _KEPT,
        "Content of the padding: black (zeros), or the image reflected at its border (reflect).", by_stage=True,
    )
    crop_area: float = setting(
        0.08, AUGMENTATION, _PROGRAM, _KEPT, "Smallest fraction of the image's area that a resized crop covers.",
        between=(0, 1), by_stage=True,
    )
    flip: float = setting(
        0.0, AUGMENTATION, _PROGRAM, _KEPT, "Probability of flipping an image horizontally.", between=(0, 1),
        by_stage=True,
        also_called=("hflip",),
    )
    brightness: float = setting(
        0.0, AUGMENTATION, _PROGRAM, _KEPT, "Largest relative change in brightness.", between=(0, 1), by_stage=True,
        also_called=("color_jitter", "colour_jitter"),
    )
    contrast: float = setting(
        0.0, AUGMENTATION, _PROGRAM, _KEPT, "Largest relative change in contrast.", between=(0, 1), by_stage=True,
    )
    saturation: float = setting(
        0.0, AUGMENTATION, _PROGRAM, _KEPT, "Largest relative change in saturation.", between=(0, 1), by_stage=True,
    )
    hue: float = setting(
        0.0, AUGMENTATION, _PROGRAM, _KEPT, "Largest change in hue, in turns of the colour circle.", between=(0, 0.5),
        by_stage=True,
    )
    mixup: float = setting(
        0.0, AUGMENTATION, _PROGRAM, _KEPT,
        "Alpha of the Beta distribution from which the weights for mixing adjacent images in the batch are drawn; 0 "
        "disables mixup.",
        between=(0, 1000), unit="ALPHA", by_stage=True,
    )
    cutmix: float = setting(
        0.0, AUGMENTATION, _PROGRAM, _KEPT,
        "Alpha of the Beta distribution that determines how large a patch is pasted from the adjacent image in the "
        "batch; 0 disables cutmix.",
        between=(0, 1000), unit="ALPHA", by_stage=True,
    )
    erasing: float = setting(
        0.0, AUGMENTATION, _PROGRAM, _KEPT, "Probability of blanking a rectangle of an image.", between=(0, 1),
        by_stage=True,
        also_called=("reprob",),
    )
    auto_augment: AutoAugmentName = setting(
        "off", AUGMENTATION, _PROGRAM, _KEPT,
        "Random operations on shape, colour and contrast: randaugment ({auto_augment_ops} operations of equal "
        "strength), trivialaugment (one operation of random strength), or off.",
        details="The operations and ranges of torchvision's RandAugment and TrivialAugmentWide.", by_stage=True,
        also_called=("aa", "rand_augment"),
    )
    auto_augment_ops: int = setting(
        2, AUGMENTATION, _PROGRAM, _KEPT, "Number of operations that randaugment applies to each image.",
        between=(1, MAX_AUTO_AUGMENT_OPS), unit="N", by_stage=True,
    )
    auto_augment_magnitude: int = setting(
        9, AUGMENTATION, _PROGRAM, _KEPT, "Strength of the operations of randaugment.", between=(0, NUM_MAGNITUDES - 1),
        by_stage=True,
    )
    labels_are_invariant: bool = setting(
        False, AUGMENTATION, _HOST, _CHANGES,
        "Allow augmentations that move the pixels of images whose labels could be positions, which they do not move.",
        option=("--labels-are-invariant",),
        details="Without it, labels that are arrays of two or more dimensions for each image, such as masks, heat maps "
        "and boxes, are refused with a random or resized {crop}, {flip}, {mixup}, {cutmix}, {auto_augment} and "
        "{eval_mirror}.",
    )

    chunk_batches: int | None = setting(
        None, INFEED, _PROGRAM, _KEPT,
        "Steps per chunk, up to 1024. The batches of a chunk are transferred to the device (on NVIDIA GPUs: enqueued) "
        "together, which helps if a step takes less than a millisecond. Signals and requests take effect between "
        "chunks. A resumed run must keep this value.",
        between=(1, 1024), unit="BATCHES", option=("--chunk",), default_text="1; 10 with the cuda transport",
        details="The losses of a chunk are returned together, except by the cuda transport, which returns them one "
        "by one. With that transport, it is best if the chunk length divides the number of steps between evaluations "
        "and between snapshots.",
    )
    prefetch: int | None = setting(
        None, INFEED, _HOST, _CHANGES, "Number of batches to read ahead of the device.", between=(1, 1024),
        unit="BATCHES", default_text="4 batches, two chunks or a megabyte of batches, whichever is largest",
    )
    reader_threads: int = setting(
        2, INFEED, _HOST, _CHANGES, "Number of threads that read shards.", between=(1, 1024), unit="N",
        details="A user-defined batch source is called from one thread, in order.",
        also_called=("workers", "num_workers"),
    )
    infeed_timeout_s: float = setting(
        60.0, INFEED, _HOST, _CHANGES, "Fail if a batch does not arrive within this time.", between=(0.001, 86_400),
        unit="SECONDS", option=("--infeed-timeout",),
    )
    transport: TransportName = setting(
        "auto", INFEED, _PROGRAM, _KEPT,
        "How batches are transferred to the device: auto is inplace on a CPU, cuda on NVIDIA GPUs, and callback (the "
        "slowest) elsewhere.",
    )

    run_dir: str | None = setting(
        None, OUTPUT, _HOST, _OF_LAUNCH, "Folder or URL (s3://, gs://) for settings, losses, snapshots and weights.",
        unit="DIR", default_text="runs/<date>-<time>", completion="folder",
        details="In Python, None writes nothing to disk.",
        also_called=("output", "output_dir", "out", "log_dir", "default_root_dir"),
    )
    resume: bool = setting(
        False, OUTPUT, _HOST, _OF_LAUNCH, "Continue the run in {run_dir} from its newest snapshot, bit for bit.",
        option=("--resume",),
        also_called=("continue",),
    )
    snapshot_every_steps: int | None = setting(
        None, OUTPUT, _RUNTIME, _CHANGES, "Steps between snapshots; 0 takes a single snapshot at the end.",
        between=_COUNT, unit="STEPS", option=("--snapshot-every",), default_text="ten minutes",
        details="By default a snapshot is taken ten minutes after the one before, or later: snapshots take at most a "
        "twentieth of the time. With {keep_best} there is also one at each evaluation that is the best so far.",
        also_called=("checkpoint_every", "save_every", "save_freq"),
    )
    snapshot_every_epochs: float | None = _in_epochs("snapshots", "snapshot_every_steps", OUTPUT)
    keep_snapshots: int = setting(
        3, OUTPUT, _HOST, _CHANGES, "Number of newest snapshots to keep; 0 keeps all.", between=_COUNT, unit="N",
        option=("--keep",),
        also_called=("save_top_k", "save_total_limit"),
    )
    keep_best: str | None = setting(
        None, OUTPUT, _HOST, _CHANGES, "Also keep the snapshot with the best evaluation.", unit="METRIC",
        default_text="off",
        details="The metric is top1, top5, loss, or a metric of your own as NAME:max or NAME:min. With "
        "{snapshot_every_steps}, only the snapshots at the steps of evaluations are compared ({eval_every_steps}).",
        also_called=("save_best", "save_best_only"),
    )
    overwrite: bool = setting(
        False, OUTPUT, _HOST, _OF_LAUNCH, "Replace the earlier run in {run_dir}.", option=("--overwrite",)
    )

    profile: bool = setting(
        False, MONITORING, _HOST, _OF_LAUNCH,
        "Measure how long each phase of the run takes, print a table of it at the end, and write profile.csv.",
        option=("--profile",),
    )
    profile_steps: str | None = setting(
        None, MONITORING, _HOST, _OF_LAUNCH,
        "Steps whose operations {profile} traces, from START up to but not including STOP, counted from 0.",
        unit="START:STOP", default_text="30 steps after the first 10 of the launch",
        details="The times of forward pass, backward pass and so on come from this window, all other times from the "
        "whole launch. Tracing slows the steps of the window only.",
    )
    profile_format: ProfileFormat = setting(
        "plain", MONITORING, _HOST, _OF_LAUNCH, "Format in which {profile} prints its table."
    )
    runtime_report: bool = setting(
        False, MONITORING, _HOST, _OF_LAUNCH,
        "Print what the runtime did at the end: compilations, batches, waits, snapshots, memory, and goodput.",
        option=("--runtime-report",), details="The run folder has it in any case, as `runtime.json`.",
    )
    stall_warn_s: float = setting(
        120.0, MONITORING, _HOST, _CHANGES,
        "Warn if no step ends for so long, with what the run waits for; 0 disables the warning.", between=(0, 86_400),
        unit="SECONDS", option=("--stall-warn",),
        details="The stacks of all threads are written to the run folder.",
    )
    tensorboard: bool = setting(
        False, MONITORING, _HOST, _CHANGES, "Write TensorBoard event files to the folder tensorboard in {run_dir}.",
    )
    wandb: str | None = setting(
        None, MONITORING, _HOST, _OF_USER, "Log to this project of Weights & Biases.", unit="PROJECT",
        default_text="off",
    )
    on_event: str | None = setting(
        None, MONITORING, _HOST, _OF_USER,
        "Run this line in a shell when the run is done, stopped, failed or stalled, a loss is NaN or infinite, or an "
        "evaluation is the best so far.", unit="COMMAND", default_text="none",
        details="The event is in $LOOPFEED_EVENT, $LOOPFEED_MESSAGE, $LOOPFEED_RUN_DIR, $LOOPFEED_STEP and more, and "
        "as JSON on standard input. The command cannot harm the run: it is killed after ten seconds.",
    )
    histogram_every_steps: int = setting(
        0, MONITORING, _RUNTIME, _CHANGES,
        "Steps between histograms of weights and gradients for {tensorboard} or {wandb}; 0 takes none.",
        between=_COUNT, unit="STEPS", option=("--histogram-every",),
        details="0 compiles a different program from all larger values.",
    )
    histogram_every_epochs: float | None = _in_epochs("histograms", "histogram_every_steps", MONITORING)
    log_images_every_steps: int = setting(
        0, MONITORING, _RUNTIME, _CHANGES,
        "Steps between pictures of augmented training images for {tensorboard} or {wandb}; 0 takes none.",
        between=_COUNT, unit="STEPS", option=("--log-images-every",),
        details="0 compiles a different program from all larger values.",
    )
    log_images_every_epochs: float | None = _in_epochs("pictures", "log_images_every_steps", MONITORING)

    compilation_cache: str | None = setting(
        None, COMPILATION, _HOST, _OF_USER, "Folder of the compilation cache; off disables it.", unit="DIR|off",
        default_text="$JAX_COMPILATION_CACHE_DIR, else the user's cache folder", completion="folder",
    )
    dump_hlo: str | None = setting(
        None, COMPILATION, _HOST, _OF_LAUNCH, "Write the program's StableHLO and optimised HLO to this folder.",
        unit="DIR", completion="folder",
    )
    storage_options: str | None = setting(
        None, DATA, _HOST, _DATA_CHANGES,
        f"How to reach the object store of {{data}}, {{init_from}} and {{run_dir}}: {', '.join(STORAGE_OPTIONS)}.",
        unit="KEY=VALUE", option=("--storage-option",), default_text="$AWS_ENDPOINT_URL, $AWS_REGION",
        joined_by=",",
        details="The option can be repeated; in the setting, pairs are separated by commas. A run records the endpoint "
        "and the region also if they come from the environment; there is no option for a secret.",
    )
    order: OrderName = setting(
        "random", DATA, _HOST, _KEPT,
        "Order of the training images: random; or windowed, which reads large parts of the data set in random order "
        "and shuffles them within windows in memory, for stores with a long latency.",
    )
    window_gb: float = setting(
        1.0, DATA, _HOST, _KEPT,
        "Memory for the two windows of {order} windowed, in GB over all processes: one in use, and one read ahead.",
        between=(1e-6, 1e6), unit="GB",
        details="The order depends on it. A gigabyte is 10⁹ bytes.",
    )
    cache: str | None = setting(
        None, DATA, _HOST, _OF_USER, "Folder for copies of the shard files of a remote data set; off disables it.",
        unit="DIR|off", default_text="off", completion="folder",
        details="Several runs and processes can share the folder.",
    )
    cache_gb: float = setting(
        50.0, DATA, _HOST, _OF_USER,
        "Largest size of {cache}, in GB; the files that have not been used for longest are removed.",
        between=(1e-6, 1e6), unit="GB",
    )
    # fmt: on

    def __new__(cls, **values: Any) -> Self:
        """Raise an error for an unknown setting before Python does, so that the message can suggest a similar name."""
        for name in values:
            if name not in SETTINGS:
                raise unknown_setting(name, SETTINGS, cls.__name__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for epochs, steps in COUNTED_IN_EPOCHS:
            if (given := epochs_in(getattr(self, steps))) is None:
                continue
            if getattr(self, epochs) not in (None, given):
                found = f"{getattr(self, epochs)} and {getattr(self, steps)}"
                raise SettingError(epochs, f"{epochs} and {steps} must not both be given, got {found}: leave one out")
            object.__setattr__(self, epochs, given)
            object.__setattr__(self, steps, SETTINGS[steps].default)
        for name, declared in SETTINGS.items():
            object.__setattr__(self, name, declared.checked(getattr(self, name)))
        parse_freeze(self.freeze), parse_groups(self.groups)
        parsers: dict[str, Callable[[str], Any]] = {
            "devices": parse_devices,
            "fold": parse_fold,
            "profile_steps": parse_profile_steps,
        }
        for name, parse in parsers.items():
            if (text := getattr(self, name)) is not None:
                parse(text)
        _check_lower_bounds(self.clip_order, self.crop_area)
        _check_no_user(self)
        if self.synthetic and self.data is not None:
            raise SettingError(
                "data",
                "synthetic batches need no data set, got data {data_set!r}: leave out {synthetic} or {data}",
                data_set=self.data,
            )
        try:
            parse_storage_options(self.storage_options)
        except StorageOptionError as error:
            raise SettingError("storage_options", "{setting}: {fault}", fault=error) from None
        check_local_paths(dump_hlo=self.dump_hlo, cache=self.cache)
        check_local_paths(sampling=self.sampling, class_weights=self.class_weights)
        check_writable_location("run_dir", self.run_dir)
        if self.stages is not None:
            object.__setattr__(
                self,
                "stages",
                Stages(
                    stage.with_settings({name: getattr(own, name) for name in stage.settings})
                    for stage, own in zip(self.stages, self.by_stage, strict=True)
                ),
            )

    @cached_property
    def by_stage(self) -> "tuple[TrainConfig, ...]":
        """The settings of each stage, in order; of a run without stages, its own."""
        if self.stages is None:
            return (self,)
        return tuple(_of_stage(self, number, stage) for number, stage in enumerate(self.stages, 1))

    @property
    def step_ranges(self) -> StageRanges:
        """The updates of each stage, once the ends of the stages are counted in steps."""
        stages = self.stages or Stages([Stage()])
        # The last stage ends with the run, also with one that was resumed with more steps.
        stops = [*(each.until_step or 0 for each in stages[:-1]), self.steps]
        return StageRanges.of(stops, [each.images_per_step for each in self.by_stage])

    @property
    def batch_ranges(self) -> StageRanges:
        """The batches of each stage, once the ends of the stages are counted in steps."""
        stops = [each.stop * self.accumulate_steps for each in self.step_ranges]
        return StageRanges.of(stops, [each.batch for each in self.by_stage])

    @property
    def changes_batch(self) -> bool:
        """Whether a stage has another batch than the run."""
        return any(each.batch != self.batch for each in self.by_stage)

    @property
    def images_per_step(self) -> int:
        """The images of an update, over all devices and accumulated batches; a stage may have its own."""
        return self.batch * self.accumulate_steps

    @property
    def peak_learning_rate(self) -> float:
        """The peak learning rate, or its default if `learning_rate` is None."""
        if self.learning_rate is not None:
            return self.learning_rate
        return self.images_per_step * _RATE_PER_IMAGE

    @property
    def snapshot_cadence(self) -> int:
        """The steps between the snapshots that the program takes by itself, 0 for none.

        With `keep_best` alone, these are at the evaluations, and only the best is written.
        """
        if self.keeps_best_evaluation:
            return self.eval_every_steps or 0
        return self.snapshot_every_steps or 0

    @property
    def keeps_best_evaluation(self) -> bool:
        """Whether a snapshot is kept of the best of all evaluations, not only of those at the steps of snapshots."""
        given = (self.snapshot_every_steps, self.snapshot_every_epochs)
        return self.keep_best is not None and given == (None, None)

    @property
    def most_skips(self) -> int:
        """The largest number of consecutive updates that may be skipped."""
        return self.skip_nonfinite if self.stop_on_nan else 2**31 - 1

    def to_json(self) -> dict[str, Any]:
        """Return the settings as a dictionary of JSON values."""
        values = {name: getattr(self, name) for name in SETTINGS}
        return values | {"stages": None if self.stages is None else [each.to_json() for each in self.stages]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "TrainConfig":
        """Create the settings from the result of `to_json`; raise SettingError for an unknown key."""
        return cls(**values)


SETTINGS: Mapping[str, Setting] = settings_of(TrainConfig)
"""The declarations of all settings, by name."""
# Because of `__new__`, help() and editors would show `(**values)`.
_FIELDS = inspect.signature(TrainConfig.__init__)
TrainConfig.__signature__ = _FIELDS.replace(parameters=list(_FIELDS.parameters.values())[1:])  # type: ignore[attr-defined]
TrainConfig.__doc__ = f"{TrainConfig.__doc__}\n{attributes_section(SETTINGS)}"

STAGED = {name: each for name, each in SETTINGS.items() if each.by_stage}
"""The settings of which a stage of a run may have a value of its own."""
COUNTED_IN_EPOCHS = tuple((each.name, each.in_place_of) for each in SETTINGS.values() if each.in_place_of is not None)
"""Pairs of settings (epochs, steps) with the same meaning; if the first is given, the second is computed from it."""


# What a setting takes along if a stage turns it off.
_DETAILS = {"auto_augment": ("auto_augment_ops", "auto_augment_magnitude"), "crop": ("crop_padding", "padding_mode")}


def stage_error(number: int, config: TrainConfig, fault: object) -> SettingError:
    """Return the error that a stage, counted from 1, is at fault."""
    of = f"stage {number} of {len(config.stages or ())}"
    return SettingError("stages", f"{{setting}}, {of}: {{fault}}", fault=fault)


def check_stages(config: TrainConfig, check: Callable[[TrainConfig], object]) -> None:
    """Check the settings of each stage, those of the run if it has none; an error of `check` names the stage."""
    for number, stage in enumerate(config.by_stage, 1):
        try:
            check(stage)
        except ValueError as error:
            if config.stages is None:
                raise
            raise stage_error(number, config, error) from error


def _check_stage_names(names: Iterable[str]) -> None:
    """Raise SettingError for a name that is not that of a setting of a stage."""
    for name in names:
        if name in SETTINGS and name not in STAGED:
            rule = "{name} belongs to the whole run, not to a stage: a stage may have {staged}"
            raise SettingError("stages", rule, name=name, staged=", ".join(STAGED))
        if name not in STAGED:
            near = did_you_mean(name, [UNTIL]) or suggest_setting(name, STAGED.values()) or ": remove it"
            raise UnknownSettingError("stages", "a stage has no setting {name!r}{near}", name=name, near=near)


Stage.check_names = staticmethod(_check_stage_names)


def _of_stage(config: TrainConfig, number: int, stage: Stage) -> TrainConfig:
    """Return the settings of a stage; raise SettingError for one that it cannot have."""

    def error(fault: object) -> SettingError:
        return stage_error(number, config, fault)

    details = {
        detail: SETTINGS[detail].default
        for name in stage.settings.keys() & _DETAILS.keys()
        if stage.settings[name] != getattr(config, name)
        for detail in _DETAILS[name]
    }
    # TOML has no word for None.
    own = {
        name: None if value == "" and SETTINGS[name].is_optional else value for name, value in stage.settings.items()
    }
    try:
        return dataclasses.replace(config, stages=None, **(details | own))
    except SettingError as fault:
        raise error(fault) from None


def epochs_in(value: Any) -> float | None:
    """Return the epochs that a value such as "0.5e" of a setting counted in steps stands for; None for others."""
    found = re.fullmatch(r"([0-9]{1,10}(?:\.[0-9]{1,10})?)e", value) if isinstance(value, str) else None
    return None if found is None else float(found[1])


def _check_no_user(config: TrainConfig) -> None:
    """Raise SettingError if a URL among the settings, all of which are recorded, has a user or password."""
    for name in SETTINGS:
        try:
            check_no_user(str(getattr(config, name)))
        except StorageOptionError as error:
            raise SettingError(name, "{setting}: {fault}", fault=error) from None


def _check_lower_bounds(clip_order: str, crop_area: float) -> None:
    """Raise SettingError for a value below what its declaration cannot say: one of text, or just above 0."""
    if not re.fullmatch(r"inf|[0-9]+(\.[0-9]+)?", clip_order) or not float(clip_order) >= 1:
        raise SettingError(
            "clip_order", "{setting} must be a number of at least 1, or inf, got {value!r}", value=clip_order
        )
    if crop_area < _LEAST_AREA:
        raise SettingError(
            "crop_area", "{setting} must be above 0 in float32, got {value}: 0.08 is usual", value=crop_area
        )


def settings_table() -> list[dict[str, str]]:
    """Return the settings reference as a table of strings: one row per setting, in the order of the fields."""
    return table_of(SETTINGS)


def describe_value(value: Any) -> str:
    """Return the value of a setting as text for messages; None becomes `default`."""
    if isinstance(value, Stages):
        return ", ".join(map(str, value))
    if isinstance(value, tuple):
        return " ".join(f"{each:g}" for each in value)
    return NO_VALUE if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def parse_devices(text: str) -> tuple[str | None, int]:
    """Return the platform, if any, and the number of devices that a value of the setting `devices` names.

    Raises:
        SettingError: if the text has another form, or divides the processor into too many devices.
    """
    platform, _, count = text.rpartition(":")
    if platform not in ("", "cpu") or not re.fullmatch("[1-9][0-9]{0,4}", count):
        raise SettingError(
            "devices",
            "{setting} must be NUMBER or cpu:NUMBER, with a NUMBER of at least 1, got {text!r}: leave it out for all "
            "devices of the kind that jax finds, an NVIDIA card with the extra cuda",
            text=text,
        )
    if platform and int(count) > MOST_PARTS:
        raise SettingError(
            "devices",
            "{setting} must divide the processor into at most {most:,} devices, got {text!r}: give fewer",
            most=MOST_PARTS,
            text=text,
        )
    return platform or None, int(count)


def parse_fold(text: str) -> tuple[int, int]:
    """Return K and N of a value K/N of the setting `fold`; raise SettingError if it has another form."""
    found = re.fullmatch(r"([1-9][0-9]{0,3})/([1-9][0-9]{0,3})", text)
    number, count = map(int, found.groups()) if found else (0, 0)
    if not 1 <= number <= count or count < _FEWEST_FOLDS:
        raise SettingError(
            "fold", "{setting} must be K/N, fold K of N, counted from 1, with N of at least 2, got {text!r}", text=text
        )
    return number, count


def parse_profile_steps(text: str) -> range:
    """Return the steps that a value of the setting `profile_steps` names, counted from 0.

    Raises:
        SettingError: if the text has another form, or names no step.
    """
    found = re.fullmatch(r"([0-9]{1,10}):([0-9]{1,10})", text)
    steps = range(int(found[1]), int(found[2])) if found else range(0)
    if not steps:
        raise SettingError(
            "profile_steps", "{setting} must be START:STOP, two step numbers with START < STOP, got {text!r}", text=text
        )
    return steps
