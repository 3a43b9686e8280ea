"""The benches of the engine: `loop`, `infeed`, `stream`, `startup`, and `scaling`."""

from functools import partial

from scripts.benchmarks.bench import GB_PER_S, IMAGES_PER_S, Bench, Candidate, Case, Settings, Unit
from scripts.benchmarks.data import Images, Say, ensure_shards
from scripts.benchmarks.sparse_store import ensure_sparse, sparse_folder

_CHUNK = 16
# Pulls reuse the four buffers of the ring, so copies are measured from the same number of buffers.
_RING = 4
# model, side in pixels, images per batch
_STREAMED = (("resnet18", 64, 16), ("resnet8", 32, 128))
_NUMS_IMAGES = (100_000_000, 10_000_000, 1_000_000, 100_000, 1_000)
_NUM_STEPS = (20_000, 2_000)
_SCALED_BATCH = 128
# The base is the largest set or the longest run; it should be at most a twentieth slower than any other.
_FLAT = 0.95


def _loop(_: Settings) -> list[Case]:
    return [_small(size, hidden) for size, hidden in ((8, 32), (32, 64))]


def _small(size: int, hidden: int) -> Case:
    """Return the case of a tiny network: what the engine costs per step."""
    model, base = f"perceptron-{hidden}", f"loopfeed, --chunk {_CHUNK}"
    plain = (model, "float32", str(size), "32", "10", "steps")
    candidates = (
        Candidate(base, "engine_training.py", ("memory", model, str(size), str(_CHUNK))),
        Candidate("loopfeed", "engine_training.py", ("memory", model, str(size), "1")),
        Candidate("Python loop, jax.jit", "plain_training.py", ("python", *plain), target=5.0),
        Candidate("limit: resident, silent", "plain_training.py", ("resident", *plain)),
    )
    return Case(f"perceptron {3 * size**2}-{hidden}-10 b32", Unit("steps/s"), base, candidates)


def _infeed(_: Settings) -> list[Case]:
    pulls = Unit("µs a pull", 1e6, is_time=True)
    return [
        _pull("4 bytes", 1, 1, "pulls", pulls),
        _pull("128×32×32 uint32", 128, 32, "bytes", GB_PER_S),
        _pull("128×224×224 uint32", 128, 224, "bytes", GB_PER_S, all_cores=True),
    ]


def _pull(name: str, batch: int, size: int, unit_name: str, unit: Unit, *, all_cores: bool = False) -> Case:
    """Return the case of a pull, without reading data and without using them."""
    sizes, num_bytes = (str(batch), str(size), unit_name), 4 * batch * size * size
    copy = (str(num_bytes), "1", str(_RING * num_bytes), "1", unit_name)
    # If several threads share the copy, the array is copied in rows.
    rows = (str(num_bytes // batch), str(batch), str(_RING * num_bytes), "0", unit_name)
    candidates = [
        Candidate("inplace", "pulls.py", ("inplace", "infeed", *sizes)),
        Candidate("callback", "pulls.py", ("callback", "infeed", *sizes), target=1.0),
        Candidate("empty inplace call", "pulls.py", ("inplace", "empty", *sizes)),
        Candidate("empty io_callback", "pulls.py", ("callback", "empty", *sizes)),
        Candidate("limit: copy, 1 thread", "memory_copies.py", copy, target=0.9 if all_cores else None),
    ]
    if all_cores:
        candidates.append(Candidate("limit: copy, all cores", "memory_copies.py", rows))
    return Case(name, unit, "inplace", tuple(candidates))


def _stream(settings: Settings) -> list[Case]:
    return [_streamed(settings, *sizes) for sizes in _STREAMED]


def _streamed(settings: Settings, model: str, size: int, batch: int) -> Case:
    """Return the case of a training that is fed from disk."""
    images = Images(4096, size)
    arguments = (model, str(images.shards_folder(settings)), str(batch), "3")
    candidates = (
        Candidate("from shards", "engine_training.py", ("packed", *arguments)),
        Candidate("limit: nothing to read", "engine_training.py", ("ready", *arguments), target=0.98),
    )
    prepare = partial(ensure_shards, settings, images=images)
    name = f"{model} {size} px b{batch} from shards"
    return Case(name, IMAGES_PER_S, "from shards", candidates, round_s=3.0, prepare=prepare)


def _startup(_: Settings) -> list[Case]:
    programs = {
        "run-train --help": ("run-train", "--help"),
        "import loopfeed": ("python", "-c", "import loopfeed"),
        "from loopfeed import train": ("python", "-c", "from loopfeed import train"),
        "import jax": ("python", "-c", "import jax"),
        "limit: python -c pass": ("python", "-c", "pass"),
    }
    imports = tuple(Candidate(name, "processes.py", words) for name, words in programs.items())
    kinds = {"program from the cache": "cached", "program compiled": "cold"}
    trainings = tuple(Candidate(name, "processes.py", (kind,)) for name, kind in kinds.items())
    seconds = Unit("s", is_time=True)
    return [
        Case("imports and help", seconds, "run-train --help", imports),
        Case("first loss, resnet50 64 px b16", seconds, "program from the cache", trainings),
    ]


def _scaling(settings: Settings) -> list[Case]:
    """Return the cases of the size of the data set and of the length of a run, on one device."""

    def case(name: str, model: str, points: dict[str, tuple[int, int]], round_s: float = 1.5) -> Case:
        base = next(iter(points))

        def prepare(say: Say) -> None:
            for num_images, _ in points.values():
                ensure_sparse(settings, say, num_images=num_images)

        candidates = tuple(
            Candidate(
                point,
                "engine_training.py",
                ("packed", model, str(sparse_folder(settings, num_images)), str(_SCALED_BATCH), str(warm_steps)),
                target=None if point == base else _FLAT,
            )
            for point, (num_images, warm_steps) in points.items()
        )
        unit = Unit("µs a step", 1e6 * _SCALED_BATCH, is_time=True)
        return Case(name, unit, base, candidates, round_s=round_s, prepare=prepare)

    by_images = "images of the data set"
    return [
        case(f"{by_images}, resnet8 32 px b128", "resnet8", {f"{each:,}": (each, 10) for each in _NUMS_IMAGES}, 3.0),
        case(
            f"{by_images}, perceptron 32 px b128", "perceptron-64", {f"{each:,}": (each, 100) for each in _NUMS_IMAGES}
        ),
        case(
            "steps of the run, perceptron 32 px b128",
            "perceptron-64",
            {f"after {each:,}": (100_000, each) for each in _NUM_STEPS},
        ),
    ]


LOOP = Bench("loop", "steps of a tiny network by the whole engine, against a Python loop over a jitted step", _loop)
INFEED = Bench("infeed", "a pull of the infeed by either transport, against copies of the same bytes", _infeed)
STREAM = Bench("stream", "training from packed shards, against the same program with nothing to read", _stream)
STARTUP = Bench(
    "startup", "imports, --help, and the way to a training's first loss with and without the cache", _startup
)
SCALING = Bench("scaling", "step time and memory against the number of images and the length of the run", _scaling)
