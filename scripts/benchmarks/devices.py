"""`devices`: the cost of reducing over several devices of the same processor, in one process and in two."""

from scripts.benchmarks.bench import IMAGES_PER_S, Bench, Candidate, Case, Settings

# model, side in pixels, images per batch, float32 numbers that each update reduces
_CASES = (("resnet8", 32, 128, 78_715), ("perceptron", 32, 128, 197_323))
# processes, devices in each
_TEAMS = ((1, 2), (1, 4), (2, 1))


def _cases(_: Settings) -> list[Case]:
    return [_case(*sizes) for sizes in _CASES]


def _case(model: str, size: int, batch: int, numbers: int) -> Case:
    def candidate(name: str, processes: int, devices: int) -> Candidate:
        arguments = (model, str(size), str(batch), str(processes), str(devices))
        return Candidate(name, "several_devices.py", arguments)

    base = "1 device: the ideal on the same cores"
    names = {team: f"{team[0]} process × {team[1]}" if team[0] == 1 else f"{team[0]} processes" for team in _TEAMS}
    return Case(
        f"{model} {size} px b{batch}, {4 * numbers / 1e6:.2f} MB reduced a step",
        IMAGES_PER_S,
        base,
        (candidate(base, 1, 1), *(candidate(names[team], *team) for team in _TEAMS)),
        round_s=3.0,
    )


BENCH = Bench("devices", "training on several devices of the processor, against one device on the same cores", _cases)
