"""Compilation of a run's program for an NVIDIA card, without a card.

`python -m tests.card_compilation FOLDER SETTINGS NUMBER [--evaluate]` prints the optimised program for NUMBER cards.

XLA's compiler for NVIDIA cards is in jax's CUDA plugin; it needs a card's description, but neither a card nor a driver.
It runs in a separate process, because jax looks for a card at import if the plugin is on its path.

FOLDER holds the plugin; SETTINGS are those of `TrainConfig`, as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

H100 = """
gpu_device_info {
  name: "NVIDIA H100 80GB HBM3" model_str: "sm_9.0a" device_vendor: "NVIDIA Corporation"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  platform_version: "Compute Capability 9.0a" driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.12.0" cub_version: "3.1.2"
  core_count: 132 fpus_per_core: 128 threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84942979072
  device_address_bits: 64 pcie_bandwidth: 34359738368 ecc_enabled: true collective_memory_granularity: 2097152
}
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 12 patch: 0 }
"""


class TracedError(Exception):
    """Stops a launch before its program is compiled."""


def traced_program(settings: dict[str, Any], cards: Any = None, *, is_evaluated: bool = True) -> tuple[Any, Any]:
    """Return the run's whole program as a jitted function, and its arguments; for several cards if they are given.

    For several cards, the crossings are those of one, whose calls XLA compiles without a card; only what the devices
    compute together is that of a run.
    """
    import jax
    import numpy as np

    from engine import TrainConfig, train
    from engine.crossing.choice import choose_transport
    from engine.crossing.devices import Team, choose_team
    from tests.fake_xla import fake_transport

    found: list[Any] = []
    transport, fake = fake_transport()

    def trace_ahead(function: Any, *arguments: Any, donate: Any = ()) -> NoReturn:
        found.append((jax.jit(function, donate_argnums=donate), arguments))
        raise TracedError

    def on_fake_card(name: Any, platform: str, num_devices: int = 1) -> Any:
        return transport if name == "cuda" else choose_transport(name, platform, num_devices)

    def blank(count: int) -> Any:
        size = settings["image_size"]
        return np.zeros((count, size, size), np.uint32), np.zeros(count, np.int32)

    config = TrainConfig(transport="cuda", **({"num_classes": 10} | settings))
    with (
        mock.patch("engine.run.launch.trace_ahead", trace_ahead),
        mock.patch("engine.run.host_side.choose_transport", on_fake_card),
        mock.patch("engine.run.host_side.choose_team", choose_team if cards is None else lambda _: Team(cards, cards)),
    ):
        try:
            evaluation = blank(config.batch + 3) if is_evaluated else None
            train(config, batches=lambda _: blank(config.batch), evaluation=evaluation)
        except TracedError:
            assert fake.violations == []
            assert fake.num_device_blocks == 0
            return found[0]
    raise AssertionError("the run did not reach its program")


def main(folder: str, settings: dict[str, Any], number: int, *, is_evaluated: bool) -> None:
    """Print the program as XLA optimises it for the cards."""
    sys.path.insert(0, folder)
    import jax
    from jax._src import compiler
    from jax.experimental import topologies

    from engine.replicas import AXIS
    from engine.run.compilation import compiler_options

    cards = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=H100, topology=f"1x1x{number}"
    ).devices
    function, arguments = traced_program(settings, list(cards) if number > 1 else None, is_evaluated=is_evaluated)
    place: Any = jax.sharding.SingleDeviceSharding(cards[0])
    if number > 1:
        place = jax.sharding.NamedSharding(jax.sharding.Mesh(list(cards), AXIS), jax.sharding.PartitionSpec())
    placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), arguments)
    lowered = function.lower(*placed)
    compile_whole = compiler.backend_compile_and_load

    def without_callbacks(backend: Any, module: Any, devices: Any, options: Any, _callbacks: Any) -> Any:
        """Compile without host callbacks, which XLA refuses if there is no card."""
        return compile_whole(backend, module, devices, options, ())

    options: dict[str, Any] = compiler_options(lowered, "gpu", deterministic=settings.get("deterministic", True))
    with mock.patch.object(compiler, "backend_compile_and_load", without_callbacks):
        print(lowered.compile(compiler_options=options).as_text())


if __name__ == "__main__":
    main(str(Path(sys.argv[1])), json.loads(sys.argv[2]), int(sys.argv[3]), is_evaluated="--evaluate" in sys.argv[4:])
