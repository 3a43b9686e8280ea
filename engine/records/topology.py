"""The devices and processes that a launch trained on, and what a replay on others can promise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.settings import shown
from loopfeed.preprocess.cores import num_cores
from loopfeed.preprocess.quantities import listed


@dataclass(frozen=True)
class Topology:
    """The devices and processes of a launch.

    Attributes:
        device: the vendor's name of the devices, such as "cpu".
        num_devices: their number, over all processes.
        num_processes: number of processes.
    """

    device: str
    num_devices: int = 1
    num_processes: int = 1

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Topology":
        """Return the topology that a record contains; the oldest records, of one device, contain no numbers.

        Raises:
            ValueError: if no run records it.
        """
        device, *numbers = values.get("device"), values.get("num_devices", 1), values.get("num_processes", 1)
        if not isinstance(device, str) or not all(type(each) is int and each >= 1 for each in numbers):
            found = str(shown([device, *numbers]))[:80]
            raise ValueError(
                f"a launch must have a device, as text, and numbers of devices and processes, but has {found}"
            )
        return Topology(device, *numbers)

    def to_json(self) -> dict[str, Any]:
        """Return the topology as a JSON object."""
        return {"device": self.device, "num_devices": self.num_devices, "num_processes": self.num_processes}

    def __str__(self) -> str:
        devices = "one device" if self.num_devices == 1 else f"{self.num_devices} devices"
        processes = f" in {self.num_processes} processes" if self.num_processes > 1 else ""
        return f"{devices} ({self.device}){processes}"


def in_one_process(config: TrainConfig, topology: Topology) -> TrainConfig:
    """Return a launch's settings with all of its devices, those of the other processes included, in this process."""
    if topology.num_processes == 1:
        return config
    count = topology.num_devices
    return replace(config, devices=f"cpu:{count}" if topology.device == "cpu" else str(count))


def describe_promise(
    recorded: Topology, device: str, num_parts: int = 0, differences: Sequence[str] | None = ()
) -> str:
    """Return which agreement to expect of a replay in one process, on as many devices as the record.

    Args:
        recorded: where the record was made.
        device: the vendor's name of the devices of the replay.
        num_parts: number of devices into which the processor of the replay is divided; 0 for other devices.
        differences: what else rounding depends on and is other here than in the record; None if the record lacks it.
    """
    if recorded.device != device:
        return (
            f"recorded on {recorded}, replayed on {device}: another kind of device rounds differently, so the losses "
            "agree only approximately"
        )
    # The sum of two numbers does not depend on their order.
    if recorded.num_processes > 1 and recorded.num_devices > 2:
        return (
            f"recorded on {recorded}, replayed in one process: sums over the devices may be added in another order, so "
            "the losses may differ by rounding"
        )
    # XLA has a thread for each core, or for each device if these are more, and divides its work among the threads.
    if num_parts > max(recorded.num_devices // recorded.num_processes, num_cores()):
        return (
            f"recorded on {recorded}, replayed in a process with {num_parts}, more than cores, which divides the work "
            "of a device in another way: the losses may differ by rounding. Replay these steps alone (--from, --to)"
        )
    where = f"recorded and replayed on {recorded}"
    if recorded.num_processes > 1:
        where = f"recorded on {recorded}, replayed on as many in one process"
    if differences:
        return f"{where}, but not alike: the losses may differ by rounding, because of {listed(differences)}"
    condition = "" if differences is not None else " on the same processor and cores, which the record lacks"
    return f"{where}: the same bits are expected{condition}"
