"""The NVIDIA GPUs for which a run can be planned, as XLA's compiler describes them. Needs no jax.

Memory sizes and the numbers that XLA's choices depend on are those of XLA's own descriptions of these GPUs,
https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs. The rates of the links to the host are
those of NVIDIA's data sheets, which give the sum of both directions: PCIe 4.0, 64 GB/s, for the A100
(https://www.nvidia.com/en-us/data-center/a100/), and PCIe 5.0, 128 GB/s, for the H100 and the H200
(https://www.nvidia.com/en-us/data-center/h100/, …/h200/).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from loopfeed.preprocess.quantities import parse_float

_TEMPLATE = """
gpu_device_info {{
  name: "{name}" model_str: "sm_{major}.0{feature}" device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: {major} feature_extension: {extension} }}
  platform_version: "Compute Capability {major}.0{feature}" driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.12.0" cub_version: "3.1.2"
  core_count: {cores} fpus_per_core: {units_per_core} threads_per_warp: 32
  threads_per_block_limit: 1024 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {shared_bytes} shared_memory_per_block_optin: {optin_bytes}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bytes_per_s} l2_cache_size: {cache_bytes} clock_rate_ghz: {clock_ghz}
  device_memory_size: {memory_bytes} device_address_bits: 64 pcie_bandwidth: 34359738368 ecc_enabled: true
  collective_memory_granularity: 2097152
}}
platform_name: "CUDA"
device_description_str: "{name}"
dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
"""

# What part of a GPU's memory jax takes, and the variables that change it:
# https://docs.jax.dev/en/latest/gpu_memory_allocation.html
_SHARE = 0.75
SHARE_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""The environment variable with the part of a GPU's memory that jax takes."""


@dataclass(frozen=True)
class Card:
    """A kind of NVIDIA GPU.

    Attributes:
        name: the name that the driver reports.
        memory_bytes, bytes_per_s: size and bandwidth of its memory.
        major: the major number of its compute capability; the minor one is 0.
        cores, units_per_core, clock_ghz: number of multiprocessors, float32 units of each, and their clock.
        shared_bytes, optin_bytes: shared memory of a multiprocessor, and of the largest block.
        cache_bytes: size of its second-level cache.
        link_bytes_per_s: peak rate of its link to the host, in one direction.
    """

    name: str
    memory_bytes: int
    bytes_per_s: int
    major: int
    cores: int
    units_per_core: int
    clock_ghz: float
    shared_bytes: int
    optin_bytes: int
    cache_bytes: int
    link_bytes_per_s: int

    @property
    def description(self) -> str:
        """The text that XLA's compiler needs instead of the GPU."""
        has_accelerated = self.major >= 9
        return _TEMPLATE.format(
            **vars(self),
            feature="a" if has_accelerated else "",
            extension="ACCELERATED_FEATURES" if has_accelerated else "NONE",
        )

    @property
    def usable_bytes(self) -> int:
        """The memory that jax takes for programs and arrays, in bytes."""
        return int(self.memory_bytes * memory_share())


def memory_share() -> float:
    """Return the part of a GPU's memory that jax takes, 0 … 1.

    Raises:
        ValueError: the environment variable is not such a number.
    """
    text = os.environ.get(SHARE_VARIABLE, "")
    if not text:
        return _SHARE
    try:
        share = parse_float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(f"{SHARE_VARIABLE} must be a number above 0 and at most 1, got {text!r}: change or unset it")
    return share


# Cores, units, clock, shared memory and cache of each generation are the same, whatever the size of the memory.
_AMPERE = (8, 108, 64, 1.41, 167_936, 166_912, 41_943_040, 32_000_000_000)
_HOPPER = (9, 132, 128, 1.98, 233_472, 232_448, 52_428_800, 64_000_000_000)
CARDS: Mapping[str, Card] = {
    "a100-40gb": Card("NVIDIA A100-SXM4-40GB", 42_331_013_120, 1_555_200_000_000, *_AMPERE),
    "a100": Card("NVIDIA A100-SXM4-80GB", 85_100_068_864, 2_039_040_000_000, *_AMPERE),
    "h100": Card("NVIDIA H100 80GB HBM3", 84_942_979_072, 3_352_320_000_000, *_HOPPER),
    "h200": Card("NVIDIA H200 141GB HBM3e", 151_397_597_184, 4_800_000_000_000, *_HOPPER),
}
"""The kinds of GPU by their names in `--target`."""
