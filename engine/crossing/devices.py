"""Choice of the devices that a run trains on."""

import re

import jax

from engine.crossing.choice import this_platform
from engine.settings import SettingError

_SPEC = re.compile(r"(?:(?P<platform>[a-z]+):)?(?P<count>[1-9][0-9]*)")


def choose_devices(asked: str | None) -> list[jax.Device]:
    """Return the local devices that the setting `devices` asks for; None asks for all.

    "4" asks for the first four, "cpu:4" for four parts of the processor, each a device of its own.

    Raises:
        SettingError: the text has another form, or there are fewer devices.
    """
    if asked is None:
        return [_default_device()] if _is_chosen() else jax.local_devices()
    found = _SPEC.fullmatch(asked)
    if found is None:
        raise SettingError("devices", "{setting} must be a number or cpu:NUMBER, got {asked!r}", asked=asked)
    platform, count = found["platform"], int(found["count"])
    if platform == "cpu":
        _split_processor(count)
    if platform is not None and platform != this_platform():
        raise SettingError(
            "devices",
            "{setting} asks for devices of {platform}, but jax runs on {here}: leave out the platform, or choose "
            "another with JAX_PLATFORMS",
            platform=platform,
            here=this_platform(),
        )
    devices = jax.local_devices()
    if len(devices) < count:
        raise SettingError(
            "devices",
            "{setting} asks for {count} devices, but jax has {has} here: ask for fewer"
            + (", or for cpu:{count}" if this_platform() == "cpu" and platform is None else ""),
            count=count,
            has=len(devices),
        )
    return devices[:count]


def _split_processor(count: int) -> None:
    """Have jax make `count` devices of the processor, which it can do only before it is first used."""
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        if len(jax.local_devices()) < count:
            raise SettingError(
                "devices",
                "{setting} cpu:{count} must be given before jax is first used in a process: set the environment "
                "variable JAX_NUM_CPU_DEVICES={count}",
                count=count,
            ) from None


def _is_chosen() -> bool:
    return isinstance(jax.config.jax_default_device, jax.Device)


def _default_device() -> jax.Device:
    chosen = jax.config.jax_default_device
    assert isinstance(chosen, jax.Device)
    return chosen
