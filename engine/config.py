"""The settings of a run: one frozen, validated record with a strict JSON round trip.

Owns the names, ranges and defaults of the settings; must not import jax, so that the commands start fast. What a
setting that is None resolves to (model, image size, classes) is decided in `engine.resolve`, once the data is open.
"""

import dataclasses
import math
import numbers
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

TransportName = Literal["auto", "inplace", "callback"]

# Goyal et al. (2017), arXiv:1706.02677: a rate of 0.1 for each 256 images of the batch.
_RATE_PER_IMAGE = 0.1 / 256
# They are float32 on the device.
_MOST_FLOAT32 = (2 - 2**-23) * 2.0**127
_RANGES: dict[str, tuple[float, float]] = {
    "steps": (0, 2**31 - 2),
    "batch": (1, 2**20),
    "image_size": (1, 2**14),
    "num_classes": (1, 2**16),
    "learning_rate": (0, _MOST_FLOAT32),
    "momentum": (0, 1),
    "weight_decay": (0, _MOST_FLOAT32),
    "seed": (0, 2**63 - 1),
    "prefetch": (1, 1024),
    "reader_threads": (1, 1024),
    "infeed_timeout_s": (0.001, 86_400),
    "eval_every_steps": (0, 2**31 - 2),
}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that `train` needs to know; None means: decided from the data or from another setting.

    Attributes:
        steps: updates to make; 0 only compiles and initialises. A runtime value: changing it compiles nothing.
        batch: images a step, over all devices.
        data: the packed data set: a folder or a TensorStore URL; None is $FEEDLOOP_DATA, else data/shards, else the
            demo set.
        split: the split to train on.
        eval_split: the split to evaluate on; None is val, else test, where the data has one; "off" evaluates never.
        eval_every_steps: updates between evaluations; 0 is one at the end of the run. A runtime value.
        synthetic: draw random batches on the host instead of reading a data set.
        model: a name of `models.registry`, or "auto": resnet50 from 128 px, resnet8 below.
        num_classes: K; None is the manifest's (1000 for synthetic batches).
        image_size: height and width in pixels; None is the data's (224 for synthetic batches).
        learning_rate: None is 0.1 · batch / 256. A runtime value.
        momentum: of SGD, as PyTorch defines it. A runtime value.
        weight_decay: added to the gradient of every parameter, times the parameter. A runtime value.
        seed: of the initial parameters and of the order of the images. A runtime value.
        prefetch: batches held in memory ahead of the device.
        reader_threads: threads that fill them from shards; a source of your own is called from one thread, in order.
        infeed_timeout_s: seconds that a step may wait for its batch before the run ends with an error.
        transport: how batches cross to the device: "inplace" (CPU), "callback" (anything), or "auto".
        run_dir: the run folder; None writes nothing to disk (the command makes one under runs/).
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
    batch: int = 128
    data: str | None = None
    split: str = "train"
    eval_split: str | None = None
    eval_every_steps: int = 0
    synthetic: bool = False
    model: str = "auto"
    num_classes: int | None = None
    image_size: int | None = None
    learning_rate: float | None = None
    momentum: float = 0.9
    weight_decay: float = 1e-4
    seed: int = 0
    prefetch: int = 4
    reader_threads: int = 2
    infeed_timeout_s: float = 60.0
    transport: TransportName = "auto"
    run_dir: str | None = None
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
                allowed = f"be at least {low} and finite in float32" if high == _MOST_FLOAT32 else f"lie in {low} … {high}"
                raise ValueError(f"{name} must {allowed}, got {value}")
        if self.transport not in get_args(TransportName):
            raise ValueError(f"transport must be one of {', '.join(get_args(TransportName))}, got {self.transport!r}")
        if self.synthetic and self.data is not None:
            raise ValueError(f"synthetic batches need no data set, got data {self.data!r}: give one of the two")

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate with its default filled in."""
        return self.batch * _RATE_PER_IMAGE if self.learning_rate is None else self.learning_rate

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
    kinds = get_args(declared) or (declared,)
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
