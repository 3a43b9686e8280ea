"""What the fork server imports, so that no command does: all that is public, and what commands import late."""

import gc
from importlib import import_module
from importlib.metadata import distribution

import loopfeed
from scripts.torture_campaign.commands import OWN_PROGRAMS, load_command

for _place in distribution("loopfeed").entry_points.select(group="console_scripts"):
    _place.load()
for _name in loopfeed.__all__:
    getattr(loopfeed, _name)
for _name in OWN_PROGRAMS:
    load_command(_name).load()
for _name in ("orbax.checkpoint", "safetensors.numpy", "loopfeed.engine.records.orbax_store"):
    import_module(_name)
# Otherwise each command's last collections visit all this, and the kernel copies it: 0.4 s of processor of 0.6 s.
gc.freeze()
